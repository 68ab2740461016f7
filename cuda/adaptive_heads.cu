// SPDX-License-Identifier: Apache-2.0
#include "adaptive_heads.h"

#include "kvkeep/allot/adaptive_heads.h"
#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

constexpr std::uint64_t kNone = ~std::uint64_t{0};  ///< above every key

struct AdaptiveHeadsTask {
  AdaptiveHeadsArguments a;
  std::uint64_t* own;     ///< [count] least rank_key that a head keeps by itself
  std::uint64_t* shared;  ///< [count / heads] least head_key of the others that stay
};

/// One row while its slots are chosen.
struct AdaptiveHead {
  const Row& row;
  const Protected& guarded;
  const float* scores;
  std::uint64_t own;

  __device__ AdaptiveHead(const AdaptiveHeadsTask& task, std::int64_t r, std::uint64_t own_least)
      : row(task.a.rows[r]), guarded(task.a.limits[r].guarded), scores(task.a.scores + row.first), own(own_least) {}

  /// What no other head competes for.
  [[nodiscard]] __device__ bool holds(std::int32_t t) const {
    return guarded.holds(t, row.length) || rank_key(scores[t], t) >= own;
  }
  [[nodiscard]] __device__ bool keeps(std::int32_t t, std::uint64_t shared, std::int64_t behind) const {
    return holds(t) || head_key(scores[t], t, behind) >= shared;
  }
};

/// What every head keeps by itself.
__global__ void __launch_bounds__(tuning::kMostThreads) adaptive_heads_own_kernel(AdaptiveHeadsTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  const AdaptiveHeadsArguments& a = task.a;
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const RowLimit& limit = a.limits[r];
    if (!limit.due) continue;
    const AdaptiveHead head(task, r, kNone);
    const std::int32_t length = head.row.length, own = own_slots(a.safeguard, limit, length),
                       wanted = own - limit.guarded.count();
    std::uint64_t least = kNone;
    if (own == length)
      least = 0;
    else if (wanted > 0)
      least = least_kept(team, histogram, 0, length, wanted,
                         [&](std::int32_t t) { return head.holds(t) ? 0 : rank_key(head.scores[t], t); });
    if (team.thread() == 0) task.own[r] = least;
  }
}

/// The best of all heads' other slots, until their budget is spent; and how many slots each head keeps with them.
__global__ void __launch_bounds__(tuning::kMostThreads) adaptive_heads_shared_kernel(AdaptiveHeadsTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  const AdaptiveHeadsArguments& a = task.a;
  for (std::int64_t g = blockIdx.x; g < a.count / a.heads; g += gridDim.x) {
    const std::int64_t first = g * a.heads;
    if (!a.limits[first].due) {
      for (std::int32_t h = team.thread(); h < a.heads; h += team.size())
        a.counts[first + h] = a.rows[first + h].length;
      continue;
    }
    std::int64_t left = 0;
    for (std::int32_t h = 0; h < a.heads; ++h)
      left += a.limits[first + h].budget - own_slots(a.safeguard, a.limits[first + h], a.rows[first + h].length);
    const auto candidates = [&](const auto& add) {
      std::int64_t behind = 0;
      for (std::int32_t h = a.heads; h-- > 0;) {
        const AdaptiveHead head(task, first + h, task.own[first + h]);
        for (std::int32_t t = team.thread(); t < head.row.length; t += team.size())
          if (!head.holds(t)) add(head_key(head.scores[t], t, behind));
        behind += head.row.length;
      }
    };
    const std::uint64_t shared =
        left > 0 ? least_of_largest(team, histogram, static_cast<std::int32_t>(left), candidates) : kNone;
    if (team.thread() == 0) task.shared[g] = shared;
    std::int64_t behind = 0;
    for (std::int32_t h = a.heads; h-- > 0;) {
      const AdaptiveHead head(task, first + h, task.own[first + h]);
      std::uint64_t stay = 0;
      for (std::int32_t t = team.thread(); t < head.row.length; t += team.size())
        stay += head.keeps(t, shared, behind) ? 1 : 0;
      stay = team.sum(stay);
      if (team.thread() == 0) a.counts[first + h] = static_cast<std::int32_t>(stay);
      behind += head.row.length;
    }
  }
}

__global__ void __launch_bounds__(tuning::kMostThreads) adaptive_heads_slots_kernel(AdaptiveHeadsTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const AdaptiveHeadsArguments& a = task.a;
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    std::int32_t* slots = a.slots + a.indptr[r];
    if (a.counts[r] == a.rows[r].length) {
      write_all(team, a.rows[r].length, slots);
      continue;
    }
    const std::int64_t g = r / a.heads;
    std::int64_t behind = 0;
    for (std::int64_t after = r + 1; after < (g + 1) * a.heads; ++after) behind += a.rows[after].length;
    const AdaptiveHead head(task, r, task.own[r]);
    const std::uint64_t shared = task.shared[g];
    write_kept(team, head.row.length, [&](std::int32_t t) { return head.keeps(t, shared, behind); }, slots);
  }
}

}  // namespace

std::int64_t adaptive_heads_workspace_bytes(const AdaptiveHeadsArguments& arguments) {
  return (std::int64_t{arguments.count} + arguments.count / arguments.heads) *
         static_cast<std::int64_t>(sizeof(std::uint64_t));
}

void launch_adaptive_heads(const AdaptiveHeadsArguments& a, Stream stream) {
  require_aligned("adaptive_heads", a.workspace);
  constexpr std::int64_t kMostSlots = 0x7FFFFFFF;
  KVKEEP_REQUIRE(a.safeguard >= 0 && a.safeguard <= 1, "adaptive_heads: safeguard; given ", a.safeguard,
                 "; allowed 0 to 1");
  const std::int64_t together = std::int64_t{a.longest} * a.heads;
  KVKEEP_REQUIRE(together <= kMostSlots, "adaptive_heads: ", a.heads, " heads of up to ", a.longest,
                 " slots share a budget; allowed up to ", kMostSlots, " slots together");
  auto* const own = static_cast<std::uint64_t*>(a.workspace);
  const AdaptiveHeadsTask task{a, own, own + a.count};
  const std::int32_t threads = tuning::threads_for(a.longest);
  launch("adaptive_heads_own", adaptive_heads_own_kernel, {.blocks = blocks_for(a.count), .threads = threads}, stream,
         task);
  launch("adaptive_heads_shared", adaptive_heads_shared_kernel,
         {.blocks = blocks_for(a.count / a.heads), .threads = tuning::threads_for(static_cast<std::int32_t>(together))},
         stream, task);
  if (a.slots != nullptr)
    launch("adaptive_heads_slots", adaptive_heads_slots_kernel, {.blocks = blocks_for(a.count), .threads = threads},
           stream, task);
}

}  // namespace kvkeep::cuda
