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
      if (seen.windows[static_cast<std::size_t>(group.first_row)].queries == 0) {
        for (const Row& row : rows) std::iota(g + row.first, g + row.first + row.length, 0.0F);
      } else if (options_.heads == TovaOptions::Heads::all) {
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
