#pragma once
/// The engine's cache, seen by kvkeep. Views own nothing.

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Names a sequence (a request) for as long as it lives. Chosen by the engine.
using SequenceId = std::int64_t;

/// One layer's rows in a dense batch.
struct DenseKv {
  Tensor keys;    ///< any 1-, 2- or 4-byte dtype [B, Hkv, capacity, D] after RoPE; the last dimension contiguous, other strides free
  Tensor values;  ///< any 1-, 2- or 4-byte dtype [B, Hkv, capacity, Dv]
};

/// Order of the two middle dimensions of a page.
enum class PageLayout : std::uint8_t {
  slot_head,  ///< [pages, page_size, Hkv, D]
  head_slot,  ///< [pages, Hkv, page_size, D]
};

/// One layer's rows in pages. `CacheView::block_table` says which pages a sequence holds.
struct PagedKv {
  Tensor keys;    ///< [pages, page_size, Hkv, D] or [pages, Hkv, page_size, D] after RoPE, strides honoured
  Tensor values;  ///< the same with Dv
  PageLayout layout = PageLayout::slot_head;
};

/// `monostate` stands for a layer that has no rows of its own (see LayerKind).
using LayerKv = std::variant<std::monostate, DenseKv, PagedKv>;

/// Physical lengths, in slots, on the host. One number a sequence while all its rows are equally long, else one for each of its rows.
struct Lengths {
  std::span<std::int32_t> data;           ///< [n * rows_per_sequence]
  std::int32_t rows_per_sequence = 1;     ///< 1, or layers * Hkv when budgets differ by layer or head
  [[nodiscard]] bool per_row() const { return rows_per_sequence > 1; }
  /// Length of row (layer, head) of the i-th sequence; `row` is layer * Hkv + head.
  [[nodiscard]] std::int32_t& at(std::size_t sequence, std::int32_t row) const {
    return data[sequence * static_cast<std::size_t>(rows_per_sequence) + (per_row() ? static_cast<std::size_t>(row) : 0)];
  }
};

/// The cache of the sequences of one step, all layers. `lengths` is written by an event (new physical lengths), the rest is read.
struct CacheView {
  std::vector<LayerKv> layers;                ///< [num_layers]
  std::span<const SequenceId> sequences;      ///< [n] which sequences
  Lengths lengths;                            ///< physical lengths, this step's tokens included
  std::span<const std::int32_t> places = {};  ///< [n] batch index of each sequence in dense tensors; empty: 0..n-1
  std::span<const std::int32_t> starts = {};  ///< [n] first valid slot of each sequence (left padding); empty: 0
  Tensor block_table = {};                    ///< i32 [n, max_pages], paged layers only
};

}  // namespace kvkeep
