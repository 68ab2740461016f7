// SPDX-License-Identifier: Apache-2.0
#pragma once
/// DefensiveKV: the attention that a slot got in the worst case, not on average. Source: "Taming the Fragility of KV
/// Cache Eviction in LLM Inference" (Feng et al., arXiv 2510.13334) and its code: worst-case risk estimation, then a
/// floor at the row's mean. Differs: each query at its own logical position; the window's slots are protected as a set;
/// fp32. What comes after the floor is up to the allocator, and the published DefensiveKV is nearest to
/// `criticalkv-defensive,allocator.heads=adaptive`. That differs from it: the score alone decides half of the budget
/// (`first_stage`), not the slots that hold 90 % of the window's mean attention; after that scores are weighed by the
/// norm of W_o V, not by its share among the layer's heads. Its layer-wise form has no allocator here.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct DefensiveOptions {
  std::int32_t window = 32;  ///< newest queries
  std::int32_t pool = 5;     ///< slots averaged over, odd; 1: no pooling

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots always stay");
    f.pool(pool, "slots averaged over, odd; 1: none");
  }

  [[nodiscard]] WindowReading reading() const {
    return {WindowReading::Kind::history, window, {.window = WindowReduce::worst, .pool = pool}};
  }

  /// g[t] = max(worst[t], mean of worst) for slots older than the newest min(window, seen, length - 1, budget) queries,
  /// 0 for the rest.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow asked, const float* worst, float* g, Team team) const {
    double sum = 0;
    row.each_slot(team, [&](std::int32_t t) { sum += t < asked.history ? static_cast<double>(worst[t]) : 0.0; });
    sum = team.sum_in_order(sum);
    const auto mean = static_cast<float>(asked.history > 0 ? sum / asked.history : 0);
    row.each_slot(team, [&](std::int32_t t) { g[t] = t >= asked.history ? 0.0F : worst[t] < mean ? mean : worst[t]; });
  }
};

/// Cost: history_attention over whole rows.
class Defensive final : public WindowScorer<Defensive, DefensiveOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "defensive",
      .what = "the most attention that any of the newest `window` queries pays, pooled over neighbours",
      .source = "Feng et al., Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV)",
      .probability = true};
  using WindowScorer::WindowScorer;

  [[nodiscard]] std::int32_t keeps_newest() const override { return options().window; }
};

}  // namespace kvkeep
