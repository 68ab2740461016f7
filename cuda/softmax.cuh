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

/// What kTogether neighbouring lanes of a warp have seen, the same for each. kTogether: a power of two; the whole warp
/// calls.
template <int kTogether>
__device__ inline Running over_lanes(Running seen) {
#pragma unroll
  for (int step = kTogether / 2; step > 0; step /= 2) {
    Running other;
    other.top = __shfl_xor_sync(0xFFFFFFFFU, seen.top, step);
    other.sum = __shfl_xor_sync(0xFFFFFFFFU, seen.sum, step);
    seen.add(other);
  }
  return seen;
}

}  // namespace kvkeep::cuda
