#pragma once
/// Not part of the interface. Products of keys in 8 bits, for machines that have an instruction for them. Long rows
/// need it: without, an R-KV event over 7,000 to 8,500 keys of a real model takes 1.3 to 1.45 times as long, and one
/// whose keys resemble nothing twice as long; up to 2,000 keys of a real model it makes no difference
/// (docs/performance.md).

#include <cstdint>

namespace kvkeep::cpu {

/// Keys in a coarse panel, and keys that are compared with it at a time.
inline constexpr std::int64_t kCoarseWidth = 32, kCoarseRows = 6;

/// Keys side by side: key j is about step[j] * q, q in [-127, 127].
struct CoarsePanel {
  std::int64_t words;      ///< 8-bit elements of a key / 4
  const std::uint32_t* q;  ///< [words, kCoarseWidth] four elements each
  const std::int32_t*
      start;           ///< [kCoarseWidth] -128 * sum of q: undoes the 128 that is added to the elements of the rows
  const float* step;   ///< [kCoarseWidth]
  const float* reach;  ///< [kCoarseWidth] 1 + length of the part of a unit key that the 8 bits lose
};

/// True if the machine multiplies and adds four 8-bit numbers per lane in one instruction (AVX-512 VNNI).
bool has_coarse_products();

/// False if no row i and panel key j have step_i * step_j * (q_i . q_j) + reach_i * reach_j above `bound`, except for
/// keys j whose bit is set in ignore[i]. rows[i]: q + 128, 4 * words bytes. Requires has_coarse_products(). Cost: a
/// quarter of the same products in fp32.
bool coarse_may_hit(const std::uint8_t* const* rows, const float* step, const float* reach, const std::uint32_t* ignore,
                    const CoarsePanel& panel, float bound);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/coarse_lanes-inl.h"
#endif
