#pragma once
/// Random: the baseline that any scorer must beat.

#include <cstdint>

#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct RandomOptions {
  std::int64_t seed = 0;

  void describe(Fields& f) {
    f.integer("seed", seed, 0, INT64_MAX, "a slot's draw follows from the seed, its layer, head and logical position");
  }
};

class RandomScorer final : public Scorer {
 public:
  using Options = RandomOptions;
  static constexpr ScorerTraits traits{.name = "random", .what = "random slots: the baseline", .source = "none"};

  explicit RandomScorer(RandomOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }

  /// g[t] in [0, 1), from (seed, layer, head, logical position of t) alone: a slot keeps its draw across events, all
  /// sequences draw alike, and neither threads nor batch change it. Cost: O(slots). Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  [[nodiscard]] const RandomOptions& options() const { return options_; }

 private:
  RandomOptions options_;
};

}  // namespace kvkeep
