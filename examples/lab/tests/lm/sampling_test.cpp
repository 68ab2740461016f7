// SPDX-License-Identifier: Apache-2.0
// Tokens drawn from their probabilities: against a plain second implementation in exact decimals, against expected
// frequencies, and that neither company nor policy changes a draw.

#include "kvlab/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"

namespace kvkeep::lm::sampling_test {
namespace {

const std::vector<float> kLogits{1.5F, -0.25F, 3.0F, 0.75F, 3.0F, -2.0F, 2.25F, 0.0F};

std::vector<std::int32_t> drawn(const std::vector<float>& logits, const Sampling& sampling, std::int64_t steps) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t step = 0; step < steps; ++step) tokens.push_back(draw(logits, sampling, step));
  return tokens;
}

std::set<std::int32_t> nucleus(const std::vector<float>& logits, double top_p) {
  const std::vector<std::int32_t> tokens = drawn(logits, {.temperature = 1, .top_p = top_p, .seed = 5}, 400);
  return {tokens.begin(), tokens.end()};
}

TEST(Sampling, DrawsWhatExactDecimalsDraw) {
  // From Python's decimal module with 40 digits, and SplitMix64 written anew there.
  EXPECT_EQ(drawn(kLogits, {.temperature = 0.8, .top_p = 0.9, .seed = 42}, 24),
            (std::vector<std::int32_t>{2, 4, 4, 4, 2, 4, 6, 6, 2, 2, 2, 6, 6, 4, 4, 4, 2, 2, 6, 4, 4, 2, 4, 2}));
  EXPECT_EQ(drawn(kLogits, {.temperature = 1.5, .top_p = 1, .seed = 7}, 24),
            (std::vector<std::int32_t>{4, 2, 4, 4, 2, 0, 4, 0, 4, 4, 2, 6, 7, 4, 4, 4, 6, 2, 4, 6, 2, 6, 7, 4}));
}

TEST(Sampling, DividesProbabilitiesWhereTheyEnd) {
  // Of two tokens the likelier has e^1.25 / (1 + e^1.25) = 0.77729986. The random numbers of these two seeds lie 3.5e-7
  // below it and 5.3e-7 above it.
  const std::vector<float> logits{0, 1.25F};
  EXPECT_EQ(draw(logits, {.temperature = 1, .seed = 2721662}, 0), 1);
  EXPECT_EQ(draw(logits, {.temperature = 1, .seed = 396845}, 0), 0);
}

TEST(Sampling, DrawsTokensAsOftenAsTheirProbabilitiesSay) {
  for (const double top_p : {1.0, 0.9}) {
    SCOPED_TRACE(top_p);
    constexpr double kTemperature = 1.25;
    std::vector<double> expected(kLogits.size());
    double sum = 0;
    for (std::size_t i = 0; i < kLogits.size(); ++i)
      sum += expected[i] = std::exp(static_cast<double>(kLogits[i]) / kTemperature);
    // The nucleus of 0.9 at this temperature: 2, 4, 6, 0 have 0.891 together, and 3 makes it 0.943.
    const std::set<std::int32_t> inside =
        top_p < 1 ? std::set<std::int32_t>{0, 2, 3, 4, 6} : std::set<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7};
    sum = 0;
    for (const std::int32_t token : inside) sum += expected[static_cast<std::size_t>(token)];
    constexpr std::int64_t kDraws = 20000;
    std::map<std::int32_t, std::int64_t> counts;
    for (const std::int32_t token : drawn(kLogits, {.temperature = kTemperature, .top_p = top_p, .seed = 1}, kDraws))
      ++counts[token];
    double chi_squared = 0;
    std::int64_t counted = 0;
    for (const std::int32_t token : inside) {
      const double mean = expected[static_cast<std::size_t>(token)] / sum * static_cast<double>(kDraws),
                   off = static_cast<double>(counts[token]) - mean;
      chi_squared += off * off / mean;
      counted += counts[token];
    }
    EXPECT_EQ(counted, kDraws) << "nothing outside the nucleus";
    EXPECT_LT(chi_squared, top_p < 1 ? 18.47 : 24.32) << "the 99.9 % quantile for 4 and for 7 degrees of freedom";
  }
}

TEST(Sampling, KeepsTheFewestTokensThatReachTopP) {
  // Probabilities 8/16, 4/16, 2/16, 1/16, 1/16 of the tokens 3, 0, 4, 1, 2.
  const auto log2 = static_cast<float>(std::log(2.0));
  const std::vector<float> logits{2 * log2, 0, 0, 3 * log2, log2};
  using Set = std::set<std::int32_t>;
  EXPECT_EQ(nucleus(logits, 0.3), Set({3}));
  EXPECT_EQ(nucleus(logits, 0.49), Set({3}));
  EXPECT_EQ(nucleus(logits, 0.51), Set({0, 3}));
  EXPECT_EQ(nucleus(logits, 0.74), Set({0, 3}));
  EXPECT_EQ(nucleus(logits, 0.8), Set({0, 3, 4}));
  EXPECT_EQ(nucleus(logits, 0.9), Set({0, 1, 3, 4})) << "of equal ones the lower token";
  EXPECT_EQ(nucleus(logits, 0.95), Set({0, 1, 2, 3, 4}));
  EXPECT_EQ(nucleus({1, 1, 1, 1}, 0.5), Set({0, 1})) << "a sum that is reached exactly is enough";
  EXPECT_EQ(nucleus(logits, 1e-300), Set({3})) << "never empty";
}

TEST(Sampling, DependsOnItsSeedAndStepAlone) {
  const Sampling one{.temperature = 1, .top_p = 0.95, .seed = 11}, other{.temperature = 1, .top_p = 0.95, .seed = 12};
  EXPECT_EQ(drawn(kLogits, one, 64), drawn(kLogits, one, 64));
  EXPECT_NE(drawn(kLogits, one, 64), drawn(kLogits, other, 64));
  EXPECT_EQ(draw(kLogits, one, 63), drawn(kLogits, one, 64).back()) << "no state from step to step";
}

TEST(Sampling, ReadsExtremeLogits) {
  const float minus = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max();
  const Sampling sampling{.temperature = 1, .seed = 3};
  EXPECT_EQ(drawn({minus, 0, minus}, sampling, 8), std::vector<std::int32_t>(8, 1));
  EXPECT_EQ(drawn({-most, most}, sampling, 8), std::vector<std::int32_t>(8, 1));
  EXPECT_EQ(drawn({1, 2, 1}, {.temperature = 5e-324}, 8), std::vector<std::int32_t>(8, 1)) << "as good as greedy";
  EXPECT_EQ(draw(std::vector<float>{7}, sampling, 0), 0);
  const std::vector<std::int32_t> flat =
      drawn(std::vector<float>(1 << 12, -3), {.temperature = 1e300, .top_p = 0.5, .seed = 9}, 300);
  EXPECT_LT(*std::ranges::max_element(flat), 1 << 11);
  EXPECT_GT(*std::ranges::max_element(flat), 2000);
  for (const std::vector<float>& wrong : {std::vector<float>{0, std::nanf("")}, std::vector<float>{0, -minus},
                                          std::vector<float>{minus, minus}, std::vector<float>{}})
    EXPECT_THROW(static_cast<void>(draw(wrong, sampling, 0)), InvalidArgument);
}

TEST(Sampling, RefusesWhatIsNoTemperatureAndNoShare) {
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  for (const double temperature : {-0.1, nan, infinite})
    EXPECT_THROW(check_sampling({.temperature = temperature}), InvalidArgument) << temperature;
  for (const double top_p : {0.0, -0.5, 1.0001, nan})
    EXPECT_THROW(check_sampling({.temperature = 1, .top_p = top_p}), InvalidArgument) << top_p;
  EXPECT_NO_THROW(check_sampling({.temperature = 0, .top_p = 0.5}));
  EXPECT_THROW(static_cast<void>(draw(kLogits, {.temperature = 0}, 0)), InvalidArgument);
}

// ---- In the generator

class SampledGeneration : public ::testing::Test {
 protected:
  static Request request(std::uint64_t seed, double temperature = 1) {
    std::vector<std::int32_t> prompt;
    for (std::int32_t i = 0; i < 40; ++i) prompt.push_back(i * 37 % 251);
    return {.prompt = prompt,
            .new_tokens = 24,
            .keep_logits = true,
            .sampling = {.temperature = temperature, .top_p = 0.9, .seed = seed}};
  }
  std::vector<std::vector<std::int32_t>> written(const std::vector<Request>& requests, std::int64_t places,
                                                 const std::string& policy = "full") {
    std::vector<std::vector<std::int32_t>> texts;
    for (const Completion& done : generate(decoder_, make_policy(policy), requests, {.places = places}).completions)
      texts.push_back(done.tokens);
    return texts;
  }
  Decoder decoder_ = Decoder::open(std::string(KVKEEP_TEST_GOLDEN_DIR) + "/decoder/llama_gqa");
};

TEST_F(SampledGeneration, DrawsEachTokenFromItsLogitsAndStep) {
  const Completion done = generate(decoder_, make_policy("full"), {request(4)}).completions.front();
  for (std::int64_t step = 0; step < std::ssize(done.tokens); ++step) {
    const auto width = static_cast<std::size_t>(done.logits.size(1));
    EXPECT_EQ(done.tokens[static_cast<std::size_t>(step)],
              draw({done.logits.const_data_ptr<float>() + static_cast<std::size_t>(step) * width, width},
                   request(4).sampling, step));
  }
  EXPECT_EQ(written({request(4, 0)}, 1), written({[] {
                                                   Request greedy = request(4);
                                                   greedy.sampling = {};
                                                   return greedy;
                                                 }()},
                                                 1))
      << "temperature 0 is greedy, whatever else is said";
  EXPECT_NE(written({request(4, 0)}, 1).front(), done.tokens);
}

TEST_F(SampledGeneration, SaysTheSameInAnyCompanyAndOrder) {
  const auto alone = [&](std::uint64_t seed) { return written({request(seed)}, 1).front(); };
  const std::vector<std::vector<std::int32_t>> together = written({request(1), request(2), request(3), request(1)}, 3);
  EXPECT_EQ(together, (std::vector{alone(1), alone(2), alone(3), alone(1)}));
  EXPECT_EQ(written({request(3), request(1)}, 2), (std::vector{alone(3), alone(1)}));
  EXPECT_NE(alone(1), alone(2));
}

TEST_F(SampledGeneration, GivesPoliciesWithTheSameLogitsTheSameText) {
  EXPECT_EQ(written({request(6)}, 1, "tova,budget=500"), written({request(6)}, 1)) << "a budget that is never reached";
  std::vector<std::unique_ptr<Generator>> generators;
  std::vector<Generator*> sharing;
  for (const char* policy : {"full", "tova,budget=500"}) {
    generators.push_back(std::make_unique<Generator>(decoder_, make_policy(policy), GeneratorOptions{.capacity = 64}));
    sharing.push_back(generators.back().get());
  }
  const PromptRun prompt = Generator::run_prompt(sharing, request(6));
  for (std::size_t g = 0; g < sharing.size(); ++g) {
    sharing[g]->begin(prompt.sequences[g], prompt);
    while (sharing[g]->step()) {
    }
    EXPECT_EQ(sharing[g]->leave(prompt.sequences[g]).tokens, written({request(6)}, 1).front());
  }
}

TEST_F(SampledGeneration, RefusesWrongSamplingBeforeItJoins) {
  Generator generator(decoder_, make_policy("full"), {.capacity = 64});
  EXPECT_THROW(generator.join(request(1, -1)), InvalidArgument);
  EXPECT_NO_THROW(generator.join(request(1)));
}

}  // namespace
}  // namespace kvkeep::lm::sampling_test
