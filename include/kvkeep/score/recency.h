#pragma once
/// Recency: newer stays. With protected sinks it is StreamingLLM.
/// Source: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.). Differs: kept keys keep their
/// rotation; keep/rerotate.h rotates them to the paper's positions inside the cache.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

class Recency final : public Scorer {
 public:
  static constexpr ScorerTraits traits{
      .name = "streaming",
      .what = "the oldest `sink` slots and the newest",
      .source = "Xiao et al., Efficient Streaming Language Models with Attention Sinks",
      .composes = false};

  [[nodiscard]] std::string_view name() const override { return "recency"; }

  /// g[t] = t. Exact up to 2^24 slots. Cost: O(slots).
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;
};

}  // namespace kvkeep
