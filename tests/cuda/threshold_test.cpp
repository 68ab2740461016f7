// SPDX-License-Identifier: Apache-2.0
// Slots above a threshold on a GPU: the CPU's counts and slots, ties and NaN included.

#include "select.h"

#include "counted_case.h"
#include "kvkeep/allot/threshold.h"

namespace kvkeep::cuda::threshold_test {
namespace {

using ThresholdKernel = OnDevice;

void expect_as_on_cpu(const CountedCase& c, double threshold) {
  const KeepSet wanted = c.kept_by(Threshold({threshold}));
  std::vector<std::int32_t> most;
  for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
    const std::int32_t length = c.table.rows[r].length;
    most.push_back(c.limits.rows[r].due ? std::min(length, c.limits.rows[r].budget) : length);
  }
  in_every_order([&] {
    const DeviceCounted there(c, most);
    launch_threshold({there.as_allotted(c), static_cast<float>(threshold), there.counts.data()}, nullptr);
    ASSERT_NO_FATAL_FAILURE(there.expect_kept(wanted));
  });
}

TEST_F(ThresholdKernel, KeepsTheSlotsThatTheCpuKeeps) {
  oracle::Random random(31);
  for (int round = 0; round < 120; ++round) {
    SCOPED_TRACE(round);
    CountedCase c(random, random.between(1, 3), random.between(0, 3), {0, 1, 2, 31, 33, 90, 256, 257});
    const double threshold = random.one_of({-1e30, -0.5, 0.0, 0.5, 0.9, 1.0, 1e30});
    Threshold({threshold}).spread(c.evidence(), {}, c.limits.rows);
    for (RowLimit& limit : c.limits.rows) limit.due = limit.due && random.chance(0.9);
    c.protect_some(random);
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, threshold));
  }
}

TEST_F(ThresholdKernel, TakesARowThatNeedsTheLargestBlock) {
  oracle::Random random(32);
  for (const std::int32_t budget : {500, 4000}) {
    CountedCase c(random, 1, 2, {4097, 5003});
    for (RowLimit& limit : c.limits.rows) limit.budget = budget;
    Threshold({0.5}).spread(c.evidence(), {}, c.limits.rows);
    c.protect_some(random);
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, 0.5));
  }
}

}  // namespace
}  // namespace kvkeep::cuda::threshold_test
