// SPDX-License-Identifier: Apache-2.0
// Models whose indexer, with keys of its own in a second cache, chooses what tokens attend to.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

constexpr const char* kPolicy = "tova,heads=group,budget=40,interval=8,sink=2,recent=4,prefill=cut,share=union";

/// What flash attention in 16 bits makes of another order of cells, as a share of the largest logit.
#ifdef KVKEEP_TEST_FAKE_LLAMA
constexpr float kFlashRounding = 1e-3F;
#else
constexpr float kFlashRounding = 0.1F;
#endif

/// A context under the policy, and llama.cpp alone, from which the same tokens are taken by hand.
class Pair {
 public:
  Pair(const Setting& setting, llama_model* model)
      : model_(model),
        cut(kPolicy, setting, model),
        alone("", setting, model),
        held_(setting.sequences),
        share_(setting.flash == LLAMA_FLASH_ATTN_TYPE_ENABLED ? kFlashRounding : 1e-3F) {}

  void decode(llama_seq_id sequence, std::size_t count, unsigned seed) {
    const std::vector<llama_token> ids = words(count, seed);
    std::set<llama_pos>& held = held_[static_cast<std::size_t>(sequence)];
    llama_pos next = llama_memory_seq_pos_max(cut.memory(), sequence) + 1;
    for (std::size_t i = 0; i < count; ++i) held.insert(next++);
    ASSERT_EQ(cut.decode({{sequence, ids}}), 0);
    ASSERT_EQ(alone.decode({{sequence, ids}}), 0);
    expect_alike(logits_of(cut, model_), logits_of(alone, model_), share_);
    expect_sound(cut, sequence);
    for (const Cut& one : cut.evictor->report().cuts) {
      const auto kept = cut.positions(one.sequence, cut.evictor->keeper().spec().full_layers()[0], 0);
      for (const llama_pos p : held)
        if (!std::ranges::binary_search(kept, p)) {
          ASSERT_TRUE(llama_memory_seq_rm(alone.memory(), sequence, p, p + 1));
        }
      held = {kept.begin(), kept.end()};
    }
  }
  void remove(llama_seq_id sequence, llama_pos from) {
    std::set<llama_pos>& held = held_[static_cast<std::size_t>(sequence)];
    held.erase(held.lower_bound(from), held.end());
    for (const Engine* run : {&cut, &alone}) ASSERT_TRUE(llama_memory_seq_rm(run->memory(), sequence, from, -1));
  }
  void copy(llama_seq_id from, llama_seq_id to) {
    held_[static_cast<std::size_t>(to)] = held_[static_cast<std::size_t>(from)];
    cut.evictor->copy(from, to, length(from));
    llama_memory_seq_cp(alone.memory(), from, to, -1, -1);
  }
  [[nodiscard]] llama_pos length(llama_seq_id sequence) const {
    return llama_memory_seq_pos_max(cut.memory(), sequence) + 1;
  }

 private:
  const llama_model* model_;

 public:
  Engine cut, alone;

 private:
  std::vector<std::set<llama_pos>> held_;
  float share_;
};

Setting setting_of(bool unified, bool flash) {
  return {.cells = 1024,
          .sequences = 4,
          .unified = unified,
          .type = GGML_TYPE_F32,
          .flash = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED};
}

TEST_P(LlamaEvictor, ReadsThatAModelHasAnIndexerAndRefusesWhatItCannotFollow) {
  if (!exact()) return;
  const Model model = of_kind("indexer");
  const Facts facts = facts_of(model.get(), params_of({}));
  EXPECT_TRUE(facts.indexed);
  EXPECT_FALSE(facts.mixed());
  EXPECT_FALSE(facts_of(the_model(), params_of({})).indexed);
  for (const LayerSpec& layer : facts.spec.layers) EXPECT_EQ(layer.kind, LayerKind::full);
  llama_context_params params = params_of({});
  for (const auto& [policy, positions, reason] :
       {std::tuple("tova,budget=40", Positions::text, "share=union"),
        std::tuple("knorm,budget=40,share=union", Positions::cache, "Positions::text")})
    try {
      const Evictor evictor(model.get(), params, make_policy(policy), positions);
      ADD_FAILURE() << policy;
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
}

/// After events the indexer's keys lie where the rows lie, so that it chooses the tokens that it would have chosen.
TEST_P(LlamaEvictor, RowsOfAnIndexerMoveWithTheirTokens) {
  if (!exact()) return;
  const Model model = of_kind("indexer");
  for (const bool flash : {true, false}) {
    SCOPED_TRACE(flash);
    Pair pair(setting_of(true, flash), model.get());
    pair.decode(0, 90, 1);
    for (unsigned i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(pair.decode(0, 1, 100 + i));
    EXPECT_EQ(pair.cut.evictor->spent().cut, 6);
    const auto cells = pair.cut.evictor->cells(0);
    if (flash) {
      EXPECT_LT(std::ranges::max(cells), 90) << "rows are moved to the lowest cells";
    }
  }
}

TEST_P(LlamaEvictor, AgreesWithIndexersThroughRandomOperations) {
  if (!exact()) return;
  constexpr int kOperations = 1200;
  const Model model = of_kind("indexer");
  for (const bool unified : {true, false})
    for (const bool flash : {true, false}) {
      SCOPED_TRACE(std::string(unified ? "unified" : "streams") + (flash ? "" : " without flash"));
      Pair pair(setting_of(unified, flash), model.get());
      std::mt19937 random(unified ? 1 : 2);
      const auto up_to = [&](std::int64_t most) {
        return static_cast<std::int64_t>(random() % static_cast<unsigned>(most + 1));
      };
      std::int64_t copies = 0, rolled = 0;
      for (int done = 0; done < kOperations / 2; ++done) {
        const auto s = static_cast<llama_seq_id>(up_to(3)), to = static_cast<llama_seq_id>(up_to(3));
        const llama_pos length = pair.length(s);
        const Evictor& evictor = *pair.cut.evictor;
        if (length == 0 && up_to(4) > 0) continue;  // it stays empty for a copy
        switch (length == 0 ? 9 : up_to(11)) {
          case 0:
            ASSERT_NO_FATAL_FAILURE(pair.remove(s, 0));
            break;
          case 1: {
            const std::int64_t taken = evictor.next_position(s) - length,
                               back = std::min<std::int64_t>(3, evictor.keeper().rollback_limit(s) - taken);
            if (back <= 0 || back == length) break;
            ASSERT_NO_FATAL_FAILURE(pair.remove(s, length - static_cast<llama_pos>(back)));
            ++rolled;
            break;
          }
          case 2:
          case 3:
            if (s == to || pair.length(to) > 0) break;
            if (static_cast<std::int64_t>(evictor.cells(s).size()) != evictor.keeper().logical_length(s)) break;
            pair.copy(s, to);
            ++copies;
            break;
          default: {
            const std::size_t count = length == 0 ? 5 + static_cast<std::size_t>(up_to(45)) : 1;
            ASSERT_NO_FATAL_FAILURE(pair.decode(s, count, static_cast<unsigned>(done)));
          }
        }
      }
      EXPECT_GT(pair.cut.evictor->spent().cut, 5);
      EXPECT_GT(copies, 0);
      EXPECT_GT(rolled, 0);
    }
}

TEST_P(LlamaEvictor, ASavedSequenceOfAModelWithAnIndexerGoesOn) {
  if (!exact()) return;
  const Model model = of_kind("indexer");
  Pair pair(setting_of(true, true), model.get());
  pair.decode(0, 90, 1);
  for (unsigned i = 0; i < 5; ++i) pair.decode(0, 1, 100 + i);
  const Session session = save(pair.cut);
  pair.decode(1, 30, 7);  // others take cells in between
  ASSERT_NO_FATAL_FAILURE(pair.remove(0, 0));
  pair.decode(2, 25, 8);
  ASSERT_NO_FATAL_FAILURE(restore(pair.cut, session, 3));
  Pair whole(setting_of(true, true), model.get());
  whole.decode(0, 90, 1);
  for (unsigned i = 0; i < 5; ++i) whole.decode(0, 1, 100 + i);
  for (unsigned i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(whole.decode(0, 1, 200 + i));
    ASSERT_EQ(pair.cut.decode({{3, words(1, 200 + i)}}), 0);
    ASSERT_NO_FATAL_FAILURE(
        expect_alike(logits_of(pair.cut, model.get()), logits_of(whole.cut, model.get()), kFlashRounding));
    EXPECT_EQ(pair.cut.positions(3, 0, 0), whole.cut.positions(0, 0, 0));
  }
}

}  // namespace
}  // namespace kvkeep::llama
