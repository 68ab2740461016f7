// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Recency: newer stays. With protected sinks it is StreamingLLM.
/// Source: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.). Differs: kept keys keep their
/// rotation; keep/compact.h rotates them to the paper's positions inside the cache.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct RecencyOptions {
  static constexpr BodyReads kReads = BodyReads::columns;
  static constexpr bool kEachSlot = true;

  void describe(Fields&) {}

  /// g[t] = t. Exact up to 2^24 slots.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    row.each_slot(team, [&](std::int32_t t) { g[t] = static_cast<float>(t); });
  }
};

class Recency final : public RowScorer<Recency, RecencyOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "streaming",
      .what = "the oldest `sink` slots and the newest",
      .source = "Xiao et al., Efficient Streaming Language Models with Attention Sinks",
      .composes = false};
  using RowScorer::RowScorer;
};

}  // namespace kvkeep
