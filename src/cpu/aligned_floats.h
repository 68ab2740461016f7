#pragma once
/// Memory that vectors are read from and written to.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace kvkeep::cpu {

inline constexpr std::align_val_t kLine{64};

struct FreeFloats {
  void operator()(float* floats) const { ::operator delete(floats, kLine); }
};

/// Floats that begin with a line of the cache, so that vectors of the machine do not straddle two.
using AlignedFloats = std::unique_ptr<float[], FreeFloats>;

/// Not cleared: pages that nobody writes to are never touched.
inline AlignedFloats aligned_floats(std::int64_t count) { return AlignedFloats(static_cast<float*>(::operator new(static_cast<std::size_t>(count) * sizeof(float), kLine))); }

}  // namespace kvkeep::cpu
