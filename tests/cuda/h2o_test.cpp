// H2O on a GPU against the CPU, from queries and tallies to scores.

#include "h2o.h"

#include "asked_queries.h"

namespace kvkeep::cuda::h2o_test {
namespace {

using H2OKernel = OnDevice;

/// Gives every row a tally of some of its oldest slots: of none, of all, and of what lies between.
void count_before(EvidenceCase& c, std::uint64_t seed) {
  oracle::Random random(seed);
  for (std::size_t r = 0; r < c.tallies.size(); ++r) {
    const std::int32_t length = c.table.rows[r].length;
    c.tallies[r].resize(static_cast<std::size_t>(random.chance(0.2) ? length : random.between(0, length)));
    for (float& x : c.tallies[r]) x = static_cast<float>(random.unit());
  }
  c.settle();
}

std::vector<float> on_device(const EvidenceCase& c, std::int32_t window, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, window);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  H2OArguments arguments{
      .evidence = there.arguments(), .queries = queries.floats().data(), .window = window, .scores = scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(h2o_workspace_bytes(arguments)));
  arguments.workspace = workspace.data();
  launch_h2o(arguments, nullptr);
  return scores.download();
}

void expect_as_on_cpu(const EvidenceCase& c, std::int32_t window, DeviceLayout layout = {}) {
  WindowAttention unused;
  const Scores want = H2O({window}).score(c.evidence(), c.limits, unused);
  EvidenceCase all = c;  // every row counts, due or not
  for (RowLimit& limit : all.limits.rows) limit.due = true;
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(all, on_device(c, window, layout), want.data.data<float>(), 1e-6,
                                              c.shape.keys == Element::bf16 ? 1e-4 : 2e-5));
  });
}

TEST_F(H2OKernel, AgreesWithTheCpuForEveryWindowGroupAndElement) {
  std::uint64_t seed = 0;
  for (const std::int32_t window : {1, 5, 40})
    for (const std::int32_t group : {1, 3})
      for (const Element keys : kStored)
        for (const std::int32_t seen : {0, 9}) {
          EvidenceCase c(++seed, {.group = group,
                                  .kv_heads = 2,
                                  .dim = 16,
                                  .lengths = {50, 9, 1, 0},
                                  .seen = seen,
                                  .keys = keys,
                                  .pre_rope = true,
                                  .ragged = true});
          expect_as_on_cpu(c, window);  // no event before
          count_before(c, seed);
          expect_as_on_cpu(c, window);
        }
}

TEST_F(H2OKernel, AgreesWithTheCpuForEveryLength) {  // B29
  std::uint64_t seed = 100;
  for (const std::int32_t length : {2, 3, 31, 64, 127, 257, 1023, 1024, 1025}) {
    EvidenceCase c(++seed, {.kv_heads = 2, .dim = 4, .lengths = {length}, .seen = 7});
    count_before(c, seed);
    expect_as_on_cpu(c, 6);
  }
}

TEST_F(H2OKernel, AddsTheQueriesAfterTheTallyAndNoOther) {
  for (std::int32_t tallied = 0; tallied <= 30; ++tallied) {
    EvidenceCase c(200, {.group = 2, .dim = 8, .lengths = {30}, .seen = 30, .gaps = false});
    c.tallies[0].assign(static_cast<std::size_t>(tallied), 0.5F);
    c.settle();
    expect_as_on_cpu(c, 20);
    const std::vector<float> got = on_device(c, 20);
    double sum = 0;
    for (const float x : got) sum += static_cast<double>(x);
    EXPECT_NEAR(sum, 0.5 * tallied + std::min(20, 30 - tallied), 1e-3) << "every query gives 1 in all";
  }
}

TEST_F(H2OKernel, ReadsPagesAndKnowsEveryHeadSize) {  // B21, B25
  std::uint64_t seed = 300;
  for (const Element keys : kStored)
    for (const std::int32_t dim : {1, 7, 64, 256}) {
      EvidenceCase c(++seed, {.group = 4, .kv_heads = 2, .dim = dim, .lengths = {67, 33}, .seen = 8, .keys = keys});
      count_before(c, seed);
      expect_as_on_cpu(c, 8, {.gap = 4, .page = 16});
    }
}

TEST_F(H2OKernel, BringsRowsUpToDateThatAreNotDue) {
  EvidenceCase c(400, {.group = 2, .kv_heads = 3, .dim = 8, .lengths = {30, 20}, .seen = 4});
  count_before(c, 5);
  c.limits.rows[1].due = c.limits.rows[3].due = false;
  expect_as_on_cpu(c, 4);
  EXPECT_THROW(launch_h2o({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::h2o_test
