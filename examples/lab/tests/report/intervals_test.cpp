// SPDX-License-Identifier: Apache-2.0
// Intervals: by hand, by what they must cover, and that they are the same everywhere.

#include "kvlab/intervals.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kvkeep/core/error.h"

namespace kvkeep::report::intervals_test {
namespace {

using Stratum = std::vector<Answers>;

TEST(Intervals, WilsonIsWhatTheFormulaGives) {
  const Interval half = wilson(5, 10);
  EXPECT_NEAR(half.low, 0.2366, 1e-4);
  EXPECT_NEAR(half.high, 0.7634, 1e-4);
  EXPECT_EQ(wilson(0, 10).low, 0);
  EXPECT_NEAR(wilson(0, 10).high, 0.2775, 1e-4);
  EXPECT_TRUE(std::isnan(wilson(0, 0).low));
}

TEST(Intervals, ShareCountsAnswersNotSamples) {
  const std::vector<Stratum> samples{{{1, 1}, {0, 3}}, {{2, 4}}};
  EXPECT_DOUBLE_EQ(share(samples), 3.0 / 8);
  EXPECT_TRUE(std::isnan(share({})));
}

TEST(Intervals, AnswersThatStandTogetherMakeABootstrapWiderThanWilson) {
  // 40 samples of 25 answers, each all right or all wrong: 40 coins, not 1000.
  Stratum clustered, spread;
  for (int i = 0; i < 40; ++i) {
    clustered.push_back({i % 2 == 0 ? 25 : 0, 25});
    spread.push_back({i % 2 == 0 ? 13 : 12, 25});
  }
  const Interval independent = wilson(500, 1000), coins = wilson(20, 40);
  const std::vector<Stratum> together{clustered}, apart{spread};
  const Interval wide = bootstrap(together), narrow = bootstrap(apart);
  EXPECT_GT(wide.high - wide.low, 3 * (independent.high - independent.low));
  EXPECT_NEAR(wide.high - wide.low, coins.high - coins.low, 0.06);
  EXPECT_LT(narrow.high - narrow.low, independent.high - independent.low);
}

TEST(Intervals, BootstrapLeavesOutAsMuchOnEitherSide) {
  Stratum coins(50, Answers{0, 1});
  coins.resize(100, Answers{1, 1});
  const Interval interval = bootstrap(std::vector<Stratum>{coins}, {.resamples = 4000});
  EXPECT_NEAR(interval.low, 0.40, 0.011) << "a fortieth of the binomial distribution is below";
  EXPECT_NEAR(interval.high, 0.60, 0.011);
}

TEST(Intervals, BootstrapCoversTheTruthAboutAsOftenAsItSays) {
  std::mt19937 random(3);
  int covered = 0;
  constexpr int kRuns = 300;
  for (int run = 0; run < kRuns; ++run) {
    Stratum samples;
    for (int i = 0; i < 40; ++i) {
      const double own =
          0.3 + 0.6 * static_cast<double>(random() % 1000) / 999;  // a sample's own chance, 0.6 on average
      Answers one{0, 20};
      for (int a = 0; a < 20; ++a) one.right += static_cast<double>(random() % 1000) / 1000 < own;
      samples.push_back(one);
    }
    const std::vector<Stratum> strata{samples};
    const Interval interval = bootstrap(strata, {.resamples = 400, .seed = static_cast<std::uint64_t>(run)});
    covered += interval.low <= 0.6 && 0.6 <= interval.high;
  }
  EXPECT_GE(covered, kRuns * 0.88);
  EXPECT_LE(covered, kRuns * 0.99);
}

TEST(Intervals, PairedDifferencesForgetWhatSamplesHaveInCommon) {
  // Samples differ a lot; b is always one answer of twenty behind a.
  Stratum a, b;
  for (int i = 0; i < 30; ++i) {
    a.push_back({i % 20 + 1, 20});
    b.push_back({i % 20, 20});
  }
  const std::vector<Stratum> ours{a}, theirs{b};
  const Interval paired = bootstrap_difference(ours, theirs), alone = bootstrap(ours);
  EXPECT_NEAR(paired.low, 0.05, 1e-12);
  EXPECT_NEAR(paired.high, 0.05, 1e-12);
  EXPECT_GT(alone.high - alone.low, 0.1);
  const Interval self = bootstrap_difference(ours, ours);
  EXPECT_EQ(self.low, 0);
  EXPECT_EQ(self.high, 0);
}

TEST(Intervals, OfMeansWeighSamplesByTheirValues) {
  const std::vector<std::vector<Ratio>> samples{{{6, 3}, {1, 1}}, {{8, 4}}};
  EXPECT_DOUBLE_EQ(mean(samples), 15.0 / 8);
  EXPECT_TRUE(std::isnan(mean({})));
  const std::vector<std::vector<Ratio>> two{{{6, 3}, {1, 1}}};  // a draw is 12/6, 7/4, or 2/2
  const Interval interval = bootstrap(two, {.confidence = 0.999});
  EXPECT_EQ(interval.low, 1);
  EXPECT_EQ(interval.high, 2);
}

TEST(Intervals, OfSharesAreThoseOfMeans) {
  std::mt19937 random(8);
  std::vector<Stratum> answers(2), others(2);
  std::vector<std::vector<Ratio>> ratios(2), other_ratios(2);
  const auto draw = [&](Stratum& to, std::vector<Ratio>& same) {
    const std::int64_t asked = 1 + random() % 20, right = random() % (asked + 1);
    to.push_back({right, asked});
    same.push_back({static_cast<double>(right), static_cast<double>(asked)});
  };
  for (std::size_t s = 0; s < 2; ++s)
    for (std::size_t i = 0; i < 5 + 2 * s; ++i) {
      draw(answers[s], ratios[s]);
      draw(others[s], other_ratios[s]);
    }
  EXPECT_EQ(share(answers), mean(ratios));
  const Interval one = bootstrap(answers), same = bootstrap(ratios);
  EXPECT_EQ(one.low, same.low);
  EXPECT_EQ(one.high, same.high);
  const Interval apart = bootstrap_difference(answers, others), also = bootstrap_difference(ratios, other_ratios);
  EXPECT_EQ(apart.low, also.low);
  EXPECT_EQ(apart.high, also.high);
}

TEST(Intervals, PairedDifferencesOfMeansForgetWhatTextsHaveInCommon) {
  std::vector<std::vector<Ratio>> ours(1), theirs(1);
  for (int i = 0; i < 30; ++i) {  // texts of 100 tokens that differ a lot; ours are always 0.1 nats worse
    ours[0].push_back({100.0 * i + 10, 100});
    theirs[0].push_back({100.0 * i, 100});
  }
  const Interval paired = bootstrap_difference(ours, theirs), alone = bootstrap(ours);
  EXPECT_NEAR(paired.low, 0.1, 1e-12);
  EXPECT_NEAR(paired.high, 0.1, 1e-12);
  EXPECT_GT(alone.high - alone.low, 1);
  theirs[0].pop_back();
  EXPECT_THROW(static_cast<void>(bootstrap_difference(ours, theirs)), InvalidArgument);
}

TEST(Intervals, AreTheSameForTheSameSeedAndNoneForOneSample) {
  const std::vector<Stratum> samples{{{3, 9}, {5, 9}, {9, 9}, {0, 9}}, {{1, 2}, {2, 2}}};
  const Interval first = bootstrap(samples), again = bootstrap(samples), other = bootstrap(samples, {.seed = 2});
  EXPECT_EQ(first.low, again.low);
  EXPECT_EQ(first.high, again.high);
  EXPECT_TRUE(first.low != other.low || first.high != other.high);
  EXPECT_LT(first.low, share(samples));
  EXPECT_GT(first.high, share(samples));
  const std::vector<Stratum> one{{{3, 9}}}, none{};
  EXPECT_TRUE(std::isnan(bootstrap(one).low));
  EXPECT_TRUE(std::isnan(bootstrap(none).low));
  EXPECT_THROW(static_cast<void>(bootstrap_difference(samples, one)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(bootstrap(samples, {.resamples = 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(bootstrap(samples, {.confidence = 1})), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::report::intervals_test
