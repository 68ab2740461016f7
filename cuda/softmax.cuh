#pragma once
/// Softmax in pieces: sums of exponentials that are put together later.

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

}  // namespace kvkeep::cuda
