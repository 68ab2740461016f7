// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised inner loops of TriAttention. Lanes run along the keys of a block, which are
/// transposed first: every product is one chain per key in ascending order of rotary pairs, so equal keys get equal
/// bits wherever they are.

#include <cstdint>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Scratch floats of tri_scores(), starting at a multiple of 64 bytes: two vectors of keys with the moduli of their
/// pairs, and a sum per query head.
std::int64_t tri_scratch(std::int64_t group, std::int64_t pairs);

/// Columns that the keys of a row are multiplied with; those that are taken together are side by side.
struct TriColumns {
  std::int64_t group = 0;       ///< G query heads
  std::int64_t offsets = 1;     ///< columns per query head
  const float* trig = nullptr;  ///< one offset: [F, 2, G], real part, imaginary part; more: [G, F, 2, offsets]
  const float* norm = nullptr;  ///< [F, G]
};

/// raw[g * length + t] = max over offsets of (key t . trig[g][offset]) + moduli of key t . norm[g]. NaN if one of them
/// is. `scratch`: tri_scratch(G, F) floats. Cost: one pass over the keys.
void tri_scores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns, float* scratch,
                float* raw);

/// Sum and number of the finite values of x[0, n), and with `about` the sum of their squared distances from it.
struct Moments {
  double sum = 0;
  std::int64_t count = 0;
};
Moments finite_sum(const float* x, std::int64_t n);
double finite_squares(const float* x, std::int64_t n, double about);

/// out[t] = max or sum over g of (raw[g * length + t] - shift[g]) * factor[g]; NaN if one of them is.
void tri_combine(const float* raw, std::int64_t group, std::int64_t length, const float* shift, const float* factor,
                 bool take_max, float* out);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/triattention_lanes-inl.h"
#endif
