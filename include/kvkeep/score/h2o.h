// SPDX-License-Identifier: Apache-2.0
#pragma once
/// H2O: heavy hitters stay: the slots with the most attention, summed over all queries so far. Source: "H2O:
/// Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al.). Differs: the sum is
/// updated at events, from the newest `window` queries, instead of at every step; mean over the query heads of a KV
/// head (published: no groups); per sequence (published: summed over the batch); fp32.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct H2OOptions {
  std::int32_t window = 512;  ///< how many of the newest queries an event can add

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries,
              "newest queries that an event can add to the sum; older ones are not counted");
  }

  [[nodiscard]] WindowReading reading() const { return {WindowReading::Kind::sum, window}; }
  static constexpr bool kInPlace = true;

  /// g[t] = tally[t] (0 for slots that came after the last event) + sum over the queries that came after it, at most
  /// the newest `window`, of the mean over the group of softmax(scale * q.k) over the slots that the query sees, its
  /// own included. Between two events a cache only grows, so these are the probabilities of the steps themselves.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow, const float*, float* g, Team team) const {
    row.each_slot(team, [&](std::int32_t t) { g[t] += row.tally(t); });
  }
};

/// Rows that are not due are updated too. Cost: window attention with up to `window` queries.
class H2O final : public WindowScorer<H2O, H2OOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "h2o",
      .what = "sum of the attention of every query so far",
      .source = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
      .probability = true,
      .ams_coverage = 1};
  using WindowScorer::WindowScorer;

  [[nodiscard]] bool accumulates() const override { return true; }
};

}  // namespace kvkeep
