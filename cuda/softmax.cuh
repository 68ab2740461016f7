// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Softmax in pieces: sums of exponentials that are combined later.

#include <limits>

#include "platform.cuh"

namespace kvkeep::cuda {

/// Softmax of a row of the product while it grows.
struct Running {
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();
  float top = kNothing, sum = 0;

  __device__ void add(float x) {
    const float e = __expf(-fabsf(x - top));
    sum = x > top ? fmaf(sum, e, 1.0F) : sum + e;
    top = fmaxf(top, x);
  }
  __device__ void add(Running other) {
    const float most = fmaxf(top, other.top);
    if (most == kNothing) return;
    sum = sum * __expf(top - most) + other.sum * __expf(other.top - most);
    top = most;
  }
};

/// The same, and two sums over some of the exponentials: those of older slots, each once, and as often as a slot is in
/// the pool of one of them.
struct RunningWorst {
  Running all;
  float older = 0, pooled = 0;

  /// pools: 0 of a slot that is not older.
  __device__ void add(float x, float pools) {
    const bool more = x > all.top;
    const float e = __expf(-fabsf(x - all.top)), before = more ? e : 1.0F, own = more ? 1.0F : e;
    older = fmaf(older, before, pools > 0 ? own : 0.0F);
    pooled = fmaf(pooled, before, pools * own);
    all.add(x);
  }
  __device__ void add(const RunningWorst& other) {
    const float most = fmaxf(all.top, other.all.top);
    if (most == Running::kNothing) return;
    const float own = __expf(all.top - most), its = __expf(other.all.top - most);
    older = older * own + other.older * its;
    pooled = pooled * own + other.pooled * its;
    all.add(other.all);
  }
};

__device__ inline Running of_lane(Running seen, int step) {
  return {__shfl_xor_sync(0xFFFFFFFFU, seen.top, step), __shfl_xor_sync(0xFFFFFFFFU, seen.sum, step)};
}
__device__ inline RunningWorst of_lane(const RunningWorst& seen, int step) {
  return {of_lane(seen.all, step), __shfl_xor_sync(0xFFFFFFFFU, seen.older, step),
          __shfl_xor_sync(0xFFFFFFFFU, seen.pooled, step)};
}

/// What kTogether neighbouring lanes of a warp have seen, the same for each. kTogether: a power of two; the whole warp
/// calls.
template <int kTogether, class Seen>
__device__ inline Seen over_lanes(Seen seen) {
#pragma unroll
  for (int step = kTogether / 2; step > 0; step /= 2) seen.add(of_lane(seen, step));
  return seen;
}

}  // namespace kvkeep::cuda
