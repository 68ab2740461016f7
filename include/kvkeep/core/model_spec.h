// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a policy must know about the model: shapes, RoPE, and which layers have a cache of their own.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Which two components form rotary pair f of F.
enum class RopeStyle : std::uint8_t {
  half,         ///< (x[f], x[f + F]): Llama, Qwen
  interleaved,  ///< (x[2f], x[2f + 1]): GPT-J, Cohere, GLM-4
  none,         ///< there is no RoPE: SmolLM3's every fourth layer, Cohere 2's full layers
};

inline constexpr std::array<const char*, 3> kRopeStyleNames{"half", "interleaved", "none"};
[[nodiscard]] constexpr const char* name_of(RopeStyle style) {
  return kRopeStyleNames[static_cast<std::size_t>(style)];
}

/// RoPE of a layer as loops read it, on either machine.
struct RopeView {
  const double* inv_freq = nullptr;  ///< f64 [pairs] radians per position
  std::int32_t pairs = 0;            ///< F; 0: nothing turns
  RopeStyle style = RopeStyle::half;
  double attention_scaling = 1.0;
};

/// RoPE of a layer, after any scaling (llama3, YaRN). Pair f rotates by position * inv_freq[f]; cos and sin are
/// multiplied by `attention_scaling`. Components past 2 * inv_freq.size() are not rotated (partial RoPE).
struct RopeSpec {
  RopeStyle style = RopeStyle::half;
  std::vector<double> inv_freq = {};  ///< [F] radians per position; empty: not stated, unless the style is `none`
  double attention_scaling = 1.0;     ///< 1 except for YaRN and similar

  /// RoPE of a layer that has none.
  [[nodiscard]] static RopeSpec absent() { return {.style = RopeStyle::none}; }
  /// False: the engine left it open, so nothing that turns queries or keys can run.
  [[nodiscard]] bool stated() const { return style == RopeStyle::none || !inv_freq.empty(); }
  [[nodiscard]] std::int64_t rotary_dim() const { return 2 * static_cast<std::int64_t>(inv_freq.size()); }
  /// `frequencies`: those of inv_freq, where the reader finds them; null: here.
  [[nodiscard]] RopeView view(const double* frequencies = nullptr) const {
    return {frequencies != nullptr ? frequencies : inv_freq.data(), static_cast<std::int32_t>(inv_freq.size()), style,
            attention_scaling};
  }
  bool operator==(const RopeSpec&) const = default;

  /// With a faster one the phase at the last position is lost in double. A frequency of 0 is a pair that is not
  /// rotated.
  static constexpr double kFastest = 65536, kMostScaling = 65536;
  /// Throws InvalidArgument, which begins with `where`, with the first number that no model has.
  void check(std::string_view where) const {
    KVKEEP_REQUIRE(style != RopeStyle::none || inv_freq.empty(), where, ": rope.style is none, and rope.inv_freq has ",
                   inv_freq.size(), " frequencies; allowed none");
    for (std::size_t f = 0; f < inv_freq.size(); ++f)
      KVKEEP_REQUIRE(inv_freq[f] >= 0 && inv_freq[f] <= kFastest, where, ": rope.inv_freq[", f, "] is ", inv_freq[f],
                     "; allowed 0 to ", kFastest, " radians per position");
    KVKEEP_REQUIRE(attention_scaling > 0 && attention_scaling <= kMostScaling, where, ": rope.attention_scaling is ",
                   attention_scaling, "; allowed above 0, up to ", kMostScaling);
  }
};

/// Component indices of pair `f` among `pairs`.
struct RopePair {
  std::int64_t first;
  std::int64_t second;
};
KVKEEP_HD inline RopePair rope_pair(RopeStyle style, std::int64_t f, std::int64_t pairs) {
  return style == RopeStyle::half ? RopePair{f, f + pairs} : RopePair{2 * f, 2 * f + 1};
}

/// Angle of pair f at `position`, reduced to about [-pi, pi]. In double, because at position 1e6 a float phase is off
/// by 0.03 rad.
KVKEEP_HD inline double rope_angle(std::int64_t position, double inv_freq) {
  constexpr double kTurn = 6.283185307179586476925286766559;
  const double angle = static_cast<double>(position) * inv_freq;
  return angle - product(kTurn, floor(angle / kTurn + 0.5));
}

/// cos and sin of one pair at `position`, times the attention scaling.
struct RopeTurn {
  float cosine;
  float sine;
};
KVKEEP_HD inline RopeTurn rope_turn(std::int64_t position, double inv_freq, double attention_scaling) {
  const double angle = rope_angle(position, inv_freq);
  return {static_cast<float>(cos(angle) * attention_scaling), static_cast<float>(sin(angle) * attention_scaling)};
}

/// Mean of the turns of one pair at `count` positions from `first` on, times the attention scaling. In closed form,
/// exp(i w (first + (n - 1) / 2)) sin(n w / 2) / (n sin(w / 2)), or term by term if sin(w / 2) vanishes.
struct RopeMeanTurn {
  double cosine;
  double sine;
};
KVKEEP_HD inline RopeMeanTurn rope_mean_turn(std::int64_t first, std::int64_t count, double inv_freq,
                                             double attention_scaling) {
  const double slow = sin(inv_freq / 2), n = static_cast<double>(count);
  double c = 0, s = 0;
  if (fabs(slow) > 1e-9) {
    const double size = sin(n * inv_freq / 2) / (n * slow), angle = rope_angle(2 * first + count - 1, inv_freq / 2);
    c = size * cos(angle);
    s = size * sin(angle);
  } else {
    for (std::int64_t p = 0; p < count; ++p) {
      c += cos(rope_angle(first + p, inv_freq));
      s += sin(rope_angle(first + p, inv_freq));
    }
    c /= n;
    s /= n;
  }
  return {c * attention_scaling, s * attention_scaling};
}

/// The turns of every pair at one position.
/// Cost: F sine-cosine pairs in double.
inline void rope_at(const RopeSpec& rope, std::int64_t position, float* cosines, float* sines) {
  for (std::size_t f = 0; f < rope.inv_freq.size(); ++f) {
    const RopeTurn turn = rope_turn(position, rope.inv_freq[f], rope.attention_scaling);
    cosines[f] = turn.cosine;
    sines[f] = turn.sine;
  }
}

/// Rotates one vector in place by the cos and sin of its position.
inline void rope_rotate(RopeStyle style, std::int64_t pairs, const float* cosines, const float* sines, float* x) {
  for (std::int64_t f = 0; f < pairs; ++f) {
    const auto [i, j] = rope_pair(style, f, pairs);
    const float a = x[i], b = x[j];
    x[i] = product(a, cosines[f]) - product(b, sines[f]);
    x[j] = product(b, cosines[f]) + product(a, sines[f]);
  }
}

/// What a layer caches. Only `full` layers are ever cut; the others stay untouched and count in no ratio.
enum class LayerKind : std::uint8_t {
  full,     ///< every token attends to all earlier ones; the layer owns its K and V
  remote,   ///< also full, but its rows are not in this cache: another device holds them, or a trace omits them
  sliding,  ///< attends to the last `window` tokens only, or to those of its chunk of `window` (Llama 4)
  shared,   ///< reads the cache of layer `source`
  other,    ///< holds no K/V rows (state-space, linear attention, cross attention)
};

struct LayerSpec {
  LayerKind kind = LayerKind::full;
  std::int32_t window = 0;                      ///< tokens, `sliding` only
  std::int32_t source = -1;                     ///< layer whose cache is read, `shared` only
  std::optional<RopeSpec> rope = std::nullopt;  ///< where it differs from ModelSpec::rope
  std::vector<float> sinks = {};  ///< [Hq] sink logits: each joins the softmax of its query head beside the keys, as
                                  ///< one more key without a value (gpt-oss); minus infinity: none. Empty: none. Read
                                  ///< in full layers only, checked in all
};

/// Shapes and conventions of one model. Query head h reads KV head h / group().
struct ModelSpec {
  std::int32_t query_heads = 0;  ///< Hq; 0: unknown, for policies that read no queries
  std::int32_t kv_heads = 0;     ///< Hkv, divides Hq
  std::int32_t key_dim = 0;      ///< D of keys and queries
  std::int32_t value_dim = 0;    ///< D of values; may differ
  double softmax_scale = 0.0;    ///< factor on q.k; 0 means 1/sqrt(key_dim)
  RopeSpec rope = {};            ///< after scaling, of every layer that states none of its own
  std::vector<LayerSpec> layers;
  std::int32_t first_head = 0;   ///< KV heads of the model before these, where ranks hold a part each (across_ranks())
  std::int32_t model_heads = 0;  ///< KV heads of the whole model then; 0: kv_heads
  double logit_cap = 0;          ///< c: logits are c tanh(q.k scale / c) (Gemma 2, Grok); sink logits are not capped.
                                 ///< 0: none

  static constexpr std::int32_t kMost = 1 << 16;      ///< heads, and numbers of a head
  static constexpr std::int32_t kMostRows = 1 << 24;  ///< layers times KV heads

  [[nodiscard]] std::int32_t num_layers() const { return static_cast<std::int32_t>(layers.size()); }
  /// KV heads of the whole model.
  [[nodiscard]] std::int32_t whole_heads() const { return model_heads > 0 ? model_heads : kv_heads; }
  [[nodiscard]] std::int32_t group() const { return query_heads / kv_heads; }
  [[nodiscard]] double scale() const {
    return softmax_scale > 0 ? softmax_scale : 1.0 / std::sqrt(static_cast<double>(key_dim));
  }

  /// RoPE of one layer. The reference lives as long as the spec.
  [[nodiscard]] const RopeSpec& rope_of(std::int32_t layer) const {
    const std::optional<RopeSpec>& own = layers[static_cast<std::size_t>(layer)].rope;
    return own ? *own : rope;
  }
  /// Sink logits of the query heads that read KV head `head`, [group()]; null: the layer has none. They live as long as
  /// the spec.
  [[nodiscard]] const float* sinks_of(std::int32_t layer, std::int32_t head) const {
    const std::vector<float>& all = layers[static_cast<std::size_t>(layer)].sinks;
    return all.empty() ? nullptr : all.data() + std::int64_t{head} * group();
  }
  /// The first layer that a policy may cut and whose RoPE is not stated; -1: none.
  [[nodiscard]] std::int32_t first_without_rope() const {
    for (const std::int32_t l : full_layers())
      if (!rope_of(l).stated()) return l;
    return -1;
  }

  /// The layers a policy may cut, ascending.
  [[nodiscard]] std::vector<std::int32_t> full_layers() const {
    std::vector<std::int32_t> found;
    for (std::int32_t l = 0; l < num_layers(); ++l)
      if (layers[static_cast<std::size_t>(l)].kind == LayerKind::full) found.push_back(l);
    return found;
  }

  /// Throws InvalidArgument with the first field that is out of range.
  void check() const {
    KVKEEP_REQUIRE(kv_heads >= 1 && kv_heads <= kMost, "ModelSpec: kv_heads is ", kv_heads, "; allowed 1 to ", kMost);
    KVKEEP_REQUIRE(query_heads <= kMost, "ModelSpec: query_heads is ", query_heads, "; allowed up to ", kMost);
    KVKEEP_REQUIRE(query_heads == 0 || (query_heads >= kv_heads && query_heads % kv_heads == 0),
                   "ModelSpec: query_heads must be a multiple of kv_heads; given ", query_heads, " query heads and ",
                   kv_heads, " KV heads");
    KVKEEP_REQUIRE(first_head >= 0 && whole_heads() - first_head >= kv_heads, "ModelSpec: KV heads ", first_head,
                   " to ", std::int64_t{first_head} + kv_heads - 1, " of ", whole_heads(),
                   "; allowed heads that the model has");
    KVKEEP_REQUIRE(whole_heads() <= kMost, "ModelSpec: model_heads is ", model_heads, "; allowed up to ", kMost);
    KVKEEP_REQUIRE(key_dim >= 1 && value_dim >= 1 && key_dim <= kMost && value_dim <= kMost, "ModelSpec: key_dim is ",
                   key_dim, " and value_dim ", value_dim, "; allowed 1 to ", kMost);
    KVKEEP_REQUIRE(std::isfinite(softmax_scale) && softmax_scale >= 0,
                   "ModelSpec: softmax_scale must be finite and not negative (0 means 1/sqrt(key_dim)); given ",
                   softmax_scale);
    KVKEEP_REQUIRE(std::isfinite(logit_cap) && logit_cap >= 0,
                   "ModelSpec: logit_cap must be finite and not negative (0 means none); given ", logit_cap);
    check_rope(rope, "ModelSpec");
    const std::size_t most_layers = static_cast<std::size_t>(kMostRows / whole_heads());
    KVKEEP_REQUIRE(!layers.empty() && layers.size() <= most_layers, "ModelSpec: there are ", layers.size(),
                   " layers; allowed 1 to ", most_layers, ", so that rows of all heads are at most ", kMostRows);
    for (std::int32_t l = 0; l < num_layers(); ++l) {
      const LayerSpec& layer = layers[static_cast<std::size_t>(l)];
      KVKEEP_REQUIRE(layer.kind != LayerKind::sliding || layer.window >= 1, "ModelSpec: layer ", l,
                     " has a sliding window of ", layer.window, "; allowed 1 or more");
      KVKEEP_REQUIRE(layer.kind != LayerKind::shared || (layer.source >= 0 && layer.source < l), "ModelSpec: layer ", l,
                     " shares the cache of layer ", layer.source, "; allowed an earlier layer");
      if (layer.rope) check_rope(*layer.rope, text("ModelSpec: layer ", l));
      check_sinks(layer.sinks, l);
    }
  }

 private:
  void check_sinks(const std::vector<float>& sinks, std::int32_t l) const {
    KVKEEP_REQUIRE(sinks.empty() || std::ssize(sinks) == query_heads, "ModelSpec: layer ", l, " has ", sinks.size(),
                   " sink logits; allowed none, or one for each of the ", query_heads, " query heads");
    for (std::size_t h = 0; h < sinks.size(); ++h)
      KVKEEP_REQUIRE(sinks[h] < std::numeric_limits<float>::infinity(), "ModelSpec: the sink logit of query head ", h,
                     " of layer ", l, " is ", sinks[h], "; allowed finite numbers, and minus infinity for none");
  }
  void check_rope(const RopeSpec& one, std::string_view where) const {
    KVKEEP_REQUIRE(one.rotary_dim() <= key_dim, where, ": rope.inv_freq has ", one.inv_freq.size(),
                   " pairs; allowed at most key_dim/2 = ", key_dim / 2);
    one.check(where);
  }
};

}  // namespace kvkeep
