// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp: prompts that are longer than the cache, and events that the program names.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// A prompt in batches of at most `most` tokens, of which the last token has logits. The first status
/// that is not 0, or -1.
int feed(const Engine& run, const std::vector<llama_token>& prompt, std::size_t most,
         const std::function<void(std::size_t seen)>& after = {}) {
  for (std::size_t at = 0; at < prompt.size();) {
    const std::size_t count = std::min(most, prompt.size() - at);
    const auto from = prompt.begin() + static_cast<std::ptrdiff_t>(at);
    at += count;
    const int status = run.decode({{0, {from, from + static_cast<std::ptrdiff_t>(count)}, at == prompt.size()}});
    if (status != 0) return status;
    if (after) after(at);
  }
  return -1;
}

TEST_P(LlamaEvictor, APromptThatIsLongerThanTheCacheRunsInPieces) {
  const std::vector<llama_token> prompt = some_tokens(exact() ? 1500 : 600);
  for (const std::string policy :
       {"tova,budget=96,interval=16,sink=2,recent=8", "snapkv,window=8,budget=96,interval=16,recent=8",
        "ams-tova,budget=96,interval=16", "h2o,budget=96,interval=16,recent=8",
        "keydiff,budget=96,interval=16,recent=8,share=union"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      SCOPED_TRACE(policy + (positions == Positions::cache ? " cache" : ""));
      const Setting small{.cells = 256, .type = GGML_TYPE_F32, .positions = positions};
      const Engine run(policy + ",prefill=pieces", small);
      std::int64_t before = 0;
      int cuts = 0;
      ASSERT_EQ(feed(run, prompt, 100,
                     [&](std::size_t seen) {
                       const auto held = static_cast<std::int64_t>(run.evictor->cells(0).size());
                       const std::int64_t most = before + std::min<std::int64_t>(100, std::ssize(prompt));
                       EXPECT_EQ(run.evictor->report().cuts.size(), most > 96 ? 1U : 0U) << "at " << seen;
                       EXPECT_LE(held, 96);
                       EXPECT_EQ(run.evictor->keeper().logical_length(0), static_cast<std::int64_t>(seen));
                       cuts += static_cast<int>(run.evictor->report().cuts.size());
                       before = held;
                       expect_sound(run, 0);
                     }),
                -1);
      EXPECT_EQ(cuts, static_cast<int>((prompt.size() + 99) / 100));
      EXPECT_EQ(run.evictor->keeper().prompt_length(0), std::ssize(prompt));
      for (int i = 0; i < 40; ++i) ASSERT_EQ(run.decode({{0, {run.likeliest()}}}), 0);
      EXPECT_EQ(run.evictor->spent().cut, cuts + 2);
      expect_sound(run, 0);
      if (positions == Positions::text) {
        const Engine whole(policy + ",prefill=cut", small);
        EXPECT_EQ(feed(whole, prompt, 100), 1) << "without pieces the cache is full";
      }
    }
}

TEST_P(LlamaEvictor, PiecesKeepWhatAPolicyByPositionKeeps) {
  const Engine run("streaming,budget=64,interval=16,sink=4,recent=8,prefill=pieces", {.type = GGML_TYPE_F32});
  ASSERT_EQ(feed(run, some_tokens(300), 70,
                 [&](std::size_t seen) {
                   const auto end = static_cast<std::int32_t>(seen);
                   std::vector<std::int32_t> kept{0, 1, 2, 3};
                   for (std::int32_t p = end - 60; p < end; ++p) kept.push_back(p);
                   EXPECT_EQ(run.positions(0, 0, 0), kept) << seen;
                 }),
            -1);
}

TEST_P(LlamaEvictor, PiecesOfAPromptThatTheBudgetHoldsChangeNoLogit) {
  const std::vector<llama_token> prompt = some_tokens(200);
  const Engine alone("", {.type = GGML_TYPE_F32}),
      run("tova,budget=256,interval=16,prefill=pieces", {.type = GGML_TYPE_F32});
  for (const Engine* engine : {&alone, &run}) ASSERT_EQ(feed(*engine, prompt, 64), -1);
  const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
  const float *a = llama_get_logits_ith(alone.context.get(), -1), *b = llama_get_logits_ith(run.context.get(), -1);
  EXPECT_TRUE(std::equal(a, a + size, b));
  EXPECT_EQ(run.evictor->spent().cut, 0);
}

TEST_P(LlamaEvictor, AnEventComesWhenTheProgramNamesIt) {
  for (const Positions positions : {Positions::text, Positions::cache}) {
    const Engine run("snapkv,window=4,budget=24,interval=8,sink=2,recent=4,prefill=cut,trigger=named",
                     {.type = GGML_TYPE_F32, .positions = positions});
    EXPECT_THROW(run.evictor->cut(0), StateError) << "no tokens";
    ASSERT_EQ(run.decode({{0, some_tokens(20), false}}), 0);
    EXPECT_THROW(run.evictor->cut(0), StateError) << "in the middle of the prompt";
    ASSERT_EQ(run.decode({{0, some_tokens(20, 2)}}), 0);
    EXPECT_EQ(run.evictor->cells(0).size(), 24U) << "the end of the prompt is an event";
    for (unsigned turn = 0; turn < 3; ++turn) {
      for (unsigned i = 0; i < 30; ++i) ASSERT_EQ(run.decode({{0, some_tokens(1, i)}}), 0);
      EXPECT_EQ(run.evictor->cells(0).size(), 54U);
      run.evictor->cut(0);
      EXPECT_EQ(run.evictor->report().cuts.size(), 1U);
      EXPECT_EQ(run.evictor->cells(0).size(), 24U);
      expect_sound(run, 0);
      run.evictor->cut(0);
      EXPECT_TRUE(run.evictor->report().cuts.empty()) << "nothing is over the budget";
    }
  }
}

TEST_P(LlamaEvictor, NamesOnlyEventsWhoseQueriesWereRead) {
  const Engine tova("tova,budget=24,interval=64,prefill=cut"), knorm("knorm,budget=24,interval=64,prefill=cut");
  for (const Engine* run : {&tova, &knorm}) {
    ASSERT_EQ(run->decode({{0, some_tokens(40)}}), 0);
    ASSERT_EQ(run->decode({{0, some_tokens(10, 2)}}), 0);
  }
  EXPECT_THROW(tova.evictor->cut(0), Unsupported);
  EXPECT_EQ(tova.evictor->cells(0).size(), 34U) << "it goes on";
  ASSERT_EQ(tova.decode({{0, some_tokens(1)}}), 0);
  knorm.evictor->cut(0);
  EXPECT_EQ(knorm.evictor->cells(0).size(), 24U);
}

/// A turn whose middle no event may cut, and the event at its end.
TEST_P(LlamaEvictor, HoldsEventsBackUntilTheEndOfATurn) {
  const Engine run("tova,budget=24,interval=8,prefill=cut,sink=2,recent=4", {.type = GGML_TYPE_F32});
  ASSERT_EQ(run.decode({{0, some_tokens(40)}}), 0);
  run.evictor->draft(0);
  for (unsigned i = 0; i < 50; ++i) ASSERT_EQ(run.decode({{0, some_tokens(1, i)}}), 0);
  EXPECT_EQ(run.evictor->cells(0).size(), 74U);
  run.evictor->settle(0);
  EXPECT_EQ(run.evictor->cells(0).size(), 24U);
  expect_sound(run, 0);
}

}  // namespace
}  // namespace kvkeep::llama
