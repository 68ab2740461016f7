#pragma once
/// H2O: heavy hitters stay: the slots with the most attention, summed over all queries so far. Source: "H2O:
/// Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al.). Differs: the sum is
/// updated at events, from the newest `window` queries, instead of at every step; mean over the query heads of a KV
/// head (published: no groups); per sequence (published: summed over the batch); fp32.

#include <algorithm>

#include "kvkeep/core/partition_point.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {

struct H2OOptions {
  std::int32_t window = 512;  ///< how many of the newest queries an event can add

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries,
              "newest queries that an event can add to the sum; older ones are not counted");
  }
};

class H2O final : public Scorer {
 public:
  using Options = H2OOptions;
  static constexpr ScorerTraits traits{
      .name = "h2o",
      .what = "sum of the attention of every query so far",
      .source = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
      .probability = true,
      .ams_coverage = 1};

  explicit H2O(H2OOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] bool averages_heads() const override { return false; }
  [[nodiscard]] bool accumulates() const override { return true; }

  /// g[t] = tally[t] (0 for slots that came after the last event) + sum over the queries that came after it, at most
  /// the newest `window`, of the mean over the group of softmax(scale * q.k) over the slots that the query sees, its
  /// own included. Between two events a cache only grows, so these are the probabilities of the steps themselves. Rows
  /// that are not due are updated too. Queries further back than `window` are never counted. Cost: window attention
  /// with up to `window` queries. Workspace per thread: window_attention_workspace(); nothing of size [Hq, W, T].
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  /// Queries whose own slot came after the last event, `window` at most. Their positions ascend.
  [[nodiscard]] KVKEEP_HD static std::int32_t new_queries(const Row& row, const QueryView& queries,
                                                          std::int32_t window) {
    if (row.tally_length >= row.length) return 0;
    const std::int32_t since = row.tally_length == 0 ? 0 : row.positions[row.tally_length];
    const std::int32_t oldest = queries.count < window ? 0 : queries.count - window;
    return queries.count -
           partition_point(oldest, queries.count, [&](std::int32_t i) { return queries.position(i) < since; });
  }

  [[nodiscard]] const H2OOptions& options() const { return options_; }

 private:
  H2OOptions options_;
};

inline Scores H2O::score(const Evidence& evidence, const Limits&, const WindowAttention&) const {
  require_host("h2o", evidence.table.device);
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  std::vector<RowWindow> windows(table.rows.size());
  for (std::size_t r = 0; r < windows.size(); ++r)
    windows[r] = {new_queries(table.rows[r], table.groups[r / heads].queries, options_.window), table.rows[r].length};
  Scores scores{attention_sum(evidence, windows)};
  float* g = scores.data.data<float>();
  for (const Row& row : table.rows)
    if (row.tally != nullptr) cpu::add_scaled(g + row.first, row.tally, 1.0F, std::min(row.tally_length, row.length));
  return scores;
}

}  // namespace kvkeep
