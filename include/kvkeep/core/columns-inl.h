#pragma once
// Bodies of columns.h: compiled by src/core, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <new>

#include "kvkeep/core/columns.h"
#include "kvkeep/core/grow.h"
#include "kvkeep/core/header_only.h"

namespace kvkeep {

namespace columns_detail {

/// Reallocates a list to `size` numbers if it has room for more than twice as many. Without memory for the copy, the
/// list is left as it is.
template <class T>
void give_back(std::vector<T>& list, std::size_t size) noexcept {
  if (list.capacity() <= 2 * size) return;
  try {
    std::vector<T> smaller;
    smaller.reserve(size);
    smaller.assign(list.begin(), list.end());
    list.swap(smaller);
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace columns_detail

KVKEEP_INLINE void HostColumns::reserve(std::int32_t slots) {
  for (RowColumns& row : rows_) make_room(row.positions, row.positions.size() + static_cast<std::size_t>(slots));
}

KVKEEP_INLINE void HostColumns::append(std::span<const std::int32_t> positions) {
  for (RowColumns& row : rows_) row.positions.insert(row.positions.end(), positions.begin(), positions.end());
}

KVKEEP_INLINE void HostColumns::reserve_given(std::int32_t row, std::int32_t slots) {
  std::vector<float>& given = rows_[static_cast<std::size_t>(row)].given;
  make_room(given, given.size() + static_cast<std::size_t>(slots));
}

KVKEEP_INLINE float* HostColumns::give(std::int32_t row, std::int32_t slots) {
  std::vector<float>& given = rows_[static_cast<std::size_t>(row)].given;
  const std::size_t before = given.size();
  given.resize(before + static_cast<std::size_t>(slots));
  return given.data() + before;
}

KVKEEP_INLINE ColumnTarget HostColumns::reserve_settled(std::int32_t row, std::int64_t slots, bool credit, bool tally) {
  RowColumns& columns = rows_[static_cast<std::size_t>(row)];
  if (credit) make_room(columns.credit, static_cast<std::size_t>(slots));
  if (tally) make_room(columns.tally, static_cast<std::size_t>(slots));
  return {};
}

KVKEEP_INLINE void HostColumns::settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit,
                                       const float* tally) {
  RowColumns& columns = rows_[static_cast<std::size_t>(row)];
  const std::span<const std::int32_t> kept = keep.row(r);
  if (credit != nullptr) columns.credit.resize(kept.size());
  if (tally != nullptr) columns.tally.resize(kept.size());
  std::size_t given = 0;
  for (std::size_t j = 0; j < kept.size(); ++j) {
    columns.positions[j] = columns.positions[static_cast<std::size_t>(kept[j])];
    if (credit != nullptr) columns.credit[j] = credit[kept[j]];
    if (tally != nullptr) columns.tally[j] = tally[kept[j]];
    if (const auto from = static_cast<std::size_t>(kept[j]); from < columns.given.size())
      columns.given[given++] = columns.given[from];
  }
  columns.positions.resize(kept.size());
  columns.given.resize(given);
}

KVKEEP_INLINE void HostColumns::narrow(std::int32_t first, std::span<const std::int32_t> places,
                                       std::span<const std::int32_t> positions) {
  for (auto r = static_cast<std::size_t>(first); r < rows_.size(); ++r) {
    RowColumns& columns = rows_[r];
    std::ranges::copy(positions, columns.positions.begin());
    columns.positions.resize(positions.size());
    std::size_t given = 0;
    for (const std::int32_t place : places)
      if (const auto from = static_cast<std::size_t>(place); from < columns.given.size())
        columns.given[given++] = columns.given[from];
    columns.given.resize(given);
  }
}

KVKEEP_INLINE void HostColumns::finish_event(std::int32_t room) noexcept {
  for (RowColumns& row : rows_) {
    columns_detail::give_back(row.positions, row.positions.size() + static_cast<std::size_t>(room));
    columns_detail::give_back(row.credit, row.credit.size() + static_cast<std::size_t>(room));
    columns_detail::give_back(row.tally, row.tally.size() + static_cast<std::size_t>(room));
    columns_detail::give_back(row.given, row.given.size() + static_cast<std::size_t>(room));
  }
}

KVKEEP_INLINE std::int64_t HostColumns::bytes() const {
  std::int64_t numbers = 0;
  for (const RowColumns& row : rows_)
    numbers += static_cast<std::int64_t>(row.positions.capacity() + row.credit.capacity() + row.tally.capacity() +
                                         row.given.capacity());
  return numbers * 4;
}

KVKEEP_INLINE void HostColumns::truncate(std::int32_t slots) {
  for (RowColumns& row : rows_) {
    row.positions.resize(row.positions.size() - static_cast<std::size_t>(slots));
    row.given.resize(std::min(row.given.size(), row.positions.size()));
  }
}

KVKEEP_INLINE void HostColumns::describe(std::int32_t row, Row& out) const {
  const RowColumns& columns = at(row);
  out.positions = columns.positions.data();
  out.credit = columns.credit.data();
  out.credit_length = static_cast<std::int32_t>(columns.credit.size());
  out.tally = columns.tally.data();
  out.tally_length = static_cast<std::int32_t>(columns.tally.size());
  out.given = columns.given.data();
  out.given_length = static_cast<std::int32_t>(columns.given.size());
}

}  // namespace kvkeep
