#pragma once
/// Allocators spend a row's budget: given the scores, they decide which slots stay.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/window.h"

namespace kvkeep {

class Allocator {
 public:
  virtual ~Allocator() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// Number of window queries whose usage it reads; 0: none.
  [[nodiscard]] virtual std::int32_t window() const { return 0; }

  /// Gives rows different budgets: changes `budget` and `due` of `rows`, which start with the policy's budget. `least`,
  /// one per group: slots that each of its rows must be able to keep (sinks or a protected prompt, and the slots that
  /// the scorer never drops). Called before scoring.
  virtual void spread(const Evidence&, std::span<const std::int32_t> /*least*/, std::vector<RowLimit>& /*rows*/) const {
  }

  /// True if rows of one sequence may end up with different lengths.
  [[nodiscard]] virtual bool ragged() const { return false; }

  /// What it reads besides scores and window attention.
  [[nodiscard]] virtual Needs needs() const { return {}; }

  /// Fills `decision.keep` and, if it has them, credit and allotment. Slots rank by `scores`. `seen` has usage if
  /// window() is not 0; mass may take its place. A row that is not due keeps every slot and its old credit. Rows run in
  /// parallel; no row reads another (layer, sequence).
  virtual void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
                     Decision& decision) const = 0;
};

/// Every slot of every row.
[[nodiscard]] KeepSet keep_everything(const RowTable& table);

/// Offsets and room for each row's kept slots: min(length, budget) for a due row, all slots for any other. Slots are
/// not written yet.
[[nodiscard]] KeepSet empty_keep_set(const RowTable& table, const Limits& limits);

/// Top-k over the row with protected slots: AMS with a single segment.
class Flat final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "flat"; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;
};

}  // namespace kvkeep
