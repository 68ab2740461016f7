// SPDX-License-Identifier: Apache-2.0
#include "share.h"

#include "launch.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

constexpr std::int32_t kSharedSlots = 4;  ///< of a thread: where a row is needs looking up

__global__ void __launch_bounds__(tuning::kTurnThreads, 8) share_kernel(ShareArguments a) {
  wait_for_earlier_kernels();
  const SharedRows sharing = a.sharing;
  const std::int64_t members = sharing.members(), sets = sharing.sets();
  for (std::int64_t set = blockIdx.y; set < sets; set += gridDim.y) {
    const std::int64_t first = sharing.row(set, 0);
    if (!a.limits[first].due) continue;
    const std::int64_t length = a.rows[first].length;
    for (auto begin = std::int64_t{blockIdx.x} * kSharedSlots * tuning::kTurnThreads + threadIdx.x; begin < length;
         begin += std::int64_t{gridDim.x} * kSharedSlots * tuning::kTurnThreads) {
      float joined[kSharedSlots] = {};
      const auto each = [&](std::int64_t member, const auto& body) {
        const std::int64_t at = a.rows[sharing.row(set, member)].first + begin;
#pragma unroll
        for (std::int32_t i = 0; i < kSharedSlots; ++i)
          if (begin + i * tuning::kTurnThreads < length) body(at + i * tuning::kTurnThreads, joined[i]);
      };
      for (std::int64_t m = 0; m < members; ++m)
        each(m, [&](std::int64_t at, float& of_slot) {
          of_slot = m == 0 ? a.scores[at] : sharing.join(a.scores[at], of_slot);
        });
      for (float& of_slot : joined) of_slot = sharing.settle(of_slot);
      for (std::int64_t m = 0; m < members; ++m)
        each(m, [&](std::int64_t at, float of_slot) { a.shared[at] = of_slot; });
    }
  }
}

}  // namespace

void launch_share(const ShareArguments& arguments, Stream stream) {
  constexpr std::int64_t kMost = 65535;  // blocks in y
  dim3 blocks = blocks_of_threads(arguments.longest, kSharedSlots * tuning::kTurnThreads);
  const std::int64_t sets = arguments.sharing.sets();
  blocks.y = static_cast<unsigned>(sets < kMost ? sets : kMost);
  launch("share", share_kernel, {.blocks = blocks, .threads = tuning::kTurnThreads}, stream, arguments);
}

}  // namespace kvkeep::cuda
