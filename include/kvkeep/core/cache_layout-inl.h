#pragma once
// Bodies of cache_layout.h: compiled by src/core, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/core/cache_layout.h"
#include "kvkeep/core/header_only.h"

namespace kvkeep {
namespace cache_layout_detail {

__extension__ using Wide = __int128;  // products of any size and stride

/// Multiples `least` to `most` of a stride, in bytes.
struct Steps {
  Wide stride = 0;
  Wide least = 0, most = 0;
};

inline Wide floor_of(Wide a, Wide b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Whether a sum of one multiple of each stride lies between `low` and `high`, both excluded. Strides descend, so that
/// where rows are nested as in any slice of an array, a step or two of each are tried. `tries` ends the search of
/// others: they count as overlapping.
inline bool some_sum_within(std::span<const Steps> steps, Wide low, Wide high, std::int32_t& tries) {
  if (high - low <= 1) return false;
  if (steps.empty()) return low < 0 && high > 0;
  if (--tries < 0) return true;
  const auto rest = steps.subspan(1);
  Wide least = 0, most = 0;
  for (const Steps& s : rest) least += s.least * s.stride, most += s.most * s.stride;
  const Steps& s = steps.front();
  const Wide from = std::max(s.least, floor_of(low - most, s.stride) + 1),
             to = std::min(s.most, floor_of(high - least - 1, s.stride));
  for (Wide m = from; m <= to; ++m)
    if (some_sum_within(rest, low - m * s.stride, high - m * s.stride, tries)) return true;
  return false;
}

inline constexpr const char* kSides[] = {"keys", "values", "key scales", "value scales"};

}  // namespace cache_layout_detail

KVKEEP_INLINE bool lies_within(const Tensor& part, const Tensor& whole) {
  if (!part.defined() || !whole.defined() || part.dim() != whole.dim() || part.device() != whole.device()) return false;
  const bool vectors = part.dim() == 4;
  const std::int64_t bytes = part.element_size(), whole_bytes = whole.element_size();
  for (int d = 0; d < 3; ++d)
    if (part.size(d) != whole.size(d) ||
        cache_layout_detail::Wide{part.step(d)} * bytes != cache_layout_detail::Wide{whole.step(d)} * whole_bytes)
      return false;
  const std::int64_t from = part.bytes() - whole.bytes();
  return from >= 0 && from + (vectors ? part.size(3) : 1) * bytes <= (vectors ? whole.size(3) : 1) * whole_bytes;
}

namespace cache_layout_detail {

/// One of keys, values, key scales and value scales of a layer.
struct Side {
  std::int32_t layer = 0;
  std::int32_t side = 0;
  bool stays = false;  ///< one vector for all slots, which may be anywhere
  bool moves = false;  ///< its slots, unless it stays
  Device device = {};
  std::intptr_t base = 0;
  std::int64_t width = 0;                    ///< bytes of the vector of one slot
  std::array<std::int64_t, 3> sizes = {};    ///< places or pages, then as in the tensor
  std::array<std::int64_t, 3> strides = {};  ///< bytes
};

/// The bytes of a side lie in [low, high).
struct Reach {
  Wide low = 0, high = 0;
};

inline std::vector<Side> sides(const ModelSpec& spec, std::span<const LayerKv> cache) {
  std::vector<Side> all;
  for (std::size_t l = 0; l < std::min(spec.layers.size(), cache.size()); ++l) {
    const LayerKind kind = spec.layers[l].kind;
    const LayerKv& layer = cache[l];
    if (kind == LayerKind::shared || std::holds_alternative<std::monostate>(layer)) continue;
    const LayerSides kv = sides_of(layer);
    const Tensor* const tensors[] = {&kv.keys, &kv.values, &kv.key_scales, &kv.value_scales};
    for (int s = 0; s < 4; ++s) {
      const Tensor& t = *tensors[s];
      if (!t.defined() || t.dim() < 3 || (s % 2 == 1 && lies_within(t, *tensors[s - 1]))) continue;
      // One vector for all slots, such as a scale of a whole layer, or a stand-in for rows that are elsewhere: no slot
      // takes it along.
      const bool of_all = t.size(0) > 1 && t.stride(0) == 0;
      const bool stays = t.step(kv.slot) == 0 && (of_all || (s >= 2 && (t.step(0) == 0 || !kv.paged)));
      const std::int64_t bytes = t.element_size();
      all.push_back({.layer = static_cast<std::int32_t>(l),
                     .side = s,
                     .stays = stays,
                     .moves = kind == LayerKind::full,
                     .device = t.device(),
                     .base = reinterpret_cast<std::intptr_t>(t.bytes()),
                     .width = (t.dim() > 3 ? t.size(3) : 1) * bytes});
      for (int d = 0; d < 3; ++d) {
        std::int64_t& stride = all.back().strides[static_cast<std::size_t>(d)];
        KVKEEP_REQUIRE(!__builtin_mul_overflow(t.step(d), bytes, &stride), "cache: ", kSides[s], " of layer ", l,
                       " have strides ", t.strides(), "; allowed strides within memory");
        all.back().sizes[static_cast<std::size_t>(d)] = t.size(d);
      }
    }
  }
  return all;
}

inline Reach reach_of(const Side& side) {
  Reach reach{.low = side.base, .high = Wide{side.base} + side.width};
  for (std::size_t d = 0; d < 3; ++d) {
    const auto last = Wide{std::max<std::int64_t>(side.sizes[d] - 1, 0)} * side.strides[d];
    (last < 0 ? reach.low : reach.high) += last;
  }
  return reach;
}

/// Whether some vector of `a` and some vector of `b` share a byte.
inline bool overlap(const Side& a, const Side& b) {
  std::array<Steps, 6> all;
  std::size_t count = 0;
  const auto add = [&](Wide stride, Wide least, Wide most) {
    if (stride == 0 || least == most) return;  // then both are 0
    const Steps own = stride > 0 ? Steps{stride, least, most} : Steps{-stride, -most, -least};
    std::size_t at = count++;
    for (; at > 0 && all[at - 1].stride < own.stride; --at) all[at] = all[at - 1];
    all[at] = own;
  };
  for (std::size_t d = 0; d < 3; ++d) {
    if (a.strides[d] == b.strides[d]) {
      add(a.strides[d], 1 - a.sizes[d], b.sizes[d] - 1);
    } else {
      add(a.strides[d], 1 - a.sizes[d], 0);
      add(b.strides[d], 0, b.sizes[d] - 1);
    }
  }
  const auto apart = Wide{b.base} - a.base;
  std::int32_t tries = 100'000;
  return some_sum_within({all.data(), count}, -b.width - apart, a.width - apart, tries);
}

}  // namespace cache_layout_detail

KVKEEP_INLINE void check_layout(const ModelSpec& spec, std::span<const LayerKv> cache) {
  using cache_layout_detail::kSides, cache_layout_detail::Reach, cache_layout_detail::Side, cache_layout_detail::Wide;
  const std::vector<Side> all = cache_layout_detail::sides(spec, cache);
  std::vector<std::pair<Reach, const Side*>> reaches;
  for (const Side& side : all) {
    const Reach reach = cache_layout_detail::reach_of(side);
    KVKEEP_REQUIRE(reach.low >= 0 && reach.high <= std::numeric_limits<std::intptr_t>::max(),
                   "cache: ", kSides[side.side], " of layer ", side.layer, " have strides of ", side.strides[0], ", ",
                   side.strides[1], " and ", side.strides[2], " bytes; allowed strides within memory");
    if (side.stays || std::ranges::find(side.sizes, 0) != side.sizes.end()) continue;
    reaches.emplace_back(reach, &side);
    if (!side.moves) continue;
    std::array<std::size_t, 3> order{0, 1, 2};
    std::ranges::sort(order, {}, [&](std::size_t d) { return std::abs(side.strides[d]); });
    Wide inner = side.width;
    for (const std::size_t d : order) {
      if (side.sizes[d] == 1) continue;
      KVKEEP_REQUIRE(std::abs(side.strides[d]) >= inner, "cache: slots of the ", kSides[side.side], " of layer ",
                     side.layer, " share memory: sizes ", Shape(side.sizes), " with strides of ", Shape(side.strides),
                     " bytes and vectors of ", side.width,
                     "; allowed strides that keep every slot of every head apart");
      inner += Wide{side.sizes[d] - 1} * std::abs(side.strides[d]);
    }
  }
  std::ranges::sort(reaches, {}, [](const auto& one) { return one.first.low; });
  for (std::size_t i = 0; i < reaches.size(); ++i)
    for (std::size_t j = i + 1; j < reaches.size() && reaches[j].first.low < reaches[i].first.high; ++j) {
      const Side &a = *std::min(reaches[i].second, reaches[j].second),
                 &b = *std::max(reaches[i].second, reaches[j].second);
      if (a.device != b.device || !(a.moves || b.moves) || !cache_layout_detail::overlap(a, b)) continue;
      refuse("cache: ", kSides[a.side], " of layer ", a.layer, " and ", kSides[b.side], " of layer ", b.layer,
             " share memory; allowed values within the keys of their layer, and a layer that reads another one's "
             "cache as LayerKind::shared");
    }
}

}  // namespace kvkeep
