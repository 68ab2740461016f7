// SPDX-License-Identifier: Apache-2.0
// Scorers of one row on a GPU against the CPU: one body, so the same bits.

#include <algorithm>

#include "engines.h"
#include "evidence_case.h"
#include "fresh_accelerator.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "row_body.h"

namespace kvkeep::cuda::row_bodies_test {
namespace {

using RowBodies = OnDevice;

template <class S>
std::vector<float> on_device(const EvidenceCase& c, const S& scorer, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  launch_row_body<typename S::Options>(
      {{.evidence = there.arguments(), .value_dim = c.spec.value_dim, .scores = scores.data()}, scorer.options()},
      nullptr);
  return scores.download();
}

template <class S>
void expect_as_on_cpu(const EvidenceCase& c, const S& scorer, DeviceLayout layout = {}) {
  const Scores want = scorer.score(c.evidence(), c.limits, {});
  const bool norms = std::is_same_v<S, Knorm>;  // added up in an order of their own
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, scorer, layout), want.data.data<float>(),
                                              norms ? 1e-9 : 0, norms ? 1e-6 : 0));
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
      expect_as_on_cpu(c, RandomAttention({of_scorer}));
    }
}

TEST_F(RowBodies, ReadTheScoresThatTheEngineGave) {
  std::uint64_t seed = 40;
  for (const std::int32_t length : kLengths) {
    EvidenceCase c(++seed, {.kv_heads = 3, .dim = 1, .lengths = {length, 7, 0}, .ragged = true});
    oracle::Random random(seed);
    for (std::size_t r = 0; r < c.table.rows.size(); ++r)
      for (std::int32_t t = 0; t < c.table.rows[r].length; ++t)
        c.given_scores[r].push_back(random.chance(0.1) ? std::nanf("") : static_cast<float>(random.normal()));
    c.settle();
    expect_as_on_cpu(c, Given());
  }
}

TEST_F(RowBodies, LeaveRowsAloneThatAreNotDue) {
  EvidenceCase c(100, {.kv_heads = 2, .dim = 1, .lengths = {30, 20}});
  c.limits.rows[1].due = c.limits.rows[2].due = false;
  expect_as_on_cpu(c, Recency());
  expect_as_on_cpu(c, RandomScorer({3}));
}

TEST_F(RowBodies, FindTheNormOfEveryKeyForEveryHeadSizeElementAndLength) {  // B25, B29
  std::uint64_t seed = 500;
  for (const std::int32_t dim : {1, 7, 64, 80, 96, 128, 192, 256})
    for (const Element keys : kStored)
      expect_as_on_cpu(
          EvidenceCase(++seed,
                       {.kv_heads = 2, .dim = dim, .lengths = {37, 0, 1, 32, 33}, .keys = keys, .ragged = true}),
          Knorm());
  for (const std::int32_t length : {1023, 1024, 1025, 2300})
    expect_as_on_cpu(EvidenceCase(++seed, {.dim = 8, .lengths = {length}, .keys = Element::bf16}), Knorm());
}

TEST_F(RowBodies, ReadKeysOfPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 600;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 2, .dim = 48, .lengths = {50, 33}, .keys = keys}), Knorm(),
                         {.gap = gap, .page = page});
}

TEST_F(RowBodies, FindNaNForKeysThatHoldIt) {
  for (const Element keys : {Element::f16, Element::f8_e4m3, Element::f8_e5m2}) {
    EvidenceCase c(700, {.kv_heads = 3, .dim = 20, .lengths = {41}, .keys = keys});
    c.limits.rows[1].due = false;
    c.set_key(2, 7, 19, std::nanf(""));
    expect_as_on_cpu(c, Knorm());
  }
}

TEST_F(RowBodies, GiveEqualKeysEqualBits) {
  for (const Element keys : kStored) {
    EvidenceCase c(800, {.dim = 72, .lengths = {1100}, .keys = keys});
    for (const std::int64_t t : {1, 6, 300, 1099}) c.copy_key(0, 3, t);
    const std::vector<float> got = on_device(c, Knorm());
    for (const std::size_t t : {1, 6, 300, 1099}) ASSERT_EQ(got[t], got[3]) << t;
    EXPECT_EQ(on_device(c, Knorm(), {.gap = element_bytes(keys), .page = 8}), got);
  }
}

TEST_F(RowBodies, RefuseWhatTheyCannotRead) {
  EXPECT_THROW(launch_row_body<KnormOptions>({{.evidence = {.dim = 257}}, {}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_row_body<CurOptions>({{.evidence = {.dim = 8, .keys = Element::i8}}, {}}, nullptr),
               InvalidArgument);
}

/// A scorer that the library does not have, with the body of one that it has.
class Outside final : public RowScorer<Outside, RandomOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "outside-drawn", .what = "random slots", .source = "none"};
  using RowScorer::RowScorer;
};

TEST_F(RowBodies, FromOutsideRunOnceTheyAreRegistered) {
  kvkeep::register_scorer<Outside>();
  const auto policy = make_policy("outside-drawn,budget=48,interval=12");
  const std::shared_ptr<Machine> machine = fresh_accelerator();
  const ModelSpec spec = engines::model();
  ASSERT_EQ(policy->problems_on(*machine, spec).size(), 1U);
  EXPECT_NE(policy->problems_on(*machine, spec).front().find("scorer outside-drawn has no kernel"), std::string::npos);
  register_scorer<Outside>();
  EXPECT_TRUE(policy->problems_on(*machine, spec).empty());
  const EvidenceCase c(7, {.kv_heads = 2, .dim = 1, .lengths = {90, 20}, .ragged = true});
  expect_as_on_cpu(c, Outside({5}));
  engines::DenseEngine cpu("random,budget=48,interval=12", false, Dtype::f32),
      device("outside-drawn,budget=48,interval=12", false, Dtype::f32, machine);
  for (engines::DenseEngine* engine : {&cpu, &device}) {
    oracle::Random random(3);
    engine->join(1);
    static_cast<void>(engine->step(engines::numbers_of(random, {{1, 60}})));
    for (int n = 0; n < 30; ++n) static_cast<void>(engine->step(engines::numbers_of(random, {{1, 1}})));
    EXPECT_GE(engine->keeper.totals().events, 1);
  }
  EXPECT_TRUE(std::ranges::equal(cpu.keeper.positions(1, 0, 0), device.keeper.positions(1, 0, 0)));
}

}  // namespace
}  // namespace kvkeep::cuda::row_bodies_test
