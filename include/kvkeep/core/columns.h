#pragma once
/// Columns: what travels with every slot of a sequence through the same compaction: its logical position, its EMA credit, the tally of its scores.

#include <cstdint>
#include <span>
#include <vector>

namespace kvkeep {

/// The columns of one sequence, for all its rows (full layers x KV heads). Rows are as long as the cache's; positions ascend in each.
class Columns {
 public:
  explicit Columns(std::int32_t rows) : rows_(static_cast<std::size_t>(rows)) {}

  /// Adds new slots at the end of every row. Credit and tally of new slots are 0.
  void append(std::span<const std::int32_t> positions);

  /// Keeps `kept` (ascending) of one row; `credit` and `tally` (or null) hold the new value of every slot before compaction.
  void compact(std::int32_t row, std::span<const std::int32_t> kept, const float* credit, const float* tally = nullptr);

  /// Drops the slots of every row from logical position `end` on.
  void truncate(std::int32_t end);

  [[nodiscard]] std::int32_t rows() const { return static_cast<std::int32_t>(rows_.size()); }
  [[nodiscard]] std::int32_t length(std::int32_t row) const { return static_cast<std::int32_t>(at(row).positions.size()); }
  [[nodiscard]] std::span<const std::int32_t> positions(std::int32_t row) const { return at(row).positions; }
  /// Credit of the oldest slots of a row; the slots past its end have none.
  [[nodiscard]] std::span<const float> credit(std::int32_t row) const { return at(row).credit; }
  /// The same of the tally.
  [[nodiscard]] std::span<const float> tally(std::int32_t row) const { return at(row).tally; }

 private:
  struct RowColumns {
    std::vector<std::int32_t> positions;
    std::vector<float> credit;
    std::vector<float> tally;
  };
  [[nodiscard]] const RowColumns& at(std::int32_t row) const { return rows_[static_cast<std::size_t>(row)]; }
  std::vector<RowColumns> rows_;
};

}  // namespace kvkeep
