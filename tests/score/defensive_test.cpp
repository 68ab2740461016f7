// SPDX-License-Identifier: Apache-2.0
// DefensiveKV's scores against plain loops.

#include <gtest/gtest.h>

#include <cmath>

#include "kvkeep/score/defensive.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing::defensive_test {
namespace {

ScorerOracle plain(const DefensiveOptions& o) {
  return [o](const oracle::ScorerInput& in) { return oracle::defensive(in, o.window, o.pool); };
}

TEST(Defensive, AgreesWithPlainLoopsOnRandomEvents) {
  for (const int window : {1, 2, 8, 32})
    for (const int pool : {1, 5})
      expect_scores_agree(Defensive({window, pool}), plain({window, pool}), 40, {1e-6, 1e-4});
}

TEST(Defensive, WeighsAQueryByWhatItPaysToTheHistory) {
  // Four slots, queries at the newest two. Over the history alone each query pays 1/2 to slot 0.
  const double ln2 = std::log(2.0);
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = spec.key_dim = spec.value_dim = 1;
  spec.softmax_scale = 1;
  spec.layers.resize(1);
  float keys[] = {0, 0, static_cast<float>(ln2), 0}, queries[] = {1, -2};
  std::int32_t positions[] = {0, 1, 2, 3};
  RowTable table;
  table.rows.resize(1);
  table.rows[0].length = 4;
  table.rows[0].positions = positions;
  table.rows[0].keys = {.base = reinterpret_cast<std::byte*>(keys), .stride = 4, .width = 4};
  table.groups.resize(1);
  table.groups[0].next_position = 4;
  table.groups[0].queries = {.data = reinterpret_cast<const std::byte*>(queries),
                             .token_stride = 4,
                             .head_stride = 4,
                             .positions = positions + 2,
                             .ring = 2,
                             .count = 2};
  table.slots = 4;
  const Evidence evidence{.spec = spec, .table = table, .basis = QueryBasis::post_rope};
  const Scores g = Defensive({2, 1}).score(evidence, even_limits(table, 3), {});
  // Older query: e^0, e^0, e^ln2 over slots 0 to 2: 1/4, 1/4, 1/2. Newest: 1, 1, 1/4, 1 over 0 to 3: 4/13 each.
  EXPECT_NEAR(g.data.data<float>()[0], 4.0 / 13, 1e-6);
  EXPECT_NEAR(g.data.data<float>()[1], 4.0 / 13, 1e-6);
  EXPECT_EQ(g.data.data<float>()[2], 0);
}

TEST(Defensive, ObeysTheLawsOfScorersOnEveryInstructionSet) {
  expect_scorer_laws(Defensive({8, 5}), 25);
  for_every_instruction_set([] { expect_scores_agree(Defensive({8, 5}), plain({8, 5}), 10, {1e-6, 1e-4}); });
}

TEST(Defensive, GoesWithCriticalKVAndAdaptiveHeads) {
  const auto policy = make_policy("criticalkv-defensive,budget=64,allocator.heads=adaptive");
  EXPECT_EQ(policy->name(), "criticalkv-defensive");
  EXPECT_EQ(policy->needs().queries, 32);
}

}  // namespace
}  // namespace kvkeep::testing::defensive_test
