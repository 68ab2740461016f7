#pragma once
/// Top-k of every row with protected slots, on a GPU. Same contract as `kvkeep::select` in rows that are due; others
/// keep every slot.

#include <cstdint>

#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

struct SelectArguments {
  const Row* rows = nullptr;         ///< [count] on the device, as all below
  const RowLimit* limits = nullptr;  ///< [count]
  std::int32_t count = 0;
  std::int32_t longest = 0;       ///< slots of the longest row, as the host knows it
  Padding padding = {};           ///< official only: over a whole row, to rank before all others is to stay
  const float* scores = nullptr;  ///< f32, flat over the rows
  const std::int64_t* indptr =
      nullptr;  ///< i64 [count + 1] where each row's kept slots go: min(budget, length) for a due row, all for others
  std::int32_t* slots = nullptr;  ///< i32 [indptr[count]] out, ascending in each row
};

/// One launch, one block per row. Order, ties and NaN as in kvkeep/core/rank_key.h: the same slots as the CPU. No
/// workspace. Cost: 5 to 9 passes over the scores.
void launch_select(const SelectArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
