// SPDX-License-Identifier: Apache-2.0
#pragma once
/// AdaKV on a GPU. Same contract as `kvkeep::AdaptiveHeads`: how many slots every head keeps, and which.

#include "allotted_rows.h"

namespace kvkeep::cuda {

/// The rows of a (layer, sequence) are due together, when they hold more slots than their budgets in total. indptr has
/// room for as many as cpu::most_across_heads() allows. `slots` null: counts alone.
struct AdaptiveHeadsArguments : AllottedRows {
  std::int32_t heads = 1;          ///< rows of a (layer, sequence)
  double safeguard = 0.2;          ///< AdaptiveHeadsOptions::safeguard, [0, 1]
  std::int32_t* counts = nullptr;  ///< i32 [count] out: slots that stay
  void* workspace = nullptr;       ///< adaptive_heads_workspace_bytes(), aligned to 32
};

/// 8 bytes per row and per (layer, sequence).
[[nodiscard]] std::int64_t adaptive_heads_workspace_bytes(const AdaptiveHeadsArguments& arguments);

/// Three launches, or two for counts alone: what every head keeps by itself, one block per row; the best of the rest,
/// one block per (layer, sequence); the slots, one block per row. Order, ties and NaN as on the CPU
/// (allot/adaptive_heads.h): the same slots. Cost: about 13 passes over the scores. Throws InvalidArgument for a
/// safeguard outside [0, 1], and for rows of a (layer, sequence) that may hold more than 2^31 - 1 slots together.
void launch_adaptive_heads(const AdaptiveHeadsArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
