// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How much of a block table belongs to a sequence.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvkeep/core/row.h"

namespace kvkeep::cuda {

/// Pages of the longest row of every sequence of a step, by its index: all of its rows share their pages. One pass over
/// the rows. Empty for a dense cache.
[[nodiscard]] inline std::vector<std::int64_t> pages_of_sequences(const RowTable& table) {
  std::vector<std::int64_t> pages;
  if (table.page_size == 0) return pages;
  for (const Row& row : table.rows) {
    const auto sequence = static_cast<std::size_t>(row.sequence);
    if (sequence >= pages.size()) pages.resize(sequence + 1);
    pages[sequence] = std::max(pages[sequence], (std::int64_t{row.length} + table.page_size - 1) / table.page_size);
  }
  return pages;
}

}  // namespace kvkeep::cuda
