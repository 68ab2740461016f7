// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A stable sort of numbers by their score, the highest first, by one block.

#include "kvkeep/core/rank_key.h"
#include "team.cuh"

namespace kvkeep::cuda {

inline constexpr std::int32_t kDigitBits = 8, kDigitCount = 1 << kDigitBits;
inline constexpr std::int32_t kAhead = 4;  ///< numbers that a thread requests before it places the first of them

/// An entry of the sort: the sort key in the high half, the token's number in the low half.
__device__ inline std::uint64_t entry_of(float score, std::int32_t t) {
  return std::uint64_t{place_key(score)} << 32 | static_cast<std::uint32_t>(t);
}

/// Lanes of the warp with the same digit as this lane, of those that are there. The whole warp calls.
__device__ inline unsigned peers_of(std::uint32_t digit, bool there) {
  unsigned peers = __ballot_sync(kWholeWarp, there ? 1 : 0);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const unsigned set = digit >> bit & 1U, votes = __ballot_sync(kWholeWarp, static_cast<int>(set));
    peers &= set != 0 ? votes : ~votes;
  }
  return peers;
}

/// Turns `counters`, [warps][kDigitCount] how often each warp has each digit, into the place of the first of them.
__device__ inline void place_digits(const BlockTeam& team, std::uint32_t* counters) {
  const std::int32_t digit = team.thread(), warps = team.size() / 32;
  std::uint32_t all = 0;
  if (digit < kDigitCount)
    for (std::int32_t w = 0; w < warps; ++w) all += counters[w * kDigitCount + digit];
  auto place = static_cast<std::uint32_t>(team.sum_before(all));
  if (digit < kDigitCount)
    for (std::int32_t w = 0; w < warps; ++w) {
      const std::uint32_t own = counters[w * kDigitCount + digit];
      counters[w * kDigitCount + digit] = place;
      place += own;
    }
  team.sync();
}

/// Calls step(there, entry) for a warp's run of entries, 32 neighbours at a time, one per lane; the entry of a lane
/// whose `there` is false has no meaning.
template <class Read, class Step>
__device__ void each_entry(std::int32_t begin, std::int32_t end, const Read& read, const Step& step) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  for (std::int32_t first = begin; first < end; first += 32 * kAhead) {
    std::uint64_t held[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int32_t t = first + 32 * j + lane;
      held[j] = t < end ? read(t) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + 32 * j >= end) break;  // for the whole warp
      step(first + 32 * j + lane < end, held[j]);
    }
  }
}

/// One pass of a stable sort of n entries: read(i) gives the i-th, write(i, entry) puts an entry in its place by the
/// digit at `shift`. Each warp has a run of neighbours.
template <class Read, class Write>
__device__ void sort_by_digit(const BlockTeam& team, std::uint32_t* counters, std::int32_t n, int shift,
                              const Read& read, const Write& write) {
  const std::int32_t lane = team.thread() % 32, warp = team.thread() / 32;
  const std::int32_t run = (n + team.size() - 1) / team.size() * 32, begin = warp * run,
                     end = begin + run < n ? begin + run : n;
  std::uint32_t* own = counters + warp * kDigitCount;
  const auto digit_of = [shift](std::uint64_t entry) {
    return static_cast<std::uint32_t>(entry >> shift) & (kDigitCount - 1U);
  };
  for (std::int32_t d = lane; d < kDigitCount; d += 32) own[d] = 0;
  __syncwarp(kWholeWarp);
  each_entry(begin, end, read, [&](bool there, std::uint64_t entry) {
    if (there) atomicAdd(&own[digit_of(entry)], 1U);
  });
  team.sync();
  place_digits(team, counters);
  each_entry(begin, end, read, [&](bool there, std::uint64_t entry) {
    const std::uint32_t digit = digit_of(entry);
    const unsigned peers = peers_of(digit, there);
    const std::int32_t before = __popc(peers & ((1U << lane) - 1U)),
                       leader = there ? __ffs(static_cast<int>(peers)) - 1 : lane;
    std::uint32_t place = 0;
    if (there && lane == leader) {
      place = own[digit];
      own[digit] = place + static_cast<std::uint32_t>(__popc(peers));
    }
    place = __shfl_sync(kWholeWarp, place, leader);
    __syncwarp(kWholeWarp);  // the next leader reads what this one wrote
    if (there) write(static_cast<std::int32_t>(place) + before, entry);
  });
  team.sync();
}

/// Counters of sort_by_score() in shared memory, for a block of `threads`.
KVKEEP_HD constexpr std::int32_t sort_counters(std::int32_t threads) { return threads / 32 * kDigitCount; }

/// Sorts n entries (entry_of), stable: read(i) gives the i-th, write(i, entry) takes what comes out as the i-th. a, b:
/// [n] scratch; `write` may write to b.
template <class Read, class Write>
__device__ void sort_by_score(const BlockTeam& team, std::uint32_t* counters, std::int32_t n, std::uint64_t* a,
                              std::uint64_t* b, const Read& read, const Write& write) {
  const auto to = [](std::uint64_t* entries) {
    return [entries](std::int32_t i, std::uint64_t entry) { entries[i] = entry; };
  };
  const auto from = [](const std::uint64_t* entries) { return [entries](std::int32_t i) { return entries[i]; }; };
  sort_by_digit(team, counters, n, 32, read, to(a));
  sort_by_digit(team, counters, n, 40, from(a), to(b));
  sort_by_digit(team, counters, n, 48, from(b), to(a));
  sort_by_digit(team, counters, n, 56, from(a), write);
}

}  // namespace kvkeep::cuda
