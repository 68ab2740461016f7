#include "kvkeep/score/random.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "kvkeep/core/dispatch.h"

namespace kvkeep {
namespace {

/// The finalizer of splitmix64: every bit of the result depends on every bit of x.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Scores RandomScorer::score(const Evidence& evidence, const Limits& limits, WindowAttention&) const {
  return dispatch("random", evidence.table.device, [&] {
    const RowTable& table = evidence.table;
    Scores scores{at::empty({table.slots}, at::TensorOptions().dtype(kFloat32))};
    float* out = scores.data.data_ptr<float>();
    at::parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
        if (!limits.rows[r].due) continue;
        const Row& row = table.rows[r];
        const std::uint64_t of_row = mixed(mixed(static_cast<std::uint64_t>(options_.seed)) ^ (static_cast<std::uint64_t>(row.layer) << 32 | static_cast<std::uint32_t>(row.head)));
        for (std::int32_t t = 0; t < row.length; ++t)
          out[row.first + t] = static_cast<float>(mixed(of_row ^ static_cast<std::uint32_t>(row.positions[t])) >> 40) * 0x1p-24F;
      }
    });
    return scores;
  });
}

}  // namespace kvkeep
