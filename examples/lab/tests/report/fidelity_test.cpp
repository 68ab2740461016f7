// SPDX-License-Identifier: Apache-2.0
// Perplexity and decode fidelity: by hand, against a slow second implementation, and what is refused.

#include "kvlab/fidelity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "message_of.h"

namespace kvkeep::report::fidelity_test {
namespace {

using kvkeep::testing::message_of;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Softmax as it is written, in long double; no shift by the largest, so only for logits that exp can take.
std::vector<long double> softmax(const std::vector<float>& logits) {
  std::vector<long double> shares;
  long double sum = 0;
  for (const float logit : logits) sum += shares.emplace_back(std::exp(static_cast<long double>(logit)));
  for (long double& share : shares) share /= sum;
  return shares;
}

long double slow_divergence(const std::vector<float>& full, const std::vector<float>& cut) {
  const std::vector<long double> p = softmax(full), q = softmax(cut);
  long double sum = 0;
  for (std::size_t i = p.size(); i-- > 0;)  // backwards: another order of the sum
    if (p[i] > 0) sum += p[i] * std::log(p[i] / q[i]);
  return sum;
}

std::size_t slow_likeliest(const std::vector<float>& logits) {
  std::size_t best = logits.size();
  for (std::size_t i = logits.size(); i-- > 0;)
    if (best == logits.size() || logits[i] >= logits[best]) best = i;
  return best;
}

std::vector<float> random_row(std::mt19937& random, std::size_t size, float spread) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> row(size);
  for (float& logit : row) logit = normal(random);
  return row;
}

TEST(Fidelity, IsWhatAPencilSays) {
  const std::vector<float> even{0, 0}, three_to_one{std::log(3.0F), 0};
  EXPECT_NEAR(negative_log_likelihood(even, 1), std::log(2.0), 1e-15);
  EXPECT_NEAR(negative_log_likelihood(three_to_one, 0), std::log(4.0 / 3), 1e-7);
  EXPECT_NEAR(negative_log_likelihood(three_to_one, 1), std::log(4.0), 1e-7);
  // KL((1/2, 1/2) || (3/4, 1/4)) = ln 2 - ln 3 / 2
  EXPECT_NEAR(departure(even, three_to_one).divergence, std::log(2.0) - std::log(3.0) / 2, 1e-7);
  // KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln 3 - ln 2
  EXPECT_NEAR(departure(three_to_one, even).divergence, 0.75 * std::log(3.0) - std::log(2.0), 1e-7);
  EXPECT_TRUE(departure(three_to_one, even).same_token) << "of equals the lower token counts";
  EXPECT_FALSE(departure(std::vector<float>{0, 1}, even).same_token);
  const std::vector<float> one{-7};
  EXPECT_EQ(negative_log_likelihood(one, 0), 0);
  EXPECT_EQ(departure(one, one).divergence, 0);
}

TEST(Fidelity, AgreesWithSoftmaxAsItIsWritten) {
  std::mt19937 random(7);
  for (const std::size_t size : {1U, 2U, 3U, 127U, 256U, 257U, 4096U})
    for (const float spread : {0.01F, 1.0F, 6.0F})
      for (int run = 0; run < 10; ++run) {
        SCOPED_TRACE(std::to_string(size) + " logits, run " + std::to_string(run));
        const std::vector<float> full = random_row(random, size, spread);
        std::vector<float> cut = random_row(random, size, spread);
        if (run % 2 == 0)
          for (std::size_t i = 0; i < size; ++i) cut[i] = full[i] + 0.1F * cut[i];  // close to it, as caches are
        const Departure found = departure(full, cut);
        EXPECT_NEAR(found.divergence, static_cast<double>(slow_divergence(full, cut)), 1e-12 * (1 + found.divergence));
        EXPECT_GE(found.divergence, 0);
        EXPECT_EQ(found.same_token, slow_likeliest(full) == slow_likeliest(cut));
        const auto token = static_cast<std::int32_t>(random() % size);
        const long double share = softmax(full)[static_cast<std::size_t>(token)];
        EXPECT_NEAR(negative_log_likelihood(full, token), static_cast<double>(-std::log(share)), 1e-12 * 50);
      }
}

TEST(Fidelity, DoesNotMoveWithAConstantOrOverflow) {
  std::mt19937 random(8);
  const std::vector<float> full = random_row(random, 100, 4), cut = random_row(random, 100, 4);
  const auto shifted = [](std::vector<float> row, float by) {
    for (float& logit : row) logit += by;
    return row;
  };
  EXPECT_NEAR(departure(full, cut).divergence, departure(shifted(full, 512), shifted(cut, -1024)).divergence, 1e-2);
  const std::vector<float> huge{3e38F, -3e38F, 3e38F};
  EXPECT_NEAR(negative_log_likelihood(huge, 2), std::log(2.0), 1e-15);
  EXPECT_EQ(departure(huge, huge).divergence, 0);
  EXPECT_EQ(departure(full, full).divergence, 0) << "the same row departs by nothing at all";
  EXPECT_TRUE(departure(full, full).same_token);
}

TEST(Fidelity, TakesTokensThatCannotCome) {
  const std::vector<float> both{0, 0, -kInfinity}, all{0, 0, 0}, first{0, -kInfinity, -kInfinity};
  EXPECT_EQ(departure(both, both).divergence, 0);
  EXPECT_NEAR(departure(both, all).divergence, std::log(1.5), 1e-15);
  EXPECT_EQ(departure(all, both).divergence, kInfinity);
  EXPECT_NEAR(departure(first, both).divergence, std::log(2.0), 1e-15);
  EXPECT_EQ(negative_log_likelihood(both, 2), kInfinity);
}

TEST(Fidelity, RefusesRowsThatAreNoDistribution) {
  const std::vector<float> good{0, 1}, nan{0, kNan}, infinite{kInfinity, 0}, none{-kInfinity, -kInfinity},
      long_row{0, 1, 2};
  const auto likelihood = [](const std::vector<float>& row, std::int32_t token) {
    return message_of<InvalidArgument>([&] { (void)negative_log_likelihood(row, token); });
  };
  EXPECT_EQ(likelihood({}, 0), "negative_log_likelihood: a row of logits is empty; given 0; allowed 1 or more");
  EXPECT_EQ(likelihood(nan, 0),
            "negative_log_likelihood: a logit cannot be compared; given nan at 1; allowed finite ones "
            "and -inf");
  EXPECT_EQ(likelihood(infinite, 1),
            "negative_log_likelihood: a logit cannot be compared; given inf at 0; allowed finite ones "
            "and -inf");
  EXPECT_EQ(
      likelihood(none, 0),
      "negative_log_likelihood: no token is possible; given only logits of -inf; allowed one or more finite logits");
  EXPECT_EQ(likelihood(good, 2), "negative_log_likelihood: token is out of range; given 2; allowed 0 to 1");
  EXPECT_EQ(likelihood(good, -1), "negative_log_likelihood: token is out of range; given -1; allowed 0 to 1");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)departure(good, long_row); }),
            "departure: the rows differ in length; given 2 and 3; allowed the same vocabulary");
  for (const auto& bad : {nan, infinite, none}) {
    EXPECT_THROW((void)departure(good, bad), InvalidArgument);
    EXPECT_THROW((void)departure(bad, good), InvalidArgument);
  }
}

TEST(StreamingPerplexity, CountsFromWhereTheBudgetWasFullAndDrawsTheWholeCurve) {
  StreamingPerplexity text(3, 2);
  EXPECT_TRUE(std::isnan(perplexity(text.total())));
  for (const double nll : {9.0, 7.0, 5.0, 1.0, 2.0}) text.add(nll);
  EXPECT_EQ(text.tokens(), 5);
  EXPECT_EQ(text.total().whole, 2);
  EXPECT_DOUBLE_EQ(perplexity(text.total()), std::exp(1.5));
  ASSERT_EQ(text.curve().size(), 3u);
  EXPECT_DOUBLE_EQ(text.curve()[0].value(), 8);
  EXPECT_DOUBLE_EQ(text.curve()[1].value(), 3);
  EXPECT_DOUBLE_EQ(text.curve()[2].value(), 2);
  EXPECT_EQ(text.curve()[2].whole, 1);
}

TEST(StreamingPerplexity, OfUniformLogitsIsTheVocabulary) {
  StreamingPerplexity text;
  const std::vector<float> row(50, 3.5F);
  for (std::int32_t token = 0; token < 50; ++token) text.add(negative_log_likelihood(row, token));
  EXPECT_NEAR(perplexity(text.total()), 50, 1e-12);
}

TEST(StreamingPerplexity, AddsTextsOfAnyLengthAndGoesOnBehindThem) {
  std::mt19937 random(9);
  for (int run = 0; run < 50; ++run) {
    const std::int64_t first = static_cast<std::int64_t>(random() % 20),
                       bin = 1 + static_cast<std::int64_t>(random() % 8);
    StreamingPerplexity merged(first, bin);
    double sum = 0, count = 0;
    std::vector<double> sums(200), counts(200);
    std::vector<double> own;
    const auto feed = [&](StreamingPerplexity& text, std::int64_t& at) {
      const double nll = static_cast<double>(random() % 1000) / 64;  // exact in sums
      text.add(nll);
      if (at >= first) sum += nll, ++count;
      sums[static_cast<std::size_t>(at / bin)] += nll, ++counts[static_cast<std::size_t>(at / bin)];
      ++at;
    };
    std::int64_t at_merged = 0;
    for (int texts = 0; texts < 4; ++texts) {
      StreamingPerplexity other(first, bin);
      std::int64_t at_other = 0;
      for (auto tokens = random() % 60; tokens > 0; --tokens) feed(other, at_other);
      merged.merge(other);
      for (auto tokens = random() % 30; tokens > 0; --tokens) feed(merged, at_merged);
    }
    EXPECT_EQ(merged.tokens(), at_merged);
    EXPECT_EQ(merged.total().part, sum);
    EXPECT_EQ(merged.total().whole, count);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_EQ(i < merged.curve().size() ? merged.curve()[i].part : 0, sums[i]) << "run " << run << " bin " << i;
      EXPECT_EQ(i < merged.curve().size() ? merged.curve()[i].whole : 0, counts[i]);
    }
  }
}

TEST(StreamingPerplexity, SaysWhatIsWrong) {
  EXPECT_EQ(message_of<InvalidArgument>([] { StreamingPerplexity(-1); }),
            "StreamingPerplexity: first_counted is -1; allowed 0 or more");
  EXPECT_EQ(message_of<InvalidArgument>([] { StreamingPerplexity(0, 0); }),
            "StreamingPerplexity: bin_tokens is 0; allowed 1 or more");
  StreamingPerplexity text(1);
  text.add(1);
  EXPECT_EQ(message_of<InvalidArgument>([&] { text.add(kNan); }),
            "StreamingPerplexity: a likelihood is not a number; given NaN at token 1; allowed numbers");
  EXPECT_EQ(text.tokens(), 1);
  EXPECT_EQ(message_of<InvalidArgument>([&] { text.merge(StreamingPerplexity(2)); }),
            "StreamingPerplexity: the texts were counted differently; given first_counted 1 and 2, bin_tokens 256 and "
            "256; allowed the same");
}

TEST(DecodeFidelity, MeansDivergenceAndAgreementInBins) {
  DecodeFidelity text(0, 2), behind(2, 2);
  for (const Departure& one : {Departure{0.5, true}, Departure{1.5, false}, Departure{0.25, true}}) {
    text.add(one);
    behind.add(one);
  }
  EXPECT_DOUBLE_EQ(text.total().divergence.value(), 0.75);
  EXPECT_EQ(text.total().same_token.right, 2);
  EXPECT_EQ(text.total().same_token.asked, 3);
  EXPECT_EQ(behind.total().divergence.value(), 0.25) << "counted from the third token on";
  EXPECT_EQ(behind.total().same_token.asked, 1);
  EXPECT_EQ(behind.bins()[0].same_token.asked, 2) << "bins hold all";
  ASSERT_EQ(text.bins().size(), 2u);
  EXPECT_DOUBLE_EQ(text.bins()[0].divergence.value(), 1);
  EXPECT_EQ(text.bins()[0].same_token.right, 1);
  EXPECT_EQ(text.bins()[1].same_token.asked, 1);
}

TEST(DecodeFidelity, HasBinsOf256TokensAndAgreesWithASecondPassOverTheRows) {
  std::mt19937 random(10);
  DecodeFidelity text;
  std::vector<double> sums(3);
  std::vector<std::int64_t> right(3);
  constexpr std::size_t kTokens = 600;
  for (std::size_t i = 0; i < kTokens; ++i) {
    const std::vector<float> full = random_row(random, 17, 2);
    std::vector<float> cut = random_row(random, 17, 0.5F);
    for (std::size_t j = 0; j < cut.size(); ++j) cut[j] += full[j];
    text.add(full, cut);
    sums[i / 256] += static_cast<double>(slow_divergence(full, cut));
    right[i / 256] += slow_likeliest(full) == slow_likeliest(cut);
  }
  ASSERT_EQ(text.bins().size(), 3u);
  for (std::size_t bin = 0; bin < 3; ++bin) {
    EXPECT_NEAR(text.bins()[bin].divergence.part, sums[bin], 1e-9);
    EXPECT_EQ(text.bins()[bin].same_token.right, right[bin]);
    EXPECT_EQ(text.bins()[bin].same_token.asked, bin < 2 ? 256 : 88);
  }
}

TEST(DecodeFidelity, AddsTextsAndGivesTheBootstrapOneSampleEach) {
  std::mt19937 random(11);
  DecodeFidelity all(0, 4);
  std::vector<std::vector<Answers>> strata(1);
  for (int texts = 0; texts < 12; ++texts) {
    DecodeFidelity text(0, 4);
    for (int i = 0; i < 1 + texts; ++i) text.add({static_cast<double>(random() % 64) / 8, random() % 3 != 0});
    strata[0].push_back(text.total().same_token);
    all.merge(text);
  }
  EXPECT_EQ(all.total().same_token.asked, 78);
  EXPECT_EQ(all.bins().size(), 3u);
  EXPECT_EQ(all.bins()[0].same_token.asked, 1 + 2 + 3 + 9 * 4);
  EXPECT_DOUBLE_EQ(share(strata), static_cast<double>(all.total().same_token.right) / 78);
  const Interval interval = bootstrap(strata);
  EXPECT_LT(interval.low, share(strata));
  EXPECT_GT(interval.high, share(strata));
  all.add({1, true});  // goes on with its own text, which has no token yet
  EXPECT_EQ(all.bins()[0].same_token.asked, 43);
}

TEST(DecodeFidelity, SaysWhatIsWrong) {
  EXPECT_EQ(message_of<InvalidArgument>([] { DecodeFidelity(-1); }),
            "DecodeFidelity: first_counted is -1; allowed 0 or more");
  EXPECT_EQ(message_of<InvalidArgument>([] { DecodeFidelity(0, 0); }),
            "DecodeFidelity: bin_tokens is 0; allowed 1 or more");
  DecodeFidelity text(0, 8);
  EXPECT_EQ(message_of<InvalidArgument>([&] { text.add({-0.5, true}); }),
            "DecodeFidelity: a divergence is out of range; given -0.5; allowed 0 or more");
  EXPECT_THROW(text.add({kNan, true}), InvalidArgument);
  EXPECT_EQ(message_of<InvalidArgument>([&] { text.merge(DecodeFidelity(1, 9)); }),
            "DecodeFidelity: the texts were counted differently; given first_counted 0 and 1, bin_tokens 8 and 9; "
            "allowed the same");
  EXPECT_TRUE(text.bins().empty());
  text.add({kInfinity, false});
  EXPECT_EQ(text.total().divergence.value(), kInfinity) << "one token that cut rules out says so";
}

}  // namespace
}  // namespace kvkeep::report::fidelity_test
