// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Which folded spans a query head wants by the attention that they would draw, and which of them open:
/// kvkeep/memory/row_zoom.h, by a block.

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

/// Heads of one row and query that open spans within one budget.
struct SharingHeads {
  const float* relevance;  ///< [heads, most_spans]
  std::uint8_t* marks;     ///< the same: what each wants, then what it opens
  std::int32_t heads;
  std::int64_t stride;

  [[nodiscard]] __device__ bool anyone(std::int32_t s) const {
    for (std::int32_t h = 0; h < heads; ++h)
      if (marks[h * stride + s] != 0) return true;
    return false;
  }
  /// The highest relevance among the heads that want span s.
  [[nodiscard]] __device__ float key(std::int32_t s) const {
    float most = Running::kNothing;
    for (std::int32_t h = 0; h < heads; ++h)
      if (marks[h * stride + s] != 0) most = fmaxf(most, relevance[h * stride + s]);
    return most;
  }
};

/// Walks n entries in their order and flags the spans that fit, adding up as the CPU does. By one warp.
__device__ inline void open_in_order(const FoldedRow& row, double resident, const OpeningCost& costs,
                                     const std::uint64_t* entries, std::int32_t n, std::uint8_t* flags) {
  const WarpTeam warp;
  double used = resident;
  for (std::int32_t first = 0; first < n; first += 32) {
    const bool there = first + warp.thread() < n;
    const auto s = static_cast<std::int32_t>(there ? static_cast<std::uint32_t>(entries[first + warp.thread()]) : 0);
    const MemorySpan& span = row.table[s];
    const double own = there ? costs.entries(span.factors[0], span.factors[1], span.length) : 0;
    unsigned left = __ballot_sync(kWholeWarp, there ? 1 : 0);
    while (left != 0) {  // a span that does not fit now never will
      left &= __ballot_sync(kWholeWarp, used + own > row.entries ? 0 : 1);
      if (left == 0) break;
      const int next = __ffs(static_cast<int>(left)) - 1;
      used += __shfl_sync(kWholeWarp, own, next);
      if (warp.thread() == next) flags[s] = 1;
      left &= ~(1U << next);
    }
  }
}

/// Opens what the heads want, as far as the budget goes.
__device__ inline void open_within(const MemoryAttentionArguments& a, const BlockTeam& team, const SortScratch& sort,
                                   const FoldedRow& row, const SharingHeads& heads, std::uint8_t* flags) {
  const OpeningCost costs{a.dim, a.per_head};
  std::uint64_t mine = 0, empty = 0;
  for (std::int32_t s = team.thread(); row.vacant > 0 && s < row.spans; s += team.size()) empty += row.holds(s) ? 0 : 1;
  const double resident =
      row.vacant > 0 ? row.resident - row.vacant * static_cast<double>(team.sum(empty)) : row.resident;
  for (std::int32_t s = team.thread(); s < row.spans; s += team.size()) {
    const bool asked = heads.anyone(s);
    flags[s] = asked ? 1 : 0;
    const MemorySpan& span = row.table[s];
    if (asked) mine += static_cast<std::uint64_t>(costs.numbers(span.factors[0], span.factors[1], span.length));
  }
  const double all = resident + static_cast<double>(team.sum(mine)) / costs.unit();
  if (!(all + fabs(all) * 1e-9 <= row.entries)) {  // nearly always they all fit, in any order
    const std::int32_t asked = write_kept(team, row.spans, [&](std::int32_t s) { return flags[s] != 0; }, sort.list);
    team.sync();
    for (std::int32_t s = team.thread(); s < row.spans; s += team.size()) flags[s] = 0;
    sort_by_score(
        team, sort.counters, asked, sort.a, sort.b,
        [&](std::int32_t i) { return entry_of(heads.key(sort.list[i]), sort.list[i]); },
        [&](std::int32_t i, std::uint64_t entry) { sort.b[i] = entry; });
    if (team.thread() < 32) open_in_order(row, resident, costs, sort.b, asked, flags);
  }
  team.sync();
  for (std::int32_t s = team.thread(); s < row.spans; s += team.size())
    for (std::int32_t h = 0; h < heads.heads; ++h) {
      std::uint8_t& mark = heads.marks[h * heads.stride + s];
      mark = flags[s] == 0 ? 0 : a.share ? 1 : mark;
    }
  team.sync();
}

}  // namespace kvkeep::cuda
