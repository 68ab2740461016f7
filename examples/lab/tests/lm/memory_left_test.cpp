// SPDX-License-Identifier: Apache-2.0
#include "kvlab/memory_left.h"

#include <gtest/gtest.h>

#include "message_of.h"

namespace kvkeep::memory_left_test {
namespace {

TEST(MemoryLeft, SaysWhatIsNeededAndWhatThereIs) {
  lm::require_memory("make cache", "a cache", 1024, "fewer tokens", 1024);
  EXPECT_EQ(testing::message_of<InvalidArgument>(
                [] { lm::require_memory("make cache", "a cache", 1.5 * (1 << 30), "fewer tokens", 1 << 20); }),
            "make cache: a cache takes 1.5 GiB, and 1 MiB of memory is left on this machine; allowed fewer tokens");
  EXPECT_EQ(lm::shown_bytes(0), "0 B");
  EXPECT_EQ(lm::shown_bytes(1e30).substr(lm::shown_bytes(1e30).size() - 4), " TiB");
}

TEST(MemoryLeft, IsSomethingAndNotMoreThanAMachineHas) {
  EXPECT_GT(lm::memory_left(), std::int64_t{1} << 20);
#ifdef __linux__
  EXPECT_LT(lm::memory_left(), std::int64_t{1} << 50);
#endif
}

}  // namespace
}  // namespace kvkeep::memory_left_test
