// SPDX-License-Identifier: Apache-2.0
// H2O: the running sum against plain loops at one event, and against a simulation that attends token by token over
// many.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/score/h2o.h"
#include "kvkeep/score/window_attention.h"
#include "library_event.h"
#include "oracle/random_case.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing::h2o_test {
namespace {

using testing::Array;

ScorerOracle plain(int window) {
  return [window](const oracle::ScorerInput& in) { return oracle::h2o(in, window); };
}

TEST(H2O, AgreesWithPlainLoopsOnRandomEvents) {
  for (const int window : {512, 20, 1}) expect_scores_agree(H2O({window}), plain(window), 60, {1e-6, 1e-4});
}

TEST(H2O, ObeysTheLawsOfScorersOnEveryInstructionSet) {
  expect_scorer_laws(H2O(), 25);
  for_every_instruction_set([] { expect_scores_agree(H2O(), plain(512), 12, {1e-6, 1e-4}); });
}

TEST(H2O, OfTheWorkedExample) {  // slot 0 comes with a tally of 5; the queries of slots 1 and 2 are new
  oracle::Sequence s;
  s.T = 3;
  for (const double parts : {1, 3, 4}) s.keys.push_back(static_cast<float>(std::log(parts)));
  s.queries = {1, 1, 1};
  s.positions = {4, 9, 10};
  s.query_positions = {8, 9, 10};  // that of position 8 was counted at the last event
  OracleCache cache({s});
  RowTable table = cache.table();
  const float tally = 5;
  table.rows[0].tally = &tally;
  table.rows[0].tally_length = 1;
  const Evidence evidence{cache.spec(), table, QueryBasis::post_rope};
  WindowAttention none;
  const Array g = H2O().score(evidence, even_limits(table, 2), none).data;
  const double want[] = {5 + 1.0 / 4 + 1.0 / 8, 3.0 / 4 + 3.0 / 8, 4.0 / 8};
  for (int t = 0; t < 3; ++t) EXPECT_NEAR(g.data<float>()[t], want[t], 1e-6) << t;
}

constexpr std::int32_t kLayers = 2, kHeads = 2, kGroup = 3, kDim = 4;

/// Keys and queries of a token, the same for the engine and for the simulation.
std::vector<float> numbers(std::int32_t layer, std::int32_t head, std::int32_t position, int what) {
  oracle::Random random(static_cast<std::uint64_t>(((layer * 16 + head) * 4096 + position) * 2 + what));
  std::vector<float> x;
  for (std::int32_t d = 0; d < kDim; ++d) x.push_back(static_cast<float>(random.normal()));
  return x;
}

/// One (layer, KV head), attending at every token.
struct SimulatedRow {
  std::vector<std::int32_t> positions;
  std::vector<double> sum;

  void attend(std::int32_t layer, std::int32_t head, std::int32_t position, double scale) {
    positions.push_back(position);
    sum.push_back(0);
    for (std::int32_t g = 0; g < kGroup; ++g) {
      const std::vector<float> q = numbers(layer, head * kGroup + g, position, 0);
      std::vector<double> e;
      for (const std::int32_t p : positions) {
        const std::vector<float> k = numbers(layer, head, p, 1);
        e.push_back(std::exp(scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0)));
      }
      const double all = std::accumulate(e.begin(), e.end(), 0.0);
      for (std::size_t t = 0; t < e.size(); ++t) sum[t] += e[t] / all / kGroup;
    }
  }

  void keep(std::span<const std::int32_t> slots) {
    for (std::size_t j = 0; j < slots.size(); ++j) {
      positions[j] = positions[static_cast<std::size_t>(slots[j])];
      sum[j] = sum[static_cast<std::size_t>(slots[j])];
    }
    positions.resize(slots.size());
    sum.resize(slots.size());
  }
};

/// Runs an engine over `tokens` tokens, in chunks, beside the simulation; returns the events.
int run_beside_simulation(const std::string& policy, std::int32_t tokens, bool own_selection) {
  ModelSpec spec{.query_heads = kHeads * kGroup,
                 .kv_heads = kHeads,
                 .key_dim = kDim,
                 .value_dim = 1,
                 .softmax_scale = 0,
                 .rope = {},
                 .layers = std::vector<LayerSpec>(kLayers)};
  Keeper keeper(spec, make_policy(policy));
  std::vector<LayerKv> cache;
  for (std::int32_t l = 0; l < kLayers; ++l)
    cache.emplace_back(DenseKv{Array::zeros({1, kHeads, 80, kDim}), Array::zeros({1, kHeads, 80, 1})});
  keeper.bind(cache);
  std::vector<SimulatedRow> rows(kLayers * kHeads);
  const SequenceId id = 3;
  std::int32_t length = 0, position = 0;
  int events = 0;
  keeper.join(id);
  while (position < tokens) {
    const std::int32_t count = position == 0 ? 17 : 1 + position % 3;
    const std::int32_t indptr[] = {0, count};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Array queries = Array::empty({count, kHeads * kGroup, kDim});
      for (std::int32_t i = 0; i < count; ++i) {
        for (std::int32_t q = 0; q < kHeads * kGroup; ++q)
          std::ranges::copy(numbers(l, q, position + i, 0), queries[i][q].data<float>());
        for (std::int32_t h = 0; h < kHeads; ++h) {
          std::ranges::copy(
              numbers(l, h, position + i, 1),
              Array(std::get<DenseKv>(cache[static_cast<std::size_t>(l)]).keys)[0][h][length + i].data<float>());
          rows[static_cast<std::size_t>(l * kHeads + h)].attend(l, h, position + i, spec.scale());
        }
      }
      keeper.observe(
          {.layer = l, .sequences = {&id, 1}, .indptr = indptr, .queries = queries, .basis = QueryBasis::post_rope});
    }
    length += count;
    position += count;
    const CacheView view{{&id, 1}, {{&length, 1}}};
    const Plan plan = keeper.plan(view);
    if (!plan.decision.keep) {
      keeper.apply(plan, view);
      continue;
    }
    ++events;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const float* tally = plan.decision.tally->data<float>() + plan.table.rows[r].first;
      for (std::size_t t = 0; t < rows[r].sum.size(); ++t)
        EXPECT_NEAR(tally[t], rows[r].sum[t], 1e-5 + 1e-5 * rows[r].sum[t])
            << "event " << events << ", row " << r << ", slot " << t;
      if (own_selection) {  // two newest protected, of the others those with the largest sums
        std::vector<std::int32_t> order(rows[r].sum.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end() - 2, [&](std::int32_t a, std::int32_t b) {
          return rows[r].sum[static_cast<std::size_t>(a)] > rows[r].sum[static_cast<std::size_t>(b)];
        });
        std::rotate(order.begin(), order.end() - 2, order.end());
        order.resize(plan.decision.keep->row(r).size());
        std::ranges::sort(order);
        EXPECT_TRUE(std::ranges::equal(order, plan.decision.keep->row(r))) << "event " << events << ", row " << r;
      }
      rows[r].keep(plan.decision.keep->row(r));
    }
    keeper.apply(plan, view);
    if (::testing::Test::HasFailure()) break;
  }
  if (policy.starts_with("ams-"))
    EXPECT_EQ(static_cast<std::int32_t>(keeper.credit(id, 0, 0).size()), 24) << "credit travels beside the tally";
  return events;
}

TEST(H2O, SumsOverManyEventsWhatASimulationSumsTokenByToken) {
  EXPECT_GE(run_beside_simulation("h2o,budget=24,interval=8,window=64,sink=0,recent=2", 120, true), 8);
  EXPECT_GE(run_beside_simulation("ams-h2o,budget=24,interval=8,scorer.window=64,sink=0,recent=2,allocator.window=6,"
                                  "segment_mass=0.2,min_segment=2,max_segment=8,min_quota=1",
                                  120, false),
            8);
}

TEST(H2O, TheSumStaysEachRowsOwnWhereRowsShareASelection) {
  for (const char* share : {"per_head", "union"})
    EXPECT_GE(run_beside_simulation(std::string("h2o,budget=24,interval=8,window=64,sink=0,recent=2,share=") + share,
                                    120, false),
              8);
}

TEST(H2O, TakesWorkspaceThatGrowsWithTheSlotsNotTheirSquare) {
  ModelSpec spec;
  spec.query_heads = 28;
  spec.kv_heads = 4;
  spec.key_dim = spec.value_dim = 128;
  spec.layers.resize(1);
  const std::int64_t none = window_attention_workspace(spec, 0, 512),
                     thousand = window_attention_workspace(spec, 1000, 512), per_slot = (thousand - none) / 1000;
  EXPECT_EQ(per_slot % 10, 0);
  EXPECT_LE(per_slot / 10, 32) << "2.5 panels of two vectors of the machine, 4 bytes a lane";
  EXPECT_EQ(window_attention_workspace(spec, 32768, 512), none + 32768 * per_slot);
  EXPECT_EQ(none, 4 * (7 * 512 * 128 + 2 * 128 * (per_slot / 10) + 48 * 128 + 8 * (per_slot / 10) + 512));
  const std::int64_t alone = window_attention_workspace(spec, 0, 1),
                     narrow = (window_attention_workspace(spec, 1000, 1) - alone) / 1000;
  EXPECT_LE(narrow, 2 * 8 * 4) << "seven heads of one query: a panel of a vector, and a vector";
  EXPECT_EQ(window_attention_workspace(spec, 32768, 1), alone + 32768 * narrow);
}

}  // namespace
}  // namespace kvkeep::testing::h2o_test
