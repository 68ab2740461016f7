// Scorers of one row on a GPU against the CPU: one body, so the same bits.

#include "evidence_case.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "row_body.h"

namespace kvkeep::cuda {
namespace {

using RowBodies = OnDevice;

template <class S>
void expect_as_on_cpu(const EvidenceCase& c, const S& scorer, Element values = Element::f32) {
  const Scores want = scorer.score(c.evidence(), c.limits, {});
  in_every_order([&] {
    const DeviceEvidence there(c);
    const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
    launch_row_body<typename S::Options>({.evidence = there.arguments(),
                                          .values = values,
                                          .value_dim = c.spec.value_dim,
                                          .body = scorer.options(),
                                          .scores = scores.data()},
                                         nullptr);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, scores.download(), want.data.data<float>(), 0, 0));
  });
}

constexpr std::int32_t kLengths[] = {0, 1, 2, 31, 255, 256, 257, 1023, 1025, 2311};

TEST_F(RowBodies, CountTheSlotsOfEveryRow) {  // B29
  std::uint64_t seed = 0;
  expect_as_on_cpu(EvidenceCase(++seed, {.dim = 1, .lengths = {}}), Recency());
  for (const std::int32_t length : kLengths)
    expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 3, .dim = 1, .lengths = {length, 7, 0}, .ragged = true}),
                     Recency());
}

TEST_F(RowBodies, DrawWhatTheCpuDraws) {  // B29
  std::uint64_t seed = 0;
  for (const std::int64_t of_scorer : {std::int64_t{0}, std::int64_t{42}, std::int64_t{1} << 62})
    for (const std::int32_t length : kLengths) {
      EvidenceCase c(++seed, {.kv_heads = 3, .dim = 1, .lengths = {length, 7, 0}, .ragged = true});
      for (Row& row : c.table.rows) row.layer = 5 + row.head;
      expect_as_on_cpu(c, RandomScorer({of_scorer}));
    }
}

TEST_F(RowBodies, LeaveRowsAloneThatAreNotDue) {
  EvidenceCase c(100, {.kv_heads = 2, .dim = 1, .lengths = {30, 20}});
  c.limits.rows[1].due = c.limits.rows[2].due = false;
  expect_as_on_cpu(c, Recency());
  expect_as_on_cpu(c, RandomScorer({3}));
}

}  // namespace
}  // namespace kvkeep::cuda
