#pragma once
/// How many slots of a row a threshold leaves. The same on every machine; no LibTorch in here.

#include <cstdint>

#include "kvkeep/core/row_limit.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/team.h"

namespace kvkeep {

/// The protected slots of a due row and the others that score at least `least`, as far as the budget allows. Those that
/// pass rank before all others, so a selection of as many keeps them. NaN does not pass. Cost: one pass over the
/// scores.
template <class Team = OneThread>
[[nodiscard]] KVKEEP_HD std::int32_t passing_slots(const float* scores, std::int32_t length, const RowLimit& limit,
                                                   float least, Team team = {}) {
  const Protected& guarded = limit.guarded;
  const auto passing = [&](std::int32_t from, std::int32_t to) {
    std::uint64_t count = 0;
    for (std::int32_t t = from + team.thread(); t < to; t += team.size()) count += scores[t] >= least ? 1 : 0;
    return count;
  };
  std::uint64_t own = passing(guarded.sinks, length - guarded.recents);
  for (std::int32_t i = 0; i < guarded.ranges; ++i) own -= passing(guarded.pins[i].from, guarded.pins[i].to);
  // A member may have taken more from pinned ranges than it counted: the sum over all of them is right.
  const auto stay = static_cast<std::int64_t>(team.sum(own)) + guarded.count();
  const std::int32_t room = limit.budget < length ? limit.budget : length;
  return stay < room ? static_cast<std::int32_t>(stay) : room;
}

}  // namespace kvkeep
