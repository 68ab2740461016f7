// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A folder's checkpoint as llama.cpp's converter would write it.

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gguf_parts.h"
#include "kvkeep/io/model_config.h"
#include "kvkeep/io/safetensors.h"
#include "kvlab/weights.h"

namespace kvkeep::testing {

using io::Architecture;
using io::ModelConfig;
using lm::TensorSpec;

inline std::string name_of(io::Architecture architecture) {
  return architecture == io::Architecture::llama     ? "llama"
         : architecture == io::Architecture::smollm3 ? "smollm3"
         : architecture == io::Architecture::gemma3  ? "gemma3"
         : architecture == io::Architecture::qwen2   ? "qwen2"
                                                     : "qwen3";
}

// Metadata as convert_hf_to_gguf.py of llama.cpp writes them. What `with` names has other values, or is left out where
// they are empty.
using Changes = std::map<std::string, std::function<void(GgufParts&, const std::string&)>>;
inline GgufParts metadata(const io::ModelConfig& config, const Changes& with = {}) {
  GgufParts parts;
  std::set<std::string> written;
  const auto put = [&](const std::string& key, const std::function<void(GgufParts&, const std::string&)>& usual) {
    const auto changed = with.find(key);
    written.insert(key);
    const auto& write = changed == with.end() ? usual : changed->second;
    if (write) write(parts, key);
  };
  const auto whole = [&](const std::string& key, std::int64_t value) {
    put(key, [=](GgufParts& to, const std::string& k) { to.whole(k, static_cast<std::uint32_t>(value)); });
  };
  const auto number = [&](const std::string& key, double value) {
    put(key, [=](GgufParts& to, const std::string& k) { to.number(k, static_cast<float>(value)); });
  };
  const std::string name = name_of(config.architecture), own = name + ".";
  put("general.architecture", [&](GgufParts& to, const std::string& k) { to.text(k, name); });
  whole(own + "block_count", config.num_layers());
  whole(own + "context_length", config.max_positions);
  whole(own + "embedding_length", config.hidden);
  whole(own + "feed_forward_length", config.intermediate);
  whole(own + "attention.head_count", config.spec.query_heads);
  whole(own + "attention.head_count_kv", config.spec.kv_heads);
  whole(own + "attention.key_length", config.spec.key_dim);
  whole(own + "attention.value_length", config.spec.value_dim);
  number(own + "attention.layer_norm_rms_epsilon", config.rms_eps);
  number(own + "rope.freq_base", config.rope.theta);
  if (config.architecture == io::Architecture::gemma3)
    whole(own + "attention.sliding_window", config.spec.layers.front().window);
  whole("tokenizer.ggml.eos_token_id", 2);
  for (const auto& [key, write] : with)
    if (write && !written.contains(key)) write(parts, key);
  return parts;
}

// The name of llama.cpp for a tensor.
inline std::string gguf_name(std::string name, bool gemma = false) {
  const std::vector<std::pair<std::string, std::string>> pairs{{"model.layers.", "blk."},
                                                               {"self_attn.q_proj", "attn_q"},
                                                               {"self_attn.k_proj", "attn_k"},
                                                               {"self_attn.v_proj", "attn_v"},
                                                               {"self_attn.o_proj", "attn_output"},
                                                               {"self_attn.q_norm", "attn_q_norm"},
                                                               {"self_attn.k_norm", "attn_k_norm"},
                                                               {"mlp.gate_proj", "ffn_gate"},
                                                               {"mlp.up_proj", "ffn_up"},
                                                               {"mlp.down_proj", "ffn_down"},
                                                               {"input_layernorm", "attn_norm"},
                                                               {"post_attention_layernorm", "ffn_norm"},
                                                               {"model.embed_tokens", "token_embd"},
                                                               {"model.norm", "output_norm"},
                                                               {"lm_head", "output"}};
  // Gemma has a norm behind attention; what llama.cpp calls ffn_norm has another name there.
  const std::vector<std::pair<std::string, std::string>> gemmas{{"post_attention_layernorm", "post_attention_norm"},
                                                                {"pre_feedforward_layernorm", "ffn_norm"},
                                                                {"post_feedforward_layernorm", "post_ffw_norm"}};
  for (const auto& [theirs, ours] : gemmas)
    if (const auto at = name.find(theirs); gemma && at != std::string::npos) name.replace(at, theirs.size(), ours);
  for (const auto& [theirs, ours] : pairs)
    if (const auto at = name.find(theirs); at != std::string::npos) name.replace(at, theirs.size(), ours);
  return name;
}

// convert_hf_to_gguf.py, `permute`: element i of a head's one half and element i of the other become neighbours. Row by
// row, for it is what is under test.
inline at::Tensor interleaved(const at::Tensor& rows, std::int64_t heads) {
  at::Tensor out = rows.clone();
  const std::int64_t half = rows.size(0) / heads / 2;
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t i = 0; i < half; ++i)
      for (std::int64_t side = 0; side < 2; ++side)
        out.select(0, (h * half + i) * 2 + side).copy_(rows.select(0, (h * 2 + side) * half + i));
  return out;
}

// The tensors of a folder's model.safetensors as llama.cpp's converter writes them.
inline GgufParts& with_tensors_of(GgufParts& parts, const std::filesystem::path& folder,
                                  const io::ModelConfig& config) {
  const auto file = io::SafetensorsFile::open(folder / "model.safetensors");
  const bool pairs = config.architecture == io::Architecture::llama || config.architecture == io::Architecture::smollm3;
  for (const TensorSpec& wanted : lm::checkpoint_tensors(config)) {
    at::Tensor tensor = file.tensor(wanted.name);
    if (pairs && wanted.name.find("q_proj") != std::string::npos) tensor = interleaved(tensor, config.spec.query_heads);
    if (pairs && wanted.name.find("k_proj") != std::string::npos) tensor = interleaved(tensor, config.spec.kv_heads);
    const bool gemma = config.architecture == io::Architecture::gemma3;
    if (gemma && wanted.name.ends_with("norm.weight")) tensor = tensor.to(at::kFloat).add(1);
    parts.tensor(gguf_name(wanted.name, gemma), tensor);
  }
  return parts;
}

}  // namespace kvkeep::testing
