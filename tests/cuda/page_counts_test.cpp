// SPDX-License-Identifier: Apache-2.0
// What an event tells a device of its block tables, with one look at each row.

#if defined(KVKEEP_CUDA_MODEL)

#include "page_counts.h"

#include <gtest/gtest.h>

namespace kvkeep::cuda::page_counts_test {
namespace {

TEST(PagesOfSequences, AreThoseOfTheLongestRowOfEachInOnePass) {
  RowTable table;
  EXPECT_TRUE(pages_of_sequences(table).empty()) << "dense";
  table.page_size = 16;
  EXPECT_TRUE(pages_of_sequences(table).empty()) << "no rows";
  // Rows of a layer, sequence by sequence, then those of the next layer.
  for (const auto& [sequence, length] :
       {std::pair{0, 16}, {0, 3}, {1, 0}, {1, 0}, {2, 33}, {0, 1}, {0, 17}, {1, 0}, {2, 32}})
    table.rows.push_back({.sequence = sequence, .length = length});
  EXPECT_EQ(pages_of_sequences(table), (std::vector<std::int64_t>{2, 0, 3}));
}

}  // namespace
}  // namespace kvkeep::cuda::page_counts_test

#endif
