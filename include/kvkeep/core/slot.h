// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A row is (layer, sequence, KV head): the unit of every decision. Plain structs that kernels take unchanged; no
/// LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Addresses of the slots of one side (keys, values, their scales or extras) of a row: at one stride in a dense cache,
/// by page in a paged one. No other code knows this layout.
struct SlotAddress {
  std::byte* base = nullptr;            ///< slot 0; in pages, slot 0 of page 0
  std::int64_t stride = 0;              ///< bytes from slot to slot; in pages, within a page
  std::int64_t width = 0;               ///< bytes of one slot's vector; 0: the side is absent
  const std::int32_t* pages = nullptr;  ///< i32 [ceil(length / page_size)] the row's pages in order; null: dense
  std::int64_t page_stride = 0;         ///< bytes from page to page
  std::int32_t page_shift = 0;          ///< log2 of the page size; -1: it is `page_slots`, on the CPU alone
  std::int32_t page_slots = 0;          ///< page size that is no power of two

  [[nodiscard]] KVKEEP_HD std::byte* at(std::int64_t slot) const {
    if (pages == nullptr) return base + slot * stride;
#ifndef __CUDA_ARCH__
    if (page_shift < 0) [[unlikely]]
      return divided(slot);
#endif
    return base + pages[slot >> page_shift] * page_stride + (slot & ((std::int64_t{1} << page_shift) - 1)) * stride;
  }
  /// Number of slots from `slot` on that are one stride apart.
  [[nodiscard]] KVKEEP_HD std::int64_t run(std::int64_t slot) const {
    if (pages == nullptr) return std::int64_t{1} << 62;
#ifndef __CUDA_ARCH__
    if (page_shift < 0) [[unlikely]]
      return page_slots - slot % page_slots;
#endif
    return (std::int64_t{1} << page_shift) - (slot & ((std::int64_t{1} << page_shift) - 1));
  }

 private:
  /// Apart from the loops that call at(), which would slow down by what stands in them.
  [[nodiscard, gnu::cold, gnu::noinline]] std::byte* divided(std::int64_t slot) const {
    const auto page = static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(page_slots);
    return base + pages[page] * page_stride + (slot - std::int64_t{page} * page_slots) * stride;
  }
};

/// One row with the columns that travel with it.
struct Row {
  std::int32_t layer = 0;
  std::int32_t sequence = 0;  ///< index into the step's sequences
  std::int32_t head = 0;      ///< KV head
  std::int32_t length = 0;    ///< slots held
  std::int64_t first = 0;     ///< start of the row in flat f32 arrays (Scores, Mass): the sum of the lengths before it
  SlotAddress keys = {};
  SlotAddress values = {};
  SlotAddress key_scales = {};  ///< if rows are quantised and the cache has their scales
  SlotAddress value_scales = {};
  SlotAddress extra = {};       ///< DenseKv::extra
  bool values_in_keys = false;  ///< values are a part of the keys (latent rows): they move, and count, with them
  bool value_scales_in_key_scales = false;

  static constexpr int kSides = 5;
  /// The sides that move with a slot, each once: keys, values, key scales, value scales, extra; null: absent, a part of
  /// another one, or one vector for all slots.
  [[nodiscard]] KVKEEP_HD const SlotAddress* side(int s) const {
    const SlotAddress* const one = s == 0   ? &keys
                                   : s == 1 ? &values
                                   : s == 2 ? &key_scales
                                   : s == 3 ? &value_scales
                                            : &extra;
    const bool moves = one->width > 0 && !(s == 1 && values_in_keys) && !(s == 3 && value_scales_in_key_scales) &&
                       !(s >= 2 && one->stride == 0 && one->page_stride == 0);
    return moves ? one : nullptr;
  }

  /// K and V bytes of one slot, including scales and what else it has.
  [[nodiscard]] std::int64_t slot_bytes() const {
    std::int64_t bytes = 0;
    for (int s = 0; s < kSides; ++s) bytes += side(s) == nullptr ? 0 : side(s)->width;
    return bytes;
  }
  /// Another rank holds it (across_ranks()): nothing but its length is known here.
  [[nodiscard]] bool remote() const { return keys.width == 0 && values.width == 0; }
  const std::int32_t* positions = nullptr;  ///< i32 [length] logical position per slot, ascending
  const float* credit = nullptr;            ///< f32 [credit_length] EMA credit of the oldest slots; 0 for the rest
  std::int32_t credit_length = 0;
  const float* tally = nullptr;  ///< f32 [tally_length] what an accumulating scorer gave the oldest slots at the last
                                 ///< event; 0 for the rest
  std::int32_t tally_length = 0;
  const float* given = nullptr;  ///< f32 [given_length] scores that the engine gave the oldest slots; none for the rest
  std::int32_t given_length = 0;
};

}  // namespace kvkeep
