#pragma once
/// Allocators spend a row's budget: given scores they say which slots stay.

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

  /// Window queries whose usage it reads; 0: none.
  [[nodiscard]] virtual std::int32_t window() const { return 0; }

  /// Other budgets than the same for every row: changes `budget` and `due` of `rows`, which hold the policy's budget.
  /// `least`, one a group: slots that each of its rows must be able to keep (sinks or a protected prompt, and what the
  /// scorer never drops). Called before anything is scored.
  virtual void spread(const Evidence&, std::span<const std::int32_t> /*least*/, std::vector<RowLimit>& /*rows*/) const {
  }

  /// True where rows of one sequence may end up unequal.
  [[nodiscard]] virtual bool ragged() const { return false; }

  /// What it reads beside scores and window attention.
  [[nodiscard]] virtual Needs needs() const { return {}; }

  /// Fills `decision.keep` and, where it has them, credit and allotment. `decision.scores` is set and may be changed
  /// for ranking's sake. A row that is not due keeps everything and its credit as it was. Rows run in parallel; no row
  /// reads another (layer, sequence). `seen.usage` is the allocator's own and may become its mass.
  virtual void allot(const Evidence& evidence, const Limits& limits, WindowAttention& seen,
                     Decision& decision) const = 0;
};

/// Every slot of every row.
[[nodiscard]] KeepSet keep_everything(const RowTable& table);

/// Where each row's kept slots lie: `budget` of a due row, all of another. Slots are not yet written.
[[nodiscard]] KeepSet empty_keep_set(const RowTable& table, const Limits& limits);

/// Top-k over the row with protected slots: AMS with a single segment.
class Flat final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "flat"; }
  void allot(const Evidence& evidence, const Limits& limits, WindowAttention& seen, Decision& decision) const override;
};

}  // namespace kvkeep
