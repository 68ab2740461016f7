// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model of a few layers with random weights in F32, as a file that llama.cpp loads: tests over the real thing need no
// download, run in milliseconds, and its products differ with the size of a batch by roundings alone.

#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvkeep::llama {

struct TinyModel {
  std::string architecture = "llama";
  std::uint32_t layers = 2;
  std::vector<float> rope_factors = {};  ///< [32] by which frequencies of RoPE are divided; empty: none
  bool long_only = false;                ///< they hold beyond 64 tokens (LongRoPE), and others below
  float yarn = 0;                        ///< factor of YaRN over 64 tokens; 0: none
};

inline void write_tiny_model(const std::string& path, const TinyModel& o = {}) {
  const std::uint32_t kLayers = o.layers;
  constexpr std::uint32_t kHeads = 4, kKvHeads = 2, kDim = 64, kEmbd = kHeads * kDim, kForward = 64, kVocabulary = 256;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_empty(), gguf_free);
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> memory(
      ggml_init({.mem_size = 32u << 20, .mem_buffer = nullptr, .no_alloc = false}), ggml_free);
  const auto own = [&](const char* key) { return o.architecture + "." + key; };
  gguf_set_val_str(file.get(), "general.architecture", o.architecture.c_str());
  gguf_set_val_str(file.get(), "tokenizer.ggml.model", "none");
  for (const auto& [key, value] :
       std::initializer_list<std::pair<const char*, std::uint32_t>>{{"vocab_size", kVocabulary},
                                                                    {"context_length", 4096},
                                                                    {"embedding_length", kEmbd},
                                                                    {"block_count", kLayers},
                                                                    {"feed_forward_length", kForward},
                                                                    {"attention.head_count", kHeads},
                                                                    {"attention.head_count_kv", kKvHeads},
                                                                    {"rope.dimension_count", kDim}})
    gguf_set_val_u32(file.get(), own(key).c_str(), value);
  gguf_set_val_f32(file.get(), own("attention.layer_norm_rms_epsilon").c_str(), 1e-5F);
  gguf_set_val_f32(file.get(), own("rope.freq_base").c_str(), 10000.0F);
  if (o.yarn > 0) {
    gguf_set_val_str(file.get(), own("rope.scaling.type").c_str(), "yarn");
    gguf_set_val_f32(file.get(), own("rope.scaling.factor").c_str(), o.yarn);
    gguf_set_val_u32(file.get(), own("rope.scaling.original_context_length").c_str(), 64);
  }
  if (o.long_only) {
    gguf_set_val_str(file.get(), own("rope.scaling.type").c_str(), "longrope");
    gguf_set_val_u32(file.get(), own("rope.scaling.original_context_length").c_str(), 64);
  }
  if (o.architecture == "qwen2vl") {  // dimensions of positions
    const std::int32_t sections[]{8, 12, 12, 0};
    gguf_set_arr_data(file.get(), own("rope.dimension_sections").c_str(), GGUF_TYPE_INT32, sections, 4);
  }
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, std::int64_t in, std::int64_t out, double spread) {
    ggml_tensor* t = out == 0 ? ggml_new_tensor_1d(memory.get(), GGML_TYPE_F32, in)
                              : ggml_new_tensor_2d(memory.get(), GGML_TYPE_F32, in, out);
    ggml_set_name(t, (name + ".weight").c_str());
    // Sums of uniform numbers, so that every standard library writes the same file.
    for (std::int64_t i = 0; i < ggml_nelements(t); ++i) {
      const double a = random() * 0x1p-32, b = random() * 0x1p-32, c = random() * 0x1p-32;
      static_cast<float*>(t->data)[i] = out == 0 ? 1.0F : static_cast<float>(spread * 2 * (a + b + c - 1.5));
    }
    gguf_add_tensor(file.get(), t);
  };
  const double one = 1 / std::sqrt(double{kEmbd});
  add("token_embd", kEmbd, kVocabulary, 1);
  add("output_norm", kEmbd, 0, 0);
  add("output", kEmbd, kVocabulary, one);
  const auto add_factors = [&](const char* name, const std::vector<float>& factors) {
    ggml_tensor* t = ggml_new_tensor_1d(memory.get(), GGML_TYPE_F32, static_cast<std::int64_t>(factors.size()));
    ggml_set_name(t, name);
    std::ranges::copy(factors, static_cast<float*>(t->data));
    gguf_add_tensor(file.get(), t);
  };
  if (!o.rope_factors.empty())
    add_factors(o.long_only ? "rope_factors_long.weight" : "rope_freqs.weight", o.rope_factors);
  if (o.long_only) add_factors("rope_factors_short.weight", std::vector<float>(o.rope_factors.size(), 2.0F));
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    add(block + "attn_norm", kEmbd, 0, 0);
    add(block + "attn_q", kEmbd, kHeads * kDim, 1.5 * one);
    add(block + "attn_k", kEmbd, kKvHeads * kDim, 1.5 * one);
    add(block + "attn_v", kEmbd, kKvHeads * kDim, one);
    add(block + "attn_output", kHeads * kDim, kEmbd, one);
    add(block + "ffn_norm", kEmbd, 0, 0);
    add(block + "ffn_gate", kEmbd, kForward, one);
    add(block + "ffn_up", kEmbd, kForward, one);
    add(block + "ffn_down", kForward, kEmbd, one);
  }
  gguf_write_to_file(file.get(), path.c_str(), false);
}

}  // namespace kvkeep::llama
