// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised search for keys that resemble each other.

#include <cstdint>

#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Keys that are compared with one key at a time: two machine vectors, at most 32.
std::int64_t similar_width();

/// Buffers of a search over n keys.
struct SimilarWork {
  std::uint8_t* matched;        ///< [n] result: 1 if the key has a partner
  double* spared;               ///< [n] result: sum of the cosines with the keys whose partner this one is
  std::int32_t* open;           ///< [n]
  std::int32_t* late;           ///< [n]
  std::int32_t* late_below;     ///< [n]
  float* panel;                 ///< [dim, similar_width()]
  float* widened;               ///< [6, dim]
  std::uint8_t* coarse;         ///< [n, coarse_dim(dim)] keys in 8 bits
  float* step;                  ///< [n] size of one unit of those 8 bits, for a unit key
  float* reach;                 ///< [n] 1 + length of what they lose
  std::uint32_t* coarse_panel;  ///< [coarse_dim(dim) / 4, similar_width()]
};

/// Bytes of one key in 8 bits.
inline std::int64_t coarse_dim(std::int64_t dim) { return (dim + 3) / 4 * 4; }

/// The partner of key i in [0, n) is the largest j != i with cosine(i, j) = (k_i . k_j) * (inverse_i * inverse_j) >
/// threshold, threshold >= 0. Every product is one chain of multiply-adds over the dimensions in ascending order, so
/// the order of the two keys does not matter. While nothing resembles anything, and if the machine has an instruction
/// for it, keys are first compared in 8 bits, with a bound on the error: this changes the cost, never the outcome.
/// Cost: ends early for keys whose partner is among the newest; n^2 / 2 products of `dim` if no key has a partner.
void find_similar(const Keys& keys, std::int64_t n, const float* inverse, float threshold, const SimilarWork& work);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/similar_lanes-inl.h"
#endif
