// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scores of rows that share one selection, on a GPU. Same numbers as on the CPU. No LibTorch in here.

#include "kvkeep/core/decision.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "stream.h"

namespace kvkeep::cuda {

struct ShareArguments {
  const Row* rows = nullptr;         ///< [sharing.sets() * sharing.members()] on the device, as all below
  const RowLimit* limits = nullptr;  ///< of the same rows
  SharedRows sharing;
  std::int32_t longest = 0;       ///< slots of the longest row, or more
  const float* scores = nullptr;  ///< f32, flat over the rows
  float* shared = nullptr;        ///< f32, flat; only in sets that are due
};

/// One launch, one thread per four slots of a set. Rows of a set that is due have one length. Cost: reads the scores
/// once and writes as many.
void launch_share(const ShareArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
