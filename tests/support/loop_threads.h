// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Threads of kvkeep's loops, for tests.

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/keeper/thread_pool.h"

namespace kvkeep::testing {

/// While it lives, loops of this thread run in this many parts, each on a thread of its own; one: on this thread.
class LoopThreads {
 public:
  explicit LoopThreads(int count) : pool_(count), using_(pool_.threads()) {}

 private:
  ThreadPool pool_;
  UsingThreads using_;
};

/// Loops call their body for every part once, for none if there is nothing to do, and throw what it throws.
inline void expect_every_part_once() {
  std::vector<int> seen(1000);
  parallel_for(0, 1000, 7, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(seen, std::vector<int>(1000, 1));
  parallel_for(5, 5, 1, [](std::int64_t, std::int64_t) { FAIL() << "there is nothing to do"; });
  EXPECT_THROW(parallel_for(0, 100, 1, [](std::int64_t, std::int64_t) { throw InvalidArgument("as thrown"); }),
               InvalidArgument);
}

}  // namespace kvkeep::testing
