// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Prompts that narrow while they run: in every layer a policy may drop slots, and tokens that then go no further.

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/evidence.h"

namespace kvkeep {

/// What one layer did to one prompt.
struct Narrowing {
  SequenceId sequence = 0;
  std::optional<std::vector<std::int32_t>> tokens =
      {};                ///< places, among the tokens present, of those that continue, ascending; absent: all continue
  bool restart = false;  ///< they do not continue here: the sequence leaves this step with an empty cache, and from the
                         ///< next step its prompt is these tokens alone, at positions from 0
  std::int64_t slots_dropped = 0;  ///< of this layer's rows
  std::int64_t bytes_moved = 0;
};

/// What one layer did to the prompts of a step.
struct LayerReport {
  std::vector<Narrowing> prompts;  ///< one per sequence of the step that changed
  std::vector<PageMove> pages;     ///< paged caches: the pages that an ended prompt now holds, as its row of the block
                                   ///< table says, and those it gave back
};

namespace parts {

/// Of keepers whose policy narrows prompts: keeper.part<parts::Prompts>().
class Prompts final : public Part {
 public:
  using Part::Part;

  /// Call it in every layer, once attention has run over the keys and values of all tokens present, with the arguments
  /// of observe(). Sequences that are not in the first pass of a prompt are left alone, so steps may mix them. Decides
  /// for each prompt separately, cuts this layer's rows, and says which tokens continue. Give the later layers (and
  /// observe()) only these tokens, at their own positions. Output projection and MLP of the others need not run any
  /// more. `view`: lengths per row, as they will be after the step. Writes the lengths of this layer if slots were
  /// dropped, those of later layers if tokens were, and, at the end of a paged prompt, its row of the block table. A
  /// prompt must come whole, in one step. If tokens of the sequence were cached before (join), it runs as under a
  /// policy that does not narrow. Throws, before anything is written: StateError for layers out of order or lengths
  /// that differ from what was observed; InvalidArgument for missing queries or one length per sequence; as the policy
  /// does. On a device it waits in a layer that may select, once for all prompts, and throws StateError while the
  /// stream is being captured. Cost: the policy's, plus moving the slots that stay.
  LayerReport narrow(const Observation& observation, CacheView view);

  /// What happened to the newest prompt of a sequence; null before the first tokens, and for one that did not narrow.
  /// Valid until the sequence leaves.
  [[nodiscard]] const PromptReport* report_of(SequenceId sequence) const;

  void fork(SequenceId child, SequenceId parent) override {
    if (const PromptReport* const report = report_of(parent)) prompts_[child].report = *report;
  }
  void leave(SequenceId sequence) noexcept override { prompts_.remove(sequence); }
  void reserve_tokens(SequenceId id, const SequenceState& s, std::span<const std::int32_t> positions) override;
  void append(SequenceId id, SequenceState& s) noexcept override;
  void check_step(SequenceId id, const SequenceState& s) const override;
#if KVKEEP_FILES
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  struct Prompt {
    std::unique_ptr<PromptPass> pass = nullptr;  ///< while it runs
    PromptReport report = {};
    std::optional<Passing> begins = {};  ///< its tokens have yet to be recorded
  };
  struct LayerPlan;
  [[nodiscard]] LayerPlan plan_layer(SequenceId id, SequenceState& s, const Observation& o, std::size_t i,
                                     const CacheView& view);
  void decide_layer(std::span<LayerPlan> plans, const Observation& o, const CacheView& view);
  void continue_with(const LayerPlan& plan, const CacheView& view, Narrowing& report);
  void restart_prompt(const LayerPlan& plan, const CacheView& view, LayerReport& report);

  PerSequence<Prompt> prompts_;
};

}  // namespace parts
}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/parts/prompts-inl.h"
#endif
