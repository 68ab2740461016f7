// SPDX-License-Identifier: Apache-2.0
#pragma once
/// ChunkKV on a GPU. Same contract as `kvkeep::Chunks`, and the same slots given the same scores.

#include "allotted_rows.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/core/protect.h"

namespace kvkeep::cuda {

struct ChunksArguments : AllottedRows {
  ChunksOptions options = {};  ///< Heads::shared needs rows of one length and budget in a (layer, sequence)
  Variant variant = Variant::strict;
  std::int32_t heads = 1;         ///< rows of a (layer, sequence)
  std::int64_t slots_in_all = 0;  ///< sum of the rows' lengths
  void* workspace = nullptr;      ///< chunks_workspace_bytes(), aligned to 32
};

/// 8 bytes per slot, and 8 per row and chunk of the longest one.
[[nodiscard]] std::int64_t chunks_workspace_bytes(const ChunksArguments& arguments);

/// One launch: one block per row, or with Heads::shared per (layer, sequence). Sums in double, in the CPU's order; no
/// sort: the chunk that does not fit is found digit by digit. Cost: two passes over the scores, and up to 12 over the
/// chunks. Throws InvalidArgument for chunks below one slot.
void launch_chunks(const ChunksArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
