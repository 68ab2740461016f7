#pragma once
/// Ranks of the scores of prompts, on a GPU. Same contract as kvkeep::ranks_of(), to the last rank.

#include <cstdint>
#include <span>

#include "ranked_prompt.h"
#include "stream.h"

namespace kvkeep::cuda {

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
