// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Knorm: keys of small norm stay. Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
/// (Devoto et al.). Differs: nothing; the policy protects sinks and recent slots.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct KnormOptions {
  static constexpr BodyReads kReads = BodyReads::key_norms;
  static constexpr bool kEachSlot = true;

  void describe(Fields&) {}

  /// g[t] = -|k_t| (no rotation changes it), fp32.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    row.each_key_norm(team, [&](std::int32_t t, float norm) { g[t] = -norm; });
  }
};

class Knorm final : public RowScorer<Knorm, KnormOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "knorm",
      .what = "keys of small norm",
      .source = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"};
  using RowScorer::RowScorer;

  /// Cost: one pass over the keys.
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true}; }
};

}  // namespace kvkeep
