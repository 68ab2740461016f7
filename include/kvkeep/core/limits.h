// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How much every row may keep at an event. Settled before anything is scored.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvkeep/core/parallel.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/row.h"

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

// Loops over the rows of an event, one thread per row.

/// Calls body(r, row, scratch) for every row; make() makes the scratch of one thread.
template <class Make, class Body>
void each_row(const RowTable& table, const Make& make, const Body& body) {
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    auto scratch = make();
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
      body(r, table.rows[r], scratch);
  });
}

/// Calls body(r, row) for every row.
template <class Body>
void each_row(const RowTable& table, const Body& body) {
  each_row(table, [] { return 0; }, [&](std::size_t r, const Row& row, int) { body(r, row); });
}

/// The same for the rows that are due.
template <class Make, class Body>
void each_due_row(const RowTable& table, const Limits& limits, const Make& make, const Body& body) {
  each_row(table, make, [&](std::size_t r, const Row& row, auto& scratch) {
    if (limits.rows[r].due) body(r, row, scratch);
  });
}
template <class Body>
void each_due_row(const RowTable& table, const Limits& limits, const Body& body) {
  each_row(table, [&](std::size_t r, const Row& row) {
    if (limits.rows[r].due) body(r, row);
  });
}

}  // namespace kvkeep
