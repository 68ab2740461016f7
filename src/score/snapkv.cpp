#include "kvkeep/score/snapkv.h"

#include <algorithm>
#include <numeric>

#include "kvkeep/core/parallel.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
namespace {

/// True if the usage of the same windows was already requested.
bool is_known(const WindowAttention& seen, const std::vector<RowWindow>& windows) {
  return seen.usage.defined() &&
         std::equal(windows.begin(), windows.end(), seen.windows.begin(), seen.windows.end(),
                    [](RowWindow a, RowWindow b) { return a.queries == b.queries && a.history == b.history; });
}

}  // namespace

Scores SnapKV::score(const Evidence& evidence, const Limits& limits, const WindowAttention& seen) const {
  require_host("snapkv", evidence.table.device);
  const RowTable& table = evidence.table;
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  const bool average = options_.style == SnapKVOptions::Style::snapkv;
  Tensor attention;
  if (!average)
    attention = history_attention(evidence, windows, {.group = GroupReduce::max_logit});
  else
    attention = is_known(seen, windows) ? seen.usage : window_attention(evidence, windows, {.usage = true}).usage;
  const float* a = attention.data<float>();
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* g = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const Row& row = table.rows[static_cast<std::size_t>(r)];
      const RowWindow window = windows[static_cast<std::size_t>(r)];
      float* out = g + row.first;
      if (window.queries == 0) {
        std::iota(out, out + row.length, 0.0F);
        continue;
      }
      if (average)
        pool_average(a + row.first, window.history, options_.pool, out);
      else
        pool_max(a + row.first, window.history, options_.pool, out);
      std::fill(out + window.history, out + row.length, 0.0F);
    }
  });
  return scores;
}

}  // namespace kvkeep
