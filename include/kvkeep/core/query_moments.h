#pragma once
/// Running mean and second moment of queries: the sums that the CPU and kernels must form alike, and where they lie.
/// Plain structs that kernels take unchanged; no LibTorch in here.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/query_arrival.h"
#include "kvkeep/core/rope.h"

namespace kvkeep {

inline constexpr std::int32_t kMomentBlock = 32;     ///< tokens that enter the moments together
inline constexpr std::int32_t kMomentRollback = 32;  ///< newest tokens that can always be taken back
inline constexpr std::int32_t kMomentRing = kMomentBlock + kMomentRollback;  ///< newest tokens that are held, at most

/// How moments of `theirs` queries are weighed when they join those of `mine`. Source: Chan, Golub and LeVeque,
/// Updating formulae and a pairwise algorithm for computing sample variances.
struct MomentWeights {
  double spread;  ///< of the product of two distances between the means
  double shift;   ///< of the distance, towards their mean
};
KVKEEP_HD inline MomentWeights moment_weights(std::int64_t mine, std::int64_t theirs) {
  const auto a = static_cast<double>(mine), b = static_cast<double>(theirs), all = a + b;
  return {a * b / all, b / all};
}

/// The second moment of components i and j of both, from those of either and the distances of their means.
KVKEEP_HD inline double joined_moment(double mine, double theirs, double apart_i, double apart_j,
                                      const MomentWeights& weights) {
  return mine + (theirs + product(apart_i * weights.spread, apart_j));
}

/// Centred queries are divided by 2^n before they are multiplied, so that their squares stay inside fp32. `largest`: of
/// their magnitudes.
KVKEEP_HD inline std::int32_t moment_exponent(float largest) {
  if (largest == 0 || !(largest < INFINITY) || (largest > 0x1p-20F && largest < 0x1p40F)) return 0;
  int exponent = 0;
  static_cast<void>(frexp(static_cast<double>(largest), &exponent));
  return exponent;
}

/// The next factor on the way to 2^left, small enough for a float; `left` becomes what is left after it.
KVKEEP_HD inline float moment_step(std::int32_t& left) {
  const std::int32_t step = left < -100 ? -100 : left > 100 ? 100 : left;
  left -= step;
  return static_cast<float>(ldexp(1.0, step));
}

/// Moments of the queries of one layer of one sequence, and its newest queries, which are not in them yet.
struct MomentsView {
  double* mean = nullptr;    ///< f64 [Hq, D]; unset while `count` is 0
  double* second = nullptr;  ///< f64 [Hq, D (D + 1) / 2] sum of (q - mean)(q - mean)^T, lower triangle row by row
  float* newest = nullptr;   ///< f32 [kMomentRing, Hq, D] before RoPE
  std::int64_t count = 0;    ///< queries in the moments
  std::int32_t begin = 0;    ///< place of the oldest of the newest, a multiple of kMomentBlock
  std::int32_t pending = 0;  ///< how many of the newest there are
};

/// New queries of one layer of one sequence, at consecutive positions, all of which count.
struct MomentsArrival {
  MomentsView before;      ///< what they meet
  std::int32_t first = 0;  ///< its first token among those of the step
  std::int32_t tokens = 0;
  std::int32_t position = 0;  ///< logical, of the first token
};

/// Blocks that enter the moments when `tokens` more come after `pending`.
KVKEEP_HD inline std::int64_t blocks_taken_in(std::int32_t pending, std::int32_t tokens) {
  const std::int64_t beyond = std::int64_t{pending} + tokens - kMomentRing;
  return beyond <= 0 ? 0 : (beyond + kMomentBlock - 1) / kMomentBlock;
}

/// Where the queries of a step are, in one layer, and how they are turned back.
struct MomentsLayout {
  QueryLayout queries;
  Dtype dtype = Dtype::f32;  ///< f32, f16 or bf16
  std::int32_t dim = 0;      ///< D
  RopeView rope = {};        ///< of the layer, in the machine's memory; no pairs: queries come before RoPE
};

}  // namespace kvkeep
