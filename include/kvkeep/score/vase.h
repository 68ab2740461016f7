// SPDX-License-Identifier: Apache-2.0
#pragma once
/// VaSE: some slots stay for their values, the others are drawn at random. Source: "Value-aware Stochastic KV Cache
/// Eviction" (arXiv 2606.03928) and its code (`range_sink_sample_attn`): a quarter of the budget goes to the slots
/// whose values span the widest range, sinks among them; the rest is sampled without replacement, in proportion to the
/// attention that the newest 64 queries pay to the slots before them, smoothed over neighbours; the slots of these
/// queries stay. Differs: each query at its own logical position; the sample follows from the seed, the layer, the
/// head, the slot's position and the sequence's next position, so a run can be repeated; fp32. The published runs have
/// an event every 64 tokens: `vase,interval=64`.

#include <cmath>

#include "kvkeep/score/pool.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct VaseOptions {
  std::int32_t window = 64;    ///< newest queries
  std::int32_t pool = 5;       ///< slots averaged over, odd; 1: no pooling
  double values_share = 0.25;  ///< share of the budget that goes to the widest values, sinks included, [0, 1]
  std::int64_t seed = 0;

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries,
              "newest queries whose attention weighs the sample; their slots always stay");
    f.pool(pool, "slots averaged over, odd; 1: none");
    f.real("values_share", values_share, {0, 1},
           "share of the budget that goes to the slots whose values span the widest range, sinks included");
    f.integer("seed", seed, 0, INT64_MAX, "the sample follows from the seed, and from where and when it is drawn");
  }

  [[nodiscard]] WindowReading reading() const { return {WindowReading::Kind::history, window}; }
  static constexpr BodyReads kReads = BodyReads::values;

  /// g[t] = r for the floor(values_share * budget) - sinks slots with the largest r = max(v_t) - min(v_t) among those
  /// that are not protected (ties: the newer); for the others ln(u) / a, below 0: u a draw in (0, 1), a the pooled mean
  /// attention of the window, its softmax over the slots older than it. The largest of such keys are a sample without
  /// replacement, weighed by a (Efraimidis and Spirakis). A slot whose range is not finite is only sampled.
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow, float* attention, float* g, Team team) const {
    const std::uint64_t draws = mixed_bits(draws_of_row(seed, row.layer(), row.head()) ^
                                           static_cast<std::uint64_t>(row.next_position()) << 32U);
    row.each_slot(team, [&](std::int32_t t) {
      const double u = static_cast<double>(draw(draws, row.position(t))) + 0x1p-25;
      g[t] = static_cast<float>(std::log(u) / static_cast<double>(pooled_average(attention, row.length(), pool, t)));
    });
    const RowLimit& limit = row.limit();
    const Protected& guarded = limit.guarded;
    const std::int64_t wanted = static_cast<std::int64_t>(values_share * limit.budget) - guarded.sinks - guarded.pinned;
    if (wanted <= 0) return;
    team.sync();
    float* const ranges = attention;  // which nobody reads any more; below 0: the slot does not compete
    row.each_slot(team, [&](std::int32_t t) {
      ranges[t] = guarded.holds(t, row.length()) ? -1.0F : range_of(row.value(t), row.value_dim());
    });
    team.sync();
    const auto key_of = [&](std::int32_t t) { return ranges[t] < 0 ? 0 : rank_key(ranges[t], t); };
    const std::uint64_t least = row.least_of_largest(team, wanted, key_of);
    row.each_slot(team, [&](std::int32_t t) {
      if (ranges[t] >= 0 && key_of(t) >= least) g[t] = ranges[t];
    });
  }

  /// max - min; -1 if that is not finite.
  template <class Value>
  [[nodiscard]] KVKEEP_HD static float range_of(const Value* value, std::int32_t dim) {
    constexpr std::int32_t kLanes = 8;
    float low[kLanes], high[kLanes], odd[kLanes];  // odd: 0, or NaN after a number that is not finite
    for (std::int32_t j = 0; j < kLanes; ++j) low[j] = high[j] = static_cast<float>(value[0]), odd[j] = 0;
    const auto add = [&](std::int32_t j, float x) {
      low[j] = x < low[j] ? x : low[j];
      high[j] = x > high[j] ? x : high[j];
      odd[j] += x - x;
    };
    std::int32_t d = 0;
    for (; d + kLanes <= dim; d += kLanes)
      for (std::int32_t j = 0; j < kLanes; ++j) add(j, static_cast<float>(value[d + j]));
    for (; d < dim; ++d) add(0, static_cast<float>(value[d]));
    for (std::int32_t j = 1; j < kLanes; ++j) {
      low[0] = low[j] < low[0] ? low[j] : low[0];
      high[0] = high[j] > high[0] ? high[j] : high[0];
      odd[0] += odd[j];
    }
    const float range = high[0] - low[0];
    return odd[0] == 0 && range - range == 0 ? range : -1.0F;
  }
};

/// Cost: history_attention, and one pass over the values.
class Vase final : public WindowScorer<Vase, VaseOptions> {
 public:
  static constexpr ScorerTraits traits{
      .name = "vase",
      .what = "slots with the widest values, and a random sample weighed by the newest queries' attention",
      .source = "VaSE: Value-aware Stochastic KV Cache Eviction (arXiv 2606.03928)"};
  using WindowScorer::WindowScorer;

  [[nodiscard]] Needs needs() const override { return {.queries = options().window, .keys = true, .values = true}; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options().window; }
};

}  // namespace kvkeep
