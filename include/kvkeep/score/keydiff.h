#pragma once
/// KeyDiff: keys that point away from the mean direction stay. Source: "KeyDiff: Key Similarity-Based KV Cache Eviction
/// for Long-Context LLM Inference in Resource-Constrained Environments" (Park et al.). Differs: the whole row at each
/// event instead of block by block; protects nothing by itself.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

class KeyDiff final : public Scorer {
 public:
  static constexpr ScorerTraits traits{.name = "keydiff",
                                       .what = "keys that point away from the mean direction",
                                       .source = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction"};

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true}; }

  /// g[t] = -cos(k_t, a), where a is the mean over all slots of k / max(|k|, 1e-12) and norms are at least 1e-8: 0 for
  /// a key of zeros, and for every slot if a is 0. Dot products in fp32, the mean in f64 over fp32 blocks. A key that
  /// is not finite makes its whole row NaN, which ranks by age. Throws InvalidArgument for keys that are not f32, f16
  /// or bf16. Cost: two passes over the keys of a row, the second backwards, so that it starts with the keys that are
  /// still in the CPU's caches. Workspace: workspace_bytes() per thread.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  /// Bytes for the mean, its fp32 copy and the weights of one block of keys.
  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t dim);
};

}  // namespace kvkeep
