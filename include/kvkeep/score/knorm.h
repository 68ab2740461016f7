#pragma once
/// Knorm: keys of small norm stay. Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
/// (Devoto et al.). Differs: nothing; the policy protects sinks and recent slots.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

class Knorm final : public Scorer {
 public:
  static constexpr ScorerTraits traits{
      .name = "knorm",
      .what = "keys of small norm",
      .source = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"};

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true}; }

  /// g[t] = -|k_t| (no rotation changes it), fp32. Throws InvalidArgument for keys that are not f32, f16 or bf16.
  /// Cost: one pass over the keys. Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;
};

}  // namespace kvkeep
