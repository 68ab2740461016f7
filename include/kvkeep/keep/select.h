// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Selection: which slots of a row stay, given scores, segments with quotas, and protected slots.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kvkeep/core/limits.h"
#include "kvkeep/core/rank_key.h"

namespace kvkeep {

/// Keeps protected slots and, in each segment, the best others up to its quota. Returns ascending slots; their number
/// is the sum of the quotas. scores: f32 [length]; ends, quotas: [segments]; quotas[i] >= protected slots in segment i.
/// `keys`: scratch, reused. Cost: O(length) on average, no sort.
void select_in_segments(std::span<const float> scores, std::span<const std::int32_t> ends,
                        std::span<const std::int32_t> quotas, Protected guarded, std::vector<std::uint64_t>& keys,
                        std::span<std::int32_t> slots);

/// The published selection: in each segment the best `quota` slots (protected ones compete, those of `padding` rank
/// first, newer before older), then protected slots plus the best candidates over the whole row up to `budget`. Trims
/// regardless of segments, as published.
void select_official(std::span<const float> scores, std::span<const std::int32_t> ends,
                     std::span<const std::int32_t> quotas, Protected guarded, Padding padding,
                     std::vector<std::uint64_t>& keys, std::span<std::int32_t> slots);

/// Top-k of a row with protected slots: one segment. slots.size() is the budget.
inline void select(std::span<const float> scores, Protected guarded, std::vector<std::uint64_t>& keys,
                   std::span<std::int32_t> slots) {
  const std::int32_t length = static_cast<std::int32_t>(scores.size());
  const std::int32_t quota = static_cast<std::int32_t>(slots.size());
  select_in_segments(scores, {&length, 1}, {&quota, 1}, guarded, keys, slots);
}

/// Fills `slots` (ascending, `taken` of them set) up with the best slots not yet taken; it stays ascending.
void select_rest(std::span<const float> scores, std::int32_t taken, std::vector<std::uint64_t>& keys,
                 std::span<std::int32_t> slots);

namespace select_detail {

inline std::int32_t slot_of(std::uint64_t key) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(key)); }

/// Moves the `count` largest keys to the front, in no order.
inline void largest_first(std::vector<std::uint64_t>& keys, std::size_t count) {
  if (count > 0 && count < keys.size())
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count) - 1, keys.end(), std::greater<>());
}

}  // namespace select_detail

inline void select_in_segments(std::span<const float> scores, std::span<const std::int32_t> ends,
                               std::span<const std::int32_t> quotas, Protected guarded,
                               std::vector<std::uint64_t>& keys, std::span<std::int32_t> slots) {
  const auto length = static_cast<std::int32_t>(scores.size());
  const std::int32_t old_end = guarded.sinks, new_begin = length - guarded.recents;
  std::size_t out = 0;
  std::int32_t start = 0;
  for (std::size_t i = 0; i < ends.size(); start = ends[i], ++i) {
    const std::int32_t from = std::clamp(old_end, start, ends[i]), to = std::clamp(new_begin, from, ends[i]);
    const std::int32_t pinned = guarded.pinned_in({from, to});
    const auto wanted = static_cast<std::size_t>(quotas[i] - (from - start) - (ends[i] - to) - pinned);
    for (std::int32_t t = start; t < from; ++t) slots[out++] = t;
    if (wanted == static_cast<std::size_t>(to - from - pinned)) {
      for (std::int32_t t = from; t < to; ++t) slots[out++] = t;
    } else if (pinned > 0) {
      keys.clear();
      for (std::int32_t t = from; t < to; ++t)
        if (!guarded.pins_slot(t)) keys.push_back(rank_key(scores[static_cast<std::size_t>(t)], t));
      select_detail::largest_first(keys, wanted);
      const auto last = keys.begin() + static_cast<std::ptrdiff_t>(wanted);
      const std::uint64_t least = wanted > 0 ? *std::min_element(keys.begin(), last) : ~std::uint64_t{0};
      for (std::int32_t t = from; t < to; ++t)
        if (guarded.pins_slot(t) || rank_key(scores[static_cast<std::size_t>(t)], t) >= least) slots[out++] = t;
    } else if (wanted > 0) {
      keys.resize(static_cast<std::size_t>(to - from));
      for (std::int32_t t = from; t < to; ++t)
        keys[static_cast<std::size_t>(t - from)] = rank_key(scores[static_cast<std::size_t>(t)], t);
      select_detail::largest_first(keys, wanted);
      const std::uint64_t least = *std::min_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(wanted));
      for (std::int32_t t = from; t < to; ++t)
        if (rank_key(scores[static_cast<std::size_t>(t)], t) >= least) slots[out++] = t;
    }
    for (std::int32_t t = to; t < ends[i]; ++t) slots[out++] = t;
  }
}

inline void select_official(std::span<const float> scores, std::span<const std::int32_t> ends,
                            std::span<const std::int32_t> quotas, Protected guarded, Padding padding,
                            std::vector<std::uint64_t>& keys, std::span<std::int32_t> slots) {
  const auto length = static_cast<std::int32_t>(scores.size());
  const auto key_of = [&](std::int32_t t) {
    return padding.holds(t, length) ? first_key(t) : rank_key(scores[static_cast<std::size_t>(t)], t);
  };
  std::vector<std::uint64_t> candidates;
  std::int32_t start = 0;
  for (std::size_t i = 0; i < ends.size(); start = ends[i], ++i) {
    keys.clear();
    for (std::int32_t t = start; t < ends[i]; ++t) keys.push_back(key_of(t));
    select_detail::largest_first(keys, static_cast<std::size_t>(quotas[i]));
    for (std::int32_t n = 0; n < quotas[i]; ++n) {
      const std::uint64_t key = keys[static_cast<std::size_t>(n)];
      const std::int32_t slot = select_detail::slot_of(key);
      if (!guarded.holds(slot, length)) candidates.push_back(key);
    }
  }
  const std::size_t wanted = slots.size() - static_cast<std::size_t>(guarded.count());
  select_detail::largest_first(candidates, wanted);
  std::size_t out = 0;
  for (std::int32_t t = 0; t < guarded.sinks; ++t) slots[out++] = t;
  for (std::size_t n = 0; n < wanted; ++n) slots[out++] = select_detail::slot_of(candidates[n]);
  for (std::int32_t t = length - guarded.recents; t < length; ++t) slots[out++] = t;
  std::sort(slots.begin(), slots.end());
}

inline void select_rest(std::span<const float> scores, std::int32_t taken, std::vector<std::uint64_t>& keys,
                        std::span<std::int32_t> slots) {
  const std::size_t wanted = slots.size() - static_cast<std::size_t>(taken);
  if (wanted == 0) return;
  keys.clear();
  std::int32_t next = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(scores.size()); ++t) {
    if (next < taken && slots[static_cast<std::size_t>(next)] == t)
      ++next;
    else
      keys.push_back(rank_key(scores[static_cast<std::size_t>(t)], t));
  }
  select_detail::largest_first(keys, wanted);
  for (std::size_t n = 0; n < wanted; ++n) slots[static_cast<std::size_t>(taken) + n] = select_detail::slot_of(keys[n]);
  std::sort(slots.begin(), slots.end());
}

}  // namespace kvkeep
