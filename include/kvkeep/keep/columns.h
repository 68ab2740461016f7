// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Columns: the numbers that move with every slot through compaction: its logical position, EMA credit, tally of
/// scores, and the score that the engine gave it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <new>
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
  /// The same numbers in memory of their own. On a device it only launches copies.
  Columns(const Columns& other);
  Columns(Columns&&) noexcept = default;
  Columns& operator=(Columns&&) noexcept = default;

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

inline Columns::Columns(const Columns& other)
    : memory_(other.memory_), capacity_(other.capacity_), rows_(other.rows_), newest_(other.newest_) {
  for (const auto column : {&Columns::positions_, &Columns::credit_, &Columns::tally_, &Columns::given_}) {
    if (other.*column == nullptr) continue;
    this->*column = this->column(capacity_);
    const std::int64_t bytes = std::ssize(rows_) * std::int64_t{capacity_} * 4;
    memory_->copy_rows((this->*column).get(), bytes, (other.*column).get(), bytes, bytes, 1);
  }
}

inline std::int32_t Columns::longest() const {
  std::int32_t most = 0;
  for (const RowLengths& row : rows_) most = std::max(most, row.length);
  return most;
}

inline void Columns::resize(std::int32_t capacity) {
  const std::int32_t used = std::min({longest(), capacity_, capacity});
  const std::array<DeviceMemory*, 4> columns = {&positions_, &credit_, &tally_, &given_};
  std::array<DeviceMemory, 4> other;  // all allocated before anything is replaced
  for (std::size_t c = 0; c < columns.size(); ++c)
    if (*columns[c] != nullptr || columns[c] == &positions_) other[c] = column(capacity);
  retired_.reserve(retired_.size() + columns.size());
  for (std::size_t c = 0; c < columns.size(); ++c) {
    if (other[c] == nullptr) continue;
    if (*columns[c] != nullptr)
      memory_->copy_rows(other[c].get(), std::int64_t{capacity} * 4, columns[c]->get(), std::int64_t{capacity_} * 4,
                         std::int64_t{used} * 4, std::ssize(rows_));
    std::swap(*columns[c], other[c]);
    if (memory_->capture() != Capture::never && other[c]) retired_.push_back(std::move(other[c]));
  }
  capacity_ = capacity;
}

inline void Columns::reserve(std::int32_t slots) {
  constexpr std::int32_t kLeast = 64;
  const std::size_t newest = newest_.size() + static_cast<std::size_t>(slots);
  if (newest > newest_.capacity()) newest_.reserve(std::max(newest, 2 * newest_.capacity()));
  const std::int32_t needed = longest() + slots;
  if (needed > capacity_) resize(std::max({needed, capacity_ + capacity_ / 2, kLeast}));
}

inline void Columns::append(std::span<const std::int32_t> positions) {
  reserve(static_cast<std::int32_t>(positions.size()));
  newest_.insert(newest_.end(), positions.begin(), positions.end());
  const bool here = on_host();
  for (std::int32_t r = 0; r < std::ssize(rows_); ++r) {
    if (here) std::ranges::copy(positions, in<std::int32_t>(positions_, r) + at(r).length);
    at(r).length += static_cast<std::int32_t>(positions.size());
  }
}

inline void Columns::reserve_given() {
  if (given_ == nullptr && capacity_ > 0) given_ = column(capacity_);
}

inline float* Columns::give(std::int32_t row, std::int32_t slots) {
  float* const to = in<float>(given_, row) + at(row).given;
  at(row).given += slots;
  return to;
}

inline ColumnTarget Columns::reserve_settled(std::int32_t row, bool credit, bool tally) {
  if (credit && credit_ == nullptr) credit_ = column(capacity_);
  if (tally && tally_ == nullptr) tally_ = column(capacity_);
  return {in<std::int32_t>(positions_, row), credit ? in<float>(credit_, row) : nullptr,
          tally ? in<float>(tally_, row) : nullptr, in<float>(given_, row)};
}

inline void Columns::settle(std::int32_t row, const KeepSet& keep, std::size_t r, bool credit, bool tally) noexcept {
  RowLengths& lengths = at(row);
  lengths.length = static_cast<std::int32_t>(keep.count(r));
  if (credit) lengths.credit = lengths.length;
  if (tally) lengths.tally = lengths.length;
  if (lengths.given > 0) lengths.given = lengths.length;  // an event finds a score in every slot
}

/// The same positions in every row from `first` on. One copy from the host, and log2(rows) within the memory.
inline void Columns::write_positions(std::int32_t first, std::span<const std::int32_t> positions) {
  const auto bytes = static_cast<std::int64_t>(positions.size_bytes()), stride = std::int64_t{capacity_} * 4;
  const auto rows = static_cast<std::int32_t>(rows_.size()) - first;
  if (bytes == 0 || rows <= 0) return;
  memory_->write(in<std::int32_t>(positions_, first), positions.data(), bytes);
  for (std::int32_t done = 1; done < rows; done *= 2)
    memory_->copy_rows(in<std::int32_t>(positions_, first + done), stride, in<std::int32_t>(positions_, first), stride,
                       bytes, std::min(done, rows - done));
}

inline void Columns::bring_newest() {
  if (!on_host()) write_positions(0, newest_);
  newest_.clear();
}

inline void Columns::narrow(std::int32_t first, std::span<const std::int32_t> places,
                            std::span<const std::int32_t> positions) {
  bring_newest();
  write_positions(first, positions);
  for (std::int32_t r = first; r < std::ssize(rows_); ++r) {
    RowLengths& row = at(r);
    row.length = static_cast<std::int32_t>(positions.size());
    if (row.given == 0) continue;
    std::vector<float> before(static_cast<std::size_t>(row.given)), left;
    float* const there = in<float>(given_, r);
    memory_->read(before.data(), there, std::int64_t{row.given} * 4);
    for (const std::int32_t place : places)
      if (place < row.given) left.push_back(before[static_cast<std::size_t>(place)]);
    row.given = static_cast<std::int32_t>(left.size());
    if (row.given > 0) memory_->write(there, left.data(), std::int64_t{row.given} * 4);
  }
}

/// Without memory for the copy, rows are left as they are.
inline void Columns::finish_event(std::int32_t room) noexcept {
  newest_.clear();
  const std::int32_t needed = longest() + room;
  if (!on_host() || capacity_ <= 2 * needed) return;
  try {
    resize(needed);
    newest_ = std::vector<std::int32_t>();
  } catch (const std::bad_alloc&) {
  }
}

inline void Columns::truncate(std::int32_t slots) {
  newest_.resize(newest_.size() - static_cast<std::size_t>(slots));
  for (RowLengths& row : rows_) {
    row.length -= slots;
    row.given = std::min(row.given, row.length);
  }
}

inline void Columns::describe(std::int32_t row, Row& out) const {
  const RowLengths& lengths = at(row);
  out.positions = in<std::int32_t>(positions_, row);
  out.credit = in<float>(credit_, row);
  out.credit_length = lengths.credit;
  out.tally = in<float>(tally_, row);
  out.tally_length = lengths.tally;
  out.given = in<float>(given_, row);
  out.given_length = lengths.given;
}

inline std::span<const std::int32_t> Columns::positions(std::int32_t row) const {
  const std::int32_t length = this->length(row), known = this->known(at(row));
  const auto* const there = in<std::int32_t>(positions_, row);
  if (on_host()) return {there, static_cast<std::size_t>(length)};
  read_positions_.resize(static_cast<std::size_t>(length));
  if (known > 0) memory_->read(read_positions_.data(), there, std::int64_t{known} * 4);
  std::copy(newest_.begin(), newest_.end(), read_positions_.begin() + known);
  return read_positions_;
}

inline std::span<const float> Columns::credit(std::int32_t row) const {
  const auto* const there = in<float>(credit_, row);
  const auto length = static_cast<std::size_t>(at(row).credit);
  if (on_host()) return {there, length};
  read_credit_.resize(length);
  if (length > 0) memory_->read(read_credit_.data(), there, static_cast<std::int64_t>(length) * 4);
  return read_credit_;
}

inline std::int64_t Columns::bytes() const {
  std::int64_t columns = 0;
  for (const DeviceMemory* column : {&positions_, &credit_, &tally_, &given_}) columns += *column == nullptr ? 0 : 1;
  return columns * std::ssize(rows_) * capacity_ * 4;
}

inline std::vector<RowColumns> Columns::held() const {
  std::vector<RowColumns> all(rows_.size());
  const auto read = [&]<class T>(const DeviceMemory& column, std::vector<T> RowColumns::* to, auto&& slots_of) {
    std::int64_t end = 0;
    for (std::size_t r = 0; r < rows_.size(); ++r)
      if (slots_of(rows_[r]) > 0) end = static_cast<std::int64_t>(r) * capacity_ + slots_of(rows_[r]);
    if (end == 0) return;
    std::vector<T> image(static_cast<std::size_t>(end));
    memory_->read(image.data(), column.get(), end * 4);
    for (std::size_t r = 0; r < rows_.size(); ++r)
      if (const std::int32_t slots = slots_of(rows_[r]); slots > 0) {
        const T* const from = image.data() + static_cast<std::int64_t>(r) * capacity_;
        (all[r].*to).assign(from, from + slots);
      }
  };
  read(positions_, &RowColumns::positions, [this](const RowLengths& row) { return known(row); });
  read(credit_, &RowColumns::credit, [](const RowLengths& row) { return row.credit; });
  read(tally_, &RowColumns::tally, [](const RowLengths& row) { return row.tally; });
  read(given_, &RowColumns::given, [](const RowLengths& row) { return row.given; });
  if (on_host()) return all;
  for (RowColumns& row : all) row.positions.insert(row.positions.end(), newest_.begin(), newest_.end());
  return all;
}

inline void Columns::take(std::vector<RowColumns> rows, std::int32_t newest) {
  std::size_t longest = 0;
  for (const RowColumns& row : rows) longest = std::max(longest, row.positions.size());
  if (longest == 0) return;
  resize(std::max(static_cast<std::int32_t>(longest), on_host() ? 0 : 64));
  const auto write = [&]<class T>(DeviceMemory& column, std::vector<T> RowColumns::* from) {
    if (std::ranges::all_of(rows, [&](const RowColumns& row) { return (row.*from).empty(); })) return;
    if (column == nullptr) column = this->column(capacity_);
    std::vector<T> image(rows.size() * static_cast<std::size_t>(capacity_));
    for (std::size_t r = 0; r < rows.size(); ++r)
      std::ranges::copy(rows[r].*from, image.begin() + static_cast<std::int64_t>(r) * capacity_);
    memory_->write(column.get(), image.data(), static_cast<std::int64_t>(image.size()) * 4);
  };
  write(positions_, &RowColumns::positions);
  write(credit_, &RowColumns::credit);
  write(tally_, &RowColumns::tally);
  write(given_, &RowColumns::given);
  for (std::size_t r = 0; r < rows.size(); ++r)
    rows_[r] = {.length = static_cast<std::int32_t>(rows[r].positions.size()),
                .credit = static_cast<std::int32_t>(rows[r].credit.size()),
                .tally = static_cast<std::int32_t>(rows[r].tally.size()),
                .given = static_cast<std::int32_t>(rows[r].given.size())};
  newest_.assign(rows.front().positions.end() - newest, rows.front().positions.end());
}

inline void move_columns(const Row& row, std::size_t r, const Decision& decision, const ColumnTarget& to) noexcept {
  if (to.positions == nullptr) return;
  const std::span<const std::int32_t> kept = decision.keep->row(r);
  const auto gather = [kept](auto* there, const auto* from) {
    for (std::size_t j = 0; j < kept.size(); ++j) there[j] = from[kept[j]];
  };
  gather(to.positions, to.positions);
  if (row.given_length > 0) gather(to.given, to.given);
  if (to.credit != nullptr) gather(to.credit, decision.credit->data<float>() + row.first);
  if (to.tally != nullptr) gather(to.tally, decision.tally->data<float>() + row.first);
}

}  // namespace kvkeep
