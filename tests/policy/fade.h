// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The scorer of docs/start/extending.md that remembers.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep::testing {

struct FadeOptions {
  double decay = 0.5;

  void describe(kvkeep::Fields& f) { f.real("decay", decay, kvkeep::Range::below(0, 1), "weight of the last score"); }

  /// g[t] = |v_t|^2 + decay * its last score, fp32; nothing of a token that came since.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    for (std::int32_t t = team.thread(); t < row.length(); t += team.size())
      g[t] = kvkeep::sum_of_squares(row.value(t), row.value_dim()) + static_cast<float>(decay) * row.tally(t);
  }
};

class Fade final : public kvkeep::RowScorer<Fade, FadeOptions> {
 public:
  static constexpr kvkeep::ScorerTraits traits{
      .name = "fade", .what = "large values, now and before", .source = "none"};
  using RowScorer::RowScorer;

  [[nodiscard]] kvkeep::Needs needs() const override { return {.values = true}; }
  [[nodiscard]] bool accumulates() const override { return true; }  // scores come back as tally()
};

}  // namespace kvkeep::testing
