// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What runs the line from evidence to moved rows: the CPU (host()), or a GPU (kvkeep::cuda::accelerator()). Policies
/// and the Keeper are written once over it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/keep/pages.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

class FoldedMemory;
class KVPolicy;
struct MemoryOptions;

/// How the slots that a row drops are cut into spans: one for each segment of the row, or one for all of them. Short
/// ones join the next, long ones are cut into equal pieces.
struct SpanCut {
  std::int32_t min_span = 8;   ///< slots
  std::int32_t max_span = 64;  ///< slots
  bool by_mass = false;        ///< attention mass weights a slot, if the allocator computes it
};

/// Tokens of prompts that continue, which on a device the host does not know yet: from Event::rank() or choose(), until
/// the next event begins.
struct ChosenTokens {
  /// Of each prompt, ascending, among its tokens present; absent: all continue.
  using Places = std::vector<std::optional<std::vector<std::int32_t>>>;

  /// `memory`: of the machine. On a device it waits, once, if a layer that was ranked may select, or tokens were
  /// chosen.
  [[nodiscard]] Places read(MachineMemory& memory) &&;

  /// On a device: a prompt whose tokens it has.
  struct List {
    std::size_t prompt;
    PromptRanks* ranks;   ///< null: none, the list is there
    std::int64_t tokens;  ///< where the list begins, in bytes
    std::int32_t count;
    bool always;  ///< the list is there even if the layer does not select
  };
  Places places;  ///< on a device absent until they are read
  std::vector<List> lists = {};
  const std::byte* there = nullptr;  ///< the LayerSelection of every list if they are ranked, then the lists
  std::int64_t bytes = 0;            ///< of all that
};

/// One event on a machine, from Machine::begin(). Results are in the machine's memory: valid until the next begin(), on
/// the host as long as anything refers to them. Order: attend, if the scorer or the allocator reads the window; score;
/// share, if rows share a selection; allot.
class Event {
 public:
  virtual ~Event() = default;

  /// Attention of the newest `window` queries of every row that is due. Throws as window_attention() does.
  [[nodiscard]] virtual WindowAttention attend(std::int32_t window, bool official, WindowNeeds needs) = 0;

  /// Throws as Scorer::score() does.
  [[nodiscard]] virtual Scores score(const Scorer& scorer, const WindowAttention& seen) = 0;

  /// Scores that are the same in rows that share one selection: the mean over the heads of a layer (`layer`), over
  /// layers (`per_head`), or the largest or the mean over both (`all`, `all_mean`). Throws Unsupported for sharing rows
  /// that differ in length, or of a layer of which only some are due.
  [[nodiscard]] virtual Scores share(const Scores& scores, Sharing share) = 0;

  /// Spends the budget: fills `keep` of the decision and, if the allocator has them, credit and allotment. Throws as
  /// Allocator::allot() does.
  virtual void allot(const Allocator& allocator, const Scores& scores, WindowAttention seen, Decision& decision) = 0;

  // Of prompts in one layer: each group of the evidence is one, with a slot for every token present. Order: scores;
  // rank or choose; allot, if slots are dropped. Only ChosenTokens::read() may wait.

  /// kvkeep::prompt_scores() of every prompt. On a device `sums` are there if the demand reads them (LayerDemand).
  /// Throws as that does.
  [[nodiscard]] virtual PromptScores prompt_scores(const PromptScoreOptions& options) = 0;

  /// Takes in the ranks of prompt g under `scores` where ranks[g] is not null, as LayerSelector::see() does. `list`:
  /// the tokens that would continue are chosen even if the layer does not select.
  [[nodiscard]] virtual ChosenTokens rank(const PromptScores& scores, std::span<PromptRanks* const> ranks,
                                          bool list) = 0;

  /// The `best` tokens of every prompt g with of[g], and its newest `window`. `scores`: one for each token before
  /// these, as By::last_query gives them without a window, and By::weighted with the window of its queries.
  [[nodiscard]] virtual ChosenTokens choose(const Tensor& scores, std::int32_t best, std::int32_t window,
                                            const std::vector<bool>& of) = 0;
};

/// The sets of rows of an event that share a selection. Throws as Event::share().
[[nodiscard]] SharedRows shared_rows(const Evidence& evidence, const Limits& limits, Sharing share);

/// What a policy's events ask of a machine.
struct Demand {
  std::string_view policy;
  const Needs& needs;
  const Scorer& scorer;
  const Allocator& allocator;
  Sharing share;
  std::optional<SpanCut> rest = {};       ///< if what does not stay folds
  const MemoryOptions* memory = nullptr;  ///< then: how spans are kept and read
};

/// What a policy asks of a machine in the layers of a prompt.
struct LayerDemand {
  std::string_view policy;
  const Allocator* cut = nullptr;  ///< chooses the slots that stay; null: all do
  bool masses = false;             ///< LayerSelectorOptions::reads_mass()

  /// PromptScores::sums are read: for masses, or by a cut in which they decide how many slots stay.
  [[nodiscard]] bool sums() const { return masses || (cut != nullptr && cut->ragged()); }
};

/// What a policy asks of a machine if it decides on the host itself, and what does not stay folds.
struct HostDemand {
  std::string_view policy;
  std::int32_t max_span = 0;              ///< slots of the longest span; 0: any
  const MemoryOptions* memory = nullptr;  ///< how spans are kept and read
};

using Ask = std::variant<Demand, LayerDemand, HostDemand>;

/// The heads of every layer that a machine holds: those of one rank, or all.
struct HeadShare {
  std::int32_t rank = 0;
  std::int32_t of = 0;  ///< ranks; 0: it holds all heads
};

/// Owned as what it is: shared_ptr remembers that, host() never ends.
class Machine {
 public:
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Where caches, queries and columns are.
  [[nodiscard]] MachineMemory& memory() const { return memory_; }
  [[nodiscard]] Device device() const { return memory_.device(); }
  [[nodiscard]] bool is_host() const { return memory_.is_host(); }

  /// The model as this machine sees it, if the engine's spec is of a part of its heads (across_ranks()).
  [[nodiscard]] ModelSpec part(ModelSpec spec) const {
    if (share_.of == 0) return spec;
    spec.first_head = share_.rank * spec.kv_heads;
    spec.model_heads = share_.of * spec.kv_heads;
    return spec;
  }

  /// A keeper takes it, for good: it holds the workspace of that keeper's events, and constants of its model and
  /// policy. Throws StateError if a keeper has taken it before. The host serves any number of keepers.
  void claim() {
    if (is_host()) return;
    KVKEEP_REQUIRE_AS(StateError, !claimed_, "Keeper: the accelerator on ", device().str(),
                      " serves another keeper, or served one before; allowed one accelerator per keeper");
    claimed_ = true;
  }

  /// Why it cannot run such events on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const Ask& ask, const ModelSpec& spec) const = 0;

#if KVKEEP_FOLDING
  /// The folded spans of a keeper, which the machine must outlive; `memory` too.
  [[nodiscard]] virtual std::unique_ptr<FoldedMemory> folded_memory(const ModelSpec& spec,
                                                                    const MemoryOptions& memory) = 0;
#endif

  /// Begins an event of a policy, or a layer of prompts, whose `limits` are of the rows that Event::allot() cuts. Rows,
  /// columns and queries of the evidence are in its memory, page numbers on the host, and positions of queries, too, in
  /// a layer of prompts; evidence, limits and the demand's allocator must outlive the event. Throws, before anything is
  /// launched: Unsupported for what problems() names, and for memory or a dtype that it cannot read; StateError while
  /// capturing, for an allocator whose scores decide how many slots stay, and for layers of prompts, which may wait.
  [[nodiscard]] virtual std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits,
                                                     const Ask& ask) = 0;

  /// Bytes that policy.decide() needs here for this evidence besides cache, columns, rings and tables; 0 on the host.
  /// Launches nothing. `take`: memory for them is there afterwards. Throws as decide() does, and StateError if
  /// use_workspace() gave less.
  virtual std::int64_t workspace(const KVPolicy& policy, const Evidence& evidence, bool take) = 0;

  /// Moves K, V, their scales and the columns of every row as the decision says.
  /// `columns`: [rows]. Throws InvalidArgument as compact() does; on a device StateError for a decision that is not the
  /// newest, and after use_workspace(), unless the host decided it (EventTables::rows is null): that one is sent along,
  /// which is refused while capturing. All before the first byte moves.
  virtual void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
                    std::span<const ColumnTarget> columns) = 0;

  /// Slots that each row of the decision moved last keeps, where the scores said how many (EventTables::counts). Waits
  /// until the device has chosen them, not until the rows have moved. Throws StateError on the host, which knows.
  virtual void read_counts(std::span<std::int32_t> counts) = 0;

  /// Uses `memory` as that workspace: contiguous u8 [bytes] on the device, at an address that is a multiple of 256. The
  /// machine keeps it alive. Without this call it takes memory of the device's own allocator, and none for events no
  /// larger than an earlier one. Throws Unsupported on the host.
  virtual void use_workspace(Tensor memory) = 0;

 protected:
  /// `memory` must outlive it; it need not be alive yet.
  explicit Machine(MachineMemory& memory, HeadShare share = {}) : memory_(memory), share_(share) {}
  ~Machine() = default;

 private:
  MachineMemory& memory_;
  const HeadShare share_;
  bool claimed_ = false;
};

#if KVKEEP_FOLDING
/// Fills `fold` of a decision that has `keep`: every slot of these rows that does not stay is in one span. On a device
/// slots are not listed (Fold::listed).
void fold_rest(const Machine& machine, const RowTable& table, const SpanCut& cut, Decision& decision);
#endif

/// The CPU. Thread safe.
[[nodiscard]] Machine& host();

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/policy.h"  // and, after it, the bodies of this file
#endif
