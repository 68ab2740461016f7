#pragma once
/// DefensiveKV: the attention that a slot got in the worst case, not on average. Source: "Taming the Fragility of KV
/// Cache Eviction in LLM Inference" (Feng et al., arXiv 2510.13334) and its code: worst-case risk estimation, then a
/// floor at the row's mean. Differs: each query at its own logical position; the window's slots are protected as a set;
/// fp32. What comes after the floor is up to the allocator, and the published DefensiveKV is nearest to
/// `criticalkv-defensive,allocator.heads=adaptive`. That differs from it: the score alone decides half of the budget
/// (`first_stage`), not the slots that hold 90 % of the window's mean attention; after that scores are weighed by the
/// norm of W_o V, not by its share among the layer's heads. Its layer-wise form has no allocator here.

#include <algorithm>
#include <numeric>

#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

struct DefensiveOptions {
  std::int32_t window = 32;  ///< newest queries
  std::int32_t pool = 5;     ///< slots averaged over, odd; 1: no pooling

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots always stay");
    f.pool(pool, "slots averaged over, odd; 1: none");
  }
};

class Defensive final : public Scorer {
 public:
  using Options = DefensiveOptions;
  static constexpr ScorerTraits traits{
      .name = "defensive",
      .what = "the most attention that any of the newest `window` queries pays, pooled over neighbours",
      .source = "Feng et al., Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV)",
      .probability = true};

  explicit Defensive(DefensiveOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] bool averages_heads() const override { return false; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }
  [[nodiscard]] const DefensiveOptions& options() const { return options_; }

  /// g[t] = max(worst[t], mean of worst) for slots older than the newest min(window, seen, length - 1, budget) queries,
  /// 0 for the rest; g[t] = t if no query was seen. worst: history_attention with WindowReduce::worst. Cost and
  /// workspace: history_attention over whole rows.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const override {
    const RowTable& table = evidence.table;
    const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
    Scores scores{history_attention(evidence, windows, {.window = WindowReduce::worst, .pool = options_.pool})};
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      float* const g = scores.data.data<float>() + table.rows[r].first;
      const std::int32_t history = windows[r].history;
      if (windows[r].queries == 0) {
        std::iota(g, g + table.rows[r].length, 0.0F);
      } else if (history > 0) {
        const auto mean = static_cast<float>(std::accumulate(g, g + history, 0.0) / history);
        std::transform(g, g + history, g, [mean](float worst) { return std::max(worst, mean); });
      }
    }
    return scores;
  }

 private:
  DefensiveOptions options_;
};

}  // namespace kvkeep
