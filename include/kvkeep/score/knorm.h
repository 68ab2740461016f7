#pragma once
/// Knorm: keys of small norm stay. Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
/// (Devoto et al.). Differs: nothing; the policy protects sinks and recent slots.

#include <algorithm>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/simd/key_lanes.h"

namespace kvkeep {

class Knorm final : public Scorer {
 public:
  static constexpr ScorerTraits traits{
      .name = "knorm",
      .what = "keys of small norm",
      .source = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"};

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true}; }
  [[nodiscard]] bool averages_heads() const override { return false; }

  /// g[t] = -|k_t| (no rotation changes it), fp32. Throws InvalidArgument for keys that are not f32, f16 or bf16.
  /// Cost: one pass over the keys. Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;
};

inline Scores Knorm::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("knorm", evidence.table.device);
  const RowTable& table = evidence.table;
  with_dtype("knorm", table.key_dtype, [](auto) {});
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  each_due_row(table, limits, [&](std::size_t, const Row& row) {
    float* g = out + row.first;
    cpu::key_norms({row.keys, table.key_dtype, evidence.spec.key_dim}, 0, row.length, g);
    std::transform(g, g + row.length, g, [](float norm) { return -norm; });
  });
  return scores;
}

}  // namespace kvkeep
