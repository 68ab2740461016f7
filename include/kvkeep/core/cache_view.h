#pragma once
/// The engine's cache, seen by kvkeep: its layers, which Keeper::bind() takes once, and what a step uses of them.

#include <cstdint>
#include <span>
#include <variant>

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
                  ///< page_size a power of two up to 1024, the last dimension contiguous, other strides free
  Tensor values;  ///< the same with Dv
  PageLayout layout = PageLayout::slot_head;
  Tensor key_scales = {};    ///< any dtype [pages, page_size, Hkv] or [pages, Hkv, page_size], as in DenseKv
  Tensor value_scales = {};  ///< the same for values
  std::int32_t keys_rotated = 0, values_rotated = 0;  ///< as in DenseKv
};

/// `monostate`: a layer that has no rows of its own (see LayerKind).
using LayerKv = std::variant<std::monostate, DenseKv, PagedKv>;

/// A layer's tensors, dense or in pages, with their dimensions by meaning.
struct LayerSides {
  const Tensor &keys, &values, &key_scales, &value_scales;
  int head, slot;  ///< dimension of KV heads, of slots; dimension 0 is the batch or the pages
  bool paged;
  std::int32_t keys_rotated, values_rotated;
};

/// Requires: the layer has rows, and outlives the result.
[[nodiscard]] LayerSides sides_of(LayerKv&& layer) = delete;
[[nodiscard]] inline LayerSides sides_of(const LayerKv& layer) {
  if (const auto* dense = std::get_if<DenseKv>(&layer))
    return {dense->keys, dense->values, dense->key_scales,   dense->value_scales,  1,
            2,           false,         dense->keys_rotated, dense->values_rotated};
  const auto& pages = std::get<PagedKv>(layer);
  const bool slot_first = pages.layout == PageLayout::slot_head;
  return {pages.keys,         pages.values, pages.key_scales,   pages.value_scales,  slot_first ? 2 : 1,
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
  Tensor block_table = {};  ///< i32 [n, max_pages], paged layers only: row i begins with the ceil(length / page_size)
                            ///< pages of sequence i; entries after them are not read. An event writes the pages that
                            ///< stay, then -1 over those it gives back
  PageAllocator* pages =
      nullptr;  ///< counts references; null: every page belongs to one sequence, and freed pages are only reported
  SharedPages shared_pages = SharedPages::copy;
};

}  // namespace kvkeep
