#include "kvkeep/score/tova.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "kvkeep/core/dispatch.h"
#include "attention_lanes.h"

namespace kvkeep {

Scores Tova::score(const Evidence& evidence, const WindowAttention& seen) const {
  return dispatch("tova", evidence.table.device, [&] {
    Scores scores{at::empty({evidence.table.slots}, at::TensorOptions().dtype(kFloat32))};
    float* out = scores.data.data_ptr<float>();
    const float* newest = seen.newest.data_ptr<float>();
    const std::int32_t heads = evidence.spec.kv_heads;
    for (const RowGroup& group : evidence.table.groups) {
      const auto rows = evidence.table.rows_of(group, heads);
      for (std::int32_t h = 0; h < heads; ++h) {
        const Row& row = rows[static_cast<std::size_t>(h)];
        float* g = out + row.first;
        if (seen.windows[static_cast<std::size_t>(group.first_row + h)].queries == 0) {
          std::iota(g, g + row.length, 0.0F);
        } else if (options_.heads == TovaOptions::Heads::group) {
          std::copy_n(newest + row.first, row.length, g);
        } else if (h == 0) {
          std::fill_n(g, row.length, 0.0F);
          for (const Row& other : rows) {
            require<Unsupported>(other.length == row.length, "tova: heads \"all\" averages over heads of one length; given rows of ", row.length, " and ",
                                 other.length, " slots in layer ", row.layer, "; use heads \"group\"");
            cpu::add_scaled(g, newest + other.first, 1.0F / static_cast<float>(heads), row.length);
          }
        } else {
          std::copy_n(out + rows[0].first, row.length, g);
        }
      }
    }
    return scores;
  });
}

}  // namespace kvkeep
