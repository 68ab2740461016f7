#pragma once
/// The one interface behind which every method sits.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/accelerator.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/observe/trigger.h"
#include "kvkeep/policy/prompt_pass.h"

namespace kvkeep {

/// What an engine can give to a policy beside keys and values.
struct Provided {
  bool queries = true;  ///< observe() brings queries
  bool layer_by_layer =
      false;  ///< prompts run through one layer after the other, and Keeper::narrow() is called behind each
  std::vector<Tensor> output_projections = {};  ///< [num_layers] W_o, f32, f16 or bf16 [hidden, Hq * Dv]; undefined for
                                                ///< layers that are not full; empty: not given
  bool surprisal = false;                       ///< Keeper::surprise() is called before step()
  bool reads_folded = false;                    ///< Keeper::view() is called behind each layer's attention
  std::shared_ptr<FarStore> far_store = nullptr;  ///< where factors of folded spans lie; may serve several keepers.
                                                  ///< Null: one of the keeper's own, as the policy says
  std::shared_ptr<Accelerator> accelerator =
      nullptr;  ///< of the device where cache and queries lie; null: the CPU. One of its own for each keeper
};

class KVPolicy;

/// Every reason why `policy` cannot run on this model with what the engine gives, one sentence each. Empty: it can. The
/// Keeper asks before anything runs.
[[nodiscard]] std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& spec,
                                                const Provided& provided);

/// Throws InvalidArgument with all of problems().
void check(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided);

/// Answers: who stays, and what becomes of the rest? State that belongs to slots (positions, credit) travels with the
/// rows, in the Keeper's columns, so a policy itself stays const while it decides and one policy serves any number of
/// sequences.
class KVPolicy {
 public:
  virtual ~KVPolicy() = default;

  /// Registry name, for example "ams-tova".
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// What the engine must give.
  [[nodiscard]] virtual Needs needs() const = 0;

  /// Why it cannot run on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const ModelSpec&) const { return {}; }

  /// When a sequence is due.
  [[nodiscard]] virtual Trigger trigger() const = 0;

  /// Decides for all rows of `evidence` together. Writes nothing. A row that is not over its budget keeps every slot.
  /// Throws: InvalidArgument when the evidence lacks what needs() names; Unsupported for a device or dtype without a
  /// kernel.
  [[nodiscard]] virtual Decision decide(const Evidence& evidence) const = 0;

  /// True where it also acts while a prompt runs through the layers: the engine then calls Keeper::narrow().
  [[nodiscard]] virtual bool narrows() const { return false; }

  /// What it does to one prompt of `tokens` on its way; null where narrows() is false. `spec` outlives it.
  [[nodiscard]] virtual std::unique_ptr<PromptPass> begin_prompt(const ModelSpec& spec, std::int32_t tokens) const {
    static_cast<void>(spec), static_cast<void>(tokens);
    return nullptr;
  }

  /// How the spans are kept and read that its decisions fold; null where it drops what does not stay.
  [[nodiscard]] virtual const MemoryOptions* memory() const { return nullptr; }

  /// The resolved options, as the JSON object that the registry reads.
  [[nodiscard]] virtual std::string to_json() const = 0;
};

}  // namespace kvkeep
