// SPDX-License-Identifier: Apache-2.0
#include "select.h"

#include "kvkeep/allot/threshold.h"
#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kMostThreads) select_kernel(SelectArguments a) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const Row& row = a.rows[r];
    RowLimit limit = a.limits[r];
    if (a.padding.oldest > 0 || a.padding.newest > 0) limit.guarded = with_padding(limit, a.padding, row.length);
    const auto kept = static_cast<std::int32_t>(a.indptr[r + 1] - a.indptr[r]);
    write_best(team, histogram, row.length, limit.guarded, a.scores + row.first, limit.due ? kept : row.length,
               a.slots + a.indptr[r]);
  }
}

__global__ void __launch_bounds__(tuning::kMostThreads) select_threshold_kernel(ThresholdArguments a) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const Row& row = a.rows[r];
    const RowLimit& limit = a.limits[r];
    const float* scores = a.scores + row.first;
    const std::int32_t kept = limit.due ? passing_slots(scores, row.length, limit, a.threshold, team) : row.length;
    if (team.thread() == 0) a.counts[r] = kept;
    write_best(team, histogram, row.length, limit.guarded, scores, kept, a.slots + a.indptr[r]);
  }
}

}  // namespace

void launch_select(const SelectArguments& arguments, Stream stream) {
  launch("select", select_kernel,
         {.blocks = blocks_for(arguments.count), .threads = tuning::threads_for(arguments.longest)}, stream, arguments);
}

void launch_threshold(const ThresholdArguments& arguments, Stream stream) {
  launch("select_threshold", select_threshold_kernel,
         {.blocks = blocks_for(arguments.count), .threads = tuning::threads_for(arguments.longest)}, stream, arguments);
}

}  // namespace kvkeep::cuda
