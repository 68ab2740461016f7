// SPDX-License-Identifier: Apache-2.0
// Under an accelerator the cache stays on its GPU. The other tests of the adapter run there as well; these compare with
// the host, and say what is refused.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// The same context on the host and on the GPU.
struct Pair {
  Model model = load("fake:llama", false);
  Engine here, there;
  explicit Pair(const std::string& policy, const Setting& setting = {})
      : here(policy, on_host(setting), model.get()), there(policy, setting) {}

  static Setting on_host(Setting setting) {
    setting.accelerated = false;
    return setting;
  }
  [[nodiscard]] bool agree(llama_seq_id sequence) const {
    const ModelSpec& spec = here.evictor->keeper().spec();
    for (const std::int32_t l : spec.full_layers())
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        if (here.positions(sequence, l, h) != there.positions(sequence, l, h)) return false;
    return true;
  }
};

TEST_P(LlamaEvictor, AGpuKeepsTheSlotsAndGivesTheTextOfTheHost) {
  struct Way {
    const char* share;
    llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    Positions positions = Positions::text;
  };
  const std::vector<Way> ways{{""},
                              {",share=per_head"},
                              {",share=union"},
                              {",share=union_mean"},
                              {",share=union", LLAMA_FLASH_ATTN_TYPE_DISABLED},
                              {",share=union", LLAMA_FLASH_ATTN_TYPE_ENABLED, Positions::cache}};
  for (const char* policy :
       {"streaming", "random", "knorm", "keydiff", "tova", "snapkv", "rkv", "h2o", "expected", "ams-tova"})
    for (const Way& way : ways) {
      const bool none = way.share[0] == '\0';
      if ((std::string(policy) == "ams-tova" && !none) ||
          (std::string(policy) == "expected" &&  // reads values, and turns queries
           (way.positions == Positions::cache || way.flash == LLAMA_FLASH_ATTN_TYPE_DISABLED)))
        continue;
      SCOPED_TRACE(policy + std::string(way.share));
      const Pair pair(std::string(policy) + ",budget=40,interval=16,recent=8,prefill=cut" + way.share,
                      {.type = GGML_TYPE_F16, .flash = way.flash, .positions = way.positions});
      const std::vector<llama_token> prompt = some_tokens(80);
      EXPECT_EQ(pair.there.generate(prompt, 40), pair.here.generate(prompt, 40));
      EXPECT_EQ(pair.there.evictor->spent().cut, pair.here.evictor->spent().cut);
      EXPECT_GE(pair.there.evictor->spent().cut, 3);
      EXPECT_TRUE(pair.agree(0));
      expect_sound(pair.there, 0);
    }
}

/// An event under `union` moves no key over the bus, and neither do rows of heads.
TEST_P(LlamaEvictor, KeysOnAGpuStayThere) {
  static_cast<void>(fake_llama_fetched());
  for (const char* share : {"", ",share=union"})
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16}) {
      const Engine run("tova,budget=40,interval=16,prefill=cut" + std::string(share), {.type = type});
      static_cast<void>(run.generate(some_tokens(80), 40));
      EXPECT_EQ(run.evictor->spent().cut, 3);
      EXPECT_EQ(fake_llama_fetched(), 0U) << share << ' ' << ggml_type_name(type);
    }
  llama_context_params params = params_of({});
  Evictor copies(the_model(), params, make_policy("keydiff,budget=40,prefill=cut,share=union"));
  const Context context(llama_init_from_model(the_model(), params));
  copies.attach(context.get());
  std::vector<llama_token> text = some_tokens(80);
  ASSERT_EQ(copies.decode(llama_batch_get_one(text.data(), 80)), 0);
  EXPECT_GT(fake_llama_fetched(), 80U * 2 * 32 * 2) << "without an accelerator they are copied";
}

TEST_P(LlamaEvictor, AGpuFollowsRandomOperationsAsTheHostDoes) {
  for (const bool unified : {true, false}) {
    const Pair pair("tova,budget=24,interval=8,recent=4,prefill=cut" + std::string(unified ? ",share=union" : ""),
                    {.cells = 1024, .sequences = 4, .unified = unified});
    std::mt19937 random(unified ? 3 : 4);
    const auto up_to = [&](unsigned most) { return random() % (most + 1); };
    const auto each = [&](const auto& f) {
      f(pair.here);
      f(pair.there);
    };
    for (int i = 0; i < 300; ++i) {
      const auto s = static_cast<llama_seq_id>(up_to(3)), other = static_cast<llama_seq_id>(up_to(3));
      const llama_pos length = llama_memory_seq_pos_max(pair.here.memory(), s) + 1;
      const unsigned what = up_to(9);
      if (what == 0 && length > 0) {
        each([&](const Engine& run) { ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, -1, -1)); });
      } else if (what == 1 && length > 0 && llama_memory_seq_pos_max(pair.here.memory(), other) < 0 &&
                 std::ssize(pair.here.evictor->cells(s)) == length) {
        const auto tokens = unified ? static_cast<llama_pos>(1 + up_to(static_cast<unsigned>(length - 1))) : length;
        each([&](const Engine& run) { run.evictor->copy(s, other, tokens); });
      } else if (what == 2 && length > 0 && pair.here.evictor->least_length(s) < length) {
        each([&](const Engine& run) { ASSERT_TRUE(run.evictor->go_back(s, length - 1)); });
      } else {
        std::vector<Engine::Tokens> batch;
        for (llama_seq_id one = s; one < 4; one += 1 + static_cast<llama_seq_id>(up_to(1))) {
          const bool fresh = llama_memory_seq_pos_max(pair.here.memory(), one) < 0;
          batch.push_back({one, some_tokens(fresh ? 1 + up_to(40) : 1 + up_to(1), static_cast<unsigned>(i))});
        }
        each([&](const Engine& run) { ASSERT_EQ(run.decode(batch), 0); });
        expect_alike(logits_of(pair.there, the_model()), logits_of(pair.here, the_model()));
        for (const Engine::Tokens& one : batch) {
          ASSERT_TRUE(pair.agree(one.sequence)) << i << " sequence " << one.sequence;
          expect_sound(pair.there, one.sequence);
        }
      }
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(pair.there.evictor->spent().cut, pair.here.evictor->spent().cut);
    EXPECT_GT(pair.there.evictor->spent().cut, 20);
  }
}

TEST_P(LlamaEvictor, SaysWhatAnAcceleratorCannotServe) {
  const auto why = [](const std::string& policy, llama_context_params params, Positions positions = Positions::text,
                      llama_model* model = the_model()) -> std::string {
    try {
      const Evictor evictor(model, params, make_policy(policy), positions, cuda::accelerator(0));
    } catch (const Error& error) {
      EXPECT_EQ(params.cb_eval, nullptr);
      return error.what();
    }
    return "nothing";
  };
  const Model host = load("fake:llama", false);
  llama_context_params there = params_of({}), kept_back = there, quantised = there;
  kept_back.offload_kqv = false;
  quantised.type_k = quantised.type_v = GGML_TYPE_Q8_0;
  EXPECT_EQ(why("tova,budget=40", there), "nothing");
  EXPECT_EQ(why("tova,budget=40,share=union", there, Positions::cache), "nothing");
  for (const auto& [said, part] : {std::pair(why("tova,budget=40", kept_back), "layer 0 into CPU"),
                                   {why("tova,budget=40", there, Positions::text, host.get()), "layer 0 into CPU"},
                                   {why("tova,budget=40,share=union", quantised), "the cache is q8_0"},
                                   {why("tova,budget=40", there, Positions::cache), "keys of its own to turn"}})
    EXPECT_NE(said.find(part), std::string::npos) << said;
}

/// The constructor has seen a context on the GPU; this one is not.
TEST_P(LlamaEvictor, RefusesAContextWhoseCacheIsNotOnTheAccelerator) {
  llama_context_params params = params_of({});
  Evictor evictor(the_model(), params, make_policy("tova,budget=40,prefill=cut"), Positions::text,
                  cuda::accelerator(0));
  params.offload_kqv = false;
  const Context context(llama_init_from_model(the_model(), params));
  evictor.attach(context.get());
  std::vector<llama_token> text = some_tokens(80);
  try {
    static_cast<void>(evictor.decode(llama_batch_get_one(text.data(), 80)));
    ADD_FAILURE() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("in CPU"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(evictor.attached());
}

}  // namespace
}  // namespace kvkeep::llama
