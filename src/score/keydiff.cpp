#include "kvkeep/score/keydiff.h"

#include <algorithm>
#include <cmath>

#include "key_lanes.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/require_host.h"

namespace kvkeep {
namespace {

constexpr float kLeastForDirection = 1e-12F, kLeastForCosine = 1e-8F;

/// Buffers of one thread.
struct Scratch {
  explicit Scratch(std::int64_t dim)
      : sum(static_cast<std::size_t>(dim)),
        anchor(static_cast<std::size_t>(dim)),
        block(static_cast<std::size_t>(cpu::kKeyBlock)) {}
  std::vector<double> sum;
  std::vector<float> anchor;
  std::vector<float> block;  ///< weights, then dots
};

/// Writes norms of all keys to `norms`, and the mean of their directions to scratch.anchor.
void find_anchor(const cpu::Keys& keys, std::int64_t length, float* norms, Scratch& scratch) {
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
  for (std::int64_t t = 0; t < length; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, length);
    cpu::key_norms(keys, t, end, norms + t);
    std::transform(norms + t, norms + end, scratch.block.begin(),
                   [](float norm) { return 1.0F / (norm < kLeastForDirection ? kLeastForDirection : norm); });
    cpu::add_weighted_keys(keys, t, end, scratch.block.data(), scratch.sum.data());
  }
  std::transform(scratch.sum.begin(), scratch.sum.end(), scratch.anchor.begin(),
                 [&](double x) { return static_cast<float>(x / static_cast<double>(length)); });
}

}  // namespace

std::int64_t KeyDiff::workspace_bytes(std::int64_t dim) {
  return dim * static_cast<std::int64_t>(sizeof(double) + sizeof(float)) +
         cpu::kKeyBlock * static_cast<std::int64_t>(sizeof(float));
}

Scores KeyDiff::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("keydiff", evidence.table.device);
  const RowTable& table = evidence.table;
  with_dtype("keydiff", table.key_dtype, [](auto) {});
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch(evidence.spec.key_dim);
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      if (!limits.rows[r].due) continue;
      const Row& row = table.rows[r];
      const cpu::Keys keys{row.keys, table.key_dtype, evidence.spec.key_dim};
      float* g = out + row.first;
      find_anchor(keys, row.length, g, scratch);
      double square = 0;
      for (const float x : scratch.anchor) square += static_cast<double>(x) * static_cast<double>(x);
      const float anchor_norm = std::max(kLeastForCosine, static_cast<float>(std::sqrt(square)));
      const std::int64_t last = (row.length - 1) / cpu::kKeyBlock * cpu::kKeyBlock;
      for (std::int64_t t = last; t >= 0; t -= cpu::kKeyBlock) {
        const std::int64_t n = std::min(cpu::kKeyBlock, row.length - t);
        cpu::key_dots(keys, t, t + n, scratch.anchor.data(), scratch.block.data());
        for (std::int64_t i = 0; i < n; ++i)
          g[t + i] = 0.0F - scratch.block[static_cast<std::size_t>(i)] /
                                ((g[t + i] < kLeastForCosine ? kLeastForCosine : g[t + i]) * anchor_norm);
      }
    }
  });
  return scores;
}

}  // namespace kvkeep
