#pragma once
/// Heads that share one budget: what every head keeps by itself, and the order of all their slots. The same on every
/// machine; no LibTorch in here.

#include <cstdint>

#include "kvkeep/allot/divide.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/row_limit.h"
#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// Slots of a due row that no other head competes for: the protected ones, and its best others up to floor(safeguard *
/// budget).
[[nodiscard]] KVKEEP_HD inline std::int32_t own_slots(double safeguard, const RowLimit& limit, std::int32_t length) {
  const std::int32_t share = share_of(safeguard, limit.budget), guarded = limit.guarded.count(),
                     own = share > guarded ? share : guarded;
  return own < length ? own : length;
}

/// Order of a slot among those of all heads, as rank_key: higher score first, then the lower head, then the larger
/// slot. `behind`: slots of the heads after its own. Requires: fewer than 2^32 slots in all heads.
[[nodiscard]] KVKEEP_HD inline std::uint64_t head_key(float score, std::int32_t slot, std::int64_t behind) {
  return rank_key(score, static_cast<std::int32_t>(static_cast<std::uint32_t>(behind + slot)));
}

}  // namespace kvkeep
