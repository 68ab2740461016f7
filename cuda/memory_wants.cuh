// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Which folded spans a query head wants by the attention that they would draw: kvkeep/memory/row_zoom.h, by a block.

#include "kvkeep/memory/opening.h"
#include "memory_attention.h"
#include "radix_sort.cuh"
#include "select.cuh"
#include "softmax.cuh"
#include "team.cuh"

namespace kvkeep::cuda {

/// The shares of all mass that follow from the logits of one head, `dense` being the log-sum-exp of everything else.
/// They may take the place of their logits. By one warp.
__device__ inline void find_shares(std::int32_t spans, float dense, const float* logits, float* shares) {
  const WarpTeam warp;
  float top = Running::kNothing;
  for (std::int32_t s = warp.thread(); s < spans; s += 32) top = logits[s] > top ? logits[s] : top;
  top = warp.largest(top);
  const bool nothing = top == Running::kNothing;
  float sum = 0;
  for (std::int32_t s = warp.thread(); s < spans; s += 32) {
    const float e = nothing ? 0.0F : expf(logits[s] - top);
    shares[s] = e;
    sum += e;
  }
  const double all_spans = sum_of_warp(static_cast<double>(sum));
  const float factor = nothing ? 0.0F : share_factor(top, all_spans, dense);
  for (std::int32_t s = warp.thread(); s < spans; s += 32) shares[s] *= factor;
}

/// What sorting takes: counters in shared memory, and for a row and query [2, most_spans] entries and a list of spans.
struct SortScratch {
  std::uint32_t* counters;
  std::uint64_t *a, *b;
  std::int32_t* list;
};

/// Marks the fewest spans of one head that hold `coverage` of what all spans draw, those of the largest shares first.
__device__ inline void want_by_coverage(double coverage, double floor, const BlockTeam& team, const SortScratch& sort,
                                        const FoldedRow& row, const float* shares, std::uint8_t* marks) {
  const std::int32_t spans = row.spans;
  double mine = 0;
  for (std::int32_t s = team.thread(); s < spans; s += team.size()) {
    mine += static_cast<double>(shares[s]);
    marks[s] = 0;
  }
  const double wanted = coverage * team.sum_in_order(mine);
  const std::int32_t worth = write_kept(
      team, spans, [&](std::int32_t s) { return !(static_cast<double>(shares[s]) < floor) && row.holds(s); },
      sort.list);
  team.sync();
  sort_by_score(
      team, sort.counters, worth, sort.a, sort.b,
      [&](std::int32_t i) { return entry_of(shares[sort.list[i]], sort.list[i]); },
      [&](std::int32_t i, std::uint64_t entry) { sort.b[i] = entry; });
  const WarpTeam warp;
  double held = 0;
  for (std::int32_t first = 0; team.thread() < 32 && first < worth; first += 32) {
    const bool there = first + warp.thread() < worth;
    const auto s = static_cast<std::int32_t>(there ? static_cast<std::uint32_t>(sort.b[first + warp.thread()]) : 0);
    const double own = there ? static_cast<double>(shares[s]) : 0.0, before = held + warp.sum_before(own);
    // With a coverage of 1 all of them, even those that rounding loses.
    const bool wants = there && (coverage >= 1 || !(before >= wanted));
    if (wants) marks[s] = 1;
    if (__ballot_sync(kWholeWarp, wants ? 1 : 0) == 0) break;
    held = __shfl_sync(kWholeWarp, before + own, 31);
  }
  team.sync();
}

}  // namespace kvkeep::cuda
