#pragma once
/// ChunkKV on a GPU. Same contract as `kvkeep::Chunks`, and the same slots given the same scores.

#include <cstdint>

#include "kvkeep/allot/chunks.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Everything on the device but the struct itself.
struct ChunksArguments {
  ChunksOptions options;  ///< Heads::shared needs rows of one length and budget in a (layer, sequence)
  Variant variant = Variant::strict;
  const Row* rows = nullptr;         ///< [count], the rows of a (layer, sequence) next to each other
  const RowLimit* limits = nullptr;  ///< [count]
  std::int32_t count = 0;
  std::int32_t heads = 1;         ///< rows of a (layer, sequence)
  std::int32_t longest = 0;       ///< slots of the longest row
  std::int64_t slots_in_all = 0;  ///< sum of the rows' lengths
  const float* scores = nullptr;  ///< f32 flat
  const std::int64_t* indptr =
      nullptr;  ///< i64 [count + 1] where each row's kept slots go: min(budget, length) for a due row, all for others
  std::int32_t* slots = nullptr;  ///< i32 [indptr[count]] out, ascending in each row
  void* workspace = nullptr;      ///< chunks_workspace_bytes(), aligned to 32
};

/// 8 bytes per slot, and 8 per row and chunk of the longest one.
[[nodiscard]] std::int64_t chunks_workspace_bytes(const ChunksArguments& arguments);

/// One launch: one block per row, or with Heads::shared per (layer, sequence). Sums in double, in the CPU's order; no
/// sort: the chunk that does not fit is found digit by digit. Cost: two passes over the scores, and up to 12 over the
/// chunks. Throws InvalidArgument for chunks below one slot.
void launch_chunks(const ChunksArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
