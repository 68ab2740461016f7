// SPDX-License-Identifier: Apache-2.0
// A part that the library does not know: it is asked for by a policy of a program, and works wherever parts do.

#include "turns.h"

#include <gtest/gtest.h>

#include "engines.h"
#include "message_of.h"
#include "restored.h"

namespace kvkeep::turns_test {
namespace {

using namespace engines;

/// One sequence under ByTurn.
struct Talk {
  Talk() { engine.join(1); }
  Report say(std::int32_t tokens) { return engine.step(numbers_of(random, {{1, tokens}})); }
  [[nodiscard]] Turns& turns() { return engine.keeper.part<Turns>(); }
  /// The oldest position that is left, the same in every row.
  [[nodiscard]] std::int32_t oldest() const { return engine.keeper.positions(1, 0, 0).front(); }

  DenseEngine engine{std::make_unique<ByTurn>(16), false, Dtype::f32};
  oracle::Random random{1};
};

TEST(Turns, TheNewestTurnStaysHoweverLongItIs) {
  Talk talk;
  talk.engine.no_say = true;  // no scorer
  talk.say(30);
  talk.say(1);
  EXPECT_EQ(talk.oldest(), 15);
  talk.turns().begin(1);
  for (int n = 0; n < 40; ++n) talk.say(1);
  EXPECT_EQ(talk.oldest(), 31) << "all 40 tokens of the turn, above the budget of 16";
  talk.turns().begin(1);
  for (int n = 0; n < 5; ++n) talk.say(1);
  EXPECT_EQ(talk.oldest(), 60) << "the budget again: 5 tokens of the turn and 11 before it";
}

TEST(Turns, AreTakenBackWithTheirTokens) {
  Talk talk;
  talk.engine.no_say = true;
  talk.say(10);
  talk.turns().begin(1);
  talk.say(3);
  EXPECT_EQ(talk.turns().of(1), 10);
  talk.engine.keeper.truncate(1, 8);
  EXPECT_EQ(talk.turns().of(1), 8);
}

TEST(Turns, ComeBackWithTheirSequence) {
  Talk here, there;
  here.engine.no_say = there.engine.no_say = true;
  here.say(30);
  here.turns().begin(1);
  here.say(20);
  const testing::StateFileOfATest file("turns");
  there.engine.keeper.leave(1);
  testing::bring_over(here.engine, there.engine, 1, file.path);
  EXPECT_EQ(there.turns().of(1), 30);
  for (int n = 0; n < 9; ++n) here.say(1), there.say(1);
  EXPECT_EQ(there.oldest(), here.oldest());
  EXPECT_EQ(there.oldest(), 30);
}

TEST(Turns, AreForgottenWithTheirSequence) {
  Talk talk;
  talk.engine.no_say = true;
  talk.say(5);
  talk.turns().begin(1);
  talk.engine.keeper.leave(1), talk.engine.keeper.join(1);
  EXPECT_EQ(talk.turns().of(1), 0);
}

TEST(Turns, AreRefusedByNameUnderAPolicyThatAsksForNone) {
  const DenseEngine engine("tova,budget=24,interval=8", false, Dtype::f32);
  EXPECT_NE(testing::message_of<Unsupported>([&] { static_cast<void>(engine.keeper.part<Turns>()); }).find("tova"),
            std::string::npos);
}

}  // namespace
}  // namespace kvkeep::turns_test
