#include "select.h"

#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kMostThreads) select_kernel(SelectArguments a) {
  __shared__ unsigned long long scratch[kBlockScratch];
  __shared__ std::int32_t histogram[kDigits];
  const BlockTeam team(scratch);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const Row& row = a.rows[r];
    RowLimit limit = a.limits[r];
    if (a.padding.oldest > 0 || a.padding.newest > 0) limit.guarded = with_padding(limit, a.padding, row.length);
    const float* scores = a.scores + row.first;
    std::int32_t* slots = a.slots + a.indptr[r];
    const auto kept = static_cast<std::int32_t>(a.indptr[r + 1] - a.indptr[r]), wanted = kept - limit.guarded.count();
    if (!limit.due || kept == row.length) {
      for (std::int32_t t = team.thread(); t < row.length; t += team.size()) slots[t] = t;
      continue;
    }
    const auto key_of = [&](std::int32_t t) { return limit.guarded.holds(t, row.length) ? 0 : rank_key(scores[t], t); };
    const std::uint64_t least =
        wanted > 0 ? least_kept(team, histogram, 0, row.length, wanted, key_of) : ~std::uint64_t{0};
    write_kept(
        team, row.length, [&](std::int32_t t) { return limit.guarded.holds(t, row.length) || key_of(t) >= least; },
        slots);
  }
}

}  // namespace

void launch_select(const SelectArguments& arguments, Stream stream) {
  launch("select", select_kernel,
         {.blocks = blocks_for(arguments.count), .threads = tuning::threads_for(arguments.longest), .shared_bytes = 0},
         stream, arguments);
}

}  // namespace kvkeep::cuda
