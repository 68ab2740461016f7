#pragma once
/// Columns: the numbers that move with every slot through compaction: its logical position, EMA credit, tally of
/// scores, and the score that the engine gave it.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/slot.h"

namespace kvkeep {

/// Where an event writes the columns of one row; null: not there. [length of the row]
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

/// The columns of one sequence, for all its rows (full layers x KV heads), in a machine's memory, which must outlive
/// them. Rows are as long as those of the cache; positions ascend in each. On a device the host knows the lengths, and
/// the positions that came since the last event: they reach the device with the next one.
class Columns {
 public:
  explicit Columns(std::int32_t rows, MachineMemory& memory = host_memory())
      : memory_(&memory), rows_(static_cast<std::size_t>(rows)) {}

  /// Makes room for `slots` more in every row, so that appending as many cannot fail. Changes nothing visible. If a row
  /// outgrows its memory, that grows by half; on a device the old memory is kept if a graph may use it.
  void reserve(std::int32_t slots);
  /// Adds new slots at the end of every row. Credit and tally of new slots are 0; they have no given score. Does not
  /// throw after reserve().
  void append(std::span<const std::int32_t> positions);

  /// Makes room for given scores. Changes nothing visible.
  void reserve_given();
  /// From now on the oldest `slots` slots of a row that had no given score have one. Returns where to write them.
  /// Requires reserve_given(), and that the row has as many such slots.
  float* give(std::int32_t row, std::int32_t slots);
  /// Oldest slots of a row that have a given score.
  [[nodiscard]] std::int32_t given(std::int32_t row) const { return at(row).given; }

  /// Makes room for one row's kept slots. Returns where Machine::move() writes them. Changes nothing visible.
  ColumnTarget reserve_settled(std::int32_t row, bool credit, bool tally);
  /// Machine::move() has kept the slots of row `r` of `keep` in one row, with new credit and tally of every slot or
  /// without.
  void settle(std::int32_t row, const KeepSet& keep, std::size_t r, bool credit, bool tally) noexcept;

  /// The slots at `places`, ascending, of every row from `first` on stay; `positions` are theirs. Requires: these rows
  /// hold the same slots, and no event has cut them. On a device, scores that a row was given before its layer was
  /// reached pass through the host, which waits for them.
  void narrow(std::int32_t first, std::span<const std::int32_t> places, std::span<const std::int32_t> positions);
  /// Before Machine::move() of some rows only: on a device, positions in newest() are written to every row, and
  /// newest() is empty. Requires: every row holds the same slots, or newest() is empty.
  void bring_newest();

  /// Call it once all rows are settled. On the host, releases memory if rows hold more than twice what their slots and
  /// `room` more need.
  void finish_event(std::int32_t room) noexcept;

  /// Drops the newest `slots` of every row. They must have been appended after the last event.
  void truncate(std::int32_t slots);

  [[nodiscard]] std::int32_t length(std::int32_t row) const { return at(row).length; }
  /// Positions of the newest slots, which every row has: those appended since the last event.
  [[nodiscard]] std::span<const std::int32_t> newest() const { return newest_; }
  /// True if positions() and credit() neither copy nor wait.
  [[nodiscard]] bool on_host() const { return memory_->is_host(); }
  /// Points `out` at the columns of a row. On a device its positions do not include newest().
  void describe(std::int32_t row, Row& out) const;

  /// On the host, valid until the next call.
  [[nodiscard]] std::span<const std::int32_t> positions(std::int32_t row) const;
  /// Credit of the oldest slots of a row; the slots after them have none. On the host, valid until the next call.
  [[nodiscard]] std::span<const float> credit(std::int32_t row) const;

  /// All rows: for storing elsewhere and restoring into columns of as many rows. Cost: one copy of each column.
  [[nodiscard]] std::vector<RowColumns> held() const;
  /// The rows of columns that hold none yet. The last `newest` positions came since the last event, the same in every
  /// row. Cost: as held().
  void take(std::vector<RowColumns> rows, std::int32_t newest);

  /// Bytes that all rows hold, including reserved ones.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  struct RowLengths {
    std::int32_t length = 0, credit = 0, tally = 0, given = 0;
  };
  [[nodiscard]] const RowLengths& at(std::int32_t row) const { return rows_[static_cast<std::size_t>(row)]; }
  [[nodiscard]] RowLengths& at(std::int32_t row) { return rows_[static_cast<std::size_t>(row)]; }
  /// [rows, capacity] numbers of four bytes.
  template <class T>
  [[nodiscard]] T* in(const DeviceMemory& column, std::int32_t row) const {
    return column == nullptr ? nullptr : static_cast<T*>(column.get()) + std::int64_t{row} * capacity_;
  }
  [[nodiscard]] DeviceMemory column(std::int32_t capacity) {
    return memory_->allocate(std::ssize(rows_) * capacity * 4);
  }
  [[nodiscard]] std::int32_t longest() const;
  void resize(std::int32_t capacity);
  /// Positions of a row that are in memory: on a device the newest are not.
  [[nodiscard]] std::int32_t known(const RowLengths& row) const {
    return on_host() ? row.length : row.length - static_cast<std::int32_t>(newest_.size());
  }
  void write_positions(std::int32_t first, std::span<const std::int32_t> positions);

  MachineMemory* memory_;
  std::int32_t capacity_ = 0;
  std::vector<RowLengths> rows_;
  std::vector<std::int32_t> newest_;
  DeviceMemory positions_, credit_, tally_, given_;
  std::vector<DeviceMemory> retired_;  ///< replaced after something was captured
  mutable std::vector<std::int32_t> read_positions_;
  mutable std::vector<float> read_credit_;
};

/// What Machine::move() does on the host: the columns of the r-th row of an event; credit and tally as decided.
void move_columns(const Row& row, std::size_t r, const Decision& decision, const ColumnTarget& to) noexcept;

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/columns-inl.h"
#endif
