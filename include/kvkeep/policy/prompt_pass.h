#pragma once
/// One prompt on its way through the layers.

#include <cstdint>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"

namespace kvkeep {

/// What a policy does to one prompt while it runs. Holds what is compared between layers, and is gone when the prompt
/// has ended.
class PromptPass {
 public:
  virtual ~PromptPass() = default;

  /// Newest queries that decide() reads in this layer, which `present` tokens have reached; 0: it is not asked there,
  /// every token goes on and every slot stays.
  [[nodiscard]] virtual std::int32_t wants(std::int32_t layer, std::int32_t present) const = 0;

  /// Decides for one layer: `keep` are the slots of its rows that stay, `narrow` the tokens that go on; absent: all.
  /// Layers ascend, none that wants() names is left out. evidence: the rows of one layer and sequence, a slot for each
  /// token present, in their order; at least the newest wants() queries. Throws: InvalidArgument when the evidence
  /// lacks that; StateError for a layer that is not wanted.
  [[nodiscard]] virtual Decision decide(const Evidence& evidence) = 0;
};

}  // namespace kvkeep
