// SPDX-License-Identifier: Apache-2.0
// Ranks on a GPU: the CPU's, to the last one.

#include "ranks.h"

#include <cmath>

#include "device.h"
#include "kvkeep/core/error.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/score/pool.h"
#include "ranked_prompts.h"

namespace kvkeep::cuda::ranks_test {
namespace {

using Ranks = OnDevice;
using Ints = std::vector<std::int32_t>;

constexpr std::int32_t kNobody = -7;

Ints on_device(const RankedPrompts& c, const std::vector<float>& scores) {
  const DeviceArray<float> there(scores);
  const DeviceArray<std::int32_t> ranks(Ints(scores.size(), kNobody));
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(ranks_workspace_bytes(c.prompts)));
  launch_ranks({.prompts = c.prompts, .scores = there.data(), .ranks = ranks.data(), .workspace = workspace.data()},
               nullptr);
  return ranks.download();
}

/// Every prompt's ranks are the CPU's, and nothing beside them is written.
void expect_as_on_cpu(const RankedPrompts& c, const std::vector<float>& scores, const std::string& what) {
  Ints want(scores.size(), kNobody);
  for (const RankedPrompt& prompt : c.prompts) {
    const Ints ranks = ranks_of({scores.data() + prompt.scores, static_cast<std::size_t>(prompt.ranked)});
    std::copy(ranks.begin(), ranks.end(), want.begin() + static_cast<std::ptrdiff_t>(prompt.ranks));
  }
  in_every_order([&] { ASSERT_EQ(on_device(c, scores), want) << what; });
}

TEST_F(Ranks, CountFromTheHighestScoreAndTakeTheLowerIndexOfEqualOnes) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const RankedPrompts c({3, 4, 4, 2, 8});
  std::vector<float> scores{3, 1, 2, 1, 2, 2, 1, nan, -inf, nan, inf, -0.0F, 0.0F};
  const float u[] = {1, 0, 0, 0, 0, 0, 0, 14};  // G-A2: pooled attention whose borders are divided by the whole kernel
  scores.resize(21);
  pool_average(u, 8, 7, scores.data() + 13);
  EXPECT_EQ(on_device(c, scores), (Ints{1, 3, 2, 3, 1, 2, 4, 3, 2, 4, 1, 1, 2, 5, 6, 7, 8, 1, 2, 3, 4}));
}

TEST_F(Ranks, AreTheCpusForPromptsOfAnyLength) {
  oracle::Random random(21);
  for (int round = 0; round < oracle::random_case_count(24); ++round) {
    Ints lengths;
    for (int n = random.between(1, 4); n > 0; --n)
      lengths.push_back(random.one_of({0, 1, 2, 31, 32, 33, 97, 127, 255, 256, 257}));
    const RankedPrompts c(lengths, random.between(0, 3));
    std::vector<float> scores(static_cast<std::size_t>(c.elements));
    for (const RankedPrompt& prompt : c.prompts) {
      const std::vector<float> own = troubled_scores(random, prompt.ranked);
      std::copy(own.begin(), own.end(), scores.begin() + static_cast<std::ptrdiff_t>(prompt.scores));
    }
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, scores, "round " + std::to_string(round)));
  }
}

TEST_F(Ranks, AreTheCpusWhereWarpsHaveManyNumbersEach) {
  oracle::Random random(22);
  for (const std::int32_t length : {1024, 1025, 2053}) {
    const RankedPrompts c({length});
    std::vector<float> few(static_cast<std::size_t>(length)), wide = few;
    for (float& x : few) x = static_cast<float>(random.between(0, 9));
    for (float& x : wide) x = static_cast<float>(std::exp(3 * random.normal()));
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, few, std::to_string(length)));
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, wide, std::to_string(length)));
  }
}

TEST_F(Ranks, AreTheCpusInTheLargestBlock) {
  oracle::Random random(23);
  const RankedPrompts c({4097, 5});
  std::vector<float> scores;
  for (std::int64_t t = 0; t < c.elements; ++t) scores.push_back(static_cast<float>(random.normal()));
  expect_as_on_cpu(c, scores, "4097");
}

TEST_F(Ranks, TakeMorePromptsThanOneLaunchHolds) {
  oracle::Random random(24);
  Ints lengths;
  for (int p = 0; p < 66; ++p) lengths.push_back(random.between(0, 3));
  const RankedPrompts c(lengths);
  expect_as_on_cpu(c, troubled_scores(random, static_cast<std::int32_t>(c.elements)), "66 prompts");
}

TEST_F(Ranks, GiveEveryPromptAWorkspaceOfItsOwn) {  // the model runs one block after the other: prompts that share
                                                    // would not be seen
  const RankedPrompts c({5, 40, 1, 33});
  oracle::Random random(25);
  std::vector<float> scores(static_cast<std::size_t>(c.elements));
  for (float& x : scores) x = static_cast<float>(random.normal());
  const DeviceArray<float> there(scores);
  const DeviceArray<std::int32_t> ranks(scores.size());
  const auto bytes = static_cast<std::size_t>(ranks_workspace_bytes(c.prompts));
  EXPECT_EQ(bytes, 16U * 79);
  const DeviceArray<std::uint64_t> workspace(
      std::vector<std::uint64_t>(bytes / 8, ~std::uint64_t{0}));  // no token has that number
  launch_ranks({.prompts = c.prompts, .scores = there.data(), .ranks = ranks.data(), .workspace = workspace.data()},
               nullptr);
  for (const std::uint64_t entry : workspace.download()) EXPECT_NE(entry, ~std::uint64_t{0});
}

TEST_F(Ranks, RefuseANegativeNumberOfTokens) {
  const RankedPrompt wrong{.ranked = -1};
  EXPECT_THROW(launch_ranks({.prompts = {&wrong, 1}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::ranks_test
