// SPDX-License-Identifier: Apache-2.0
// libkvkeep_llama_preload.so before llama.cpp, or before the fake of its functions: programs that know neither.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "preload_engine.h"

namespace kvkeep::llama {
namespace {

constexpr const char* kHolds = "tova,budget=1000";
constexpr const char* kCuts = "tova,budget=48,interval=16,prefill=cut,sink=2,recent=4";

std::vector<llama_token> go_on(const Engine& run, llama_token first, int tokens, llama_seq_id sequence) {
  std::vector<llama_token> made{first};
  for (int i = 0; i < tokens; ++i) {
    EXPECT_EQ(run.decode({{sequence, {made.back()}}}), 0);
    made.push_back(run.likeliest());
  }
  return made;
}

/// The same as an Evictor in the program's own code.
TEST_F(LlamaPreload, CutsAsAnEvictorInTheProgramDoes) {
  const std::vector<llama_token> prompt = some_tokens(100);
  const std::vector<llama_token> alone = under(nullptr).generate(prompt, 60);
  EXPECT_EQ(under(kHolds).generate(prompt, 60), alone);
  for (const std::string policy : {kCuts, "knorm,budget=48,interval=16,prefill=cut,share=union"}) {
    const Engine kept = under(policy.c_str());
    unsetenv("KVKEEP_POLICY");
    const Engine own(policy, {.cells = 1024, .sequences = 4, .type = GGML_TYPE_F32});
    EXPECT_EQ(kept.generate(prompt, 60), own.generate(prompt, 60)) << policy;
    EXPECT_EQ(events(kept), own.evictor->spent().cut) << policy;
    EXPECT_EQ(events(kept), 4) << policy;
    EXPECT_EQ(events(own), -1) << policy;
  }
}

TEST_F(LlamaPreload, SaysWhatItDoes) {
  EXPECT_SAYS(said([] { under(nullptr); }), "KVKEEP_POLICY is not set, so llama.cpp is alone");
  setenv("KVKEEP_VERBOSE", "1", 1);
  const std::string text = said([] { static_cast<void>(under(kCuts).generate(some_tokens(100), 20)); });
  EXPECT_SAYS(text, "kvkeep: " + std::string(kCuts) + " keeps a context of 1024 cells, 4 sequences\n");
  EXPECT_SAYS(text, "kvkeep: sequence 0 was cut at 100 tokens: of 100 cells, 48 stay\n");
  EXPECT_SAYS(text, "kvkeep: " + std::string(kCuts) + ": 120 tokens, 2 events, at most 63 cells of a sequence\n");
}

/// Who asked for a policy by name must not run without.
TEST_F(LlamaPreload, MakesNoContextUnderAPolicyThatDoesNotExist) {
  for (const char* wrong : {"tovva,budget=64", "tova", "tova,budget=-1"}) {
    const std::string text = said([&] { EXPECT_EQ(under(wrong).context, nullptr); });
    EXPECT_SAYS(text, "so no context is made");
  }
  EXPECT_SAYS(said([] { EXPECT_EQ(under("help").context, nullptr); }), "\n  tova: ");
  setenv("KVKEEP_CELLS", "many", 1);
  EXPECT_SAYS(said([] { under(kCuts); }), "KVKEEP_CELLS is \"many\"");
}

/// The program is as it was.
TEST_F(LlamaPreload, LeavesContextsAloneThatItCannotFollow) {
  const std::vector<llama_token> prompt = some_tokens(60), want = under(nullptr).generate(prompt, 10);
  llama_context_params embeds = params_of({}), thinks_ahead = params_of({});
  embeds.embeddings = true;
  thinks_ahead.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
  setenv("KVKEEP_POLICY", kCuts, 1);
  for (const llama_context_params& params : {embeds, thinks_ahead}) {
    Context context;
    EXPECT_SAYS(said([&] { context.reset(llama_init_from_model(the_model(), params)); }), "it is for embeddings");
    EXPECT_NE(context, nullptr);
    EXPECT_EQ(kvkeep_llama_events(context.get()), -1);
  }
#ifdef KVKEEP_TEST_FAKE_LLAMA  // llama.cpp shares memory with the other one only for some models
  const Context target(llama_init_from_model(the_model(), params_of({})));
  llama_context_params drafts = params_of({});
  drafts.ctx_other = target.get();
  EXPECT_SAYS(said([&] { Context(llama_init_from_model(the_model(), drafts)); }), "serves another context (drafts)");
#endif
  const std::string text = said([&] {
    const Engine transposed = under(kCuts, {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED});
    EXPECT_EQ(transposed.decode({{0, prompt}}), 0);
    EXPECT_EQ(events(transposed), -1);
    EXPECT_EQ(least(transposed), 0);
  });
  EXPECT_SAYS(text, "which llama.cpp has alone: llama: flash attention is off");
  EXPECT_EQ(under(nullptr).generate(prompt, 10), want);
}

#ifdef KVKEEP_TEST_FAKE_LLAMA
TEST_F(LlamaPreload, MeasuringAModelWithoutWeightsRunsNothing) {
  llama_model_params params = llama_model_default_params();
  params.no_alloc = true;
  const char* path = "fake:llama";
  const Model whole(llama_model_load_from_file(path, params)), split(llama_model_load_from_splits(&path, 1, params));
  setenv("KVKEEP_POLICY", "expected,budget=64", 1);  // reads RoPE from a token that it runs
  for (const Model* model : {&whole, &split}) {
    const Context context(llama_init_from_model(model->get(), params_of({})));
    EXPECT_EQ(kvkeep_llama_events(context.get()), -1);
  }
  params.no_alloc = false;
  const Model again(llama_model_load_from_file(path, params));
  const Context context(llama_new_context_with_model(again.get(), params_of({})));
  EXPECT_EQ(kvkeep_llama_events(context.get()), 0);
}
#endif

TEST_F(LlamaPreload, SaysHowFarASequenceGoesBack) {
  const Engine run = under(kCuts);
  ASSERT_EQ(run.decode({{0, some_tokens(100)}}), 0);
  EXPECT_EQ(least(run), 99) << "what the event saw stays";
  ASSERT_EQ(run.decode({{0, some_tokens(10, 2), false}, {1, some_tokens(20)}}), 0);
  EXPECT_EQ(least(run), 99);
  EXPECT_EQ(least(run, 1), 0) << "not cut";
  const std::string text = said([&] {
    EXPECT_FALSE(llama_memory_seq_rm(run.memory(), 0, 99, -1)) << "it was cut";
    EXPECT_FALSE(llama_memory_seq_rm(run.memory(), 0, 100, 105)) << "the middle";
    EXPECT_FALSE(llama_memory_seq_rm(run.memory(), 1, 0, 5)) << "the beginning";
    EXPECT_FALSE(llama_memory_seq_rm(run.memory(), -1, 15, -1)) << "of one of all";
  });
  EXPECT_SAYS(text,
              "positions [99, -1) of sequence 0, which has 110 tokens, stay: an event has cut what comes before; "
              "allowed from 100 on, or all");
  EXPECT_SAYS(text, "the middle is not taken out");
  EXPECT_EQ(length(run), 110);
  EXPECT_EQ(length(run, 1), 20);
  EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, 110, -1)) << "nothing";
  EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, 100, -1));
  EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 1, 7, -1));
  EXPECT_EQ(length(run), 100);
  EXPECT_EQ(length(run, 1), 7);
  ASSERT_EQ(run.decode({{0, some_tokens(3)}, {1, some_tokens(3)}}), 0);
  EXPECT_TRUE(llama_memory_seq_rm(run.memory(), -1, -1, -1));
  EXPECT_EQ(length(run) + length(run, 1), 0);
  EXPECT_EQ(least(run), -1);
  ASSERT_EQ(run.decode({{0, some_tokens(100)}}), 0);
  llama_memory_clear(run.memory(), true);
  EXPECT_EQ(least(run), -1);
  EXPECT_EQ(run.generate(some_tokens(100), 30), under(kCuts).generate(some_tokens(100), 30)) << "as new";
}

TEST_F(LlamaPreload, ShiftsAreRefusedUntilTheSequenceIsGone) {
  const Engine run = under(kHolds);
  EXPECT_FALSE(llama_memory_can_shift(run.memory()));
  EXPECT_TRUE(llama_memory_can_shift(under(nullptr).memory()));
  for (const bool divides : {false, true}) {
    ASSERT_EQ(run.decode({{0, some_tokens(40)}, {1, some_tokens(40)}}), 0);
    const std::string text = said([&] {
      if (divides)
        llama_memory_seq_div(run.memory(), 0, 0, -1, 2);
      else
        llama_memory_seq_add(run.memory(), 0, 20, -1, 3);
      EXPECT_EQ(run.decode({{0, some_tokens(1)}}), -1);
      EXPECT_EQ(run.decode({{1, some_tokens(1)}}), 0) << "others go on";
    });
    EXPECT_SAYS(text, divides ? "llama_memory_seq_div" : "llama_memory_seq_add");
    EXPECT_SAYS(text, "kvkeep: llama: sequence 0");  // what was noticed
    EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
    EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 1, -1, -1));
  }
  EXPECT_EQ(run.decode({{0, some_tokens(40)}}), 0);
}

/// Under policies that rewrite rows, cells are not shared, and what was cut is copied, too.
TEST_F(LlamaPreload, CopiesOfSequencesGoOnAsTheyWould) {
  for (const char* policy : {kCuts, "tova,budget=48,interval=16,prefill=cut,share=union", kHolds})
    for (const bool unified : {true, false}) {
      const Setting setting{.cells = 2048, .sequences = 4, .unified = unified, .type = GGML_TYPE_F32};
      const Engine run = under(policy, setting);
      ASSERT_EQ(run.decode({{0, some_tokens(90)}}), 0);
      const llama_token next = run.likeliest();
      for (const llama_seq_id to : {1, 2}) llama_memory_seq_cp(run.memory(), 0, to, -1, -1);
      EXPECT_EQ(length(run, 1), 90);
      const std::vector<llama_token> want = go_on(run, next, 40, 0);
      EXPECT_EQ(go_on(run, next, 40, 1), want) << policy << unified;
      EXPECT_EQ(go_on(run, next, 40, 2), want) << policy << unified;
      EXPECT_EQ(events(run), policy == kHolds ? 0 : 7) << policy;
    }
  const Engine run = under(kCuts);
  ASSERT_EQ(run.decode({{0, some_tokens(90)}, {1, some_tokens(40), false}}), 0);
  const std::string text = said([&] {
    llama_memory_seq_cp(run.memory(), 0, 2, 0, 50);
    llama_memory_seq_cp(run.memory(), 0, 2, 10, -1);
    llama_memory_seq_cp(run.memory(), 0, 1, -1, -1);
    llama_memory_seq_cp(run.memory(), 1, 3, 0, 25);
    llama_memory_seq_cp(run.memory(), 0, 0, -1, -1);
  });
  EXPECT_SAYS(text, "sequence 0 is not copied to 2: llama: sequence 0 was cut after its first 50 tokens");
  EXPECT_SAYS(text, "it begins at position 10");
  EXPECT_SAYS(text, "sequence 1 has tokens already");
  EXPECT_EQ(length(run, 2), 0);
  EXPECT_EQ(length(run, 3), 25) << "a prefix of what was not cut";
  EXPECT_EQ(run.decode({{3, some_tokens(30)}}), 0);
}

TEST_F(LlamaPreload, StatesOfSequencesCarryWhatThePolicyKnows) {
  const std::string file = testing::TempDir() + "kvkeep_preload_session";
  for (const std::string policy : {kCuts, kHolds}) {
    const Engine first = under(policy.c_str()), second = under(policy.c_str()), third = under(policy.c_str());
    ASSERT_EQ(first.decode({{1, some_tokens(90)}}), 0);
    const llama_token next = first.likeliest();
    std::vector<std::uint8_t> state(llama_state_seq_get_size(first.context.get(), 1));
    EXPECT_EQ(state.size(), llama_state_seq_get_size_ext(first.context.get(), 1, 0));
    EXPECT_EQ(llama_state_seq_get_data(first.context.get(), state.data(), state.size() - 1, 1), 0U) << "no room";
    EXPECT_EQ(llama_state_seq_get_data_ext(first.context.get(), state.data(), state.size(), 1, 0), state.size());
    const std::vector<llama_token> tokens = some_tokens(7);
    EXPECT_GT(llama_state_seq_save_file(first.context.get(), file.c_str(), 1, tokens.data(), tokens.size()),
              state.size());
    ASSERT_EQ(second.decode({{0, some_tokens(30, 2)}}), 0);
    EXPECT_EQ(llama_state_seq_set_data(second.context.get(), state.data(), state.size(), 2), state.size());
    EXPECT_EQ(llama_state_seq_set_data_ext(second.context.get(), state.data(), state.size(), 0, 0), state.size());
    std::vector<llama_token> read(10);
    std::size_t count = 0;
    EXPECT_GT(llama_state_seq_load_file(third.context.get(), file.c_str(), 0, nullptr, 0, &count), 0U);
    EXPECT_EQ(count, 7U);
    EXPECT_EQ(length(third), 0);
    EXPECT_EQ(llama_state_seq_load_file(third.context.get(), file.c_str(), 3, read.data(), 10, &count),
              std::filesystem::file_size(file));
    const std::vector<llama_token> want = go_on(first, next, 40, 1);
    EXPECT_EQ(go_on(second, next, 40, 2), want) << policy;
    EXPECT_EQ(go_on(second, next, 40, 0), want) << policy;
    EXPECT_EQ(go_on(third, next, 40, 3), want) << policy;
    EXPECT_EQ(least(third, 3), least(first, 1));
    const Engine other = under("tova,budget=50");
    const std::string text = said([&] {
      EXPECT_EQ(llama_state_seq_set_data(other.context.get(), state.data(), state.size(), 0), 0U);
      EXPECT_EQ(llama_state_seq_load_file(other.context.get(), file.c_str(), 0, read.data(), 10, &count), 0U);
      state.back() ^= 1;
      EXPECT_EQ(llama_state_seq_set_data(second.context.get(), state.data(), state.size(), 3), 0U);
      EXPECT_EQ(llama_state_seq_set_data(second.context.get(), state.data(), state.size() - 1, 3), 0U);
    });
    EXPECT_SAYS(text, "another policy");
    EXPECT_SAYS(text, "not what save() gave");
    EXPECT_SAYS(text, "lacks its end");
    EXPECT_EQ(length(other), 0) << "and nothing of it is in the cache";
    EXPECT_EQ(length(second, 3), 0);
    std::filesystem::remove(file);
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST_F(LlamaPreload, StatesOfWholeContextsAreNotRead) {
  const Engine run = under(kHolds);
  std::vector<std::uint8_t> state(1000);
  std::size_t count = 0;
  const std::string text = said([&] {
    EXPECT_EQ(llama_state_set_data(run.context.get(), state.data(), state.size()), 0U);
    EXPECT_FALSE(llama_state_load_file(run.context.get(), "/nowhere", nullptr, 0, &count));
    EXPECT_EQ(llama_set_state_data(run.context.get(), state.data()), 0U);
    EXPECT_FALSE(llama_load_session_file(run.context.get(), "/nowhere", nullptr, 0, &count));
  });
  EXPECT_SAYS(text, "allowed that of each sequence");
}
#pragma GCC diagnostic pop

/// llama_process() of a batch whose tokens are set one by one, as llama-server does it.
TEST_F(LlamaPreload, FollowsBatchesOfSingleTokens) {
  const Engine run = under(kCuts), other = under(kCuts);
  llama_batch_ext* batch = llama_batch_ext_init(run.context.get());
  const auto add = [&](llama_seq_id s, llama_token token, llama_pos at, bool output) {
    const std::int32_t i = llama_batch_ext_add_token(batch, s, token);
    ASSERT_GE(i, 0);
    EXPECT_TRUE(llama_batch_ext_set_pos(batch, i, &at));
    EXPECT_TRUE(llama_batch_ext_set_output_logits(batch, i, output));
  };
  const std::vector<llama_token> one = some_tokens(90), two = some_tokens(70, 2);
  for (int round = 0; round < 2; ++round) {  // cleared in between
    llama_batch_ext_clear(batch);
    const llama_pos a = length(run, 0), b = length(run, 1);
    for (std::size_t i = 0; i < one.size(); ++i) add(0, one[i], a + static_cast<llama_pos>(i), i + 1 == one.size());
    for (std::size_t i = 0; i < two.size(); ++i) add(1, two[i], b + static_cast<llama_pos>(i), i + 1 == two.size());
    ASSERT_EQ(llama_process(run.context.get(), LLAMA_PROCESS_TYPE_DECODE, batch), 0);
    ASSERT_EQ(other.decode({{0, one}, {1, two}}), 0);
  }
  EXPECT_EQ(events(run), 4);
  EXPECT_EQ(run.likeliest(), other.likeliest());
  EXPECT_EQ(least(run, 1), least(other, 1));
  // A token of two sequences: nothing follows that, and something was cut.
  llama_batch_ext_clear(batch);
  add(2, 1, 0, false);
  EXPECT_TRUE(llama_batch_ext_add_seq(batch, 0, 3));
  EXPECT_FALSE(llama_batch_ext_set_output_embd(batch, 5, true));
  EXPECT_SAYS(said([&] { EXPECT_EQ(llama_process(run.context.get(), LLAMA_PROCESS_TYPE_DECODE, batch), -1); }),
              "belongs to 2 sequences");
  // Several outputs are drafts, which are not cut.
  llama_batch_ext_clear(batch);
  const llama_pos at = length(run);
  for (int i = 0; i < 20; ++i) add(0, 3, at + i, false);
  for (const int i : {4, 19}) EXPECT_TRUE(llama_batch_ext_set_output_embd(batch, i, true));
  ASSERT_EQ(llama_process(run.context.get(), LLAMA_PROCESS_TYPE_DECODE, batch), 0);
  EXPECT_EQ(events(run), 4);
  llama_batch_ext_free(batch);
}

TEST_F(LlamaPreload, LetsGoOfWhatItCannotFollowWhileNothingWasCut) {
  const Engine run = under(kCuts), alone = under(nullptr);
  std::vector<int> states;
  const std::string text = said([&] {
    for (const Engine* each : {&run, &alone}) {
      llama_batch batch = llama_batch_init(1, 0, 2);
      batch.n_tokens = 1;
      batch.token[0] = 5, batch.pos[0] = 0, batch.n_seq_id[0] = 2, batch.logits[0] = 1;
      batch.seq_id[0][0] = 0, batch.seq_id[0][1] = 1;
      states.push_back(llama_decode(each->context.get(), batch));
      llama_batch_free(batch);
    }
  });
  EXPECT_EQ(states, (std::vector<int>{0, 0}));
  EXPECT_SAYS(text, "ends here, and llama.cpp goes on alone");
  EXPECT_EQ(events(run), -1);
  EXPECT_TRUE(llama_memory_can_shift(run.memory()));
  EXPECT_EQ(go_on(run, 7, 80, 0), go_on(alone, 7, 80, 0));
}

bool stops(void* calls) { return --*static_cast<int*>(calls) < 0; }

TEST_F(LlamaPreload, FollowsBatchesThatFail) {
  const Engine run = under(kCuts, {.cells = 256, .type = GGML_TYPE_F32, .micro_batch = 16});
  ASSERT_EQ(run.decode({{0, some_tokens(100)}}), 0);
  EXPECT_EQ(run.decode({{0, some_tokens(250)}}), 1) << "no room";
  EXPECT_EQ(length(run), 100);
  llama_token wrong = -5;
  EXPECT_EQ(llama_decode(run.context.get(), llama_batch_get_one(&wrong, 1)), -1);
  const llama_token next = run.decode({{0, {3}}}) == 0 ? run.likeliest() : -1;
  const Engine other = under(kCuts, {.cells = 256, .type = GGML_TYPE_F32, .micro_batch = 16});
  ASSERT_EQ(other.decode({{0, some_tokens(100)}}), 0);
  ASSERT_EQ(other.decode({{0, {3}}}), 0);
  EXPECT_EQ(go_on(run, next, 40, 0), go_on(other, other.likeliest(), 40, 0));
  // Aborted in the middle of a prompt, of which some micro-batches stay, or none.
  llama_context_params params = params_of({.cells = 256, .type = GGML_TYPE_F32, .micro_batch = 16});
  int calls = 100;
  params.abort_callback = stops;
  params.abort_callback_data = &calls;
  const Context context(llama_init_from_model(the_model(), params));
  std::vector<llama_token> prompt = some_tokens(100);
  const llama_batch batch = llama_batch_get_one(prompt.data(), 100);
  EXPECT_EQ(llama_decode(context.get(), batch), 2);
  const llama_pos kept = llama_memory_seq_pos_max(llama_get_memory(context.get()), 0) + 1;
  calls = 1000000;
  std::vector<llama_token> rest(prompt.begin() + kept, prompt.end());
  EXPECT_EQ(llama_decode(context.get(), llama_batch_get_one(rest.data(), static_cast<std::int32_t>(rest.size()))), 0);
  EXPECT_EQ(llama_memory_seq_pos_max(llama_get_memory(context.get()), 0), 99);
  EXPECT_EQ(kvkeep_llama_events(context.get()), 1);
}

/// Drafts, of which more are refused than queries are remembered.
TEST_F(LlamaPreload, TakesBackManyDrafts) {
  const Engine run = under(kCuts);
  ASSERT_EQ(run.decode({{0, some_tokens(100)}}), 0);
  for (unsigned round = 0; round < 4; ++round) {
    const llama_pos at = length(run);
    const std::int64_t before = events(run);
    ASSERT_EQ(run.decode({{0, some_tokens(60, round), true, true}}), 0);
    ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, at + 18, -1)) << "42 of 60";
    EXPECT_EQ(events(run), before);
    ASSERT_EQ(run.decode({{0, some_tokens(1)}}), 0);
    EXPECT_EQ(events(run), before + 1);
  }
}

TEST_F(LlamaPreload, ShowsMoreCellsThanThereAre) {
  setenv("KVKEEP_CELLS", "256", 1);
  for (const bool unified : {true, false}) {
    const Setting setting{.cells = 4096, .sequences = 2, .unified = unified, .type = GGML_TYPE_F32};
    const Engine run = under(kCuts, setting), alone = [&] {
      unsetenv("KVKEEP_CELLS");
      return under(nullptr, setting);
    }();
    setenv("KVKEEP_CELLS", "256", 1);
    EXPECT_EQ(llama_n_ctx(run.context.get()), llama_n_ctx(alone.context.get()));
    EXPECT_EQ(llama_n_ctx_seq(run.context.get()), llama_n_ctx_seq(alone.context.get()));
    ASSERT_EQ(run.decode({{0, some_tokens(200)}}), 0);
    go_on(run, 1, 300, 0);
    EXPECT_EQ(length(run), 500);
    EXPECT_EQ(run.decode({{0, some_tokens(250)}}), 1) << "more than there are";
  }
  const Engine larger = under(kCuts, {.cells = 256});
  EXPECT_EQ(llama_n_ctx(larger.context.get()), 256U) << "never more than asked for";
}

/// Each piece is cut behind its batch, so that the cells hold the budget and the next one.
TEST_F(LlamaPreload, PromptsLongerThanTheCellsGoThroughInPieces) {
  const std::vector<llama_token> prompt = some_tokens(900);
  for (const std::string policy :
       {"tova,budget=48,interval=16,prefill=pieces,sink=2,recent=4", "knorm,budget=48,prefill=pieces,share=union"}) {
    std::vector<std::vector<llama_token>> answers;
    for (const char* cells : {"256", ""}) {
      setenv("KVKEEP_CELLS", cells, 1);
      const Engine run = under(policy.c_str(), {.cells = 4096, .type = GGML_TYPE_F32});
      EXPECT_EQ(llama_n_ctx(run.context.get()), 4096U);
      if (*cells != 0) EXPECT_EQ(run.decode({{0, {prompt.begin(), prompt.begin() + 256}, false}}), 0);
      if (*cells != 0) EXPECT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
      for (auto at = prompt.begin(); at != prompt.end(); at += 150)
        ASSERT_EQ(run.decode({{0, {at, at + 150}, at + 150 == prompt.end()}}), 0) << at - prompt.begin();
      EXPECT_EQ(length(run), 900);
      EXPECT_GE(events(run), 6);
      // More than there is room for: nothing has changed, and fewer go through, as a server tries them.
      if (*cells != 0) EXPECT_EQ(run.decode({{0, some_tokens(250, 2), false}}), 1);
      answers.push_back(go_on(run, 3, 40, 0));
    }
    EXPECT_EQ(answers[0], answers[1]) << policy;
  }
}

TEST_F(LlamaPreload, ProgramsThatLoadItChooseThePolicyThemselves) {
  unsetenv("KVKEEP_POLICY");
  kvkeep_llama_policy(kCuts);
  Context context(llama_init_from_model(the_model(), params_of({})));
  EXPECT_EQ(kvkeep_llama_events(context.get()), 0);
  kvkeep_llama_policy("");
  context.reset(llama_init_from_model(the_model(), params_of({})));
  EXPECT_EQ(kvkeep_llama_events(context.get()), -1);
  kvkeep_llama_policy("nothing");
  static_cast<void>(said([&] { EXPECT_EQ(llama_init_from_model(the_model(), params_of({})), nullptr); }));
  EXPECT_SAYS(kvkeep_llama_said(), "\"nothing\"");
  kvkeep_llama_policy(nullptr);
  static_cast<void>(said([] { EXPECT_EQ(kvkeep_llama_bind("/nowhere/libllama.so"), 1); }));
  EXPECT_SAYS(kvkeep_llama_said(), "is not loaded");
}

}  // namespace
}  // namespace kvkeep::llama
