// SPDX-License-Identifier: Apache-2.0
// What stays whatever it scores, and that a scorer chooses the rest: reports count it.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engines.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/pins.h"

namespace kvkeep::retention_test {
namespace {

using namespace engines;

const Evict& evicts(const std::unique_ptr<KVPolicy>& policy) { return dynamic_cast<const Evict&>(*policy); }

/// One row of `length` slots, of which a prompt of `prompt` tokens is the oldest; no data.
RowLimit limit_of(const std::string& policy, std::int32_t length, std::int32_t prompt = 0) {
  ModelSpec spec = model();
  spec.query_heads = spec.kv_heads = 1;
  spec.layers.resize(1);
  Ints positions(static_cast<std::size_t>(length));
  std::iota(positions.begin(), positions.end(), 0);
  RowTable table;
  table.groups.push_back(
      {.queries = {}, .next_position = length, .prompt_end = prompt, .seen = {length}, .prompt = {prompt}});
  table.rows.push_back(
      {.length = length, .keys = {.width = 16}, .values = {.width = 16}, .positions = positions.data()});
  table.slots = length;
  const std::unique_ptr<KVPolicy> made = make_policy(policy);
  return evicts(made).limits({.spec = spec, .table = table}).rows[0];
}

TEST(Retention, RecentThatIsNotStatedIsAtMostAQuarterOfTheBudget) {
  for (const auto& [budget, recent] :
       std::map<int, int>{{5, 1}, {7, 1}, {8, 2}, {24, 6}, {127, 31}, {128, 32}, {4096, 32}}) {
    const std::string policy = text("keydiff,budget=", budget);
    EXPECT_EQ(evicts(make_policy(policy)).guarded(budget).recents, recent) << budget;
    EXPECT_EQ(limit_of(policy, 5000).guarded.recents, recent) << budget;
    EXPECT_EQ(limit_of(policy + ",recent=32", 5000).guarded.recents, std::min(32, budget - 4)) << "stated";
    EXPECT_EQ(limit_of(policy + ",recent=0", 5000).guarded.recents, 0) << "stated";
  }
  EXPECT_EQ(24 - evicts(make_policy("tova,budget=24")).guarded(24).count(), 14);
}

TEST(Retention, TheQuarterIsOfTheBudgetAsTheEventResolvesIt) {
  EXPECT_EQ(limit_of("keydiff,ratio=0.9", 400).guarded.recents, 10);
  EXPECT_EQ(limit_of("keydiff,ratio=0.9", 2000).guarded.recents, 32);
  EXPECT_EQ(limit_of("keydiff,bytes=1280", 400).guarded.recents, 10) << "40 slots of 32 bytes";
  EXPECT_EQ(limit_of("keydiff,budget=24,interval=10,growth=8", 50).guarded.recents, (24 + 8 * 4) / 4);
  EXPECT_EQ(limit_of("keydiff,budget=24,variant=official,recent=16", 50).guarded.recents, 16);
}

TEST(Retention, AProtectedPromptLeavesTheScorerASay) {
  const auto chosen = [](const RowLimit& limit) { return limit.budget - limit.guarded.count(); };
  const RowLimit beside = limit_of("keydiff,budget=100,protect_prompt=true", 400, 60);
  EXPECT_EQ(beside.budget, 100);
  EXPECT_EQ(beside.guarded.sinks, 60);
  EXPECT_EQ(beside.guarded.recents, 10);
  const RowLimit raised = limit_of("keydiff,budget=24,protect_prompt=true", 400, 60);
  EXPECT_EQ(raised.budget, 60 + 32) << "a prompt that does not fit leaves 32 slots more";
  EXPECT_EQ(chosen(raised), 32 - 8);
  EXPECT_EQ(chosen(limit_of("keydiff,budget=24,protect_prompt=true,recent=16", 400, 60)), 0) << "stated";
  const RowLimit decoded = limit_of("keydiff,budget=40,protect_prompt=true,budget_counts=decoded", 400, 60);
  EXPECT_EQ(decoded.budget, 100);
  EXPECT_EQ(decoded.guarded.recents, 10);
}

TEST(Retention, TheQuarterIsThePolicysAndNotThatOfALayersShare) {
  ModelSpec spec = model();
  spec.query_heads = spec.kv_heads = 1;
  Ints positions(300);
  std::iota(positions.begin(), positions.end(), 0);
  RowTable table;
  for (std::int32_t l = 0; l < kLayers; ++l) {
    table.groups.push_back({.layer = l, .first_row = l, .queries = {}, .next_position = 300, .seen = {300}});
    table.rows.push_back({.layer = l, .length = 300, .first = 300 * l, .positions = positions.data()});
  }
  table.slots = 600;
  const std::unique_ptr<KVPolicy> policy = make_policy("pyramidkv-keydiff,budget=40,sink=0");
  const Limits limits = evicts(policy).limits({.spec = spec, .table = table});
  EXPECT_GT(limits.rows[0].budget, limits.rows[1].budget);
  for (const RowLimit& limit : limits.rows) EXPECT_EQ(limit.guarded.recents, std::min(10, limit.budget));
}

TEST(Retention, AnUnstatedRecentStaysUnstatedInJson) {
  const auto policy = make_policy("tova,budget=24");
  EXPECT_FALSE(nlohmann::json::parse(policy->to_json()).contains("recent")) << policy->to_json();
  const auto again = make_policy_from_json(policy->to_json());
  EXPECT_EQ(again->to_json(), policy->to_json());
  EXPECT_EQ(evicts(again).guarded(24).recents, 6);
  const auto stated = make_policy_from_json(make_policy("tova,budget=24,recent=32")->to_json());
  EXPECT_EQ(evicts(stated).guarded(24).recents, 20);
}

/// Slots of the newest cut, in all rows, and how many of them the scorer chose.
std::pair<std::int64_t, std::int64_t> newest_cut(const std::string& policy, std::int32_t prompt, bool pins = false) {
  DenseEngine engine(policy, true, Dtype::f32);
  engine.no_say = true;
  oracle::Random random(7);
  engine.join(1);
  std::int64_t kept = 0, chosen = 0;
  Report report = engine.step(numbers_of(random, {{1, prompt}}));
  if (pins) engine.keeper.part<parts::Pins>().pin(1, 10, 15);
  for (int n = 0; n < 40; ++n) {
    const Report next = engine.step(numbers_of(random, {{1, 1}}));
    if (next.cuts.empty()) continue;
    report = next;
    const std::int64_t slots = std::accumulate(engine.lengths.at(1).begin(), engine.lengths.at(1).end(), 0LL);
    EXPECT_EQ(report.cuts[0].slots_after, slots);
    EXPECT_EQ(report.slots_kept, slots);
    EXPECT_EQ(report.slots_chosen, report.cuts[0].slots_chosen);
    kept += report.slots_kept, chosen += report.slots_chosen;
  }
  EXPECT_GE(engine.keeper.totals().events, 2);
  EXPECT_EQ(engine.keeper.totals().slots_kept, kept);
  EXPECT_EQ(engine.keeper.totals().slots_chosen, chosen);
  return {report.slots_kept, report.slots_chosen};
}

TEST(Retention, ReportsCountTheSlotsThatTheScorerChose) {
  using Counts = std::pair<std::int64_t, std::int64_t>;
  const auto all = [](std::int64_t kept, std::int64_t chosen) { return Counts{kRows * kept, kRows * chosen}; };
  EXPECT_EQ(newest_cut("tova,budget=24,interval=8", 30), all(24, 14));
  EXPECT_EQ(newest_cut("ams-keydiff,budget=24,interval=8,sink=3,recent=5,min_segment=2", 30), all(24, 16));
  EXPECT_EQ(newest_cut("tova,budget=24,interval=8,recent=20", 30), all(24, 0));
  EXPECT_EQ(newest_cut("tova,budget=24,interval=8,sink=2,recent=4", 30, true), all(24, 24 - 2 - 4 - 5)) << "pinned";
  EXPECT_EQ(newest_cut("tova,budget=48,interval=8,protect_prompt=true,recent=4", 30), all(48, 48 - 30 - 4));
  EXPECT_EQ(newest_cut("keydiff,budget=24,interval=8,sink=4,recent=4,variant=official", 30), all(24, 16));
  EXPECT_EQ(newest_cut("tova,budget=24,interval=8,sink=4,recent=0,variant=official", 30), all(24, 19))
      << "its newest slot ranks first";
  EXPECT_EQ(newest_cut("pyramidkv-keydiff,budget=24,interval=8,sink=2,recent=4", 30), (Counts{96, 2 * (46 - 6)}))
      << "its last layer has room for sinks alone";
  EXPECT_EQ(newest_cut("adakv-tova,budget=24,interval=8,sink=2,recent=4", 30), all(24, 18));
  EXPECT_EQ(newest_cut("snapkv,budget=24,interval=8", 30), all(24, 0)) << "its window never goes";
}

TEST(Retention, ARowThatKeepsEverythingCountsAsChosenByNobody) {
  DenseEngine engine("keydiff,budget=24,interval=8,sink=2,recent=4,prefill=cut", true, Dtype::f32);
  oracle::Random random(9);
  engine.join(1);
  const Report cut = engine.step(numbers_of(random, {{1, 40}}));
  ASSERT_EQ(cut.cuts.size(), 1U);
  EXPECT_EQ(cut.slots_chosen, kRows * 18);
  const std::unique_ptr<KVPolicy> policy = make_policy("keydiff,budget=24,sink=2,recent=4");
  Decision decision;
  decision.keep = KeepSet{{}, {0, 20, 44}};
  decision.guarded = {20, 6};
  EXPECT_EQ(decision.chosen(0), 0);
  EXPECT_EQ(decision.chosen(1), 18);
}

TEST(Retention, ASmallBudgetIsNoLongerStreaming) {
  const auto kept = [](const std::string& policy) {
    DenseEngine engine(policy, false, Dtype::f32);
    engine.no_say = true;
    oracle::Random random(3);
    engine.join(1);
    static_cast<void>(engine.step(numbers_of(random, {{1, 60}})));
    for (int n = 0; n < 20; ++n) static_cast<void>(engine.step(numbers_of(random, {{1, 1}})));
    EXPECT_GE(engine.keeper.totals().events, 2);
    const auto held = engine.keeper.positions(1, 0, 0);
    return Ints(held.begin(), held.end());
  };
  const Ints newest = kept("streaming,budget=24,interval=8");
  EXPECT_EQ(kept("tova,budget=24,interval=8,recent=32"), newest);
  for (const char* policy : {"tova", "keydiff", "knorm", "ams-tova", "h2o"})
    EXPECT_NE(kept(text(policy, ",budget=24,interval=8")), newest) << policy;
}

}  // namespace
}  // namespace kvkeep::retention_test
