// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Selection without a sort: the key of the last kept slot is found digit by digit, then everything at or above it
/// stays.

#include "kvkeep/core/protect.h"
#include "kvkeep/core/rank_key.h"
#include "team.cuh"

namespace kvkeep::cuda {

inline constexpr std::int32_t kDigits = 256;

/// The least of the `wanted` largest keys; each(add) calls add(key) for the candidates of this thread. Low bits of the
/// result may be 0 if no other key is in between. Afterwards `wanted` is how many of the keys that are equal to it
/// belong to them, or 0: all do. `histogram`: kDigits counters of shared memory for this team. Requires: 1 <= wanted <=
/// candidates. Cost: a pass for each byte of a key at most, mostly 3 or 4.
template <class Key, class Team, class Each>
__device__ Key last_of_largest(const Team& team, std::int32_t* histogram, std::int32_t& wanted, const Each& each) {
  const WarpTeam warp;
  Key found = 0, mask = 0;
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
    for (std::int32_t i = team.thread(); i < kDigits; i += team.size()) histogram[i] = 0;
    team.sync();
    // The counter of digit d is at 32 (d % 8) + d / 8, so that a warp reads 32 neighbours.
    each([&](Key key) {
      if ((key & mask) == found) {
        const auto digit = static_cast<std::uint32_t>(key >> shift);
        atomicAdd(&histogram[(digit & 7U) << 5 | (digit & 255U) >> 3], 1);
      }
    });
    team.sync();
    // Every warp reads the counters for itself: lane l those of digits 255 - 8 l downwards.
    std::int32_t counts[8], own = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) own += counts[i] = histogram[32 * (7 - i) + 31 - warp.thread()];
    const std::int32_t above = warp.sum_before(own);
    const bool here = above < wanted && wanted <= above + own;
    std::int32_t digit = 255 - 8 * warp.thread(), left = wanted - above, count = counts[0];
#pragma unroll
    for (int i = 1; i < 8; ++i)
      if (left > count) {
        left -= count;
        count = counts[i];
        --digit;
      }
    const int lane = __ffs(static_cast<int>(__ballot_sync(kWholeWarp, here ? 1 : 0))) - 1;
    digit = __shfl_sync(kWholeWarp, digit, lane);
    wanted = __shfl_sync(kWholeWarp, left, lane);
    count = __shfl_sync(kWholeWarp, count, lane);
    team.sync();
    found |= static_cast<Key>(digit) << shift;
    mask |= Key{255} << shift;
    if (wanted == count) {
      wanted = 0;
      break;
    }
  }
  return found;
}

/// The same of keys that all differ.
template <class Team, class Each>
__device__ std::uint64_t least_of_largest(const Team& team, std::int32_t* histogram, std::int32_t wanted,
                                          const Each& each) {
  return last_of_largest<std::uint64_t>(team, histogram, wanted, each);
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

/// The key of the last of the best `wanted` slots of [from, to), as rank_key() has it; orders: order_of() of each slot,
/// or, of those that are no candidates, less than `least`.
template <class Team>
__device__ std::uint64_t least_by_order(const Team& team, std::int32_t* histogram, const std::uint32_t* orders,
                                        std::uint32_t least, std::int32_t from, std::int32_t to, std::int32_t wanted) {
  std::uint32_t order = last_of_largest<std::uint32_t>(team, histogram, wanted, [&](const auto& add) {
    for (std::int32_t t = from + team.thread(); t < to; t += team.size())
      if (orders[t] >= least) add(orders[t]);
  });
  if (order < least) order = least;  // low bits are 0 of what all candidates are at or above
  std::uint32_t slot = 0;
  if (wanted > 0)
    slot = last_of_largest<std::uint32_t>(team, histogram, wanted, [&](const auto& add) {
      for (std::int32_t t = from + team.thread(); t < to; t += team.size())
        if (orders[t] == order) add(static_cast<std::uint32_t>(t));
    });
  return std::uint64_t{order} << 32 | slot;
}

/// Calls mark(t, whether it is one of the best `wanted`) for the slots of [from, to), at most 32 * kEach, by one warp
/// whose orders stay in registers: bit by bit, those in which they differ. An order of 0 is not a candidate. Requires:
/// `wanted` from 1 to the number of candidates.
template <int kEach, class Mark>
__device__ void mark_best_of_few(const std::uint32_t* orders, std::int32_t from, std::int32_t to, std::int32_t wanted,
                                 const Mark& mark) {
  const WarpTeam warp;
  std::uint32_t own[kEach], any = 0, all = ~0U;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int32_t t = from + 32 * i + warp.thread();
    own[i] = t < to ? orders[t] : 0;
    any |= own[i];
    all &= own[i] != 0 ? own[i] : ~0U;
  }
  any = __reduce_or_sync(kWholeWarp, any);
  std::uint32_t found = __reduce_and_sync(kWholeWarp, all);
  std::int32_t count = 0;
  for (std::uint32_t differ = any ^ found; differ != 0 && count != wanted;) {
    const std::uint32_t bit = 0x80000000U >> __clz(static_cast<int>(differ));
    count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += warp.count(own[i] >= (found | bit));
    if (count >= wanted) found |= bit;
    differ ^= bit;
  }
  std::int32_t equal = wanted;  // slots with this very order that belong to them: the newest
  if (count == wanted) {
    --found;  // all that are above it
    equal = 0;
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) equal -= warp.count(own[i] > found);
  }
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i) {
    const unsigned votes = __ballot_sync(kWholeWarp, own[i] == found ? 1 : 0);
    const std::int32_t t = from + 32 * i + warp.thread();
    if (t < to) mark(t, own[i] > found || (own[i] == found && __popc(votes >> warp.thread()) <= equal));
    const std::int32_t left = equal - __popc(votes);
    equal = left > 0 ? left : 0;
  }
}

/// Writes the slots t of [0, length) for which keeps(t) holds to `slots`, ascending. Returns how many. keeps(t) is
/// asked twice. A warp has slots next to each other: it counts those that stay, hears how many stay before them, and
/// writes.
template <class Keeps>
__device__ std::int32_t write_kept(const BlockTeam& team, std::int32_t length, const Keeps& keeps,
                                   std::int32_t* slots) {
  const std::int32_t lane = team.thread() % 32, each = (length + team.size() - 1) / team.size() * 32,
                     begin = team.thread() / 32 * each, end = length - begin < each ? length : begin + each;
  const auto kept_of = [&](std::int32_t first) {
    return __ballot_sync(kWholeWarp, first + lane < end && keeps(first + lane) ? 1 : 0);
  };
  std::int32_t count = 0;
  for (std::int32_t first = begin; first < end; first += 32) count += __popc(kept_of(first));
  std::uint64_t all;
  auto written = static_cast<std::int32_t>(team.sum_before_warp(static_cast<std::uint64_t>(count), all));
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
