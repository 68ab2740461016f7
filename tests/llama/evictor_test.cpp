// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp, with a tiny model and with a pretrained one, or over the fake of its functions in
// tests/llama/fake.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "evictor_engine.h"
#include "kvkeep/keep/compact.h"
#ifndef KVKEEP_TEST_FAKE_LLAMA
#include <ggml-cuda.h>
#endif

namespace kvkeep::llama {
namespace {

/// Whether all rows may share one selection: allocators that spend quotas cannot.
std::vector<const char*> shares_of(const std::string& policy) {
  if (policy == "full" || policy.starts_with("ams-") || policy.starts_with("chunkkv-")) return {""};
  return {"", ",share=union"};
}

const std::vector<std::string> kPolicies = {"full",     "streaming", "random",        "knorm", "keydiff",
                                            "tova",     "snapkv",    "rkv",           "h2o",   "expected",
                                            "ams-tova", "ams-rkv",   "chunkkv-snapkv"};

/// Every policy of the registry, but for those that the adapter refuses by name.
TEST_P(LlamaEvictor, ChangesNothingUnderABudgetThatHoldsTheText) {
  const int tokens = exact() ? 30 : 12;
  const std::vector<llama_token> prompt = some_tokens(50), want = Engine("").generate(prompt, tokens);
  int ran = 0;
  std::set<std::string> refused;
  for (const PolicyInfo& policy : policies())
    for (const std::string share : {"", ",share=union", ",share=union_mean", ",share=per_head"}) {
      const std::string text = policy.name + (policy.name == "full" ? "" : ",budget=1000") + share;
      try {
        static_cast<void>(make_policy(text));
      } catch (const Error&) {
        continue;  // needs files, or cannot share
      }
      try {
        const Engine run(text);
        ASSERT_EQ(run.generate(prompt, tokens), want) << text;
        EXPECT_EQ(run.evictor->spent().cut, 0);
        expect_sound(run, 0);
        ++ran;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(policy.name), std::string::npos) << text << ": " << error.what();
        refused.insert(policy.name);
      }
    }
  EXPECT_GE(ran, 60);
  for (const std::string& policy : kPolicies) EXPECT_FALSE(refused.contains(policy)) << policy;
  std::string names;
  for (const std::string& name : refused) names += name + " ";
  RecordProperty("ran", ran);
  RecordProperty("refused", names);
}

TEST_P(LlamaEvictor, KeepsWithinTheBudgetInLowCells) {
  for (const std::string& policy : kPolicies) {
    if (policy == "full") continue;
    for (const char* share : shares_of(policy)) {
      const Engine run(policy + ",budget=64,interval=16,recent=8,prefill=cut" + share);
      static_cast<void>(run.generate(some_tokens(200), 100));
      ASSERT_GE(run.evictor->spent().cut, 6) << policy << share;
      expect_sound(run, 0);
      EXPECT_LT(run.evictor->cells(0).size(), 80u) << policy << share;
      EXPECT_LT(std::ranges::max(run.evictor->cells(0)), 82) << policy << share;
    }
  }
}

TEST_P(LlamaEvictor, DetachedItLeavesNoTrace) {
  const std::vector<llama_token> prompt = some_tokens(100), want = Engine("").generate(prompt, 40);
  for (const std::size_t watched : {0, 1, 20}) {  // decodes before it is detached, none of which is cut
    const Engine run("tova,budget=100,interval=32,prefill=cut");
    std::vector<llama_token> ids = prompt, made;
    for (std::size_t i = 0; i < 40; ++i) {
      if (i == watched) run.evictor->detach();
      const llama_batch batch = llama_batch_get_one(ids.data(), static_cast<std::int32_t>(ids.size()));
      ASSERT_EQ(i < watched ? run.evictor->decode(batch) : llama_decode(run.context.get(), batch), 0);
      made.push_back(run.likeliest());
      ids = {made.back()};
    }
    EXPECT_EQ(made, want) << watched;
  }
}

TEST_P(LlamaEvictor, MayEndBeforeItsContext) {
  Engine run("tova,budget=32,interval=8,prefill=cut");
  ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
  run.evictor.reset();
  run.context.reset();
}

TEST_P(LlamaEvictor, ReadsQueriesOnlyBeforeEvents) {
  const Engine run("tova,budget=64,interval=32,recent=8");
  static_cast<void>(run.generate(some_tokens(64), 128));
  EXPECT_EQ(run.evictor->spent().cut, 4);
  EXPECT_LE(run.evictor->spent().read, 1 + 4);  // the prompt's micro-batch, and one token before each event
  const Engine none("knorm,budget=64,interval=32,recent=8");
  static_cast<void>(none.generate(some_tokens(64), 128));
  EXPECT_EQ(none.evictor->spent().read, 0);
}

TEST_P(LlamaEvictor, AChunkedPromptIsOnePrompt) {
  const std::vector<llama_token> prompt = some_tokens(150);
  const std::string policy = "snapkv,scorer.window=8,budget=40,recent=8,prefill=cut,interval=1000";
  const Setting setting{.type = GGML_TYPE_F32};
  const Engine whole(policy, setting), announced(policy, setting), flagged(policy, setting);
  ASSERT_EQ(whole.decode({{0, prompt}}), 0);
  announced.evictor->prompt(0, 150);
  for (std::size_t at = 0; at < prompt.size(); at += 50) {
    const std::vector<llama_token> part(prompt.begin() + static_cast<std::ptrdiff_t>(at),
                                        prompt.begin() + static_cast<std::ptrdiff_t>(at + 50));
    ASSERT_EQ(announced.decode({{0, part}}), 0);
    ASSERT_EQ(flagged.decode({{0, part, at == 100}}), 0);
  }
  EXPECT_EQ(whole.evictor->spent().cut, 1);
  for (const Engine* run : {&announced, &flagged}) {
    EXPECT_EQ(run->evictor->spent().cut, 1);
    expect_sound(*run, 0);
  }
  if (!exact()) return;
  for (const std::int32_t l : whole.evictor->keeper().spec().full_layers())
    for (std::int32_t h = 0; h < whole.evictor->keeper().spec().kv_heads; ++h) {
      EXPECT_EQ(announced.positions(0, l, h), whole.positions(0, l, h));
      EXPECT_EQ(flagged.positions(0, l, h), whole.positions(0, l, h));
    }
}

TEST_P(LlamaEvictor, FollowsARollback) {
  const std::vector<llama_token> prompt = some_tokens(80), wrong = some_tokens(5, 2), right = some_tokens(60, 3);
  const std::string policy = "tova,budget=48,interval=24,recent=8,prefill=cut";
  const Engine plain(policy), back(policy);
  for (const Engine* run : {&plain, &back}) {
    ASSERT_EQ(run->decode({{0, prompt}}), 0);
    for (std::size_t i = 0; i < right.size(); ++i) {
      if (run == &back && i % 7 == 3 && run->evictor->keeper().tokens_to_event(0) > 6) {
        ASSERT_EQ(run->decode({{0, wrong}}), 0);
        ASSERT_TRUE(llama_memory_seq_rm(run->memory(), 0, static_cast<llama_pos>(80 + i), -1));
      }
      ASSERT_EQ(run->decode({{0, {right[i]}}}), 0);
      expect_sound(*run, 0);
    }
  }
  EXPECT_EQ(plain.evictor->spent().cut, back.evictor->spent().cut);
  for (const std::int32_t l : plain.evictor->keeper().spec().full_layers())
    for (std::int32_t h = 0; h < plain.evictor->keeper().spec().kv_heads; ++h)
      EXPECT_EQ(plain.positions(0, l, h), back.positions(0, l, h)) << l << ' ' << h;
}

TEST_P(LlamaEvictor, ARollbackPastAnEventIsRefused) {
  const Engine run("tova,budget=48,interval=8,recent=8,prefill=cut");
  ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 0);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, 70, -1));
  EXPECT_THROW(static_cast<void>(run.decode({{0, {1}}})), StateError);
}

/// One sequence of the test below: what it is fed, and what becomes of it.
struct Life {
  int joins = 0;                    ///< step
  std::vector<llama_token> prompt;  ///< empty: a copy of the first 60 tokens of sequence 0
  std::vector<llama_token> fed;     ///< then, one per step
  int leaves = 1000;                ///< step
  std::size_t rolled_back = 0;      ///< before this token, five others are fed and taken back
};

/// Logits behind each token that is fed. What becomes of the others in the batch must not show.
using Seen = std::vector<std::vector<float>>;

/// Runs the sequences of `who` together, each under its index; a single one alone, as sequence 0.
void live(const Engine& run, const std::vector<Life>& lives, const std::vector<std::size_t>& who,
          const std::vector<llama_token>& prefix, std::map<std::size_t, Seen>& seen) {
  const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
  const auto number = [&](std::size_t i) { return static_cast<llama_seq_id>(who.size() == 1 ? 0 : i); };
  std::map<std::size_t, std::size_t> at;
  if (who.size() > 1) {
    ASSERT_EQ(run.decode({{0, prefix, false}}), 0);
    for (const std::size_t i : who)
      if (i != 0 && lives[i].prompt.empty()) run.evictor->copy(0, number(i), 60);
  } else if (lives[who[0]].prompt.empty()) {
    ASSERT_EQ(run.decode({{0, prefix, false}}), 0);
  }
  for (int step = 0; step < 90; ++step) {
    std::vector<Engine::Tokens> batch;
    std::vector<std::pair<std::size_t, std::int32_t>> outputs;
    std::int32_t tokens = 0;
    for (const std::size_t i : who) {
      const Life& life = lives[i];
      if (step == life.leaves) ASSERT_TRUE(llama_memory_seq_rm(run.memory(), number(i), -1, -1));
      const std::size_t fed = at[i];
      if (step < life.joins || step >= life.leaves || fed >= life.fed.size()) continue;
      if (life.rolled_back > 0 && fed == life.rolled_back) {
        ASSERT_GT(run.evictor->keeper().tokens_to_event(number(i)), 5);
        const llama_pos length = llama_memory_seq_pos_max(run.memory(), number(i)) + 1;
        ASSERT_EQ(run.decode({{number(i), some_tokens(5, 99)}}), 0);
        ASSERT_TRUE(llama_memory_seq_rm(run.memory(), number(i), length, -1));
      }
      std::vector<llama_token> ids = step == life.joins ? life.prompt : std::vector<llama_token>{};
      ids.push_back(life.fed[at[i]++]);
      tokens += static_cast<std::int32_t>(ids.size());
      outputs.emplace_back(i, tokens - 1);
      batch.push_back({number(i), std::move(ids)});
    }
    if (batch.empty()) continue;
    ASSERT_EQ(run.decode(batch), 0);
    for (const Engine::Tokens& one : batch) expect_sound(run, one.sequence);
    for (const auto& [i, output] : outputs) {
      const float* logits = llama_get_logits_ith(run.context.get(), output);
      seen[i].emplace_back(logits, logits + size);
    }
  }
}

/// Eight sequences of different lengths, four of which begin with the same prefix: one is rolled back in the middle,
/// two leave, and their numbers stay free.
TEST_P(LlamaEvictor, SequencesGiveWhatTheyGiveAlone) {
  const std::vector<llama_token> prefix = some_tokens(60);
  std::vector<Life> lives(8);
  for (std::size_t i = 0; i < 8; ++i) {
    lives[i].fed = some_tokens(40 + 7 * i % 30, static_cast<unsigned>(20 + i));
    if (i < 4) continue;
    lives[i].joins = static_cast<int>(5 * i);
    lives[i].prompt = some_tokens(23 + 11 * i, static_cast<unsigned>(40 + i));
  }
  lives[1].rolled_back = 22;
  lives[2].leaves = 25;
  lives[6].leaves = 60;
  // Where queries are not read, roundings leave the selection alone, under any weights.
  for (const std::string policy :
       {"tova,budget=40,interval=16,recent=8,prefill=cut", "streaming,budget=40,interval=16,recent=8,prefill=cut"})
    for (const bool unified : {true, false}) {
      if (!exact() && unified != policy.starts_with("tova")) continue;  // takes its time
      const std::string shared = policy + (unified ? ",share=union" : "");
      const Engine together(shared, {.cells = 4096, .sequences = 8, .unified = unified, .type = GGML_TYPE_F32});
      std::map<std::size_t, Seen> all;
      live(together, lives, {0, 1, 2, 3, 4, 5, 6, 7}, prefix, all);
      for (std::size_t i = 0; i < 8; ++i) {
        const Engine alone(shared, {.type = GGML_TYPE_F32});
        std::map<std::size_t, Seen> one;
        live(alone, lives, {i}, prefix, one);
        ASSERT_EQ(all[i].size(), one[i].size());
        if (lives[i].leaves > 90) {
          std::size_t slots = 0, same = 0;
          for (const std::int32_t l : alone.evictor->keeper().spec().full_layers())
            for (std::int32_t h = 0; h < alone.evictor->keeper().spec().kv_heads; ++h) {
              std::vector<std::int32_t> both;
              const std::vector<std::int32_t> a = alone.positions(0, l, h),
                                              b = together.positions(static_cast<llama_seq_id>(i), l, h);
              std::ranges::set_intersection(a, b, std::back_inserter(both));
              slots += a.size();
              same += both.size();
            }
          EXPECT_GE(static_cast<double>(same), (exact() || policy.starts_with("streaming") ? 1 : 0.85) * double(slots))
              << shared << " unified " << unified << " sequence " << i;
        }
        if (!exact() && !policy.starts_with("streaming")) continue;
        for (std::size_t t = 0; t < one[i].size(); ++t) {
          float largest = 0, difference = 0;
          for (std::size_t v = 0; v < one[i][t].size(); ++v) {
            largest = std::max(largest, std::abs(one[i][t][v]));
            difference = std::max(difference, std::abs(one[i][t][v] - all[i][t][v]));
          }
          ASSERT_LE(difference, rounding() * largest) << shared << " sequence " << i << " token " << t;
        }
      }
    }
}

TEST_P(LlamaEvictor, TokensOfSequencesMayAlternateInABatch) {
  const std::string policy = "tova,budget=32,interval=8,recent=4,prefill=cut,share=union";
  const Setting setting{.cells = 1024, .sequences = 2, .type = GGML_TYPE_F32};
  const Engine apart(policy, setting), mixed(policy, setting);
  const std::vector<std::vector<llama_token>> texts{some_tokens(60, 1), some_tokens(60, 2)};
  ASSERT_EQ(apart.decode({{0, texts[0]}, {1, texts[1]}}), 0);
  std::vector<Engine::Tokens> batch;
  for (std::size_t i = 0; i < 60; ++i)
    for (const llama_seq_id sequence : {0, 1})
      batch.push_back({sequence, {texts[static_cast<std::size_t>(sequence)][i]}, i + 1 == 60});
  ASSERT_EQ(mixed.decode(batch), 0);
  EXPECT_EQ(mixed.evictor->spent().cut, 2);
  for (const llama_seq_id sequence : {0, 1}) {
    expect_sound(mixed, sequence);
    if (exact()) EXPECT_EQ(mixed.positions(sequence, 1, 1), apart.positions(sequence, 1, 1)) << sequence;
  }
}

TEST_P(LlamaEvictor, SaysWhatIsInTheWay) {
  const auto sentence = [](const std::string& policy, const Setting& s) -> std::string {
    try {
      const Engine run(policy, s);
      static_cast<void>(run.generate(some_tokens(80), 2));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(sentence("knorm,budget=32", {.type = GGML_TYPE_Q8_0, .positions = Positions::cache}).find("q8_0"),
            std::string::npos);
  EXPECT_NE(sentence("tova,budget=32", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}).find("flash attention is off"),
            std::string::npos);
  EXPECT_NE(sentence("adakv-tova,budget=32", {}).find("unequal"), std::string::npos);
  EXPECT_NE(sentence("sekv,budget=32", {}).find("sekv"), std::string::npos);
  EXPECT_NE(sentence("vase,budget=48,window=16,share=union,prefill=cut", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED})
                .find("transposed"),
            std::string::npos);
  EXPECT_EQ(sentence("tova,budget=32,share=union,prefill=cut", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}), "");
  EXPECT_EQ(sentence("tova,budget=32,share=union,prefill=cut", {.type = GGML_TYPE_Q8_0}), "");
  EXPECT_NE(sentence("expected,budget=32,share=union,prefill=cut", {.type = GGML_TYPE_Q8_0}).find("Hadamard"),
            std::string::npos);
#ifdef KVKEEP_TEST_FAKE_LLAMA  // its heads have 32 elements
  EXPECT_NE(sentence("tova,budget=32,share=union", {.type = GGML_TYPE_Q8_0, .positions = Positions::cache})
                .find("multiple of 64"),
            std::string::npos);
#endif
  const Engine run("tova,budget=32", {.sequences = 2});
  ASSERT_EQ(run.decode({{0, some_tokens(20)}}), 0);
  EXPECT_THROW(run.evictor->copy(0, 1, 20), Unsupported);  // cells would be shared, and rewritten
  EXPECT_THROW(run.evictor->copy(1, 0, 20), StateError);
  EXPECT_THROW(run.evictor->prompt(0, 20), StateError);
  EXPECT_THROW(run.evictor->prompt(1, 0), InvalidArgument);
  EXPECT_THROW(run.evictor->end(0), StateError);
  EXPECT_THROW(run.evictor->copy(0, 2, 20), InvalidArgument);
  EXPECT_THROW(run.evictor->copy(0, -1, 20), InvalidArgument);
  llama_memory_seq_cp(run.memory(), 0, 1, -1, -1);  // behind its back
  EXPECT_THROW(static_cast<void>(run.decode({{1, {1}}})), StateError);
}

/// A batch of llama.cpp's own, with `sequence` and position of each token.
struct RawBatch {
  llama_batch batch;
  explicit RawBatch(const std::vector<std::pair<llama_seq_id, llama_pos>>& tokens)
      : batch(llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1)) {
    for (const auto& [sequence, position] : tokens) {
      const std::int32_t t = batch.n_tokens++;
      batch.token[t] = 1;
      batch.pos[t] = position;
      batch.n_seq_id[t] = 1;
      batch.seq_id[t][0] = sequence;
      batch.logits[t] = 1;
    }
  }
  RawBatch(const RawBatch&) = delete;
  RawBatch& operator=(const RawBatch&) = delete;
  ~RawBatch() { llama_batch_free(batch); }
};

TEST_P(LlamaEvictor, RefusesBatchesThatItWouldCountWrong) {
  const Engine run("tova,budget=32,interval=8", {.sequences = 2});
  ASSERT_EQ(run.decode({{0, some_tokens(20)}}), 0);
  const auto expect_refused = [&](const std::vector<std::pair<llama_seq_id, llama_pos>>& tokens) {
    EXPECT_THROW(static_cast<void>(run.evictor->decode(RawBatch(tokens).batch)), InvalidArgument);
  };
  expect_refused({{0, 20}, {0, 20}});  // llama.cpp takes it
  expect_refused({{0, 20}, {0, 22}});
  expect_refused({{1, 0}, {0, 20}, {1, 2}});
  expect_refused({{2, 0}});
  expect_refused({{1000, 0}});  // llama.cpp ends the program that asks for its length
  expect_refused({{-1, 0}});
  expect_sound(run, 0);
  ASSERT_EQ(run.evictor->decode(RawBatch({{1, 0}, {0, 20}, {1, 1}, {0, 21}}).batch), 0);
  expect_sound(run, 0);
  expect_sound(run, 1);
}

TEST_P(LlamaEvictor, RefusesToGoOnBehindBatchesThatWentPastIt) {
  for (const bool known : {true, false}) {
    const Engine run("tova,budget=32,interval=8");
    if (known) ASSERT_EQ(run.decode({{0, some_tokens(20)}}), 0);
    std::vector<llama_token> ids = {1, 2};
    ASSERT_EQ(llama_decode(run.context.get(), llama_batch_get_one(ids.data(), 2)), 0);
    EXPECT_THROW(static_cast<void>(run.evictor->decode(llama_batch_get_one(ids.data(), 2))), StateError);
    ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, known ? 20 : -1, -1));
    ASSERT_EQ(run.evictor->decode(llama_batch_get_one(ids.data(), 2)), 0);
    expect_sound(run, 0);
  }
}

TEST_P(LlamaEvictor, RefusesABatchThatIsNotTheOneThatBegan) {
  for (const bool unified : {true, false}) {
    const Engine run("tova,budget=32,interval=8", {.cells = 1024, .sequences = 2, .unified = unified});
    const RawBatch begun({{0, 0}}), other({{0, 0}, {0, 1}, {1, 0}, {1, 1}});
    run.evictor->begin(begun.batch);
    const int status = llama_decode(run.context.get(), other.batch);
    EXPECT_THROW(run.evictor->end(status), StateError) << unified;
    EXPECT_THROW(static_cast<void>(run.decode({{0, {1}}})), StateError) << "no longer watched";
  }
}

TEST_P(LlamaEvictor, AttachesToOneContextAfterAnother) {
  Engine run("tova,budget=32,interval=8,recent=8,prefill=cut");
  EXPECT_THROW(run.evictor->attach(nullptr), InvalidArgument);
  run.evictor->prompt(0, 200);
  ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
  EXPECT_THROW(run.evictor->attach(run.context.get()), StateError);
  ASSERT_EQ(run.decode({{0, some_tokens(10)}}), 0);
  expect_sound(run, 0);  // a refused attach() changes nothing
  EXPECT_EQ(run.evictor->spent().cut, 0);

  llama_memory_clear(run.memory(), true);
  run.evictor->attach(run.context.get());
  ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 1) << "the announcement belonged to the sequence before";
  expect_sound(run, 0);

  llama_context_params params = params_of({.cells = 1024, .sequences = 2, .unified = false});
  const auto made = make_evictor(the_model(), params, "tova,budget=32,interval=8,recent=8,prefill=cut");
  Evictor& evictor = *made;
  for (int i = 0; i < 2; ++i) {
    const Context context(llama_init_from_model(the_model(), params));
    evictor.attach(context.get());
    ASSERT_EQ(evictor.decode(RawBatch({{0, 0}, {1, 0}}).batch), 0);
    EXPECT_EQ(evictor.cells(1).size(), 1u);
    if (i == 0) evictor.begin(RawBatch({{0, 1}}).batch);
    evictor.detach();
    EXPECT_THROW(evictor.end(0), StateError);
  }
}

TEST_P(LlamaEvictor, ARemovedSequenceMayAnnounceItsNextPrompt) {
  const Engine run("tova,budget=32,interval=8,recent=8,prefill=cut");
  run.evictor->prompt(0, 100);
  ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
  run.evictor->prompt(0, 80);
  ASSERT_EQ(run.decode({{0, some_tokens(40)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 0);
  ASSERT_EQ(run.decode({{0, some_tokens(40)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 1);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, -1, -1));
  ASSERT_EQ(run.decode({{0, some_tokens(50)}}), 0);
  EXPECT_EQ(run.evictor->spent().cut, 2) << "a prompt without an announcement ends with its first output";
}

/// In the first layer, keys depend on token and position alone: every row must be that of the position that the keeper
/// says it is, and with Positions::cache turned to its slot.
TEST_P(LlamaEvictor, MovesRowsWhole) {
  const std::vector<llama_token> text = some_tokens(231, 5);
  const auto feed = [&](const Engine& run) {
    ASSERT_EQ(run.decode({{0, {text.begin(), text.begin() + 130}}}), 0);
    for (std::size_t i = 130; i < text.size(); ++i) ASSERT_EQ(run.decode({{0, {text[i]}}}), 0);
  };
  const auto row = [](std::int32_t cell, std::int32_t head, std::int32_t dim) {
    return row_of(seen_cache.keys[0], cell, head, dim);
  };
  const Engine all("full", {.type = GGML_TYPE_F32, .watch = watch_cache});
  feed(all);
  const ModelSpec& spec = all.evictor->keeper().spec();
  std::vector<std::vector<float>> rows;
  for (const std::int32_t cell : all.evictor->cells(0))
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) rows.push_back(row(cell, h, spec.key_dim));
  for (const char* policy : {"keydiff,budget=64,interval=16,recent=8,prefill=cut",
                             "ams-tova,budget=64,interval=16,prefill=cut", "tova,budget=64,interval=16,share=union"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Engine cut(policy, {.type = GGML_TYPE_F32, .positions = positions, .watch = watch_cache});
      feed(cut);
      ASSERT_GT(cut.evictor->spent().cut, 2);
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::vector<std::int32_t> held = cut.positions(0, 0, h);
        for (std::size_t i = 0; i < held.size(); ++i) {
          std::vector<float> want = rows[static_cast<std::size_t>(held[i] * spec.kv_heads + h)];
          const std::vector<float> got = row(cut.evictor->cells(0)[i], h, spec.key_dim);
          const auto slot = static_cast<std::int32_t>(i);
          if (positions == Positions::cache)
            rerotate({.base = reinterpret_cast<std::byte*>(want.data())}, Dtype::f32, spec.key_dim,
                     cut.evictor->keeper().spec().rope_of(0), std::span(&held[i], 1), std::span(&slot, 1));
          for (std::size_t d = 0; d < want.size(); ++d)
            ASSERT_NEAR(got[d], want[d], positions == Positions::text ? 0 : 2e-4 * (1 + std::abs(want[d])))
                << policy << " head " << h << " slot " << i;
        }
      }
    }
}

/// What llama.cpp calls context shift, done by hand: sinks and the newest tokens stay, and gaps close.
TEST_P(LlamaEvictor, PositionsInTheCacheAreThoseOfAContextShift) {
  const std::vector<llama_token> text = some_tokens(300, 6);
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
    llama_model* model = the_model();
#ifdef KVKEEP_TEST_FAKE_LLAMA
    const Model long_heads = load("fake:long-heads");
    if (type == GGML_TYPE_Q8_0) model = long_heads.get();
#endif
    const Engine ours("streaming,budget=48,interval=16,sink=4,recent=44,share=union",
                      {.cells = 256, .type = type, .positions = Positions::cache}, model),
        plain("", {.cells = 256, .type = type}, model);
    const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
    for (const llama_token id : text) {
      ASSERT_EQ(ours.decode({{0, {id}}}), 0);
      ASSERT_EQ(plain.decode({{0, {id}}}), 0);
      const float *got = llama_get_logits_ith(ours.context.get(), -1),
                  *want = llama_get_logits_ith(plain.context.get(), -1);
      float largest = 0, difference = 0;
      for (std::int32_t i = 0; i < size; ++i) {
        largest = std::max(largest, std::abs(want[i]));
        difference = std::max(difference, std::abs(got[i] - want[i]));
      }
      // Quantised caches are left to llama.cpp's own rotation. Else rows also change cells, and quantised products of
      // the real model make sums in another order visible.
      ASSERT_LE(difference, (type == GGML_TYPE_Q8_0 ? 0.0F : rounding()) * largest);
      const llama_pos held = llama_memory_seq_pos_max(plain.memory(), 0) + 1;
      if (held < 64) continue;
      ASSERT_TRUE(llama_memory_seq_rm(plain.memory(), 0, 4, 4 + held - 48));
      llama_memory_seq_add(plain.memory(), 0, 4 + held - 48, -1, 48 - held);
    }
    EXPECT_EQ(ours.evictor->spent().cut, (300 - 48) / 16);
    expect_sound(ours, 0);
    EXPECT_LT(ours.evictor->next_position(0), 64);
    EXPECT_EQ(ours.evictor->keeper().logical_length(0), 300);
  }
}

/// Bytes of a sequence's state, as llama.cpp would save it: so many for none, and so many per cell.
struct StateSize {
  std::size_t none = 0, cell = 0;
  explicit StateSize(const Setting& setting) {
    const Engine plain("", setting);
    EXPECT_EQ(plain.decode({{0, some_tokens(10)}}), 0);
    const std::size_t ten = llama_state_seq_get_size(plain.context.get(), 0);
    EXPECT_EQ(plain.decode({{0, some_tokens(10)}}), 0);
    cell = (llama_state_seq_get_size(plain.context.get(), 0) - ten) / 10;
    none = ten - 10 * cell;
  }
  void check(const Engine& run, llama_seq_id sequence) const {
    ASSERT_EQ(llama_state_seq_get_size(run.context.get(), sequence), none + run.evictor->cells(sequence).size() * cell);
  }
};

/// Sequences begin, grow, roll back, are copied and end at random; after each operation both sides agree.
TEST_P(LlamaEvictor, AgreesWithLlamaCppThroughRandomOperations) {
  const int operations = kOnGpu ? 1500 : exact() ? 10000 : 300;
  std::int64_t events = 0;
  for (const auto& [unified, positions] :
       {std::pair(true, Positions::text), {false, Positions::text}, {false, Positions::cache}}) {
    const Setting setting{.cells = 1024, .sequences = 6, .unified = unified, .positions = positions};
    const Engine run(std::string("knorm,budget=24,interval=8,recent=4,prefill=cut") + (unified ? ",share=union" : ""),
                     setting);
    const StateSize state(setting);
    std::mt19937 random(unified ? 1 : 2);
    const auto up_to = [&](std::int64_t most) {
      return static_cast<std::int64_t>(random() % static_cast<unsigned>(most + 1));
    };
    int done = 0;
    for (int i = 0; done < (operations + 2) / 3; ++i) {
      const auto s = static_cast<llama_seq_id>(up_to(5));
      const llama_pos length = llama_memory_seq_pos_max(run.memory(), s) + 1;
      switch (up_to(7)) {
        case 0:
          if (length == 0) continue;
          ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, -1, -1));
          break;
        case 1: {
          if (length == 0 || run.evictor->keeper().tokens_to_event(s) < 3) continue;
          // Tokens after the last event may be taken back.
          ASSERT_EQ(run.decode({{s, some_tokens(2, static_cast<unsigned>(i)), false}}), 0);
          ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, length + 1, -1));
          break;
        }
        case 2: {
          const auto to = static_cast<llama_seq_id>(up_to(5));
          if (length == 0 || to == s || llama_memory_seq_pos_max(run.memory(), to) >= 0) continue;
          if (static_cast<std::int64_t>(run.evictor->cells(s).size()) != run.evictor->keeper().logical_length(s))
            continue;
          run.evictor->copy(s, to, unified ? static_cast<std::int32_t>(1 + up_to(length - 1)) : length);
          break;
        }
        default: {
          std::vector<Engine::Tokens> batch;
          for (llama_seq_id other = s; other < 6; other += 1 + static_cast<llama_seq_id>(up_to(2))) {
            const bool fresh = llama_memory_seq_pos_max(run.memory(), other) < 0;
            batch.push_back(
                {other,
                 some_tokens(static_cast<std::size_t>(fresh ? 1 + up_to(20) : 1 + up_to(1)), static_cast<unsigned>(i)),
                 up_to(3) > 0});
          }
          ASSERT_EQ(run.decode(batch), 0);
          for (const Engine::Tokens& one : batch) {
            expect_sound(run, one.sequence);
            state.check(run, one.sequence);
            if (HasFatalFailure()) return;
          }
        }
      }
      ++done;
    }
    events += run.evictor->spent().cut;
  }
  EXPECT_GE(events, exact() ? operations / 10 : 10);  // few sequences grow long in few operations
  RecordProperty("events", static_cast<int>(events));
}

/// Fifty thousand tokens in a context of 2048 cells; fewer where a token takes its time.
TEST_P(LlamaEvictor, AnEndlessTextLosesNoTokenAtTheEdge) {
  const bool tiny = model_name == "tiny";
  const std::int64_t tokens = tiny ? 50000 : exact() ? 3000 : 300, budget = tiny ? 1024 : 64, interval = budget / 4;
  const Setting setting{.cells = tiny ? 2048U : 256U, .positions = Positions::cache};
  const Engine run("tova,recent=32,budget=" + std::to_string(budget) + ",interval=" + std::to_string(interval),
                   setting);
  const StateSize state(setting);
  const std::vector<llama_token> text = some_tokens(static_cast<std::size_t>(tokens));
  std::int64_t events = 0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    ASSERT_EQ(run.decode({{0, {text[static_cast<std::size_t>(i)]}}}), 0);
    ASSERT_EQ(run.evictor->keeper().logical_length(0), i + 1);
    ASSERT_LT(static_cast<std::int64_t>(run.evictor->cells(0).size()), budget + interval);
    if (run.evictor->spent().cut == events) continue;
    ++events;
    expect_sound(run, 0);
    state.check(run, 0);
    ASSERT_LE(run.evictor->next_position(0), budget + interval);
    ASSERT_LE(std::ranges::max(run.evictor->cells(0)), budget + interval);
    for (const std::int32_t l : run.evictor->keeper().spec().full_layers())
      for (std::int32_t h = 0; h < run.evictor->keeper().spec().kv_heads; ++h) {
        const std::vector<std::int32_t> held = run.positions(0, l, h);
        for (std::int32_t back = 0; back < 32; ++back)
          ASSERT_EQ(held[held.size() - 1 - static_cast<std::size_t>(back)], i - back) << l << ' ' << h;
      }
  }
  EXPECT_EQ(events, (tokens - budget) / interval);
}

TEST_P(LlamaEvictor, AFullCacheChangesNothing) {
  const Engine run("tova,budget=400,interval=8,prefill=cut", {.cells = 256});
  ASSERT_EQ(run.decode({{0, some_tokens(200)}}), 0);
  ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 1);
  expect_sound(run, 0);
  EXPECT_EQ(run.evictor->keeper().logical_length(0), 200);
  ASSERT_EQ(run.decode({{0, some_tokens(56)}}), 0);
  ASSERT_EQ(run.decode({{0, {1}}}), 1);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, 100, -1));
  ASSERT_EQ(run.decode({{0, some_tokens(10)}}), 0);
  expect_sound(run, 0);
  EXPECT_EQ(run.evictor->keeper().logical_length(0), 110);
}

TEST_P(LlamaEvictor, GivesCellsBack) {
  for (const char* policy :
       {"tova,budget=32,interval=8,recent=8,prefill=cut", "keydiff,budget=32,interval=8,share=union"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Setting setting{.positions = positions};
      const StateSize state(setting);
      const Engine run(policy, setting);
      ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
      for (int i = 0; i < 40; ++i) {
        ASSERT_EQ(run.decode({{0, {5 + i}}}), 0);
        state.check(run, 0);
      }
    }
}

int calls_left = -1;  // until llama.cpp is told to stop; below 0: never

TEST_P(LlamaEvictor, TakesBackWhatABrokenOffDecodeLeft) {
  const std::vector<llama_token> text = some_tokens(120);
  const Setting setting{
      .type = GGML_TYPE_F32, .micro_batch = 16, .stop = [](void*) { return calls_left >= 0 && calls_left-- == 0; }};
  const std::string policy = "tova,budget=32,interval=8,recent=8,prefill=cut";
  const Engine whole(policy, setting);
  ASSERT_EQ(whole.decode({{0, {text.begin(), text.begin() + 80}}}), 0);
  ASSERT_EQ(whole.decode({{0, {text.begin() + 80, text.end()}}}), 0);
  int broken = 0;
  for (const int calls : {0, 1, 2, 3, 5, 8, 13, 40, 200, 1000, 3000}) {
    const Engine run(policy, setting);
    calls_left = calls;
    const int status = run.decode({{0, {text.begin(), text.begin() + 80}}});
    calls_left = -1;
    broken += status == 2 ? 1 : 0;
    const llama_pos held = llama_memory_seq_pos_max(run.memory(), 0) + 1;
    if (held > 0) expect_sound(run, 0);
    if (status != 0) ASSERT_EQ(run.decode({{0, {text.begin() + held, text.begin() + 80}}}), 0);
    ASSERT_EQ(run.decode({{0, {text.begin() + 80, text.end()}}}), 0);
    expect_sound(run, 0);
    EXPECT_EQ(run.evictor->spent().cut, whole.evictor->spent().cut);
    if (exact()) EXPECT_EQ(run.positions(0, 1, 1), whole.positions(0, 1, 1)) << calls;
  }
  EXPECT_GT(broken, 3);
}

#ifndef KVKEEP_TEST_FAKE_LLAMA

/// By this name, with the GPU's number behind it, ggml's buffers of a GPU are known to be those of an accelerator.
TEST_P(LlamaEvictor, CallsAGpuAsGgmlDoes) {
  EXPECT_EQ(ggml_name({.kind = Device::Kind::cuda, .index = 3}), GGML_CUDA_NAME "3");
}

#endif

#ifdef KVKEEP_TEST_FAKE_LLAMA

TEST_P(LlamaEvictor, ReadsRotatedQueriesOfEveryKindOfRoPE) {
  for (const char* path :
       {"fake:neox", "fake:norope", "fake:partial", "fake:linear", "fake:long-heads", "fake:scale"}) {
    const Model model = load(path);
    for (const char* policy : {"tova", "expected"}) {
      const Engine run(std::string(policy) + ",budget=40,interval=16,recent=8,prefill=cut", {}, model.get());
      ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 0) << path;
      EXPECT_EQ(run.evictor->spent().cut, 1) << path;
    }
  }
}

TEST_P(LlamaEvictor, LearnsAttentionFromTheGraph) {
  const Model plain = load("fake:llama"), scaled = load("fake:scale"), capped = load("fake:softcap"),
              sinks = load("fake:sinks");
  const auto spec = [](const Model& model) { return facts_of(model.get(), params_of({})).spec; };
  EXPECT_FLOAT_EQ(static_cast<float>(spec(plain).scale()), 1 / std::sqrt(32.0F));
  EXPECT_EQ(spec(plain).logit_cap, 0);
  EXPECT_TRUE(spec(plain).layers[0].sinks.empty());
  EXPECT_FLOAT_EQ(static_cast<float>(spec(scaled).scale()), 0.2F);
  EXPECT_EQ(spec(capped).logit_cap, 50);
  EXPECT_EQ(spec(sinks).layers[1].sinks.size(), 4U);
}

/// Caps of two kinds of nodes: without flash attention the stand-in's are one, of which nothing is known.
TEST_P(LlamaEvictor, RefusesAGraphThatIsNotTheOneItSaw) {
  const Model model = load("fake:softcap");
  const Engine run("tova,budget=32,share=union", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, model.get());
  EXPECT_THROW(static_cast<void>(run.decode({{0, some_tokens(20)}})), Unsupported);
  EXPECT_THROW(static_cast<void>(run.decode({{0, some_tokens(20)}})), StateError) << "no longer watched";
}

TEST_P(LlamaEvictor, RefusesModelsWhoseCacheIsOfAnotherKind) {
  for (const auto& [path, why] : std::map<std::string, std::string>{{"fake:recurrent", "states alone"},
                                                                    {"fake:encoder", "encoder"},
                                                                    {"fake:diffusion", "diffusion"},
                                                                    {"fake:alibi", "bias by distance"}}) {
    const Model model = load(path);
    llama_context_params params = params_of({});
    try {
      const Evictor evictor(model.get(), params, make_policy("tova,budget=32"));
      ADD_FAILURE() << path;
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
    EXPECT_EQ(params.cb_eval, nullptr) << path;
  }
}

TEST_P(LlamaEvictor, ACacheElsewhereKeepsOneSet) {
  if (kOnGpu) GTEST_SKIP() << "it has an accelerator";
  const Model model = load("fake:device");
  const std::string policy = "tova,budget=40,interval=16,recent=8,prefill=cut";
  EXPECT_THROW(Engine(policy, {}, model.get()).generate(some_tokens(80), 1), Unsupported);
  for (const Positions positions : {Positions::text, Positions::cache}) {
    const Engine there(policy + ",share=union", {.positions = positions}, model.get()),
        here(policy + ",share=union", {.positions = positions});
    const std::vector<llama_token> text = some_tokens(160);
    for (const Engine* run : {&there, &here}) {
      ASSERT_EQ(run->decode({{0, {text.begin(), text.begin() + 80}}}), 0);
      for (std::size_t i = 80; i < text.size(); ++i) ASSERT_EQ(run->decode({{0, {text[i]}}}), 0);
      expect_sound(*run, 0);
      EXPECT_EQ(run->evictor->spent().cut, 6);
    }
    EXPECT_EQ(there.positions(0, 1, 1), here.positions(0, 1, 1));
  }
}

#endif

#ifdef KVKEEP_TEST_FAKE_LLAMA
INSTANTIATE_TEST_SUITE_P(, LlamaEvictor, testing::Values("fake"), [](const auto& model) { return model.param; });
#else
INSTANTIATE_TEST_SUITE_P(Tiny, LlamaEvictor, testing::Values("tiny"), [](const auto& model) { return model.param; });
INSTANTIATE_TEST_SUITE_P(SmolLM2, LlamaEvictor, testing::Values("smollm2"),
                         [](const auto& model) { return model.param; });
#endif

TEST_P(LlamaEvictor, EventsRunOnAsManyThreadsAsTheContext) {
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const auto more = [&] {
    llama_context_params params = params_of({});
    params.n_threads = 3;
    const auto before = threads();
    const Evictor evictor(the_model(), params, make_policy("tova,budget=40"));
    return threads() - before;
  };
  more();  // llama.cpp's own threads come here, and stay
  EXPECT_EQ(more(), 2);
}

}  // namespace
}  // namespace kvkeep::llama
