#include "device_columns.h"

#include <algorithm>
#include <array>

namespace kvkeep::cuda {

void DeviceColumns::grow(std::int32_t capacity) {
  std::int32_t used = 0;
  for (const RowLengths& row : rows_) used = std::max(used, std::min(row.length, capacity_));
  const std::array<DeviceMemory*, 4> columns = {&positions_, &credit_, &tally_, &given_};
  std::array<DeviceMemory, 4> larger;  // all allocated before anything is replaced
  for (std::size_t c = 0; c < columns.size(); ++c)
    if (columns[c]->get() != nullptr || columns[c] == &positions_) larger[c] = column(capacity);
  retired_.reserve(retired_.size() + columns.size());
  for (std::size_t c = 0; c < columns.size(); ++c) {
    if (larger[c].get() == nullptr) continue;
    if (columns[c]->get() != nullptr)
      memory_.copy_rows(larger[c].get(), std::int64_t{capacity} * 4, columns[c]->get(), std::int64_t{capacity_} * 4,
                        std::int64_t{used} * 4, static_cast<std::int64_t>(rows_.size()));
    std::swap(*columns[c], larger[c]);
    if (memory_.captured() && larger[c]) retired_.push_back(std::move(larger[c]));
  }
  capacity_ = capacity;
}

void DeviceColumns::reserve(std::int32_t slots) {
  const std::size_t newest = newest_.size() + static_cast<std::size_t>(slots);
  if (newest > newest_.capacity()) newest_.reserve(std::max(newest, 2 * newest_.capacity()));
  std::int32_t longest = 0;
  for (const RowLengths& row : rows_) longest = std::max(longest, row.length + slots);
  if (longest > capacity_) grow(std::max({longest, capacity_ + capacity_ / 2, 64}));
}

void DeviceColumns::append(std::span<const std::int32_t> positions) {
  reserve(static_cast<std::int32_t>(positions.size()));
  newest_.insert(newest_.end(), positions.begin(), positions.end());
  for (RowLengths& row : rows_) row.length += static_cast<std::int32_t>(positions.size());
}

void DeviceColumns::reserve_given(std::int32_t /*row*/, std::int32_t slots) {
  if (slots > 0 && given_.get() == nullptr) given_ = column(capacity_);
}

float* DeviceColumns::give(std::int32_t row, std::int32_t slots) {
  RowLengths& lengths = rows_[static_cast<std::size_t>(row)];
  float* const to = at<float>(given_, row) + lengths.given;
  lengths.given += slots;
  return to;
}

void DeviceColumns::settle(std::int32_t row, const KeepSet& keep, std::size_t r, const float* credit,
                           const float* tally) {
  RowLengths& lengths = rows_[static_cast<std::size_t>(row)];
  lengths.length = static_cast<std::int32_t>(keep.count(r));
  if (credit != nullptr) lengths.credit = lengths.length;
  if (tally != nullptr) lengths.tally = lengths.length;
  if (lengths.given > 0) lengths.given = lengths.length;  // an event finds a score in every slot
}

void DeviceColumns::write_positions(std::int32_t first, std::span<const std::int32_t> positions) {
  const auto bytes = static_cast<std::int64_t>(positions.size_bytes()), stride = std::int64_t{capacity_} * 4;
  const auto rows = static_cast<std::int32_t>(rows_.size()) - first;
  if (bytes == 0 || rows <= 0) return;
  memory_.write(at<std::int32_t>(positions_, first), positions.data(), bytes);
  for (std::int32_t done = 1; done < rows; done *= 2)
    memory_.copy_rows(at<std::int32_t>(positions_, first + done), stride, at<std::int32_t>(positions_, first), stride,
                      bytes, std::min(done, rows - done));
}

void DeviceColumns::bring_newest() {
  write_positions(0, newest_);
  newest_.clear();
}

void DeviceColumns::narrow(std::int32_t first, std::span<const std::int32_t> places,
                           std::span<const std::int32_t> positions) {
  bring_newest();
  write_positions(first, positions);
  for (auto r = static_cast<std::size_t>(first); r < rows_.size(); ++r) {
    RowLengths& row = rows_[r];
    row.length = static_cast<std::int32_t>(positions.size());
    if (row.given == 0) continue;
    std::vector<float> before(static_cast<std::size_t>(row.given)), left;
    float* const there = at<float>(given_, static_cast<std::int32_t>(r));
    memory_.read(before.data(), there, std::int64_t{row.given} * 4);
    for (const std::int32_t place : places)
      if (place < row.given) left.push_back(before[static_cast<std::size_t>(place)]);
    row.given = static_cast<std::int32_t>(left.size());
    if (row.given > 0) memory_.write(there, left.data(), std::int64_t{row.given} * 4);
  }
}

void DeviceColumns::truncate(std::int32_t slots) {
  newest_.resize(newest_.size() - static_cast<std::size_t>(slots));
  for (RowLengths& row : rows_) {
    row.length -= slots;
    row.given = std::min(row.given, row.length);
  }
}

void DeviceColumns::describe(std::int32_t row, Row& out) const {
  const RowLengths& lengths = rows_[static_cast<std::size_t>(row)];
  out.positions = at<std::int32_t>(positions_, row);
  out.credit = at<float>(credit_, row);
  out.credit_length = lengths.credit;
  out.tally = at<float>(tally_, row);
  out.tally_length = lengths.tally;
  out.given = at<float>(given_, row);
  out.given_length = lengths.given;
}

ColumnTarget DeviceColumns::reserve_settled(std::int32_t row, std::int64_t /*slots*/, bool credit, bool tally) {
  if (credit && credit_.get() == nullptr) credit_ = column(capacity_);
  if (tally && tally_.get() == nullptr) tally_ = column(capacity_);
  return {at<std::int32_t>(positions_, row), credit ? at<float>(credit_, row) : nullptr,
          tally ? at<float>(tally_, row) : nullptr, at<float>(given_, row)};
}

std::span<const std::int32_t> DeviceColumns::positions(std::int32_t row) const {
  const std::int32_t length = this->length(row), known = this->known(rows_[static_cast<std::size_t>(row)]);
  read_positions_.resize(static_cast<std::size_t>(length));
  if (known > 0) memory_.read(read_positions_.data(), at<std::int32_t>(positions_, row), std::int64_t{known} * 4);
  std::copy(newest_.begin(), newest_.end(), read_positions_.begin() + known);
  return read_positions_;
}

std::span<const float> DeviceColumns::credit(std::int32_t row) const {
  read_credit_.resize(static_cast<std::size_t>(rows_[static_cast<std::size_t>(row)].credit));
  if (!read_credit_.empty())
    memory_.read(read_credit_.data(), at<float>(credit_, row), static_cast<std::int64_t>(read_credit_.size()) * 4);
  return read_credit_;
}

std::vector<RowColumns> DeviceColumns::held() const {
  std::vector<RowColumns> all(rows_.size());
  const auto read = [&]<class T>(const DeviceMemory& column, std::vector<T> RowColumns::* to, auto&& slots_of) {
    std::int64_t end = 0;
    for (std::size_t r = 0; r < rows_.size(); ++r)
      if (slots_of(rows_[r]) > 0) end = static_cast<std::int64_t>(r) * capacity_ + slots_of(rows_[r]);
    if (end == 0) return;
    std::vector<T> image(static_cast<std::size_t>(end));
    memory_.read(image.data(), column.get(), end * 4);
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
  for (RowColumns& row : all) row.positions.insert(row.positions.end(), newest_.begin(), newest_.end());
  return all;
}

void DeviceColumns::take(std::vector<RowColumns> rows, std::int32_t newest) {
  std::size_t longest = 0;
  for (const RowColumns& row : rows) longest = std::max(longest, row.positions.size());
  if (longest == 0) return;
  grow(std::max(static_cast<std::int32_t>(longest), 64));
  const auto write = [&]<class T>(DeviceMemory& column, std::vector<T> RowColumns::* from) {
    if (std::ranges::all_of(rows, [&](const RowColumns& row) { return (row.*from).empty(); })) return;
    if (column.get() == nullptr) column = this->column(capacity_);
    std::vector<T> image(rows.size() * static_cast<std::size_t>(capacity_));
    for (std::size_t r = 0; r < rows.size(); ++r)
      std::ranges::copy(rows[r].*from, image.begin() + static_cast<std::int64_t>(r) * capacity_);
    memory_.write(column.get(), image.data(), static_cast<std::int64_t>(image.size()) * 4);
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

}  // namespace kvkeep::cuda
