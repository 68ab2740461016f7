// TOVA on a GPU against the CPU, from the same attention of the newest query.

#include "tova.h"

#include "evidence_case.h"

namespace kvkeep::cuda::tova_test {
namespace {

using TovaKernel = OnDevice;

void expect_as_on_cpu(const EvidenceCase& c, bool all_heads) {
  const Evidence evidence = c.evidence();
  const WindowAttention seen = window_attention(evidence, row_windows(evidence, c.limits, 1, false), {.newest = true});
  const std::vector<float> newest(seen.newest.data<float>(), seen.newest.data<float>() + c.table.slots);
  const std::vector<RowWindow> host = seen.windows;
  const Scores want =
      Tova({all_heads ? TovaOptions::Heads::all : TovaOptions::Heads::group}).score(evidence, c.limits, seen);
  in_every_order([&] {
    const DeviceEvidence there(c);
    const DeviceArray<RowWindow> windows(host);
    const DeviceArray<float> read(newest);
    const DeviceArray<float> scores(std::vector<float>(newest.size(), kUntouched));
    launch_tova({.evidence = there.arguments(),
                 .windows = windows.data(),
                 .all_heads = all_heads,
                 .newest = read.data(),
                 .scores = scores.data()},
                nullptr);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, scores.download(), want.data.data<float>(), 0, 2e-7));
  });
}

TEST_F(TovaKernel, AgreesWithTheCpuForEveryNumberOfHeads) {
  std::uint64_t seed = 0;
  for (const std::int32_t kv_heads : {1, 2, 3, 8})
    for (const std::int32_t seen : {0, 1, 3}) {
      expect_as_on_cpu(
          EvidenceCase(++seed, {.group = 2, .kv_heads = kv_heads, .dim = 8, .lengths = {40, 7, 0}, .seen = seen}),
          true);
      expect_as_on_cpu(
          EvidenceCase(
              ++seed,
              {.group = 2, .kv_heads = kv_heads, .dim = 8, .lengths = {40, 7, 0}, .seen = seen, .ragged = true}),
          false);
    }
  for (const std::int32_t length : {1023, 1024, 1025, 2300})
    expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 2, .dim = 4, .lengths = {length}, .seen = 1}), true);
}

TEST_F(TovaKernel, LeavesRowsAloneThatAreNotDue) {
  EvidenceCase c(100, {.kv_heads = 2, .dim = 8, .lengths = {30, 20}, .seen = 1});
  c.limits.rows[2].due = c.limits.rows[3].due = false;
  expect_as_on_cpu(c, true);
  c.limits.rows[2].due = true;
  expect_as_on_cpu(c, false);
}

}  // namespace
}  // namespace kvkeep::cuda::tova_test
