// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "kvkeep/core/parallel.h"
#include "kvkeep/torch.h"

namespace {

// Before main(), so that this program would notice if including the header did it.
const bool threads_before = kvkeep::detail::threads != nullptr;

TEST(UseTorch, LendsItsThreadsToWhoAsks) {
  EXPECT_FALSE(threads_before) << "including kvkeep/torch.h changed the process";
  ASSERT_NE(kvkeep::detail::threads, nullptr);
  EXPECT_EQ(kvkeep::detail::threads->run, kvkeep::torch_threads().run);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  kvkeep::use_torch();
  const kvkeep::UsingThreads threads(kvkeep::torch_threads());
  return RUN_ALL_TESTS();
}
