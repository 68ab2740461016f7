#pragma once
/// VaSE: some slots stay for their values, the others are drawn at random. Source: "Value-aware Stochastic KV Cache
/// Eviction" (arXiv 2606.03928) and its code (`range_sink_sample_attn`): a quarter of the budget goes to the slots
/// whose values span the widest range, sinks among them; the rest is sampled without replacement, in proportion to the
/// attention that the newest 64 queries pay to the slots before them, smoothed over neighbours; the slots of these
/// queries stay. Differs: each query at its own logical position; the sample follows from the seed, the layer, the
/// head, the slot's position and the sequence's next position, so a run can be repeated; fp32. The published runs have
/// an event every 64 tokens: `vase,interval=64`.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/draw.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"

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
};

class Vase final : public Scorer {
 public:
  using Options = VaseOptions;
  static constexpr ScorerTraits traits{
      .name = "vase",
      .what = "slots with the widest values, and a random sample weighed by the newest queries' attention",
      .source = "VaSE: Value-aware Stochastic KV Cache Eviction (arXiv 2606.03928)"};

  explicit Vase(VaseOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true, .values = true}; }
  [[nodiscard]] bool averages_heads() const override { return false; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }
  [[nodiscard]] const VaseOptions& options() const { return options_; }

  /// g[t] = r for the floor(values_share * budget) - sinks slots with the largest r = max(v_t) - min(v_t) among those
  /// that are not protected (ties: the newer); for the others ln(u) / a, below 0: u a draw in (0, 1), a the pooled mean
  /// attention of the window, its softmax over the slots older than it. The largest of such keys are a sample without
  /// replacement, weighed by a (Efraimidis and Spirakis). g[t] = t if no query was seen. A slot whose range is not
  /// finite is only sampled. Throws InvalidArgument for values that are not f32, f16 or bf16. Cost: history_attention;
  /// one pass over the values; O(slots) beyond.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const override {
    require_host("vase", evidence.table.device);
    const RowTable& table = evidence.table;
    const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
    const Tensor attention = history_attention(evidence, windows);
    Scores scores{empty({table.slots}, Dtype::f32)};
    with_dtype("vase", table.value_dtype, [&](auto type) {
      const auto make = [] { return std::vector<Ranked>(); };
      each_due_row(table, limits, make, [&](std::size_t r, const Row& row, std::vector<Ranked>& ranked) {
        float* const g = scores.data.data<float>() + row.first;
        if (windows[r].queries == 0) return std::iota(g, g + row.length, 0.0F);
        const RowGroup& group = table.groups[r / static_cast<std::size_t>(evidence.spec.kv_heads)];
        sample(row, evidence.spec.first_head, attention.data<float>() + row.first, group.next_position, g);
        widest<decltype(type)>(row, limits.rows[r], evidence.spec.value_dim, ranked, g);
      });
    });
    return scores;
  }

 private:
  struct Ranked {
    float range;
    std::int32_t slot;
  };

  void sample(const Row& row, std::int32_t first_head, const float* attention, std::int32_t next_position,
              float* g) const {
    const std::uint64_t draws = mixed_bits(draws_of_row(options_.seed, row.layer, first_head + row.head) ^
                                           static_cast<std::uint64_t>(next_position) << 32U);
    pool_average(attention, row.length, options_.pool, g);
    for (std::int32_t t = 0; t < row.length; ++t) {
      const double u = static_cast<double>(draw(draws, row.positions[t])) + 0x1p-25;
      g[t] = static_cast<float>(std::log(u) / static_cast<double>(g[t]));
    }
  }

  template <class Value>
  void widest(const Row& row, const RowLimit& limit, std::int32_t dim, std::vector<Ranked>& ranked, float* g) const {
    const auto wanted =
        static_cast<std::int64_t>(options_.values_share * limit.budget) - limit.guarded.sinks - limit.guarded.pinned;
    if (wanted <= 0) return;
    ranked.clear();
    for (std::int32_t t = limit.guarded.sinks; t < row.length - limit.guarded.recents; ++t) {
      if (limit.guarded.pins_slot(t)) continue;
      const auto* const value = reinterpret_cast<const Value*>(row.values.at(t));
      float low = static_cast<float>(value[0]), high = low;
      bool finite = true;
      for (std::int32_t d = 0; d < dim; ++d) {
        const auto x = static_cast<float>(value[d]);
        low = x < low ? x : low;
        high = x > high ? x : high;
        finite = finite && std::isfinite(x);
      }
      if (finite && std::isfinite(high - low)) ranked.push_back({high - low, t});
    }
    const auto taken = std::min<std::ptrdiff_t>(wanted, static_cast<std::ptrdiff_t>(ranked.size()));
    std::nth_element(ranked.begin(), ranked.begin() + taken, ranked.end(), [](const Ranked& a, const Ranked& b) {
      return a.range != b.range ? a.range > b.range : a.slot > b.slot;
    });
    std::for_each(ranked.begin(), ranked.begin() + taken, [g](const Ranked& one) { g[one.slot] = one.range; });
  }

  VaseOptions options_;
};

}  // namespace kvkeep
