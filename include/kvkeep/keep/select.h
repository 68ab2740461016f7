#pragma once
/// Selection: which slots of a row stay, given scores, segments with quotas, and protected slots.

#include <cstdint>
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keep/select-inl.h"
#endif
