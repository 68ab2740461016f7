#include "kvkeep/core/columns.h"

#include <algorithm>

namespace kvkeep {

void HostColumns::append(std::span<const std::int32_t> positions) {
  for (RowColumns& row : rows_) row.positions.insert(row.positions.end(), positions.begin(), positions.end());
}

void HostColumns::settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit, const float* tally) {
  RowColumns& columns = rows_[static_cast<std::size_t>(row)];
  const std::span<const std::int32_t> kept = keep.row(r);
  if (credit != nullptr) columns.credit.resize(kept.size());
  if (tally != nullptr) columns.tally.resize(kept.size());
  for (std::size_t j = 0; j < kept.size(); ++j) {
    columns.positions[j] = columns.positions[static_cast<std::size_t>(kept[j])];
    if (credit != nullptr) columns.credit[j] = credit[kept[j]];
    if (tally != nullptr) columns.tally[j] = tally[kept[j]];
  }
  columns.positions.resize(kept.size());
}

void HostColumns::truncate(std::int32_t slots) {
  for (RowColumns& row : rows_) {
    row.positions.resize(row.positions.size() - static_cast<std::size_t>(slots));
    row.credit.resize(std::min(row.credit.size(), row.positions.size()));
    row.tally.resize(std::min(row.tally.size(), row.positions.size()));
  }
}

void HostColumns::describe(std::int32_t row, Row& out) const {
  const RowColumns& columns = at(row);
  out.positions = columns.positions.data();
  out.credit = columns.credit.data();
  out.credit_length = static_cast<std::int32_t>(columns.credit.size());
  out.tally = columns.tally.data();
  out.tally_length = static_cast<std::int32_t>(columns.tally.size());
}

}  // namespace kvkeep
