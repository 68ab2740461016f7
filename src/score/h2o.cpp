#include "kvkeep/score/h2o.h"

#include <algorithm>

#include "attention_lanes.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
namespace {

/// Queries whose own slot arrived after the last event.
std::int32_t new_queries(const Row& row, const QueryView& queries, std::int32_t window) {
  if (row.tally_length >= row.length) return 0;
  const std::int32_t since = row.tally_length == 0 ? 0 : row.positions[row.tally_length];
  std::int32_t n = 0;
  while (n < std::min(queries.count, window) && queries.position(queries.count - 1 - n) >= since) ++n;
  return n;
}

}  // namespace

Scores H2O::score(const Evidence& evidence, const Limits&, const WindowAttention&) const {
  require_host("h2o", evidence.table.device);
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  std::vector<RowWindow> windows(table.rows.size());
  for (std::size_t r = 0; r < windows.size(); ++r)
    windows[r] = {new_queries(table.rows[r], table.groups[r / heads].queries, options_.window), table.rows[r].length};
  Scores scores{attention_sum(evidence, windows)};
  float* g = scores.data.data<float>();
  for (const Row& row : table.rows)
    if (row.tally != nullptr) cpu::add_scaled(g + row.first, row.tally, 1.0F, std::min(row.tally_length, row.length));
  return scores;
}

}  // namespace kvkeep
