#pragma once
/// Columns of one sequence in the memory of a device. The host knows the lengths, and the positions that came since the
/// last event: they reach the device with the next one.

#include "kvkeep/core/columns.h"
#include "kvkeep/core/machine_memory.h"

namespace kvkeep::cuda {

class DeviceColumns final : public Columns {
 public:
  DeviceColumns(std::int32_t rows, MachineMemory& memory) : memory_(memory), rows_(static_cast<std::size_t>(rows)) {}

  /// Allocates if a row outgrows its memory, half as much again. The old memory is freed, or kept if a graph may use
  /// it.
  void reserve(std::int32_t slots) override;
  void append(std::span<const std::int32_t> positions) override;
  /// Allocates the column when it is first requested, for all rows.
  void reserve_given(std::int32_t row, std::int32_t slots) override;
  float* give(std::int32_t row, std::int32_t slots) override;
  [[nodiscard]] std::int32_t given(std::int32_t row) const override {
    return rows_[static_cast<std::size_t>(row)].given;
  }
  /// Allocates each column when it is first requested.
  ColumnTarget reserve_settled(std::int32_t row, std::int64_t slots, bool credit, bool tally) override;
  void settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit, const float* tally) override;
  /// Scores that a row was given before its layer was reached pass through the host, which waits for them.
  void narrow(std::int32_t first, std::span<const std::int32_t> places,
              std::span<const std::int32_t> positions) override;
  void bring_newest() override;
  void truncate(std::int32_t slots) override;
  [[nodiscard]] std::int32_t length(std::int32_t row) const override {
    return rows_[static_cast<std::size_t>(row)].length;
  }
  [[nodiscard]] std::span<const std::int32_t> newest() const override { return newest_; }
  [[nodiscard]] bool on_host() const override { return false; }
  void describe(std::int32_t row, Row& out) const override;
  /// Waits for the device.
  [[nodiscard]] std::span<const std::int32_t> positions(std::int32_t row) const override;
  [[nodiscard]] std::span<const float> credit(std::int32_t row) const override;
  /// Waits for the device.
  [[nodiscard]] std::vector<RowColumns> held() const override;
  void take(std::vector<RowColumns> rows, std::int32_t newest) override;

  /// Settled rows have all their positions on the device.
  void finish_event(std::int32_t /*room*/) noexcept override { newest_.clear(); }

 private:
  struct RowLengths {
    std::int32_t length = 0, credit = 0, tally = 0, given = 0;
  };
  /// [rows, capacity] numbers of four bytes.
  template <class T>
  [[nodiscard]] T* at(const DeviceMemory& memory, std::int32_t row) const {
    return memory.get() == nullptr ? nullptr : static_cast<T*>(memory.get()) + std::int64_t{row} * capacity_;
  }
  [[nodiscard]] DeviceMemory column(std::int32_t capacity) {
    return memory_.allocate(static_cast<std::int64_t>(rows_.size()) * capacity * 4);
  }
  void grow(std::int32_t capacity);
  /// Positions of a row that are on the device: the newest may not be.
  [[nodiscard]] std::int32_t known(const RowLengths& row) const {
    return row.length - static_cast<std::int32_t>(newest_.size());
  }
  /// The same positions in every row from `first` on. One copy from the host, and log2(rows) on the device.
  void write_positions(std::int32_t first, std::span<const std::int32_t> positions);

  MachineMemory& memory_;
  std::int32_t capacity_ = 0;
  std::vector<RowLengths> rows_;
  std::vector<std::int32_t> newest_;
  DeviceMemory positions_, credit_, tally_, given_;
  std::vector<DeviceMemory> retired_;  ///< replaced after something was captured
  mutable std::vector<std::int32_t> read_positions_;
  mutable std::vector<float> read_credit_;
};

}  // namespace kvkeep::cuda
