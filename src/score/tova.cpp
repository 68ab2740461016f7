#include "kvkeep/score/tova.h"

#include <algorithm>
#include <numeric>

#include "head_mean.h"
#include "kvkeep/core/require_host.h"

namespace kvkeep {

Scores Tova::score(const Evidence& evidence, const Limits&, const WindowAttention& seen) const {
  require_host("tova", evidence.table.device);
  Scores scores{clone(seen.newest)};
  float* g = scores.data.data<float>();
  const std::int32_t heads = evidence.spec.kv_heads;
  for (const RowGroup& group : evidence.table.groups) {
    const auto rows = evidence.table.rows_of(group, heads);
    std::int32_t asked = 0;  // a row that is not due has no window
    for (std::size_t h = 0; h < rows.size(); ++h) {
      if (seen.windows[static_cast<std::size_t>(group.first_row) + h].queries > 0)
        ++asked;
      else
        std::iota(g + rows[h].first, g + rows[h].first + rows[h].length, 0.0F);
    }
    if (asked > 0 && options_.heads == TovaOptions::Heads::all) cpu::mean_over_heads("tova", evidence, group, asked, g);
  }
  return scores;
}

}  // namespace kvkeep
