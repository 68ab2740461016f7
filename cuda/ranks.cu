// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include "batch.cuh"
#include "launch.cuh"
#include "radix_sort.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kRankThreads;

struct RanksTask {
  Batch<RankedPrompt> prompts;
  const float* scores;
  std::int32_t* ranks;
  std::uint64_t* workspace;  ///< two entries for each token
};

__global__ void __launch_bounds__(kRankThreads) ranks_kernel(RanksTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::uint32_t, counters, sort_counters(kRankThreads));
  const BlockTeam team(scratch);
  const RankedPrompt& prompt = task.prompts.of[blockIdx.x];
  std::int64_t before = 0, tokens = 0;  // of the prompts before this one; of all
  for (std::int32_t p = 0; p < task.prompts.count; ++p) {
    if (p == static_cast<std::int32_t>(blockIdx.x)) before = tokens;
    tokens += task.prompts.of[p].ranked;
  }
  std::uint64_t *a = task.workspace + before, *b = a + tokens;
  const float* scores = task.scores + prompt.scores;
  std::int32_t* ranks = task.ranks + prompt.ranks;
  sort_by_score(
      team, counters, prompt.ranked, a, b, [scores](std::int32_t t) { return entry_of(scores[t], t); },
      [ranks](std::int32_t i, std::uint64_t entry) { ranks[static_cast<std::uint32_t>(entry)] = i + 1; });
}

}  // namespace

std::int64_t ranks_workspace_bytes(std::span<const RankedPrompt> prompts) {
  std::int64_t most = 0;
  each_batch(prompts, [&](const Batch<RankedPrompt>& batch) {
    std::int64_t tokens = 0;
    for (std::int32_t p = 0; p < batch.count; ++p) tokens += batch.of[p].ranked;
    most = std::max(most, 2 * tokens * static_cast<std::int64_t>(sizeof(std::uint64_t)));
  });
  return most;
}

void launch_ranks(const RanksArguments& arguments, Stream stream) {
  require_aligned("ranks", arguments.workspace);
  constexpr std::int32_t kMost = 1 << 30;
  for (const RankedPrompt& prompt : arguments.prompts)
    KVKEEP_REQUIRE(prompt.ranked >= 0 && prompt.ranked <= kMost, "ranks: a prompt of ", prompt.ranked,
                   " ranked tokens; allowed 0 to ", kMost);
  each_batch(arguments.prompts, [&](const Batch<RankedPrompt>& batch) {
    std::int32_t longest = 0;
    for (std::int32_t p = 0; p < batch.count; ++p) longest = std::max(longest, batch.of[p].ranked);
    const RanksTask task{.prompts = batch,
                         .scores = arguments.scores,
                         .ranks = arguments.ranks,
                         .workspace = static_cast<std::uint64_t*>(arguments.workspace)};
    launch("ranks", ranks_kernel, {.blocks = blocks_for(batch.count), .threads = tuning::rank_threads_for(longest)},
           stream, task);
  });
}

}  // namespace kvkeep::cuda
