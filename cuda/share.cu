#include "share.h"

#include "launch.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kTurnThreads) share_kernel(ShareArguments a) {
  const SharedRows sharing = a.sharing;
  const std::int64_t members = sharing.members();
  for (std::int64_t set = blockIdx.y; set < sharing.sets(); set += gridDim.y) {
    const std::int64_t first = sharing.row(set, 0);
    if (!a.limits[first].due) continue;
    const std::int32_t length = a.rows[first].length;
    for (auto t = static_cast<std::int64_t>(blockIdx.x) * tuning::kTurnThreads + threadIdx.x; t < length;
         t += static_cast<std::int64_t>(gridDim.x) * tuning::kTurnThreads) {
      float joined = a.scores[a.rows[first].first + t];
      for (std::int64_t m = 1; m < members; ++m)
        joined = sharing.join(a.scores[a.rows[sharing.row(set, m)].first + t], joined);
      const float shared = sharing.settle(joined);
      for (std::int64_t m = 0; m < members; ++m) a.shared[a.rows[sharing.row(set, m)].first + t] = shared;
    }
  }
}

}  // namespace

void launch_share(const ShareArguments& arguments, Stream stream) {
  constexpr std::int64_t kMost = 65535;  // blocks in y
  dim3 blocks = blocks_of_threads(arguments.longest, tuning::kTurnThreads);
  const std::int64_t sets = arguments.sharing.sets();
  blocks.y = static_cast<unsigned>(sets < kMost ? sets : kMost);
  launch("share", share_kernel, {.blocks = blocks, .threads = tuning::kTurnThreads}, stream, arguments);
}

}  // namespace kvkeep::cuda
