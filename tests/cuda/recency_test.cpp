// Recency on a GPU against the CPU.

#include "recency.h"

#include "evidence_case.h"

namespace kvkeep::cuda {
namespace {

using RecencyKernel = OnDevice;

void expect_as_on_cpu(const EvidenceCase& c) {
  WindowAttention unused;
  const Scores want = Recency().score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    const DeviceEvidence there(c);
    const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
    launch_recency({.evidence = there.arguments(), .scores = scores.data()}, nullptr);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, scores.download(), want.data.data<float>(), 0, 0));
  });
}

TEST_F(RecencyKernel, CountsTheSlotsOfEveryRow) {  // B29
  std::uint64_t seed = 0;
  expect_as_on_cpu(EvidenceCase(++seed, {.dim = 1, .lengths = {}}));
  for (const std::int32_t length : {0, 1, 2, 31, 255, 256, 257, 1023, 1024, 1025, 2311})
    expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 3, .dim = 1, .lengths = {length, 7, 0}, .ragged = true}));
}

TEST_F(RecencyKernel, LeavesRowsAloneThatAreNotDue) {
  EvidenceCase c(100, {.kv_heads = 2, .dim = 1, .lengths = {30, 20}});
  c.limits.rows[1].due = c.limits.rows[2].due = false;
  expect_as_on_cpu(c);
}

}  // namespace
}  // namespace kvkeep::cuda
