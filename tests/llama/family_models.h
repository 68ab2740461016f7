// SPDX-License-Identifier: Apache-2.0
#pragma once
// Models of every architecture of llama.cpp, from metadata alone: a few layers, random weights in F32.

#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace kvkeep::llama::family {

/// Names under which llama.cpp knows architectures, as model files state them.
[[nodiscard]] inline std::vector<std::string> architectures() {
  std::istringstream names(
      "afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon "
      "chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr "
      "deepseek32 deepseek4 dots1 dots3note dream ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon "
      "falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite "
      "granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe "
      "hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba kimi-k3 kimi-linear laguna lfm2 lfm2moe llada "
      "llada-moe llama llama-embed llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 "
      "minimax-m2 minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe "
      "olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm "
      "pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl "
      "qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm "
      "starcoder starcoder2 step35 t5 talkie xverse");
  return {std::istream_iterator<std::string>(names), {}};
}

[[nodiscard]] inline bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

/// What the metadata of an architecture say, beyond what all of them say alike.
struct Shape {
  std::uint32_t layers = 6, heads = 4, kv_heads = 2, dim = 64, ff = 192, vocabulary = 128, window = 16;
  bool experts = false, latent = false, states = false;
};

[[nodiscard]] inline Shape shape_of(std::string_view arch) {
  Shape s;
  s.experts = one_of(
      arch, {"llama4",      "cohere2moe",  "grok",         "qwen2moe",   "qwen3moe", "qwen3next",    "qwen3vlmoe",
             "qwen35moe",   "qwen4exp",    "phimoe",       "dbrx",       "olmoe",    "arctic",       "deepseek",
             "deepseek2",   "deepseek32",  "dots3note",    "deepseek4",  "glm4moe",  "glm-dsa",      "exaone-moe",
             "bailingmoe",  "bailingmoe2", "bailingmoe3",  "dots1",      "afmoe",    "ernie4_5",     "ernie4_5-moe",
             "hunyuan-moe", "hy_v3",       "hy_v4",        "gpt-oss",    "lfm2moe",  "smallthinker", "llada-moe",
             "grovemoe",    "minimax-01",  "minimax-m2",   "minimax-m3", "rnd1",     "paddleocr",    "mimo2",
             "kimi-linear", "kimi-k3",     "glm5-next",    "step35",     "mistral4", "mellum",       "laguna",
             "granitemoe",  "maple",       "deepseek2-ocr"});
  s.latent = one_of(arch, {"deepseek2", "deepseek32", "glm-dsa", "dots3note", "kimi-linear", "bailingmoe3", "kimi-k3",
                           "glm5-next", "mistral4", "hy_v4"});
  if (s.latent) s.kv_heads = 1;
  // Those that say by layer how many KV heads there are: none where a state is.
  s.states = one_of(arch, {"plamo2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid", "lfm2", "lfm2moe",
                           "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"});
  if (one_of(arch, {"gpt2", "starcoder", "bloom", "mpt", "jais", "phi2", "codeshell", "refact", "gptneox", "falcon",
                    "qwen", "minicpm3", "plm", "baichuan", "olmoe", "dots1", "deepseek2-ocr"}))
    s.kv_heads = s.heads;
  if (arch == "refact" || arch == "starcoder") s.kv_heads = 1;
  if (arch == "gemma3n") s.layers = 22;  // the last two read caches of others
  // llama.cpp knows the windows of these two by itself, 8192 and 4096 tokens: less is computed.
  if (arch == "llama4") s.layers = 4, s.dim = 32;
  if (arch == "smallthinker") s.layers = 5, s.dim = 32;
  if (arch == "lfm2" || arch == "lfm2moe") s.window = 0;  // those of which it is told slide in all layers
  if (arch == "qwen3tts") s.vocabulary = 3072;
  if (arch == "chameleon") s.vocabulary = 10240;
  if (arch == "deepseek4") s.layers = 4, s.heads = 8;
  return s;
}

class Metadata {
 public:
  explicit Metadata(std::string arch) : arch_(std::move(arch)), file_(gguf_init_empty(), gguf_free) {
    gguf_set_val_str(file_.get(), "general.architecture", arch_.c_str());
  }
  void number(const char* key, std::uint32_t value) { gguf_set_val_u32(file_.get(), own(key).c_str(), value); }
  void real(const char* key, float value) { gguf_set_val_f32(file_.get(), own(key).c_str(), value); }
  void flag(const char* key, bool value) { gguf_set_val_bool(file_.get(), own(key).c_str(), value); }
  void words(const char* key, const char* value) { gguf_set_val_str(file_.get(), key, value); }
  void real_of_file(const char* key, float value) { gguf_set_val_f32(file_.get(), key, value); }
  void numbers(const char* key, const std::vector<std::uint32_t>& all) {
    gguf_set_arr_data(file_.get(), own(key).c_str(), GGUF_TYPE_UINT32, all.data(), all.size());
  }
  void reals(const char* key, const std::vector<float>& all) {
    gguf_set_arr_data(file_.get(), own(key).c_str(), GGUF_TYPE_FLOAT32, all.data(), all.size());
  }
  [[nodiscard]] gguf_context* get() const { return file_.get(); }

 private:
  [[nodiscard]] std::string own(const char* key) const { return arch_ + "." + key; }
  std::string arch_;
  std::unique_ptr<gguf_context, decltype(&gguf_free)> file_;
};

/// f(layer) for each layer.
[[nodiscard]] inline std::vector<std::uint32_t> by_layer(const Shape& s,
                                                         const std::function<std::uint32_t(std::uint32_t)>& f) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t l = 0; l < s.layers; ++l) all.push_back(f(l));
  return all;
}

inline void describe_attention(Metadata& m, std::string_view arch, const Shape& s) {
  const bool nemotron = arch.starts_with("nemotron_h");
  const auto has_rows = [&](std::uint32_t l) { return nemotron ? l % 3 == 1 : l % 3 == 2; };
  if (s.states) {
    const auto heads = [&](std::uint32_t count) {
      return by_layer(s, [&](std::uint32_t l) { return has_rows(l) ? count : 0; });
    };
    if (arch == "glm5-next" || nemotron)
      m.number("attention.head_count", s.heads);
    else
      m.numbers("attention.head_count", by_layer(s, [&](std::uint32_t) { return s.heads; }));
    m.numbers("attention.head_count_kv", heads(s.kv_heads));
  } else if (arch == "deci" || arch == "openelm") {
    m.numbers("attention.head_count", by_layer(s, [&](std::uint32_t) { return s.heads; }));
    m.numbers("attention.head_count_kv", by_layer(s, [&](std::uint32_t l) { return l % 2 == 0 ? 2U : 4U; }));
  } else {
    m.number("attention.head_count", s.heads);
    m.number("attention.head_count_kv", arch == "deepseek4" ? 1 : s.kv_heads);
  }
  if (nemotron)
    m.numbers("feed_forward_length", by_layer(s, [&](std::uint32_t l) { return l % 3 == 2 ? s.ff : 0; }));
  else if (arch == "deci" || arch == "openelm")
    m.numbers("feed_forward_length", by_layer(s, [&](std::uint32_t) { return s.ff; }));
  else
    m.number("feed_forward_length", s.ff);
  if (arch == "dots3note") {
    m.number("attention.kv_lora_rank_swa", 64);
    m.number("attention.key_length_swa", 80);
    m.number("attention.value_length_swa", 64);
    m.number("attention.key_length_mla_swa", 48);
    m.number("attention.value_length_mla_swa", 32);
    m.real("rope.freq_base_swa", 10000);
  }
  if (s.latent) {
    const bool bare = arch == "glm5-next";
    m.number("attention.key_length", bare ? 64 : 80);
    m.number("attention.value_length", 64);
    m.number("rope.dimension_count", bare ? 0 : 16);
    m.number("attention.key_length_mla", 48);
    m.number("attention.value_length_mla", 32);
  } else if (arch == "deepseek4") {
    m.number("attention.key_length", s.dim);
    m.number("attention.value_length", s.dim);
    m.number("rope.dimension_count", s.dim / 2);
  } else if (arch == "minimax-m3") {
    m.number("rope.dimension_count", s.dim);
  } else if (arch == "gemma4") {
    m.number("attention.key_length", 2 * s.dim);
    m.number("attention.value_length", 2 * s.dim);
    m.number("attention.key_length_swa", s.dim);
    m.number("attention.value_length_swa", s.dim);
    m.number("attention.shared_kv_layers", 0);
    m.number("embedding_length_per_layer_input", 128);
    m.number("rope.dimension_count", 2 * s.dim);
    m.number("rope.dimension_count_swa", s.dim);
    m.real("rope.freq_base_swa", 10000);
  } else if (arch == "plm") {
    m.number("rope.dimension_count", 16);
  } else if (arch == "step35" || arch == "mimo2") {
    m.number("attention.key_length", s.dim);
    m.number("attention.value_length", s.dim);
  }
  m.number("attention.sliding_window", s.window);
  if (arch == "gemma3") m.real("rope.freq_base", 1e6F);  // of full layers; 10,000 of those that slide
  if (one_of(arch, {"cohere2moe", "mimo2", "step35", "spark2_5", "muse-glimmer", "granite_swa", "dots3note", "maple",
                    "gemma4"}))
    m.numbers("attention.sliding_window_pattern", by_layer(s, [](std::uint32_t l) { return l % 3 == 2 ? 0U : 1U; }));
  else
    m.number("attention.sliding_window_pattern", arch == "gemma3n" ? 5 : 3);
}

/// Indexers, connections and states of the newest architectures.
inline void describe_rest(Metadata& m, std::string_view arch, const Shape& s, std::uint32_t chosen) {
  const std::uint32_t embd = s.heads * s.dim;
  if (one_of(arch, {"qwen4exp", "glm5-next", "hy_v4", "deepseek4"})) {
    m.number("hyper_connection.count", 4);
    m.number("hyper_connection.sinkhorn_iterations", 2);
    m.real("hyper_connection.epsilon", 1e-6F);
    m.number("hyper_connection.low_rank", 8);
    m.real("hyper_connection.magnitude", 2);
    m.numbers("attention.compress_ratios", arch == "deepseek4" ? std::vector<std::uint32_t>{0, 0, 4, 128}
                                                               : by_layer(s, [](std::uint32_t) { return 4U; }));
  }
  m.number("attention.indexer.head_count", arch == "minimax-m3" ? s.kv_heads : 64);
  m.number("attention.indexer.key_length", arch == "qwen4exp" ? s.dim : 128);
  m.number("attention.indexer.top_k", chosen);
  m.number("attention.indexer.block_size", 4);
  m.number("attention.indexer.kpool", 4);
  m.flag("attention.indexer.kpool_select_tail", true);
  m.number("attention.indexer.local_blocks", 1);
  if (arch == "hy_v4" || arch == "dots3note")
    m.numbers("attention.indexer.types", by_layer(s, [](std::uint32_t l) { return l % 2 == 0 ? 1U : 0U; }));
  m.numbers("rope.dimension_sections",
            arch == "bailingmoe3" ? std::vector<std::uint32_t>{2, 3, 3, 0} : std::vector<std::uint32_t>(4, s.dim / 4));
  m.number("attention.output_group_count", 8);
  m.number("attention.output_lora_rank", 32);
  m.real("attention.compress_rope_freq_base", 160000);
  m.number("hash_layer_count", 0);
  m.number("hrm.layers_per_stack", 1);
  m.number("hrm.h_cycles", 2);
  m.number("hrm.l_cycles", 2);
  if (arch == "bailingmoe3") {
    m.reals("swiglu_clamp_exp", std::vector<float>(s.layers, 4));
    m.reals("swiglu_clamp_shexp", std::vector<float>(s.layers, 5));
  } else if (one_of(arch, {"hy_v4", "deepseek4", "maple"})) {
    m.real("swiglu_clamp_exp", 7);
  }
  const bool delta = one_of(arch, {"qwen3next", "qwen35", "qwen35moe", "qwen4exp"});
  m.number("ssm.inner_size", delta ? 256 : 2 * embd);
  m.number("ssm.conv_kernel", 4);
  m.number("ssm.state_size", delta ? 64 : 128);
  m.number("ssm.time_step_rank", s.heads);
  m.number("ssm.group_count", arch == "plamo2" ? 0 : 2);
  m.number("kda.head_dim", 128);
  if (arch != "bailingmoe3") m.flag("kda.safe_gate", true);
  m.real("kda.gate_lower_bound", -5);
  m.number("wkv.head_size", s.dim);
  m.number("shortconv.l_cache", 3);
  m.real("residual_scale", 3.5F);
  m.number("attn_res.block_size", 12);
  m.real("activation.situ_beta", 4);
  m.real("activation.situ_linear_beta", 25);
  m.number("posnet.embedding_length", embd);
  m.number("posnet.block_count", s.layers);
  m.number("convnext.embedding_length", embd);
  m.number("convnext.block_count", s.layers);
  for (const char* key : {"alpha_n", "alpha_p", "beta"}) m.real_of_file((std::string("xielu.") + key).c_str(), 1);
  m.real_of_file("xielu.eps", 1e-7F);
}

inline Metadata metadata_of(const std::string& arch, std::uint32_t chosen) {
  const Shape s = shape_of(arch);
  Metadata m(arch);
  const std::uint32_t embd = s.heads * s.dim;
  m.words("tokenizer.ggml.model", "none");
  m.number("vocab_size", s.vocabulary);
  m.number("context_length", 1024);
  m.number("embedding_length", embd);
  m.number("features_length", embd);
  m.number("block_count", s.layers);
  m.number("leading_dense_block_count", 1);
  m.flag("use_parallel_residual", false);
  m.real("logit_scale", 1);
  m.number("time_mix_extra_dim", 64);
  m.number("time_decay_extra_dim", 128);
  m.number("full_attention_interval", 3);
  describe_attention(m, arch, s);
  m.real("attention.max_alibi_bias", 8);
  m.real("attention.clamp_kqv", 1);
  m.real("attention.layer_norm_epsilon", 1e-5F);
  m.real("attention.layer_norm_rms_epsilon", 1e-5F);
  m.real("attention.group_norm_epsilon", 1e-5F);
  m.number("attention.group_norm_groups", 8);
  m.number("attention.q_lora_rank", 64);
  m.number("attention.kv_lora_rank", 64);
  m.number("attention.relative_buckets_count", 8);
  for (const char* key : {"decay_lora_rank", "iclr_lora_rank", "value_residual_mix_lora_rank", "gate_lora_rank"})
    m.number((std::string("attention.") + key).c_str(), 32);
  if (s.experts) {
    m.number("expert_feed_forward_length", s.ff);
    m.number("expert_shared_feed_forward_length", s.ff / 2);
    m.number("expert_latent_length", s.ff);
    m.number("interleave_moe_layer_step", 2);
    m.number("expert_count", 2);
    m.number("expert_used_count", 2);
    m.number("expert_shared_count", 1);
    m.number("expert_gating_func", arch == "deepseek4" ? 4 : 2);
    m.real("expert_group_scale", 1);
    m.number("experts_per_group", 1);
    m.real("expert_weights_scale", 1);
    m.flag("expert_weights_norm", true);
  }
  describe_rest(m, arch, s, chosen);
  return m;
}

/// Weights of about unit gain, the same numbers for the same name everywhere.
inline void fill(ggml_tensor* t, void*) {
  const std::string_view name(t->name);
  std::uint32_t seed = 2166136261U;
  for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 16777619U;
  std::mt19937 random(seed);
  const auto unit = [&] { return 2.0 * std::sqrt(3.0) * (static_cast<double>(random()) / 4294967296.0 - 0.5); };
  const bool norm = name.find("norm") != std::string_view::npos && name.ends_with(".weight") && t->ne[1] == 1;
  const bool decay = name.find("ssm_a") != std::string_view::npos;
  const bool sharp = name.find("attn_q") != std::string_view::npos || name.find("attn_k") != std::string_view::npos;
  const bool factor = name.find("rope_f") == 0;  // by which frequencies are divided
  const double gain = t->ne[1] == 1 ? 0.3 : (sharp ? 1.5 : 1.0) / std::sqrt(static_cast<double>(t->ne[0]));
  std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(t)));
  for (float& x : numbers) {
    const double y = unit();
    x = static_cast<float>(norm || factor ? 1 + 0.2 * y : decay ? -std::abs(y) - 0.1 : y * gain);
  }
  if (name.find("token_embd.") == 0)
    for (float& x : numbers) x *= std::sqrt(static_cast<float>(t->ne[0]));
  if (t->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(t, numbers.data(), 0, ggml_nbytes(t));
  } else {
    std::vector<ggml_fp16_t> halves(numbers.size());
    ggml_fp32_to_fp16_row(numbers.data(), halves.data(), ggml_nelements(t));
    ggml_backend_tensor_set(t, halves.data(), 0, ggml_nbytes(t));
  }
}

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

/// Null: llama.cpp makes no model of it from these metadata. `chosen`: tokens that an indexer leaves, of all of them.
[[nodiscard]] inline Model make(const std::string& arch, std::uint32_t chosen = 131072) {
  const Metadata m = metadata_of(arch, chosen);
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  return {llama_model_init_from_user(m.get(), fill, nullptr, params), llama_model_free};
}

}  // namespace kvkeep::llama::family
