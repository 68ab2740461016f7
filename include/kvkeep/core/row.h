// SPDX-License-Identifier: Apache-2.0
#pragma once
/// All rows of an event, and the queries that go with them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/budget.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/query_view.h"
#include "kvkeep/core/slot.h"

namespace kvkeep {

/// Address of one side of the row (place, head) of a dense layer, from slot `start` on. `side`: [B, Hkv, capacity, D],
/// or without D for scales. If it is undefined, width is 0.
[[nodiscard]] SlotAddress dense_address(const Tensor& side, std::int64_t place, std::int64_t head,
                                        std::int64_t start = 0);

/// The same for a paged layer whose row holds `pages` in order.
[[nodiscard]] SlotAddress paged_address(const Tensor& side, PageLayout layout, std::int64_t head,
                                        const std::int32_t* pages);

/// Whether queries are given before or after the rotary embedding.
enum class QueryBasis : std::uint8_t { pre_rope, post_rope };

/// RowGroup::surprisal of positions without a token.
inline constexpr float kNoToken = -std::numeric_limits<float>::infinity();

namespace row_detail {
/// Its address stands for a type, in programs without RTTI too.
template <class T>
[[gnu::visibility("default")]] inline constexpr char kType = 0;
}  // namespace row_detail

/// The Hkv rows of one (layer, sequence). They share queries and are adjacent in the table.
struct RowGroup {
  std::int32_t layer = 0;
  std::int32_t sequence = 0;
  std::int64_t first_row = 0;
  QueryView queries;
  std::int32_t next_position = 0;  ///< logical position of the next token: that of the last one plus 1
  std::int32_t prompt_end = 0;     ///< logical position below which every token belongs to the prompt
  TokenCount seen = {};            ///< tokens of the sequence so far
  TokenCount prompt = {};          ///< how many of them are its prompt
  std::span<const std::int32_t> newest =
      {};  ///< rows on a device: positions of the newest slots of every row, which are not in Row::positions yet
  std::int32_t prompt_slots = -1;  ///< rows on a device: slots of every row at positions below `prompt_end`, when all
                                   ///< of them stay; -1: not known
  std::span<const float> surprisal =
      {};  ///< nats, by logical position, of all tokens, if the policy asks for them; kNoToken in gaps
  std::int32_t settled = 0;  ///< logical position below which every decision is final (Fold::settled)
  std::span<const std::int32_t> extra_slots = {};  ///< [whole_heads] slots that the row of each KV head of the model
                                                   ///< holds beyond this group's first; empty: as many as that
  std::span<const PositionSpan> pinned = {};       ///< ascending, disjoint: slots at these positions stay in every row
  std::vector<std::pair<const char*, const void*>> attached = {};  ///< what parts of a policy's own give it, by type

  /// For Part::describe(): `data` is valid as long as the event.
  template <class T>
  void attach(const T& data) {
    attached.emplace_back(&row_detail::kType<T>, &data);
  }
  /// For KVPolicy::decide(); null if no part gave one.
  template <class T>
  [[nodiscard]] const T* find() const {
    for (const auto& [type, data] : attached)
      if (type == &row_detail::kType<T>) return static_cast<const T*>(data);
    return nullptr;
  }
};

/// All rows of one event, in the order layer, sequence, head.
struct RowTable {
  std::vector<Row> rows;
  std::vector<RowGroup> groups;
  Dtype key_dtype = Dtype::f32;
  Dtype value_dtype = Dtype::f32;
  std::int32_t keys_rotated = 0, values_rotated = 0;  ///< as in DenseKv
  Device device = {};
  std::int32_t page_size = 0;  ///< slots per page; 0: dense
  std::int64_t slots = 0;      ///< sum of all lengths: the size of a flat f32 array over the rows
  /// Where the view's block table is i64: the pages of the sequences, which SlotAddress::pages point to.
  std::vector<std::shared_ptr<const std::vector<std::int32_t>>> narrowed_pages = {};

  [[nodiscard]] std::span<const Row> rows_of(const RowGroup& group, std::int32_t kv_heads) const {
    return {rows.data() + group.first_row, static_cast<std::size_t>(kv_heads)};
  }
  /// Slots that the row of a KV head of the whole model holds, here or on another rank.
  [[nodiscard]] std::int32_t length_of(const RowGroup& group, std::int32_t head, const ModelSpec& spec) const {
    const auto own = static_cast<std::uint32_t>(head - spec.first_head);
    const Row* const first = rows.data() + group.first_row;
    if (own < static_cast<std::uint32_t>(spec.kv_heads)) return first[own].length;
    return first->length + (group.extra_slots.empty() ? 0 : group.extra_slots[static_cast<std::size_t>(head)]);
  }
};

/// What all rows of a cache have in common: a table without rows. cache: [num_layers]; of: the layers that have rows.
/// Throws InvalidArgument if the cache does not fit the spec: layer count, kind of cache, dtype, shape, strides, device
/// or page size.
[[nodiscard]] RowTable common_form(const ModelSpec& spec, std::span<const LayerKv> cache,
                                   std::span<const std::int32_t> of);

/// Throws InvalidArgument if a view of a cache of that form does not fit the spec: numbers of lengths, places and
/// starts, and the block table.
void check_view(const ModelSpec& spec, const RowTable& form, const CacheView& view);

/// Throws InvalidArgument if the s-th sequence of the view is at no place of the layer, or holds more slots than fit.
void check_fits(const ModelSpec& spec, const LayerSides& layer, std::int32_t l, const RowTable& form,
                const CacheView& view, std::size_t s);

/// Rows of the layers `of` for the sequences `due` (indices into the view), without columns and queries. form: that of
/// the cache. Throws InvalidArgument as check_view() does, and for a page, place or length out of range. Cost: O(rows),
/// plus O(pages) of the due sequences if layers are paged; no allocation per slot.
[[nodiscard]] RowTable make_rows(const ModelSpec& spec, std::span<const LayerKv> cache, const RowTable& form,
                                 const CacheView& view, std::span<const std::int32_t> of,
                                 std::span<const std::int32_t> due);
/// The same; finds the form itself.
[[nodiscard]] inline RowTable make_rows(const ModelSpec& spec, std::span<const LayerKv> cache, const CacheView& view,
                                        std::span<const std::int32_t> of, std::span<const std::int32_t> due) {
  return make_rows(spec, cache, common_form(spec, cache, of), view, of, due);
}

namespace row_detail {

/// The shape that a layer's tensors must have, in words.
inline std::string shape_of(const LayerSides& layer, std::int32_t heads, std::int64_t dim) {
  if (!layer.paged) return text("[B, ", heads, ", capacity, ", dim, "]");
  return layer.slot == 1 ? text("[pages, page_size, ", heads, ", ", dim, "]")
                         : text("[pages, ", heads, ", page_size, ", dim, "]");
}

/// What engines are known to store in such a shape, if a head's numbers lie apart in it; "": nothing.
inline const char* apart(const Tensor& t, const LayerSides& layer, std::int32_t heads, std::int64_t dim) {
  if (t.dim() == 5)
    return ", which looks like vLLM's classic layout [pages, heads, D/x, page_size, x], where a head's numbers lie "
           "apart";
  if (t.dim() != 4 || t.size(1) != heads || t.size(2) != dim) return "";
  return layer.paged
             ? ", which looks like vLLM's classic layout of values [pages, heads, D, page_size], where a head's "
               "numbers lie apart"
             : ", which looks transposed, [B, heads, D, capacity], where a head's numbers lie apart";
}

inline void check_side(const char* side, const Tensor& t, const LayerSides& layer, std::int32_t l,
                       const ModelSpec& spec, std::int32_t dim) {
  KVKEEP_REQUIRE(t.defined() && t.dim() == 4, "cache: ", side, " of layer ", l,
                 t.defined() ? text(" have shape ", t.sizes(), apart(t, layer, spec.kv_heads, dim)) : " are absent",
                 "; allowed ", shape_of(layer, spec.kv_heads, dim));
  const std::int64_t numbers = numbers_of(t.dtype());
  KVKEEP_REQUIRE(dim % numbers == 0, "cache: ", side, " of layer ", l, " are ", t.dtype(), ", blocks of ", numbers,
                 " numbers, in heads of ", dim, "; allowed heads of whole blocks");
  KVKEEP_REQUIRE(t.size(layer.head) == spec.kv_heads && t.size(3) * numbers == dim, "cache: ", side, " of layer ", l,
                 " have shape ", t.sizes(), apart(t, layer, spec.kv_heads, dim / numbers), "; allowed ",
                 shape_of(layer, spec.kv_heads, dim / numbers), " as the model spec says");
  KVKEEP_REQUIRE(t.has_memory(), "cache: ", side, " of layer ", l, " have no address (null); allowed an address");
  KVKEEP_REQUIRE(t.stride(3) == 1 || dim == 1, "cache: ", side, " of layer ", l, " have stride ", t.stride(3),
                 " in the last dimension, as if they were stored transposed; allowed 1: a head's numbers side by side");
}

inline void check_rotated(const char* side, std::int32_t run, std::int32_t l, std::int32_t dim) {
  KVKEEP_REQUIRE(run == 0 || (run > 0 && std::has_single_bit(static_cast<std::uint32_t>(run)) && dim % run == 0 &&
                              dim <= kMostRotated),
                 "cache: ", side, " of layer ", l, " are rotated in runs of ", run, " numbers, in heads of ", dim,
                 "; allowed 0, or a power of two that divides heads of up to ", kMostRotated);
}

inline void check_scales(const char* side, const Tensor& scales, const Tensor& rows, std::int32_t l) {
  if (!scales.defined()) return;
  KVKEEP_REQUIRE(scales.has_memory(), "cache: ", side, " of layer ", l, " have no address (null); allowed an address");
  KVKEEP_REQUIRE(scales.dim() == 3 && scales.size(0) == rows.size(0) && scales.size(1) == rows.size(1) &&
                     scales.size(2) == rows.size(2),
                 "cache: ", side, " of layer ", l, " do not match their rows; allowed the shape [", rows.size(0), ", ",
                 rows.size(1), ", ", rows.size(2), "]");
  KVKEEP_REQUIRE(scales.device() == rows.device(), "cache: ", side, " of layer ", l, " are on ", scales.device().str(),
                 ", their rows on ", rows.device().str(), "; allowed one device");
}

inline void check_extra(const Tensor& extra, const Tensor& keys, const LayerSides& layer, std::int32_t l) {
  if (!extra.defined()) return;
  KVKEEP_REQUIRE(extra.dim() == 4 && extra.size(0) == keys.size(0) && extra.size(1) == keys.size(1) &&
                     extra.size(2) == keys.size(2) && extra.size(3) > 0,
                 "cache: extras of layer ", l, " have shape ", extra.sizes(), "; allowed ",
                 layer.paged ? "pages, slots and heads" : "places, heads and slots", " as the keys, ", keys.size(0),
                 ", ", keys.size(1), " and ", keys.size(2), ", and then one number or more");
  KVKEEP_REQUIRE(extra.has_memory(), "cache: extras of layer ", l, " have no address (null); allowed an address");
  KVKEEP_REQUIRE(extra.stride(3) == 1 || extra.size(3) == 1, "cache: extras of layer ", l, " have stride ",
                 extra.stride(3), " in the last dimension; allowed 1: a slot's numbers side by side");
  KVKEEP_REQUIRE(extra.device() == keys.device(), "cache: extras of layer ", l, " are on ", extra.device().str(),
                 ", keys on ", keys.device().str(), "; allowed one device");
}

/// One side of the row (place, head) of either kind of layer.
inline SlotAddress address(const LayerKv& layer, const Tensor& side, std::int64_t place, std::int32_t head,
                           std::int64_t start, const std::int32_t* pages) {
  if (const auto* paged = std::get_if<PagedKv>(&layer)) return paged_address(side, paged->layout, head, pages);
  return dense_address(side, place, head, start);
}

inline void check_table(const CacheView& view) {
  const Tensor& table = view.block_table;
  KVKEEP_REQUIRE(table.defined() && table.dim() == 2 && (table.dtype() == Dtype::i32 || table.dtype() == Dtype::i64) &&
                     table.size(0) == static_cast<std::int64_t>(view.sequences.size()) &&
                     (table.size(1) <= 1 || table.stride(1) == 1),
                 "cache: the block table is ", table.defined() ? text(table.dtype(), " ", table.sizes()) : "missing",
                 "; a paged layer needs one, allowed i32 or i64 [", view.sequences.size(),
                 ", max_pages] with its last dimension contiguous");
  KVKEEP_REQUIRE(table.has_memory(), "cache: the block table has no address (null); allowed an address");
  KVKEEP_REQUIRE(table.device().is_cpu(), "cache: the block table is on ", table.device().str(),
                 "; allowed the CPU: page numbers are host integers, like lengths");
  KVKEEP_REQUIRE(table.size(1) <= std::numeric_limits<std::int32_t>::max(), "cache: the block table names ",
                 table.size(1), " pages per sequence; allowed up to ", std::numeric_limits<std::int32_t>::max());
  KVKEEP_REQUIRE(table.size(0) <= 1 || table.stride(0) >= table.size(1) || table.stride(0) <= -table.size(1),
                 "cache: rows of the block table, ", table.size(1), " entries long, are ", table.stride(0),
                 " apart; allowed a row of its own for each sequence");
  for (const std::int32_t start : view.starts)
    KVKEEP_REQUIRE(start == 0, "cache: a sequence starts at slot ", start, "; allowed 0 in pages");
}

/// The pages of the sequences `due`, by their longest rows, of a block table that is i64. Numbers that are too large
/// are refused with the layer that they are too large for.
inline std::vector<std::shared_ptr<const std::vector<std::int32_t>>> narrowed_pages(const ModelSpec& spec,
                                                                                    const RowTable& form,
                                                                                    const CacheView& view,
                                                                                    std::span<const std::int32_t> of,
                                                                                    std::span<const std::int32_t> due) {
  const BlockTable blocks(view);
  std::vector<std::shared_ptr<const std::vector<std::int32_t>>> all;
  for (const std::int32_t i : due) {
    std::int64_t longest = 0;
    for (const std::int32_t l : of)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        longest = std::max<std::int64_t>(longest, view.lengths.at(static_cast<std::size_t>(i), l * spec.kv_heads + h));
    const std::int64_t held = std::min((longest + form.page_size - 1) / form.page_size, view.block_table.size(1));
    std::vector<std::int32_t> pages;
    for (std::int64_t p = 0; p < held; ++p) pages.push_back(static_cast<std::int32_t>(blocks.page(i, p)));
    all.push_back(std::make_shared<const std::vector<std::int32_t>>(std::move(pages)));
  }
  return all;
}

/// The address of a side's very first slot; `slot` is the dimension of the slots. Null if the side holds none.
inline SlotAddress first_slot(const Tensor& side, int slot) {
  const auto bytes = side.element_size();
  return {
      .base = side.bytes(), .stride = side.step(slot) * bytes, .width = (side.dim() == 4 ? side.size(3) : 1) * bytes};
}

}  // namespace row_detail

inline SlotAddress dense_address(const Tensor& side, std::int64_t place, std::int64_t head, std::int64_t start) {
  if (!side.defined()) return {};
  SlotAddress address = row_detail::first_slot(side, 2);
  if (address.base != nullptr)
    address.base += (place * side.step(0) + head * side.step(1) + start * side.step(2)) * side.element_size();
  return address;
}

inline SlotAddress paged_address(const Tensor& side, PageLayout layout, std::int64_t head, const std::int32_t* pages) {
  if (!side.defined()) return {};
  const int slot = layout == PageLayout::slot_head ? 1 : 2;
  const auto bytes = side.element_size();
  SlotAddress address = row_detail::first_slot(side, slot);
  if (address.base != nullptr) address.base += head * side.step(3 - slot) * bytes;
  address.pages = pages;
  address.page_stride = side.step(0) * bytes;
  const auto slots = static_cast<std::uint32_t>(side.size(slot));
  if (std::has_single_bit(slots))
    address.page_shift = std::countr_zero(slots);
  else
    address.page_shift = -1, address.page_slots = static_cast<std::int32_t>(slots);
  return address;
}

inline RowTable common_form(const ModelSpec& spec, std::span<const LayerKv> cache, std::span<const std::int32_t> of) {
  KVKEEP_REQUIRE(cache.size() == spec.layers.size(), "cache: it has ", cache.size(), " layers; allowed ",
                 spec.layers.size(), " as the model spec says");
  for (std::size_t l = 0; l < spec.layers.size(); ++l)
    KVKEEP_REQUIRE(spec.layers[l].kind != LayerKind::sliding || !std::holds_alternative<PagedKv>(cache[l]),
                   "cache: layer ", l,
                   " has a sliding window and uses pages of the shared block table, which events cut and free; allowed "
                   "pages in a table of your own, which kvkeep does not see (std::monostate)");

  RowTable form;
  for (const std::int32_t l : of) {
    KVKEEP_REQUIRE(!std::holds_alternative<std::monostate>(cache[static_cast<std::size_t>(l)]), "cache: layer ", l,
                   " has no rows, but the model spec calls it a full layer");
    const LayerSides layer = sides_of(cache[static_cast<std::size_t>(l)]);
    const auto& [keys, values, key_scales, value_scales, extra, head_dim, slot_dim, paged, keys_rotated,
                 values_rotated] = layer;
    row_detail::check_side("keys", keys, layer, l, spec, spec.key_dim);
    row_detail::check_side("values", values, layer, l, spec, spec.value_dim);
    KVKEEP_REQUIRE(keys.size(0) == values.size(0) && keys.size(slot_dim) == values.size(slot_dim),
                   "cache: keys and values of layer ", l, " differ in ",
                   paged ? "pages or page size" : "batch or capacity", "; given [", keys.size(0), ", ",
                   keys.size(slot_dim), "] and [", values.size(0), ", ", values.size(slot_dim), "]");
    KVKEEP_REQUIRE(keys.device() == values.device(), "cache: keys of layer ", l, " are on ", keys.device().str(),
                   ", values on ", values.device().str(), "; allowed one device");
    row_detail::check_scales("key scales", key_scales, keys, l);
    row_detail::check_scales("value scales", value_scales, values, l);
    row_detail::check_extra(extra, keys, layer, l);
    const std::int64_t page_size = paged ? keys.size(slot_dim) : 0;
    if (l == of.front()) {
      form.key_dtype = keys.dtype();
      form.value_dtype = values.dtype();
      form.keys_rotated = keys_rotated;
      form.values_rotated = values_rotated;
      form.device = keys.device();
      form.page_size = static_cast<std::int32_t>(page_size);
    }
    KVKEEP_REQUIRE(!paged || is_page_size(page_size, keys.device()), "cache: pages of layer ", l, " hold ", page_size,
                   " slots on ", keys.device().str(), "; allowed 1 to ", kLargestPage,
                   keys.device().is_cpu() ? "" : ", a power of two on a GPU");
    KVKEEP_REQUIRE(page_size == form.page_size, "cache: pages of layer ", l, " hold ", page_size,
                   " slots (0: it is dense); allowed ", form.page_size, " as in the first layer");
    KVKEEP_REQUIRE(keys.dtype() == form.key_dtype && values.dtype() == form.value_dtype, "cache: layer ", l, " holds ",
                   keys.dtype(), " keys and ", values.dtype(), " values; allowed ", form.key_dtype, " and ",
                   form.value_dtype, " as in the first layer");
    KVKEEP_REQUIRE(keys_rotated == form.keys_rotated && values_rotated == form.values_rotated, "cache: layer ", l,
                   " is rotated by ", keys_rotated, " keys and ", values_rotated, " values; allowed ",
                   form.keys_rotated, " and ", form.values_rotated, " as in the first layer");
    row_detail::check_rotated("keys", keys_rotated, l, spec.key_dim);
    row_detail::check_rotated("values", values_rotated, l, spec.value_dim);
    KVKEEP_REQUIRE(keys.device() == form.device, "cache: layer ", l, " is on ", keys.device().str(), "; allowed ",
                   form.device.str(), " like the first layer");
  }
  return form;
}

inline void check_view(const ModelSpec& spec, const RowTable& form, const CacheView& view) {
  const auto n = view.sequences.size();
  KVKEEP_REQUIRE(
      view.lengths.rows_per_sequence == 1 || view.lengths.rows_per_sequence == spec.num_layers() * spec.kv_heads,
      "cache: lengths have ", view.lengths.rows_per_sequence,
      " per sequence; allowed 1, or layers * KV heads = ", spec.num_layers() * spec.kv_heads);
  KVKEEP_REQUIRE(view.lengths.data.size() == n * static_cast<std::size_t>(view.lengths.rows_per_sequence),
                 "cache: ", view.lengths.data.size(), " lengths for ", n, " sequences; allowed ",
                 n * static_cast<std::size_t>(view.lengths.rows_per_sequence));
  KVKEEP_REQUIRE(view.places.empty() || view.places.size() == n, "cache: ", view.places.size(), " places for ", n,
                 " sequences; allowed none or one each");
  KVKEEP_REQUIRE(view.starts.empty() || view.starts.size() == n, "cache: ", view.starts.size(), " starts for ", n,
                 " sequences; allowed none or one each");
  if (form.page_size > 0) row_detail::check_table(view);
}

inline void check_fits(const ModelSpec& spec, const LayerSides& layer, std::int32_t l, const RowTable& form,
                       const CacheView& view, std::size_t s) {
  const std::int64_t place = view.places.empty() ? static_cast<std::int64_t>(s) : view.places[s],
                     places = layer.keys.size(0), start = view.starts.empty() ? 0 : view.starts[s],
                     capacity = layer.paged ? view.block_table.size(1) * form.page_size : layer.keys.size(layer.slot);
  KVKEEP_REQUIRE(layer.paged || (place >= 0 && place < places), "cache: sequence ", view.sequences[s], " is at place ",
                 place, " of the batch; allowed 0 to ", places - 1);
  for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
    const std::int64_t length = view.lengths.at(s, l * spec.kv_heads + h);
    KVKEEP_REQUIRE(start >= 0 && length >= 0 && start + length <= capacity, "cache: sequence ", view.sequences[s],
                   " holds slots ", start, " to ", start + length, " of layer ", l, "; allowed up to the capacity ",
                   capacity);
  }
}

inline RowTable make_rows(const ModelSpec& spec, std::span<const LayerKv> cache, const RowTable& form,
                          const CacheView& view, std::span<const std::int32_t> of, std::span<const std::int32_t> due) {
  check_view(spec, form, view);
  RowTable table = form;
  const bool paged = form.page_size > 0;
  const BlockTable blocks(view);
  if (paged && blocks.wide()) table.narrowed_pages = row_detail::narrowed_pages(spec, form, view, of, due);
  for (const std::int32_t l : of) {
    const LayerKv& kv = cache[static_cast<std::size_t>(l)];
    const LayerSides layer = sides_of(kv);
    const auto& [keys, values, key_scales, value_scales, extra, head_dim, slot_dim, in_pages, keys_rotated,
                 values_rotated] = layer;
    const bool values_in_keys = lies_within(values, keys), scales_alike = lies_within(value_scales, key_scales);
    for (std::size_t d = 0; d < due.size(); ++d) {
      const std::int32_t i = due[d];
      const auto s = static_cast<std::size_t>(i);
      check_fits(spec, layer, l, form, view, s);
      const std::int64_t place = view.places.empty() ? i : view.places[s];
      const std::int64_t start = view.starts.empty() ? 0 : view.starts[s];
      const std::int32_t* pages = !paged ? nullptr : blocks.wide() ? table.narrowed_pages[d]->data() : blocks.row(i);
      std::int64_t longest = 0;
      table.groups.push_back({l, i, static_cast<std::int64_t>(table.rows.size()), {}});
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::int32_t length = view.lengths.at(s, l * spec.kv_heads + h);
        longest = std::max<std::int64_t>(longest, length);
        table.rows.push_back({.layer = l,
                              .sequence = i,
                              .head = h,
                              .length = length,
                              .first = table.slots,
                              .keys = row_detail::address(kv, keys, place, h, start, pages),
                              .values = row_detail::address(kv, values, place, h, start, pages),
                              .key_scales = row_detail::address(kv, key_scales, place, h, start, pages),
                              .value_scales = row_detail::address(kv, value_scales, place, h, start, pages),
                              .extra = row_detail::address(kv, extra, place, h, start, pages),
                              .values_in_keys = values_in_keys,
                              .value_scales_in_key_scales = scales_alike});
        table.slots += length;
      }
      if (!paged) continue;
      for (std::int64_t p = 0; p * form.page_size < longest; ++p)
        KVKEEP_REQUIRE(blocks.page(i, p) >= 0 && blocks.page(i, p) < keys.size(0), "cache: page ", p, " of sequence ",
                       view.sequences[s], " is ", blocks.page(i, p), "; layer ", l, " allows 0 to ", keys.size(0) - 1);
    }
  }
  return table;
}

}  // namespace kvkeep
