// Expected Attention against plain loops in double; both ways of multiplying, every instruction set.

#include "kvkeep/score/expected.h"
#include "kvkeep/torch.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kvkeep/kvkeep.h"
#include "oracle/expected_oracle.h"
#include "scorer_case.h"

namespace kvkeep::expected_test {
namespace {

using testing::expect_equal_slots_score_equal_bits;
using testing::expect_scorer_laws;
using testing::expect_scores_agree;
using testing::for_every_instruction_set;

testing::ScorerOracle oracle_of(const ExpectedOptions& o) {
  return [settings = oracle::ExpectedSettings{o.future, o.sink, o.covariance, o.value_norm, o.epsilon, o.queries}](
             const oracle::ScorerInput& in) { return oracle::expected(in, settings); };
}

void expect_as_in_plain_loops(const ExpectedOptions& o, int cases, testing::Tolerance tolerance) {
  expect_scores_agree(Expected(o), oracle_of(o), cases, tolerance);
}

// The events hold keys a hundred times louder than the rest, whose logits are in the thousands: an fp32 logit is then
// off by some 1e-3, and so is its exponential.
constexpr testing::Tolerance kPlain{2e-6, 5e-3}, kUnit{2e-6, 2e-2};

TEST(Expected, AgreesWithPlainLoops) {
  expect_as_in_plain_loops({.matrix_unit = false}, 30, kPlain);
  expect_as_in_plain_loops({.future = 7, .sink = 0, .epsilon = 0, .queries = 11, .matrix_unit = false}, 30, kPlain);
  expect_as_in_plain_loops({.covariance = false, .value_norm = false, .epsilon = 0, .matrix_unit = false}, 30, kPlain);
}

TEST(Expected, AgreesWithPlainLoopsWhereTheMatrixUnitMultiplies) { expect_as_in_plain_loops({}, 40, kUnit); }

TEST(Expected, AgreesOnEveryInstructionSet) {
  for_every_instruction_set([] { expect_as_in_plain_loops({}, 6, kUnit); });
}

TEST(Expected, TakesAllQueriesThatAreThere) {
  expect_as_in_plain_loops({.queries = 1 << 20, .matrix_unit = false}, 12, kPlain);
}

TEST(Expected, KeepsTheLawsOfScorers) {
  expect_scorer_laws(Expected(), 12);
  expect_scorer_laws(Expected({.matrix_unit = false}), 12);
  expect_equal_slots_score_equal_bits(Expected({.sink = 0}), 40);
  expect_equal_slots_score_equal_bits(Expected({.sink = 0, .matrix_unit = false}), 40);
}

TEST(Expected, AgreesWithPlainLoopsWhereEpsilonIsGivenAndNoValueWeighs) {
  expect_as_in_plain_loops({.value_norm = false, .epsilon = 0.25, .matrix_unit = false}, 20, kPlain);
}

/// One layer and sequence, one KV head; what stands in it is given.
struct Small {
  ModelSpec spec;
  at::Tensor keys, values, queries;  ///< [1, Hkv, T, D], [1, Hkv, T, Dv], [N, Hq, D]
  std::int32_t next = 0;
  QueryBasis basis = QueryBasis::pre_rope;

  at::Tensor score(const ExpectedOptions& options) const {
    const SequenceId id = 0;
    auto length = static_cast<std::int32_t>(keys.size(2));
    const std::int32_t zero = 0, count = static_cast<std::int32_t>(queries.size(0));
    CacheView view{.layers = {DenseKv{keys, values}}, .sequences = {&id, 1}, .lengths = {{&length, 1}}};
    RowTable table = make_rows(spec, view, {&zero, 1}, {&zero, 1});
    std::vector<std::int32_t> positions(static_cast<std::size_t>(length)),
        query_positions(static_cast<std::size_t>(count));
    std::iota(positions.begin(), positions.end(), 0);
    std::iota(query_positions.begin(), query_positions.end(), next - count);
    for (Row& row : table.rows) row.positions = positions.data();
    const auto bytes = static_cast<std::int64_t>(queries.element_size());
    table.groups[0].queries = {.data = static_cast<const std::byte*>(queries.const_data_ptr()),
                               .dtype = dtype_of(queries.scalar_type()),
                               .token_stride = queries.stride(0) * bytes,
                               .head_stride = queries.stride(1) * bytes,
                               .positions = query_positions.data(),
                               .ring = count,
                               .begin = 0,
                               .count = count};
    table.groups[0].next_position = next;
    Limits limits = even_limits(table, 1);
    for (RowLimit& row : limits.rows) row.due = true;
    WindowAttention seen;
    return Expected(options).score({spec, table, basis}, limits, seen).data;
  }
};

Small random_small(std::int32_t group, std::int32_t dim, std::int64_t slots, std::int64_t queries, at::ScalarType dtype,
                   double size = 1) {
  Small s{.spec = {.query_heads = group,
                   .kv_heads = 1,
                   .key_dim = dim,
                   .value_dim = dim,
                   .softmax_scale = 0,
                   .rope = {},
                   .layers = std::vector<LayerSpec>(1)},
          .keys = at::randn({1, 1, slots, dim}).to(dtype),
          .values = at::randn({1, 1, slots, dim}).to(dtype),
          .queries = at::randn({queries, group, dim}).mul(size).to(dtype),
          .next = static_cast<std::int32_t>(slots)};
  for (std::int32_t f = 0; f < dim / 2; ++f) s.spec.rope.inv_freq.push_back(std::pow(1e4, -2.0 * f / dim));
  if (dim < 2) s.spec.rope = RopeSpec::absent();
  return s;
}

TEST(Expected, AddsEpsilonOnlyWhereTheValueWeighs) {
  const Small s = random_small(2, 4, 30, 9, at::kFloat);
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
                .keys = at::tensor({1.0F, 0.2F, -0.5F, 0.7F, 0.3F, -1.0F}).view({1, 1, 3, 2}),
                .values = at::tensor({1.0F, 0.0F, 0.0F, 2.0F, 0.6F, 0.8F}).view({1, 1, 3, 2}),
                .queries = at::tensor({1.0F, 0.0F, 0.8F, 0.4F, 1.2F, -0.1F, 0.6F, 0.1F}).view({4, 1, 2}),
                .next = 8};
  const at::Tensor g = s.score({.future = 2, .sink = 0});
  const float want[] = {0.241111F, 0.489974F, 0.543901F};
  for (int t = 0; t < 3; ++t) EXPECT_NEAR(g.data_ptr<float>()[t], want[t], 2e-6) << t;
}

/// The same event for the second implementation.
oracle::ScorerInput in_plain_numbers(const Small& s) {
  oracle::ScorerInput in;
  in.Hq = s.spec.query_heads, in.D = s.spec.key_dim, in.Dv = s.spec.value_dim;
  in.scale = s.spec.scale(), in.inv_freq = s.spec.rope.inv_freq, in.P = s.next;
  in.interleaved = s.spec.rope.style == RopeStyle::interleaved, in.attention_scaling = s.spec.rope.attention_scaling;
  const auto floats = [](const at::Tensor& t) {
    const at::Tensor f = t.to(at::kFloat).contiguous();
    return std::vector<float>(f.data_ptr<float>(), f.data_ptr<float>() + f.numel());
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
  const ExpectedOptions o{.value_norm = false, .epsilon = 0, .matrix_unit = false};
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16})
    for (const std::int32_t dim : {1, 2, 7, 32, 64, 100, 128, 130})
      for (const std::int64_t queries : {5, 20, 200}) {
        Small s = random_small(dim % 3 + 1, dim, 70, queries, dtype);
        s.next = 5000;
        if (dim == 64) s.spec.rope.style = RopeStyle::interleaved;
        if (dim == 100) s.spec.rope.attention_scaling = 1.2;
        const auto want = oracle::expected(in_plain_numbers(s), {.value_norm = false, .epsilon = 0});
        const at::Tensor plain = s.score(o), unit = s.score({.value_norm = false, .epsilon = 0});
        for (int t = 4; t < 70; ++t) {
          const double w = want[0][static_cast<std::size_t>(t)];
          EXPECT_NEAR(plain.data_ptr<float>()[t], w, 1e-8 + 3e-5 * w) << dim << ", " << queries << " queries";
          EXPECT_NEAR(unit.data_ptr<float>()[t], w, 1e-8 + 5e-4 * w) << dim << ", " << queries << " queries";
        }
      }
}

TEST(Expected, HasNoCovarianceOfOneQueryAndRanksByAgeWithoutAny) {
  Small s = random_small(2, 8, 20, 1, at::kFloat);
  EXPECT_TRUE(s.score({.sink = 0}).equal(s.score({.sink = 0, .covariance = false})));
  const at::Tensor by_age = s.score({.sink = 20});  // the only query stands at position 19
  for (int t = 0; t < 20; ++t) EXPECT_EQ(by_age.data_ptr<float>()[t], static_cast<float>(t));
}

TEST(Expected, StaysFiniteWhereTheCovarianceIsHuge) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const double size : {1e4, 1e12, 1e25}) {
      const Small s = random_small(2, 64, 100, 40, dtype, size);
      const at::Tensor g = s.score({});
      EXPECT_TRUE(at::isfinite(g).all().item<bool>()) << size;
      EXPECT_GT(g.slice(0, 4).max().item<float>(), 0);
    }
}

TEST(Expected, AKeyWhoseSquareLeavesFp32GetsTheLargestScore) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Small s = random_small(2, 64, 100, 200, dtype);
    s.keys[0][0][50].mul_(1e30);
    const at::Tensor g = s.score({.value_norm = false});
    EXPECT_TRUE(at::isfinite(g).all().item<bool>());
    EXPECT_EQ(g.argmax().item<std::int64_t>(), 0);  // a sink, which gets that of slot 50
    EXPECT_EQ(g.slice(0, 4).argmax().item<std::int64_t>(), 46);
  }
}

TEST(Expected, OnlyTheProductOfTheSizesOfQueriesAndKeysCounts) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const double size : {0x1p-70, 0x1p70})
      for (const std::int64_t queries : {40, 200}) {
        Small s = random_small(2, 64, 100, queries, dtype);
        const at::Tensor g = s.score({.epsilon = 0});
        s.queries = s.queries.mul(size);
        s.keys = s.keys.mul(1 / size);
        EXPECT_TRUE(at::allclose(s.score({.epsilon = 0}), g, 1e-5, 0))
            << dtype << ", " << size << ", " << queries << " queries";
      }
}

TEST(Expected, IsIndifferentToTheSizeOfTinyQueries) {
  const Small s = random_small(1, 16, 30, 20, at::kFloat, 1e-12);
  const at::Tensor g = s.score({.sink = 0, .value_norm = false, .epsilon = 0});
  EXPECT_TRUE(at::allclose(g, at::full({30}, 1.0 / 30), 1e-5, 0));
}

TEST(Expected, ANaNStaysInItsSlot) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Small s = random_small(3, 64, 50, 30, dtype);
    s.keys[0][0][20][3] = std::numeric_limits<float>::quiet_NaN();
    s.values[0][0][30][5] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor g = s.score({});
    for (int t = 0; t < 50; ++t) EXPECT_EQ(std::isnan(g.data_ptr<float>()[t]), t == 20 || t == 30) << t;
  }
}

TEST(Expected, ZeroValuesScoreZeroAndZeroKeysDoNot) {
  Small s = random_small(2, 32, 40, 30, at::kFloat);
  s.keys[0][0][10].zero_();
  s.values[0][0][11].zero_();
  const at::Tensor g = s.score({});
  EXPECT_GT(g.data_ptr<float>()[10], 0);
  EXPECT_EQ(g.data_ptr<float>()[11], 0);
}

TEST(Expected, RefusesQueriesThatAreNotFinite) {
  Small s = random_small(2, 8, 20, 10, at::kFloat);
  s.queries[4][1][2] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(static_cast<void>(s.score({})), InvalidArgument);
}

TEST(Expected, TheMatrixUnitComesAsNearAsItSays) {
  for (const std::int32_t dim : {32, 64, 96, 128}) {
    const Small s = random_small(7, dim, 300, 200, at::kBFloat16, 2);
    const at::Tensor unit = s.score({.value_norm = false, .epsilon = 0}),
                     plain = s.score({.value_norm = false, .epsilon = 0, .matrix_unit = false});
    EXPECT_TRUE(at::allclose(unit, plain, 2e-3, 1e-9))
        << dim << ": " << unit.sub(plain).abs().div(plain).max().item<float>();
  }
}

TEST(Expected, OfEightComponentsSinksGetTheLargestScoreOfTheOthers) {
  const Small s = random_small(2, 8, 30, 25, at::kFloat);
  const at::Tensor g = s.score({.sink = 4});
  for (int t = 0; t < 4; ++t) EXPECT_EQ(g.data_ptr<float>()[t], g.slice(0, 4).max().item<float>());
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
