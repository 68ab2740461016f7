#include "kvkeep/score/knorm.h"

#include <algorithm>

#include "key_lanes.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/require_host.h"

namespace kvkeep {

Scores Knorm::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("knorm", evidence.table.device);
  const RowTable& table = evidence.table;
  with_dtype("knorm", table.key_dtype, [](auto) {});
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      if (!limits.rows[r].due) continue;
      const Row& row = table.rows[r];
      float* g = out + row.first;
      cpu::key_norms({row.keys, table.key_dtype, evidence.spec.key_dim}, 0, row.length, g);
      std::transform(g, g + row.length, g, [](float norm) { return -norm; });
    }
  });
  return scores;
}

}  // namespace kvkeep
