// SPDX-License-Identifier: Apache-2.0
// AdaKV on a GPU: the CPU's counts and slots, ties and NaN included.

#include "adaptive_heads.h"

#include "counted_case.h"
#include "kvkeep/allot/adaptive_heads.h"

namespace kvkeep::cuda::adaptive_heads_test {
namespace {

using AdaptiveHeadsKernel = OnDevice;

void make_due(CountedCase& c, const AdaptiveHeads& allocator, oracle::Random& random) {
  allocator.spread(c.evidence(), {}, c.limits.rows);
  for (const RowGroup& group : c.table.groups)
    if (random.chance(0.1))
      for (std::int32_t h = 0; h < c.spec.kv_heads; ++h)
        c.limits.rows[static_cast<std::size_t>(group.first_row + h)].due = false;
  c.protect_some(random);
}

AdaptiveHeadsArguments arguments_of(const CountedCase& c, const DeviceCounted& there, double safeguard) {
  return {there.as_allotted(c), c.spec.kv_heads, safeguard, there.counts.data()};
}

void launch(AdaptiveHeadsArguments a) {
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(adaptive_heads_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_adaptive_heads(a, nullptr);
}

void expect_as_on_cpu(const CountedCase& c, double safeguard) {
  const KeepSet wanted = c.kept_by(AdaptiveHeads({safeguard}));
  const std::vector<std::int32_t> most = cpu::most_across_heads(c.evidence(), c.limits, safeguard);
  in_every_order([&] {
    const DeviceCounted there(c, most);
    launch(arguments_of(c, there, safeguard));
    ASSERT_NO_FATAL_FAILURE(there.expect_kept(wanted));
  });
}

TEST_F(AdaptiveHeadsKernel, KeepsTheSlotsThatTheCpuKeeps) {
  oracle::Random random(21);
  std::int64_t uneven = 0;
  for (int round = 0; round < 160; ++round) {
    SCOPED_TRACE(round);
    const std::int32_t heads = round % 8 + 1;
    CountedCase c(random, heads, random.between(1, 3),
                  round % 5 == 0 ? std::vector<std::int32_t>{0, 1, 2} : std::vector<std::int32_t>{31, 32, 33, 90, 257});
    const double safeguard = random.one_of({0.0, 0.2, 0.5, 1.0});
    make_due(c, AdaptiveHeads({safeguard}), random);
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, safeguard));
    const KeepSet kept = c.kept_by(AdaptiveHeads({safeguard}));
    for (std::size_t r = 1; r < c.table.rows.size(); ++r)
      uneven += c.table.rows[r].head > 0 && c.limits.rows[r].due && kept.count(r) != kept.count(r - 1) ? 1 : 0;
  }
  EXPECT_GT(uneven, 100) << "else heads share nothing";
}

TEST_F(AdaptiveHeadsKernel, CountsTheSlotsWithoutWritingThem) {
  oracle::Random random(22);
  for (int round = 0; round < 20; ++round) {
    CountedCase c(random, random.between(1, 4), 2, {1, 40, 130});
    make_due(c, AdaptiveHeads({0.2}), random);
    const KeepSet wanted = c.kept_by(AdaptiveHeads({0.2}));
    const DeviceCounted there(c, cpu::most_across_heads(c.evidence(), c.limits, 0.2));
    AdaptiveHeadsArguments a = arguments_of(c, there, 0.2);
    a.slots = nullptr;
    a.indptr = nullptr;
    launch(a);
    const std::vector<std::int32_t> counts = there.counts.download();
    for (std::size_t r = 0; r < counts.size(); ++r) ASSERT_EQ(counts[r], wanted.count(r)) << "row " << r;
  }
}

TEST_F(AdaptiveHeadsKernel, TakesHeadsThatNeedTheLargestBlock) {
  oracle::Random random(23);
  for (int round = 0; round < 3; ++round) {
    CountedCase c(random, 2, 1, {4096, 4097, 5003});
    c.limits.rows[0].budget = c.limits.rows[1].budget = 1200;
    AdaptiveHeads({0.2}).spread(c.evidence(), {}, c.limits.rows);
    c.protect_some(random);
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, 0.2));
  }
}

TEST_F(AdaptiveHeadsKernel, RefusesWhatItCannotShare) {
  EXPECT_THROW(launch_adaptive_heads({{}, 1, 1.5}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_adaptive_heads({{.longest = 1 << 15}, 1 << 16}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::adaptive_heads_test
