#include "kvkeep/score/recency.h"

#include <numeric>

#include "kvkeep/core/require_host.h"

namespace kvkeep {

Scores Recency::score(const Evidence& evidence, const Limits&, const WindowAttention&) const {
  require_host("recency", evidence.table.device);
  Scores scores{empty({evidence.table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  for (const Row& row : evidence.table.rows) std::iota(out + row.first, out + row.first + row.length, 0.0F);
  return scores;
}

}  // namespace kvkeep
