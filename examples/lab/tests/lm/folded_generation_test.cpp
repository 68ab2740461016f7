// SPDX-License-Identifier: Apache-2.0
// Policies that fold, in the reference decoder on the shipped model: nothing changes where everything opens, and what
// is kept follows from the prompt's own logits.

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/memory/segmenter.h"
#include "kvlab/generation.h"
#include "kvlab/tasks.h"

namespace kvkeep::lm::folded_generation_test {
namespace {

using kvkeep::testing::apart;

const std::string kFold = "sekv,recent=24,interval=16,memory.max_span=16";
const std::string kOpen =
    ",memory.max_rank=64,memory.rank=max,memory.zoom=coverage,memory.coverage=1,memory.coverage_floor=0";
const std::string kRest = "ams-tova,budget=48,interval=16,recent=16,window=8,rest=fold,memory.max_span=16";

std::vector<std::int32_t> ids(int tokens, int salt) {
  std::vector<std::int32_t> out;
  for (int t = 0; t < tokens; ++t) out.push_back(6 + (t * t * 7 + t * 13 + salt * 31) % 200);
  return out;
}

Completion complete(const std::string& policy, int page_size = 0, Path path = Path::kernels,
                    std::vector<SequenceEvent>* events = nullptr) {
  Decoder decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  decoder.use(path);
  Request request{.prompt = ids(150, 1), .new_tokens = 80, .keep_logits = true, .keep_positions = true};
  GenerationRun run = generate(decoder, make_policy(policy), {request}, {.page_size = page_size});
  if (events != nullptr) *events = run.completions.front().events;
  return std::move(run.completions.front());
}

TEST(FoldedGeneration, IsThatOfTheFullCacheWhereEverySpanOpensAtFullRank) {
  const Completion full = complete("full");
  for (const std::string& policy : {kFold + kOpen, kRest + kOpen}) {
    const Completion folded = complete(policy);
    EXPECT_EQ(folded.tokens, full.tokens) << policy;
    EXPECT_LT(apart(folded.logits, full.logits), 2e-3) << policy;
    ASSERT_TRUE(folded.folded.has_value());
    EXPECT_GT(folded.folded->tokens, 0);
    EXPECT_GE(folded.events.size(), 4U) << "it folded while decoding, too";
    EXPECT_FALSE(full.folded.has_value());
  }
}

TEST(FoldedGeneration, GivesTheSameBitsInPagesAndTheSameNumbersByOperators) {
  for (const std::string& policy : {kFold, kRest}) {
    const Completion dense = complete(policy), paged = complete(policy, 16),
                     operators = complete(policy, 0, Path::operators);
    EXPECT_EQ(apart(dense.logits, paged.logits), 0) << policy;
    EXPECT_EQ(dense.tokens, paged.tokens);
    // A span that is just worth opening may open by one path alone: the numbers are near, not equal.
    EXPECT_LT(apart(dense.logits.narrow(0, 0, 1), operators.logits.narrow(0, 0, 1)), 1e-3)
        << "the prompt reads no spans";
  }
  const Completion kernels = complete(kFold + kOpen), operators = complete(kFold + kOpen, 0, Path::operators);
  EXPECT_LT(apart(kernels.logits, operators.logits), 2e-3);
}

TEST(FoldedGeneration, CutsThePromptByTheSurprisalOfItsOwnLogits) {
  Decoder decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  const std::vector<std::int32_t> prompt = ids(150, 1);
  std::vector<LayerCache> cache = decoder.make_cache(1, 150);
  std::vector<std::int32_t> positions(150);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<std::int32_t> indptr{0, 150}, rows{0}, lengths{0};
  const at::Tensor all = decoder.forward({prompt, indptr, positions, rows, lengths}, cache, {.logits = Logits::all});
  std::int64_t shown = 0;
  static_cast<void>(
      decoder.forward({prompt, indptr, positions, rows, lengths}, cache, {.on_logits = [&](const LogitsSight& sight) {
                        EXPECT_EQ(sight.first_token, shown);
                        EXPECT_LE(sight.logits.size(0), 128);
                        EXPECT_EQ(apart(sight.logits, all.narrow(0, shown, sight.logits.size(0))), 0)
                            << "the same logits, block by block";
                        shown += sight.logits.size(0);
                      }}));
  EXPECT_EQ(shown, 150);
  PromptSurprisal surprisal(prompt);
  surprisal.see(all);
  EXPECT_NEAR(token_surprisal(all[10], prompt[11]), surprisal.values()[11], 1e-6);
  std::vector<SequenceEvent> events;
  static_cast<void>(complete(kFold, 0, Path::kernels, &events));
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.front().step, 0) << "as soon as the prompt has ended";
  const std::vector<std::int32_t> dense =
      segment(surprisal.values(), {.alpha = 3, .sink = 4, .recent = 24, .min_span = 4, .max_span = 16}).dense();
  for (const auto& row : events.front().positions) EXPECT_EQ(row, dense);
}

TEST(FoldedGeneration, OfASequenceDoesNotDependOnTheOthers) {
  Decoder decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  for (const std::string& policy : {kFold, kRest}) {
    std::vector<Request> requests;
    for (int i = 0; i < 3; ++i)
      requests.push_back({.prompt = ids(60 + 40 * i, i), .new_tokens = 50 - 10 * i, .keep_logits = true});
    const GenerationRun together = generate(decoder, make_policy(policy), requests, {.places = 3});
    for (std::size_t i = 0; i < 3; ++i) {
      const GenerationRun alone = generate(decoder, make_policy(policy), {requests[i]});
      EXPECT_EQ(apart(together.completions[i].logits, alone.completions[0].logits), 0) << policy << ", sequence " << i;
      EXPECT_EQ(together.completions[i].kept_bytes, alone.completions[0].kept_bytes);
    }
    EXPECT_GT(together.totals.reads.zooms, 0);
    EXPECT_GT(together.totals.reads.bytes, 0);
  }
}

TEST(FoldedGeneration, RefusesSurprisalBehindPromptsThatLeaveTokensBehindAndFoldsTheRestThere) {
  Decoder decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  const Request request{.prompt = ids(200, 3), .new_tokens = 40};
  try {
    static_cast<void>(generate(decoder, make_policy("asl,budget=64,window=16,threshold=2+sekv,recent=24"), {request}));
    ADD_FAILURE();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("decode: sekv reads the surprisal of every token"), std::string::npos)
        << e.what();
  }
  const GenerationRun run =
      generate(decoder, make_policy("asl,budget=64,window=16,threshold=2+tova,budget=48,interval=8,recent=8,rest=fold"),
               {request});
  ASSERT_TRUE(run.completions.front().folded.has_value());
  EXPECT_GT(run.completions.front().folded->tokens, 0);
}

}  // namespace
}  // namespace kvkeep::lm::folded_generation_test
