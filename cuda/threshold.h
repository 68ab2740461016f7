#pragma once
/// Slots above a threshold on a GPU. Same contract as `kvkeep::Threshold`.

#include <cstdint>

#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

struct ThresholdArguments {
  const Row* rows = nullptr;         ///< [count] on the device, as all below
  const RowLimit* limits = nullptr;  ///< [count]
  std::int32_t count = 0;
  std::int32_t longest = 0;              ///< slots of the longest row, as the host knows it
  float threshold = 0;                   ///< ThresholdOptions::threshold as f32
  const float* scores = nullptr;         ///< f32, flat over the rows
  const std::int64_t* indptr = nullptr;  ///< i64 [count + 1] where each row's kept slots go: room for min(budget,
                                         ///< length) of a due row, for all of any other
  std::int32_t* slots = nullptr;         ///< i32 [indptr[count]] out, ascending from each row's beginning
  std::int32_t* counts = nullptr;        ///< i32 [count] out: how many they are
};

/// One launch, one block per row: the same slots as the CPU. No workspace. Cost: a pass over the scores, and as
/// launch_select.
void launch_threshold(const ThresholdArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
