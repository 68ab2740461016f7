// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How the benchmarks measure time.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace kvkeep {

inline double milliseconds(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace kvkeep
