#pragma once
/// Vectorised inner loops of softmax reductions.

#include <cstdint>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cpu {

/// In place: x[t] = exp(x[t] - max x) for t < n. Returns the sum. n >= 1; all x finite or -inf.
float exp_shifted(float* x, std::int64_t n);

/// sum[t] += a * x[t] + b * y[t] for t < n; y may be null.
void add_scaled(float* sum, const float* x, float a, const float* y, float b, std::int64_t n);

/// to[i] = from[i] as fp32 for i < n. dtype f32, f16 or bf16.
void widen(const void* from, ScalarType dtype, std::int64_t n, float* to);

}  // namespace kvkeep::cpu
