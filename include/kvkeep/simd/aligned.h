// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Memory that begins at a cache line: rows of whole lines then cost one line per load.
/// Products of a matrix unit take three times as long when tiles straddle lines.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace kvkeep::cpu {

inline constexpr std::align_val_t kLine{64};

template <class T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <class Other>
  explicit(false) LineAllocator(const LineAllocator<Other>&) {}
  [[nodiscard]] T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* at, std::size_t) { ::operator delete(at, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

struct FreeFloats {
  void operator()(float* floats) const { ::operator delete(floats, kLine); }
};

/// Floats that begin at a cache line too, for arenas.
using AlignedFloats = std::unique_ptr<float[], FreeFloats>;

/// Not cleared: pages that nobody writes to are never touched.
inline AlignedFloats aligned_floats(std::int64_t count) {
  return AlignedFloats(static_cast<float*>(::operator new(static_cast<std::size_t>(count) * sizeof(float), kLine)));
}

}  // namespace kvkeep::cpu
