// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Slots of prompts that hold a share of the window's attention, on a GPU. Same contract as kvkeep::keep_top_mass(). No
/// LibTorch in here.

#include "allotted_rows.h"
#include "kvkeep/layers/prompt_scores.h"

namespace kvkeep::cuda {

struct TopMassArguments {
  AllottedRows rows =
      {};  ///< scores: PromptScores::sums; `indptr` leaves room for all slots of a row; of limits only `due`
  TopMassOptions options = {};
  std::int32_t* counts = nullptr;  ///< i32 [count] slots that each row keeps
};

/// Sums of integers say how many slots hold enough: from equal `sums` the slots of the CPU. One launch, a block per
/// row. Cost: 6 to 12 passes over a row. Throws InvalidArgument as keep_top_mass() does.
void launch_top_mass(const TopMassArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
