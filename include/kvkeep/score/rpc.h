#pragma once
/// RPC: attention of the newest queries to the reasoning before them. Source: "Reasoning Path Compression: Compressing
/// Generation Trajectories for Efficient LLM Reasoning" (Song et al.). Style `official` scores as its code does, for a
/// budget that grows (docs/reference/policies.md); style `fixed` is the form for a fixed budget. Differs: the window is
/// protected as a set; ties keep the newer slot; slots stay in time order; fp32; `fixed`: each query at its own logical
/// position.

#include <algorithm>
#include <numeric>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/head_mean.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

struct RpcOptions {
  enum class Style : std::uint8_t {
    fixed,     ///< every window query, softmax over the history from slot 0 on
    official,  ///< one query fewer, the newest counted twice; softmax over the history after the protected oldest slots
               ///< (the prompt)
  };
  enum class Heads : std::uint8_t {
    all,    ///< mean over every query head of the layer: all KV heads rank alike
    group,  ///< mean over the query heads of the KV head
  };
  std::int32_t window = 32;  ///< newest queries (R)
  std::int32_t pool = 7;     ///< slots to average over, odd; 1: no pooling
  Style style = Style::fixed;
  Heads heads = Heads::group;

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots always stay");
    f.pool(pool, "slots pooled over, odd; 1: none");
    f.choice("style", style, {{"fixed", Style::fixed}, {"official", Style::official}},
             "every window query over the whole history; or as published: the newest query counted twice, the "
             "protected prompt outside the softmax, a budget that grows");
    if (style == Style::official) heads = Heads::all;
    f.choice("heads", heads, {{"group", Heads::group}, {"all", Heads::all}},
             "query heads that are averaged: of the layer, or of the KV head");
    if (f.uneven_heads && heads == Heads::all)
      f.bad("heads", "all", "group: heads that differ in length cannot be averaged slot by slot");
  }
};

class Rpc final : public Scorer {
 public:
  using Options = RpcOptions;
  static constexpr ScorerTraits traits{
      .name = "rpc",
      .what = "sum of the attention of the newest `window` queries to the slots before them",
      .source = "Song et al., Reasoning Path Compression",
      .probability = true,
      .ams_coverage = 1};

  explicit Rpc(RpcOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }
  [[nodiscard]] bool averages_heads() const override { return options_.heads == RpcOptions::Heads::all; }

  /// g[t] = average-pooled sum over the window's queries of softmax(scale * q.k) over the history alone, mean over
  /// heads; 0 outside that history; g[t] = t if no query was seen. W = min(window, seen, length - 1, budget); history:
  /// the slots older than all W queries, with `official` without the guarded oldest ones. Pooling stays inside the
  /// history. `Heads::all` needs rows of one length and averages by slot, even if the heads hold different tokens.
  /// Cost: window attention with `window` queries. Workspace: 4 bytes per slot, and per thread
  /// history_attention_workspace().
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  [[nodiscard]] const RpcOptions& options() const { return options_; }

 private:
  RpcOptions options_;
};

inline Scores Rpc::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("rpc", evidence.table.device);
  const RowTable& table = evidence.table;
  const bool official = options_.style == RpcOptions::Style::official;
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  std::vector<RowWindow> selectors = windows;
  std::vector<std::int32_t> first(table.rows.size(), 0);
  if (official)
    for (std::size_t r = 0; r < selectors.size(); ++r) {
      if (selectors[r].queries > 1) --selectors[r].queries;  // the history remains that of the whole window
      first[r] = std::min(limits.rows[r].guarded.sinks, windows[r].history);
    }
  const Tensor attention = history_attention(evidence, selectors, {.newest_counts = official ? 2 : 1}, first);
  const float* a = attention.data<float>();
  Scores scores{zeros({table.slots}, Dtype::f32)};
  float* g = scores.data.data<float>();
  each_row(table, [&](std::size_t r, const Row& row) {
    float* out = g + row.first;
    if (windows[r].queries == 0) return std::iota(out, out + row.length, 0.0F);
    pool_average(a + row.first + first[r], windows[r].history - first[r], options_.pool, out + first[r]);
    const auto queries = static_cast<float>(windows[r].queries);
    std::transform(out + first[r], out + windows[r].history, out + first[r],
                   [queries](float x) { return x * queries; });
  });
  if (averages_heads()) cpu::mean_over_heads(traits.name, evidence, windows, g);
  return scores;
}

}  // namespace kvkeep
