// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Given: the engine's own scores rank the slots, as it gave them to parts::Given::give(). For methods that learn a
/// score of every token and KV head from hidden states, keys or values, such as KVzap, the gate of Fast KVzip,
/// IndexMem, DMS and EpiKV. Source: none of these alone; the scores, and what is said to compute them, are theirs.
/// Differs from each of them: a score is final once it is given, and which slots stay is up to the allocator: `given`
/// keeps the best of a budget, `threshold-given` those above a threshold, as KVzap and DMS do, `adakv-given` the best
/// of all heads of a layer. The last two compare scores between heads: the engine sees to it that they can be compared.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct GivenOptions {
  static constexpr BodyReads kReads = BodyReads::columns;
  static constexpr bool kEachSlot = true;

  void describe(Fields&) {}

  /// g[t] is the score given for slot t, as f32.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    row.each_slot(team, [&](std::int32_t t) { g[t] = row.given(t); });
  }
};

class Given final : public RowScorer<Given, GivenOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "given",
                                       .what = "scores that the engine gives, such as those that a gate learned",
                                       .source = "scores as in KVzap, Fast KVzip, IndexMem, DMS, EpiKV",
                                       .comparable = true};
  using RowScorer::RowScorer;

  /// Cost: one pass over the column.
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .given_scores = true}; }
};

}  // namespace kvkeep
