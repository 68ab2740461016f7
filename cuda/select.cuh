// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Selection without a sort: the key of the last kept slot is found digit by digit, then everything at or above it
/// stays.

#include "kvkeep/core/protect.h"
#include "kvkeep/core/rank_key.h"
#include "team.cuh"

namespace kvkeep::cuda {

inline constexpr std::int32_t kDigits = 256;

/// The least of the `wanted` largest keys; each(add) calls add(key) for the candidates of this thread, all of which
/// differ. Low bits of the result may be 0 if no other key is in between. `histogram`: kDigits counters of shared
/// memory for this team. Requires: 1 <= wanted <= candidates. Cost: at most 8 passes, mostly 4.
template <class Team, class Each>
__device__ std::uint64_t least_of_largest(const Team& team, std::int32_t* histogram, std::int32_t wanted,
                                          const Each& each) {
  const WarpTeam warp;
  std::uint64_t found = 0, mask = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (std::int32_t i = team.thread(); i < kDigits; i += team.size()) histogram[i] = 0;
    team.sync();
    each([&](std::uint64_t key) {
      if ((key & mask) == found) atomicAdd(&histogram[key >> shift & 255U], 1);
    });
    team.sync();
    // Every warp reads the counters for itself: lane l those of digits 255 - 8 l downwards.
    std::int32_t own = 0;
    for (int i = 0; i < 8; ++i) own += histogram[255 - 8 * warp.thread() - i];
    const auto above = static_cast<std::int32_t>(warp.sum_before(static_cast<std::uint64_t>(own)));
    const bool here = above < wanted && wanted <= above + own;
    std::int32_t digit = 0, left = 0, count = 0;
    if (here) {
      left = wanted - above;
      digit = 255 - 8 * warp.thread();
      while (left > histogram[digit]) left -= histogram[digit--];
      count = histogram[digit];
    }
    const unsigned votes = __ballot_sync(kWholeWarp, here ? 1 : 0);
    const int lane = __ffs(static_cast<int>(votes)) - 1;
    digit = __shfl_sync(kWholeWarp, digit, lane);
    wanted = __shfl_sync(kWholeWarp, left, lane);
    count = __shfl_sync(kWholeWarp, count, lane);
    team.sync();
    found |= static_cast<std::uint64_t>(digit) << shift;
    mask |= std::uint64_t{255} << shift;
    if (wanted == count) return found;
  }
  return found;
}

/// The same over key_of(t), t in [from, to). A key of 0 is not a candidate.
template <class Team, class KeyOf>
__device__ std::uint64_t least_kept(const Team& team, std::int32_t* histogram, std::int32_t from, std::int32_t to,
                                    std::int32_t wanted, const KeyOf& key_of) {
  return least_of_largest(team, histogram, wanted, [&](const auto& add) {
    for (std::int32_t t = from + team.thread(); t < to; t += team.size()) {
      const std::uint64_t key = key_of(t);
      if (key != 0) add(key);
    }
  });
}

/// Writes the slots t of [0, length) for which keeps(t) holds to `slots`, ascending. Returns how many. keeps(t) is
/// asked twice. A warp has slots next to each other: it counts those that stay, hears how many stay before them, and
/// writes.
template <class Team, class Keeps>
__device__ std::int32_t write_kept(const Team& team, std::int32_t length, const Keeps& keeps, std::int32_t* slots) {
  const std::int32_t lane = team.thread() % 32, each = (length + team.size() - 1) / team.size() * 32,
                     begin = team.thread() / 32 * each, end = length - begin < each ? length : begin + each;
  const auto kept_of = [&](std::int32_t first) {
    return __ballot_sync(kWholeWarp, first + lane < end && keeps(first + lane) ? 1 : 0);
  };
  std::int32_t count = 0;
  for (std::int32_t first = begin; first < end; first += 32) count += __popc(kept_of(first));
  const std::uint64_t of_warp = lane == 0 ? static_cast<std::uint64_t>(count) : 0;
  const std::uint64_t all = team.sum(of_warp);
  std::int32_t written = __shfl_sync(kWholeWarp, static_cast<std::int32_t>(team.sum_before(of_warp)), 0);
  for (std::int32_t first = begin; first < end; first += 32) {
    const unsigned kept = kept_of(first);
    if ((kept >> lane & 1U) != 0) slots[written + __popc(kept & ((1U << lane) - 1))] = first + lane;
    written += __popc(kept);
  }
  return static_cast<std::int32_t>(all);
}

/// Writes all slots of a row.
template <class Team>
__device__ void write_all(const Team& team, std::int32_t length, std::int32_t* slots) {
  for (std::int32_t t = team.thread(); t < length; t += team.size()) slots[t] = t;
}

/// Writes the guarded slots of a row and its best others, `kept` in all, ascending.
template <class Team>
__device__ void write_best(const Team& team, std::int32_t* histogram, std::int32_t length, const Protected& guarded,
                           const float* scores, std::int32_t kept, std::int32_t* slots) {
  if (kept == length) return write_all(team, length, slots);
  const std::int32_t wanted = kept - guarded.count();
  const auto key_of = [&](std::int32_t t) { return guarded.holds(t, length) ? 0 : rank_key(scores[t], t); };
  const std::uint64_t least = wanted > 0 ? least_kept(team, histogram, 0, length, wanted, key_of) : ~std::uint64_t{0};
  write_kept(team, length, [&](std::int32_t t) { return guarded.holds(t, length) || key_of(t) >= least; }, slots);
}

}  // namespace kvkeep::cuda
