// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Compaction on a GPU: K, V, their scales and the columns of all rows of an event in one launch. Same contract as
/// `kvkeep::compact`.

#include <cstdint>

#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Columns of one row, which travel with its slots; null: absent.
struct ColumnMove {
  std::int32_t* positions = nullptr;  ///< i32 [length], in place
  float* credit = nullptr;            ///< f32 [kept], from `new_credit`
  const float* new_credit = nullptr;  ///< f32 [length] of every slot, before compaction
  float* tally = nullptr;             ///< f32 [kept], from `new_tally`
  const float* new_tally = nullptr;
  float* given = nullptr;  ///< f32 [length], in place
};

/// Everything on the device but the struct itself.
struct CompactArguments {
  const Row* rows = nullptr;            ///< [count]
  const ColumnMove* columns = nullptr;  ///< [count]; null: no columns
  std::int32_t count = 0;
  const std::int32_t* slots = nullptr;   ///< i32 [indptr[count]] slots that stay, ascending in each row
  const std::int64_t* indptr = nullptr;  ///< i64 [count + 1]
  const std::int32_t* counts =
      nullptr;  ///< i32 [count] slots that stay, if indptr has room for more; null: as many as indptr says
  const std::int32_t* pages_after =
      nullptr;  ///< i32 [sequences, pages_stride] new block table; null: rows keep their pages, or are dense
  std::int64_t pages_stride = 0;
};

/// Slot kept[j] moves to slot j, in place: one block per row and side, or two, walks its tiles upwards, reads a whole
/// one, then writes it. Requires: slots ascend, so that kept[j] >= j, and new pages as plan_pages() chooses them. Does
/// not check them: they are on the device. Cost: kept bytes read and written once, in words of up to 16 bytes; slots
/// that are already in place are skipped. Registers only, no workspace.
void launch_compact(const CompactArguments& arguments, Stream stream);

/// Bytes from slots of one tensor to another: out[n] = row.keys or row.values at slots[indptr[r] + j], n counting
/// through all rows. For views that must be dense.
struct GatherArguments {
  const Row* rows = nullptr;
  std::int32_t count = 0;
  const std::int32_t* slots = nullptr;
  const std::int64_t* indptr = nullptr;
  std::byte* keys = nullptr;    ///< [indptr[count], keys.width] packed; null: not wanted
  std::byte* values = nullptr;  ///< [indptr[count], values.width] packed; null: not wanted
};

/// Out of place; nothing in the cache changes. Cost: as launch_compact.
void launch_gather(const GatherArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
