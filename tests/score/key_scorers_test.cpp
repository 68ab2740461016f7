// SPDX-License-Identifier: Apache-2.0
// Scorers that read no queries: KeyDiff, Knorm, random.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "arrays.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "oracle/key_oracle.h"
#include "scorer_case.h"

namespace kvkeep::key_scorers_test {
namespace {

using testing::Array;
using testing::expect_equal_slots_score_equal_bits;
using testing::expect_scorer_laws;
using testing::expect_scores_agree;

/// One row of keys [T, D], to be cut to half.
std::vector<float> score_row(const Scorer& scorer, const Array& keys) {
  const ModelSpec spec{.query_heads = 1,
                       .kv_heads = 1,
                       .key_dim = static_cast<std::int32_t>(keys.size(1)),
                       .value_dim = static_cast<std::int32_t>(keys.size(1)),
                       .softmax_scale = 0,
                       .rope = {},
                       .layers = std::vector<LayerSpec>(1)};
  const SequenceId id = 0;
  std::int32_t length = static_cast<std::int32_t>(keys.size(0));
  const std::int32_t zero = 0;
  const Array rows = keys.unsqueeze(0).unsqueeze(0).contiguous();
  const std::vector<LayerKv> cache{DenseKv{rows, rows}};
  RowTable table = make_rows(spec, cache, {{&id, 1}, {{&length, 1}}}, {&zero, 1}, {&zero, 1});
  std::vector<std::int32_t> positions(static_cast<std::size_t>(length));
  for (std::int32_t t = 0; t < length; ++t) positions[static_cast<std::size_t>(t)] = t;
  table.rows[0].positions = positions.data();
  WindowAttention seen;
  const Scores scores = scorer.score({spec, table}, even_limits(table, std::max(length / 2, 1)), seen);
  return {scores.data.data<float>(), scores.data.data<float>() + length};
}

TEST(KeyDiff,
     ScoresTheOneKeyThatPointsElsewhereHighest) {  // directions (1,0) three times and (0,1): the mean is (0.75, 0.25)
  const std::vector<float> g =
      score_row(KeyDiff(), Array::of({1.0F, 0.0F, 5.0F, 0.0F, 0.0F, 2.0F, 0.1F, 0.0F}).reshape({4, 2}));
  const float length = std::sqrt(0.75F * 0.75F + 0.25F * 0.25F);
  EXPECT_NEAR(g[0], -0.75F / length, 1e-6F);
  EXPECT_NEAR(g[1], -0.75F / length, 1e-6F);
  EXPECT_NEAR(g[2], -0.25F / length, 1e-6F);
  EXPECT_NEAR(g[3], -0.75F / length, 1e-6F);
}

TEST(KeyDiff, RanksByAgeWhereTheDirectionsCancelAndScoresZeroKeysZero) {
  for (const float g :
       score_row(KeyDiff(), Array::of({1.0F, 2.0F, -1.0F, -2.0F, 3.0F, 1.0F, -3.0F, -1.0F}).reshape({4, 2})))
    EXPECT_EQ(g, 0.0F);
  for (const float g : score_row(KeyDiff(), Array::of({0.0F, 0.0F, 0.0F, 0.0F}).reshape({2, 2}))) EXPECT_EQ(g, 0.0F);
  EXPECT_EQ(score_row(KeyDiff(), Array::of({0.0F, 0.0F, 1.0F, 1.0F}).reshape({2, 2}))[0], 0.0F);
}

TEST(KeyDiff, AgreesWithPlainLoopsOnRandomEvents) {
  // In one dimension all directions are 1 and -1, and where they cancel only rounding is left of their mean.
  const testing::ScorerCaseOptions options{.least_dim = 2};
  testing::for_every_instruction_set([&] { expect_scores_agree(KeyDiff(), oracle::keydiff, 40, {2e-5, 0}, options); });
  expect_scores_agree(KeyDiff(), oracle::keydiff, 300, {2e-5, 0}, options);
}

TEST(KeyDiff, ObeysTheLawsOfScorers) {
  expect_scorer_laws(KeyDiff(), 25);
  expect_equal_slots_score_equal_bits(KeyDiff(), 100);
}

TEST(KeyDiff, NeedsRoomForTheMeanOnlyHoweverLongTheRow) { EXPECT_EQ(KeyDiff::workspace_bytes(128), 128 * 12 + 32 * 4); }

TEST(Knorm, ScoresMinusTheNorm) {
  const std::vector<float> g = score_row(Knorm(), Array::of({3.0F, 4.0F, 0.0F, 0.0F, -5.0F, 12.0F}).reshape({3, 2}));
  EXPECT_FLOAT_EQ(g[0], -5);
  EXPECT_EQ(g[1], 0);
  EXPECT_FLOAT_EQ(g[2], -13);
}

TEST(Knorm, AgreesWithPlainLoopsOnRandomEvents) {
  testing::for_every_instruction_set([] { expect_scores_agree(Knorm(), oracle::knorm, 30, {1e-6, 1e-6}); });
  expect_scores_agree(Knorm(), oracle::knorm, 300, {1e-6, 1e-6});
}

TEST(Knorm, ObeysTheLawsOfScorers) {
  expect_scorer_laws(Knorm(), 25);
  expect_equal_slots_score_equal_bits(Knorm(), 100);
}

TEST(Cur, SharesOutEachWindowByKeysAndValues) {
  // Two windows of two slots; |k|^2 1 3, 4; |v|^2 1 1, 9.
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  spec.key_dim = 2, spec.value_dim = 1;
  spec.layers.resize(1);
  float keys[] = {1, 0, 1, std::sqrt(2.0F), 0, 2}, values[] = {1, -1, 3};
  std::int32_t positions[] = {0, 1, 2};
  RowTable table;
  table.rows.resize(1);
  table.rows[0].length = 3;
  table.rows[0].positions = positions;
  table.rows[0].keys = {.base = reinterpret_cast<std::byte*>(keys), .stride = 8, .width = 8};
  table.rows[0].values = {.base = reinterpret_cast<std::byte*>(values), .stride = 4, .width = 4};
  table.groups.resize(1);
  table.slots = 3;
  const Scores g = Cur({.window = 2}).score({.spec = spec, .table = table}, even_limits(table, 2), {});
  EXPECT_FLOAT_EQ(g.data.data<float>()[0], 1.0F / 4 / 2);
  EXPECT_FLOAT_EQ(g.data.data<float>()[1], 3.0F / 4 / 2);
  EXPECT_FLOAT_EQ(g.data.data<float>()[2], 1);
}

TEST(Cur, AgreesWithPlainLoopsOnRandomEvents) {
  for (const int window : {0, 1, 3, 16})
    expect_scores_agree(Cur({window}), [window](const oracle::ScorerInput& in) { return oracle::cur(in, window); }, 60,
                        {1e-6, 1e-5});
}

TEST(Cur, ObeysTheLawsOfScorers) { expect_scorer_laws(Cur(), 25); }

TEST(RandomScorer, ObeysTheLawsOfScorers) { expect_scorer_laws(RandomScorer({3}), 25); }

TEST(RandomAttention, ObeysTheLawsOfScorers) { expect_scorer_laws(RandomAttention({3}), 25); }

TEST(RandomAttention, DrawsAnewAtEveryEventWhereRandomKeepsItsDraws) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  spec.layers.resize(1);
  constexpr std::int32_t kSlots = 2001;
  std::vector<std::int32_t> positions(kSlots);
  for (std::int32_t t = 0; t < kSlots; ++t) positions[static_cast<std::size_t>(t)] = 3 * t;
  const auto draws = [&](const Scorer& scorer, std::int32_t slots) {
    RowTable table;
    table.rows.resize(1);
    table.rows[0].positions = positions.data();
    table.slots = table.rows[0].length = slots;
    table.groups.resize(1);
    const Scores g = scorer.score({.spec = spec, .table = table}, even_limits(table, 10), {});
    return std::vector<float>(g.data.data<float>(), g.data.data<float>() + kSlots - 1);
  };
  EXPECT_EQ(draws(RandomScorer(), kSlots - 1), draws(RandomScorer(), kSlots));
  EXPECT_EQ(draws(RandomAttention(), kSlots), draws(RandomAttention(), kSlots)) << "runs can be repeated";
  const std::vector<float> first = draws(RandomAttention(), kSlots - 1), second = draws(RandomAttention(), kSlots);
  double sum = 0, product = 0;
  for (std::size_t t = 0; t < first.size(); ++t) {
    ASSERT_GE(second[t], 0.0F);
    ASSERT_LT(second[t], 1.0F);
    sum += second[t];
    product += (first[t] - 0.5) * (second[t] - 0.5);
  }
  EXPECT_NEAR(sum / 2000, 0.5, 0.03);
  EXPECT_NEAR(product / 2000 * 12, 0, 0.1) << "one event's draws say nothing of the next one's";
}

TEST(RandomScorer, DrawsBySeedLayerHeadAndPositionNotBySlot) {
  std::int64_t compared = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const testing::ScorerCase c(seed);
    const testing::ScorerArrangement arrangement = c.arranged();
    const Scores a = testing::scores_of(RandomScorer({7}), arrangement),
                 other = testing::scores_of(RandomScorer({8}), arrangement);
    std::map<std::tuple<int, int, int>, float> drawn;
    std::set<float> values;
    for (const Row& row : arrangement.table().rows) {
      if (!arrangement.input(row).heads[static_cast<std::size_t>(row.head)].due) continue;
      for (std::int32_t t = 0; t < row.length; ++t) {
        const float g = a.data.data<float>()[row.first + t];
        ASSERT_GE(g, 0.0F);
        ASSERT_LT(g, 1.0F);
        EXPECT_NE(g, other.data.data<float>()[row.first + t]) << c.description();
        const auto [at, fresh] = drawn.try_emplace({row.layer, row.head, row.positions[t]}, g);
        EXPECT_EQ(at->second, g) << "sequences draw alike; " << c.description();
        values.insert(g);
        ++compared;
      }
    }
    EXPECT_GE(values.size() + 3, drawn.size()) << "draws repeat; " << c.description();
  }
  EXPECT_GT(compared, 0);
}

TEST(RandomScorer, DrawsEvenly) {
  const std::vector<float> g = score_row(RandomScorer({1}), Array::zeros({20000, 1}));
  double sum = 0, square = 0;
  for (const float x : g) sum += x, square += x * x;
  EXPECT_NEAR(sum / 20000, 0.5, 0.01);
  EXPECT_NEAR(square / 20000, 1.0 / 3, 0.01);
}

}  // namespace
}  // namespace kvkeep::key_scorers_test
