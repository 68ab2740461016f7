#pragma once
/// What a policy must know about the model: shapes, RoPE, and which layers have a cache of their own.

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/rope.h"
#include "kvkeep/core/text.h"

namespace kvkeep {

/// What a layer caches. Only `full` layers are ever cut; the others stay untouched and count in no ratio.
enum class LayerKind : std::uint8_t {
  full,       ///< every token attends to all earlier ones; the layer owns its K and V
  elsewhere,  ///< also full, but its rows are not in this cache: another device holds them, or a trace omits them
  sliding,    ///< attends to the last `window` tokens only
  shared,     ///< reads the cache of layer `source`
  other,      ///< holds no K/V rows (state-space, linear attention, cross attention)
};

struct LayerSpec {
  LayerKind kind = LayerKind::full;
  std::int32_t window = 0;                      ///< tokens, `sliding` only
  std::int32_t source = -1;                     ///< layer whose cache is read, `shared` only
  std::optional<RopeSpec> rope = std::nullopt;  ///< where it differs from ModelSpec::rope
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
    }
  }

 private:
  void check_rope(const RopeSpec& one, std::string_view where) const {
    KVKEEP_REQUIRE(one.rotary_dim() <= key_dim, where, ": rope.inv_freq has ", one.inv_freq.size(),
                   " pairs; allowed at most key_dim/2 = ", key_dim / 2);
    one.check(where);
  }
};

}  // namespace kvkeep
