#pragma once
/// How many of a row's queries take part in its window attention. No LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/partition_point.h"
#include "kvkeep/core/query_view.h"
#include "kvkeep/core/row_limit.h"
#include "kvkeep/core/slot.h"

namespace kvkeep {

/// How many of a row's queries take part, and from which slot on some of them cannot see.
struct RowWindow {
  std::int32_t queries = 0;  ///< W of this row; 0: no query seen yet
  std::int32_t history = 0;  ///< slots [0, history) are visible to every window query; the rest is the suffix
};

/// The window of one row: row_windows() says how it follows.
KVKEEP_HD inline RowWindow window_of(const Row& row, const QueryView& view, const RowLimit& limit, std::int32_t window,
                                     bool official) {
  std::int32_t fits = window;
  for (const std::int32_t most : {official ? view.count - 1 : view.count, row.length - 1, limit.budget})
    fits = fits < most ? fits : most;
  if (!limit.due || view.count == 0 || row.length == 0 || (fits < 1 && !official)) return {0, row.length};
  if (official) {
    const std::int32_t queries = fits < 1 ? 1 : fits;
    return {queries, row.length > queries ? row.length - queries : 0};
  }
  const std::int32_t oldest = view.position(view.count - fits);
  return {fits, partition_point(0, row.length, [&](std::int32_t t) { return row.positions[t] < oldest; })};
}

}  // namespace kvkeep
