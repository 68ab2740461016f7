// SPDX-License-Identifier: Apache-2.0
// Lengths that are known before anything is scored are those that events leave.

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engines.h"
#include "forked.h"
#include "kvkeep/keeper/length_forecast.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::forecast_test {
namespace {

using namespace engines;

/// Runs steps of random sizes with a forecast that is three steps ahead of the keeper. Returns how many events it had.
std::int64_t expect_lengths(Engine& engine, bool exact, std::uint64_t seed) {
  oracle::Random random(seed);
  engine.keeper.join(1, 0, 40);
  engine.lengths[1] = Ints(kRows, 0);
  LengthForecast ahead = engine.keeper.forecast(1);
  struct Expected {
    std::int32_t tokens;
    Ints lengths;
    bool event, exact;
  };
  std::vector<Expected> scheduled;
  for (int i = 0; i < 60; ++i) {
    const std::int32_t tokens = i < 2 ? 20 : random.chance(0.2) ? random.between(2, 6) : 1;
    const std::int32_t longest = ahead.step(tokens);
    EXPECT_EQ(longest, std::ranges::max(ahead.lengths()));
    scheduled.push_back({tokens, {ahead.lengths().begin(), ahead.lengths().end()}, ahead.event(), ahead.exact()});
    if (i < 3) continue;
    const Expected& now = scheduled[static_cast<std::size_t>(i - 3)];
    const Report report = engine.step(numbers_of(random, {{1, now.tokens}}));
    const Ints& held = engine.lengths.at(1);
    if (now.exact) {
      EXPECT_EQ(held, now.lengths) << "step " << i - 3;
      EXPECT_EQ(!report.cuts.empty(), now.event) << "step " << i - 3;
    }
    for (std::int32_t r = 0; r < kRows; ++r)
      EXPECT_LE(held[static_cast<std::size_t>(r)], now.lengths[static_cast<std::size_t>(r)]) << "step " << i - 3;
    if (::testing::Test::HasFailure()) return 0;
  }
  EXPECT_EQ(ahead.exact(), exact);
  return engine.keeper.totals().events;
}

struct Case {
  std::string policy;
  bool exact = true, ragged = false;
};

TEST(LengthForecast, SaysWhatEventsLeave) {
  const std::string small = ",budget=24,interval=6", prompt = small + ",prefill=cut";
  const Case cases[] = {
      {"full"},
      {"tova" + small},
      {"tova" + prompt},
      {"tova,ratio=0.5,interval=6"},
      {"tova,bytes=3000,interval=6"},
      {"tova" + small + ",trigger=counter"},
      {"tova" + small + ",protect_prompt=true"},
      {"tova" + small + ",prefill=only"},
      {"tova" + small + ",prefill=pieces"},
      {"ams-tova" + small + ",window=4,prefill=pieces,trigger=named"},
      {"adakv-snapkv" + small + ",window=6,prefill=pieces", false, true},
      {"tova" + small + ",share=union"},
      {"ams-tova" + small + ",window=4"},
      {"ams-tova" + small + ",window=4,variant=official"},
      {"chunkkv-snapkv" + small + ",window=6"},
      {"h2o" + small},
      {"rkv" + small},
      {"snapkv" + prompt + ",window=6"},
      {"streaming" + small},
      {"keydiff" + small},
      {"pyramidkv-knorm" + small + ",recent=4", true, true},
      {"adakv-snapkv" + small + ",window=6", false, true},
      {"threshold-given" + small + ",recent=4,threshold=0.3", false, true},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.policy);
    DenseEngine engine(one.policy, one.ragged, Dtype::f32);
    engine.no_say = true;
    const std::int64_t events = expect_lengths(engine, one.exact, 11);
    if (one.policy != "full") EXPECT_GT(events, 0);
  }
}

TEST(LengthForecast, GoesOnFromWhereASequenceIs) {
  DenseEngine engine("tova,budget=24,interval=6,recent=4", false, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  engine.step(numbers_of(random, {{1, 33}}));
  for (int i = 0; i < 50; ++i) {
    LengthForecast ahead = engine.keeper.forecast(1);
    EXPECT_EQ(ahead.length(), engine.lengths.at(1)[0]);
    EXPECT_EQ(ahead.logical_length(), engine.keeper.logical_length(1));
    const std::int32_t tokens = random.between(1, 4), length = ahead.step(tokens);
    engine.step(numbers_of(random, {{1, tokens}}));
    ASSERT_EQ(length, engine.lengths.at(1)[0]) << "step " << i;
  }
  EXPECT_THROW(static_cast<void>(engine.keeper.forecast(2)), StateError);
}

TEST(PageNeed, IsWhatStepsTake) {
  PagedEngine engine("tova,budget=24,interval=6,recent=4", false, Dtype::f32, 4, PageLayout::slot_head, Form::apart);
  oracle::Random random(9);
  engine.join(1);
  engine.step(numbers_of(random, {{1, 22}}));
  engine.keeper.fork(2, 1);
  share_rows(engine, 2, 1);
  std::int64_t copies = 0, by_events = 0;
  for (int i = 0; i < 40; ++i)
    for (const SequenceId id : {SequenceId{1}, SequenceId{2}}) {
      LengthForecast ahead = engine.keeper.forecast(id);
      const std::int32_t tokens = random.between(1, 3), free = engine.pool.free_pages(),
                         append = engine.sequences.need(id, tokens);
      std::int32_t shared = 0;
      for (const std::int32_t page : engine.sequences.pages(id)) shared += engine.pool.references(page) > 1 ? 1 : 0;
      const bool last_shared = engine.pool.references(engine.sequences.pages(id).back()) > 1;
      const PageNeed need = ahead.need(tokens, 4, shared, last_shared), unsure = ahead.need(tokens, 4, shared);
      EXPECT_EQ(append, need.append);
      EXPECT_EQ(unsure.append, append + (shared > 0 && !last_shared && engine.sequences.length(id) % 4 != 0 ? 1 : 0));
      ahead.step(tokens);
      const auto held = static_cast<std::int32_t>(engine.sequences.pages(id).size());
      copies += append - ((engine.sequences.length(id) + tokens + 3) / 4 - held);
      const Report report = engine.step(numbers_of(random, {{id, tokens}}));
      std::int32_t taken = 0, freed = 0;
      for (const PageMove& move : report.pages) taken += move.taken;
      freed = static_cast<std::int32_t>(report.pages_freed);
      EXPECT_LE(taken, need.event);
      if (report.cuts.empty()) EXPECT_EQ(need.event, 0);
      // Pages that others still hold come back to nobody: only what lost its last holder is free.
      EXPECT_GE(free - engine.pool.free_pages(), append + taken - freed);
      by_events += taken;
    }
  EXPECT_GT(copies, 0) << "a shared last page was copied";
  EXPECT_GT(by_events, 0) << "an event copied shared pages";
}

/// Two steps ahead of what has run: what the first one's event leaves is not held yet.
TEST(PageNeed, OfStepsThatHaveNotRunIsABound) {
  for (const bool ragged : {false, true}) {
    SCOPED_TRACE(ragged);
    PagedEngine engine(ragged ? "adakv-snapkv,budget=24,interval=6,window=4" : "tova,budget=24,interval=6,recent=4",
                       ragged, Dtype::f32, 4, PageLayout::slot_head, Form::apart);
    oracle::Random random(3);
    engine.join(1);
    engine.step(numbers_of(random, {{1, 29}}));
    std::int64_t taken_in_all = 0;
    for (int i = 0; i < 60; ++i) {
      LengthForecast ahead = engine.keeper.forecast(1);
      const std::int32_t first = random.between(1, 3), second = random.between(1, 6);
      ahead.step(first);
      const PageNeed need = ahead.need(second, 4, 0);
      EXPECT_EQ(need.event, 0);
      engine.step(numbers_of(random, {{1, first}}));
      const std::int32_t taken = engine.sequences.need(1, second);
      EXPECT_LE(taken, need.append) << "step " << i;
      EXPECT_LE(need.append, (second + 3) / 4) << "step " << i;
      taken_in_all += taken;
      engine.step(numbers_of(random, {{1, second}}));
    }
    EXPECT_GT(taken_in_all, 0);
  }
}

TEST(PageNeed, RefusesWhatIsNoStepAndNoPage) {
  DenseEngine engine("tova,budget=24,interval=6,recent=4", false, Dtype::f32);
  engine.join(1);
  LengthForecast ahead = engine.keeper.forecast(1);
  EXPECT_EQ(testing::message_of<InvalidArgument>([&] { ahead.step(-5); }),
            "forecast: a step of -5 tokens; allowed 0 to 2147483647");
  EXPECT_EQ(ahead.step(7), 7);
  EXPECT_EQ(testing::message_of<InvalidArgument>([&] { ahead.step(std::numeric_limits<std::int32_t>::max()); }),
            "forecast: a step of 2147483647 tokens; allowed 0 to 2147483640");
  EXPECT_EQ(ahead.length(), 7);
  EXPECT_EQ(testing::message_of<InvalidArgument>([&] { static_cast<void>(ahead.need(1, 0, 0)); }),
            "forecast: pages of 0 slots, 0 of them shared; allowed 1 to 1024 slots, and 0 pages or more");
}

}  // namespace
}  // namespace kvkeep::forecast_test
