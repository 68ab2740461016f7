// SPDX-License-Identifier: Apache-2.0
// Expected Attention on a GPU against the CPU: every option, in f32 and on matrix units.

#include "expected.h"

#include <optional>

#include "kvkeep/score/expected.h"
#include "open_blas.h"
#include "value_case.h"

namespace kvkeep::cuda::expected_test {
namespace {

using ExpectedKernel = OnDevice;

/// Who multiplies the queries of a head.
struct Multiplier {
  Blas* blas = nullptr;  ///< null: the kernel
  std::int32_t from = tuning::kGramQueries;
};

std::vector<float> on_device(const EvidenceCase& c, const ValueCase& values, const ExpectedOptions& options,
                             DeviceLayout layout = {}, Multiplier multiplier = {},
                             std::optional<std::int32_t> rank = std::nullopt) {
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
                              .blas = multiplier.blas,
                              .gram_queries = multiplier.from,
                              .slots = c.table.slots,
                              .scores = scores.data()};
  arguments.evidence.rows = sides.rows();
  if (rank) {  // one of the KV heads of the first group
    arguments.evidence.rows += *rank;
    arguments.evidence.limits += *rank;
    arguments.evidence.count = arguments.evidence.kv_heads = 1;
  }
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(expected_workspace_bytes(arguments)) + 32);
  arguments.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 31) / 32 * 32);
  launch_expected(arguments, nullptr);
  return scores.download();
}

/// As on the CPU, which multiplies in f32 here. bf16 keys on matrix units meet a factor of 16 bits.
void expect_as_on_cpu(EvidenceCase& c, const ValueCase& values, const ExpectedOptions& options,
                      DeviceLayout layout = {}, Multiplier multiplier = {}) {
  const double relative = c.shape.keys == Element::bf16 && options.matrix_unit ? 2e-3 : 2e-4;
  ExpectedOptions plain = options;
  plain.matrix_unit = false;
  WindowAttention unused;
  const Scores want = Expected(plain).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, values, options, layout, multiplier),
                                              want.data.data<float>(), 1e-7, relative));
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

using ExpectedByBlas = OnDeviceWithBlas;

/// The execution model counts launches, which say who multiplied: cuBLAS takes `more` than the kernel.
void expect_more_launches([[maybe_unused]] std::int64_t more, [[maybe_unused]] const EvidenceCase& c,
                          [[maybe_unused]] const ValueCase& values, [[maybe_unused]] const ExpectedOptions& options,
                          [[maybe_unused]] Multiplier multiplier) {
#if defined(KVKEEP_CUDA_MODEL)
  const auto launches = [&](Multiplier with) {
    const std::int64_t before = model::counters().launches;
    static_cast<void>(on_device(c, values, options, {}, with));
    return model::counters().launches - before;
  };
  EXPECT_EQ(launches(multiplier) - launches({}), more);
#endif
}

TEST_F(ExpectedByBlas, AgreesWithTheCpuOnEitherSideOfItsThreshold) {
  OpenBlas there;
  std::uint64_t seed = 1000;
  for (const std::int32_t from : {40, tuning::kGramQueries})
    for (const std::int32_t seen : {from - 1, from, from + 1})
      for (const Element query : {Element::f32, Element::f16, Element::bf16})
        for (const bool pre_rope : {false, true}) {
          const bool one = query == Element::bf16 && pre_rope;
          if (from == tuning::kGramQueries && !one) continue;
          ++seed;
          EvidenceCase c(seed, {.group = 3,
                                .kv_heads = 2,
                                .dim = seed % 2 == 0 ? 7 : 16,
                                .lengths = {600},
                                .seen = seen,
                                .keys = kStored[seed % std::size(kStored)],
                                .query = query,
                                .pre_rope = pre_rope,
                                .style = seed % 4 < 2 ? RopeStyle::half : RopeStyle::interleaved});
          const ValueCase values(seed, c, Element::f32);
          const ExpectedOptions options{.sink = 0, .queries = 2000};
          if (one) expect_more_launches(seen >= from ? 2 : 0, c, values, options, {&there.blas, from});
          expect_as_on_cpu(c, values, options, {}, {&there.blas, from});
        }
}

TEST_F(ExpectedByBlas, AgreesWithTheCpuForEveryHeadSize) {
  OpenBlas there;
  std::uint64_t seed = 1100;
  for (const std::int32_t dim : {1, 2, 33, 80, 128, 130, 160}) {
    ++seed;
    EvidenceCase c(seed, {.group = 2,
                          .dim = dim,
                          .lengths = {70, 300},
                          .seen = dim + 40,
                          .keys = kStored[seed % std::size(kStored)],
                          .query = Element::bf16,
                          .pairs = dim / 3,
                          .ropes = oracle::Ropes::any});
    const ValueCase values(seed, c, Element::f32);
    expect_as_on_cpu(c, values, {.queries = dim + 30}, {}, {&there.blas, dim + 1});
  }
}

TEST_F(ExpectedByBlas, JoinsTheSumsOfLongWindowsInSeveralTurns) {
  OpenBlas there;
  EvidenceCase c(1200, {.group = 11, .kv_heads = 5, .dim = 8, .lengths = {900, 40, 800}, .seen = 700, .gaps = false});
  const ValueCase values(1200, c, Element::f32);
  const ExpectedOptions options{.queries = 600};  // two sums for each of 165 heads, 64 of which go at once
  expect_more_launches(3 * 3 - 1, c, values, options, {&there.blas, 300});
  expect_as_on_cpu(c, values, options, {}, {&there.blas, 300});
}

TEST_F(ExpectedByBlas, LosesNothingToAMeanThatIsAThousandTimesTheSpread) {
  OpenBlas there;
  for (const Element query : {Element::f32, Element::f16}) {
    EvidenceCase c(1300, {.group = 2, .dim = 24, .lengths = {90}, .seen = 80, .query = query, .pre_rope = true});
    for (EvidenceCase::Ring& ring : c.rings)
      for (std::size_t at = 0; at + static_cast<std::size_t>(element_bytes(query)) <= ring.data.size();
           at += static_cast<std::size_t>(element_bytes(query)))
        store(static_cast<float>(1000 + load(ring.data.data() + at, query)), query, ring.data.data() + at);
    // What 1000 is not seen by: keys whose components cancel it.
    for (std::int64_t t = 0; t < 90; ++t)
      for (std::int64_t d = 0; d < 24; ++d)
        c.set_key(0, t, d, c.plain[0][static_cast<std::size_t>(t * 24 + d)] * 1e-3F);
    const ValueCase values(1300, c, Element::f32);
    expect_as_on_cpu(c, values, {}, {}, {&there.blas, 40});
  }
}

TEST_F(ExpectedByBlas, GivesARowTheSameBitsWhateverItsNeighboursAreAndOnWhicheverRank) {
  OpenBlas there;
  const EvidenceShape shape{.group = 2, .kv_heads = 2, .dim = 8, .lengths = {300}, .seen = 290, .gaps = false};
  EvidenceCase alone(1401, shape);
  EvidenceShape more = shape;
  more.lengths = {300, 20, 700, 260};
  more.seen = 290;
  EvidenceCase beside(1401, more);  // the first group is drawn first, and so is the same
  const ValueCase values(1401, alone, Element::f32), others(1401, beside, Element::f32);
  for (const std::int32_t queries : {250, 280, 290}) {
    const std::vector<float> one = on_device(alone, values, {.queries = queries}, {}, {&there.blas, 260}),
                             all = on_device(beside, others, {.queries = queries}, {}, {&there.blas, 260});
    for (std::size_t t = 0; t < one.size(); ++t) ASSERT_EQ(one[t], all[t]) << t;
    for (const std::int32_t rank : {0, 1}) {
      const std::vector<float> own =
          on_device(alone, values, {.queries = queries}, {}, {&there.blas, 260}, rank);  // and kUntouched
      for (std::size_t t = 0; t < own.size(); ++t)
        ASSERT_EQ(own[t], t / 300 == static_cast<std::size_t>(rank) ? one[t] : kUntouched) << "rank " << rank;
    }
  }
}

TEST_F(ExpectedByBlas, LeavesTheKernelWhatItCannotTake) {
  OpenBlas there;
  EvidenceCase c(1500, {.group = 2, .dim = 16, .lengths = {80}, .seen = 60});
  const ValueCase values(1500, c, Element::f32);
  for (const ExpectedOptions& options :
       {ExpectedOptions{.queries = 39}, ExpectedOptions{.covariance = false}, ExpectedOptions{.matrix_unit = false}})
    EXPECT_EQ(on_device(c, values, options, {}, {&there.blas, 40}), on_device(c, values, options));
  // More queries than components are needed, whatever the threshold says.
  EXPECT_EQ(on_device(c, values, {.queries = 16}, {}, {&there.blas, 1}), on_device(c, values, {.queries = 16}));
}

TEST_F(ExpectedByBlas, ANaNOrAnInfinityInAQueryMakesEveryScoreOfItsRowNaN) {
  OpenBlas there;
  for (const float bad : {std::nanf(""), HUGE_VALF}) {
    EvidenceCase c(1600, {.group = 2, .kv_heads = 2, .dim = 16, .lengths = {80}, .seen = 60});
    const QueryView& view = c.table.groups[0].queries;
    store(bad, Element::f32, c.rings[0].data.data() + (view.at(50, 2) - view.data) + 12);
    const ValueCase values(1600, c, Element::f32);
    for (const Multiplier& multiplier : {Multiplier{}, Multiplier{&there.blas, 40}}) {
      const std::vector<float> got = on_device(c, values, {.sink = 0}, {}, multiplier);
      for (std::size_t t = 0; t < got.size(); ++t) ASSERT_EQ(std::isnan(got[t]), t >= 80) << t;
    }
  }
}

TEST_F(ExpectedKernel, RefusesWhatItCannotScore) {
  EXPECT_THROW(launch_expected({.evidence = {.dim = 257}, .value_norm = false}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .future = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .sink = -1}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .queries = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8}, .value_dim = 8, .gram_queries = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_expected({.evidence = {.dim = 8, .query = Element::f8_e4m3}, .value_dim = 8}, nullptr),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::expected_test
