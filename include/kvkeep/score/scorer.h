#pragma once
/// Scorers rank the slots of a row. A scorer is a header, its device functions, a test case and a line in the registry.

#include <string_view>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/window.h"

namespace kvkeep {

/// A pure function of what was seen.
class Scorer {
 public:
  virtual ~Scorer() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;

  /// What it reads.
  [[nodiscard]] virtual Needs needs() const { return {}; }

  /// Reductions it takes from the window attention that the policy computes anyway, so that the keys are read once.
  [[nodiscard]] virtual WindowNeeds shares() const { return {}; }

  /// Newest slots that the method itself never drops (TOVA: 1).
  [[nodiscard]] virtual std::int32_t keeps_newest() const { return 0; }

  /// Scores of every slot of every row. `seen` holds at least the reductions of `shares()`; those are the scorer's own and may become its result.
  [[nodiscard]] virtual Scores score(const Evidence& evidence, WindowAttention& seen) const = 0;
};

}  // namespace kvkeep
