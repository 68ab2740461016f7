// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Vnorm: values of large norm stay.

#include <cmath>

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct VnormOptions {
  bool squared = false;  ///< the square of the norm

  void describe(Fields& f) {
    f.flag("squared", squared, "rank by the square of the norm, which counts where rows share scores");
  }

  /// g[t] = |v_t|, fp32.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    for (std::int32_t t = team.thread(); t < row.length(); t += team.size()) {
      const float sum = sum_of_squares(row.value(t), row.value_dim());
      g[t] = squared ? sum : std::sqrt(sum);
    }
  }
};

class Vnorm final : public RowScorer<Vnorm, VnormOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "vnorm", .what = "values of large norm", .source = "none"};
  using RowScorer::RowScorer;

  /// Cost: one pass over the values.
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .values = true}; }
};

}  // namespace kvkeep
