// SPDX-License-Identifier: Apache-2.0
// Models whose layers differ in kind: some slide over the newest tokens, some have a state; and positions of several
// dimensions.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// What llama.cpp holds of a sequence is what the evictor says, and its window lacks nothing.
/// `first`: cells and bytes of the first state that was asked for.
void expect_mixed_sound(const Engine& run, llama_seq_id sequence, std::int32_t window,
                        std::pair<std::size_t, std::size_t>& first) {
  const Evictor& e = *run.evictor;
  const auto cells = e.cells(sequence);
  const llama_pos next = e.next_position(sequence);
  ASSERT_EQ(next, e.keeper().logical_length(sequence));
  ASSERT_EQ(llama_memory_seq_pos_max(run.memory(), sequence) + 1, next);
  ASSERT_EQ(std::set<std::int32_t>(cells.begin(), cells.end()).size(), cells.size());
  std::set<llama_pos> labels;
  for (const std::int32_t cell : cells) labels.insert(e.label(cell));
  ASSERT_EQ(labels.size(), cells.size());
  ASSERT_EQ(*labels.rbegin(), next - 1);
  for (llama_pos p = std::max(0, next - window); p < next; ++p) ASSERT_TRUE(labels.contains(p)) << p;
  for (const std::int32_t l : e.keeper().spec().full_layers())
    for (std::int32_t h = 0; h < e.keeper().spec().kv_heads; ++h)
      ASSERT_EQ(e.keeper().physical_length(sequence, l, h), static_cast<std::int32_t>(cells.size()));
#ifdef KVKEEP_TEST_FAKE_LLAMA
  for (const std::int32_t cell : cells) ASSERT_EQ(fake_llama_cell(run.context.get(), sequence, cell), e.label(cell));
  for (llama_pos p = std::max(0, next - window + 1); window > 0 && p < next; ++p)
    ASSERT_TRUE(fake_llama_slides_over(run.context.get(), sequence, p)) << p;
#endif
  const auto size = [&](llama_state_seq_flags flags) {
    return llama_state_seq_get_size_ext(run.context.get(), sequence, flags);
  };
  const std::size_t full = size(0) - size(LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
  auto& [few, bytes] = first;
  if (few == 0) few = cells.size(), bytes = full;
  if (cells.size() != few) {
    const auto a = static_cast<double>(full) - static_cast<double>(bytes),
               b = static_cast<double>(cells.size()) - static_cast<double>(few);
    ASSERT_GT(a / b, 0);
  }
}

std::int32_t window_of(const llama_model* model) { return llama_model_n_swa(model); }

TEST_P(LlamaEvictor, TellsWhichLayersAreFull) {
  if (!exact()) return;
  for (const auto& [kind, other] : {std::pair("swa", LayerKind::sliding), {"states", LayerKind::other}}) {
    const Model model = of_kind(kind);
    const Facts facts = facts_of(model.get(), params_of({}));
    EXPECT_EQ(facts.states, other == LayerKind::other) << kind;
    EXPECT_EQ(facts.window, other == LayerKind::sliding ? window_of(model.get()) : 0) << kind;
    EXPECT_EQ(facts.spec.full_layers().size(), 2U) << kind;
    for (const LayerSpec& layer : facts.spec.layers) EXPECT_TRUE(layer.kind == LayerKind::full || layer.kind == other);
    EXPECT_EQ(facts.spec.kv_heads, 2) << kind;
  }
}

/// Sequences begin, grow, go back, are copied, saved and put back, and end at random; after each operation both sides
/// agree.
TEST_P(LlamaEvictor, AgreesWithMixedMemoriesThroughRandomOperations) {
  if (!exact()) return;
#ifdef KVKEEP_TEST_FAKE_LLAMA
  const int operations = 10000;
#else
  const int operations = 1500;
#endif
  for (const char* kind : {"swa", "states"})
    for (const bool unified : {true, false})
      for (const bool flash : {true, false}) {
        SCOPED_TRACE(std::string(kind) + (unified ? " unified" : " streams") + (flash ? "" : " without flash"));
        const Model model = of_kind(kind);
        const std::int32_t window = window_of(model.get());
        const Setting setting{.cells = 1024,
                              .sequences = 4,
                              .unified = unified,
                              .flash = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED};
        const bool one_set = unified || !flash;
        const Engine run(
            std::string("knorm,budget=40,interval=8,sink=2,recent=4,prefill=cut") + (one_set ? ",share=union" : ""),
            setting, model.get());
        std::pair<std::size_t, std::size_t> first;
        std::mt19937 random(unified ? 1 : 2);
        const auto up_to = [&](std::int64_t most) {
          return static_cast<std::int64_t>(random() % static_cast<unsigned>(most + 1));
        };
        std::int64_t refused = 0, back = 0, put_back = 0;
        for (int done = 0, i = 0; done < operations / 8; ++i) {
          const auto s = static_cast<llama_seq_id>(up_to(3));
          const llama_pos length = llama_memory_seq_pos_max(run.memory(), s) + 1;
          switch (up_to(9)) {
            case 0:
              if (length == 0) continue;
              ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, -1, -1));
              break;
            case 1: {
              if (length == 0 || run.evictor->keeper().tokens_to_event(s) < 3) continue;
              ASSERT_EQ(run.decode({{s, words(2, static_cast<unsigned>(i)), false}}), 0);
              // States take nothing back, and say so.
              const bool taken = llama_memory_seq_rm(run.memory(), s, length + 1, -1);
              ASSERT_EQ(taken, std::string(kind) == "swa");
              refused += taken ? 0 : 1;
              break;
            }
            case 2: {
              const auto to = static_cast<llama_seq_id>(up_to(3));
              if (length == 0 || to == s || llama_memory_seq_pos_max(run.memory(), to) >= 0) continue;
              if (static_cast<std::int64_t>(run.evictor->cells(s).size()) != run.evictor->keeper().logical_length(s))
                continue;
              if (unified && window > 0) {
                EXPECT_THROW(run.evictor->copy(s, to, length), Unsupported);
                continue;
              }
              if (length > 1) {
                EXPECT_THROW(run.evictor->copy(s, to, length - 1), InvalidArgument);
              }
              run.evictor->copy(s, to, length);
              break;
            }
            case 8: {
              if (length < 3) continue;
              const std::int64_t least = run.evictor->least_length(s),
                                 to = std::max<std::int64_t>(1, least + up_to(length - least));
              ASSERT_EQ(run.evictor->go_back(s, to), window > 0 || to == length) << least << ' ' << to;
              ASSERT_EQ(run.evictor->next_position(s), window > 0 ? to : length);
              back += window > 0 && to < length ? 1 : 0;
              if (least > 0) ASSERT_FALSE(run.evictor->go_back(s, least - 1));
              break;
            }
            case 9: {
              const auto to = static_cast<llama_seq_id>(up_to(3));
              if (length == 0) continue;
              std::vector<std::byte> kept;
              try {
                kept = run.evictor->save(s);
              } catch (const StateError&) {  // of a copy that llama.cpp has yet to make
                continue;
              }
              std::vector<std::uint8_t> state(llama_state_seq_get_size(run.context.get(), s));
              ASSERT_EQ(llama_state_seq_get_data(run.context.get(), state.data(), state.size(), s), state.size());
              ASSERT_TRUE(llama_memory_seq_rm(run.memory(), to, -1, -1));
              ASSERT_EQ(llama_state_seq_set_data(run.context.get(), state.data(), state.size(), to), state.size());
              run.evictor->restore(to, kept);
              ASSERT_EQ(run.evictor->next_position(to), length);
              ++put_back;
              break;
            }
            default: {
              std::vector<Engine::Tokens> batch;
              for (llama_seq_id other = s; other < 4; other += 1 + static_cast<llama_seq_id>(up_to(2))) {
                const bool fresh = llama_memory_seq_pos_max(run.memory(), other) < 0;
                batch.push_back(
                    {other,
                     words(static_cast<std::size_t>(fresh ? 1 + up_to(60) : 1 + up_to(2)), static_cast<unsigned>(i)),
                     up_to(3) > 0});
              }
              ASSERT_EQ(run.decode(batch), 0);
              for (const Engine::Tokens& one : batch) expect_mixed_sound(run, one.sequence, window, first);
              if (HasFatalFailure()) return;
            }
          }
          ++done;
        }
        EXPECT_GT(run.evictor->spent().cut, operations / 200);
        EXPECT_EQ(refused > 0, std::string(kind) == "states");
        EXPECT_EQ(back > 0, std::string(kind) == "swa");
        EXPECT_GT(put_back, operations / 400);
      }
}

TEST_P(LlamaEvictor, SequencesOfMixedModelsGiveWhatTheyGiveAlone) {
  if (!exact()) return;
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    const std::string policy = "tova,budget=40,interval=8,sink=2,recent=4,prefill=cut";
    for (const bool unified : {true, false}) {
      const Setting one{.cells = 512, .type = GGML_TYPE_F32, .micro_batch = 24},
          two{.cells = 1024, .sequences = 2, .unified = unified, .type = GGML_TYPE_F32, .micro_batch = 24};
      const Engine both(policy, two, model.get()), first(policy, one, model.get()), second(policy, one, model.get());
      const std::vector<llama_token> a = words(70, 5), b = words(51, 6);
      ASSERT_EQ(both.decode({{0, a}, {1, b}}), 0) << kind;
      ASSERT_EQ(first.decode({{0, a}}), 0);
      ASSERT_EQ(second.decode({{0, b}}), 0);
      for (unsigned i = 0; i < 30; ++i) {
        ASSERT_EQ(both.decode({{0, words(1, i)}, {1, words(1, i + 100)}}), 0) << kind;
        ASSERT_EQ(first.decode({{0, words(1, i)}}), 0);
        ASSERT_EQ(second.decode({{0, words(1, i + 100)}}), 0);
      }
      EXPECT_EQ(both.evictor->spent().cut, first.evictor->spent().cut + second.evictor->spent().cut) << kind;
      for (const std::int32_t l : first.evictor->keeper().spec().full_layers()) {
        EXPECT_EQ(both.positions(0, l, 1), first.positions(0, l, 1)) << kind << ' ' << unified;
        EXPECT_EQ(both.positions(1, l, 1), second.positions(0, l, 1)) << kind << ' ' << unified;
      }
      const std::vector<float> ours = logits_of(both, model.get()), alone = logits_of(second, model.get());
      const float most = std::abs(*std::ranges::max_element(alone, {}, [](float x) { return std::abs(x); }));
      for (std::size_t i = 0; i < alone.size(); ++i) ASSERT_NEAR(ours[i], alone[i], 2e-2F * most) << kind;
    }
  }
}

TEST_P(LlamaEvictor, WhereRowsCannotMoveTheWindowsTokensStayInFullLayers) {
  if (!exact()) return;
  const Model model = of_kind("swa");
  const std::int32_t window = window_of(model.get());
  const Engine run("keydiff,budget=48,interval=8,sink=2,recent=4,prefill=cut,share=union",
                   {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, model.get());
  run.evictor->prompt(0, 80);
  ASSERT_EQ(run.decode({{0, words(70)}}), 0);
  run.evictor->keeper().part<parts::Pins>().pin(0, 8, 10);
  run.evictor->keeper().part<parts::Pins>().pin(0, 76, 79);
  for (unsigned i = 0; i < 40; ++i) {
    ASSERT_EQ(run.decode({{0, words(i == 0 ? 10 : 1, i)}}), 0);
    const auto pinned = run.evictor->keeper().part<parts::Pins>().pinned(0);
    ASSERT_EQ(pinned.size(), 2U) << "what the program pinned, and nothing else";
    EXPECT_EQ(pinned[0].begin, 8);
    EXPECT_EQ(pinned[0].end, 10);
    EXPECT_EQ(pinned[1].begin, 76);
    EXPECT_EQ(pinned[1].end, 79);
    if (run.evictor->report().cuts.empty()) continue;
    const std::vector<std::int32_t> kept = run.positions(0, run.evictor->keeper().spec().full_layers()[0], 0);
    const llama_pos next = run.evictor->next_position(0);
    for (llama_pos p = next - window; p < next; ++p)
      EXPECT_TRUE(std::ranges::binary_search(kept, p)) << p << " of " << next;
    for (const llama_pos p : {8, 9, 76, 77, 78}) EXPECT_TRUE(std::ranges::binary_search(kept, p)) << p;
  }
  EXPECT_GE(run.evictor->spent().cut, 4);
}

TEST_P(LlamaEvictor, SaysWhatMixedModelsCannotDo) {
  if (!exact()) return;
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    llama_context_params params = params_of({});
    EXPECT_THROW(Evictor(model.get(), params, make_policy("tova,budget=60"), Positions::cache), Unsupported) << kind;
    EXPECT_EQ(params.cb_eval, nullptr) << kind;
  }
  const Model model = of_kind("swa");
  llama_context_params params = params_of({});
  const std::int32_t window = window_of(model.get());
  try {
    const Evictor evictor(model.get(), params,
                          make_policy("tova,sink=1,recent=1,budget=" + std::to_string(window - 1)));
    ADD_FAILURE();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(window) + " tokens"), std::string::npos) << error.what();
  }
  const Evictor evictor(model.get(), params, make_policy("tova,sink=1,recent=1,budget=" + std::to_string(window)));
}

TEST_P(LlamaEvictor, QueriesAreTurnedBackWhereLayersThatSlideTurnOtherwise) {
  if (!exact()) return;
  const Model model = of_kind("swa");
  const Engine run("expected,budget=40,interval=8,sink=2,recent=4,prefill=cut", {}, model.get());
  ASSERT_EQ(run.decode({{0, words(60)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 1);
  std::pair<std::size_t, std::size_t> first;
  expect_mixed_sound(run, 0, window_of(model.get()), first);
}

TEST_P(LlamaEvictor, AnEventThatTheProgramNamesLeavesTheWindowWhereRowsCannotMove) {
  if (!exact()) return;
  const Model model = of_kind("swa");
  const std::int32_t window = window_of(model.get());
  const Engine run("knorm,budget=40,interval=100,sink=2,recent=4,share=union",
                   {.cells = 256, .flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, model.get());
  ASSERT_EQ(run.decode({{0, words(60)}}), 0);
  ASSERT_GT(run.evictor->keeper().tokens_to_event(0), 0) << "none comes by itself";
  run.evictor->cut(0);
  EXPECT_EQ(run.evictor->cells(0).size(), 40U);
  std::pair<std::size_t, std::size_t> first;
  expect_mixed_sound(run, 0, window, first);
}

TEST_P(LlamaEvictor, ServesTextOfModelsWithPositionsOfSeveralDimensions) {
  if (!exact()) return;
  const Model model = of_kind("mrope");
  ASSERT_NE(model, nullptr);
  const std::string policy = "tova,budget=40,interval=8,sink=2,recent=4,prefill=cut";
  const Engine run(policy, {}, model.get());
  ASSERT_EQ(run.decode({{0, words(60)}}), 0);
  for (unsigned i = 0; i < 20; ++i) ASSERT_EQ(run.decode({{0, words(1, i)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 3);
  expect_sound(run, 0);
  // An image comes as embeddings, whose tokens are not positions.
  std::vector<float> embeddings(static_cast<std::size_t>(llama_model_n_embd(model.get())));
  llama_batch image = llama_batch_get_one(nullptr, 1);
  image.embd = embeddings.data();
  try {
    run.evictor->begin(image);
    ADD_FAILURE();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("M-RoPE"), std::string::npos) << error.what();
  }
  ASSERT_EQ(run.decode({{0, words(1)}}), 0) << "nothing has happened";
#ifndef KVKEEP_TEST_FAKE_LLAMA
  EXPECT_THROW(Engine("expected,budget=32", {}, model.get()), Unsupported);
  EXPECT_THROW(Engine("knorm,budget=32", {.positions = Positions::cache}, model.get()), Unsupported);
#endif
}

}  // namespace
}  // namespace kvkeep::llama
