// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Heeded: slots that the newest queries attend to, or the next slot.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct HeededOptions {
  std::int32_t window = 16;  ///< newest queries

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots always stay");
  }

  [[nodiscard]] WindowReading reading() const { return {WindowReading::Kind::usage, window}; }
  static constexpr bool kEachSlot = true;

  /// g[t] = the larger of the mean attention to slots t and t + 1; 0 for slots of the window.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow asked, const float* attention, float* g, Team team) const {
    row.each_slot(team, [&](std::int32_t t) {
      const float own = t < asked.history ? attention[t] : 0.0F, next = t + 1 < asked.history ? attention[t + 1] : 0.0F;
      g[t] = own < next ? next : own;
    });
  }
};

class Heeded final : public WindowScorer<Heeded, HeededOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "heeded", .what = "slots that the newest queries attend to", .source = "none", .probability = true};
  using WindowScorer::WindowScorer;

  [[nodiscard]] std::int32_t keeps_newest() const override { return options().window; }
};

}  // namespace kvkeep
