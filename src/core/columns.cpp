#include "kvkeep/core/columns.h"

#include <algorithm>
#include <new>

#include "grow.h"

namespace kvkeep {

namespace {

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

}  // namespace

void HostColumns::reserve(std::int32_t slots) {
  for (RowColumns& row : rows_) make_room(row.positions, row.positions.size() + static_cast<std::size_t>(slots));
}

void HostColumns::append(std::span<const std::int32_t> positions) {
  for (RowColumns& row : rows_) row.positions.insert(row.positions.end(), positions.begin(), positions.end());
}

ColumnTarget HostColumns::reserve_settled(std::int32_t row, std::int64_t slots, bool credit, bool tally) {
  RowColumns& columns = rows_[static_cast<std::size_t>(row)];
  if (credit) make_room(columns.credit, static_cast<std::size_t>(slots));
  if (tally) make_room(columns.tally, static_cast<std::size_t>(slots));
  return {};
}

void HostColumns::settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit,
                         const float* tally) {
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

void HostColumns::finish_event(std::int32_t room) noexcept {
  for (RowColumns& row : rows_) {
    give_back(row.positions, row.positions.size() + static_cast<std::size_t>(room));
    give_back(row.credit, row.credit.size() + static_cast<std::size_t>(room));
    give_back(row.tally, row.tally.size() + static_cast<std::size_t>(room));
  }
}

void HostColumns::assign(std::int32_t row, std::span<const std::int32_t> positions, std::span<const float> credit,
                         std::span<const float> tally) {
  rows_[static_cast<std::size_t>(row)] = {
      {positions.begin(), positions.end()}, {credit.begin(), credit.end()}, {tally.begin(), tally.end()}};
}

std::int64_t HostColumns::bytes() const {
  std::int64_t numbers = 0;
  for (const RowColumns& row : rows_)
    numbers += static_cast<std::int64_t>(row.positions.capacity() + row.credit.capacity() + row.tally.capacity());
  return numbers * 4;
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
