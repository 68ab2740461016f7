#pragma once
/// One prompt on its way through the layers.

#include <cstdint>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"

namespace kvkeep {

/// What a policy does to one prompt while it runs. Holds the data compared between layers, and is destroyed when the
/// prompt ends.
class PromptPass {
 public:
  virtual ~PromptPass() = default;

  /// Newest queries that decide() reads in this layer, which `present` tokens have reached. 0: decide() is not called
  /// there, every token continues and every slot stays.
  [[nodiscard]] virtual std::int32_t wants(std::int32_t layer, std::int32_t present) const = 0;

  /// Decides for one layer: `keep` are the slots of its rows that stay, `narrow` the tokens that continue; absent: all.
  /// Called in ascending order for every layer that wants() names. evidence: the rows of one layer and sequence, with a
  /// slot for each token present, in order, and at least the newest wants() queries. Throws: InvalidArgument if the
  /// evidence lacks that; StateError for a layer that is not wanted.
  [[nodiscard]] virtual Decision decide(const Evidence& evidence) = 0;
};

}  // namespace kvkeep
