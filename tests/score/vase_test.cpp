// SPDX-License-Identifier: Apache-2.0
// VaSE against plain loops, and as a sample.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "engines.h"
#include "kvkeep/score/vase.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing::vase_test {
namespace {

TEST(Vase, ObeysTheLawsOfScorers) { expect_scorer_laws(Vase({.window = 8, .seed = 3}), 25); }

/// One row of 40 slots with one query; values of slots 5, 6, 7 span more than the others.
struct Rows {
  Rows() {
    spec.query_heads = spec.kv_heads = 1;
    spec.key_dim = spec.value_dim = 2;
    spec.layers.resize(1);
    for (std::int32_t t = 0; t < 40; ++t) {
      positions.push_back(t);
      keys.insert(keys.end(), {t % 2 == 0 ? 2.0F : 0.0F, 0.0F});
      const float high = t >= 5 && t <= 7 ? 5.0F : 1.0F;
      values.insert(values.end(), {high, -high});
    }
    table.rows.resize(1);
    table.rows[0].length = 40;
    table.rows[0].positions = positions.data();
    table.rows[0].keys = {.base = reinterpret_cast<std::byte*>(keys.data()), .stride = 8, .width = 8};
    table.rows[0].values = {.base = reinterpret_cast<std::byte*>(values.data()), .stride = 8, .width = 8};
    table.groups.resize(1);
    table.groups[0].next_position = 40;
    table.groups[0].queries = {.data = reinterpret_cast<const std::byte*>(query),
                               .token_stride = 8,
                               .head_stride = 8,
                               .positions = &query_position,
                               .ring = 1,
                               .count = 1};
    table.slots = 40;
  }
  [[nodiscard]] std::vector<float> score(const Vase& vase) const {
    const Evidence evidence{.spec = spec, .table = table, .basis = QueryBasis::post_rope};
    const Scores g = vase.score(evidence, even_limits(table, 16, 1, 2), {});
    return {g.data.data<float>(), g.data.data<float>() + 40};
  }

  ModelSpec spec;
  std::vector<std::int32_t> positions;
  std::vector<float> keys, values;
  float query[2] = {1.5F, 0};
  std::int32_t query_position = 39;
  RowTable table;
};

TEST(Vase, GivesAQuarterOfTheBudgetToTheWidestValues) {
  // 16 / 4 slots, of which the sink is one.
  const std::vector<float> g = Rows().score(Vase({.pool = 1}));
  std::vector<std::int32_t> above;
  for (std::int32_t t = 1; t < 38; ++t)
    if (g[static_cast<std::size_t>(t)] >= 0) above.push_back(t);
  EXPECT_EQ(above, (std::vector<std::int32_t>{5, 6, 7}));
  EXPECT_EQ(g[5], 10);
}

TEST(Vase, SeesEveryComponentOfAValue) {
  for (std::int32_t dim = 2; dim <= 35; ++dim)
    for (std::int32_t d = 0; d < dim; ++d)
      for (const auto& [x, wanted] : {std::pair{3.0F, 2.0F}, {-3.0F, 4.0F}, {INFINITY, -1.0F}, {NAN, -1.0F}}) {
        std::vector<float> value(static_cast<std::size_t>(dim), 1.0F);
        value[static_cast<std::size_t>(d)] = x;
        EXPECT_EQ(VaseOptions::range_of(value.data(), dim), wanted) << x << " at " << d << " of " << dim;
      }
}

TEST(Vase, SamplesTheRestInProportionToAttention) {
  // Even slots draw e^(3 / sqrt(2)) times the attention of odd ones: the first of a sample is one of them in 89 %.
  const Rows rows;
  int even = 0;
  constexpr int kSeeds = 2000;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const std::vector<float> g = rows.score(Vase({.pool = 1, .values_share = 0, .seed = seed}));
    const auto best = std::max_element(g.begin(), g.begin() + 38) - g.begin();
    even += best % 2 == 0 ? 1 : 0;
  }
  const double odds = std::exp(3 / std::sqrt(2.0)), wanted = odds / (1 + odds);
  EXPECT_NEAR(static_cast<double>(even) / kSeeds, wanted, 0.03);
}

TEST(Vase, NeverDropsTheSlotsOfItsQueries) {
  EXPECT_EQ(Vase().keeps_newest(), 64);
  EXPECT_EQ(Vase({.window = 8}).keeps_newest(), 8);
}

TEST(Vase, DrawsAnewAtEveryEventAndTheSameForTheSameSeed) {
  Rows rows;
  const std::vector<float> first = rows.score(Vase());
  EXPECT_EQ(rows.score(Vase()), first);
  EXPECT_NE(rows.score(Vase({.seed = 1})), first);
  rows.table.groups[0].next_position = 41;
  EXPECT_NE(rows.score(Vase()), first);
}

}  // namespace
}  // namespace kvkeep::testing::vase_test
