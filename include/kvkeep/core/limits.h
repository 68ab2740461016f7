#pragma once
/// How much every row may keep at an event. Settled before anything is scored.

#include <cstdint>
#include <memory>
#include <vector>

#include "kvkeep/core/row.h"
#include "kvkeep/core/row_limit.h"

namespace kvkeep {

struct Limits {
  Variant variant = Variant::strict;
  Padding padding;                                    ///< official only
  std::vector<RowLimit> rows;                         ///< [rows]
  std::shared_ptr<const SlotRange[]> pins = nullptr;  ///< of all rows; null: nothing is pinned
};

/// What stays of row r, of `length` slots, whatever it scores.
[[nodiscard]] inline Protected stays(const Limits& limits, std::size_t r, std::int32_t length) {
  const RowLimit& limit = limits.rows[r];
  return limits.variant == Variant::official ? with_padding(limit, limits.padding, length) : limit.guarded;
}

/// The same budget for every row, for scorers and allocators that are used without a policy.
[[nodiscard]] inline Limits even_limits(const RowTable& table, std::int32_t budget, std::int32_t sink = 0,
                                        std::int32_t recent = 0, Variant variant = Variant::strict) {
  Limits limits{variant, {}, {}};
  limits.rows.reserve(table.rows.size());
  for (const Row& row : table.rows)
    limits.rows.push_back({budget, row.length > budget, protect(row.length, budget, sink, recent, variant)});
  return limits;
}

}  // namespace kvkeep
