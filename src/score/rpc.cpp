#include "kvkeep/score/rpc.h"

#include <algorithm>
#include <numeric>

#include "head_mean.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

Scores Rpc::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("rpc", evidence.table.device);
  const RowTable& table = evidence.table;
  const bool official = options_.style == RpcOptions::Style::official;
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  std::vector<RowWindow> selectors = windows;
  std::vector<std::int32_t> first(table.rows.size(), 0);
  if (official)
    for (std::size_t r = 0; r < selectors.size(); ++r) {
      if (selectors[r].queries > 1) --selectors[r].queries;  // the history remains that of the whole window
      first[r] = std::min(limits.rows[r].guarded.sinks, windows[r].history);
    }
  const Tensor attention = history_attention(evidence, selectors, {.newest_counts = official ? 2 : 1}, first);
  const float* a = attention.data<float>();
  Scores scores{zeros({table.slots}, Dtype::f32)};
  float* g = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const auto r = static_cast<std::size_t>(n);
      const Row& row = table.rows[r];
      float* out = g + row.first;
      if (windows[r].queries == 0) {
        std::iota(out, out + row.length, 0.0F);
        continue;
      }
      pool_average(a + row.first + first[r], windows[r].history - first[r], options_.pool, out + first[r]);
      const auto queries = static_cast<float>(windows[r].queries);
      std::transform(out + first[r], out + windows[r].history, out + first[r],
                     [queries](float x) { return x * queries; });
    }
  });
  if (options_.heads == RpcOptions::Heads::group) return scores;
  for (const RowGroup& group : table.groups) {
    const auto begin = windows.begin() + group.first_row;
    const auto asked = static_cast<std::int32_t>(
        std::count_if(begin, begin + evidence.spec.kv_heads, [](RowWindow w) { return w.queries > 0; }));
    if (asked > 0) cpu::mean_over_heads("rpc", evidence, group, asked, g);
  }
  return scores;
}

}  // namespace kvkeep
