// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The interface that every method implements.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/observe/trigger.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/score/evidence.h"

namespace kvkeep {

// One prompt on its way through the layers.

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

/// Such a decision fits the rows of its layer, and tokens that continue are there, ascending. `who` decided. Throws
/// InvalidArgument. Cost: O(kept slots and tokens).
void check_layer(std::string_view who, const RowTable& table, const LayerDecision& layer);

/// Told when a stage of an event begins and ends, on the thread that calls the keeper: for NVTX ranges, spans of
/// OpenTelemetry, or a log. Stages nest; names are "kvkeep.plan", "kvkeep.apply" and "kvkeep.finish", and live as long
/// as the program. Must not throw, nor call the keeper. On a device they are the host's time.
struct TraceHook {
  void (*begin)(void* context, const char* stage) = nullptr;
  void (*end)(void* context, const char* stage) = nullptr;
  void* context = nullptr;  ///< their first argument
};

/// What an engine can supply to a policy besides keys and values.
struct Provided {
  bool queries = true;          ///< observe() passes queries
  bool layer_by_layer = false;  ///< prompts run layer by layer, and parts::Prompts::narrow() is called after each layer
  std::vector<Tensor> output_projections = {};  ///< [num_layers] W_o, f32, f16 or bf16 [hidden, Hq * Dv]; undefined for
                                                ///< layers that are not full; empty: not supplied
  bool surprisal = false;                       ///< parts::Surprisal::supply() is called before step()
  bool given_scores = false;                    ///< parts::Given::give() is called in every full layer, before step()
  bool reads_folded = false;                    ///< parts::Folds::view() is called after each layer's attention
  std::shared_ptr<Machine> accelerator =
      nullptr;           ///< of the device of cache and queries; null: the CPU. Each keeper needs its own
  Threads threads = {};  ///< what its loops on the CPU run on; none: the calling thread, or UsingThreads around a call
  TraceHook trace = {};  ///< told of the stages of events

  /// The accelerator, or the host.
  [[nodiscard]] Machine& machine() const { return accelerator == nullptr ? host() : *accelerator; }
};

class KVPolicy;
class Part;
struct MemoryOptions;
struct PartContext;
/// Makes one part of a keeper.
using MakePart = std::unique_ptr<Part> (*)(const PartContext&);

/// Every reason why `policy` cannot run on this model with what the engine supplies, one sentence each. Empty: it can.
/// The Keeper checks this before anything runs.
[[nodiscard]] std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& spec,
                                                const Provided& provided);

/// Throws InvalidArgument with all of problems().
void check(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided);

/// Throws InvalidArgument if the policy reads keys or values of a full layer that no event on the host could read: of a
/// dtype without code, i8 without scales, scales that are not f32. What a device cannot read, or one of several ranks,
/// its events say: to all ranks.
void check_readable(const KVPolicy& policy, const ModelSpec& spec, const Machine& machine,
                    std::span<const LayerKv> layers);

/// Decides which slots stay, and what happens to the rest. State that belongs to slots (positions, credit) travels with
/// the rows, in the Keeper's columns. So a policy stays const while it decides, and one policy serves any number of
/// sequences.
class KVPolicy {
 public:
  virtual ~KVPolicy() = default;

  /// Registry name, for example "ams-tova".
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// What the engine must supply.
  [[nodiscard]] virtual Needs needs() const = 0;

  /// Reasons why it cannot run on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const ModelSpec&) const { return {}; }

  /// When a sequence is due.
  [[nodiscard]] virtual Trigger trigger() const = 0;

  /// Reasons why its events cannot run on this machine and model, one sentence each; empty: they can. Policies that do
  /// not say otherwise run on the host, where it holds all heads of the model. One that asks the machine
  /// (Machine::problems()) leaves everything that heads must know of each other to the stages of the machine's events.
  [[nodiscard]] virtual std::vector<std::string> problems_on(const Machine& machine, const ModelSpec& spec) const;

  /// Decides for all rows of `evidence` together. Writes nothing. A row that is not over its budget keeps every slot,
  /// unless trigger().thins.
  /// Throws: InvalidArgument if the evidence lacks what needs() names; Unsupported for a device or dtype without a
  /// kernel.
  [[nodiscard]] virtual Decision decide(Machine& machine, const Evidence& evidence) const = 0;
  /// The same on the host.
  [[nodiscard]] Decision decide(const Evidence& evidence) const { return decide(host(), evidence); }
  /// Decisions have been through check_keep() and check_decision() (policy/evict.h), so that a keeper need not look at
  /// them again.
  [[nodiscard]] virtual bool checks_kept() const { return false; }

  /// The most slots that each row keeps where decide() would run, before anything is scored: `exact` if it keeps no
  /// fewer. Reads shapes, lengths and pins of `shapes`, and neither cache nor positions (RowGroup::prompt_slots is not
  /// -1). Policies that do not say otherwise may keep every slot.
  struct MostKept {
    std::vector<std::int32_t> slots;  ///< [rows]
    bool exact = false;
  };
  [[nodiscard]] virtual MostKept most_kept(const Evidence& shapes) const;

  /// Throws if slots at these positions (ascending, disjoint, some perhaps still to come) cannot stay through its
  /// events: InvalidArgument if they do not fit into its budget, as far as that is known before an event, Unsupported
  /// under policies that do not say otherwise. Decisions find the spans in RowGroup::pinned.
  virtual void check_pins(std::span<const PositionSpan>) const {
    refuse<Unsupported>("pin: ", name(), " has no protected slots; allowed full, sekv and evicting policies");
  }

  /// Which rows of a sequence hold the same tokens, whatever the event.
  [[nodiscard]] virtual Sharing sharing() const { return Sharing::per_layer_per_head; }

  /// True if it also acts while a prompt runs through the layers: the engine then calls parts::Prompts::narrow().
  [[nodiscard]] virtual bool narrows() const { return false; }

  /// What it remembers of one prompt of `tokens` tokens while that runs on this machine; null if narrows() is false.
  /// `spec` and `machine` must outlive the result.
  [[nodiscard]] virtual std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                                 std::int32_t tokens) const {
    static_cast<void>(machine), static_cast<void>(spec), static_cast<void>(tokens);
    return nullptr;
  }

  /// Decides for prompts in one layer: passes[g], from begin_prompt() on this machine, is that of group g. Called in
  /// ascending order for every layer that its wants() names. evidence: the rows of one layer, with a slot for each
  /// token present, in order, and at least the newest wants() queries, whose positions are on the host. A prompt's
  /// result does not depend on the others. Throws: InvalidArgument if the evidence lacks that; StateError for a layer
  /// that a pass does not want; Unsupported if narrows() is false.
  [[nodiscard]] virtual LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                                   std::span<PromptPass* const> passes) const;
  /// The same for one prompt on the host, with the slots that stay in the same decision.
  [[nodiscard]] Decision decide(PromptPass& pass, const Evidence& evidence) const;

  /// Parts of its own that a keeper of it has (parts/part.h), besides those that follow from needs(). What they add to
  /// the evidence it finds in RowGroup::parts.
  [[nodiscard]] virtual std::vector<MakePart> parts() const { return {}; }

  /// How the spans that it folds are kept and read; null if it drops all slots that do not stay.
  [[nodiscard]] virtual const MemoryOptions* memory() const { return nullptr; }

  /// The resolved options, as a JSON object that the registry reads.
  [[nodiscard]] virtual std::string to_json() const = 0;
};

inline KVPolicy::MostKept KVPolicy::most_kept(const Evidence& shapes) const {
  MostKept most;
  for (const Row& row : shapes.table.rows) most.slots.push_back(row.length);
  return most;
}

/// The pass of a prompt of `tokens` tokens under a policy that narrows. Throws InvalidArgument if it makes none.
[[nodiscard]] std::unique_ptr<PromptPass> begun_prompt(const char* operation, const KVPolicy& policy, Machine& machine,
                                                       const ModelSpec& spec, std::int32_t tokens);

/// Newest queries that its pass wants in a layer. Throws InvalidArgument for fewer than 0, or more than `present`.
[[nodiscard]] std::int32_t wanted_queries(const char* operation, const KVPolicy& policy, const PromptPass& pass,
                                          std::int32_t layer, std::int32_t present);

/// Keeps everything: the baseline of every comparison, bit for bit the engine without kvkeep.
class Full final : public KVPolicy {
 public:
  [[nodiscard]] std::string_view name() const override { return "full"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {}, .never = true}; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  void check_pins(std::span<const PositionSpan>) const override {}
  [[nodiscard]] std::string to_json() const override { return R"({"policy": "full"})"; }
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/host-inl.h"
#endif
