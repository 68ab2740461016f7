#pragma once
/// Columns: the numbers that move with every slot through compaction: its logical position, EMA credit, tally of
/// scores, and the score that the engine gave it.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/slot.h"

namespace kvkeep {

/// Where an event writes the columns of one row on a device; null: not there. [length of the row]
struct ColumnTarget {
  std::int32_t* positions = nullptr;
  float* credit = nullptr;
  float* tally = nullptr;
  float* given = nullptr;  ///< in place, as the positions
};

/// The columns of one row, on the host. Credit, tally and given scores are those of its oldest slots.
struct RowColumns {
  std::vector<std::int32_t> positions;
  std::vector<float> credit;
  std::vector<float> tally;
  std::vector<float> given;
};

/// The columns of one sequence, for all its rows (full layers x KV heads). Rows are as long as those of the cache;
/// positions ascend in each.
class Columns {
 public:
  virtual ~Columns() = default;

  /// Makes room for `slots` more in every row, so that appending as many cannot fail. Changes nothing visible.
  virtual void reserve(std::int32_t slots) = 0;
  /// Adds new slots at the end of every row. Credit and tally of new slots are 0; they have no given score. Does not
  /// throw after reserve().
  virtual void append(std::span<const std::int32_t> positions) = 0;

  /// Makes room for given scores of `slots` more slots of a row. Changes nothing visible.
  virtual void reserve_given(std::int32_t row, std::int32_t slots) = 0;
  /// From now on the oldest `slots` slots of a row that had no given score have one. Returns where to write them. Does
  /// not throw after reserve_given(). Requires: the row has as many such slots.
  virtual float* give(std::int32_t row, std::int32_t slots) = 0;
  /// Oldest slots of a row that have a given score.
  [[nodiscard]] virtual std::int32_t given(std::int32_t row) const = 0;

  /// Makes room for one row's `slots` kept slots. Returns where Machine::move() writes them; nothing on the host, where
  /// settle() does. Changes nothing visible.
  virtual ColumnTarget reserve_settled(std::int32_t row, std::int64_t slots, bool credit, bool tally) = 0;
  /// Keeps the slots of row `r` of `keep` in one row; `credit` and `tally` (or null) hold the new value of every slot
  /// before compaction. Does not throw after reserve_settled().
  virtual void settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit,
                      const float* tally) = 0;

  /// The slots at `places`, ascending, of every row from `first` on stay; `positions` are theirs. Requires: these rows
  /// hold the same slots, and no event has cut them.
  virtual void narrow(std::int32_t first, std::span<const std::int32_t> places,
                      std::span<const std::int32_t> positions) = 0;
  /// Before Machine::move() of some rows only: on a device, positions in newest() are written to every row, and
  /// newest() is empty. Requires: every row holds the same slots, or newest() is empty.
  virtual void bring_newest() = 0;

  /// Call it once all rows are settled. Releases memory of a row that holds more than twice what its slots and `room`
  /// more need.
  virtual void finish_event(std::int32_t room) noexcept = 0;

  /// Drops the newest `slots` of every row. They must have been appended after the last event.
  virtual void truncate(std::int32_t slots) = 0;

  [[nodiscard]] virtual std::int32_t length(std::int32_t row) const = 0;
  /// Positions of the newest slots, which every row has: at least those appended since the last event.
  [[nodiscard]] virtual std::span<const std::int32_t> newest() const = 0;
  /// True if positions() and credit() neither copy nor wait.
  [[nodiscard]] virtual bool on_host() const = 0;
  /// Points `out` at the columns of a row.
  virtual void describe(std::int32_t row, Row& out) const = 0;

  /// On the host, valid until the next call.
  [[nodiscard]] virtual std::span<const std::int32_t> positions(std::int32_t row) const = 0;
  /// Credit of the oldest slots of a row; the slots after them have none. On the host, valid until the next call.
  [[nodiscard]] virtual std::span<const float> credit(std::int32_t row) const = 0;

  /// All rows: for storing elsewhere and restoring into columns of as many rows. Cost: one copy of each column.
  [[nodiscard]] virtual std::vector<RowColumns> held() const = 0;
  /// The rows of columns that hold none yet. The last `newest` positions came since the last event, the same in every
  /// row. Cost: as held().
  virtual void take(std::vector<RowColumns> rows, std::int32_t newest) = 0;
};

/// Columns in host memory.
class HostColumns final : public Columns {
 public:
  explicit HostColumns(std::int32_t rows) : rows_(static_cast<std::size_t>(rows)) {}

  void reserve(std::int32_t slots) override;
  void append(std::span<const std::int32_t> positions) override;
  void reserve_given(std::int32_t row, std::int32_t slots) override;
  float* give(std::int32_t row, std::int32_t slots) override;
  [[nodiscard]] std::int32_t given(std::int32_t row) const override {
    return static_cast<std::int32_t>(at(row).given.size());
  }
  ColumnTarget reserve_settled(std::int32_t row, std::int64_t slots, bool credit, bool tally) override;
  void settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit, const float* tally) override;
  void narrow(std::int32_t first, std::span<const std::int32_t> places,
              std::span<const std::int32_t> positions) override;
  void bring_newest() override {}
  void finish_event(std::int32_t room) noexcept override;
  void truncate(std::int32_t slots) override;
  [[nodiscard]] std::int32_t length(std::int32_t row) const override {
    return static_cast<std::int32_t>(at(row).positions.size());
  }
  [[nodiscard]] std::span<const std::int32_t> newest() const override { return at(0).positions; }
  [[nodiscard]] bool on_host() const override { return true; }
  void describe(std::int32_t row, Row& out) const override;
  [[nodiscard]] std::span<const std::int32_t> positions(std::int32_t row) const override { return at(row).positions; }
  [[nodiscard]] std::span<const float> credit(std::int32_t row) const override { return at(row).credit; }
  [[nodiscard]] std::vector<RowColumns> held() const override { return rows_; }
  void take(std::vector<RowColumns> rows, std::int32_t /*newest*/) override { rows_ = std::move(rows); }
  /// Bytes that all rows hold, including reserved ones.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  [[nodiscard]] const RowColumns& at(std::int32_t row) const { return rows_[static_cast<std::size_t>(row)]; }
  std::vector<RowColumns> rows_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/columns-inl.h"
#endif
