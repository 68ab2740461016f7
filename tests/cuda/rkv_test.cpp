// SPDX-License-Identifier: Apache-2.0
// R-KV on a GPU against the CPU: every option, keys that resemble many, few and none, from queries to scores.

#include "rkv.h"

#include "asked_queries.h"
#include "window_attention.h"

namespace kvkeep::cuda::rkv_test {
namespace {

using RkvKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, const RkvOptions& options, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, options.window);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  RkvArguments arguments{.evidence = there.arguments(),
                         .windows = queries.windows().data(),
                         .queries = queries.floats().data(),
                         .options = options,
                         .slots = c.table.slots,
                         .scores = scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(rkv_workspace_bytes(arguments)));
  arguments.workspace = workspace.data();
  launch_rkv(arguments, nullptr);
  return scores.download();
}

/// A score is the difference of two shares of up to 1, each of which is off by units in the last place.
constexpr double kAbsolute = 5e-7;

void expect_as_on_cpu(const EvidenceCase& c, const RkvOptions& options, DeviceLayout layout = {}) {
  WindowAttention unused;
  const Scores want = Rkv(options).score(c.evidence(), c.limits, unused);
  const double relative = options.group == GroupReduce::mean_prob && c.shape.keys == Element::bf16 ? 1e-4 : 2e-5;
  std::vector<float> first;
  in_every_order([&] {
    const std::vector<float> got = on_device(c, options, layout);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, got, want.data.data<float>(), kAbsolute, relative));
    if (first.empty()) first = got;
    ASSERT_EQ(got, first) << "blocks in another order";
  });
}

/// Brings the keys of every row near to one of `directions`, so that most of them resemble others.
void crowd(EvidenceCase& c, std::uint64_t seed, std::int32_t directions, double noise) {
  oracle::Random random(seed);
  for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
    std::vector<double> centres(static_cast<std::size_t>(directions * c.shape.dim));
    for (double& x : centres) x = random.normal();
    for (std::int32_t t = 0; t < c.table.rows[r].length; ++t) {
      const std::int32_t which = random.between(0, directions - 1);
      for (std::int32_t d = 0; d < c.shape.dim; ++d)
        c.set_key(
            r, t, d,
            static_cast<float>(centres[static_cast<std::size_t>(which * c.shape.dim + d)] + noise * random.normal()));
    }
  }
}

using Redundancy = RkvOptions::Redundancy;
using NoSimilar = RkvOptions::NoSimilar;

TEST_F(RkvKernel, AgreesWithTheCpuUnderEveryOption) {
  std::uint64_t seed = 0;
  for (const auto group : {GroupReduce::max_logit, GroupReduce::mean_prob})
    for (const auto redundancy : {Redundancy::all, Redundancy::history})
      for (const auto no_similar : {NoSimilar::nothing, NoSimilar::first})
        for (const std::int32_t pool : {1, 7})
          for (const std::int32_t seen : {0, 1, 9}) {
            ++seed;
            EvidenceCase c(seed, {.group = 3,
                                  .kv_heads = 2,
                                  .dim = 16,
                                  .lengths = {150, 9, 1, 0},
                                  .seen = seen,
                                  .keys = kStored[seed % std::size(kStored)],
                                  .pre_rope = true,
                                  .ragged = true});
            if (seed % 2 == 0) crowd(c, seed, 3, 0.4);
            expect_as_on_cpu(c, {.window = 6,
                                 .pool = pool,
                                 .lambda = seed % 3 == 0 ? 0.5 : 0.07,
                                 .group = group,
                                 .redundancy = redundancy,
                                 .no_similar = no_similar});
          }
}

TEST_F(RkvKernel, AgreesWithTheCpuForEveryLength) {  // B29
  std::uint64_t seed = 100;
  for (const std::int32_t length : {2, 3, 7, 31, 63, 64, 65, 127, 128, 129, 191, 257, 509, 512, 513})
    for (const Element keys : {Element::f32, Element::f16})
      for (const bool crowded : {false, true}) {
        EvidenceCase c(++seed, {.dim = 16, .lengths = {length, 5}, .seen = 3, .keys = keys});
        if (crowded) crowd(c, seed, 2, 0.5);
        expect_as_on_cpu(
            c, {.window = 2, .lambda = 0, .no_similar = seed % 2 == 0 ? NoSimilar::first : NoSimilar::nothing});
      }
}

TEST_F(RkvKernel, AgreesWithTheCpuOnRowsOfManyBlocks) {
  std::uint64_t seed = 200;
  for (const std::int32_t length : {1023, 1024, 1025, 1300})
    for (const Element keys : {Element::f32, Element::bf16}) {
      EvidenceCase c(++seed, {.dim = 8, .lengths = {length, 70}, .seen = 2, .keys = keys});
      if (seed % 2 == 0) crowd(c, seed, 40, 0.3);
      expect_as_on_cpu(c, {.window = 2, .lambda = 0, .similarity = seed % 2 == 0 ? 0.9 : 0.8});
    }
}

TEST_F(RkvKernel, AgreesWhereNoKeyAndWhereEveryKeyHasAPartner) {
  std::uint64_t seed = 300;
  for (const double similarity : {0.0, 0.05, 0.999})
    for (const Element keys : kStored)
      for (const auto no_similar : {NoSimilar::nothing, NoSimilar::first})
        expect_as_on_cpu(
            EvidenceCase(++seed, {.kv_heads = 2, .dim = 48, .lengths = {200}, .seen = 4, .keys = keys, .ragged = true}),
            {.window = 4, .lambda = 0, .similarity = similarity, .no_similar = no_similar});
}

TEST_F(RkvKernel, AgreesWhereKeysAreOfVeryDifferentLengths) {
  std::uint64_t seed = 350;
  for (const Element keys : kStored)
    for (const bool by_chance : {false, true}) {
      EvidenceCase c(++seed, {.dim = 16, .lengths = {300}, .seen = 4, .keys = keys});
      oracle::Random random(seed);
      for (std::int64_t t = 0; t < 300; ++t) {
        const bool loud =
            t >= 300 - 128 ? (300 - t) % 16 == 0 : t % 64 < 16;  // the first rows of a tile, the first of 16 columns
        const float by = by_chance ? static_cast<float>(std::exp(1.5 * random.normal())) : loud ? 4.0F : 0.1F;
        for (std::int64_t d = 0; d < 16; ++d) c.set_key(0, t, d, by * c.plain[0][static_cast<std::size_t>(t * 16 + d)]);
      }
      expect_as_on_cpu(c, {.window = 4, .lambda = 0, .similarity = 0.6});
    }
}

TEST_F(RkvKernel, AgreesWithTheCpuForEveryHeadSizeElementAndLayout) {  // B21, B24, B25
  std::uint64_t seed = 400;
  for (const std::int32_t dim : {1, 7, 64, 96, 128, 136, 256})
    for (const Element keys : kStored) {
      EvidenceCase c(++seed, {.group = 2, .dim = dim, .lengths = {150}, .seen = 4, .keys = keys});
      if (seed % 2 == 0) crowd(c, seed, 4, 0.7);
      expect_as_on_cpu(c, {.window = 4}, {.gap = seed % 3 == 0 ? 4 : 16, .page = seed % 2 == 0 ? 16 : 0});
    }
}

TEST_F(RkvKernel, SparesTheNewestOfEqualKeysAndGivesTheOthersEqualBits) {
  for (const Element keys : {Element::f32, Element::bf16, Element::f8_e4m3, Element::f8_e5m2, Element::i8}) {
    EvidenceCase c(500, {.group = 2, .dim = 40, .lengths = {560}, .seen = 4, .keys = keys});
    for (const std::int64_t t : {1, 6, 130, 440, 530}) c.copy_key(0, 3, t);
    const RkvOptions options{.window = 4, .pool = 1, .similarity = 0.9};
    expect_as_on_cpu(c, options);
    const std::vector<float> got = on_device(c, options);
    for (const std::size_t t : {1, 6, 130}) ASSERT_EQ(got[t], got[3]) << t;
    ASSERT_GT(got[530], got[3]);
    ASSERT_GT(got[440], got[3]) << "the newest takes the next for its partner";
    EXPECT_EQ(on_device(c, options, {.gap = element_bytes(keys), .page = 8}), got);
  }
}

TEST_F(RkvKernel, KnowsKeysOfZerosAndOppositeKeys) {
  for (const Element keys : kStored) {
    EvidenceCase c(550, {.dim = 24, .lengths = {200, 140}, .seen = 3, .keys = keys});
    for (std::int64_t t = 0; t < 200; ++t)
      for (std::int64_t d = 0; d < 24; ++d)
        c.set_key(0, t, d, (t % 2 == 0 ? 1.0F : -1.0F) * c.plain[0][static_cast<std::size_t>(d)]);
    for (std::int64_t t = 0; t < 140; t += 3)
      for (std::int64_t d = 0; d < 24; ++d) c.set_key(1, t, d, 0.0F);
    expect_as_on_cpu(c, {.window = 3});
    expect_as_on_cpu(c, {.window = 3, .similarity = 0, .no_similar = NoSimilar::first});
  }
}

TEST_F(RkvKernel, LeavesRowsAloneThatAreNotDueAndGivesNaNToTheRowOfANaN) {
  for (const Element keys : {Element::f32, Element::f16, Element::f8_e4m3, Element::f8_e5m2})
    for (const auto redundancy : {Redundancy::all, Redundancy::history}) {
      EvidenceCase c(600, {.group = 2, .kv_heads = 3, .dim = 20, .lengths = {141}, .seen = 4, .keys = keys});
      c.limits.rows[1].due = false;
      for (RowLimit& limit : c.limits.rows) limit.budget = 30;
      expect_as_on_cpu(c, {.window = 4, .redundancy = redundancy});
      for (const float bad : bad_numbers(keys)) {
        c.set_key(2, 7, 19, bad);
        const std::vector<float> got = on_device(c, {.window = 4, .redundancy = redundancy});
        for (std::size_t t = 0; t < 130; ++t) ASSERT_TRUE(std::isnan(got[2 * 141 + t])) << t;
        for (std::size_t t = 0; t < 130; ++t) ASSERT_FALSE(std::isnan(got[t])) << t;
      }
    }
}

TEST_F(RkvKernel, LooksAtNoKeyOfTheWindowWhereRedundancyIsOfTheHistory) {
  EvidenceCase c(650, {.dim = 16, .lengths = {300}, .seen = 8, .keys = Element::bf16, .gaps = false});
  c.limits.rows[0].budget = 100;
  const RkvOptions options{.window = 8, .lambda = 0, .redundancy = Redundancy::history};
  const std::vector<float> before = on_device(c, options);
  for (std::int64_t t = 292; t < 300; ++t) c.set_key(0, t, 3, std::nanf(""));
  EXPECT_EQ(on_device(c, options), before);
}

TEST_F(RkvKernel, RefusesWhatItCannotScore) {
  EXPECT_THROW(launch_rkv({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_rkv({.evidence = {.dim = 8}, .options = {.pool = 4}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_rkv({.evidence = {.dim = 8}, .options = {.similarity = 1.5}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::rkv_test
