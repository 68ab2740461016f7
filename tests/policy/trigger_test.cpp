// SPDX-License-Identifier: Apache-2.0
// When a sequence is due, and how many tokens before it is.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kvkeep/observe/trigger.h"

namespace kvkeep::trigger_test {
namespace {

TEST(Trigger, SaysHowManyTokensAnEventIsAway) {
  std::mt19937 random(4);
  const auto up_to = [&](std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random() % static_cast<unsigned>(most - least + 1));
  };
  int exact = 0, prompts = 0;
  for (int i = 0; i < 20000; ++i) {
    Trigger t;
    t.budget.slots = static_cast<std::int32_t>(up_to(1, 40));
    if (up_to(0, 3) == 0) t.budget = {.unit = Budget::Unit::ratio, .dropped = 0.5};
    const bool fixed = t.budget.unit == Budget::Unit::slots;
    t.interval = static_cast<std::int32_t>(up_to(1, 20));
    const bool named = up_to(0, 5) == 0;  // at every moment, or never
    t.kind = named ? Trigger::Kind::named : up_to(0, 1) == 0 ? Trigger::Kind::slack : Trigger::Kind::counter;
    t.prefill = static_cast<Trigger::Prefill>(up_to(0, 3));
    t.thins = up_to(0, 4) == 0;
    t.never = up_to(0, 20) == 0;
    Occasion o{.rows = up_to(1, 4), .prompt = up_to(1, 50), .slot_bytes = 8};
    o.named = named;
    const bool inside = t.prefill == Trigger::Prefill::pieces && up_to(0, 1) == 0;
    o.seen = inside ? up_to(0, o.prompt - 1) : o.prompt + up_to(0, 60);
    o.slots = std::min(o.seen, up_to(1, 60)) * o.rows;
    const std::int64_t said = t.tokens_until(o);
    const auto after = [&](std::int64_t n, std::int64_t step) {
      Occasion later = o;
      later.seen += n, later.slots += n * o.rows, later.step = step;
      return later;
    };
    std::int64_t alone = Trigger::kNoEvent, soonest = Trigger::kNoEvent;  // one token per step; in steps of any size
    for (std::int64_t n = 1; n <= 200; ++n) {
      if (alone == Trigger::kNoEvent && t.due(after(n, 1))) alone = n;
      for (std::int64_t step = 1; step <= n && soonest == Trigger::kNoEvent; ++step)
        if (t.due(after(n, step))) soonest = n;
    }
    if (t.due(o)) soonest = alone = 0;
    ASSERT_LE(said, soonest) << i;
    if (fixed && (said <= 200 || soonest != Trigger::kNoEvent)) {
      ASSERT_EQ(said, soonest) << i;
      if (t.kind == Trigger::Kind::slack && !inside) ASSERT_EQ(said, alone) << i;
      ++exact;
      prompts += static_cast<int>(inside);
    }
    o.step = 1;
    if (!t.never) ASSERT_EQ(t.tokens_until(o), 0);
  }
  EXPECT_GT(exact, 5000);
  EXPECT_GT(prompts, 500);
}

TEST(Trigger, CountsTheIntervalsThatAStepJumpsOver) {
  const Trigger counter{.budget = {.slots = 4}, .interval = 4, .kind = Trigger::Kind::counter};
  EXPECT_TRUE(counter.due({.slots = 15, .seen = 15, .prompt = 10, .step = 2})) << "from 3 decoded tokens to 5";
  EXPECT_FALSE(counter.due({.slots = 15, .seen = 15, .prompt = 10, .step = 1}));
  EXPECT_FALSE(counter.due({.slots = 11, .seen = 11, .prompt = 10, .step = 11})) << "ten of them were the prompt";
  EXPECT_TRUE(counter.due({.slots = 14, .seen = 14, .prompt = 10, .step = 14}));
}

TEST(Trigger, LetsAnythingBeyondTheWindowLeaveAtTheEndOfAPromptAndWholeIntervalsAfterIt) {
  const Trigger window{.budget = {}, .interval = 8, .kind = Trigger::Kind::window, .recent = 12};
  EXPECT_FALSE(window.due({.seen = 12, .prompt = 12, .step = 12, .unsettled = 12}));
  EXPECT_TRUE(window.due({.seen = 13, .prompt = 13, .step = 13, .unsettled = 13}));
  EXPECT_FALSE(window.due({.seen = 20, .prompt = 13, .step = 1, .unsettled = 19}));
  EXPECT_TRUE(window.due({.seen = 21, .prompt = 13, .step = 1, .unsettled = 20}));
}

TEST(Trigger, CutsAPromptInPiecesWhereverItIsOverTheBudget) {
  const Trigger pieces{.budget = {.slots = 8}, .interval = 4, .prefill = Trigger::Prefill::pieces},
      cut{.budget = {.slots = 8}, .interval = 4, .prefill = Trigger::Prefill::cut};
  const auto after = [](std::int64_t slots, std::int64_t seen, std::int64_t step, bool named = false) {
    return Occasion{.slots = slots, .seen = seen, .prompt = 30, .step = step, .named = named};
  };
  EXPECT_FALSE(pieces.due(after(8, 8, 8)));
  EXPECT_TRUE(pieces.due(after(9, 9, 9)));
  EXPECT_TRUE(pieces.due(after(9, 29, 1)));
  EXPECT_TRUE(pieces.due(after(9, 30, 1))) << "its end";
  EXPECT_TRUE(pieces.due(after(9, 31, 2))) << "its end, and a token after it";
  EXPECT_FALSE(pieces.due(after(9, 31, 1))) << "from then on at budget + interval";
  EXPECT_FALSE(cut.due(after(29, 29, 29)));
  EXPECT_FALSE(cut.due(after(29, 29, 29, true)));
  EXPECT_TRUE(cut.due(after(9, 31, 1, true)));
  EXPECT_FALSE(cut.due(after(8, 31, 1, true))) << "nothing would go";
  const Trigger window{.budget = {}, .interval = 8, .kind = Trigger::Kind::window, .recent = 12};
  EXPECT_TRUE(window.due({.seen = 16, .prompt = 13, .step = 1, .unsettled = 13, .named = true}));
  EXPECT_FALSE(window.due({.seen = 16, .prompt = 13, .step = 1, .unsettled = 12, .named = true}));
}

}  // namespace
}  // namespace kvkeep::trigger_test
