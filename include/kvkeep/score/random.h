// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Random: the baseline that any scorer must beat, and Random Attention, which draws anew at every event.

#include <cstdint>

#include "kvkeep/core/strict_math.h"
#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

// Random numbers that depend only on their arguments, the same on every machine.

/// The finalizer of splitmix64: every bit of the result depends on every bit of x.
KVKEEP_HD inline std::uint64_t mixed_bits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Seed for the draws of one (layer, KV head).
KVKEEP_HD inline std::uint64_t draws_of_row(std::int64_t seed, std::int32_t layer, std::int32_t head) {
  return mixed_bits(mixed_bits(static_cast<std::uint64_t>(seed)) ^
                    (static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint32_t>(head)));
}

/// In [0, 1), a multiple of 2^-24. `position`: the slot's logical position.
KVKEEP_HD inline float draw(std::uint64_t of_row, std::int32_t position) {
  return static_cast<float>(mixed_bits(of_row ^ static_cast<std::uint32_t>(position)) >> 40) * 0x1p-24F;
}

struct RandomOptions {
  std::int64_t seed = 0;
  static constexpr BodyReads kReads = BodyReads::columns;
  static constexpr bool kEachSlot = true;

  void describe(Fields& f) {
    f.integer("seed", seed, 0, INT64_MAX, "a slot's draw follows from the seed, its layer, head and logical position");
  }

  /// g[t] in [0, 1), from (seed, layer, head, logical position of t) alone: a slot keeps its draw across events, all
  /// sequences draw alike, and neither threads nor batch change it.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    const std::uint64_t of_row = draws_of_row(seed, row.layer(), row.head());
    row.each_slot(team, [&](std::int32_t t) { g[t] = draw(of_row, row.position(t)); });
  }
};

class RandomScorer final : public RowScorer<RandomScorer, RandomOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "random", .what = "random slots: the baseline", .source = "none"};
  using RowScorer::RowScorer;
};

struct RandomAttentionOptions {
  std::int64_t seed = 0;
  static constexpr BodyReads kReads = BodyReads::columns;
  static constexpr bool kEachSlot = true;

  void describe(Fields& f) {
    f.integer("seed", seed, 0, INT64_MAX,
              "a slot's draw follows from the seed, its layer, head and logical position, and the newest position");
  }

  /// g[t] in [0, 1), from (seed, layer, head, logical positions of t and of the newest slot) alone.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    if (row.length() == 0) return;
    const auto newest = static_cast<std::uint64_t>(row.position(row.length() - 1)) + 1;
    const std::uint64_t of_event = mixed_bits(draws_of_row(seed, row.layer(), row.head()) ^ newest << 32U);
    row.each_slot(team, [&](std::int32_t t) { g[t] = draw(of_event, row.position(t)); });
  }
};

/// The prompt and the newest slots stay, and a sample of those between them that every event draws anew and every KV
/// head for itself. Source: "Random Attention: Rethinking KV Cache Eviction for Efficient Reasoning" (arXiv 2609.03430)
/// and its code: with the policy's defaults the rule of `random_pp` (uniform draws, the prompt above all, the newest 64
/// outside the draw, an event every 64 tokens). Because draws are new, a token that is not said again is gone after a
/// few events. Differs: a prompt that does not fit raises the budget (theirs loses its end, so that at least one more
/// slot stays); events are counted from the budget, not at lengths that 64 divides; runs can be repeated.
class RandomAttention final : public RowScorer<RandomAttention, RandomAttentionOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "random-attention",
                                       .what = "the prompt, the newest 64 slots, and random ones between them",
                                       .source = "Random Attention (arXiv 2609.03430)",
                                       .composes = false};
  using RowScorer::RowScorer;
};

}  // namespace kvkeep
