// SPDX-License-Identifier: Apache-2.0
#pragma once
/// SnapKV: what a window of the newest queries attends to, smoothed over neighbours. Source: "SnapKV: LLM Knows What
/// You are Looking for Before Generation" (Li et al.); style `rkv` is the form that R-KV's repository uses for
/// decoding. Differs: each query at its own logical position; the window's slots are protected as a set instead of
/// scoring the maximum; fp32.

#include "kvkeep/score/pool.h"
#include "kvkeep/score/row_scorer.h"

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

  [[nodiscard]] WindowReading reading() const {
    if (style == Style::snapkv) return {WindowReading::Kind::usage, window};
    return {WindowReading::Kind::history, window, {.group = GroupReduce::max_logit}};
  }
  static constexpr bool kEachSlot = true;

  /// g[t] = pooled mean attention of the newest min(window, seen, length - 1, budget) queries for slots older than all
  /// of them, 0 for the rest. Pooling stays inside the history.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow asked, const float* attention, float* g, Team team) const {
    const std::int32_t n = asked.history;
    if (style == Style::snapkv)
      row.each_slot(team, [&](std::int32_t t) { g[t] = t < n ? pooled_average(attention, n, pool, t) : 0.0F; });
    else
      row.each_slot(team, [&](std::int32_t t) { g[t] = t < n ? pooled_max(attention, n, pool, t) : 0.0F; });
  }
};

/// Style `snapkv` reuses the policy's window attention if that has the same window. Cost: window attention with
/// `window` queries.
class SnapKV final : public WindowScorer<SnapKV, SnapKVOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "snapkv",
      .what = "attention of the newest `window` queries, pooled over neighbours",
      .source = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation",
      .probability = true,
      .ams_coverage = 1};
  using WindowScorer::WindowScorer;

  [[nodiscard]] std::int32_t keeps_newest() const override { return options().window; }
};

}  // namespace kvkeep
