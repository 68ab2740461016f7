// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Ranks of the scores of prompts, on a GPU. Same contract as kvkeep::ranks_of(), to the last rank.

#include <cstdint>
#include <span>

#include "stream.h"

namespace kvkeep::cuda {

/// One prompt of a launch, known on the host. Places are elements from the array's beginning, so that finished prompts
/// can be left out and the others keep their places.
struct RankedPrompt {
  std::int64_t scores = 0;  ///< its first score
  std::int64_t ranks = 0;   ///< its first rank
  std::int64_t stride = 0;  ///< from its ranks of one layer to those of the next
  std::int64_t kept = 0;    ///< where the list of its tokens that continue begins
  std::int32_t ranked = 0;  ///< its tokens before the window
  std::int32_t state = 0;   ///< its LayerSelection
};

struct RanksArguments {
  std::span<const RankedPrompt> prompts;  ///< on the host
  const float* scores = nullptr;          ///< f32, each prompt's at RankedPrompt::scores
  std::int32_t* ranks = nullptr;  ///< i32, each prompt's at RankedPrompt::ranks: 1 for the highest score; of equal ones
                                  ///< the lower index first; NaN last
  void* workspace = nullptr;      ///< ranks_workspace_bytes(), aligned to 32
};

/// 16 bytes for every ranked token of a launch.
[[nodiscard]] std::int64_t ranks_workspace_bytes(std::span<const RankedPrompt> prompts);

/// A stable radix sort, one block per prompt, 8 bits at a time. One launch for up to 64 prompts. Cost: four passes that
/// read every number twice and write it once. Throws InvalidArgument for a prompt with fewer than 0 or more than 2^30
/// tokens.
void launch_ranks(const RanksArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
