#pragma once
/// SnapKV: what a window of the newest queries attends to, smoothed over neighbours. Source: "SnapKV: LLM Knows What
/// You are Looking for Before Generation" (Li et al.); style `rkv` is the form that R-KV's repository uses for
/// decoding. Differs: each query at its own logical position; the window's slots are protected as a set instead of
/// scoring the maximum; fp32.

#include <algorithm>
#include <numeric>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

struct SnapKVOptions {
  enum class Style : std::uint8_t {
    snapkv,  ///< softmax over all slots, mean over the window and the group, average pool (published)
    rkv,     ///< largest logit of the group, softmax over the history alone, mean over the window, max pool
  };
  std::int32_t window = 64;  ///< newest queries
  std::int32_t pool = 5;     ///< slots to pool over, odd; 1: no pooling
  Style style = Style::snapkv;

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots always stay");
    f.pool(pool, "slots pooled over, odd; 1: none");
    f.choice("style", style, {{"snapkv", Style::snapkv}, {"rkv", Style::rkv}},
             "softmax over all slots, mean over the group, average pool; or largest logit of the group, softmax over "
             "the history only, max pool");
  }
};

class SnapKV final : public Scorer {
 public:
  using Options = SnapKVOptions;
  static constexpr ScorerTraits traits{
      .name = "snapkv",
      .what = "attention of the newest `window` queries, pooled over neighbours",
      .source = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation",
      .probability = true,
      .ams_coverage = 1};

  explicit SnapKV(SnapKVOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] bool averages_heads() const override { return false; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }

  /// g[t] = pooled mean attention of the newest min(window, seen, length - 1, budget) queries for slots older
  /// than all of them, 0 for the rest; g[t] = t if no query was seen. Pooling stays inside the history. Style `snapkv`
  /// reuses the policy's window attention if that has the same window. Cost: window attention with `window` queries.
  /// Workspace: 4 bytes per slot, and per thread window_attention_workspace() or history_attention_workspace().
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  [[nodiscard]] const SnapKVOptions& options() const { return options_; }

 private:
  SnapKVOptions options_;
};

namespace snapkv_detail {

/// True if the usage of the same windows was already requested.
inline bool is_known(const WindowAttention& seen, const std::vector<RowWindow>& windows) {
  return seen.usage.defined() &&
         std::equal(windows.begin(), windows.end(), seen.windows.begin(), seen.windows.end(),
                    [](RowWindow a, RowWindow b) { return a.queries == b.queries && a.history == b.history; });
}

}  // namespace snapkv_detail

inline Scores SnapKV::score(const Evidence& evidence, const Limits& limits, const WindowAttention& seen) const {
  require_host("snapkv", evidence.table.device);
  const RowTable& table = evidence.table;
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  const bool average = options_.style == SnapKVOptions::Style::snapkv;
  Tensor attention;
  if (!average)
    attention = history_attention(evidence, windows, {.group = GroupReduce::max_logit});
  else
    attention = snapkv_detail::is_known(seen, windows) ? seen.usage
                                                       : window_attention(evidence, windows, {.usage = true}).usage;
  const float* a = attention.data<float>();
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* g = scores.data.data<float>();
  each_row(table, [&](std::size_t r, const Row& row) {
    float* out = g + row.first;
    if (windows[r].queries == 0) return std::iota(out, out + row.length, 0.0F);
    if (average)
      pool_average(a + row.first, windows[r].history, options_.pool, out);
    else
      pool_max(a + row.first, windows[r].history, options_.pool, out);
    std::fill(out + windows[r].history, out + row.length, 0.0F);
  });
  return scores;
}

}  // namespace kvkeep
