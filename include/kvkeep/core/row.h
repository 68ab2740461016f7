#pragma once
/// A row is (layer, sequence, KV head): the unit of every decision. Plain structs that a kernel can take as they are.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/model_spec.h"

namespace kvkeep {

/// Where the slots of one side (keys, values or their scales) of a row lie: side by side in a dense cache, by page in a paged one. The one place that knows.
struct SlotAddress {
  std::byte* base = nullptr;            ///< slot 0; in pages, slot 0 of page 0
  std::int64_t stride = 0;              ///< bytes from slot to slot, inside a page where there are pages
  std::int64_t width = 0;               ///< bytes of one slot's vector; 0: the side is not there
  const std::int32_t* pages = nullptr;  ///< i32 [ceil(length / page_size)] the row's pages in order; null: dense
  std::int64_t page_stride = 0;         ///< bytes from page to page
  std::int32_t page_shift = 0;          ///< log2 of the page size

  [[nodiscard]] KVKEEP_HD std::byte* at(std::int64_t slot) const {
    if (pages == nullptr) return base + slot * stride;
    return base + pages[slot >> page_shift] * page_stride + (slot & ((std::int64_t{1} << page_shift) - 1)) * stride;
  }
  /// Slots from `slot` on that lie one stride apart.
  [[nodiscard]] KVKEEP_HD std::int64_t run(std::int64_t slot) const {
    return pages == nullptr ? std::int64_t{1} << 62 : (std::int64_t{1} << page_shift) - (slot & ((std::int64_t{1} << page_shift) - 1));
  }
};

/// Where one side of the row (place, head) of a dense layer lies, from slot `start` on. `side`: [B, Hkv, capacity, D], or without D for scales. Undefined: width 0.
[[nodiscard]] SlotAddress dense_address(const Tensor& side, std::int64_t place, std::int64_t head, std::int64_t start = 0);

/// The same of a paged layer, whose row holds `pages` in order.
[[nodiscard]] SlotAddress paged_address(const Tensor& side, PageLayout layout, std::int64_t head, const std::int32_t* pages);

/// One row with the columns that travel with it.
struct Row {
  std::int32_t layer = 0;
  std::int32_t sequence = 0;               ///< index into the step's sequences
  std::int32_t head = 0;                   ///< KV head
  std::int32_t length = 0;                 ///< slots held
  std::int64_t first = 0;                  ///< where the row's values begin in flat f32 arrays (Scores, Mass): sum of the lengths before it
  SlotAddress keys = {};
  SlotAddress values = {};
  SlotAddress key_scales = {};    ///< where rows are quantised and the cache brings their scales
  SlotAddress value_scales = {};

  /// K and V bytes of one slot, scales included.
  [[nodiscard]] std::int64_t slot_bytes() const { return keys.width + values.width + key_scales.width + value_scales.width; }
  const std::int32_t* positions = nullptr; ///< i32 [length] logical position per slot, ascending
  const float* credit = nullptr;           ///< f32 [credit_length] EMA credit of the oldest slots; the rest hold 0
  std::int32_t credit_length = 0;
  const float* tally = nullptr;            ///< f32 [tally_length] what an accumulating scorer gave the oldest slots at the last event; the rest hold 0
  std::int32_t tally_length = 0;
};

/// Whether queries are handed over before or after the rotary embedding.
enum class QueryBasis : std::uint8_t { pre_rope, post_rope };

/// The newest queries of one (layer, sequence), oldest first, in a ring of `ring` tokens that starts at token `begin`.
struct QueryView {
  const std::byte* data = nullptr;
  ScalarType dtype = kFloat32;             ///< f32, f16 or bf16
  std::int64_t token_stride = 0;           ///< bytes
  std::int64_t head_stride = 0;            ///< bytes
  const std::int32_t* positions = nullptr; ///< i32 [ring] logical
  std::int32_t ring = 0;                   ///< tokens the ring can hold
  std::int32_t begin = 0;                  ///< ring index of the oldest token
  std::int32_t count = 0;                  ///< tokens held

  /// Ring index of the i-th oldest token.
  [[nodiscard]] std::int32_t index(std::int32_t i) const { return ring == 0 ? 0 : (begin + i) % ring; }
  [[nodiscard]] const std::byte* at(std::int32_t i, std::int32_t head) const { return data + index(i) * token_stride + head * head_stride; }
  [[nodiscard]] std::int32_t position(std::int32_t i) const { return positions[index(i)]; }
};

class QueryStatistics;

/// The Hkv rows of one (layer, sequence): they share queries and lie next to each other in the table.
struct RowGroup {
  std::int32_t layer = 0;
  std::int32_t sequence = 0;
  std::int64_t first_row = 0;
  QueryView queries;
  std::int32_t next_position = 0;  ///< logical position of the next token: tokens seen, where positions have no gaps
  std::int32_t prompt = 0;         ///< tokens of the sequence that are its prompt: positions [0, prompt)
  const QueryStatistics* statistics = nullptr;  ///< of every query so far, where a policy asked for them; null in a trace
};

/// All rows of one event, in the order layer, sequence, head.
struct RowTable {
  std::vector<Row> rows;
  std::vector<RowGroup> groups;
  ScalarType key_dtype = kFloat32;
  ScalarType value_dtype = kFloat32;
  Device device = c10::kCPU;
  std::int32_t page_size = 0;  ///< slots of a page; 0: dense
  std::int64_t slots = 0;  ///< sum of all lengths: size of a flat f32 array over the rows

  [[nodiscard]] std::span<const Row> rows_of(const RowGroup& group, std::int32_t kv_heads) const {
    return {rows.data() + group.first_row, static_cast<std::size_t>(kv_heads)};
  }
};

/// Rows of `layers` for the sequences `due` (indices into the view), without columns and queries.
/// Throws InvalidArgument when the view does not fit the spec: layer count, kind of cache, dtype, shape, strides, device, page size, page, place or length out of
/// range. Cost: O(rows), and O(pages) of the due sequences where layers are paged; no allocation per slot.
[[nodiscard]] RowTable make_rows(const ModelSpec& spec, const CacheView& view, std::span<const std::int32_t> layers, std::span<const std::int32_t> due);

}  // namespace kvkeep
