// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What kvkeep must know of a model, as llama.cpp tells it: shapes, and RoPE. Part of kvkeep/llama.h.

#include <llama.h>

#include <ggml-backend.h>
#include <ggml.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

// RoPE of each layer, read from the nodes of llama.cpp's graph: a model file does not say which layers have none, nor
// frequency factors.

[[nodiscard]] inline bool on_host(const ggml_tensor* t) {
  const ggml_tensor* root = t->view_src != nullptr ? t->view_src : t;
  return root->buffer != nullptr && ggml_backend_buffer_is_host(root->buffer);
}

/// Bytes of a tensor without gaps, wherever it is.
inline void read_tensor(const ggml_tensor* t, void* to, std::size_t offset, std::size_t bytes) {
  if (on_host(t))
    std::memcpy(to, static_cast<const std::byte*>(t->data) + offset, bytes);
  else
    ggml_backend_tensor_get(t, to, offset, bytes);
}

/// Layer of a tensor that is, or shows, cache_k_l<layer> or cache_v_l<layer>; -1: something else.
[[nodiscard]] inline std::int32_t layer_of(const ggml_tensor* t, std::string_view prefix) {
  while (t->view_src != nullptr) t = t->view_src;
  const std::string_view name(t->name);
  std::int32_t layer = -1;
  if (name.starts_with(prefix)) std::from_chars(name.data() + prefix.size(), name.data() + name.size(), layer);
  return layer;
}

/// What turned keys or queries on their way to a node.
struct Turned {
  const ggml_tensor* rope = nullptr;   ///< the node; null: none did
  const ggml_tensor* after = nullptr;  ///< a node behind it that changes what was turned; null: none
  bool known = true;                   ///< false: their way leads to a copy from another backend, and ends there
};

[[nodiscard]] inline Turned turned_by(const ggml_tensor* t, int depth = 0) {
  if (t == nullptr || depth > 32 || t->op == GGML_OP_NONE) return {.known = false};
  switch (t->op) {
    case GGML_OP_ROPE:
      return {.rope = t};
    case GGML_OP_MUL_MAT:  // of weights
      return {};
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
    case GGML_OP_CONT:
    case GGML_OP_CPY:
    case GGML_OP_SCALE:
      return turned_by(t->src[0], depth + 1);
    default:
      Turned found = turned_by(t->src[0], depth + 1);
      for (int i = 1; i < GGML_MAX_SRC && t->src[i] != nullptr && found.rope == nullptr; ++i)
        found.rope = turned_by(t->src[i], depth + 1).rope;
      if (found.rope != nullptr && found.after == nullptr) found.after = t;
      return found;
  }
}

/// What a node of RoPE does, as ggml computes it. Parameters: i32 at 1, 2, 4 and 15 (rotary components, mode, original
/// context, offset within a head); f32 at 5 to 10 (base, scale, extrapolation, magnitude, fast and slow beta). Throws
/// Unsupported for a mode that is neither neighbours nor halves, and for an offset.
[[nodiscard]] inline RopeSpec rope_of(const ggml_tensor* node) {
  std::array<float, 11> option{};
  std::memcpy(option.data(), node->op_params, sizeof option);
  const std::int32_t rotary = node->op_params[1], mode = node->op_params[2];
  KVKEEP_REQUIRE_AS(Unsupported, (mode == 0 || mode == GGML_ROPE_TYPE_NEOX) && node->op_params[15] == 0,
                    "llama: the graph has RoPE of mode ", mode, " at offset ", node->op_params[15],
                    " of a head; allowed that of neighbours or halves (modes 0 and 2) from its first component on");
  const float base = option[5], scale = option[6], extrapolation = option[7];
  std::vector<float> factors(static_cast<std::size_t>(rotary) / 2, 1.0F);
  if (node->src[2] != nullptr) read_tensor(node->src[2], factors.data(), 0, factors.size() * sizeof(float));
  std::array<float, 2> ramp{};
  if (extrapolation != 0)
    ggml_rope_yarn_corr_dims(rotary, node->op_params[4], base, option[9], option[10], ramp.data());
  RopeSpec rope{.style = mode == 0 ? RopeStyle::interleaved : RopeStyle::half, .inv_freq = {}};
  for (std::size_t f = 0; f < factors.size(); ++f) {
    const double own = std::pow(double{base}, -2.0 * static_cast<double>(f) / rotary) / factors[f];
    const float along = (static_cast<float>(f) - ramp[0]) / std::max(0.001F, ramp[1] - ramp[0]);
    const double mix = extrapolation == 0 ? 0 : (1 - std::clamp(along, 0.0F, 1.0F)) * extrapolation;
    rope.inv_freq.push_back(own * (scale * (1 - mix) + mix));
  }
  rope.attention_scaling = extrapolation == 0 ? option[8] : option[8] * (1.0F + 0.1F * std::log(1.0F / scale));
  return rope;
}

/// Fills in the RoPE of each layer: runs one token in a small context of its own, with the RoPE of `params`, and reads
/// it from the graph. A layer whose keys are stored in another way than by RoPE alone, or at all, is left open. Throws
/// Unsupported as rope_of() does.
inline void read_rope(ModelSpec& spec, const llama_model* model, const llama_context_params& params) {
  struct Seen {
    ModelSpec& spec;
    std::exception_ptr error = nullptr;
  } seen{spec};
  llama_context_params own = llama_context_default_params();
  own.n_ctx = 256;
  own.n_batch = own.n_ubatch = 32;
  // Of two sets of factors, a context beyond the length of training takes the second one.
  const std::string original = metadata(model, "general.architecture").value_or("") + ".rope.scaling.";
  if (metadata(model, original + "original_context_length") && metadata(model, original + "type") != "yarn")
    own.n_ctx = params.kv_unified ? params.n_ctx : params.n_ctx / std::max(1U, params.n_seq_max);
  own.n_threads = own.n_threads_batch = params.n_threads;
  own.rope_scaling_type = params.rope_scaling_type;
  own.rope_freq_base = params.rope_freq_base;
  own.rope_freq_scale = params.rope_freq_scale;
  own.yarn_ext_factor = params.yarn_ext_factor;
  own.yarn_attn_factor = params.yarn_attn_factor;
  own.yarn_beta_fast = params.yarn_beta_fast;
  own.yarn_beta_slow = params.yarn_beta_slow;
  own.yarn_orig_ctx = params.yarn_orig_ctx;
  own.cb_eval_user_data = &seen;
  own.cb_eval = [](ggml_tensor* node, bool ask, void* data) {
    auto& to = *static_cast<Seen*>(data);
    if (!ask || node->op != GGML_OP_SET_ROWS || to.error) return !ask;
    const auto layer = static_cast<std::size_t>(layer_of(node, "cache_k_l"));
    if (layer >= to.spec.layers.size()) return false;
    try {
      const Turned turned = turned_by(node->src[0]);
      if (turned.known && turned.after == nullptr)
        to.spec.layers[layer].rope = turned.rope == nullptr ? RopeSpec::absent() : rope_of(turned.rope);
    } catch (...) {
      to.error = std::current_exception();
    }
    return false;
  };
  const auto free = [](llama_context* context) { llama_free(context); };
  // llama.cpp's function takes a model that it could change, and does not.
  const std::unique_ptr<llama_context, decltype(free)> context(
      llama_init_from_model(const_cast<llama_model*>(model), own), free);
  llama_token token = 0;
  if (context != nullptr) static_cast<void>(llama_decode(context.get(), llama_batch_get_one(&token, 1)));
  if (seen.error) std::rethrow_exception(seen.error);
  // One for all, and what differs.
  const auto turns = [](const LayerSpec& l) { return l.rope && l.rope->style != RopeStyle::none; };
  const auto first = std::ranges::find_if(spec.layers, turns);
  if (first != spec.layers.end())
    spec.rope = *first->rope;
  else if (std::ranges::all_of(spec.layers, [](const LayerSpec& l) { return l.rope.has_value(); }))
    spec.rope = RopeSpec::absent();
  for (LayerSpec& layer : spec.layers) {
    if (!layer.rope) layer.rope = RopeSpec{};
    if (*layer.rope == spec.rope) layer.rope.reset();
  }
  spec.check();
}

}  // namespace kvkeep::llama
