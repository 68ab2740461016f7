#pragma once
/// Loops over the rows of an event, one thread per row.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/limits.h"
#include "kvkeep/core/parallel.h"

namespace kvkeep {

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
