// SPDX-License-Identifier: Apache-2.0
/// The tensors of a GGUF file under their Hugging Face names.
/// Source: llama.cpp, convert_hf_to_gguf.py (`permute` of LlamaModel) and gguf-py's tensor_mapping.py.

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "checkpoint.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::lm::detail {
namespace {

using NamePair = std::pair<std::string_view, std::string_view>;  // Hugging Face's, GGUF's; ".weight" or ".bias" follows
constexpr std::string_view kLayers = "model.layers.", kQuery = "self_attn.q_proj", kKey = "self_attn.k_proj",
                           kAfterAttention = "post_attention_layernorm";
constexpr std::array<NamePair, 13> kLayerNames{{{"input_layernorm", "attn_norm"},
                                                {kQuery, "attn_q"},
                                                {kKey, "attn_k"},
                                                {"self_attn.v_proj", "attn_v"},
                                                {"self_attn.o_proj", "attn_output"},
                                                {"self_attn.q_norm", "attn_q_norm"},
                                                {"self_attn.k_norm", "attn_k_norm"},
                                                {kAfterAttention, "ffn_norm"},
                                                {"pre_feedforward_layernorm", "ffn_norm"},
                                                {"post_feedforward_layernorm", "post_ffw_norm"},
                                                {"mlp.gate_proj", "ffn_gate"},
                                                {"mlp.up_proj", "ffn_up"},
                                                {"mlp.down_proj", "ffn_down"}}};
constexpr std::array<NamePair, 3> kModelNames{
    {{"model.embed_tokens", "token_embd"}, {"model.norm", "output_norm"}, {"lm_head", "output"}}};

// Names come from checkpoint_tensors(), so one of the pairs matches.
std::string_view other_name(const auto& pairs, std::string_view name) {
  return std::find_if(pairs.begin(), pairs.end(), [&](const NamePair& pair) { return pair.first == name; })->second;
}

// "model.layers.3.mlp.up_proj.weight" without layer and kind: "mlp.up_proj".
std::string_view map_in_layer(std::string_view name) {
  name.remove_prefix(name.find('.', kLayers.size()) + 1);
  return name.substr(0, name.rfind('.'));
}

std::string gguf_name(std::string_view name, bool post_norms) {
  const std::string_view kind = name.substr(name.rfind('.'));
  if (!name.starts_with(kLayers)) return text(other_name(kModelNames, name.substr(0, name.size() - kind.size())), kind);
  const std::string_view layer = name.substr(kLayers.size(), name.find('.', kLayers.size()) - kLayers.size());
  const std::string_view map = map_in_layer(name);
  return text("blk.", layer, ".",
              post_norms && map == kAfterAttention ? "post_attention_norm" : other_name(kLayerNames, map), kind);
}

class GgufCheckpoint final : public Checkpoint {
 public:
  GgufCheckpoint(const std::filesystem::path& path, const io::ModelConfig& config)
      : file_(io::GgufFile::open(path)), config_(config) {
    std::set<std::string> known{"rope_freqs.weight"};
    for (const TensorSpec& tensor : checkpoint_tensors(config)) known.insert(name_of(tensor));
    for (const std::string_view name : file_.names())
      KVKEEP_REQUIRE(known.contains(std::string(name)), "read weights: tensor '", shortened(name), "' in ",
                     file_.where(), " is not one that its metadata ask for; the decoder has no code for it");
  }

  void check(const TensorSpec& wanted) const override {
    const std::string name = name_of(wanted);
    KVKEEP_REQUIRE(file_.has(name), "read weights: tensor '", name, "' is missing in ", file_.where(),
                   "; the model of its metadata needs it");
    const auto& shape = file_.described(name).shape;
    KVKEEP_REQUIRE(shape == wanted.shape, "read weights: tensor '", name, "' in ", file_.where(), " has shape ",
                   Shape(shape), "; its metadata ask for ", Shape(wanted.shape));
  }

  [[nodiscard]] Tensor tensor(const TensorSpec& wanted, std::optional<Dtype> dtype) const override {
    check(wanted);
    const std::string name = name_of(wanted);
    const Tensor stored = file_.tensor(name, stored_as(name, dtype));
    const bool interleaved =
        config_.architecture == io::Architecture::llama || config_.architecture == io::Architecture::smollm3;
    if (!interleaved || !wanted.name.starts_with(kLayers)) return stored;
    const std::string_view map = map_in_layer(wanted.name);
    return map == kQuery ? halves(stored, config_.spec.query_heads)
           : map == kKey ? halves(stored, config_.spec.kv_heads)
                         : stored;
  }

  [[nodiscard]] double copied_bytes(const TensorSpec& wanted, std::optional<Dtype> dtype) const override {
    double bytes = static_cast<double>(element_size(stored_as(name_of(wanted), dtype)));
    for (const std::int64_t size : wanted.shape) bytes *= static_cast<double>(size);
    return bytes;
  }

  [[nodiscard]] double norms_above_stored() const override { return 0; }  // Gemma's converter adds the one

 private:
  [[nodiscard]] std::string name_of(const TensorSpec& tensor) const {
    return gguf_name(tensor.name, config_.post_norms);
  }
  [[nodiscard]] Dtype stored_as(const std::string& name, std::optional<Dtype> dtype) const {
    return dtype.value_or(file_.described(name).dtype.value_or(Dtype::f32));
  }

  // In a Llama's or SmolLM3's head, llama.cpp rotates neighbours by RoPE, transformers element i of one half with
  // element i of the other. So GGUF files have the rows of queries and keys interleaved, and this separates them again.
  // Qwen's rows are as in transformers.
  [[nodiscard]] static Tensor halves(const Tensor& rows, std::int64_t heads) {
    return rows.view({heads, rows.size(0) / heads / 2, 2, -1}).transpose(1, 2).reshape(rows.sizes());
  }

  io::GgufFile file_;
  io::ModelConfig config_;
};

}  // namespace

std::unique_ptr<const Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path,
                                                       const io::ModelConfig& config) {
  return std::make_unique<GgufCheckpoint>(path, config);
}

}  // namespace kvkeep::lm::detail
