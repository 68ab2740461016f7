// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp: positions that the program moves behind its back.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "evictor_engine.h"
#include "kvkeep/keep/compact.h"

namespace kvkeep::llama {
namespace {

/// Of sequence 0, whose next position is given. The six newest positions are held whatever an event dropped.
using Move = std::function<void(llama_memory_t, llama_pos)>;

const std::vector<std::pair<std::string, Move>> kMoves = {
    {"the middle is removed", [](llama_memory_t m, llama_pos next) { llama_memory_seq_rm(m, 0, next - 6, next - 4); }},
    {"the middle is removed, and what follows moves up",
     [](llama_memory_t m, llama_pos next) {
       llama_memory_seq_rm(m, 0, next - 6, next - 4);
       llama_memory_seq_add(m, 0, next - 4, -1, -2);
     }},
    {"the same at the end of the text",
     [](llama_memory_t m, llama_pos next) {
       llama_memory_seq_rm(m, 0, next - 3, next - 2);
       llama_memory_seq_add(m, 0, next - 2, -1, -1);
     }},
    {"the beginning is removed", [](llama_memory_t m, llama_pos) { llama_memory_seq_rm(m, 0, 0, 3); }},
    {"the beginning is removed, and all moves up",
     [](llama_memory_t m, llama_pos) {
       llama_memory_seq_rm(m, 0, 0, 3);
       llama_memory_seq_add(m, 0, 3, -1, -3);
     }},
    {"all moves on", [](llama_memory_t m, llama_pos) { llama_memory_seq_add(m, 0, 0, -1, 3); }},
    {"the end moves on", [](llama_memory_t m, llama_pos next) { llama_memory_seq_add(m, 0, next - 5, -1, 3); }},
    {"the end moves back", [](llama_memory_t m, llama_pos next) { llama_memory_seq_add(m, 0, next - 5, -1, -3); }},
    {"a part in the middle moves",
     [](llama_memory_t m, llama_pos next) { llama_memory_seq_add(m, 0, next - 6, next - 4, 2); }},
    {"positions are halved", [](llama_memory_t m, llama_pos) { llama_memory_seq_div(m, 0, 0, -1, 2); }},
    {"some positions are halved",
     [](llama_memory_t m, llama_pos next) { llama_memory_seq_div(m, 0, next - 6, next - 4, 2); }},
};

/// Whether a decode of one token of the sequence is refused as moved, and leaves nothing.
testing::AssertionResult refuses(const Engine& run, llama_seq_id sequence) {
  const llama_pos last = llama_memory_seq_pos_max(run.memory(), sequence);
  const std::size_t size = llama_state_seq_get_size(run.context.get(), sequence);
  try {
    const int status = run.decode({{sequence, {1}}});
    return testing::AssertionFailure() << "decoded, status " << status;
  } catch (const StateError& error) {
    const std::string why = error.what();
    if (why.find("positions") == std::string::npos && why.find("was cut at length") == std::string::npos)
      return testing::AssertionFailure() << error.what();
  }
  if (llama_memory_seq_pos_max(run.memory(), sequence) != last)
    return testing::AssertionFailure() << "the batch is in the cache";
  if (llama_state_seq_get_size(run.context.get(), sequence) != size)
    return testing::AssertionFailure() << "cells have changed";
  return testing::AssertionSuccess();
}

TEST_P(LlamaEvictor, NoticesPositionsThatWereMoved) {
  struct Case {
    std::string policy;
    Setting setting;
  };
  const std::vector<Case> cases = {
      {"tova,budget=24,interval=30,sink=2,recent=4,share=union", {.sequences = 2}},
      {"tova,budget=24,interval=30,sink=2,recent=4", {.cells = 1024, .sequences = 2, .unified = false}},
      {"knorm,budget=24,interval=30,sink=2,recent=4",
       {.cells = 1024, .sequences = 2, .unified = false, .positions = Positions::cache}},
      {"tova,budget=24,interval=30,share=union", {.sequences = 2, .flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}},
      {"streaming,budget=24,interval=30,share=union", {.sequences = 2, .type = GGML_TYPE_F32}}};
  for (const Case& c : cases)
    for (const int behind : {20, 60})  // before and after an event
      for (const auto& [name, move] : kMoves) {
        const std::string what = c.policy + " " + std::to_string(behind) + ": " + name;
        const Engine run(c.policy, c.setting);
        ASSERT_EQ(run.decode({{0, some_tokens(20)}, {1, some_tokens(15)}}), 0);
        for (int i = 20; i < behind; ++i) ASSERT_EQ(run.decode({{0, {i}}}), 0);
        ASSERT_EQ(run.evictor->spent().cut > 0, behind == 60);
        move(run.memory(), run.evictor->next_position(0));
        for (int i = 0; i < 2; ++i) EXPECT_TRUE(refuses(run, 0)) << what;
        // It is gone, and may come anew; the other one was never touched.
        ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
        ASSERT_EQ(run.decode({{1, {1}}}), 0) << what;
        expect_sound(run, 1);
        ASSERT_EQ(run.decode({{0, some_tokens(30)}, {1, {2}}}), 0) << what;
        for (const llama_seq_id s : {0, 1}) expect_sound(run, s);
      }
}

/// Cells of another sequence become part of one, and a sequence is kept alone.
TEST_P(LlamaEvictor, NoticesWhatOtherSequencesBring) {
  const std::string policy = "tova,budget=24,interval=30,share=union";
  const Engine run(policy, {.sequences = 4});
  ASSERT_EQ(run.decode({{0, some_tokens(20)}, {1, some_tokens(40, 2)}, {2, some_tokens(60)}}), 0);
  for (int i = 0; i < 60; ++i) ASSERT_EQ(run.decode({{2, {i}}}), 0);
  const auto held = run.evictor->cells(2);
  llama_pos hole = 1;
  while (std::ranges::any_of(held, [&](std::int32_t cell) { return run.evictor->label(cell) == hole; })) ++hole;
  ASSERT_LT(hole, 40);
  llama_memory_seq_cp(run.memory(), 1, 2, hole, hole + 1);  // one more
  EXPECT_TRUE(refuses(run, 2));
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 2, -1, -1));
  ASSERT_EQ(run.decode({{2, some_tokens(10)}}), 0);
  run.evictor->copy(0, 3, 20);  // so that no cell is free afterwards
  llama_memory_seq_rm(run.memory(), 0, 5, 8);
  llama_memory_seq_cp(run.memory(), 1, 0, 5, 8);  // as many, at the same positions
  EXPECT_TRUE(refuses(run, 0));
  ASSERT_EQ(run.decode({{1, {1}}, {2, {1}}}), 0);
  for (const llama_seq_id s : {1, 2}) expect_sound(run, s);
  llama_memory_seq_keep(run.memory(), 1);
  ASSERT_EQ(run.decode({{1, {1}}, {2, some_tokens(12)}}), 0);
  EXPECT_EQ(run.evictor->keeper().logical_length(2), 12) << "a sequence of its own";
  for (const llama_seq_id s : {1, 2}) expect_sound(run, s);
}

/// Where one sequence gave cells away, and another got them, the other goes on.
TEST_P(LlamaEvictor, ASequenceMayGetCellsThatAnotherLost) {
  for (const std::string policy :
       {"tova,budget=24,interval=8,share=union,prefill=cut", "knorm,budget=24,interval=8,prefill=cut"}) {
    const Engine run(policy, {.cells = 256, .sequences = 2});
    ASSERT_EQ(run.decode({{0, some_tokens(24)}}), 0);
    llama_memory_seq_rm(run.memory(), 0, 1, 23);
    ASSERT_EQ(run.decode({{1, some_tokens(20, 2)}}), 0);  // all of it in these cells
    for (unsigned i = 0; i < 40; ++i) {
      ASSERT_EQ(run.decode({{1, some_tokens(1, i)}}), 0) << policy;
      expect_sound(run, 1);
    }
    EXPECT_GT(run.evictor->spent().cut, 3) << policy;
    EXPECT_TRUE(refuses(run, 0)) << policy;
  }
}

/// Keys and values of the first layer depend on the token, and keys on its position: what every cell must hold.
class Rows {
 public:
  Rows() {
    const Engine plain("full", {.type = GGML_TYPE_F32, .positions = Positions::cache, .watch = watch_cache});
    spec_ = plain.evictor->keeper().spec();
    const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
    for (llama_token id = 0; id < size; ++id) {
      EXPECT_EQ(plain.decode({{0, {id}}}), 0);
      for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
        keys_.push_back(row_of(seen_cache.keys[0], plain.evictor->cells(0)[0], h, spec_.key_dim));
        values_.push_back(row_of(seen_cache.values[0], plain.evictor->cells(0)[0], h, spec_.value_dim));
      }
      llama_memory_seq_rm(plain.memory(), 0, -1, -1);
    }
  }
  /// `text`: tokens by logical position.
  void check(const Engine& run, llama_seq_id sequence, Positions positions, const std::vector<llama_token>& text,
             const std::string& what) const {
    for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
      const std::vector<std::int32_t> held = run.positions(sequence, 0, h);
      const auto cells = run.evictor->cells(sequence);
      for (std::size_t i = 0; i < held.size(); ++i) {
        const auto row = static_cast<std::size_t>(text[static_cast<std::size_t>(held[i])] * spec_.kv_heads + h);
        const std::int32_t at = positions == Positions::cache ? run.evictor->label(cells[i]) : held[i], zero = 0;
        std::vector<float> want = keys_[row];
        rerotate({.base = reinterpret_cast<std::byte*>(want.data())}, Dtype::f32, spec_.key_dim, spec_.rope,
                 std::span(&zero, 1), std::span(&at, 1));
        const std::vector<float> key = row_of(seen_cache.keys[0], cells[i], h, spec_.key_dim),
                                 value = row_of(seen_cache.values[0], cells[i], h, spec_.value_dim);
        for (std::size_t d = 0; d < key.size(); ++d)
          ASSERT_NEAR(key[d], want[d], 1e-3 * (1 + std::abs(want[d]))) << what << " head " << h << " slot " << i;
        for (std::size_t d = 0; d < value.size(); ++d)
          ASSERT_NEAR(value[d], values_[row][d], 1e-4 * (1 + std::abs(value[d])))
              << what << " head " << h << " slot " << i;
      }
    }
  }

 private:
  ModelSpec spec_;
  std::vector<std::vector<float>> keys_, values_;
};

/// An event that waited may come before moved positions are noticed. The sequence is refused then, or the event left
/// nothing of the cells that had moved.
TEST_P(LlamaEvictor, AnEventThatWaitedNoticesMovedPositions) {
  if (!exact()) return;
  const Rows rows;
  for (const auto& [name, move] : kMoves) {
    const Engine run("tova,budget=24,interval=8,prefill=cut,sink=2,recent=4",
                     {.type = GGML_TYPE_F32, .watch = watch_cache});
    std::vector<llama_token> text = some_tokens(40);
    const auto fed = [&](int from, int to) { return std::vector<llama_token>(text.begin() + from, text.begin() + to); };
    ASSERT_EQ(run.decode({{0, fed(0, 20)}}), 0);
    ASSERT_EQ(run.decode({{0, fed(20, 31)}}), 0);
    const std::size_t before = llama_state_seq_get_size(run.context.get(), 0);
    ASSERT_EQ(run.decode({{0, fed(31, 40), true, true}}), 0);
    const std::size_t size = llama_state_seq_get_size(run.context.get(), 0);
    move(run.memory(), 40);
    // Fewer or more cells than positions can be told before the graph.
    const auto lost =
        static_cast<llama_pos>((size - llama_state_seq_get_size(run.context.get(), 0)) / ((size - before) / 9));
    const bool told = llama_memory_seq_pos_max(run.memory(), 0) + 1 != 40 - lost;
    bool threw = false;
    try {
      run.evictor->settle(0);
    } catch (const StateError&) {
      threw = true;
    }
    EXPECT_EQ(run.evictor->spent().cut, threw ? 0 : 1) << name;
    EXPECT_TRUE(threw || !told) << name;
    const testing::AssertionResult refused = refuses(run, 0);
    EXPECT_TRUE(refused || name == "a part in the middle moves") << name;
    if (refused) continue;
    text.push_back(1);
    expect_sound(run, 0);
    rows.check(run, 0, Positions::text, text, name);
  }
}

/// What a program knows of its sequences.
struct Mirror {
  std::vector<llama_token> text;  ///< by logical position
  bool prompted = false;
  bool moved = false;  ///< positions, by the program
};

/// A program that drafts, moves and removes at random, beside what it knows itself.
class Program {
 public:
  Program(const Engine& run, const Setting& setting, const Rows* rows, bool copies, unsigned seed)
      : run_(run), setting_(setting), rows_(rows), copies_(copies), random_(seed) {}

  void step() {
    const auto s = static_cast<llama_seq_id>(up_to(setting_.sequences - 1));
    switch (up_to(9)) {
      case 0:
        if (up_to(2) > 0 || !all_.contains(s)) return;
        remove(s);
        break;
      case 1:
        if (up_to(1) > 0) return;
        move(s);
        break;
      case 2:
        copy(s, static_cast<llama_seq_id>(up_to(setting_.sequences - 1)));
        break;
      case 3:
        if (up_to(9) > 0 || !setting_.unified) return;
        llama_memory_seq_keep(run_.memory(), s);
        for (llama_seq_id other = 0; other < static_cast<llama_seq_id>(setting_.sequences); ++other)
          if (other != s) remove(other);
        break;
      case 4:
      case 5:
        draft(s);
        break;
      default:
        feed(s);
    }
    ++done;
  }

  void check_all(const std::string& what) const {
    for (const auto& [s, mirror] : all_) {
      if (mirror.moved) continue;
      ASSERT_TRUE(run_.evictor->keeper().knows(s)) << what << " sequence " << s;
      expect_sound(run_, s);
      ASSERT_EQ(run_.evictor->keeper().logical_length(s), std::ssize(mirror.text)) << what;
#ifdef KVKEEP_TEST_FAKE_LLAMA
      for (const std::int32_t cell : run_.evictor->cells(s))
        ASSERT_EQ(fake_llama_cell(run_.context.get(), s, cell), run_.evictor->label(cell)) << what;
#endif
      if (rows_ != nullptr && !copied_.contains(s)) rows_->check(run_, s, setting_.positions, mirror.text, what);
      if (testing::Test::HasFatalFailure()) return;
    }
  }

  int done = 0, refused = 0, moves = 0, settled = 0, overdue = 0;

 private:
  std::int64_t up_to(std::int64_t most) {
    return static_cast<std::int64_t>(random_() % static_cast<unsigned>(most + 1));
  }
  std::vector<llama_token> tokens(std::int64_t count) {
    return some_tokens(static_cast<std::size_t>(count), static_cast<unsigned>(random_()));
  }
  void remove(llama_seq_id s) {
    llama_memory_seq_rm(run_.memory(), s, -1, -1);
    all_.erase(s);
    waits_.erase(s);
    copied_.erase(s);
  }
  [[nodiscard]] llama_pos next(llama_seq_id s) const { return llama_memory_seq_pos_max(run_.memory(), s) + 1; }

  /// A batch of several sequences, none of which was moved, or with one that was: that is refused as a whole.
  void feed(llama_seq_id s) {
    std::vector<Engine::Tokens> batch;
    bool moved = false, overdue_one = false;
    for (llama_seq_id other = s; other < static_cast<llama_seq_id>(setting_.sequences);
         other += 1 + static_cast<llama_seq_id>(up_to(3))) {
      const auto mirror = all_.find(other);
      if (mirror != all_.end() && mirror->second.moved && up_to(3) > 0) continue;
      moved = moved || (mirror != all_.end() && mirror->second.moved);
      overdue_one = overdue_one || overdue_of(other);
      batch.push_back({other, tokens(mirror == all_.end() ? 1 + up_to(20) : 1 + up_to(1)), up_to(4) > 0});
    }
    if (batch.empty()) return;
    if (!decode(batch, moved, overdue_one)) return;
    for (const Engine::Tokens& one : batch) {
      Mirror& mirror = all_[one.sequence];
      mirror.text.insert(mirror.text.end(), one.ids.begin(), one.ids.end());
      mirror.prompted = mirror.prompted || one.output;
    }
  }

  [[nodiscard]] bool overdue_of(llama_seq_id s) const {
    const auto mirror = all_.find(s);
    return setting_.positions == Positions::cache && mirror != all_.end() && !mirror->second.moved &&
           waits_.contains(s) && copied_.empty() && run_.evictor->keeper().tokens_to_event(s) == 0;
  }

  /// True: it was decoded. A sequence that was moved, or whose event is overdue, must be refused.
  bool decode(const std::vector<Engine::Tokens>& batch, bool moved, bool overdue_one) {
    std::map<llama_seq_id, llama_pos> before;
    for (const Engine::Tokens& one : batch) before[one.sequence] = next(one.sequence);
    try {
      const int status = run_.decode(batch);
      EXPECT_FALSE(moved || overdue_one) << "must be refused";
      EXPECT_EQ(status, 0);
      for (const Engine::Tokens& one : batch) waits_.erase(one.sequence);
      copied_.clear();
      return status == 0;
    } catch (const StateError& error) {
      EXPECT_TRUE(moved || overdue_one) << error.what();
      ++(moved ? refused : overdue);
    }
    for (const auto& [s, at] : before) EXPECT_EQ(next(s), at) << "nothing of a refused batch stays";
    return false;
  }

  void draft(llama_seq_id s) {
    const auto found = all_.find(s);
    if (found == all_.end() || !found->second.prompted || found->second.moved) return;
    Mirror& mirror = found->second;
    const std::vector<llama_token> drafts = tokens(2 + up_to(5));
    if (!decode({{s, drafts, true, true}}, false, overdue_of(s))) {
      run_.evictor->settle(s);
      if (copied_.empty()) waits_.erase(s);
      return;
    }
    waits_.insert(s);
    const auto right = static_cast<std::size_t>(1 + up_to(std::ssize(drafts) - 1));
    mirror.text.insert(mirror.text.end(), drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(right));
    if (right < drafts.size())
      llama_memory_seq_rm(run_.memory(), s, next(s) - static_cast<llama_pos>(drafts.size() - right), -1);
    if (up_to(1) == 0) return sync();
    run_.evictor->settle(s);
    settled += static_cast<int>(run_.evictor->report().cuts.size());
    if (copied_.empty()) waits_.erase(s);
  }
  /// The evictor follows at its next call. So that the mirror may compare: one that does nothing else.
  void sync() { run_.evictor->prompt(1000, 1); }

  void copy(llama_seq_id from, llama_seq_id to) {
    const auto found = all_.find(from);
    if (!copies_ || from == to || found == all_.end() || found->second.moved || all_.contains(to)) return;
    if (std::ssize(run_.evictor->cells(from)) != run_.evictor->keeper().logical_length(from)) return;
    const std::int64_t length = run_.evictor->keeper().logical_length(from),
                       count = setting_.unified ? 1 + up_to(length - 1) : length;
    run_.evictor->copy(from, to, static_cast<std::int32_t>(count));
    if (!setting_.unified) copied_.insert(to);
    all_[to].text.assign(found->second.text.begin(), found->second.text.begin() + static_cast<std::ptrdiff_t>(count));
  }

  void move(llama_seq_id s) {
    const auto found = all_.find(s);
    if (found == all_.end() || found->second.moved || next(s) < 12) return;
    const llama_memory_t memory = run_.memory();
    const llama_pos at = 1 + static_cast<llama_pos>(up_to(next(s) - 8)), count = 1 + static_cast<llama_pos>(up_to(4));
    const std::int64_t kind = up_to(4);
    if (kind > 0 && setting_.unified && copies_) return;  // shared cells would move for others as well
    if (std::ranges::none_of(run_.evictor->cells(s), [&](std::int32_t cell) {
          return run_.evictor->label(cell) >= at && run_.evictor->label(cell) < at + count;
        }))
      return;  // a hole
    if (kind <= 1) llama_memory_seq_rm(memory, s, at, at + count);
    if (kind == 1) llama_memory_seq_add(memory, s, at + count, -1, -count);
    if (kind == 2) llama_memory_seq_add(memory, s, at, at + count, 1);
    if (kind == 3) llama_memory_seq_add(memory, s, at, -1, count);
    if (kind == 4) llama_memory_seq_div(memory, s, at, at + count, 2);
    found->second.moved = true;
    ++moves;
  }

  const Engine& run_;
  const Setting& setting_;
  const Rows* rows_;  ///< null: they are not compared
  bool copies_;
  std::mt19937 random_;
  std::map<llama_seq_id, Mirror> all_;
  std::set<llama_seq_id> waits_;   ///< whose drafts were verified, and for which settle() was not called
  std::set<llama_seq_id> copied_;  ///< whose buffer llama.cpp copies at its next batch
};

TEST_P(LlamaEvictor, FollowsOrRefusesRandomPrograms) {
  if (!exact()) return;
  struct Case {
    const char* policy;
    bool unified, copies;
    Positions positions;
    bool flash = true;
  };
  const std::vector<Case> cases = {
      {"knorm,budget=24,interval=8,recent=4,prefill=cut,share=union", true, true, Positions::text},
      {"tova,budget=24,interval=8,recent=4,share=union", true, false, Positions::cache},
      {"knorm,budget=24,interval=8,recent=4,prefill=cut", true, false, Positions::text},
      {"tova,budget=24,interval=8,recent=4,prefill=cut", false, true, Positions::text},
      {"knorm,budget=24,interval=8,recent=4,prefill=cut", false, true, Positions::cache},
      {"streaming,budget=24,interval=8,recent=8", false, true, Positions::cache},
      {"tova,budget=24,interval=8,recent=4,share=union", false, true, Positions::cache, false}};
  const int operations = 10000 / static_cast<int>(cases.size()) + 1;
  const Rows rows;
  int refused = 0, moves = 0, settled = 0, overdue = 0;
  std::int64_t events = 0;
  unsigned seed = 1;
  for (const Case& c : cases) {
    const Setting setting{.cells = 1536,
                          .sequences = 6,
                          .unified = c.unified,
                          .type = GGML_TYPE_F32,
                          .flash = c.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED,
                          .positions = c.positions,
                          .watch = watch_cache};
    const Engine run(c.policy, setting);
    // Else llama.cpp turns keys, with its next batch.
    const bool turned = c.positions == Positions::text || (c.flash && !kOnGpu);
    Program program(run, setting, turned ? &rows : nullptr, c.copies, seed++);
    for (int i = 0; program.done < operations; ++i) {
      program.step();
      program.check_all(std::string(c.policy) + " operation " + std::to_string(i));
      if (HasFailure()) return;
    }
    refused += program.refused;
    moves += program.moves;
    settled += program.settled;
    overdue += program.overdue;
    events += run.evictor->spent().cut;
  }
  EXPECT_GE(refused, 100);
  EXPECT_GE(moves, 100);
  EXPECT_GE(settled, 40);
  EXPECT_GE(overdue, 10);
  EXPECT_GE(events, 300);
  RecordProperty("refused", refused);
  RecordProperty("moves", moves);
  RecordProperty("events", static_cast<int>(events));
}

}  // namespace
}  // namespace kvkeep::llama
