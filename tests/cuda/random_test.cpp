// Random scores on a GPU against the CPU, bit for bit.

#include "random.h"

#include "evidence_case.h"

namespace kvkeep::cuda {
namespace {

using RandomKernel = OnDevice;

void expect_as_on_cpu(const EvidenceCase& c, std::int64_t seed) {
  WindowAttention unused;
  const Scores want = RandomScorer({seed}).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    const DeviceEvidence there(c);
    const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
    launch_random({.evidence = there.arguments(), .seed = seed, .scores = scores.data()}, nullptr);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, scores.download(), want.data.data<float>(), 0, 0));
  });
}

TEST_F(RandomKernel, DrawsWhatTheCpuDraws) {  // B29
  std::uint64_t seed = 0;
  expect_as_on_cpu(EvidenceCase(++seed, {.dim = 1, .lengths = {}}), 1);
  for (const std::int64_t of_scorer : {std::int64_t{0}, std::int64_t{42}, std::int64_t{1} << 62})
    for (const std::int32_t length : {0, 1, 2, 37, 256, 1023, 1024, 1025, 2311}) {
      EvidenceCase c(++seed, {.kv_heads = 3, .dim = 1, .lengths = {length, 7, 0}, .ragged = true});
      for (Row& row : c.table.rows) row.layer = 5 + row.head;
      expect_as_on_cpu(c, of_scorer);
    }
}

TEST_F(RandomKernel, LeavesRowsAloneThatAreNotDue) {
  EvidenceCase c(100, {.kv_heads = 2, .dim = 1, .lengths = {30, 20}});
  c.limits.rows[1].due = c.limits.rows[2].due = false;
  expect_as_on_cpu(c, 3);
}

}  // namespace
}  // namespace kvkeep::cuda
