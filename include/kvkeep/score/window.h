// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The windows of rows, and how the queries in them attend: what scorers and allocators read of window attention.

#include <cstdint>
#include <vector>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/query_view.h"
#include "kvkeep/core/slot.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// The first i of [low, high) that is not `before`; `high` if all are. `before` holds for all up to some i, and for
/// none after that.
template <class Before>
KVKEEP_HD std::int32_t partition_point(std::int32_t low, std::int32_t high, const Before& before) {
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (before(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/// The same by a team, whose n members ask n at a time.
template <class Before, class Team>
KVKEEP_HD std::int32_t partition_point(std::int32_t low, std::int32_t high, const Before& before, Team team) {
  while (low < high) {
    const std::int32_t each = (high - low + team.size()) / (team.size() + 1),
                       own = low + (team.thread() + 1) * each - 1, count = team.count(own < high && before(own));
    low += count * each;
    if (count < team.size() && low + each - 1 < high) high = low + each - 1;
  }
  return low;
}

/// How many of a row's queries take part, and from which slot on some of them cannot see.
struct RowWindow {
  std::int32_t queries = 0;  ///< W of this row; 0: no query seen yet
  std::int32_t history = 0;  ///< slots [0, history) are visible to every window query; the rest is the suffix

  /// The same without its `count` oldest queries, as far as one is left.
  [[nodiscard]] KVKEEP_HD RowWindow without_oldest(std::int32_t count) const {
    const std::int32_t left = queries - count;
    return {left > 1 ? left : queries < 1 ? queries : 1, history};
  }
  friend bool operator==(const RowWindow&, const RowWindow&) = default;
};

/// The window of one row: row_windows() says how it follows.
template <class Team = OneThread>
KVKEEP_HD RowWindow window_of(const Row& row, const QueryView& view, const RowLimit& limit, std::int32_t window,
                              bool official, Team team = {}) {
  std::int32_t fits = window;
  for (const std::int32_t most : {official ? view.count - 1 : view.count, row.length - 1, limit.budget})
    fits = fits < most ? fits : most;
  if (!limit.due || view.count == 0 || row.length == 0 || (fits < 1 && !official)) return {0, row.length};
  if (official) {
    const std::int32_t queries = fits < 1 ? 1 : fits;
    return {queries, row.length > queries ? row.length - queries : 0};
  }
  const std::int32_t oldest = view.position(view.count - fits);
  const auto before = [&](std::int32_t t) { return row.positions[t] < oldest; };
  return {fits, partition_point(0, row.length, before, team)};
}

/// The queries of a row, at most the newest `window`, whose own slots came after its last event; all slots are history.
template <class Team = OneThread>
KVKEEP_HD RowWindow fresh_window_of(const Row& row, const QueryView& view, std::int32_t window, Team team = {}) {
  if (row.tally_length >= row.length) return {0, row.length};
  const std::int32_t since = row.tally_length == 0 ? 0 : row.positions[row.tally_length],
                     oldest = view.count < window ? 0 : view.count - window;
  const auto before = [&](std::int32_t i) { return view.position(i) < since; };
  return {view.count - partition_point(oldest, view.count, before, team), row.length};
}

/// Reductions of softmax(scale * q.k + causal mask) over the newest `queries` queries of each row, over all slots of
/// the row. fp32.
struct WindowAttention {
  std::vector<RowWindow> windows;  ///< [rows]
  Tensor usage;   ///< f32 [slots] mean over window queries and the heads of the group; for suffix slots, mean over the
                  ///< strictly later queries, 0 if there are none. Absent unless requested
  Tensor newest;  ///< f32 [slots] the newest query's probabilities, mean over the heads of the group. Absent unless
                  ///< requested
  std::vector<float> tops = {};  ///< [rows] where ranks hold a part of the heads, what an allocator that says
                                 ///< AcrossHeads::tops must know of all of them; else empty
};

struct WindowNeeds {
  bool usage = false;
  bool newest = false;
};

}  // namespace kvkeep
