// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What opening a folded span costs, how spans share attention, and what a router makes of a product: the arithmetic
/// that the CPU and kernels share.

#include <cmath>
#include <cstdint>

#include "kvkeep/core/strict_math.h"
#include "kvkeep/memory/factors.h"

namespace kvkeep {

/// What opening a span takes of a budget: the numbers of its factors, of which keys and values of one token are an
/// entry, or with Reading::per_head its tokens less the coarse entry.
struct OpeningCost {
  std::int64_t dim = 0;
  bool per_head = false;

  /// Of a span of `length` tokens; whole, so that sums do not depend on their order.
  [[nodiscard]] KVKEEP_HD std::int64_t numbers(const SpanFactors& keys, const SpanFactors& values,
                                               std::int64_t length) const {
    return per_head ? length - 1 : keys.numbers(length, dim) + values.numbers(length, dim);
  }
  /// Numbers of an entry.
  [[nodiscard]] KVKEEP_HD double unit() const { return per_head ? 1.0 : 2.0 * static_cast<double>(dim); }
  [[nodiscard]] KVKEEP_HD double entries(const SpanFactors& keys, const SpanFactors& values,
                                         std::int64_t length) const {
    return static_cast<double>(numbers(keys, values, length)) / unit();
  }
};

/// The factor that turns exp(logit - top) of spans into shares of all attention. `sum`: of these numbers; `dense`: the
/// log of the sum of exponentials of everything else.
[[nodiscard]] KVKEEP_HD inline float share_factor(float top, double sum, float dense) {
  const double most = top > dense ? top : dense;
  return static_cast<float>(std::exp(top - most) / (std::exp(dense - most) + product(sum, std::exp(top - most))));
}

/// Relevance by a learned router. `dot`: (W q) . (W k); `norm`: 1 / |W k| (Router::norms), `inner`: d'.
[[nodiscard]] KVKEEP_HD inline float router_relevance(float dot, float norm, std::int32_t inner, float log_length) {
  const double direction = static_cast<double>(dot) * static_cast<double>(norm) / std::sqrt(static_cast<double>(inner));
  return static_cast<float>(1 / (1 + std::exp(-(direction + static_cast<double>(log_length)))));
}

}  // namespace kvkeep
