// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Rows as every allocator's kernels take them. No LibTorch in here.

#include <cstdint>

#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

/// All of it on the device; the numbers are what the host knows.
struct AllottedRows {
  const Row* rows = nullptr;  ///< [count], the rows of a (layer, sequence) next to each other, also in the scores
  const RowLimit* limits = nullptr;  ///< [count]
  std::int32_t count = 0;
  std::int32_t longest = 0;              ///< slots of the longest row
  const float* scores = nullptr;         ///< f32, flat over the rows
  const std::int64_t* indptr = nullptr;  ///< i64 [count + 1] where each row's kept slots go: min(budget, length) for a
                                         ///< due row, all for others, if a kernel does not say otherwise
  std::int32_t* slots = nullptr;         ///< i32 [indptr[count]] out, ascending from each row's beginning
};

}  // namespace kvkeep::cuda
