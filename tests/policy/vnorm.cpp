#include "vnorm.h"

#include <cmath>

#include "kvkeep/core/dispatch.h"
#include "kvkeep/core/parallel.h"

namespace kvkeep {

Scores Vnorm::score(const Evidence& evidence, const Limits& limits, WindowAttention&) const {
  return dispatch("vnorm", evidence.table.device, [&] {
    const RowTable& table = evidence.table;
    const std::int64_t dim = evidence.spec.value_dim;
    Scores scores{empty({table.slots}, Dtype::f32)};
    float* out = scores.data.data<float>();
    with_dtype("vnorm", table.value_dtype, [&](auto type) {
      parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          const Row& row = table.rows[static_cast<std::size_t>(r)];
          if (!limits.rows[static_cast<std::size_t>(r)].due) continue;
          for (std::int32_t t = 0; t < row.length; ++t) {
            const auto* value = reinterpret_cast<const decltype(type)*>(row.values.at(t));
            float sum = 0;
            for (std::int64_t d = 0; d < dim; ++d) sum += static_cast<float>(value[d]) * static_cast<float>(value[d]);
            out[row.first + t] = options_.squared ? sum : std::sqrt(sum);
          }
        }
      });
    });
    return scores;
  });
}

}  // namespace kvkeep
