#include "kvkeep/score/tova.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/dispatch.h"
#include "attention_lanes.h"

namespace kvkeep {

Scores Tova::score(const Evidence& evidence, const Limits&, WindowAttention& seen) const {
  return dispatch("tova", evidence.table.device, [&] {
    Scores scores{std::exchange(seen.newest, Tensor())};
    float* g = scores.data.data_ptr<float>();
    const std::int32_t heads = evidence.spec.kv_heads;
    for (const RowGroup& group : evidence.table.groups) {
      const auto rows = evidence.table.rows_of(group, heads);
      const Row& first = rows.front();
      std::int32_t asked = 0;  // a row that is not due has no window
      for (std::size_t h = 0; h < rows.size(); ++h) {
        if (seen.windows[static_cast<std::size_t>(group.first_row) + h].queries > 0) ++asked;
        else std::iota(g + rows[h].first, g + rows[h].first + rows[h].length, 0.0F);
      }
      if (asked > 0 && options_.heads == TovaOptions::Heads::all) {
        require<Unsupported>(asked == heads, "tova: heads \"all\" averages over heads that are cut together; given ", asked, " of ", heads, " due in layer ", first.layer,
                             "; use heads \"group\"");
        for (const Row& row : rows.subspan(1)) {
          require<Unsupported>(row.length == first.length, "tova: heads \"all\" averages over heads of one length; given rows of ", first.length, " and ",
                               row.length, " slots in layer ", row.layer, "; use heads \"group\"");
          cpu::add_scaled(g + first.first, g + row.first, 1.0F, first.length);
        }
        const auto share = 1.0F / static_cast<float>(heads);
        std::transform(g + first.first, g + first.first + first.length, g + first.first, [share](float x) { return x * share; });
        for (const Row& row : rows.subspan(1)) std::copy_n(g + first.first, first.length, g + row.first);
      }
    }
    return scores;
  });
}

}  // namespace kvkeep
