// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The engine's cache, seen by kvkeep: its layers, which Keeper::bind() takes once, and what a step uses of them.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <variant>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Names a sequence (a request) for its lifetime. Chosen by the engine.
using SequenceId = std::int64_t;

/// Most numbers of a head that is stored rotated (DenseKv::keys_rotated).
inline constexpr std::int32_t kMostRotated = 1024;

/// One layer's rows in a dense batch.
struct DenseKv {
  Tensor keys;    ///< any 1-, 2- or 4-byte dtype [B, Hkv, capacity, D] after RoPE; the last dimension contiguous, other
                  ///< strides free
  Tensor values;  ///< any 1-, 2- or 4-byte dtype [B, Hkv, capacity, Dv]
  Tensor key_scales = {};    ///< any dtype [B, Hkv, capacity], if keys are quantised slot by slot: they move with their
                             ///< slots. One scale per head or layer: the same view with strides of 0 (an expanded
                             ///< tensor), of which nothing moves. Undefined: none
  Tensor value_scales = {};  ///< the same for values
  std::int32_t keys_rotated = 0;  ///< every run of so many numbers is stored as its orthonormal Walsh-Hadamard
                                  ///< transform, as llama.cpp stores quantised keys; a power of two that divides D, up
                                  ///< to 1024. 0: none. On the CPU; a device refuses it where keys are read
  std::int32_t values_rotated = 0;  ///< the same for values
  Tensor extra = {};  ///< any dtype [B, Hkv, capacity, De], what else a slot has: the keys of an indexer (DeepSeek
                      ///< V3.2, GLM-5). No policy reads it; its bytes move, and count, with its slot. Undefined: none
};

/// Order of the two middle dimensions of a page.
enum class PageLayout : std::uint8_t {
  slot_head,  ///< [pages, page_size, Hkv, D]
  head_slot,  ///< [pages, Hkv, page_size, D]
};

/// One layer's rows in pages. `CacheView::block_table` says which pages a sequence holds, the same in every layer.
/// If keys and values share one tensor ([2, pages, ...] or [pages, 2, ...]), give two views of it: strides are
/// honoured.
struct PagedKv {
  Tensor keys;    ///< any 1-, 2- or 4-byte dtype [pages, page_size, Hkv, D] or [pages, Hkv, page_size, D] after RoPE;
                  ///< page_size up to 1024, on a GPU a power of two, the last dimension contiguous, other strides free
  Tensor values;  ///< the same with Dv
  PageLayout layout = PageLayout::slot_head;
  Tensor key_scales = {};    ///< any dtype [pages, page_size, Hkv] or [pages, Hkv, page_size], as in DenseKv
  Tensor value_scales = {};  ///< the same for values
  std::int32_t keys_rotated = 0, values_rotated = 0;  ///< as in DenseKv
  Tensor extra = {};  ///< any dtype [pages, page_size, Hkv, De] or [pages, Hkv, page_size, De], as in DenseKv
};

/// `monostate`: a layer that has no rows of its own (see LayerKind).
using LayerKv = std::variant<std::monostate, DenseKv, PagedKv>;

/// A layer's tensors, dense or in pages, with their dimensions by meaning.
struct LayerSides {
  const Tensor &keys, &values, &key_scales, &value_scales, &extra;
  int head, slot;  ///< dimension of KV heads, of slots; dimension 0 is the batch or the pages
  bool paged;
  std::int32_t keys_rotated, values_rotated;
};

/// Requires: the layer has rows, and outlives the result.
[[nodiscard]] LayerSides sides_of(LayerKv&& layer) = delete;
[[nodiscard]] inline LayerSides sides_of(const LayerKv& layer) {
  if (const auto* dense = std::get_if<DenseKv>(&layer))
    return {dense->keys, dense->values, dense->key_scales,   dense->value_scales,  dense->extra, 1,
            2,           false,         dense->keys_rotated, dense->values_rotated};
  const auto& pages = std::get<PagedKv>(layer);
  const bool slot_first = pages.layout == PageLayout::slot_head;
  return {pages.keys,         pages.values, pages.key_scales,   pages.value_scales,  pages.extra, slot_first ? 2 : 1,
          slot_first ? 1 : 2, true,         pages.keys_rotated, pages.values_rotated};
}

/// Physical lengths, in slots, on the host. One number per sequence if all its rows are equally long, else one per row.
struct Lengths {
  std::span<std::int32_t> data;        ///< [n * rows_per_sequence]
  std::int32_t rows_per_sequence = 1;  ///< 1, or layers * Hkv when budgets differ by layer or head
  [[nodiscard]] bool per_row() const { return rows_per_sequence > 1; }
  /// Length of row (layer, head) of the i-th sequence; `row` is layer * Hkv + head.
  [[nodiscard]] std::int32_t& at(std::size_t sequence, std::int32_t row) const {
    return data[sequence * static_cast<std::size_t>(rows_per_sequence) +
                (per_row() ? static_cast<std::size_t>(row) : 0)];
  }
};

class PageAllocator;

/// What an event does when it would have to write a page that others hold too.
enum class SharedPages : std::uint8_t {
  copy,    ///< takes a free page and copies the slots that stay (copy on write)
  refuse,  ///< StateError, before anything is written
};

/// The sequences of one step, and their rows in the cache that is bound. Cheap to copy; it owns nothing. An event
/// writes the numbers behind `lengths` (new physical lengths) and `block_table`, and only reads the rest.
struct CacheView {
  std::span<const SequenceId> sequences;      ///< [n] the sequences of the step
  Lengths lengths;                            ///< physical lengths, including this step's tokens
  std::span<const std::int32_t> places = {};  ///< [n] batch index of each sequence in dense tensors; empty: 0..n-1
  std::span<const std::int32_t> starts = {};  ///< [n] first valid slot of each sequence (left padding); empty: 0
  Tensor block_table = {};  ///< i32 or i64 [n, max_pages] on the host, paged layers only: row i begins with the
                            ///< ceil(length / page_size) pages of sequence i; entries after them are not read. An event
                            ///< writes the pages that stay, then -1 over those it gives back. i64 is copied at an event
  PageAllocator* pages =
      nullptr;  ///< counts references; null: every page belongs to one sequence, and freed pages are only reported
  SharedPages shared_pages = SharedPages::copy;
  std::span<const SequenceId> named = {};  ///< of `sequences`: those whose event comes now, by the program's word (the
                                           ///< end of a turn), if their rows hold more than the budget
};

/// The numbers of CacheView::block_table, of either dtype; none of a dense cache.
class BlockTable {
 public:
  explicit BlockTable(const CacheView& view)
      : data_(view.block_table.bytes()),
        row_(view.block_table.defined() ? view.block_table.stride(0) : 0),
        wide_(view.block_table.dtype() == Dtype::i64) {}

  [[nodiscard]] bool wide() const { return wide_; }
  /// Row `sequence`, if the table is not wide().
  [[nodiscard]] const std::int32_t* row(std::int64_t sequence) const {
    return reinterpret_cast<const std::int32_t*>(data_) + sequence * row_;
  }
  [[nodiscard]] std::int64_t page(std::int64_t sequence, std::int64_t p) const {
    return wide_ ? reinterpret_cast<const std::int64_t*>(data_)[sequence * row_ + p] : row(sequence)[p];
  }
  /// Writes `pages`, and -1 after them up to entry `held`.
  void write(std::int64_t sequence, std::span<const std::int32_t> pages, std::size_t held) const {
    const auto into = [&](auto* row) {
      std::copy(pages.begin(), pages.end(), row);
      std::fill(row + pages.size(), row + std::max(pages.size(), held), -1);
    };
    if (wide_)
      into(reinterpret_cast<std::int64_t*>(data_) + sequence * row_);
    else
      into(reinterpret_cast<std::int32_t*>(data_) + sequence * row_);
  }

 private:
  std::byte* data_;
  std::int64_t row_;  ///< entries from row to row
  bool wide_;
};

// Where the slots of a cache are in memory: no two of those that move may share a byte.

/// Whether every vector of `part` is a piece of the vector of `whole` at the same place, such as the values of latent
/// attention (MLA), which are the first numbers of its keys, or the last. `part` and `whole`: keys or values of DenseKv
/// or PagedKv, or their scales.
[[nodiscard]] bool lies_within(const Tensor& part, const Tensor& whole);

/// Throws InvalidArgument, with both sides by name, if keys, values, scales or extras of a full layer overlap each
/// other, those of another layer that is not LayerKind::shared, or themselves (strides of heads, slots, places or pages
/// that are less than what they step over). Values may lie within the keys of their layer. One scale for all slots, and
/// one vector for all places and slots (strides of 0), may be anywhere: nothing of them moves. cache: [num_layers];
/// common_form() checks the rest of it. Cost: O(n log n) of n tensors, and one test for every two that are interleaved.
void check_layout(const ModelSpec& spec, std::span<const LayerKv> cache);

inline constexpr std::int32_t kLargestPage = 1024;

/// Whether a page may hold this many slots. Kernels shift and mask: on a GPU the number is a power of two.
[[nodiscard]] constexpr bool is_page_size(std::int64_t slots, Device device = {}) {
  return slots >= 1 && slots <= kLargestPage &&
         (device.is_cpu() || std::has_single_bit(static_cast<std::uint64_t>(slots)));
}

/// An event calls take() before it changes anything and give_back() after it has settled everything. Their exceptions
/// pass through it. If take() throws, nothing has changed. If give_back() throws, the event is complete and every other
/// page has been given back.
class PageAllocator {
 public:
  virtual ~PageAllocator() = default;

  /// Number of holders of a page: 1 for a page of one sequence, more for a shared prefix. An event never writes a page
  /// with more than 1.
  [[nodiscard]] virtual std::int32_t references(std::int32_t page) const = 0;

  /// Returns a free page, now held once; -1 if there is none.
  [[nodiscard]] virtual std::int32_t take() = 0;

  /// Removes one holder. A page without holders is free. On a GPU the event may still be reading it at that time: the
  /// next owner of the page must write it on the same stream, or wait for that stream.
  virtual void give_back(std::int32_t page) = 0;
};

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

inline constexpr const char* kSides[] = {"keys", "values", "key scales", "value scales", "extras"};

}  // namespace cache_layout_detail

inline bool lies_within(const Tensor& part, const Tensor& whole) {
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

/// One of keys, values, key scales, value scales and extras of a layer.
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
    const Tensor* const tensors[] = {&kv.keys, &kv.values, &kv.key_scales, &kv.value_scales, &kv.extra};
    KVKEEP_REQUIRE(
        kind != LayerKind::full || spec.key_dim != spec.value_dim || !lies_within(kv.values, kv.keys),
        "cache: values of layer ", l,
        " are its keys; allowed memory of their own, or, with a value_dim below key_dim, a part of the keys");
    for (int s = 0; s < 5; ++s) {
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

inline void check_layout(const ModelSpec& spec, std::span<const LayerKv> cache) {
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
