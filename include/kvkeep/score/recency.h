#pragma once
/// Recency: newer stays. With protected sinks it is StreamingLLM.
/// Source: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.). Differs: kept keys keep their rotation (see keep/rerotate.h for the
/// paper's re-indexed positions).

#include "kvkeep/score/scorer.h"

namespace kvkeep {

class Recency final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const override { return "recency"; }

  /// g[t] = t. Exact up to 2^24 slots. Cost: O(slots).
  [[nodiscard]] Scores score(const Evidence& evidence, const WindowAttention& seen) const override;
};

}  // namespace kvkeep
