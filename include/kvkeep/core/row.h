#pragma once
/// All rows of an event, and the queries that go with them.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <typeindex>
#include <utility>
#include <vector>

#include "kvkeep/core/budget.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/pins.h"
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
  std::int32_t settled = 0;                   ///< logical position below which every decision is final (Fold::settled)
  std::span<const std::int32_t> beyond = {};  ///< [whole_heads] slots that the row of each KV head of the model holds
                                              ///< beyond this group's first; empty: as many as that
  std::span<const PositionSpan> pinned = {};  ///< ascending, disjoint: slots at these positions stay in every row
  std::vector<std::pair<std::type_index, const void*>> attached = {};  ///< what parts of a policy's own give it

  /// For Part::describe(): `data` is valid as long as the event.
  template <class T>
  void attach(const T& data) {
    attached.emplace_back(typeid(T), &data);
  }
  /// For KVPolicy::decide(); null if no part gave one.
  template <class T>
  [[nodiscard]] const T* find() const {
    for (const auto& [type, data] : attached)
      if (type == typeid(T)) return static_cast<const T*>(data);
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

  [[nodiscard]] std::span<const Row> rows_of(const RowGroup& group, std::int32_t kv_heads) const {
    return {rows.data() + group.first_row, static_cast<std::size_t>(kv_heads)};
  }
  /// Slots that the row of a KV head of the whole model holds, here or on another rank.
  [[nodiscard]] std::int32_t length_of(const RowGroup& group, std::int32_t head, const ModelSpec& spec) const {
    const auto own = static_cast<std::uint32_t>(head - spec.first_head);
    const Row* const first = rows.data() + group.first_row;
    if (own < static_cast<std::uint32_t>(spec.kv_heads)) return first[own].length;
    return first->length + (group.beyond.empty() ? 0 : group.beyond[static_cast<std::size_t>(head)]);
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/row-inl.h"
#endif
