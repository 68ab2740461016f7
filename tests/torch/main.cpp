#include <gtest/gtest.h>

#include "kvkeep/core/parallel.h"
#include "kvkeep/torch.h"

namespace {

// Before main(), so that this program would notice if including the header did it.
const bool threads_before = kvkeep::detail::threads.load() != nullptr;

TEST(UseTorch, RunsLoopsOnItsThreadsOnceItIsCalled) {
  EXPECT_FALSE(threads_before) << "including kvkeep/torch.h changed the process";
  EXPECT_NE(kvkeep::detail::threads.load(), nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  kvkeep::use_torch();
  return RUN_ALL_TESTS();
}
