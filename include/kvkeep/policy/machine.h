#pragma once
/// What runs the line from evidence to moved rows: the CPU (host()), or a GPU (kvkeep::cuda::accelerator()). Policies
/// and the Keeper are written once over it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/columns.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/keep/pages.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

class KVPolicy;

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

  /// Scores that are the same in rows that share one selection: the mean over layers (`per_head`), or the largest or
  /// the mean over layers and heads (`all`, `all_mean`). Throws Unsupported for sharing rows that differ in length.
  [[nodiscard]] virtual Scores share(const Scores& scores, Sharing share) = 0;

  /// Spends the budget: fills `keep` of the decision and, if the allocator has them, credit and allotment. Throws as
  /// Allocator::allot() does.
  virtual void allot(const Allocator& allocator, const Scores& scores, WindowAttention seen, Decision& decision) = 0;
};

/// The sets of rows of an event that share a selection. Throws Unsupported if rows of one that is due differ in length.
[[nodiscard]] SharedRows shared_rows(const Evidence& evidence, const Limits& limits, Sharing share);

/// What a policy's events ask of a machine.
struct Demand {
  std::string_view policy;
  const Needs& needs;
  const Scorer& scorer;
  const Allocator& allocator;
  Sharing share;
};

class Machine {
 public:
  virtual ~Machine() = default;

  /// Where caches, queries and columns are.
  [[nodiscard]] virtual MachineMemory& memory() const = 0;
  [[nodiscard]] Device device() const { return memory().device(); }
  [[nodiscard]] bool is_host() const { return memory().is_host(); }

  /// A keeper takes it, for good: it holds the workspace of that keeper's events, and constants of its model and
  /// policy. Throws StateError if a keeper has taken it before. The host serves any number of keepers.
  virtual void claim() {
    KVKEEP_REQUIRE_AS(StateError, !claimed_, "Keeper: the accelerator on ", device().str(),
                      " serves another keeper, or served one before; allowed one accelerator per keeper");
    claimed_ = true;
  }

  /// Why it cannot run such events on this model, one sentence each; empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const Demand& demand, const ModelSpec& spec) const = 0;

  /// Columns of one sequence with `rows` rows, in its memory, which must outlive them.
  [[nodiscard]] virtual std::unique_ptr<Columns> columns(std::int32_t rows) = 0;

  /// Begins an event of a policy. Rows, columns and queries of the evidence are in its memory, page
  /// numbers on the host; evidence, limits and the demand's allocator must outlive the event. Throws, before anything
  /// is launched: Unsupported for what problems() names, and for memory or a dtype that it cannot read; StateError
  /// while capturing, for an allocator whose scores decide how many slots stay.
  [[nodiscard]] virtual std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits,
                                                     const Demand& demand) = 0;

  /// policy.decide() on this machine. Throws as that does, and StateError for an event that needs more workspace than
  /// use_workspace() gave, before anything is launched.
  [[nodiscard]] virtual Decision decide(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Moves K, V, their scales and, where they are not on the host, the columns of every row as the decision says.
  /// `columns`: [rows]. Throws InvalidArgument as compact() does; on a device StateError for a decision that is not the
  /// newest, and after use_workspace(); all before the first byte moves.
  virtual void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
                    std::span<const ColumnTarget> columns) = 0;

  /// Slots that each row of the decision moved last keeps, where the scores said how many (EventTables::counts). Waits
  /// until the device has chosen them, not until the rows have moved. Throws StateError on the host, which knows.
  virtual void read_counts(std::span<std::int32_t> counts) = 0;

  /// Bytes that decide() needs for this evidence besides cache, columns, rings and tables; 0 on the host. Launches
  /// nothing.
  [[nodiscard]] virtual std::int64_t workspace_bytes(const KVPolicy& policy, const Evidence& evidence) = 0;

  /// Uses `memory` as that workspace: contiguous u8 [bytes] on the device, at an address that is a multiple of 256. The
  /// machine keeps it alive. Without this call it takes memory from LibTorch's allocator, and none for events no larger
  /// than an earlier one. Throws Unsupported on the host.
  virtual void use_workspace(Tensor memory) = 0;

 private:
  bool claimed_ = false;
};

/// The CPU. Thread safe.
[[nodiscard]] Machine& host();

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/policy.h"  // and, after it, the bodies of this file
#endif
