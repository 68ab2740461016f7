#pragma once
/// Not part of the interface. Selection over all heads of a layer, shared by the allocators that use it.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/allot/across_heads.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/limits.h"

namespace kvkeep::cpu {

/// Rows of one (layer, sequence) are due together: if together they hold more than their budgets.
void due_together(const Evidence& evidence, std::vector<RowLimit>& rows);

/// Slots that each row may keep at most, before anything is scored: the layer's budget less what its other heads keep
/// by themselves (own_slots).
std::vector<std::int32_t> most_across_heads(const Evidence& evidence, const Limits& limits, double safeguard);

/// Marks (1) the `count` best unmarked slots, by score, then the larger slot; NaN is lowest. `keys`: scratch, reused.
void mark_best(std::span<const float> scores, std::int32_t count, std::vector<std::uint64_t>& keys,
               std::uint8_t* marks);

/// Marks the guarded slots of one row and clears the others.
void mark_guarded(std::int32_t length, Protected guarded, std::uint8_t* marks);

/// Marks the protected slots of a due row, and its best others up to floor(safeguard * budget); then over all rows of
/// the group the best of the rest (score, then the lower head, then the larger slot) until the rows' total budget is
/// spent. Returns u8 [slots] flat over the event, 1: stays; all 1 in groups that are not due.
std::vector<std::uint8_t> mark_across_heads(const Evidence& evidence, const Limits& limits, double safeguard,
                                            const float* scores);

/// Marked slots of each row, ascending.
KeepSet kept_by_marks(const RowTable& table, const std::uint8_t* marks);

}  // namespace kvkeep::cpu
