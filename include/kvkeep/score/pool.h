// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Pooling over adjacent slots. They are neighbours in time, because slots ascend by position.

#include <cmath>
#include <cstdint>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// Slot `t` of pool_average().
KVKEEP_HD inline float pooled_average(const float* x, std::int32_t n, std::int32_t kernel, std::int32_t t) {
  const std::int32_t reach = kernel / 2;
  const std::int32_t from = t - reach > 0 ? t - reach : 0;
  const std::int32_t to = t + reach + 1 < n ? t + reach + 1 : n;
  float sum = 0;
  for (std::int32_t i = from; i < to; ++i) sum += x[i];
  return sum / static_cast<float>(kernel);
}

/// 1-D average over adjacent slots, stride 1, zeros outside [0, n), always divided by `kernel`, so the edges are
/// damped. `kernel` is odd; 1 copies. `out` must not overlap `x`. Order: ascending slots, fp32.
KVKEEP_HD inline void pool_average(const float* x, std::int32_t n, std::int32_t kernel, float* out) {
  for (std::int32_t t = 0; t < n; ++t) out[t] = pooled_average(x, n, kernel, t);
}

/// Slot `t` of pool_max().
KVKEEP_HD inline float pooled_max(const float* x, std::int32_t n, std::int32_t kernel, std::int32_t t) {
  const std::int32_t reach = kernel > 1 ? kernel / 2 : 0;
  const std::int32_t from = t - reach > 0 ? t - reach : 0;
  const std::int32_t to = t + reach + 1 < n ? t + reach + 1 : n;
  float best = -INFINITY;
  for (std::int32_t i = from; i < to; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

/// 1-D maximum over adjacent slots, stride 1, nothing outside [0, n), so the edges are not damped. Skips NaN; -inf if
/// there is nothing else. `kernel` is odd; 1 or less copies. `out` must not overlap `x`.
KVKEEP_HD inline void pool_max(const float* x, std::int32_t n, std::int32_t kernel, float* out) {
  for (std::int32_t t = 0; t < n; ++t) out[t] = pooled_max(x, n, kernel, t);
}

}  // namespace kvkeep
