// SPDX-License-Identifier: Apache-2.0
// AMS by hand: the worked example (24 slots, window 4), in both variants, stage by stage.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "kvkeep/allot/divide.h"
#include "kvkeep/allot/quotas.h"
#include "kvkeep/allot/segments.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/score/pool.h"

namespace kvkeep::ams_test {
namespace {

constexpr double kPrinted = 2e-5;  ///< the example is given to this precision

const std::vector<float> kHistory{.30F, .01F, .01F, .02F, .05F, .04F, .01F, .01F, .01F, .01F,
                                  .02F, .06F, .03F, .01F, .01F, .01F, .01F, .02F, .01F, .05F};
const std::vector<float> kScores{9, 1, 2, 8, 7, 3, 1, 4, 2, 6, 5, 9, 8, 2, 1, 3, 2, 7, 1, 6, 4, 3, 2, 5};

std::vector<float> mass_of(const std::vector<float>& history, std::int32_t window) {
  std::vector<float> usage(history.size() + static_cast<std::size_t>(window));
  pool_average(history.data(), static_cast<std::int32_t>(history.size()), 5, usage.data());
  const float top = largest(usage.data(), static_cast<std::int32_t>(history.size()));
  std::fill(usage.begin() + static_cast<std::ptrdiff_t>(history.size()), usage.end(), top);
  normalise_mass(usage.data(), static_cast<std::int32_t>(usage.size()), 1e-12);
  return usage;
}

std::vector<std::int32_t> segments(const std::vector<float>& mass, Variant variant) {
  std::vector<std::uint64_t> prefix(mass.size());
  std::vector<std::int32_t> ends(mass.size()), scratch(mass.size());
  prefix_mass(mass.data(), static_cast<std::int32_t>(mass.size()), prefix.data());
  ends.resize(
      static_cast<std::size_t>(segment_ends(prefix.data(), static_cast<std::int32_t>(mass.size()),
                                            {variant, Segmentation::mass, 0, 0.2, 2, 8}, ends.data(), scratch.data())));
  return ends;
}

std::vector<Share> shares(const std::vector<float>& mass, const std::vector<std::int32_t>& ends, Protected guarded) {
  std::vector<Share> out;
  std::int32_t start = 0;
  for (const std::int32_t end : ends) {
    Share s{0, end - start, 0, 0, false};
    for (std::int32_t t = start; t < end; ++t) {
      s.mass += mass[static_cast<std::size_t>(t)];
      s.protect += guarded.holds(t, static_cast<std::int32_t>(mass.size()));
    }
    out.push_back(s);
    start = end;
  }
  return out;
}

std::vector<std::int32_t> quotas_of(const std::vector<Share>& shares) {
  std::vector<std::int32_t> out;
  for (const Share& s : shares) out.push_back(s.quota);
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t t = 0; t < want.size(); ++t) EXPECT_NEAR(got[t], want[t], kPrinted) << "slot " << t;
}

TEST(Mass, OfTheWorkedExample) {
  std::vector<float> pooled(20);
  pool_average(kHistory.data(), 20, 5, pooled.data());
  expect_near(pooled, {.064, .068, .078, .026, .026, .026, .024, .016, .012, .022,
                       .026, .026, .026, .024, .014, .012, .012, .020, .018, .016});
  expect_near(mass_of(kHistory, 4),
              {.07373, .07834, .08986, .02995, .02995, .02995, .02765, .01843, .01382, .02535, .02995, .02995,
               .02995, .02765, .01613, .01382, .01382, .02304, .02074, .01843, .08986, .08986, .08986, .08986});
}

TEST(Mass, PoolingDampsTheEdgesAndIgnoresWhatIsNotThere) {
  const float x[] = {1, 2, 3};
  float out[3];
  pool_average(x, 3, 5, out);
  EXPECT_FLOAT_EQ(out[0], 6.0F / 5);
  pool_average(x, 1, 5, out);
  EXPECT_FLOAT_EQ(out[0], 1.0F / 5);
  pool_average(x, 3, 1, out);
  EXPECT_FLOAT_EQ(out[2], 3);
}

TEST(Mass, OfAnUnusedRowIsUniform) {
  std::vector<float> zeros(50, 0.0F);
  normalise_mass(zeros.data(), 50, 1e-12);
  for (const float m : zeros) EXPECT_FLOAT_EQ(m, 0.02F);
}

TEST(Segments, OfTheWorkedExample) {
  const auto mass = mass_of(kHistory, 4);
  EXPECT_EQ(segments(mass, Variant::official), (std::vector<std::int32_t>{2, 9, 17, 21, 24}));
  EXPECT_EQ(segments(mass, Variant::strict), (std::vector<std::int32_t>{3, 10, 18, 22, 24}));
}

TEST(Segments, HaveAsManyThresholdsAsFitBelowOne) {
  for (const auto& [segment_mass, count] :
       std::vector<std::pair<double, int>>{{.02, 50}, {.05, 20}, {.1, 10}, {.3, 4}, {.7, 2}, {1.0, 1}}) {
    const std::vector<float> uniform(600, 1.0F / 600);
    std::vector<std::uint64_t> prefix(600);
    std::vector<std::int32_t> ends(600), scratch(600);
    prefix_mass(uniform.data(), 600, prefix.data());
    EXPECT_EQ(segment_ends(prefix.data(), 600, {Variant::strict, Segmentation::mass, 0, segment_mass, 1, 600},
                           ends.data(), scratch.data()),
              count)
        << segment_mass;
  }
}

TEST(Segments, FixedOnesEndShortWithoutMerging) {
  std::vector<std::int32_t> ends(10), scratch(10);
  std::vector<std::uint64_t> prefix(10, 1);
  EXPECT_EQ(segment_ends(prefix.data(), 10, {Variant::strict, Segmentation::fixed, 4, 0.1, 32, 64}, ends.data(),
                         scratch.data()),
            3);
  EXPECT_EQ(ends[0], 4);
  EXPECT_EQ(ends[1], 8);
  EXPECT_EQ(ends[2], 10);
}

TEST(Segments, TakeLengthsUpToTheLargestInteger) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  std::vector<std::uint64_t> prefix(10);
  std::iota(prefix.begin(), prefix.end(), 1);
  for (const std::int32_t most : {kMost - 2, kMost - 1, kMost})
    for (const Variant variant : {Variant::strict, Variant::official}) {
      std::vector<std::int32_t> ends(10), scratch(10);
      EXPECT_EQ(most_segments({.segments = Segmentation::fixed, .fixed = most}, 10), 1);
      ASSERT_EQ(
          segment_ends(prefix.data(), 10, {variant, Segmentation::fixed, most, 0.1, 1, 1}, ends.data(), scratch.data()),
          1);
      EXPECT_EQ(ends[0], 10);
      ASSERT_EQ(
          segment_ends(prefix.data(), 10, {variant, Segmentation::mass, 0, 1.0, 1, most}, ends.data(), scratch.data()),
          1);
      EXPECT_EQ(ends[0], 10);
    }
}

/// Every threshold in turn, as the paper words it.
std::vector<std::int32_t> cuts_one_by_one(const std::vector<std::uint64_t>& prefix, const SegmentOptions& options) {
  std::vector<std::int32_t> cuts;
  const auto length = static_cast<std::int32_t>(prefix.size());
  for (std::int64_t k = 1; k <= detail::thresholds(options.segment_mass); ++k) {
    const std::int32_t cut = detail::cut_at(prefix.data(), length, options, k);
    if (cut < length && (cuts.empty() || cuts.back() != cut)) cuts.push_back(cut);
  }
  return cuts;
}

TEST(Mass, QuotientByTheInverseIsTheQuotient) {
  std::mt19937_64 random(9);
  const auto number = [&](int least, int most) {
    const double wide = std::ldexp(std::uniform_real_distribution<double>(1, 2)(random),
                                   std::uniform_int_distribution<int>(least, most)(random));
    return most > 127 || random() % 2 == 0 ? wide : static_cast<double>(static_cast<float>(wide));
  };
  for (int round = 0; round < 300; ++round) {
    double divisor = number(-148, 157);
    if (round % 3 == 0) divisor = std::nextafter(std::ldexp(1.0, round % 7), round % 2 == 0 ? 0.0 : 2e30);
    if (round % 5 == 0) divisor = number(0, 2);
    const Quotient quotient(divisor);
    for (int i = 0; i < 2000; ++i) {
      double x = i == 0 ? 0.0 : number(-148, 127);
      if (i % 4 == 1) x = divisor * number(-3, 3);                       // close to a short quotient
      if (i % 4 == 2) x = std::nextafter(divisor * number(-3, 3), 0.0);  // and beside it
      ASSERT_EQ(quotient.by_inverse(x), x / divisor) << x << " / " << divisor;
      ASSERT_EQ(quotient(x), x / divisor);
    }
  }
}

TEST(Segments, SkippingThresholdsThatCutNowhereElseChangesNoCut) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 150; ++round) {
    const std::int32_t length = std::uniform_int_distribution<std::int32_t>(1, 200)(random);
    std::vector<float> mass(static_cast<std::size_t>(length));
    for (float& m : mass)
      m = round % 3 == 0 ? 1.0F : std::pow(10.0F, std::uniform_real_distribution<float>(-9, 0)(random));
    if (round % 5 == 0) mass[static_cast<std::size_t>(length / 2)] = 1e6F;
    std::vector<std::uint64_t> prefix(mass.size());
    prefix_mass(mass.data(), length, prefix.data());
    for (const double segment_mass : {1.0, 0.7, 0.1, 0.02, 1.0 / length, 1e-3, 3e-5})
      for (const Variant variant : {Variant::strict, Variant::official}) {
        const SegmentOptions options{variant, Segmentation::mass, 0, segment_mass, 1, length};
        std::vector<std::int32_t> cuts(mass.size());
        cuts.resize(static_cast<std::size_t>(detail::cut_by_mass(prefix.data(), length, options, cuts.data())));
        ASSERT_EQ(cuts, cuts_one_by_one(prefix, options)) << "round " << round << ", segment_mass " << segment_mass;
        std::vector<std::int32_t> cached, distinct(mass.size());
        for (std::int64_t k = 1; k <= detail::thresholds(segment_mass); ++k)
          cached.push_back(detail::cut_at(prefix.data(), length, options, k));
        distinct.resize(static_cast<std::size_t>(detail::distinct_cuts(
            cached.data(), static_cast<std::int64_t>(cached.size()), length, distinct.data(), OneThread{})));
        ASSERT_EQ(distinct, cuts) << "round " << round << ", segment_mass " << segment_mass;
      }
  }
}

TEST(Segments, CostNoMoreThanTheRowIsLongHoweverSmallTheirMass) {
  const std::vector<float> uniform(1000, 1.0F / 1000);
  std::vector<std::uint64_t> prefix(1000);
  prefix_mass(uniform.data(), 1000, prefix.data());
  for (const double segment_mass : {1e-9, 1e-12, 1e-18, 1e-19, 1e-30, 1e-300, 5e-324})
    for (const Variant variant : {Variant::strict, Variant::official}) {
      std::vector<std::int32_t> ends(1000), scratch(1000);
      const SegmentOptions options{variant, Segmentation::mass, 0, segment_mass, 1, 1000};
      EXPECT_EQ(most_segments({.segment_mass = segment_mass}, 1000), 1000);
      EXPECT_EQ(segment_ends(prefix.data(), 1000, options, ends.data(), scratch.data()), 1000)
          << "a segment per slot, " << segment_mass;
    }
}

TEST(Quotas, OfTheWorkedExample) {
  const auto mass = mass_of(kHistory, 4);
  auto official = shares(mass, segments(mass, Variant::official), {});
  official_quotas(official.data(), 5, 12, 1);
  EXPECT_EQ(quotas_of(official), (std::vector<std::int32_t>{2, 3, 2, 2, 3}));
  auto strict = shares(mass, segments(mass, Variant::strict), protect(24, 12, 1, 2, Variant::strict));
  EXPECT_EQ(strict[0].protect, 1);
  EXPECT_EQ(strict[4].protect, 2);
  strict_quotas(strict.data(), 5, 12, 1);
  EXPECT_EQ(quotas_of(strict), (std::vector<std::int32_t>{3, 2, 2, 3, 2}));
}

TEST(Quotas, SumToTheBudgetWhenSegmentsOutnumberIt) {
  for (std::int32_t budget = 1; budget < 40; ++budget) {
    std::vector<Share> s(40, Share{0.025, 3, 0, 0, false});
    official_quotas(s.data(), 40, budget, 8);
    std::int32_t sum = 0;
    for (const Share& share : s) sum += share.quota;
    EXPECT_EQ(sum, budget);
  }
}

TEST(Quotas, HonourTheHeaviestFloorsFirstWhenNotAllFit) {
  std::vector<Share> s{{.1, 10, 0, 0, false}, {.5, 10, 0, 0, false}, {.4, 10, 0, 0, false}};
  strict_quotas(s.data(), 3, 4, 4);
  EXPECT_EQ(quotas_of(s), (std::vector<std::int32_t>{1, 2, 1}));
}

TEST(Quotas, HandleZeroMassOneHotAndEqualMasses) {  // B18
  std::vector<Share> zero(3, Share{0, 10, 0, 0, false});
  strict_quotas(zero.data(), 3, 10, 0);
  EXPECT_EQ(quotas_of(zero), (std::vector<std::int32_t>{4, 3, 3})) << "equal fractional parts: the lower index first";
  std::vector<Share> hot{{0, 10, 0, 0, false}, {1, 4, 0, 0, false}, {0, 10, 0, 0, false}};
  strict_quotas(hot.data(), 3, 10, 0);
  EXPECT_EQ(hot[1].quota, 4) << "capped by its length";
  EXPECT_EQ(quotas_of(hot), (std::vector<std::int32_t>{3, 4, 3}));
}

TEST(Selection, OfTheWorkedExample) {
  const auto mass = mass_of(kHistory, 4);
  std::vector<std::uint64_t> keys;
  std::vector<std::int32_t> slots(12);
  select_official(kScores, segments(mass, Variant::official), std::vector<std::int32_t>{2, 3, 2, 2, 3},
                  protect(24, 12, 1, 2, Variant::official), Padding{}, keys, slots);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 1, 3, 4, 7, 11, 12, 17, 19, 21, 22, 23}));
  select_in_segments(kScores, segments(mass, Variant::strict), std::vector<std::int32_t>{3, 2, 2, 3, 2},
                     protect(24, 12, 1, 2, Variant::strict), keys, slots);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 11, 12, 19, 20, 21, 22, 23}));
}

TEST(Selection, AsPublishedRanksPaddingBeforeEveryScore) {
  const std::vector<float> scores{0, 1, 5, 4, 3, 2};
  std::vector<std::uint64_t> keys;
  std::vector<std::int32_t> slots(3);
  select_official(scores, std::vector<std::int32_t>{6}, std::vector<std::int32_t>{3}, {}, Padding{1, 1}, keys, slots);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 2, 5}));
}

TEST(Coverage, AutoOfTheWorkedExampleGivesUpOneOfTheBestForARegionThatWouldKeepTooFew) {
  const auto mass = mass_of(kHistory, 4);
  const auto ends = segments(mass, Variant::strict);
  const Protected guarded = protect(24, 12, 1, 2, Variant::strict);
  std::vector<std::uint64_t> keys;
  std::vector<std::int32_t> slots(12);
  select(kScores, guarded, keys, slots);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 3, 4, 9, 10, 11, 12, 17, 19, 20, 22, 23}))
      << "top-k: segments keep 1, 3, 4, 2, 2";
  auto floors = shares(mass, ends, guarded);
  strict_quotas(floors.data(), 5, 10, 2);
  EXPECT_EQ(quotas_of(floors), (std::vector<std::int32_t>{2, 2, 2, 2, 2}));
  select_in_segments(kScores, ends, quotas_of(floors), guarded, keys, std::span(slots).first(10));
  select_rest(kScores, 10, keys, slots);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 2, 3, 4, 9, 11, 12, 17, 19, 20, 22, 23}))
      << "slot 2 stays in the place of slot 10";
}

TEST(Credit, OfTheWorkedExampleAtItsSecondEvent) {
  const auto first = mass_of(kHistory, 4);
  std::vector<float> credit;
  for (const std::int32_t slot : {0, 1, 3, 4, 7, 11, 12, 17, 19, 21, 22, 23})
    credit.push_back(0.1F * first[static_cast<std::size_t>(slot)]);
  std::vector<float> history(14, .02F);
  history[0] = .2F;
  const auto mass = mass_of(history, 4);
  expect_near({mass.begin(), mass.begin() + 4}, {.08163, .08844, .09524, .03401});
  credit.resize(18);
  std::vector<float> used(18);
  update_credit(mass.data(), 18, 12, {.9, .9}, 1e-12, false, credit.data(), used.data());
  expect_near(credit, {.014799, .015894, .012220, .006097, .005060, .006097, .006097, .005475, .005060, .011489,
                       .011489, .011489, .002721, .002041, .009524, .009524, .009524, .009524});
  expect_near(used, {.08307, .08990, .09364, .03457, .03390, .03457, .03457, .03416, .03390, .03807, .03807, .03807,
                     .02626, .01969, .09189, .09189, .09189, .09189});
}

TEST(Credit, OfALongerSequenceCountsAsNone) {
  const float mass[] = {.5F, .5F};
  float credit[] = {9, 9}, used[2];
  update_credit(mass, 2, 5, {.8, .7}, 1e-12, false, credit, used);
  EXPECT_FLOAT_EQ(credit[0], .1F);
}

TEST(Protect, ExhaustivelyForSmallRows) {  // spec table of must-keep sets
  for (std::int32_t length = 0; length <= 12; ++length)
    for (std::int32_t budget = 1; budget <= 12; ++budget)
      for (std::int32_t sink = 0; sink <= 13; ++sink)
        for (std::int32_t recent = 0; recent <= 13; ++recent) {
          const Protected strict = protect(length, budget, sink, recent, Variant::strict);
          EXPECT_EQ(strict.sinks, std::min({sink, budget, length}));
          EXPECT_EQ(strict.recents, std::min({recent, budget - strict.sinks, length - strict.sinks}));
          const Protected official = protect(length, budget, sink, recent, Variant::official);
          EXPECT_EQ(official.recents, std::min({recent, budget, length}));
          EXPECT_EQ(official.sinks, std::min({sink, budget - official.recents, length - official.recents}));
          EXPECT_LE(strict.count(), std::min(length, budget));
        }
}

TEST(RankKey, OrdersScoresThenNewerSlotsWithNaNLowest) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  EXPECT_GT(rank_key(1, 0), rank_key(0.5F, 9));
  EXPECT_GT(rank_key(1, 4), rank_key(1, 3));
  EXPECT_GT(rank_key(std::nextafter(1.0F, 2.0F), 3), rank_key(1, 4)) << "the last bit counts";
  EXPECT_GT(rank_key(-1, 0), rank_key(-2, 5));
  EXPECT_EQ(rank_key(-0.0F, 3), rank_key(0.0F, 3));
  EXPECT_EQ(rank_key(nan, 3), rank_key(-inf, 3));
  EXPECT_EQ(rank_key(-nan, 3), rank_key(-inf, 3));
  EXPECT_GT(rank_key(inf, 0), rank_key(3e38F, 9));
}

TEST(SharedRows, RankByTheirLargestOrByTheirMeanScore) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const SharedRows largest{.share = Sharing::all, .layers = 1, .sequences = 1, .heads = 2};
  EXPECT_EQ(largest.settle(largest.join(2, 1)), 2);
  EXPECT_EQ(largest.settle(largest.join(1, 2)), 2);
  EXPECT_EQ(largest.settle(largest.join(1, nan)), 1);
  EXPECT_EQ(largest.settle(largest.join(nan, 1)), 1);
  const SharedRows mean{.share = Sharing::all_mean, .layers = 1, .sequences = 1, .heads = 2};
  EXPECT_EQ(mean.settle(mean.join(2, 1)), 1.5F);
}

TEST(SharedRows, AreThoseOfALayerOfEverySequenceOrMore) {
  const SharedRows layer{.share = Sharing::layer, .layers = 2, .sequences = 3, .heads = 4};
  EXPECT_EQ(layer.sets(), 6);
  EXPECT_EQ(layer.members(), 4);
  EXPECT_EQ(layer.row(4, 3), 19) << "the last head of the second sequence in the second layer";
  const SharedRows head{.share = Sharing::per_head, .layers = 2, .sequences = 3, .heads = 4};
  EXPECT_EQ(head.row(7, 1), 19);
  const SharedRows all{.share = Sharing::all, .layers = 2, .sequences = 3, .heads = 4};
  EXPECT_EQ(all.row(1, 7), 19);
}

TEST(SharedRows, OfALayerAreDueTogetherAndOfOneLength) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  RowTable table;
  table.groups.resize(1);
  for (const std::int32_t length : {20, 20}) {
    Row& row = table.rows.emplace_back();
    row.length = length;
    row.first = std::exchange(table.slots, table.slots + length);
  }
  const Evidence evidence{spec, table};
  Limits limits = even_limits(table, 10);
  EXPECT_EQ(shared_rows(evidence, limits, Sharing::layer).sets(), 1);
  for (const std::size_t due : {0, 1}) {
    limits.rows[due].due = false;
    EXPECT_THROW(static_cast<void>(shared_rows(evidence, limits, Sharing::layer)), Unsupported);
    limits.rows[due].due = true;
  }
  table.rows[1].length = 19;
  EXPECT_THROW(static_cast<void>(shared_rows(evidence, limits, Sharing::layer)), Unsupported);
}

}  // namespace
}  // namespace kvkeep::ams_test
