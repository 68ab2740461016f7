// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Top-k of every row with protected slots, on a GPU: `kvkeep::select` in rows that are due, others keep every slot.
/// And slots above a threshold: same contract as `kvkeep::Threshold`.

#include "allotted_rows.h"

namespace kvkeep::cuda {

struct SelectArguments : AllottedRows {
  Padding padding = {};  ///< official only: over a whole row, to rank before all others is to stay
};

/// One launch, one block per row. Order, ties and NaN as in kvkeep/core/rank_key.h: the same slots as the CPU. No
/// workspace. Cost: 5 to 9 passes over the scores.
void launch_select(const SelectArguments& arguments, Stream stream);

struct ThresholdArguments : AllottedRows {
  float threshold = 0;             ///< ThresholdOptions::threshold as f32
  std::int32_t* counts = nullptr;  ///< i32 [count] out: how many slots stay; indptr has room for min(budget, length)
};

/// One launch, one block per row: the same slots as the CPU. No workspace. Cost: a pass over the scores, and as
/// launch_select.
void launch_threshold(const ThresholdArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
