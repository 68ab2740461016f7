// SPDX-License-Identifier: Apache-2.0
// Slots above a threshold: by hand, against a second implementation, and when events come.

#include "kvkeep/allot/threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "message_of.h"
#include "oracle/allocators_oracle.h"
#include "oracle/random_case.h"
#include "scorer_case.h"

namespace kvkeep::threshold_test {
namespace {

using oracle::Random;
using testing::message_of;
using testing::ScorerArrangement;
using testing::ScorerCase;
using Ints = std::vector<std::int32_t>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

Ints slots_of(const KeepSet& keep, std::size_t row) { return {keep.row(row).begin(), keep.row(row).end()}; }

KeepSet kept(const Evidence& evidence, const Limits& limits, const std::vector<float>& scores, double threshold) {
  Decision decision;
  decision.scores.data = empty({static_cast<std::int64_t>(scores.size())}, Dtype::f32);
  std::ranges::copy(scores, decision.scores.data.data<float>());
  Threshold({threshold}).allot(evidence, limits, decision.scores, {}, decision);
  return *decision.keep;
}

/// What stays of one row.
Ints kept(const std::vector<float>& scores, double threshold, std::int32_t budget, std::int32_t sink,
          std::int32_t recent, const std::vector<SlotRange>& pins = {}) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  RowTable table;
  table.rows.resize(1);
  table.slots = table.rows[0].length = static_cast<std::int32_t>(scores.size());
  table.groups.resize(1);
  const Evidence evidence{.spec = spec, .table = table};
  Limits limits = even_limits(table, budget, sink, recent);
  Protected& guarded = limits.rows[0].guarded;
  guarded.pins = pins.data();
  guarded.ranges = static_cast<std::int32_t>(pins.size());
  for (const SlotRange& range : pins) guarded.pinned += range.to - range.from;
  Threshold({threshold}).spread(evidence, {}, limits.rows);
  return slots_of(kept(evidence, limits, scores, threshold), 0);
}

TEST(Threshold, KeepsWhatPassesByHand) {
  const std::vector<float> scores{-9, -3, -5, -4, -8, -1, -9, -9};
  EXPECT_EQ(kept(scores, -4, 8, 0, 0), (Ints{1, 3, 5})) << "a score that equals the threshold passes";
  EXPECT_EQ(kept(scores, -4, 8, 1, 2), (Ints{0, 1, 3, 5, 6, 7})) << "sinks and the newest stay";
  EXPECT_EQ(kept(scores, -4, 5, 1, 2), (Ints{0, 1, 5, 6, 7})) << "of more than the budget, the best stay";
  EXPECT_EQ(kept(scores, -4, 3, 1, 2), (Ints{0, 6, 7}));
  EXPECT_EQ(kept(scores, -100, 8, 0, 0), (Ints{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(kept(scores, 0, 8, 0, 0), (Ints{}));
}

TEST(Threshold, KeepsNoMoreForPinnedSlotsThatWouldPass) {
  const std::vector<float> scores{-9, -3, -5, -4, -8, -1, -9, -9};
  EXPECT_EQ(kept(scores, -4, 8, 1, 1, {{2, 4}}), (Ints{0, 1, 2, 3, 5, 7})) << "3 is pinned and passes: it counts once";
  EXPECT_EQ(kept(scores, -4, 8, 0, 0, {{1, 2}, {3, 4}, {5, 6}}), (Ints{1, 3, 5}));
  EXPECT_EQ(kept(scores, -4, 3, 0, 0, {{4, 5}, {6, 7}}), (Ints{4, 5, 6})) << "of those that pass, the best";
}

TEST(Threshold, TakesTiesNoNumbersAndInfinities) {
  EXPECT_EQ(kept({1, 1, 1, 1, 1}, 1, 3, 0, 0), (Ints{2, 3, 4})) << "the newer";
  EXPECT_EQ(kept({1, 1, 1, 1, 1}, 1.0000001, 3, 0, 0), (Ints{})) << "as f32 that is above 1";
  EXPECT_EQ(kept({kNaN, 2, -kInfinity, kInfinity, kNaN}, -1e30, 5, 0, 0), (Ints{1, 3}));
  EXPECT_EQ(kept({kNaN, 2, -kInfinity, kInfinity, kNaN}, 0, 3, 1, 1), (Ints{0, 3, 4}));
  EXPECT_EQ(kept({0.0F, -0.0F}, 0, 2, 0, 0), (Ints{0, 1})) << "-0 equals 0";
  EXPECT_EQ(kept({}, 0, 2, 1, 1), (Ints{}));
}

TEST(Threshold, AgreesWithASortOnRandomEvents) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const ScorerCase made(seed, {.longest = 150, .most_queries = 1});
    const ScorerArrangement memory = made.arranged();
    const RowTable& table = memory.table();
    Random random(seed + 7);
    const bool few_kinds = random.chance(0.3);
    std::vector<float> scores(static_cast<std::size_t>(table.slots));
    for (float& g : scores)
      g = random.chance(0.05) ? random.one_of({kNaN, kInfinity, -kInfinity, 0.0F, -0.0F})
          : few_kinds         ? static_cast<float>(random.between(-3, 0))
                              : static_cast<float>(2 * random.normal() - 4);
    const double threshold = random.one_of({-4.0, -3.0, -2.0, 0.0, -100.0, 100.0});
    Limits limits{Variant::strict, {}, {}};
    for (const Row& row : table.rows) limits.rows.push_back({random.between(1, row.length + 5), false, {}});
    Threshold({threshold}).spread(memory.evidence(), {}, limits.rows);
    const std::int32_t sink = random.one_of({0, 1, 4}), recent = random.one_of({0, 1, 8, 128});
    for (std::size_t r = 0; r < limits.rows.size(); ++r) {
      ASSERT_TRUE(limits.rows[r].due);
      limits.rows[r].guarded = protect(table.rows[r].length, limits.rows[r].budget, sink, recent, Variant::strict);
    }
    const std::size_t idle = random.chance(0.3) ? 0 : limits.rows.size();
    if (idle == 0) limits.rows[0].due = false;
    const KeepSet keep = kept(memory.evidence(), limits, scores, threshold);
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const Protected guarded = limits.rows[r].guarded;
      oracle::AllotHead head{row.length, guarded.sinks, guarded.recents, {}, {}};
      head.scores.assign(scores.begin() + row.first, scores.begin() + row.first + row.length);
      Ints want = oracle::threshold(head, std::min(limits.rows[r].budget, row.length), threshold);
      if (r == idle) {
        want.clear();
        for (std::int32_t t = 0; t < row.length; ++t) want.push_back(t);
      }
      ASSERT_EQ(slots_of(keep, r), want) << "seed " << seed << ", row " << r << ", threshold " << threshold
                                         << ", budget " << limits.rows[r].budget << "; " << made.description();
    }
  }
}

TEST(Threshold, HasEventsEveryIntervalWhateverRowsHold) {
  const auto due = [](const std::string& policy, std::int64_t seen, std::int64_t slots, std::int64_t step = 1) {
    return make_policy(policy)->trigger().due({.slots = slots, .rows = 1, .seen = seen, .prompt = 100, .step = step});
  };
  const std::string base = "threshold-given,threshold=-4,budget=1000,interval=10";
  for (const char* trigger : {"slack", "counter"}) {
    const std::string policy = base + ",trigger=" + trigger;
    EXPECT_FALSE(due(policy, 100, 100, 100)) << "prefill=keep";
    EXPECT_TRUE(due(policy + ",prefill=cut", 100, 100, 100));
    EXPECT_TRUE(due(policy + ",prefill=only", 100, 100, 100));
    EXPECT_FALSE(due(policy, 109, 50));
    EXPECT_TRUE(due(policy, 110, 50));
    EXPECT_FALSE(due(policy, 111, 50));
    EXPECT_TRUE(due(policy, 112, 50, 3)) << "a step that passes a multiple";
    EXPECT_FALSE(due(policy + ",prefill=only", 110, 50));
    EXPECT_FALSE(due(policy, 90, 90, 90)) << "the prompt has not ended";
  }
  EXPECT_TRUE(due(base, 105, 1010)) << "slack: budget + interval slots are a bound";
  EXPECT_FALSE(due("given,budget=1000,interval=10", 110, 50)) << "others wait for their budget";
}

TEST(Threshold, IsRefusedWithASentenceWhereItDoesNotFit) {
  const auto refusal = [](const std::string& policy) {
    return message_of<InvalidArgument>([&] { static_cast<void>(make_policy(policy)); });
  };
  EXPECT_EQ(refusal("threshold-given,budget=9"),
            "policy: threshold is missing; allowed a number that scores are compared with");
  EXPECT_NE(refusal("threshold-given,budget=9,threshold=low").find("threshold"), std::string::npos);
  EXPECT_NE(refusal("threshold-given,threshold=-4").find("budget is missing"), std::string::npos);
  EXPECT_NE(refusal("threshold-given,budget=9,threshold=-4,variant=official").find("variant is official"),
            std::string::npos);
  const std::string alone = refusal("threshold,budget=9,threshold=-4");
  EXPECT_TRUE(
      alone.starts_with("policy: threshold is an allocator, and no policy by itself; allowed "
                        "threshold-<scorer>: threshold-"))
      << alone;
  EXPECT_NE(alone.find(" threshold-tova,"), std::string::npos) << alone;
  EXPECT_NE(refusal("threshold-streaming,budget=9,threshold=-4").find("no policy"), std::string::npos);
  const std::string json = make_policy("threshold-snapkv,budget=9,threshold=0.001,window=2")->to_json();
  EXPECT_EQ(make_policy_from_json(json)->to_json(), json);
}

}  // namespace
}  // namespace kvkeep::threshold_test
