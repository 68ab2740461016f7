// SPDX-License-Identifier: Apache-2.0
// Expected Attention on a GPU against the CPU: every option, in f32 and on matrix units.

#include "expected.h"

#include "kvkeep/score/expected.h"
#include "value_case.h"

namespace kvkeep::cuda::expected_test {
namespace {

using ExpectedKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, const ValueCase& values, const ExpectedOptions& options,
                             DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const DeviceValues sides(c, there, values, layout);
  std::vector<std::int32_t> next;
  std::int32_t held = 1;
  for (const RowGroup& group : c.table.groups) {
    next.push_back(group.next_position);
    held = std::max(held, group.queries.count);
  }
  const DeviceArray<std::int32_t> positions(next);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  ExpectedArguments arguments{.evidence = there.arguments(),
                              .values = values.element,
                              .value_dim = c.shape.value_dim,
                              .next_positions = positions.data(),
                              .post_rope = !c.shape.pre_rope,
                              .future = options.future,
                              .sink = options.sink,
                              .covariance = options.covariance,
                              .value_norm = options.value_norm,
                              .epsilon = options.epsilon,
                              .queries = std::min(options.queries, held),
                              .matrix_unit = options.matrix_unit,
                              .slots = c.table.slots,
                              .scores = scores.data()};
  arguments.evidence.rows = sides.rows();
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(expected_workspace_bytes(arguments)) + 32);
  arguments.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 31) / 32 * 32);
  launch_expected(arguments, nullptr);
  return scores.download();
}

/// As on the CPU, which multiplies in f32 here. bf16 keys on matrix units meet a factor of 16 bits.
void expect_as_on_cpu(EvidenceCase& c, const ValueCase& values, const ExpectedOptions& options,
                      DeviceLayout layout = {}) {
  const double relative = c.shape.keys == Element::bf16 && options.matrix_unit ? 2e-3 : 2e-4;
  ExpectedOptions plain = options;
  plain.matrix_unit = false;
  WindowAttention unused;
  const Scores want = Expected(plain).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(
        expect_rows_agree(c, on_device(c, values, options, layout), want.data.data<float>(), 1e-7, relative));
  });
}

void expect_as_on_cpu(std::uint64_t seed, EvidenceShape shape, ExpectedOptions options, Element value = Element::f32,
                      DeviceLayout layout = {}) {
  EvidenceCase c(seed, std::move(shape));
  const ValueCase values(seed, c, value);
  expect_as_on_cpu(c, values, options, layout);
}

TEST_F(ExpectedKernel, AgreesWithTheCpuForEveryHeadSizeAndElement) {  // B25
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 2, 7, 33, 64, 80, 96, 128, 192, 256})
    for (const Element keys : kStored) {
      ++seed;
      expect_as_on_cpu(seed,
                       {.group = 2,
                        .dim = dim,
                        .value_dim = dim,
                        .lengths = {70, 3, 31},
                        .seen = seed % 2 == 0 ? 20
                                : dim > 128   ? 40
                                              : dim + 13,
                        .keys = keys,
                        .query = kStored[seed % 3],
                        .pre_rope = seed % 3 == 0,
                        .style = seed % 2 == 0 ? RopeStyle::half : RopeStyle::interleaved,
                        .ropes = oracle::Ropes::any},
                       {.future = 50, .epsilon = 0}, kStored[(seed / 2) % std::size(kStored)]);
    }
}

TEST_F(ExpectedKernel, FactorisesTheCovarianceOfMoreQueriesThanComponents) {
  std::uint64_t seed = 50;
  for (const std::int32_t dim : {128, 130, 192, 256})
    for (const Element keys : {Element::f32, Element::f16})
      expect_as_on_cpu(++seed, {.dim = dim, .value_dim = 4, .lengths = {66, 300}, .seen = dim + 70, .keys = keys},
                       {.queries = dim + 44});
}

TEST_F(ExpectedKernel, AgreesWithTheCpuForEveryGroup) {  // B15
  std::uint64_t seed = 100;
  for (const std::int32_t group : {1, 3, 4, 7, 8, 17, 33})
    for (const Element keys : kStored)
      ++seed, expect_as_on_cpu(seed,
                               {.group = group,
                                .kv_heads = 2,
                                .dim = 16,
                                .value_dim = 8,
                                .lengths = {45, 17},
                                .seen = seed % 2 == 0 ? 30 : 9,
                                .keys = keys,
                                .pre_rope = true,
                                .pairs = 6,
                                .ragged = true},
                               {.epsilon = 0.001}, kStored[seed % std::size(kStored)]);
}

TEST_F(ExpectedKernel, AgreesWithTheCpuForEveryLength) {  // B29
  std::uint64_t seed = 200;
  for (const std::int32_t length : {0, 1, 3, 4, 5, 31, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025})
    for (const Element keys : {Element::f32, Element::f16})
      ++seed, expect_as_on_cpu(seed, {.dim = 8, .lengths = {length, 5}, .seen = 12, .keys = keys},
                               {.value_norm = seed % 2 == 0});
}

TEST_F(ExpectedKernel, KnowsEveryOption) {
  std::uint64_t seed = 300;
  for (const bool covariance : {false, true})
    for (const bool value_norm : {false, true})
      for (const std::int32_t sink : {0, 1, 7, 40})
        for (const bool matrix_unit : {false, true})
          for (const std::int32_t queries : {1, 2, 11, 256})
            ++seed, expect_as_on_cpu(seed,
                                     {.group = 2,
                                      .dim = 12,
                                      .lengths = {60, 41, 40, 1},
                                      .seen = 33,
                                      .keys = kStored[seed % std::size(kStored)]},
                                     {.future = static_cast<std::int32_t>(seed % 5) * 100 + 1,
                                      .sink = sink,
                                      .covariance = covariance,
                                      .value_norm = value_norm,
                                      .epsilon = 0.1,
                                      .queries = queries,
                                      .matrix_unit = matrix_unit},
                                     kStored[(seed / 4) % std::size(kStored)]);
}

TEST_F(ExpectedKernel, LeavesQueriesOutThatStandBelowTheSinkAndRanksByAgeWithoutAny) {
  std::uint64_t seed = 400;
  for (const std::int32_t seen : {0, 1, 5, 6, 20})
    expect_as_on_cpu(++seed, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {20, 6}, .seen = seen, .gaps = false},
                     {.sink = 5});
}

TEST_F(ExpectedKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 600;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        ++seed,
            expect_as_on_cpu(
                seed,
                {.group = 2, .kv_heads = 2, .dim = 48, .value_dim = 32, .lengths = {50, 33}, .seen = 60, .keys = keys},
                {}, kStored[seed % std::size(kStored)], {.gap = gap, .page = page});
}

TEST_F(ExpectedKernel, LeavesRowsAloneThatAreNotDueAndANaNInItsSlot) {
  for (const Element keys : kStored)
    for (const std::int32_t seen : {10, 40}) {
      EvidenceCase c(700, {.group = 2, .kv_heads = 3, .dim = 24, .lengths = {41}, .seen = seen, .keys = keys});
      c.limits.rows[1].due = false;
      if (holds_nan(keys)) c.set_key(2, 7, 19, std::nanf(""));
      ValueCase values(700, c, Element::bf16);
      values.set(2, 30, 1, std::nanf(""));
      expect_as_on_cpu(c, values, {});
      const std::vector<float> got = on_device(c, values, {});
      for (std::size_t t = 0; t < 41; ++t)
        ASSERT_EQ(std::isnan(got[82 + t]), (t == 7 && holds_nan(keys)) || t == 30) << t;
    }
}

TEST_F(ExpectedKernel, OnlyTheProductOfTheSizesOfQueriesAndKeysCounts) {
  for (const Element keys : {Element::f32, Element::bf16})
    for (const std::int32_t seen : {20, 100}) {
      std::vector<float> first;
      for (const int exponent : {0, -70, 70}) {
        EvidenceCase c(800, {.group = 2, .dim = 32, .lengths = {50}, .seen = seen, .keys = keys, .pre_rope = true});
        const ValueCase values(800, c, Element::f32);
        for (std::int64_t t = 0; t < 50; ++t)
          for (std::int64_t d = 0; d < 32; ++d)
            c.set_key(0, t, d, std::ldexp(c.plain[0][static_cast<std::size_t>(t * 32 + d)], exponent));
        const QueryView& view = c.table.groups[0].queries;
        for (std::int32_t i = 0; i < view.count; ++i)
          for (std::int32_t h = 0; h < 2; ++h) {
            auto* q = reinterpret_cast<float*>(c.rings[0].data.data() + (view.at(i, h) - view.data));
            for (std::int32_t d = 0; d < 32; ++d) q[d] = std::ldexp(q[d], -exponent);
          }
        const std::vector<float> got = on_device(c, values, {.epsilon = 0});
        if (first.empty()) first = got;
        for (std::size_t t = 0; t < got.size(); ++t)
          ASSERT_NEAR(got[t], first[t], 1e-5F * std::abs(first[t]) + 1e-9F) << exponent << ", slot " << t;
      }
    }
}

TEST_F(ExpectedKernel, KnowsComponentsInWhichAllQueriesAgree) {
  for (const Element keys : {Element::f32, Element::bf16})
    for (const bool all : {false, true}) {
      EvidenceCase c(820, {.group = 2, .dim = 16, .lengths = {40}, .seen = 30, .keys = keys, .pre_rope = true});
      const ValueCase values(820, c, Element::f32);
      const QueryView& view = c.table.groups[0].queries;
      for (std::int32_t i = 0; i < view.count; ++i)
        for (std::int32_t h = 0; h < 2; ++h) {
          auto* q = reinterpret_cast<float*>(c.rings[0].data.data() + (view.at(i, h) - view.data));
          for (std::int32_t d = 0; d < 16; ++d)
            if (all || d % 8 == 3) q[d] = 0.5F;  // a whole pair
        }
      expect_as_on_cpu(c, values, {});
    }
}

TEST_F(ExpectedKernel, AKeyWhoseSquareLeavesFp32GetsTheLargestScore) {
  for (const Element keys : {Element::f32, Element::bf16})
    for (const std::int32_t seen : {20, 100}) {
      EvidenceCase c(850, {.group = 2, .dim = 32, .lengths = {100}, .seen = seen, .keys = keys});
      const ValueCase values(850, c, Element::f32);
      for (std::int64_t d = 0; d < 32; ++d)
        c.set_key(0, 50, d, c.plain[0][static_cast<std::size_t>(50 * 32 + d)] * 1e30F);
      const std::vector<float> got = on_device(c, values, {.value_norm = false});
      for (std::size_t t = 0; t < 100; ++t) ASSERT_TRUE(std::isfinite(got[t])) << t;
      EXPECT_NEAR(got[50], 1.0F, 1e-5F);
      EXPECT_EQ(got[0], got[50]);
    }
}

TEST_F(ExpectedKernel, GivesEqualSlotsEqualBitsAndARowTheSameBitsInAnyLayout) {
  for (const Element keys : kStored)
    for (const std::int32_t seen : {40, 100})
      for (const bool matrix_unit : {false, true}) {
        EvidenceCase c(900, {.group = 2, .dim = 72, .value_dim = 24, .lengths = {600}, .seen = seen, .keys = keys});
        ValueCase values(900, c, keys);
        for (const std::int64_t t : {7, 77, 300, 599}) c.copy_key(0, 5, t), values.copy(0, 5, t);
        const std::vector<float> got = on_device(c, values, {.matrix_unit = matrix_unit});
        for (const std::size_t t : {7, 77, 300, 599}) ASSERT_EQ(got[t], got[5]) << t;
        EXPECT_EQ(on_device(c, values, {.matrix_unit = matrix_unit}, {.gap = element_bytes(keys), .page = 8}), got);
      }
}

TEST_F(ExpectedKernel, RefusesWhatItCannotScore) {
  EXPECT_THROW(launch_expected({.evidence = {.dim = 257}, .value_norm = false}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .future = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .sink = -1}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .queries = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8, .query = Element::f8_e4m3}, .value_dim = 8}, nullptr),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::expected_test
