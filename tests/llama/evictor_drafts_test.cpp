// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp: drafts that are verified in one batch, and taken back across an event.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

std::vector<std::vector<std::int32_t>> kept_by(const Engine& run, llama_seq_id sequence = 0) {
  std::vector<std::vector<std::int32_t>> kept;
  for (const std::int32_t l : run.evictor->keeper().spec().full_layers())
    for (std::int32_t h = 0; h < run.evictor->keeper().spec().kv_heads; ++h)
      kept.push_back(run.positions(sequence, l, h));
  return kept;
}

/// Rounds of drafts, of which the first ones are right, and a run that is fed only these. Events come at the same
/// tokens, and keep the same slots.
TEST_P(LlamaEvictor, DraftsThatAreTakenBackDoNotShow) {
  if (!exact()) return;
  for (const std::string policy :
       {"tova,budget=24,interval=8,prefill=cut,sink=2,recent=4",
        "snapkv,scorer.window=8,budget=40,interval=16,recent=8", "knorm,budget=24,interval=8,share=union",
        "ams-tova,budget=32,interval=8,prefill=cut"})
    for (const Positions positions : {Positions::text, Positions::cache})
      for (const bool settled : {true, false}) {
        if (positions == Positions::cache && !settled) continue;
        const std::string what = policy + (positions == Positions::cache ? " cache" : "") + (settled ? " settled" : "");
        const Setting setting{.type = GGML_TYPE_F32, .positions = positions};
        const Engine drafted(policy, setting), plain(policy, setting);
        const std::vector<llama_token> prompt = some_tokens(40), text = some_tokens(400, 2), wrong = some_tokens(8, 3);
        for (const Engine* run : {&drafted, &plain}) ASSERT_EQ(run->decode({{0, prompt}}), 0);
        std::mt19937 random(4);
        std::size_t at = 0, cuts = drafted.evictor->report().cuts.size(), refused = 0;
        for (int round = 0; round < 80; ++round) {
          const std::size_t right = 1 + random() % 5, wrongs = random() % 5;
          std::vector<llama_token> drafts(text.begin() + static_cast<std::ptrdiff_t>(at),
                                          text.begin() + static_cast<std::ptrdiff_t>(at + right));
          ASSERT_EQ(plain.decode({{0, drafts}}), 0);
          drafts.insert(drafts.end(), wrong.begin(), wrong.begin() + static_cast<std::ptrdiff_t>(wrongs));
          ASSERT_EQ(drafted.decode({{0, drafts, true, true}}), 0) << what << " round " << round;
          cuts += drafted.evictor->report().cuts.size();
          const llama_pos behind = llama_memory_seq_pos_max(drafted.memory(), 0) + 1 - static_cast<llama_pos>(wrongs);
          if (wrongs > 0) ASSERT_TRUE(llama_memory_seq_rm(drafted.memory(), 0, behind, -1));
          refused += wrongs;
          at += right;
          if (!settled) continue;
          drafted.evictor->settle(0);
          cuts += drafted.evictor->report().cuts.size();
          expect_sound(drafted, 0);
          ASSERT_EQ(drafted.evictor->next_position(0), plain.evictor->next_position(0)) << what << " round " << round;
          ASSERT_EQ(kept_by(drafted), kept_by(plain)) << what << " round " << round;
        }
        drafted.evictor->settle(0);
        cuts += drafted.evictor->report().cuts.size();
        EXPECT_EQ(kept_by(drafted), kept_by(plain)) << what;
        EXPECT_EQ(static_cast<std::int64_t>(cuts), drafted.evictor->spent().cut) << what << ": each cut is reported";
        EXPECT_EQ(drafted.evictor->spent().cut, plain.evictor->spent().cut) << what;
        EXPECT_GE(cuts, 8U) << what;
        EXPECT_GT(refused, 50U);
      }
}

/// Eight rounds of 5 drafts, of which 3 are taken back: an event never sees one of those.
TEST_P(LlamaEvictor, AnEventComesWithTheBatchBehindTheDrafts) {
  const Engine run("tova,budget=24,interval=8,prefill=cut,sink=2,recent=4", {.type = GGML_TYPE_F32});
  ASSERT_EQ(run.decode({{0, some_tokens(40)}}), 0);
  std::int64_t length = 40;
  for (unsigned round = 0; round < 8; ++round) {
    ASSERT_EQ(run.decode({{0, some_tokens(5, round), true, true}}), 0);
    for (const Cut& cut : run.evictor->report().cuts) EXPECT_EQ(cut.logical_length, length);
    EXPECT_EQ(run.evictor->report().cuts.size(), round == 4 ? 1U : 0U);
    length += 2;
    ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, static_cast<llama_pos>(length), -1));
  }
  EXPECT_EQ(run.evictor->keeper().logical_length(0), length + 3) << "it follows when it is called";
  run.evictor->settle(0);
  EXPECT_EQ(run.evictor->keeper().logical_length(0), length);
  EXPECT_EQ(run.evictor->report().cuts.size(), 1U);
  run.evictor->settle(0);
  EXPECT_TRUE(run.evictor->report().cuts.empty()) << "nothing waits any more";
  expect_sound(run, 0);
}

TEST_P(LlamaEvictor, AnOverdueEventThatMovesPositionsIsAskedFor) {
  const Engine run("tova,budget=24,interval=8,prefill=cut,sink=2,recent=4", {.positions = Positions::cache});
  ASSERT_EQ(run.decode({{0, some_tokens(40)}}), 0);
  ASSERT_EQ(run.evictor->next_position(0), 24);
  ASSERT_EQ(run.decode({{0, some_tokens(9, 2), true, true}}), 0);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, 32, -1));
  try {
    static_cast<void>(run.decode({{0, {1}}}));
    ADD_FAILURE();
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("settle(0)"), std::string::npos) << error.what();
  }
  EXPECT_EQ(llama_memory_seq_pos_max(run.memory(), 0), 31) << "nothing was decoded";
  run.evictor->settle(0);
  EXPECT_EQ(run.evictor->report().cuts.size(), 1U);
  EXPECT_EQ(run.evictor->next_position(0), 24);
  ASSERT_EQ(run.decode({{0, {1}}}), 0);
  expect_sound(run, 0);
  // Whoever leaves positions to llama.cpp need not ask.
  ASSERT_EQ(run.decode({{0, some_tokens(9, 3), true, true}}), 0);
  std::vector<llama_token> next{1};
  ASSERT_EQ(run.evictor->decode(llama_batch_get_one(next.data(), 1)), 0);
  EXPECT_EQ(run.evictor->report().cuts.size(), 1U);
  EXPECT_EQ(run.evictor->next_position(0), 25);
  expect_sound(run, 0);
}

/// A context that drafts token by token says so; other sequences are cut meanwhile.
TEST_P(LlamaEvictor, NoEventCutsASequenceThatDrafts) {
  for (const Positions positions : {Positions::text, Positions::cache}) {
    const Engine run("tova,budget=24,interval=8,prefill=cut,sink=2,recent=4",
                     {.cells = 1024, .sequences = 2, .unified = false, .positions = positions});
    ASSERT_EQ(run.decode({{0, some_tokens(40)}, {1, some_tokens(40)}}), 0);
    run.evictor->draft(0);
    for (unsigned i = 0; i < 20; ++i) ASSERT_EQ(run.decode({{0, some_tokens(1, i)}, {1, some_tokens(1, i)}}), 0);
    EXPECT_EQ(run.evictor->cells(0).size(), 44U);
    EXPECT_EQ(run.evictor->cells(1).size(), 28U);
    EXPECT_EQ(run.evictor->spent().drafted, 20) << "a program that forgets settle() sees it grow";
    ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, run.evictor->next_position(0) - 11, -1));
    run.evictor->settle(0);
    EXPECT_EQ(run.evictor->cells(0).size(), 24U);
    EXPECT_EQ(run.evictor->keeper().logical_length(0), 49);
    for (unsigned i = 0; i < 8; ++i) ASSERT_EQ(run.decode({{0, some_tokens(1, i)}}), 0);
    EXPECT_EQ(run.evictor->cells(0).size(), 24U) << "drafts no more";
    EXPECT_EQ(run.evictor->spent().drafted, 20);
    for (const llama_seq_id s : {0, 1}) expect_sound(run, s);
  }
}

TEST_P(LlamaEvictor, SettlesOnlyWhatItKnowsBetweenBatches) {
  const Engine run("tova,budget=24,interval=8,prefill=cut");
  EXPECT_THROW(run.evictor->settle(0), StateError);
  EXPECT_THROW(run.evictor->draft(0), StateError);
  std::vector<llama_token> ids = some_tokens(20);
  run.evictor->begin(llama_batch_get_one(ids.data(), 20));
  EXPECT_THROW(run.evictor->settle(0), StateError);
  run.evictor->end(llama_decode(run.context.get(), llama_batch_get_one(ids.data(), 20)));
  run.evictor->settle(0);
  expect_sound(run, 0);
}

}  // namespace
}  // namespace kvkeep::llama
