#include "kvkeep/score/random.h"

#include "kvkeep/core/parallel.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/draw.h"

namespace kvkeep {

Scores RandomScorer::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("random", evidence.table.device);
  const RowTable& table = evidence.table;
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      if (!limits.rows[r].due) continue;
      const Row& row = table.rows[r];
      const std::uint64_t of_row = draws_of_row(options_.seed, row.layer, row.head);
      for (std::int32_t t = 0; t < row.length; ++t) out[row.first + t] = draw(of_row, row.positions[t]);
    }
  });
  return scores;
}

}  // namespace kvkeep
