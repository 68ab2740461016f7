#pragma once
/// Vectorised inner loops of TriAttention. Lanes run along the rotary pairs: a key's first and second components, and their moduli, each padded with zeros to whole
/// vectors. Every product is one chain per lane in ascending order and one fold of the lanes, so equal keys get equal bits wherever they lie.

#include <cstdint>

#include "attention_lanes.h"
#include "kvkeep/core/rope.h"

namespace kvkeep::cpu {

/// Rotary pairs rounded up to whole vectors of the machine.
std::int64_t padded_pairs(std::int64_t pairs);

/// Keys that are spread at a time.
inline constexpr std::int64_t kTriKeys = 16;

/// Floats that tri_scores() works in: the spread keys, and four results of every query head.
constexpr std::int64_t tri_scratch(std::int64_t group, std::int64_t padded) { return kTriKeys * 3 * padded + 4 * group; }

/// Columns that the keys of a row are multiplied with. Fp = padded_pairs(F).
struct TriColumns {
  std::int64_t group = 0;        ///< G query heads
  std::int64_t offsets = 1;      ///< columns per query head
  const float* trig = nullptr;   ///< [G, offsets, 2, Fp]: real part, imaginary part
  const float* norm = nullptr;   ///< [G, Fp]
};

/// raw[g * length + t] = max over offsets of (key t . trig[g][offset]) + moduli of key t . norm[g]. NaN where one of them is.
/// `scratch`: tri_scratch(G, Fp) floats. Cost: one pass over the keys.
void tri_scores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns, float* scratch, float* raw);

/// Sum and number of the finite values of x[0, n), and with `about` the sum of their squared distances from it.
struct Moments {
  double sum = 0;
  std::int64_t count = 0;
};
Moments finite_sum(const float* x, std::int64_t n);
double finite_squares(const float* x, std::int64_t n, double about);

/// out[t] = max or sum over g of (raw[g * length + t] - shift[g]) * factor[g]; NaN where one of them is.
void tri_combine(const float* raw, std::int64_t group, std::int64_t length, const float* shift, const float* factor, bool take_max, float* out);

}  // namespace kvkeep::cpu
