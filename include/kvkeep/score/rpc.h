// SPDX-License-Identifier: Apache-2.0
#pragma once
/// RPC: attention of the newest queries to the reasoning before them. Source: "Reasoning Path Compression: Compressing
/// Generation Trajectories for Efficient LLM Reasoning" (Song et al.). Style `official` scores as its code does, for a
/// budget that grows (docs/reference/policies.md); style `fixed` is the form for a fixed budget. Differs: the window is
/// protected as a set; ties keep the newer slot; slots stay in time order; fp32; `fixed`: each query at its own logical
/// position.

#include "kvkeep/score/pool.h"
#include "kvkeep/score/row_scorer.h"

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

  [[nodiscard]] WindowReading reading() const {
    const bool official = style == Style::official;
    return {WindowReading::Kind::history, window, {.newest_counts = official ? 2 : 1}, official};
  }
  static constexpr bool kEachSlot = true;

  /// g[t] = average-pooled sum over the window's queries of softmax(scale * q.k) over the history alone, mean over the
  /// group; 0 outside that history. W = min(window, seen, length - 1, budget); history: the slots older than all W
  /// queries, with `official` without the guarded oldest ones. Pooling stays inside the history.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow asked, const float* attention, float* g, Team team) const {
    const std::int32_t sinks = style == Style::official ? row.limit().guarded.sinks : 0,
                       first = sinks < asked.history ? sinks : asked.history;
    const auto queries = static_cast<float>(asked.queries);
    row.each_slot(team, [&](std::int32_t t) {
      g[t] = t < first || t >= asked.history
                 ? 0.0F
                 : pooled_average(attention + first, asked.history - first, pool, t - first) * queries;
    });
  }
};

/// `Heads::all` averages by slot, even if the heads hold different tokens. Cost: window attention with `window`
/// queries.
class Rpc final : public WindowScorer<Rpc, RpcOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "rpc",
      .what = "sum of the attention of the newest `window` queries to the slots before them",
      .source = "Song et al., Reasoning Path Compression",
      .probability = true,
      .ams_coverage = 1};
  using WindowScorer::WindowScorer;

  [[nodiscard]] std::int32_t keeps_newest() const override { return options().window; }
  [[nodiscard]] Sharing sharing() const override {
    return options().heads == RpcOptions::Heads::all ? Sharing::layer : Sharing::per_layer_per_head;
  }
};

}  // namespace kvkeep
