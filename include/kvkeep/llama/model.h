#pragma once
/// What kvkeep must know of a model, as llama.cpp tells it. Part of kvkeep/llama.h.

#include <llama.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>

#include "kvkeep/core/error.h"
#include "kvkeep/core/model_spec.h"

namespace kvkeep::llama {

/// Metadata of the model file as llama.cpp prints it; empty: the file has no such key.
[[nodiscard]] inline std::optional<std::string> metadata(const llama_model* model, const std::string& key) {
  std::array<char, 256> value{};
  if (llama_model_meta_val_str(model, key.c_str(), value.data(), value.size()) < 0) return {};
  return value.data();
}

/// Shapes of a model that llama.cpp has loaded; RoPE is left open (read_rope()) unless the model has none. Throws
/// Unsupported, with the reason, for models whose cache is not one row per token, layer and KV head: recurrent and
/// hybrid ones, encoders, sliding windows, latent attention, heads that differ by layer; and for positions of more than
/// one dimension (M-RoPE), as models with images have.
[[nodiscard]] inline ModelSpec spec_of(const llama_model* model) {
  const std::string arch = metadata(model, "general.architecture").value_or("");
  const auto own = [&](const char* key) { return metadata(model, arch + "." + key); };
  const auto number = [&](const char* key, double otherwise) {
    const std::optional<std::string> given = own(key);
    double value = otherwise;
    if (given) std::from_chars(given->data(), given->data() + given->size(), value);
    return value;
  };
  const auto require = [&](bool ok, const char* what) {
    KVKEEP_REQUIRE_AS(Unsupported, ok, "llama: the model (", arch, ") has ", what,
                      "; allowed models with one row per token, layer and KV head");
  };
  require(!llama_model_is_recurrent(model), "a recurrent memory");
  require(!llama_model_is_hybrid(model), "a hybrid memory");
  require(!llama_model_has_encoder(model), "an encoder");
  require(llama_model_n_swa(model) == 0, "sliding-window layers");
  require(!own("attention.kv_lora_rank"), "latent attention");
  require(!own("attn_logit_softcapping"), "a cap on logits");
  require(!own("attention.max_alibi_bias"), "a bias by distance");
  const llama_rope_type rope = llama_model_rope_type(model);
  KVKEEP_REQUIRE_AS(Unsupported,
                    rope == LLAMA_ROPE_TYPE_NONE || rope == LLAMA_ROPE_TYPE_NORM || rope == LLAMA_ROPE_TYPE_NEOX,
                    "llama: the model (", arch,
                    ") has positions of several dimensions (M-RoPE, for images), so tokens and positions are not the "
                    "same; allowed models with one position per token");
  for (const char* key : {"attention.head_count", "attention.head_count_kv"})
    require(!own(key).value_or("").starts_with('['), "heads that differ by layer");

  ModelSpec spec;
  spec.query_heads = llama_model_n_head(model);
  spec.kv_heads = llama_model_n_head_kv(model);
  const double dim = llama_model_n_embd(model) / std::max(1, spec.query_heads);
  spec.key_dim = static_cast<std::int32_t>(number("attention.key_length", dim));
  spec.value_dim = static_cast<std::int32_t>(number("attention.value_length", dim));
  spec.softmax_scale = number("attention.scale", 0.0);
  spec.layers.resize(static_cast<std::size_t>(llama_model_n_layer(model)));
  if (rope == LLAMA_ROPE_TYPE_NONE) spec.rope = RopeSpec::absent();
  spec.check();
  return spec;
}

}  // namespace kvkeep::llama
