// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The rows of one sequence out of the cache and back: what an engine stores beside Keeper::save() when it swaps a
/// sequence out, moves it to another process, or copies it to other places or pages.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// Bytes of the slots that the i-th sequence of a view holds in its full layers: row after row (layer, KV head), in
/// each the keys of its slots in order, then values, then scales, then extras. layers: [num_layers], what is bound.
/// memory: of the machine that has the cache (Machine::memory()). Values within keys, and a scale that all slots share,
/// are not copied. Other layers (sliding, states) are the engine's. Throws InvalidArgument for a place outside the
/// view, and for a cache or a view that do not fit the spec. Cost: one read of these slots; on a device one launch per
/// row, side and page, and it waits.
[[nodiscard]] std::vector<std::byte> copy_rows(const ModelSpec& spec, std::span<const LayerKv> layers,
                                               const CacheView& view, std::size_t i,
                                               MachineMemory& memory = host_memory());

/// Writes them to the slots of the i-th sequence of this view, whose lengths are as they were, in any places or pages,
/// dense or paged. Throws as copy_rows() does, and InvalidArgument for other bytes than its slots have, before anything
/// is written. Cost: one write of these slots; on a device it does not wait.
void restore_rows(const ModelSpec& spec, std::span<const LayerKv> layers, const CacheView& view, std::size_t i,
                  std::span<const std::byte> bytes, MachineMemory& memory = host_memory());

namespace copy_rows_detail {

inline RowTable rows_of(const ModelSpec& spec, std::span<const LayerKv> layers, const CacheView& view, std::size_t i) {
  KVKEEP_REQUIRE(i < view.sequences.size(), "rows: sequence at index ", i, " of a view of ", view.sequences.size(),
                 "; allowed one of them");
  const auto due = static_cast<std::int32_t>(i);
  return make_rows(spec, layers, view, spec.full_layers(), {&due, 1});
}

/// Calls f(address of a run of slots, distance from slot to slot, bytes of a slot, slots) for all runs, in order.
template <class F>
void each_run(const RowTable& table, const F& f) {
  for (const Row& row : table.rows)
    for (int s = 0; s < Row::kSides; ++s) {
      const SlotAddress* const side = row.side(s);
      if (side == nullptr) continue;
      const bool one_for_all = s >= 2 && side->stride == 0 && (side->pages == nullptr || side->page_stride == 0);
      if (one_for_all && row.length > 1) continue;
      for (std::int64_t slot = 0; slot < row.length;) {
        const std::int64_t slots = std::min<std::int64_t>(side->run(slot), row.length - slot);
        f(side->at(slot), side->stride, side->width, slots);
        slot += slots;
      }
    }
}

inline std::int64_t bytes_of(const RowTable& table) {
  std::int64_t bytes = 0;
  each_run(table, [&](std::byte*, std::int64_t, std::int64_t width, std::int64_t slots) { bytes += width * slots; });
  return bytes;
}

}  // namespace copy_rows_detail

inline std::vector<std::byte> copy_rows(const ModelSpec& spec, std::span<const LayerKv> layers, const CacheView& view,
                                        std::size_t i, MachineMemory& memory) {
  const RowTable table = copy_rows_detail::rows_of(spec, layers, view, i);
  std::vector<std::byte> bytes(static_cast<std::size_t>(copy_rows_detail::bytes_of(table)));
  if (bytes.empty()) return bytes;
  const DeviceMemory staged = memory.is_host() ? DeviceMemory() : memory.allocate(std::ssize(bytes));
  std::byte* to = memory.is_host() ? bytes.data() : static_cast<std::byte*>(staged.get());
  copy_rows_detail::each_run(table, [&](std::byte* from, std::int64_t stride, std::int64_t width, std::int64_t slots) {
    memory.copy_rows(to, width, from, stride, width, slots);
    to += width * slots;
  });
  if (!memory.is_host()) memory.read(bytes.data(), staged.get(), std::ssize(bytes));
  return bytes;
}

inline void restore_rows(const ModelSpec& spec, std::span<const LayerKv> layers, const CacheView& view, std::size_t i,
                         std::span<const std::byte> bytes, MachineMemory& memory) {
  const RowTable table = copy_rows_detail::rows_of(spec, layers, view, i);
  const std::int64_t needed = copy_rows_detail::bytes_of(table);
  KVKEEP_REQUIRE(std::ssize(bytes) == needed, "rows: ", bytes.size(), " bytes for sequence ", view.sequences[i],
                 ", whose slots have ", needed, "; allowed what copy_rows() gave for as many slots");
  if (needed == 0) return;
  const DeviceMemory staged = memory.is_host() ? DeviceMemory() : memory.allocate(needed);
  const std::byte* from = bytes.data();
  if (!memory.is_host()) {
    memory.write(staged.get(), bytes.data(), needed);
    from = static_cast<const std::byte*>(staged.get());
  }
  copy_rows_detail::each_run(table, [&](std::byte* to, std::int64_t stride, std::int64_t width, std::int64_t slots) {
    memory.copy_rows(to, stride, from, width, width, slots);
    from += width * slots;
  });
}

}  // namespace kvkeep
