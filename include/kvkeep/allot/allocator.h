#pragma once
/// Allocators spend a row's budget: given scores they say which slots stay.

#include <string_view>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/window.h"

namespace kvkeep {

/// What every evicting policy shares.
struct Retention {
  Variant variant = Variant::strict;
  std::int32_t budget = 0;        ///< slots a row keeps, at least sink + 1
  std::int32_t sink = 4;          ///< oldest slots that always stay
  std::int32_t recent = 32;       ///< newest slots that always stay, as far as the budget allows
  bool newest_ranks_first = false;///< official: the scorer's own padding puts the newest slot first in its segment
};

class Allocator {
 public:
  virtual ~Allocator() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// Window queries whose usage it reads; 0: none.
  [[nodiscard]] virtual std::int32_t window() const { return 0; }

  /// Fills `decision.keep` and, where it has them, credit and allotment. `decision.scores` is set. A row of at most `budget` slots keeps everything
  /// and its credit as it was. Rows run in parallel; no row reads another's data, except the published `max_global` fill inside one (layer, sequence). `seen.usage` is the allocator's own and may become
  /// its mass.
  virtual void allot(const Evidence& evidence, const Retention& retention, WindowAttention& seen, Decision& decision) const = 0;
};

/// Every slot of every row.
[[nodiscard]] KeepSet keep_everything(const RowTable& table);

/// Where each row's kept slots lie: min(length, budget) a row. Slots are not yet written.
[[nodiscard]] KeepSet empty_keep_set(const RowTable& table, std::int32_t budget);

/// Top-k over the row with protected slots: AMS with a single segment.
class Flat final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "flat"; }
  void allot(const Evidence& evidence, const Retention& retention, WindowAttention& seen, Decision& decision) const override;
};

}  // namespace kvkeep
