#pragma once
/// Random: the baseline that any scorer must beat.

#include <cstdint>

#include "kvkeep/score/draw.h"
#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct RandomOptions {
  std::int64_t seed = 0;
  static constexpr bool kReadsPositionsAlone = true;

  void describe(Fields& f) {
    f.integer("seed", seed, 0, INT64_MAX, "a slot's draw follows from the seed, its layer, head and logical position");
  }

  /// g[t] in [0, 1), from (seed, layer, head, logical position of t) alone: a slot keeps its draw across events, all
  /// sequences draw alike, and neither threads nor batch change it.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    const std::uint64_t of_row = draws_of_row(seed, row.layer(), row.head());
    for (std::int32_t t = team.rank(); t < row.length(); t += team.size()) g[t] = draw(of_row, row.position(t));
  }
};

class RandomScorer final : public RowScorer<RandomScorer, RandomOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "random", .what = "random slots: the baseline", .source = "none"};
  using RowScorer::RowScorer;
};

}  // namespace kvkeep
