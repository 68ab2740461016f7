// SPDX-License-Identifier: Apache-2.0
// What a prompt's newest queries made of the tokens before them, against plain loops in double, and what follows for
// the layer that selects.

#include "kvkeep/layers/prompt_scores.h"

#include <gtest/gtest.h>

#include "arrays.h"
#include "kvkeep/layers/layer_selector.h"
#include "prompts.h"

namespace kvkeep::prompt_scores_test {
namespace {

using namespace testing;

TEST(PromptScores, AreTheHandExamples) {
  // Queries and keys of two components, no scaling but the root of two: softmax rows .134 .366 .134 | .366 0 and .128
  // .128 .348 | .348 .047.
  Prompts prompt(1, 1, 2, {5}, 2, 1);
  const float root = std::sqrt(2.0F);
  prompt.queries[0] = {root, 0, 0, root};
  prompt.keys[0] = {0, 0, 1, 0, 0, 1, 1, 1, 2, -1};
  const PromptScores scores = prompt.scores({.window = 2, .pool = 1});
  const float* u = scores.tokens.data<float>();
  ASSERT_EQ(scores.tokens.numel(), 3);
  EXPECT_NEAR(u[0], 0.262603, 1e-6);
  EXPECT_NEAR(u[1], 0.493661, 1e-6);
  EXPECT_NEAR(u[2], 0.482770, 1e-6);
  EXPECT_EQ(scores.heads.data<float>()[3], 0.0F);
  EXPECT_EQ(scores.heads.data<float>()[4], 0.0F);
}

TEST(PromptScores, AreThoseOfPlainLoops) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 2, 7})
    for (const std::int32_t kv_heads : {1, 3})
      for (const std::int32_t dim : {1, 8, 33})
        for (const Options& options : {Options{4, 1}, Options{3, 7}, Options{5, 5, Options::Pool::maximum},
                                       Options{1, 3, Options::Pool::maximum}}) {
          const std::vector<std::int32_t> lengths{options.window + 1, 40, 23};
          const Prompts prompts(group, kv_heads, dim, lengths, options.window, ++seed);
          const PromptScores got = prompts.scores(options);
          const RowTable table = prompts.table();
          const float* tokens = got.tokens.data<float>();
          for (std::size_t s = 0; s < lengths.size(); ++s) {
            const std::int32_t before = lengths[s] - options.window;
            std::vector<double> sum(static_cast<std::size_t>(before));
            for (std::int32_t h = 0; h < kv_heads; ++h) {
              const std::vector<double> want = prompts.head_scores(s, h, options);
              const float* head =
                  got.heads.data<float>() +
                  table.rows[s * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(h)].first;
              for (std::int32_t t = 0; t < before; ++t) {
                ASSERT_NEAR(head[t], want[static_cast<std::size_t>(t)], 1e-5)
                    << "prompt " << s << ", head " << h << ", token " << t << ", D " << dim;
                sum[static_cast<std::size_t>(t)] += want[static_cast<std::size_t>(t)];
              }
              for (std::int32_t t = before; t < lengths[s]; ++t) ASSERT_EQ(head[t], 0.0F);
            }
            for (std::int32_t t = 0; t < before; ++t) ASSERT_NEAR(*tokens++, sum[static_cast<std::size_t>(t)], 1e-4);
          }
        }
}

TEST(PromptScores, DoNotDependOnTheOtherPrompts) {
  const Prompts both(2, 2, 8, {30, 17}, 4, 9);
  Prompts second(2, 2, 8, {17}, 4, 10);
  second.keys[0] = both.keys[1];
  second.queries[0] = both.queries[1];
  const PromptScores a = both.scores({.window = 4}), b = second.scores({.window = 4});
  EXPECT_TRUE(Array(a.tokens.narrow(0, 26, 13)).equal(b.tokens));
}

TEST(PromptScores, LeadToTheLayerWhereTheRankingSettles) {
  // Layers whose keys come ever nearer to one another's: the ranking settles.
  constexpr std::int32_t kLayers = 10, kTokens = 60, kWindow = 4;
  LayerSelector selector({.select = 20, .window = kWindow, .min_layer = 3, .observed_layers = 3, .threshold = 0.3},
                         kTokens);
  Prompts base(2, 2, 8, {kTokens}, kWindow, 20);
  for (std::int32_t l = 0; l < kLayers && selector.layer() < 0; ++l) {
    Prompts layer = base;
    const Prompts noise(2, 2, 8, {kTokens}, kWindow, 100 + static_cast<std::uint64_t>(l));
    for (std::size_t i = 0; i < layer.keys[0].size(); ++i)
      layer.keys[0][i] += noise.keys[0][i] * (l < 5 ? 1.0F : 0.01F);
    const PromptScores scores = layer.scores({.window = kWindow});
    if (selector.wants(l))
      static_cast<void>(
          selector.see(l, {scores.tokens.data<float>(), static_cast<std::size_t>(scores.tokens.numel())}));
  }
  EXPECT_EQ(selector.layer(), 7) << "the first layer whose three observed ones are all settled";
  EXPECT_EQ(selector.tokens().size(), 20U);
}

TEST(PromptScores, RefuseWhatTheyCannotScore) {
  const Prompts prompts(1, 1, 4, {6}, 3, 30);
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 4})), InvalidArgument) << "fewer queries than the window";
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 3, .pool = 4})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(Prompts(1, 1, 4, {3}, 3, 31).scores({.window = 3})), InvalidArgument)
      << "nothing before the window";
}

}  // namespace
}  // namespace kvkeep::prompt_scores_test
