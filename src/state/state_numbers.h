// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Lists of numbers as tensors of a saved state, and back.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/state/state_file.h"

namespace kvkeep {

/// A tensor of `shape` with the bytes of as many numbers.
template <class T>
Tensor tensor_of(std::span<const T> numbers, Dtype dtype, Shape shape) {
  Tensor t = empty(shape, dtype);
  if (!numbers.empty()) std::memcpy(t.bytes(), numbers.data(), numbers.size_bytes());
  return t;
}
template <class T>
Tensor list_of(const std::vector<T>& numbers, Dtype dtype) {
  return tensor_of(std::span<const T>(numbers), dtype, {static_cast<std::int64_t>(numbers.size())});
}
template <class T>
std::span<const T> numbers_of(const Tensor& t) {
  return {reinterpret_cast<const T*>(t.bytes()), static_cast<std::size_t>(t.nbytes()) / sizeof(T)};
}
template <class T>
std::vector<T> list_from(std::span<const T> numbers, std::int64_t begin, std::int64_t end) {
  return {numbers.begin() + begin, numbers.begin() + end};
}

/// Rows of numbers of any length, one after the other.
template <class T>
class Ragged {
 public:
  void add(std::span<const T> row) {
    numbers_.insert(numbers_.end(), row.begin(), row.end());
    ends_.push_back(static_cast<std::int64_t>(numbers_.size()));
  }
  void give(StateTensors& to, const std::string& name, Dtype dtype) const {
    to.emplace_back(name, list_of(numbers_, dtype));
    to.emplace_back(name + ".indptr", list_of(ends_, Dtype::i64));
  }

 private:
  std::vector<T> numbers_;
  std::vector<std::int64_t> ends_{0};
};

/// The same, as stored in a file.
template <class T>
class RaggedView {
 public:
  RaggedView(const StateFile& state, const std::string& name, Dtype dtype, std::int64_t rows)
      : data_(state.tensor(name, dtype, {-1})), ends_(state.tensor(name + ".indptr", Dtype::i64, {rows + 1})) {
    const auto ends = numbers_of<std::int64_t>(ends_);
    KVKEEP_REQUIRE(ends.front() == 0 && std::ranges::is_sorted(ends) && ends.back() == data_.numel(),
                   "restore: tensor \"", name, ".indptr\" in ", state.where(), " does not ascend from 0 to ",
                   data_.numel(), "; allowed the offsets where rows begin");
  }
  [[nodiscard]] std::span<const T> row(std::size_t r) const {
    const auto ends = numbers_of<std::int64_t>(ends_);
    return numbers_of<T>(data_).subspan(static_cast<std::size_t>(ends[r]),
                                        static_cast<std::size_t>(ends[r + 1] - ends[r]));
  }

 private:
  Tensor data_, ends_;
};

}  // namespace kvkeep
