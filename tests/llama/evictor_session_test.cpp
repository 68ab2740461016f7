// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp: sequences that are saved, come back, and go back.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// Tokens after a context that has been used, whose cells are then others.
std::vector<llama_token> go_on(const Engine& run, llama_token first, int tokens, llama_seq_id sequence) {
  std::vector<llama_token> made{first};
  for (int i = 0; i < tokens; ++i) {
    EXPECT_EQ(run.decode({{sequence, {made.back()}}}), 0);
    made.push_back(run.likeliest());
  }
  // Other cells are another order of sums, which random text behind a pretrained model soon shows: not compared there.
  if (!exact()) made.resize(1);
  return made;
}

/// A message of StateError; empty: none.
template <class E, class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

TEST_P(LlamaEvictor, ASessionGoesOnWhereItWasSaved) {
  for (const std::string policy :
       {"tova,budget=48,interval=16,prefill=cut,sink=2,recent=4", "tova,budget=48,interval=16,prefill=cut,share=union",
        "snapkv,scorer.window=8,budget=48,interval=24,recent=8", "h2o,budget=48,interval=16", "tova,budget=400"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Setting setting{.sequences = 3, .type = GGML_TYPE_F32, .positions = positions};
      const Engine first(policy, setting);
      ASSERT_EQ(first.decode({{0, some_tokens(90)}}), 0);
      std::vector<llama_token> before{3};
      if (exact())
        before = go_on(first, first.likeliest(), 21, 0);
      else
        ASSERT_EQ(first.decode({{0, some_tokens(21, 6)}}), 0);
      const Session session = save(first);
      const std::vector<llama_token> want = go_on(first, before.back(), 50, 0);
      // Another context, in which other sequences have been and are: cells wrap around, and the id is another.
      const Engine second(policy, setting);
      ASSERT_EQ(second.decode({{0, some_tokens(230, 2)}, {1, some_tokens(20, 3)}}), 0);
      ASSERT_EQ(second.decode({{1, some_tokens(200, 4)}}), 0);
      ASSERT_TRUE(llama_memory_seq_rm(second.memory(), 0, -1, -1));
      restore(second, session, 2);
      EXPECT_TRUE(second.evictor->cells(2).empty()) << "cells are not known yet";
      ASSERT_EQ(second.decode({{1, some_tokens(3, 5)}}), 0) << "others go on meanwhile";
      EXPECT_EQ(go_on(second, before.back(), 50, 2), want) << policy;
      expect_sound(second, 2);
      expect_sound(second, 1);
      if (!exact()) continue;
      for (const std::int32_t l : first.evictor->keeper().spec().full_layers())
        EXPECT_EQ(second.positions(2, l, 0), first.positions(0, l, 0)) << policy;
      EXPECT_EQ(first.evictor->spent().cut > 1, policy != "tova,budget=400") << policy;
    }
}

/// Before it has gone on: taken back, saved once more.
TEST_P(LlamaEvictor, ASessionThatHasJustComeBackMayBeTakenBackAndSaved) {
  const std::string policy = "tova,budget=48,interval=16,prefill=cut,sink=2,recent=4";
  const Engine first(policy, {.type = GGML_TYPE_F32}), second(policy, {.type = GGML_TYPE_F32}),
      third(policy, {.type = GGML_TYPE_F32});
  for (const Engine* run : {&first, &second}) ASSERT_EQ(run->decode({{0, some_tokens(90)}}), 0);
  ASSERT_EQ(first.decode({{0, some_tokens(5, 2)}}), 0);
  restore(second, save(first));
  const llama_pos behind = second.evictor->next_position(0);
  for (const Engine* run : {&first, &second}) ASSERT_TRUE(run->evictor->go_back(0, behind - 2));
  restore(third, save(second));
  const std::vector<llama_token> want = go_on(first, 7, 40, 0);
  EXPECT_EQ(go_on(second, 7, 40, 0), want);
  EXPECT_EQ(go_on(third, 7, 40, 0), want);
  for (const Engine* run : {&first, &second, &third}) expect_sound(*run, 0);
}

/// Saved between drafts and what is refused of them: the event, too, comes where it would have come.
TEST_P(LlamaEvictor, ASessionWhoseEventWaitsIsCutBehindItsNextBatch) {
  const std::string policy = "tova,budget=48,interval=16,prefill=cut,sink=2,recent=4";
  const Engine first(policy, {.type = GGML_TYPE_F32}), second(policy, {.type = GGML_TYPE_F32});
  ASSERT_EQ(first.decode({{0, some_tokens(90)}}), 0);
  ASSERT_EQ(first.decode({{0, some_tokens(20, 2), true, true}}), 0);
  const Session session = save(first);
  EXPECT_EQ(first.evictor->spent().cut, 1);
  for (const bool settled : {false, true}) {
    restore(second, session);
    if (settled) second.evictor->settle(0);
    const std::int64_t cut = second.evictor->spent().cut;
    ASSERT_EQ(second.decode({{0, {7}}}), 0);
    EXPECT_EQ(second.evictor->spent().cut, cut + 1);
    EXPECT_EQ(second.evictor->report().cuts.at(0).logical_length, 111);
    EXPECT_EQ(second.evictor->cells(0).size(), 48U);
    expect_sound(second, 0);
  }
}

TEST_P(LlamaEvictor, AStateThatLlamaCppAloneSavedIsAPrefix) {
  const std::vector<llama_token> prompt = some_tokens(120);
  const Engine alone(""), kept("tova,budget=48,interval=16,prefill=cut");
  ASSERT_EQ(alone.decode({{0, prompt}}), 0);
  Session session;
  session.cache.resize(llama_state_seq_get_size(alone.context.get(), 0));
  llama_state_seq_get_data(alone.context.get(), session.cache.data(), session.cache.size(), 0);
  restore(kept, session);
  EXPECT_EQ(kept.evictor->next_position(0), 120);
  ASSERT_EQ(kept.decode({{0, some_tokens(4, 2)}}), 0);
  EXPECT_EQ(kept.evictor->spent().cut, 1);
  EXPECT_EQ(kept.evictor->cells(0).size(), 48U);
  expect_sound(kept, 0);
}

TEST_P(LlamaEvictor, RefusesSessionsThatAreNotWhatWasSaved) {
  const std::string policy = "tova,budget=48,interval=16,prefill=cut";
  const Setting setting{.sequences = 2};
  const Engine run(policy, setting);
  ASSERT_EQ(run.decode({{0, some_tokens(90)}}), 0);
  const Session session = save(run);
  const Engine other(policy, setting);
  EXPECT_NE(message_of<StateError>([&] { other.evictor->restore(0, session.kept); }).find("is empty"),
            std::string::npos);
  for (const std::size_t at : {std::size_t{0}, std::size_t{33}, session.kept.size() / 2, session.kept.size() - 1}) {
    Session damaged = session;
    damaged.kept[at] ^= std::byte{1};
    llama_state_seq_set_data(other.context.get(), session.cache.data(), session.cache.size(), 0);
    EXPECT_NE(message_of<InvalidArgument>([&] { other.evictor->restore(0, damaged.kept); }).find("not what save()"),
              std::string::npos)
        << at;
    EXPECT_FALSE(other.evictor->keeper().knows(0));
  }
  // llama.cpp's part of another moment.
  const Session later = [&] {
    EXPECT_EQ(run.decode({{0, some_tokens(3, 2)}}), 0);
    return save(run);
  }();
  llama_state_seq_set_data(other.context.get(), later.cache.data(), later.cache.size(), 0);
  EXPECT_NE(message_of<Unsupported>([&] { other.evictor->restore(0, session.kept); }).find("positions"),
            std::string::npos);
  // Neither is followed, so it is refused until all of it is removed.
  EXPECT_NE(message_of<StateError>([&] { static_cast<void>(other.decode({{0, some_tokens(1)}})); }), "");
  ASSERT_TRUE(llama_memory_seq_rm(other.memory(), 0, -1, -1));
  EXPECT_EQ(other.decode({{0, some_tokens(90)}}), 0);
  for (const char* unlike : {"streaming,budget=48,interval=16,prefill=cut", "tova,budget=49,interval=16,prefill=cut"}) {
    const Engine wrong(unlike, setting);
    llama_state_seq_set_data(wrong.context.get(), session.cache.data(), session.cache.size(), 0);
    EXPECT_NE(message_of<InvalidArgument>([&] { wrong.evictor->restore(0, session.kept); }), "") << unlike;
  }
  const Engine renumbered(policy, {.sequences = 2, .positions = Positions::cache});
  llama_state_seq_set_data(renumbered.context.get(), session.cache.data(), session.cache.size(), 0);
  EXPECT_NE(message_of<InvalidArgument>([&] { renumbered.evictor->restore(0, session.kept); }).find("Positions"),
            std::string::npos);
}

/// Rows that llama.cpp copies, and keys that it turns, with the next batch are not yet what a state would hold.
TEST_P(LlamaEvictor, SavesNoRowsThatAreYetToBeMoved) {
  const Engine copied("tova,budget=200", {.sequences = 2, .unified = false});
  ASSERT_EQ(copied.decode({{0, some_tokens(60)}}), 0);
  copied.evictor->copy(0, 1, 60);
  EXPECT_NE(message_of<StateError>([&] { static_cast<void>(copied.evictor->save(1)); }).find("next batch"),
            std::string::npos);
  ASSERT_EQ(copied.decode({{1, some_tokens(1)}}), 0);
  EXPECT_FALSE(copied.evictor->save(1).empty());
  const Engine turned("tova,budget=24,interval=8,prefill=cut,share=union",
                      {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED, .positions = Positions::cache});
  ASSERT_EQ(turned.decode({{0, some_tokens(60)}}), 0);
  EXPECT_NE(message_of<StateError>([&] { static_cast<void>(turned.evictor->save(0)); }).find("next batch"),
            std::string::npos);
  ASSERT_EQ(turned.decode({{0, some_tokens(1)}}), 0);
  EXPECT_FALSE(turned.evictor->save(0).empty());
}

/// llama.cpp copies rows with its next batch, before which an event that waits for drafts would move them.
TEST_P(LlamaEvictor, ACopyIsMadeOfRowsBeforeAnEventMovesThem) {
  const std::string policy = "tova,budget=24,interval=8,prefill=cut";
  const Setting setting{.sequences = 2, .unified = false, .type = GGML_TYPE_F32};
  const Engine run(policy, setting), plain("", setting);
  for (const Engine* each : {&run, &plain}) {
    ASSERT_EQ(each->decode({{0, some_tokens(20), false}}), 0);
    ASSERT_EQ(each->decode({{0, some_tokens(3, 2)}}), 0);
    ASSERT_EQ(each->decode({{0, some_tokens(14, 3), true, true}}), 0);  // drafts: the event waits
  }
  EXPECT_EQ(run.evictor->spent().cut, 0);
  run.evictor->copy(0, 1, 37);
  llama_memory_seq_cp(plain.memory(), 0, 1, 0, -1);
  run.evictor->settle(0);
  EXPECT_EQ(run.evictor->spent().cut, 0);
  for (const Engine* each : {&run, &plain}) ASSERT_EQ(each->decode({{0, {5}, false}, {1, {5}}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 2) << "behind the batch, both";
  EXPECT_EQ(run.likeliest(), plain.likeliest());
  const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
  const float* got = llama_get_logits_ith(run.context.get(), -1);
  const float* want = llama_get_logits_ith(plain.context.get(), -1);
  for (std::int32_t i = 0; i < size; ++i) EXPECT_NEAR(got[i], want[i], rounding() * 20) << i;
  for (const llama_seq_id s : {0, 1}) expect_sound(run, s);
}

TEST_P(LlamaEvictor, ASequenceThatWasNotCutGoesBackToAnyToken) {
  const std::vector<llama_token> text = some_tokens(150), other = some_tokens(100, 2);
  const std::vector<llama_token> prefix(text.begin(), text.begin() + 60);
  const std::string policy = "tova,budget=120,interval=16,prefill=cut";
  const Engine back(policy, {.cells = 1024, .type = GGML_TYPE_F32}),
      fresh(policy, {.cells = 1024, .type = GGML_TYPE_F32});
  ASSERT_EQ(back.decode({{0, {text.begin(), text.begin() + 100}}}), 0);
  EXPECT_EQ(back.evictor->least_length(0), 0);
  ASSERT_TRUE(back.evictor->go_back(0, 60)) << "40 tokens, more than queries are remembered of";
  ASSERT_EQ(fresh.decode({{0, prefix, false}}), 0);
  for (const Engine* run : {&back, &fresh}) ASSERT_EQ(run->decode({{0, other}}), 0);
  for (const Engine* run : {&back, &fresh}) {
    EXPECT_EQ(run->evictor->spent().cut, 1);
    expect_sound(*run, 0);
  }
  if (exact()) EXPECT_EQ(go_on(back, 3, 40, 0), go_on(fresh, 3, 40, 0));
  const std::int64_t least = back.evictor->least_length(0), length = back.evictor->keeper().logical_length(0);
  EXPECT_EQ(least, exact() ? 192 : 160);
  EXPECT_FALSE(back.evictor->go_back(0, least - 1)) << "what was cut is gone";
  EXPECT_EQ(back.evictor->keeper().logical_length(0), length);
  EXPECT_TRUE(back.evictor->go_back(0, least));
  EXPECT_EQ(llama_memory_seq_pos_max(back.memory(), 0), least - 1);
  EXPECT_TRUE(back.evictor->go_back(0, least));
  ASSERT_EQ(back.decode({{0, other}}), 0);
  expect_sound(back, 0);
  // Drafts, nearly all of them refused: further back than queries are remembered, across an event that waits.
  ASSERT_EQ(back.decode({{0, some_tokens(60, 6), true, true}}), 0);
  ASSERT_TRUE(back.evictor->go_back(0, least + 120));
  const std::int64_t cut = back.evictor->spent().cut;
  ASSERT_EQ(back.decode({{0, {9}}}), 0);
  EXPECT_EQ(back.evictor->spent().cut, cut + 1);
  EXPECT_EQ(back.evictor->report().cuts.at(0).logical_length, least + 121) << "behind the batch, whose query it reads";
  expect_sound(back, 0);
  EXPECT_NE(message_of<InvalidArgument>([&] { back.evictor->go_back(0, 10000); }), "");
  EXPECT_NE(message_of<StateError>([&] { back.evictor->go_back(1, 0); }), "");
}

}  // namespace
}  // namespace kvkeep::llama
