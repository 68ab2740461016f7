// SPDX-License-Identifier: Apache-2.0
// Expected Attention against plain loops in double; both ways of multiplying, every instruction set.

#include "kvkeep/score/expected.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "expected_case.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/simd/expected_lanes.h"
#include "oracle/expected_oracle.h"
#include "scorer_case.h"

namespace kvkeep::expected_test {
namespace {

using testing::expect_equal_slots_score_equal_bits;
using testing::expect_scorer_laws;
using testing::expect_scores_agree;
using testing::for_every_instruction_set;

/// While it lives, the machine has a matrix unit: products of bf16, summed up in f32 by plain loops.
class PlainUnit {
 public:
  PlainUnit() { cpu::use_matrix_unit(&kUnit); }
  ~PlainUnit() { cpu::use_matrix_unit(nullptr); }
  PlainUnit(const PlainUnit&) = delete;
  PlainUnit& operator=(const PlainUnit&) = delete;

 private:
  static void multiply_pairs(std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a,
                             std::int64_t a_stride, const std::uint16_t* b, std::int64_t b_stride, bool add, float* c) {
    const auto number = [](std::uint16_t bits) { return static_cast<float>(BFloat16::from_bits(bits)); };
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t n = 0; n < columns; ++n) {
        float sum = add ? c[r * columns + n] : 0;
        for (std::int64_t k = 0; k < depth; ++k)
          sum += number(a[r * a_stride + k]) * number(b[k / 2 * 2 * b_stride + 2 * n + k % 2]);
        c[r * columns + n] = sum;
      }
  }
  static constexpr cpu::MatrixUnit kUnit{multiply_pairs, [] {}};
};

testing::ScorerOracle oracle_of(const ExpectedOptions& o) {
  return [settings = oracle::ExpectedSettings{o.future, o.sink, o.covariance, o.value_norm, o.epsilon, o.queries}](
             const oracle::ScorerInput& in) { return oracle::expected(in, settings); };
}

void expect_as_in_plain_loops(const ExpectedOptions& o, int cases, testing::Tolerance tolerance) {
  expect_scores_agree(Expected(o), oracle_of(o), cases, tolerance, {.caps = false});
}

// The events hold keys a hundred times louder than the rest, whose logits are in the thousands: an fp32 logit is then
// off by some 1e-3, and so is its exponential.
constexpr testing::Tolerance kPlain{2e-6, 5e-3}, kOfUnit{2e-6, 2e-2};

TEST(Expected, AgreesWithPlainLoops) {
  expect_as_in_plain_loops({.matrix_unit = false}, 30, kPlain);
  expect_as_in_plain_loops({.future = 7, .sink = 0, .epsilon = 0, .queries = 11, .matrix_unit = false}, 30, kPlain);
  expect_as_in_plain_loops({.covariance = false, .value_norm = false, .epsilon = 0, .matrix_unit = false}, 30, kPlain);
}

TEST(Expected, AgreesWithPlainLoopsWhereTheMatrixUnitMultiplies) {
  const PlainUnit unit;
  expect_as_in_plain_loops({}, 40, kOfUnit);
}

TEST(Expected, AgreesOnEveryInstructionSet) {
  const PlainUnit machine;
  for_every_instruction_set([] { expect_as_in_plain_loops({}, 6, kOfUnit); });
}

TEST(Expected, TakesAllQueriesThatAreThere) {
  expect_as_in_plain_loops({.queries = 1 << 20, .matrix_unit = false}, 12, kPlain);
}

TEST(Expected, KeepsTheLawsOfScorers) {
  const PlainUnit machine;
  expect_scorer_laws(Expected(), 12, {.caps = false});
  expect_scorer_laws(Expected({.matrix_unit = false}), 12, {.caps = false});
  expect_equal_slots_score_equal_bits(Expected({.sink = 0}), 40, {.caps = false});
  expect_equal_slots_score_equal_bits(Expected({.sink = 0, .matrix_unit = false}), 40, {.caps = false});
}

TEST(Expected, AgreesWithPlainLoopsWhereEpsilonIsGivenAndNoValueWeighs) {
  expect_as_in_plain_loops({.value_norm = false, .epsilon = 0.25, .matrix_unit = false}, 20, kPlain);
}

float largest_from(const Array& g, std::int64_t first) {
  return *std::max_element(g.data<float>() + first, g.data<float>() + g.numel());
}

TEST(Expected, AddsEpsilonOnlyWhereTheValueWeighs) {
  const Small s = random_small(2, 4, 30, 9, Dtype::f32);
  EXPECT_TRUE(s.score({.value_norm = false, .epsilon = 0.5}).equal(s.score({.value_norm = false, .epsilon = 0})));
  EXPECT_FALSE(s.score({.epsilon = 0.5}).equal(s.score({.epsilon = 0})));
}

TEST(Expected, GivesTheNumbersWorkedOutByHand) {
  const Small s{.spec = {.query_heads = 1,
                         .kv_heads = 1,
                         .key_dim = 2,
                         .value_dim = 2,
                         .softmax_scale = 0,
                         .rope = {.inv_freq = {0.5}},
                         .layers = std::vector<LayerSpec>(1)},
                .keys = Array::of({1.0F, 0.2F, -0.5F, 0.7F, 0.3F, -1.0F}).reshape({1, 1, 3, 2}),
                .values = Array::of({1.0F, 0.0F, 0.0F, 2.0F, 0.6F, 0.8F}).reshape({1, 1, 3, 2}),
                .queries = Array::of({1.0F, 0.0F, 0.8F, 0.4F, 1.2F, -0.1F, 0.6F, 0.1F}).reshape({4, 1, 2}),
                .next = 8};
  const Array g = s.score({.future = 2, .sink = 0});
  const float want[] = {0.241111F, 0.489974F, 0.543901F};
  for (int t = 0; t < 3; ++t) EXPECT_NEAR(g.data<float>()[t], want[t], 2e-6) << t;
}

/// The same event for the second implementation.
oracle::ScorerInput in_plain_numbers(const Small& s) {
  oracle::ScorerInput in;
  in.Hq = s.spec.query_heads, in.D = s.spec.key_dim, in.Dv = s.spec.value_dim;
  in.scale = s.spec.scale(), in.inv_freq = s.spec.rope.inv_freq, in.P = s.next;
  in.interleaved = s.spec.rope.style == RopeStyle::interleaved, in.attention_scaling = s.spec.rope.attention_scaling;
  const auto floats = [](const Array& t) {
    const Array f = t.to(Dtype::f32).contiguous();
    return std::vector<float>(f.data<float>(), f.data<float>() + f.numel());
  };
  in.heads.push_back({.T = static_cast<int>(s.keys.size(2)),
                      .keys = floats(s.keys),
                      .values = floats(s.values),
                      .positions = {},
                      .tally = {},
                      .given = {},
                      .budget = 1,
                      .due = true,
                      .sinks = 0,
                      .recents = 0});
  for (const float q : floats(s.queries.permute({1, 0, 2}))) in.queries_pre.push_back(static_cast<double>(q));
  for (std::int64_t i = 0; i < s.queries.size(0); ++i)
    in.query_positions.push_back(s.next - static_cast<int>(s.queries.size(0) - i));
  return in;
}

TEST(Expected, IsTrueToFp32WhereLogitsAreOfModerateSize) {
  const PlainUnit machine;
  const ExpectedOptions o{.value_norm = false, .epsilon = 0, .matrix_unit = false};
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
    for (const std::int32_t dim : {1, 2, 7, 32, 64, 100, 128, 130})
      for (const std::int64_t queries : {5, 20, 200}) {
        Small s = random_small(dim % 3 + 1, dim, 70, queries, dtype);
        s.next = 5000;
        if (dim == 64) s.spec.rope.style = RopeStyle::interleaved;
        if (dim == 100) s.spec.rope.attention_scaling = 1.2;
        const auto want = oracle::expected(in_plain_numbers(s), {.value_norm = false, .epsilon = 0});
        const Array plain = s.score(o), unit = s.score({.value_norm = false, .epsilon = 0});
        for (int t = 4; t < 70; ++t) {
          const double w = want[0][static_cast<std::size_t>(t)];
          EXPECT_NEAR(plain.data<float>()[t], w, 1e-8 + 3e-5 * w) << dim << ", " << queries << " queries";
          EXPECT_NEAR(unit.data<float>()[t], w, 1e-8 + 5e-4 * w) << dim << ", " << queries << " queries";
        }
      }
}

TEST(Expected, HasNoCovarianceOfOneQueryAndRanksByAgeWithoutAny) {
  Small s = random_small(2, 8, 20, 1, Dtype::f32);
  EXPECT_TRUE(s.score({.sink = 0}).equal(s.score({.sink = 0, .covariance = false})));
  const Array by_age = s.score({.sink = 20});  // the only query stands at position 19
  for (int t = 0; t < 20; ++t) EXPECT_EQ(by_age.data<float>()[t], static_cast<float>(t));
}

TEST(Expected, StaysFiniteWhereTheCovarianceIsHuge) {
  const PlainUnit machine;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const double size : {1e4, 1e12, 1e25}) {
      const Small s = random_small(2, 64, 100, 40, dtype, size);
      const Array g = s.score({});
      EXPECT_TRUE(all_finite(g)) << size;
      EXPECT_GT(largest_from(g, 4), 0);
    }
}

TEST(Expected, AKeyWhoseSquareLeavesFp32GetsTheLargestScore) {
  const PlainUnit machine;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Small s = random_small(2, 64, 100, 200, dtype);
    s.keys[0][0][50].copy_(s.keys[0][0][50].to(Dtype::f32).clone().mul_(1e30));
    const Array g = s.score({.value_norm = false});
    EXPECT_TRUE(all_finite(g));
    EXPECT_EQ(g.data<float>()[0], largest_from(g, 0)) << "a sink, which gets that of slot 50";
    EXPECT_EQ(g.data<float>()[50], largest_from(g, 4));
  }
}

TEST(Expected, OnlyTheProductOfTheSizesOfQueriesAndKeysCounts) {
  const PlainUnit machine;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const double size : {0x1p-70, 0x1p70})
      for (const std::int64_t queries : {40, 200}) {
        Small s = random_small(2, 64, 100, queries, dtype);
        const Array g = s.score({.epsilon = 0});
        s.queries.copy_(s.queries.to(Dtype::f32).clone().mul_(size));
        s.keys.copy_(s.keys.to(Dtype::f32).clone().mul_(1 / size));
        EXPECT_TRUE(close(s.score({.epsilon = 0}), g, 1e-5, 0))
            << dtype << ", " << size << ", " << queries << " queries";
      }
}

TEST(Expected, IsIndifferentToTheSizeOfTinyQueries) {
  const Small s = random_small(1, 16, 30, 20, Dtype::f32, 1e-12);
  const Array g = s.score({.sink = 0, .value_norm = false, .epsilon = 0});
  EXPECT_TRUE(close(g, Array::full({30}, 1.0 / 30), 1e-5, 0));
}

TEST(Expected, ANaNStaysInItsSlot) {
  const PlainUnit machine;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Small s = random_small(3, 64, 50, 30, dtype);
    s.keys[0][0][20][3].fill_(std::numeric_limits<float>::quiet_NaN());
    s.values[0][0][30][5].fill_(std::numeric_limits<float>::quiet_NaN());
    const Array g = s.score({});
    for (int t = 0; t < 50; ++t) EXPECT_EQ(std::isnan(g.data<float>()[t]), t == 20 || t == 30) << t;
  }
}

TEST(Expected, ZeroValuesScoreZeroAndZeroKeysDoNot) {
  Small s = random_small(2, 32, 40, 30, Dtype::f32);
  s.keys[0][0][10].fill_(0);
  s.values[0][0][11].fill_(0);
  const Array g = s.score({});
  EXPECT_GT(g.data<float>()[10], 0);
  EXPECT_EQ(g.data<float>()[11], 0);
}

TEST(Expected, RefusesQueriesThatAreNotFinite) {
  Small s = random_small(2, 8, 20, 10, Dtype::f32);
  s.queries[4][1][2].fill_(std::numeric_limits<float>::infinity());
  EXPECT_THROW(static_cast<void>(s.score({})), InvalidArgument);
}

TEST(Expected, OfEightComponentsSinksGetTheLargestScoreOfTheOthers) {
  const Small s = random_small(2, 8, 30, 25, Dtype::f32);
  const Array g = s.score({.sink = 4});
  for (int t = 0; t < 4; ++t) EXPECT_EQ(g.data<float>()[t], largest_from(g, 4));
  EXPECT_EQ(Expected({.sink = 4}).padding().oldest, 4);
}

TEST(Expected, ItsWorkspaceGrowsWithTheRowByFourBytesAQueryHead) {
  const ModelSpec spec{.query_heads = 28,
                       .kv_heads = 4,
                       .key_dim = 128,
                       .value_dim = 128,
                       .softmax_scale = 0,
                       .rope = {},
                       .layers = std::vector<LayerSpec>(1)};
  const std::int64_t base = Expected::workspace_bytes(spec, 1024, 256);
  EXPECT_EQ(Expected::workspace_bytes(spec, 131072, 256) - base, 4 * 7 * (131072 - 1024));
  EXPECT_LE(base, 4 << 20);
}

TEST(Expected, SaysWhatItNeeds) {
  EXPECT_EQ(make_policy("expected,budget=64")->needs().queries, 256);
  EXPECT_TRUE(make_policy("expected,budget=64")->needs().values);
  EXPECT_FALSE(make_policy("expected,budget=64,value_norm=false")->needs().values);
}

}  // namespace
}  // namespace kvkeep::expected_test
