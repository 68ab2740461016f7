// SPDX-License-Identifier: Apache-2.0
#pragma once
/// TOVA: the newest query's attention. Source: "Transformers are Multi-State RNNs" (Oren et al.), the TOVA policy.
/// Differs: events every `interval` tokens instead of every step; the newest slot is protected instead of competing
/// with its own weight; fp32.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct TovaOptions {
  enum class Heads : std::uint8_t {
    all,    ///< mean over every query head of the layer: all KV heads rank alike (published)
    group,  ///< mean over the query heads of the KV head
  };
  Heads heads = Heads::all;

  void describe(Fields& f) {
    if (f.uneven_heads) heads = Heads::group;
    f.choice("heads", heads, {{"all", Heads::all}, {"group", Heads::group}},
             "query heads that are averaged: of the layer, or of the KV head");
    if (f.uneven_heads && heads == Heads::all)
      f.bad("heads", "all", "group: heads that differ in length cannot be averaged slot by slot");
  }

  /// g[t] = mean over the group of softmax over all slots of scale * q.k, for the newest query.
  [[nodiscard]] WindowReading reading() const { return {WindowReading::Kind::newest}; }
  static constexpr bool kAsRead = true;
};

/// `Heads::all` averages by slot, even if the heads hold different tokens, as published. Cost: O(slots) beyond the
/// shared window attention.
class Tova final : public WindowScorer<Tova, TovaOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "tova",
                                       .what = "attention of the newest query",
                                       .source = "Oren et al., Transformers are Multi-State RNNs (TOVA)",
                                       .probability = true};
  using WindowScorer::WindowScorer;

  [[nodiscard]] std::int32_t keeps_newest() const override { return 1; }
  [[nodiscard]] Sharing sharing() const override {
    return options().heads == TovaOptions::Heads::all ? Sharing::layer : Sharing::per_layer_per_head;
  }
};

}  // namespace kvkeep
