// SPDX-License-Identifier: Apache-2.0
// Window scorers on a GPU against the CPU: one body, from queries to scores, as an event of a keeper runs them.

#include <memory>

#include "engines.h"
#include "fresh_accelerator.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/row_scorer.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/vase.h"
#include "row_body.h"
#include "value_case.h"

namespace kvkeep::cuda::window_scorers_test {
namespace {

using WindowScorers = OnDevice;
using OneScorer = std::unique_ptr<Scorer>;

/// Every window scorer that the library has, in every style.
std::vector<OneScorer> all_of(std::int32_t window, std::int32_t pool) {
  std::vector<OneScorer> all;
  all.push_back(std::make_unique<Tova>(TovaOptions{.heads = TovaOptions::Heads::group}));
  for (const auto style : {SnapKVOptions::Style::snapkv, SnapKVOptions::Style::rkv})
    all.push_back(std::make_unique<SnapKV>(SnapKVOptions{.window = window, .pool = pool, .style = style}));
  for (const auto style : {RpcOptions::Style::fixed, RpcOptions::Style::official})
    all.push_back(std::make_unique<Rpc>(RpcOptions{.window = window, .pool = pool, .style = style}));
  all.push_back(std::make_unique<H2O>(H2OOptions{.window = window}));
  all.push_back(std::make_unique<Defensive>(DefensiveOptions{.window = window, .pool = pool}));
  all.push_back(std::make_unique<Vase>(VaseOptions{.window = window, .pool = pool, .seed = 3}));
  return all;
}

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

/// Scores of an event on the device; of rows that are not due what expect_rows_agree() takes for untouched. usage: the
/// policy reads the attention of as many queries.
std::vector<float> on_device(const EvidenceCase& c, const ValueCase& values, const Scorer& scorer,
                             std::int32_t usage = 0, std::int64_t gap = 0) {
  const DeviceEvidence there(c, {.gap = gap});
  const DeviceValues of_values(c, there, values, {.gap = gap});
  const std::shared_ptr<Machine> machine = fresh_accelerator();
  RowTable table = c.table;
  table.device = machine->device();
  table.key_dtype = stored_dtype(c.shape.keys);
  table.rows = of_values.host_rows();
  std::vector<std::vector<std::int32_t>> newest(table.groups.size());  // what came after the last event: every query
  for (std::size_t g = 0; g < table.groups.size(); ++g) {
    RowGroup& group = table.groups[g];
    group.queries = there.queries()[g];
    for (std::int32_t i = 0; !c.shape.gaps && i < group.queries.count; ++i)
      newest[g].push_back(group.next_position - group.queries.count + i);
    group.newest = newest[g];
  }
  const Evidence given = c.evidence(), evidence{c.spec, table, given.basis};
  const Needs needs = scorer.needs();
  const Flat flat;
  const std::unique_ptr<Event> event =
      machine->begin(evidence, c.limits, Demand{"test", needs, scorer, flat, Sharing::per_layer_per_head});
  WindowAttention seen;
  if (usage > 0)
    seen = event->attend(usage, false, {.usage = true});
  else if (scorer.shares().newest)
    seen = event->attend(1, false, scorer.shares());
  const Scores scores = event->score(scorer, seen);
  std::vector<float> got(static_cast<std::size_t>(table.slots));
  if (!got.empty())
    expect(cudaMemcpy(got.data(), scores.data.data<float>(), got.size() * sizeof(float), cudaMemcpyDeviceToHost));
  if (scorer.accumulates()) return got;
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    if (!c.limits.rows[r].due) std::fill_n(got.begin() + table.rows[r].first, table.rows[r].length, kUntouched);
  return got;
}

struct How {
  std::int64_t gap = 0;  ///< bytes between the vectors of two slots
  std::int32_t usage = 0;
  Element values = Element::f32;
};

void expect_as_on_cpu(EvidenceCase& c, const Scorer& scorer, const How& how = {}) {
  SCOPED_TRACE(text(scorer.name(), ", ", c.description()));
  const ValueCase values(9, c, how.values);
  const Scores want = scorer.score(c.evidence(), c.limits, {});
  EvidenceCase compared = c;
  if (scorer.accumulates())
    for (RowLimit& limit : compared.limits.rows) limit.due = true;
  const bool coarse = c.shape.keys == Element::bf16;
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(compared, on_device(c, values, scorer, how.usage, how.gap),
                                              want.data.data<float>(), 1e-6, coarse ? 1e-4 : 2e-5));
  });
}

TEST_F(WindowScorers, AgreeWithTheCpuForEveryPoolGroupAndElement) {
  std::uint64_t seed = 0;
  for (const std::int32_t pool : {1, 5})
    for (const std::int32_t group : {1, 3})
      for (const Element keys : kStored)
        for (const std::int32_t seen : {0, 1, 9}) {
          const EvidenceShape shape{
              .group = group, .kv_heads = 2, .dim = 16, .seen = seen, .keys = keys, .pre_rope = true};
          EvidenceShape ragged = shape, tallied = shape;
          ragged.logit_cap = pool > 1 && seen > 1 ? 2 : 0;
          ragged.lengths = {50, 9, 1, 0};
          ragged.ragged = true;
          tallied.lengths = {50, std::max(seen, 1)};
          tallied.gaps = false;
          EvidenceCase c(++seed, ragged), counted(seed, tallied);
          count_before(counted, seed);
          for (const OneScorer& scorer : all_of(6, pool)) expect_as_on_cpu(c, *scorer);
          expect_as_on_cpu(counted, H2O({6}));
          if (HasFailure()) return;
        }
}

TEST_F(WindowScorers, AgreeWithTheCpuForEveryLengthAndWindow) {  // B29
  std::uint64_t seed = 100;
  for (const std::int32_t length : {2, 3, 7, 31, 64, 65, 127, 257, 1023, 1024, 1025, 2300})
    for (const std::int32_t window : {1, 4}) {
      EvidenceCase c(++seed, {.kv_heads = 2, .dim = 4, .lengths = {length}, .seen = 5});
      for (const OneScorer& scorer : all_of(window, 5)) expect_as_on_cpu(c, *scorer);
      if (HasFailure()) return;
    }
}

TEST_F(WindowScorers, KnowEveryHeadSizeAndVectorsThatAreNotAligned) {  // B24, B25
  std::uint64_t seed = 200;
  for (const Element keys : kStored)
    for (const std::int32_t dim : {1, 7, 64, 256}) {
      ++seed;
      EvidenceCase c(
          seed,
          {.group = 4, .kv_heads = 2, .dim = dim, .lengths = {67, 33}, .seen = 8, .keys = keys, .gaps = seed % 2 == 0});
      if (!c.shape.gaps) count_before(c, seed);
      for (const OneScorer& scorer : all_of(8, 3)) expect_as_on_cpu(c, *scorer, {.gap = 4, .values = Element::bf16});
      if (HasFailure()) return;
    }
}

TEST_F(WindowScorers, LeaveRowsOutThatAreNotDueAndBringTalliesUpToDate) {
  EvidenceCase c(400, {.group = 2, .kv_heads = 3, .dim = 8, .lengths = {30, 20}, .seen = 4, .gaps = false});
  count_before(c, 5);
  c.limits.rows[1].due = c.limits.rows[3].due = false;
  for (const OneScorer& scorer : all_of(4, 3)) expect_as_on_cpu(c, *scorer);
}

TEST_F(WindowScorers, TakeTheAttentionOfThePolicyIfItHasTheSameWindow) {
  EvidenceCase c(500, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {90, 33}, .seen = 8});
  for (const std::int32_t usage : {5, 6}) expect_as_on_cpu(c, SnapKV({.window = 6, .pool = 3}), {.usage = usage});
}

TEST_F(WindowScorers, CountFromTheProtectedOldestSlotsOn) {
  EvidenceCase c(300, {.group = 2, .dim = 8, .lengths = {40, 40}, .seen = 6});
  c.limits.rows[0].guarded = {12, 4};
  c.limits.rows[1] = {40, true, {40, 0}};  // nothing is left of the history
  expect_as_on_cpu(c, Rpc({.window = 4, .pool = 3, .style = RpcOptions::Style::official}));
}

TEST_F(WindowScorers, AddTheQueriesAfterTheTallyAndNoOther) {
  for (std::int32_t tallied = 0; tallied <= 30; ++tallied) {
    EvidenceCase c(200, {.group = 2, .dim = 8, .lengths = {30}, .seen = 30, .gaps = false});
    c.tallies[0].assign(static_cast<std::size_t>(tallied), 0.5F);
    c.settle();
    expect_as_on_cpu(c, H2O({20}));
    const std::vector<float> got = on_device(c, ValueCase(9, c, Element::f32), H2O({20}));
    double sum = 0;
    for (const float x : got) sum += static_cast<double>(x);
    EXPECT_NEAR(sum, 0.5 * tallied + std::min(20, 30 - tallied), 1e-3) << "every query gives 1 in all";
  }
}

TEST_F(WindowScorers, PoolTheWorstCaseOverAnyNumberOfNeighbours) {
  std::uint64_t seed = 600;
  for (const std::int32_t pool : {3, 129, 511, 513, 1025, 4095})
    for (const Element keys : {Element::f32, Element::bf16, Element::i8}) {
      EvidenceCase c(++seed, {.group = 3, .kv_heads = 2, .dim = 16, .lengths = {1100, 40}, .seen = 9, .keys = keys});
      expect_as_on_cpu(c, Defensive({.window = 9, .pool = pool}));
      if (HasFailure()) return;
    }
}

TEST_F(WindowScorers, KeepTheWidestValuesOfThoseThatCompete) {
  std::uint64_t seed = 700;
  for (const Element values : {Element::f32, Element::f16, Element::bf16})
    for (const double share : {0.0, 0.25, 0.9, 1.0}) {
      EvidenceCase c(++seed, {.kv_heads = 2, .dim = 8, .value_dim = 3, .lengths = {300, 40}, .seen = 5});
      for (RowLimit& limit : c.limits.rows) limit = {200, true, {3, 7}};
      c.limits.rows[2].budget = c.limits.rows[3].budget = 39;
      expect_as_on_cpu(c, Vase({.window = 4, .values_share = share}), {.values = values});
      if (HasFailure()) return;
    }
}

TEST_F(WindowScorers, DrawAndRankEqualValuesAsTheCpuDoes) {
  EvidenceCase c(800, {.dim = 4, .value_dim = 2, .lengths = {600}, .seen = 3});
  c.limits.rows[0] = {400, true, {2, 5}};
  ValueCase values(1, c, Element::f32);
  for (const std::int64_t t : {10, 11, 250, 599}) values.copy(0, 9, t);
  values.set(0, 20, 1, std::nanf(""));
  values.set(0, 21, 0, HUGE_VALF);
  const Vase vase({.window = 2, .values_share = 0.6});
  const Scores want = vase.score(c.evidence(), c.limits, {});
  in_every_order([&] { expect_rows_agree(c, on_device(c, values, vase), want.data.data<float>(), 0, 2e-5); });
}

/// A scorer that the library does not have, with the body of one that it has.
class Outside final : public WindowScorer<Outside, TovaOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "outside-newest", .what = "as tova", .source = "none"};
  using WindowScorer::WindowScorer;
};

TEST_F(WindowScorers, FromOutsideRunOnceTheyAreRegistered) {
  const Outside scorer({TovaOptions::Heads::group});
  const Flat flat;
  const Needs needs = scorer.needs();
  const std::shared_ptr<Machine> machine = fresh_accelerator();
  const Demand demand{"test", needs, scorer, flat, Sharing::per_layer_per_head};
  ASSERT_EQ(machine->problems(demand, engines::model()).size(), 1U);
  EXPECT_NE(machine->problems(demand, engines::model()).front().find("scorer outside-newest has no kernel"),
            std::string::npos);
  register_scorer<Outside>();
  EXPECT_TRUE(machine->problems(demand, engines::model()).empty());
  EvidenceCase c(7, {.kv_heads = 2, .dim = 8, .lengths = {90, 20}, .ragged = true});
  expect_as_on_cpu(c, scorer);
}

}  // namespace
}  // namespace kvkeep::cuda::window_scorers_test
