#pragma once
/// What every row may keep at an event: settled before anything is scored.

#include <cstdint>
#include <vector>

#include "kvkeep/core/protect.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

struct RowLimit {
  std::int32_t budget = 0;  ///< slots that may stay; where the rows of a layer share one budget, their mean
  bool due = false;         ///< something of this row may go; a row that is not due keeps every slot, and its score is not looked at
  Protected guarded;        ///< slots that stay whatever their score, at most `budget` of them
};

/// Slots that rank before all others inside their segment, whatever they score: what published scorers do by writing a maximum over them (variant official).
struct Padding {
  std::int32_t oldest = 0;
  std::int32_t newest = 0;
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t slot, std::int32_t length) const { return slot < oldest || slot >= length - newest; }
};

struct Limits {
  Variant variant = Variant::strict;
  Padding padding;             ///< official only
  std::vector<RowLimit> rows;  ///< [rows]
};

/// The same budget for every row: for scorers and allocators that are used without a policy.
[[nodiscard]] inline Limits even_limits(const RowTable& table, std::int32_t budget, std::int32_t sink = 0, std::int32_t recent = 0, Variant variant = Variant::strict) {
  Limits limits{variant, {}, {}};
  limits.rows.reserve(table.rows.size());
  for (const Row& row : table.rows) limits.rows.push_back({budget, row.length > budget, protect(row.length, budget, sink, recent, variant)});
  return limits;
}

}  // namespace kvkeep
