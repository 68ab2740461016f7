// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What kvkeep must know of a model, as llama.cpp's graph tells it. Part of kvkeep/llama.h.

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
#include <map>
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

// Read from the nodes of llama.cpp's graph: a model file does not say which layers slide or have no RoPE, nor frequency
// factors, nor what an architecture scales products by.

/// What a tensor is, or shows.
template <class T>
[[nodiscard]] T* root_of(T* t) {
  while (t->view_src != nullptr) t = t->view_src;
  return t;
}

[[nodiscard]] inline bool on_host(const ggml_tensor* t) {
  const ggml_tensor* root = root_of(t);
  return root->buffer != nullptr && ggml_backend_buffer_is_host(root->buffer);
}

/// Where a tensor is, by the name of ggml's buffer: "CPU", "CUDA0".
[[nodiscard]] inline std::string place_of(const ggml_tensor* t) {
  const ggml_tensor* root = root_of(t);
  return root->buffer == nullptr ? "no buffer" : ggml_backend_buffer_name(root->buffer);
}

/// What ggml calls the buffers of a GPU.
[[nodiscard]] inline std::string ggml_name(const Device& device) {
  return device.is_cpu() ? "CPU" : "CUDA" + std::to_string(device.index);
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
  const std::string_view name(root_of(t)->name);
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

/// What a node of attention computes, however llama.cpp writes it: one node of flash attention, or products, a cap on
/// them and their softmax.
struct Attention {
  const ggml_tensor* keys = nullptr;     ///< [D, cells, Hkv, streams] of the cache; null: no attention over a cache
  const ggml_tensor* queries = nullptr;  ///< [D, tokens, Hq, streams]
  const ggml_tensor* mask = nullptr;     ///< [cells, tokens, 1, streams] an input: what a token may see; null: none
  const ggml_tensor* sinks = nullptr;    ///< f32 [Hq]; null: none
  float scale = 0, bias = 0, cap = 0;    ///< as in ModelSpec; `bias` by distance (ALiBi)
  bool plain = true;                     ///< false: something else is done to products, too
  bool chosen = false;                   ///< the graph adds to the mask: it leaves out what an indexer does not choose
};

/// Copies of a tensor show what it shows: f32 caches are read as f16.
[[nodiscard]] inline const ggml_tensor* copied_from(const ggml_tensor* t) {
  while (t != nullptr && t->op == GGML_OP_CPY) t = t->src[0];
  return t;
}

[[nodiscard]] inline Attention attention_of(const ggml_tensor* node) {
  Attention a;
  std::array<float, 3> options{};
  std::memcpy(options.data(), node->op_params, sizeof options);
  if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    a = {.keys = copied_from(node->src[1]),
         .queries = node->src[0],
         .mask = node->src[3],
         .sinks = node->src[4],
         .scale = options[0],
         .bias = options[1],
         .cap = options[2]};
  } else if (node->op == GGML_OP_SOFT_MAX && std::string_view(node->name).starts_with("kq_soft_max")) {
    a = {.mask = node->src[1], .sinks = node->src[2], .scale = options[0], .bias = options[1]};
    const ggml_tensor* t = node->src[0];
    const auto factor = [](const ggml_tensor* scaled) {
      float by = 0;
      std::memcpy(&by, scaled->op_params, sizeof by);
      return by;
    };
    // c tanh(x / c), in three nodes.
    if (t->op == GGML_OP_SCALE && t->src[0]->op == GGML_OP_UNARY && t->src[0]->src[0]->op == GGML_OP_SCALE) {
      const ggml_tensor* bent = t->src[0];
      a.cap = factor(t);
      a.plain = bent->op_params[0] == GGML_UNARY_OP_TANH && a.scale == 1;
      a.scale = factor(bent->src[0]) * a.cap;
      t = bent->src[0]->src[0];
    }
    a.plain = a.plain && t->op == GGML_OP_MUL_MAT;
    while (t != nullptr && t->op != GGML_OP_MUL_MAT) t = t->src[0];
    if (t == nullptr) return {};
    a.keys = t->src[0];
    a.queries = t->src[1];
  }
  if (a.keys != nullptr && layer_of(a.keys, "cache_k_l") < 0) a.keys = nullptr;
  a.mask = copied_from(a.mask);
  if (a.mask != nullptr && a.mask->op == GGML_OP_ADD) {
    a.chosen = true;
    a.mask = copied_from(a.mask->src[1]);
  }
  if (a.mask != nullptr && a.mask->op != GGML_OP_NONE) a.mask = nullptr;
  return a;
}

/// A model as llama.cpp's graph shows it.
struct Facts {
  ModelSpec spec = {};
  std::int32_t window = 0;  ///< tokens, of layers that slide; 0: none does
  bool states = false;      ///< some layers have a state, of which nothing is taken back
  bool latent = false;      ///< values are the first numbers of keys (MLA): the cache holds no others
  bool flash = false;       ///< attention of full layers is one node, and values are rows
  bool planes = false;      ///< positions have several dimensions (M-RoPE): those of text have one
  bool indexed = false;     ///< an indexer, with keys of its own in a second cache, chooses what tokens attend to
  std::map<std::int32_t, std::string> places = {};  ///< of full layers that have a cache: place_of() their keys
  std::exception_ptr rope_error =
      nullptr;  ///< why RoPE could not be read; null: it could, as far as the graph shows it

  /// Layers have memory of another kind than that of full attention.
  [[nodiscard]] bool mixed() const { return window > 0 || states; }
};

/// Reads a graph node by node.
class GraphReader {
 public:
  explicit GraphReader(std::size_t layers) : seen_(layers) {}

  static bool on_node(ggml_tensor* node, bool ask, void* self) noexcept {
    auto& reader = *static_cast<GraphReader*>(self);
    try {
      if (ask && !reader.error_) reader.read(node);
    } catch (...) {
      reader.error_ = std::current_exception();
    }
    return !ask;
  }

  /// Which layers are full, what their attention is. `cells`: of a layer that does not slide.
  void tell(Facts& facts, std::int64_t cells, const std::string& arch) const {
    if (error_) std::rethrow_exception(error_);
    ModelSpec& spec = facts.spec;
    const auto require = [&](bool ok, const auto&... what) {
      KVKEEP_REQUIRE_AS(Unsupported, ok, "llama: the model (", arch, ") has ", what...,
                        "; allowed models with layers of full attention over one cache, which are alike");
    };
    const auto require_no_other = [&](bool ok, const auto& name) {
      require(ok, "a cache beside keys and values (", name, "), which holds other things than an indexer's keys");
    };
    require_no_other(other_.empty(), other_);
    for (const Layer& layer : seen_) facts.indexed = facts.indexed || layer.stored.size() > 1;
    const Layer* first = nullptr;
    std::size_t first_at = 0;
    for (std::size_t l = 0; l < seen_.size(); ++l) {
      const Layer& layer = seen_[l];
      LayerSpec& to = spec.layers[l];
      const Stored* keys = layer.keys();
      require_no_other(layer.stored.size() == (keys != nullptr ? 1 : 0) || layer.indexes(keys), "cache_k_l" + text(l));
      const bool slides = facts.window > 0 && keys != nullptr && keys->cells < cells;
      to.kind = !layer.attended ? LayerKind::other : slides ? LayerKind::sliding : LayerKind::full;
      if (slides) to.window = facts.window;
      if (to.kind != LayerKind::full) continue;
      require(layer.bias == 0, "a bias by distance in its attention (ALiBi)");
      require(layer.plain, "attention that does more to products than to scale and cap them");
      require(layer.masked && (facts.indexed || !layer.chosen),
              "attention to a part of the tokens that the graph chooses");
      if (first == nullptr) first = &layer, first_at = l;
      require(layer.same_shape(*first), "full layers that differ: layer ", l, " has ", layer.kv_heads, " KV heads of ",
              layer.key_dim, " and ", layer.value_dim, " elements under ", layer.query_heads,
              " query heads, scaled by ", layer.scale, ", and layer ", first_at, " has ", first->kv_heads, " of ",
              first->key_dim, " and ", first->value_dim, " under ", first->query_heads, ", scaled by ", first->scale);
      to.sinks = layer.sinks;
      if (keys == nullptr) continue;
      facts.places[static_cast<std::int32_t>(l)] = place_of(keys->root);
      to.rope = keys->rope;
      if (keys->rope_error) facts.rope_error = keys->rope_error;
    }
    require(first != nullptr, "no layer that attends to all tokens");
    spec.query_heads = first->query_heads;
    spec.kv_heads = first->kv_heads;
    spec.key_dim = first->key_dim;
    spec.value_dim = first->value_dim;
    spec.softmax_scale = first->scale;
    spec.logit_cap = first->cap;
    facts.latent = !first->values;
    facts.flash = first->flash;
  }

 private:
  struct Stored {
    const ggml_tensor* root = nullptr;
    std::int64_t cells = 0;
    std::optional<RopeSpec> rope = {};
    std::exception_ptr rope_error = nullptr;
  };
  struct Layer {
    std::vector<Stored> stored = {};    ///< its keys, and those of an indexer
    const ggml_tensor* read = nullptr;  ///< by attention
    std::int32_t query_heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
    float scale = 0, bias = 0, cap = 0;
    bool attended = false, values = false, plain = true, flash = false, masked = true, chosen = false;
    std::vector<float> sinks = {};

    /// Those that attention reads, or the only ones; null: there are none.
    [[nodiscard]] const Stored* keys() const {
      const auto found = std::ranges::find(stored, read, &Stored::root);
      return found != stored.end() ? &*found : stored.size() == 1 && read == nullptr ? stored.data() : nullptr;
    }
    /// The others are rows of another width at the same cells.
    [[nodiscard]] bool indexes(const Stored* own) const {
      const Stored& other = stored.front().root == read ? stored.back() : stored.front();
      return own != nullptr && stored.size() == 2 && other.cells == own->cells && other.root->ne[0] != own->root->ne[0];
    }

    [[nodiscard]] bool same_shape(const Layer& o) const {
      return query_heads == o.query_heads && kv_heads == o.kv_heads && key_dim == o.key_dim &&
             value_dim == o.value_dim && scale == o.scale && cap == o.cap && values == o.values;
    }
  };

  [[nodiscard]] Layer* at(std::int32_t layer) {
    return layer >= 0 && static_cast<std::size_t>(layer) < seen_.size() ? &seen_[static_cast<std::size_t>(layer)]
                                                                        : nullptr;
  }

  void read(const ggml_tensor* node) {
    if (node->op == GGML_OP_SET_ROWS) return read_stored(node);
    // Values of products are the other factor of the softmax.
    if (node->op == GGML_OP_MUL_MAT && node->src[1] == softmax_) {
      softmax_layer_->value_dim = static_cast<std::int32_t>(node->src[0]->ne[1]);
      softmax_ = nullptr;
    }
    const Attention a = attention_of(node);
    if (a.keys == nullptr) return;
    Layer* layer = at(layer_of(a.keys, "cache_k_l"));
    if (layer == nullptr || layer->attended) return;  // a later layer may read the same cache
    layer->attended = true;
    layer->read = root_of(a.keys);
    layer->key_dim = static_cast<std::int32_t>(a.keys->ne[0]);
    layer->kv_heads = static_cast<std::int32_t>(a.keys->ne[2]);
    layer->query_heads = static_cast<std::int32_t>(a.queries->ne[2]);
    layer->scale = a.scale;
    layer->bias = a.bias;
    layer->cap = a.cap;
    layer->plain = a.plain;
    layer->masked = a.mask != nullptr;
    layer->chosen = a.chosen;
    if (a.sinks != nullptr) {
      layer->sinks.resize(static_cast<std::size_t>(a.sinks->ne[0]));
      read_tensor(a.sinks, layer->sinks.data(), 0, layer->sinks.size() * sizeof(float));
    }
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      layer->value_dim = static_cast<std::int32_t>(node->src[2]->ne[0]);
      layer->flash = true;
    } else {
      softmax_ = node;
      softmax_layer_ = layer;
    }
  }

  void read_stored(const ggml_tensor* node) {
    const ggml_tensor* root = root_of(node);
    const std::string_view name(root->name);
    if (Layer* layer = at(layer_of(root, "cache_k_l"))) {
      if (std::ranges::find(layer->stored, root, &Stored::root) != layer->stored.end()) return;
      Stored& keys = layer->stored.emplace_back(Stored{.root = root, .cells = root->ne[1]});
      try {
        const Turned turned = turned_by(node->src[0]);
        if (turned.known && turned.after == nullptr)
          keys.rope = turned.rope == nullptr ? RopeSpec::absent() : rope_of(turned.rope);
      } catch (...) {
        keys.rope_error = std::current_exception();
      }
    } else if (Layer* valued = at(layer_of(root, "cache_v_l"))) {
      valued->values = true;
    } else if (name.starts_with("cache_") || name.starts_with("dsv4_")) {
      other_ = name;
    }
  }

  std::vector<Layer> seen_;
  std::string other_;  ///< a tensor of a cache of another kind
  const ggml_tensor* softmax_ = nullptr;
  Layer* softmax_layer_ = nullptr;
  std::exception_ptr error_;
};

/// What llama.cpp's graph says of a model: which layers a policy may cut, their shapes, the scale, cap and sinks of
/// their attention, and RoPE. Runs one token in a small context of its own, with the RoPE of `params`. Where layers
/// slide, the context is a little longer than their window: the cache of those is shorter. A layer whose keys are
/// stored in another way than by RoPE alone, or at all, has its RoPE left open. Throws Unsupported, with the reason,
/// for models without such layers (recurrent ones, encoders, diffusion), with full layers that differ from one another,
/// a bias by distance, or a third cache that is not read as an indexer's of DeepSeek V3.2.
[[nodiscard]] inline Facts facts_of(const llama_model* model, const llama_context_params& params) {
  const std::string arch = metadata(model, "general.architecture").value_or("");
  const auto require = [&](bool ok, const char* what) {
    KVKEEP_REQUIRE_AS(Unsupported, ok, "llama: the model (", arch, ") ", what,
                      "; allowed decoders with a cache of keys and values");
  };
  require(!llama_model_is_recurrent(model), "has states alone");
  require(!llama_model_has_encoder(model), "has an encoder");
  require(!llama_model_is_diffusion(model), "is a diffusion model, which has no cache");
  const llama_rope_type rope = llama_model_rope_type(model);
  Facts facts{.window = llama_model_n_swa(model), .states = llama_model_is_hybrid(model)};
  facts.planes = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE || rope == LLAMA_ROPE_TYPE_VISION;
  GraphReader reader(static_cast<std::size_t>(llama_model_n_layer(model)));
  facts.spec.layers.resize(static_cast<std::size_t>(llama_model_n_layer(model)));

  llama_context_params own = llama_context_default_params();
  own.n_batch = own.n_ubatch = 32;
  const auto padded = [](std::uint32_t cells) { return (cells + 255) / 256 * 256; };
  own.n_ctx = facts.window > 0 ? padded(static_cast<std::uint32_t>(facts.window) + own.n_ubatch) + 256 : 256;
  own.swa_full = false;
  own.offload_kqv = params.offload_kqv;
  // Of two sets of factors, a context beyond the length of training takes the second one.
  if (metadata(model, arch + ".rope.scaling.original_context_length") &&
      metadata(model, arch + ".rope.scaling.type") != "yarn")
    own.n_ctx = std::max(own.n_ctx, params.kv_unified ? params.n_ctx : params.n_ctx / std::max(1U, params.n_seq_max));
  own.n_threads = own.n_threads_batch = params.n_threads;
  own.rope_scaling_type = params.rope_scaling_type;
  own.rope_freq_base = params.rope_freq_base;
  own.rope_freq_scale = params.rope_freq_scale;
  own.yarn_ext_factor = params.yarn_ext_factor;
  own.yarn_attn_factor = params.yarn_attn_factor;
  own.yarn_beta_fast = params.yarn_beta_fast;
  own.yarn_beta_slow = params.yarn_beta_slow;
  own.yarn_orig_ctx = params.yarn_orig_ctx;
  own.cb_eval_user_data = &reader;
  own.cb_eval = &GraphReader::on_node;
  const auto free = [](llama_context* context) { llama_free(context); };
  // llama.cpp's function takes a model that it could change, and does not.
  const std::unique_ptr<llama_context, decltype(free)> context(
      llama_init_from_model(const_cast<llama_model*>(model), own), free);
  require(context != nullptr, "gives no context: llama_init_from_model() failed");
  require(llama_get_memory(context.get()) != nullptr, "has no cache");
  llama_token token = 0;
  require(llama_decode(context.get(), llama_batch_get_one(&token, 1)) == 0, "decodes no token");
  reader.tell(facts, llama_n_ctx_seq(context.get()), arch);

  // One RoPE for all, and what differs.
  ModelSpec& spec = facts.spec;
  const auto turns = [](const LayerSpec& l) { return l.rope && l.rope->style != RopeStyle::none; };
  const auto first = std::ranges::find_if(spec.layers, turns);
  if (first != spec.layers.end())
    spec.rope = *first->rope;
  else if (std::ranges::all_of(spec.layers, [](const LayerSpec& l) { return l.kind != LayerKind::full || l.rope; }))
    spec.rope = RopeSpec::absent();
  for (LayerSpec& layer : spec.layers) {
    if (layer.kind != LayerKind::full) continue;
    if (!layer.rope) layer.rope = RopeSpec{};
    if (*layer.rope == spec.rope) layer.rope.reset();
  }
  if (std::ranges::none_of(spec.layers, [](const LayerSpec& l) { return l.kind == LayerKind::sliding; }))
    facts.window = 0;
  spec.check();
  return facts;
}

}  // namespace kvkeep::llama
