// SPDX-License-Identifier: Apache-2.0
// libkvkeep_llama_preload.so over models whose layers slide or have states: what a server asks of their memory, and
// what it saves of it, to go on where texts have parted.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "preload_engine.h"

namespace kvkeep::llama {
namespace {

constexpr const char* kHolds = "tova,budget=2000";
constexpr const char* kCuts = "tova,budget=40,interval=8,sink=2,recent=4,prefill=cut";
const Setting kSetting{.cells = 2048, .sequences = 3, .type = GGML_TYPE_F32};

/// What was done to a sequence since it was empty: a batch, or what was taken back.
struct Step {
  std::vector<llama_token> ids = {};
  bool output = false;
  llama_pos back = -1;  ///< to so many tokens
};
struct Checkpoint {
  llama_pos tokens = 0, min = 0, max = 0;
  std::vector<std::uint8_t> state;
  std::vector<Step> history;
};
struct Slot {
  std::vector<llama_token> text = {};
  std::size_t prompt = 0;  ///< of it
  std::vector<Checkpoint> checkpoints = {};
  std::vector<Step> history = {};
  std::vector<std::uint8_t> state = {};  ///< of one that was put away
};

/// A server's slots, as llama-server handles them: it asks where a sequence begins, goes back, and saves parts of
/// states where a part of a memory cannot go back.
class Server {
 public:
  Server(const Engine& run, llama_model* model) : run_(run), model_(model), window_(llama_model_n_swa(model)) {
    EXPECT_EQ(run.decode({{0, {0, 0}}}), 0);
    checkpoints_ = !llama_memory_seq_rm(run.memory(), 0, 1, -1) || window_ > 0;
    llama_memory_clear(run.memory(), true);
  }

  [[nodiscard]] Slot& slot(llama_seq_id id) { return slots_[id]; }
  int restored = 0;  ///< checkpoints
  int begun = 0;     ///< texts that were computed from their beginning, though they had begun alike

  void request(llama_seq_id id, const std::vector<llama_token>& prompt, int answer) {
    Slot& slot = slots_[id];
    auto past = static_cast<llama_pos>(std::ranges::mismatch(slot.text, prompt).in1 - slot.text.begin());
    const auto all = static_cast<llama_pos>(prompt.size());
    llama_pos next = past;
    const llama_pos threshold = std::max(0, next - window_ - (past < all ? 0 : 1));
    if (past > 0) {
      const llama_pos min = llama_memory_seq_pos_min(run_.memory(), id);
      ASSERT_NE(min, -1);
      if (min >= threshold) {
        const auto found = std::find_if(slot.checkpoints.rbegin(), slot.checkpoints.rend(), [&](const Checkpoint& c) {
          return c.max <= next && (c.min < threshold || c.min == 0);
        });
        begun += found == slot.checkpoints.rend() ? 1 : 0;
        if (found == slot.checkpoints.rend()) {
          next = past = 0;
        } else {
          ASSERT_EQ(llama_state_seq_set_data_ext(run_.context.get(), found->state.data(), found->state.size(), id,
                                                 LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY),
                    found->state.size());
          slot.history = found->history;
          slot.text.resize(static_cast<std::size_t>(found->tokens));
          next = std::min(next, std::max(found->min + 1, found->max));
          past = std::min(next, found->tokens);
          ++restored;
        }
      }
    }
    std::erase_if(slot.checkpoints, [&](const Checkpoint& c) { return c.max > next; });
    if (past == all) --past;
    ASSERT_TRUE(llama_memory_seq_rm(run_.memory(), id, past, -1)) << past << " of " << slot.text.size();
    if (past == 0)
      slot.history.clear();
    else if (past < std::ssize(slot.text))
      slot.history.push_back({.back = past});
    slot.text.resize(static_cast<std::size_t>(past));
    while (std::ssize(slot.text) < all) {
      const llama_pos at = static_cast<llama_pos>(slot.text.size()), left = all - at;
      const llama_pos count = std::min(left > 4 ? left - 4 : left, 60);
      if (checkpoints_ && at > 0 && left <= 60) save_checkpoint(id);
      decode(id, {prompt.begin() + at, prompt.begin() + at + count}, count == left);
    }
    slot.prompt = prompt.size();
    for (int i = 0; i < answer; ++i) {
      const std::vector<float> logits = logits_of(run_, model_);
      decode(id, {static_cast<llama_token>(std::ranges::max_element(logits) - logits.begin())}, true);
    }
  }

  /// Away in the program's memory, and back in any slot.
  void put_away(llama_seq_id id) {
    Slot& slot = slots_[id];
    slot.state.resize(llama_state_seq_get_size_ext(run_.context.get(), id, 0));
    ASSERT_EQ(llama_state_seq_get_data_ext(run_.context.get(), slot.state.data(), slot.state.size(), id, 0),
              slot.state.size());
    ASSERT_TRUE(llama_memory_seq_rm(run_.memory(), id, -1, -1));
    away_.push_back(std::exchange(slot, {}));
  }
  void fetch(llama_seq_id id) {
    slots_[id] = std::move(away_.back());
    away_.pop_back();
    const std::vector<std::uint8_t>& state = slots_[id].state;
    ASSERT_EQ(llama_state_seq_set_data_ext(run_.context.get(), state.data(), state.size(), id, 0), state.size());
  }
  [[nodiscard]] bool has_put_away() const { return !away_.empty(); }

 private:
  void save_checkpoint(llama_seq_id id) {
    Slot& slot = slots_[id];
    Checkpoint c{.tokens = static_cast<llama_pos>(slot.text.size()),
                 .min = llama_memory_seq_pos_min(run_.memory(), id),
                 .max = llama_memory_seq_pos_max(run_.memory(), id),
                 .state = {},
                 .history = slot.history};
    const auto part = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    c.state.resize(llama_state_seq_get_size_ext(run_.context.get(), id, part));
    ASSERT_EQ(llama_state_seq_get_data_ext(run_.context.get(), c.state.data(), c.state.size(), id, part),
              c.state.size());
    slot.checkpoints.push_back(std::move(c));
  }
  void decode(llama_seq_id id, const std::vector<llama_token>& ids, bool output) {
    ASSERT_EQ(run_.decode({{id, ids, output}}), 0);
    Slot& slot = slots_[id];
    slot.text.insert(slot.text.end(), ids.begin(), ids.end());
    slot.history.push_back({.ids = ids, .output = output});
  }

  const Engine& run_;
  llama_model* model_;
  std::int32_t window_;
  bool checkpoints_ = false;
  std::map<llama_seq_id, Slot> slots_;
  std::vector<Slot> away_;
};

/// A text, by llama.cpp alone.
std::vector<float> alone_with(const std::vector<llama_token>& text, llama_model* model) {
  const Engine run = under(nullptr, kSetting, model);
  for (std::size_t at = 0; at < text.size(); at += 60) {
    const std::size_t end = std::min(text.size(), at + 60);
    EXPECT_EQ(
        run.decode({{0,
                     {text.begin() + static_cast<std::ptrdiff_t>(at), text.begin() + static_cast<std::ptrdiff_t>(end)},
                     end == text.size()}}),
        0);
  }
  return logits_of(run, model);
}
/// The same steps in a context that has seen nothing else.
std::vector<float> done_anew(const char* policy, const std::vector<Step>& history, llama_model* model) {
  const Engine run = under(policy, kSetting, model);
  for (const Step& step : history)
    if (step.back >= 0)
      EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, step.back, -1));
    else
      EXPECT_EQ(run.decode({{0, step.ids, step.output}}), 0);
  return logits_of(run, model);
}

/// Requests of all kinds, at random. Under a budget that holds the texts each gives what llama.cpp alone gives for its
/// text; under others what the same steps give in a context of their own.
TEST_F(LlamaPreload, AServerOverSlidingLayersAndStatesLosesNothing) {
#ifdef KVKEEP_TEST_FAKE_LLAMA
  const int requests = 40;
#else
  const int requests = 120;
#endif
  int begun = 0;
  unsigned seed = 0;
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    for (const std::string policy : {kHolds, kCuts, "knorm,budget=40,interval=8,recent=4,share=union",
                                     "tova,budget=40,interval=1,recent=4,prefill=pieces"}) {
      SCOPED_TRACE(std::string(kind) + " " + policy);
      const Engine run = under(policy.c_str(), kSetting, model.get());
      ASSERT_GE(events(run), 0);
      Server server(run, model.get());
      std::mt19937 random(++seed);
      const auto up_to = [&](std::size_t most) { return static_cast<std::size_t>(random() % (most + 1)); };
      for (int i = 0; i < requests; ++i) {
        const auto id = static_cast<llama_seq_id>(up_to(2));
        const Slot& slot = server.slot(id);
        if (up_to(5) == 0) {
          if (!slot.text.empty()) server.put_away(id);
          if (HasFatalFailure()) return;
          if (server.has_put_away() && up_to(1) == 0) server.fetch(id);
        }
        std::vector<llama_token> prompt = slot.text;
        const std::size_t how = slot.text.size() < 8 || slot.text.size() > 700 ? 0 : 1 + up_to(4);
        if (how == 0) prompt.clear();
        if (how == 1) prompt.resize(1 + up_to(prompt.size() - 1));  // another one from somewhere on
        if (how == 2) prompt.resize(slot.prompt);                   // without the answer
        if (how == 3) prompt.resize(slot.prompt);                   // the same one
        const std::vector<llama_token> more = words(1 + up_to(how == 0 ? 150 : 40), static_cast<unsigned>(i));
        if (how != 3) prompt.insert(prompt.end(), more.begin(), more.end());
        server.request(id, prompt, static_cast<int>(up_to(up_to(4) == 0 ? 300 : 20)));
        if (HasFatalFailure()) return;
        if (i % 5 == 4) {
          SCOPED_TRACE(i);
          const std::vector<float> got = logits_of(run, model.get());
          expect_alike(got, policy == kHolds ? alone_with(slot.text, model.get())
                                             : done_anew(policy.c_str(), slot.history, model.get()));
        }
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(server.restored, requests / 20);
      EXPECT_EQ(events(run) > requests, policy != kHolds);
      begun += server.begun;
    }
  }
  EXPECT_GT(begun, 0);
}

void decode_long(const Engine& run, const std::vector<llama_token>& text) {
  for (auto at = text.begin(); at < text.end(); at += 60)
    ASSERT_EQ(run.decode({{0, {at, std::min(at + 60, text.end())}, false}}), 0);
}

TEST_F(LlamaPreload, APositionSaysHowFarASequenceGoesBackWhateverTheWindow) {
  const Model model = of_kind("swa");
  const std::int32_t window = llama_model_n_swa(model.get());
  ASSERT_GT(window, 1);
  const std::vector<llama_token> text = words(600, 1);
  const Engine alone = under(nullptr, kSetting, model.get());
  decode_long(alone, text);
  EXPECT_EQ(llama_model_n_swa(model.get()), window);
  const llama_pos oldest = least(alone);
  ASSERT_GT(oldest, 100) << "cells were written anew";
  const Engine run = under(kHolds, kSetting, model.get());
  EXPECT_EQ(llama_model_n_swa(model.get()), 1) << "it is in the position";
  ASSERT_EQ(run.decode({{0, words(100, 2), false}}), 0);
  EXPECT_EQ(least(run), 0) << "-1 says that there are none";
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
  EXPECT_EQ(least(run), -1);
  decode_long(run, text);
  EXPECT_EQ(least(run), oldest + window - 2);
  // llama.cpp takes back more than it can go on with: one token, as llama-server does, and no more.
  const llama_pos short_of = oldest + window - 2;
  EXPECT_SAYS(said([&] { EXPECT_FALSE(llama_memory_seq_rm(run.memory(), 0, short_of - 1, -1)); }),
              "lost tokens of their window then; allowed from " + std::to_string(short_of + 1) + " on, or all");
  EXPECT_EQ(length(run), 600);
  for (const Engine* each : {&run, &alone}) EXPECT_TRUE(llama_memory_seq_rm(each->memory(), 0, short_of, -1));
  for (const Engine* each : {&run, &alone}) ASSERT_EQ(each->decode({{0, words(5, 3)}}), 0);
  expect_alike(logits_of(run, model.get()), logits_of(alone, model.get()));
  const Engine cut = under(kCuts, kSetting, model.get());
  ASSERT_EQ(cut.decode({{0, words(90, 4)}}), 0);
  EXPECT_EQ(least(cut), 89) << "what the event saw stays";
  EXPECT_SAYS(said([&] { EXPECT_FALSE(llama_memory_seq_rm(cut.memory(), 0, 89, -1)); }), "an event has cut");
  llama_context_params embeds = params_of(kSetting);
  embeds.embeddings = true;
  const Context other(llama_init_from_model(model.get(), embeds));
  EXPECT_EQ(llama_model_n_swa(model.get()), window) << "another context of the model is alone";
}

TEST_F(LlamaPreload, StatesSayThatTheyDoNotGoBack) {
  const Model model = of_kind("states");
  const Engine run = under(kCuts, kSetting, model.get());
  ASSERT_EQ(run.decode({{0, words(90, 1)}}), 0);
  ASSERT_EQ(run.decode({{0, words(3, 1)}}), 0);
  EXPECT_EQ(least(run), 92);
  EXPECT_EQ(said([&] { EXPECT_FALSE(llama_memory_seq_rm(run.memory(), 0, 92, -1)); }), "") << "as without a policy";
  EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, 93, -1));
  EXPECT_EQ(length(run), 93);
#ifdef KVKEEP_TEST_FAKE_LLAMA
  const Model both = of_kind("swa,hybrid");
  EXPECT_EQ(llama_model_n_swa(both.get()), 24);
  const Engine slides = under(kCuts, kSetting, both.get());
  EXPECT_EQ(llama_model_n_swa(both.get()), 0) << "its states save what a server goes back to";
  ASSERT_EQ(slides.decode({{0, words(90, 1)}}), 0);
  EXPECT_EQ(least(slides), 89);
#endif
}

std::vector<std::uint8_t> part_of(const Engine& run) {
  const auto part = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
  std::vector<std::uint8_t> state(llama_state_seq_get_size_ext(run.context.get(), 0, part));
  EXPECT_EQ(llama_state_seq_get_data_ext(run.context.get(), state.data(), state.size(), 0, part), state.size());
  return state;
}
std::size_t put_part(const Engine& run, const std::vector<std::uint8_t>& state) {
  return llama_state_seq_set_data_ext(run.context.get(), state.data(), state.size(), 0,
                                      LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}

/// Of llama.cpp alone, they would put back layers that slide, and leave the full ones as events have cut them.
TEST_F(LlamaPreload, PartsOfStatesAreWhole) {
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    const Engine run = under(kCuts, kSetting, model.get()), alone = under(nullptr, kSetting, model.get());
    for (const Engine* each : {&run, &alone}) ASSERT_EQ(each->decode({{0, words(30, 1)}}), 0);
    const std::vector<std::uint8_t> whole = part_of(run), part = part_of(alone);
    EXPECT_EQ(whole.size(), llama_state_seq_get_size(run.context.get(), 0));
    EXPECT_LT(part.size(), llama_state_seq_get_size(alone.context.get(), 0));
    ASSERT_EQ(run.decode({{0, words(60, 2)}}), 0);
    EXPECT_EQ(events(run), 1);
    ASSERT_EQ(put_part(run, whole), whole.size());
    EXPECT_EQ(length(run), 30);
    for (const Engine* each : {&run, &alone}) ASSERT_EQ(each->decode({{0, words(5, 3)}}), 0);
    ASSERT_NO_FATAL_FAILURE(expect_alike(logits_of(run, model.get()), logits_of(alone, model.get())));
    EXPECT_SAYS(said([&] { EXPECT_EQ(put_part(run, part), 0U); }), "no state that this library has given");
    EXPECT_EQ(length(run), 0);
    EXPECT_EQ(run.decode({{0, words(5, 3)}}), 0) << "and the sequence is of use";
  }
}

/// A program that llama.cpp has alone by now goes on with what it was told before.
TEST_F(LlamaPreload, WhatAProgramWasToldHoldsWhereThePolicyHasEnded) {
  const Model model = of_kind("swa");
  const std::int32_t window = llama_model_n_swa(model.get());
  const Engine run = under(kHolds, kSetting, model.get()), alone = under(nullptr, kSetting, model.get());
  for (const Engine* each : {&run, &alone}) ASSERT_EQ(each->decode({{0, words(50, 1), false}}), 0);
  const std::vector<std::uint8_t> state = part_of(run);
  const std::string text = said([&] {
    llama_batch batch = llama_batch_init(1, 0, 2);
    batch.n_tokens = 1;
    batch.token[0] = 5, batch.pos[0] = 0, batch.n_seq_id[0] = 2, batch.logits[0] = 1;
    batch.seq_id[0][0] = 1, batch.seq_id[0][1] = 2;
    for (const Engine* each : {&run, &alone}) EXPECT_EQ(llama_decode(each->context.get(), batch), 0);
    llama_batch_free(batch);
  });
  EXPECT_SAYS(text, "ends here, and llama.cpp goes on alone");
  EXPECT_EQ(events(run), -1);
  EXPECT_EQ(llama_model_n_swa(model.get()), 1);
  EXPECT_EQ(least(run), 0);
  for (const Engine* each : {&run, &alone}) decode_long(*each, words(600, 2));
  ASSERT_GT(least(alone), 100);
  EXPECT_EQ(least(run), least(alone) + window - 2);
  EXPECT_EQ(put_part(run, state), state.size());
  EXPECT_EQ(length(run), 50);
  EXPECT_EQ(part_of(run).size(), llama_state_seq_get_size(run.context.get(), 0));
  ASSERT_TRUE(llama_memory_seq_rm(alone.memory(), 0, -1, -1));
  ASSERT_EQ(alone.decode({{0, words(50, 1), false}}), 0);
  for (const Engine* each : {&run, &alone}) ASSERT_EQ(each->decode({{0, words(5, 3)}}), 0);
  expect_alike(logits_of(run, model.get()), logits_of(alone, model.get()));
}

}  // namespace
}  // namespace kvkeep::llama
