// SPDX-License-Identifier: Apache-2.0
// libkvkeep_llama_preload.so over models whose layers slide or have states: what a server asks of their memory, and what
// it saves of it, to go on where texts have parted.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

std::vector<llama_token> words(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<llama_token> ids(count);
  for (llama_token& id : ids) id = static_cast<llama_token>(random() % 60U);
  return ids;
}
std::vector<float> logits_of(const Engine& run, const llama_model* model) {
  const float* from = llama_get_logits_ith(run.context.get(), -1);
  return {from, from + llama_vocab_n_tokens(llama_model_get_vocab(model))};
}
void expect_alike(const std::vector<float>& got, const std::vector<float>& want) {
  const float most = std::abs(*std::ranges::max_element(want, {}, [](float x) { return std::abs(x); }));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], rounding() * most) << i;
}

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

/// A server's slots, as llama-server handles them: it asks where a sequence begins, goes back, and saves parts of states
/// where a part of a memory cannot go back.
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
        const auto found =
            std::find_if(slot.checkpoints.rbegin(), slot.checkpoints.rend(), [&](const Checkpoint& c) {
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
    EXPECT_EQ(run.decode({{0, {text.begin() + static_cast<std::ptrdiff_t>(at),
                               text.begin() + static_cast<std::ptrdiff_t>(end)}, end == text.size()}}),
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
  const int requests = 60;
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

}  // namespace
}  // namespace kvkeep::llama
