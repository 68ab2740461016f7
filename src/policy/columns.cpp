#include "kvkeep/core/columns.h"

#include <algorithm>

namespace kvkeep {

void Columns::append(std::span<const std::int32_t> positions) {
  for (RowColumns& row : rows_) row.positions.insert(row.positions.end(), positions.begin(), positions.end());
}

void Columns::compact(std::int32_t row, std::span<const std::int32_t> kept, const float* credit, const float* tally) {
  RowColumns& columns = rows_[static_cast<std::size_t>(row)];
  if (credit != nullptr) columns.credit.resize(kept.size());
  if (tally != nullptr) columns.tally.resize(kept.size());
  for (std::size_t j = 0; j < kept.size(); ++j) {
    columns.positions[j] = columns.positions[static_cast<std::size_t>(kept[j])];
    if (credit != nullptr) columns.credit[j] = credit[kept[j]];
    if (tally != nullptr) columns.tally[j] = tally[kept[j]];
  }
  columns.positions.resize(kept.size());
}

void Columns::truncate(std::int32_t end) {
  for (RowColumns& row : rows_) {
    row.positions.erase(std::lower_bound(row.positions.begin(), row.positions.end(), end), row.positions.end());
    row.credit.resize(std::min(row.credit.size(), row.positions.size()));
    row.tally.resize(std::min(row.tally.size(), row.positions.size()));
  }
}

}  // namespace kvkeep
