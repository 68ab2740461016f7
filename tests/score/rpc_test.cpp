// SPDX-License-Identifier: Apache-2.0
// RPC with a fixed budget and as published, against plain loops; and the published schedule.

#include <gtest/gtest.h>

#include <cmath>

#include "kvkeep/score/rpc.h"
#include "library_event.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing::rpc_test {
namespace {

using testing::Array;
using Style = RpcOptions::Style;
using Heads = RpcOptions::Heads;

ScorerOracle plain(const RpcOptions& o) {
  return [o](const oracle::ScorerInput& in) {
    return oracle::rpc(in, {o.window, o.pool, o.style == Style::official, o.heads == Heads::all});
  };
}

TEST(Rpc, AgreesWithPlainLoopsOnRandomEvents) {
  for (const Style style : {Style::fixed, Style::official}) {
    for (const int window : {1, 2, 8, 32}) {
      const RpcOptions o{window, window == 2 ? 1 : 7, style, Heads::group};
      expect_scores_agree(Rpc(o), plain(o), 40, {1e-6, 1e-4});
    }
    const RpcOptions all{8, 7, style, Heads::all};
    expect_scores_agree(Rpc(all), plain(all), 60, {1e-6, 1e-4}, {.ragged = false});
  }
}

TEST(Rpc, ObeysTheLawsOfScorersOnEveryInstructionSet) {
  for (const Style style : {Style::fixed, Style::official}) {
    expect_scorer_laws(Rpc({8, 7, style, Heads::group}), 25);
    expect_scorer_laws(Rpc({8, 7, style, Heads::all}), 15, {.ragged = false});
    for_every_instruction_set([&] {
      const RpcOptions o{8, 7, style, Heads::group};
      expect_scores_agree(Rpc(o), plain(o), 10, {1e-6, 1e-4});
    });
  }
}

TEST(Rpc, OfTheWorkedExample) {  // two queries; the prompt is slot 0
  oracle::Sequence s;
  s.T = 6;
  s.D = 2;
  const double ln2 = std::log(2.0), ln3 = std::log(3.0);
  for (const auto& [a, b] : {std::pair{9.0, 9.0}, {0.0, ln3}, {ln2, 0.0}, {0.0, 0.0}, {7.0, 7.0}, {7.0, 7.0}}) {
    s.keys.push_back(static_cast<float>(a));
    s.keys.push_back(static_cast<float>(b));
  }
  s.queries = {1, 0, 0, 1};  // the older sees 1 : 2 : 1 in slots 1 to 3, the newest 3 : 1 : 1
  s.positions = {0, 1, 2, 3, 4, 5};
  s.query_positions = {4, 5};
  const OracleCache cache({s});
  const Limits limits = even_limits(cache.table(), 4, 1);
  WindowAttention none;
  const Array official = Rpc({2, 1, Style::official, Heads::all}).score(cache.evidence(), limits, none).data;
  const double want[] = {0, 1.2, 0.4, 0.4, 0, 0};  // the newest, twice
  for (int t = 0; t < 6; ++t) EXPECT_NEAR(official.data<float>()[t], want[t], 1e-6) << t;
  const Array pooled = Rpc({2, 3, Style::official, Heads::all}).score(cache.evidence(), limits, none).data;
  const double want_pooled[] = {0, 1.6 / 3, 2.0 / 3, 0.8 / 3, 0, 0};
  for (int t = 0; t < 6; ++t) EXPECT_NEAR(pooled.data<float>()[t], want_pooled[t], 1e-6) << t;
  const Array fixed = Rpc({2, 1, Style::fixed, Heads::group}).score(cache.evidence(), limits, none).data;
  const double e = std::exp(9.0), older = e + 4, newest = e + 5;
  const double want_fixed[] = {
      e / older + e / newest, 1 / older + 3 / newest, 2 / older + 1 / newest, 1 / older + 1 / newest, 0, 0};
  for (int t = 0; t < 6; ++t) EXPECT_NEAR(fixed.data<float>()[t], want_fixed[t], 1e-6) << t;
}

TEST(Rpc, OfficialBringsThePublishedScheduleAndFixedDoesNot) {
  const auto official = make_policy("rpc,budget=288,style=official"), fixed = make_policy("rpc,budget=288");
  const Retention& r = dynamic_cast<const Evict&>(*official).retention();
  EXPECT_EQ(r.trigger.interval, 1024);
  EXPECT_EQ(r.trigger.kind, Trigger::Kind::counter);
  EXPECT_EQ(r.trigger.budget.growth, 256);
  EXPECT_TRUE(r.trigger.budget.decoded_only);
  EXPECT_TRUE(r.protect_prompt);
  EXPECT_EQ(r.sink, 0);
  EXPECT_EQ(r.recent, 0);
  EXPECT_EQ(dynamic_cast<const Evict&>(*official).guarded(288).recents, 32) << "its window";
  const Retention& f = dynamic_cast<const Evict&>(*fixed).retention();
  EXPECT_EQ(f.trigger.interval, 512);
  EXPECT_EQ(f.trigger.budget.growth, 0);
  EXPECT_FALSE(f.protect_prompt);
  const auto changed = make_policy("rpc,budget=96,style=official,interval=256,growth=64,trigger=slack");
  const Retention& c = dynamic_cast<const Evict&>(*changed).retention();
  EXPECT_EQ(c.trigger.interval, 256);
  EXPECT_EQ(c.trigger.budget.growth, 64);
  EXPECT_EQ(c.trigger.kind, Trigger::Kind::slack);
  EXPECT_NE(make_policy_from_json(official->to_json()), nullptr);
  EXPECT_EQ(make_policy_from_json(official->to_json())->to_json(), official->to_json());
}

/// What the published code holds behind the prompt after `decoded` tokens, R = 32, P = 1024, a quarter of which stays:
/// it counts tokens since the prompt, since the last compression, and keeps (n + 1) * 256 + R.
std::int64_t published(std::int64_t decoded) {
  std::int64_t held = 0, compressions = 0;
  for (std::int64_t d = 0; d < decoded; ++d)
    if (++held >= compressions * 256 + 32 + 1024) held = ++compressions * 256 + 32;
  return held;
}

TEST(Rpc, KeepsWhatThePublishedScheduleKeepsOnTopOfThePrompt) {
  const Trigger trigger = make_policy("rpc,budget=288,style=official")->trigger();
  for (const std::int64_t prompt : {1, 77, 5000}) {
    std::int64_t slots = prompt;
    std::vector<std::int64_t> kept;
    for (std::int64_t d = 1; d <= 5 * 1024; ++d) {
      ++slots;
      const std::int64_t seen = prompt + d;
      if (!trigger.due({.slots = slots, .rows = 1, .seen = seen, .prompt = prompt, .step = 1, .slot_bytes = 4}))
        continue;
      EXPECT_EQ(d % 1024, 0);
      slots = trigger.budget.resolve({seen}, {prompt}, 4);
      kept.push_back(slots - prompt);
      EXPECT_EQ(kept.back(), published(d + 32)) << "the published code compresses R tokens later";
    }
    EXPECT_EQ(kept, (std::vector<std::int64_t>{288, 544, 800, 1056, 1312}));
  }
}

TEST(Budget, GrowsAtEveryFurtherIntervalAndCountsWhatItIsToldTo) {
  Budget b{.slots = 100, .growth = 10, .period = 50};
  EXPECT_EQ(b.resolve({30}, {30}, 1), 100);
  EXPECT_EQ(b.resolve({30 + 99}, {30}, 1), 100);
  EXPECT_EQ(b.resolve({30 + 100}, {30}, 1), 110);
  EXPECT_EQ(b.resolve({30 + 149}, {30}, 1), 110);
  EXPECT_EQ(b.resolve({30 + 500}, {30}, 1), 190);
  EXPECT_EQ(b.resolve({10}, {30}, 1), 100) << "a prompt that is still coming";
  b.decoded_only = true;
  EXPECT_EQ(b.resolve({30 + 100}, {30}, 1), 140);
  const Budget ratio{.unit = Budget::Unit::ratio, .dropped = 0.5, .decoded_only = true};
  EXPECT_EQ(ratio.resolve({130}, {30}, 1), 80);
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=64,budget_counts=decoded")), InvalidArgument);
  EXPECT_EQ(make_policy("tova,budget=64,growth=8,interval=16,budget_counts=decoded,protect_prompt=true")
                ->trigger()
                .budget.resolve({100 + 48}, {100}, 1),
            100 + 64 + 16);
}

}  // namespace
}  // namespace kvkeep::testing::rpc_test
