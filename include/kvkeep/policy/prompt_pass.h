#pragma once
/// One prompt on its way through the layers.

#include <cstdint>
#include <optional>
#include <vector>

#include "kvkeep/core/decision.h"

namespace kvkeep {

/// What a policy remembers of one prompt while it runs: the data compared between layers. Destroyed when the prompt
/// ends.
class PromptPass {
 public:
  virtual ~PromptPass() = default;

  /// Newest queries that decide this layer, which `present` tokens have reached. 0: the layer does not decide, every
  /// token continues and every slot stays.
  [[nodiscard]] virtual std::int32_t wants(std::int32_t layer, std::int32_t present) const = 0;
};

/// What happened to a prompt in the layers, under a policy that narrows.
struct PromptReport {
  std::int32_t tokens = 0;                ///< of the whole prompt
  std::int32_t selection_layer = -1;      ///< the layer that selected; -1: none
  std::vector<double> relative_variance;  ///< [num_layers] NaN if not computed
  std::vector<std::int32_t> entered;  ///< [num_layers] tokens that reached the layer; 0: none in this pass, or not yet
  std::vector<std::int32_t>
      going_on;  ///< places in the prompt of the tokens that reached the end, or that form the second pass, ascending
  bool second_pass = false;  ///< they run again as a new prompt
};

/// What a policy decided for the prompts of one layer.
struct LayerDecision {
  struct Prompt {
    Reason reason = Reason::nothing_due;
    std::optional<TokenSet> narrow = {};           ///< tokens that continue, on the host; absent: all
    std::optional<double> relative_variance = {};  ///< as in Decision
    bool cut = false;                              ///< `rows` says which slots of its rows stay; else all do
  };
  std::vector<Prompt> prompts;  ///< one per group of the evidence
  Decision rows;                ///< slots that stay, of all rows together, and the scores that ranked them
};

}  // namespace kvkeep
