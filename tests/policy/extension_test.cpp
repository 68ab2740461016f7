// SPDX-License-Identifier: Apache-2.0
// Scorers and policies of one's own that remember, forget what they need, or have no parts: right, or refused by name.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engines.h"
#include "fade.h"
#include "kvkeep/policy/evict.h"
#include "message_of.h"
#include "ramp.h"

namespace kvkeep::extension_test {
namespace {

using engines::Ints;
using testing::Array;
using testing::message_of;

/// Positions of a row that stay: sinks, recents, and the best of the others.
Ints best(const std::vector<float>& scores, const Ints& positions, std::size_t budget, std::size_t sink,
          std::size_t recent) {
  Ints kept(positions.begin(), positions.begin() + static_cast<std::ptrdiff_t>(sink));
  kept.insert(kept.end(), positions.end() - static_cast<std::ptrdiff_t>(recent), positions.end());
  Ints open(positions.begin() + static_cast<std::ptrdiff_t>(sink),
            positions.end() - static_cast<std::ptrdiff_t>(recent));
  std::ranges::sort(open, std::greater<>(), [&](std::int32_t p) { return scores[static_cast<std::size_t>(p)]; });
  kept.insert(kept.end(), open.begin(), open.begin() + static_cast<std::ptrdiff_t>(budget - sink - recent));
  std::ranges::sort(kept);
  return kept;
}

TEST(Extension, AScorerThatRemembersDoesSoInRowsThatAreNotDue) {
  [[maybe_unused]] static const bool registered = (register_scorer<testing::Fade>(), true);
  testing::register_ramp();
  // The first event, at the end of a prompt of 26 tokens, cuts the first layer to 16 slots; the last has room for 31.
  engines::DenseEngine engine("ramp-fade,budget=24,interval=8,sink=2,recent=3,decay=0.9,prefill=cut", true, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  std::vector<std::vector<float>> norms(engines::kRows);
  const auto run = [&](std::int32_t tokens) {
    const engines::Numbers numbers = engines::numbers_of(random, {{1, tokens}});
    for (std::int32_t r = 0; r < engines::kRows; ++r) {
      const Array& values = numbers.values[static_cast<std::size_t>(r / engines::kHeads)];
      for (std::int32_t t = 0; t < tokens; ++t)
        norms[static_cast<std::size_t>(r)].push_back(
            sum_of_squares(values.data<float>() + (t * engines::kHeads + r % engines::kHeads) * engines::kValueDim,
                           engines::kValueDim));
    }
    static_cast<void>(engine.step(numbers));
  };
  run(26);
  ASSERT_EQ(engine.keeper.physical_length(1, 0, 0), 16);
  ASSERT_EQ(engine.keeper.physical_length(1, 1, 0), 26);
  run(14);
  bool differs = false;
  for (std::int32_t head = 0; head < engines::kHeads; ++head) {
    const std::vector<float>& now = norms[static_cast<std::size_t>(engines::kHeads + head)];
    std::vector<float> remembered = now;
    for (std::size_t t = 0; t < 26; ++t) remembered[t] += 0.9F * now[t];
    Ints all(40);
    std::iota(all.begin(), all.end(), 0);
    const std::span<const std::int32_t> kept = engine.keeper.positions(1, 1, head);
    EXPECT_EQ(Ints(kept.begin(), kept.end()), best(remembered, all, 31, 2, 3)) << "head " << head;
    differs = differs || best(remembered, all, 31, 2, 3) != best(now, all, 31, 2, 3);
  }
  EXPECT_TRUE(differs) << "what it remembers should matter here";
}

/// The newest queries' usage, kept as it is; its options say what it asks for.
struct AskingOptions {
  std::int32_t window = 8, asked = 8;
  bool accumulates = false;

  [[nodiscard]] WindowReading reading() const { return {.kind = WindowReading::Kind::usage, .window = window}; }
  template <class Row, class Team>
  KVKEEP_HD void finish(const Row& row, RowWindow, const float* attention, float* g, Team team) const {
    row.each_slot(team, [&](std::int32_t t) { g[t] = attention[t] + row.tally(t); });
  }
};
class Asking final : public WindowScorer<Asking, AskingOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "asking", .what = "usage", .source = "none"};
  using WindowScorer::WindowScorer;
  [[nodiscard]] Needs needs() const override { return {.queries = options().asked, .keys = true}; }
  [[nodiscard]] bool accumulates() const override { return options().accumulates; }
};

std::unique_ptr<KVPolicy> policy_of(std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator) {
  return std::make_unique<Evict>("outside", std::move(scorer), std::move(allocator),
                                 Retention{.trigger = {.budget = {.slots = 24}, .interval = 8}});
}

TEST(Extension, AWindowScorerThatAsksForFewerQueriesThanItReadsIsRefused) {
  const auto said = [](AskingOptions options) {
    return message_of([&] {
      engines::DenseEngine(policy_of(std::make_unique<Asking>(options), std::make_unique<Flat>()), false, Dtype::f32);
    });
  };
  engines::DenseEngine(policy_of(std::make_unique<Asking>(AskingOptions{}), std::make_unique<Flat>()), false,
                       Dtype::f32);
  EXPECT_NE(said({.asked = 0}).find("scorer asking: its body reads the newest 8 queries, and needs() names 0"),
            std::string::npos)
      << said({.asked = 0});
  EXPECT_NE(said({.window = 0}).find("reads the newest 0 queries"), std::string::npos);
}

TEST(Extension, RowsWithoutQueriesOfAWindowScorerThatRemembersKeepTheirTally) {
  const float tally[] = {3, 1, 2};
  Row row{.length = 4, .tally = tally, .tally_length = 3};
  float g[4] = {9, 9, 9, 9}, attention[4] = {};
  const ScoredRow<Unread, Unread> scored(row, nullptr, {}, {0, 4});
  finish_row(AskingOptions{}, false, true, scored, RowWindow{0, 4}, attention, g, OneThread{});
  EXPECT_EQ(std::vector<float>(g, g + 4), (std::vector<float>{3, 1, 2, 0}));
  finish_row(AskingOptions{}, false, false, scored, RowWindow{0, 4}, attention, g, OneThread{});
  EXPECT_EQ(std::vector<float>(g, g + 4), (std::vector<float>{0, 1, 2, 3}));
}

TEST(Extension, ASlotWithoutAGivenScoreHasNone) {
  const float given[] = {0.5F};
  const Row row{.length = 2, .given = given, .given_length = 1};
  const ScoredRow<Unread, Unread> scored(row, nullptr, {}, {0, 2});
  EXPECT_EQ(scored.given(0), 0.5F);
  EXPECT_TRUE(std::isnan(scored.given(1)));
}

/// A policy whose list of parts is not one.
class Partless final : public KVPolicy {
 public:
  explicit Partless(MakePart make) : make_(make) {}
  [[nodiscard]] std::string_view name() const override { return "partless"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = 24}, .interval = 8}; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  [[nodiscard]] std::vector<MakePart> parts() const override { return {make_}; }

 private:
  MakePart make_;
};

TEST(Extension, AMakerOfNoPartIsRefused) {
  for (const MakePart make : {MakePart{}, MakePart{[](const PartContext&) { return std::unique_ptr<Part>(); }}})
    EXPECT_EQ(
        message_of<InvalidArgument>([&] { engines::DenseEngine(std::make_unique<Partless>(make), false, Dtype::f32); }),
        "Keeper: parts() of partless gives a maker that makes none; allowed one that returns a Part");
}

/// A policy that says what its rows may keep.
class Foretelling final : public KVPolicy {
 public:
  explicit Foretelling(Ints slots) : slots_(std::move(slots)) {}
  [[nodiscard]] std::string_view name() const override { return "foretelling"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = 24}, .interval = 8}; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  [[nodiscard]] MostKept most_kept(const Evidence&) const override { return {.slots = slots_}; }

 private:
  Ints slots_;
};

TEST(Extension, AForecastRefusesRowsThatCannotBe) {
  const auto said = [](Ints slots) {
    engines::DenseEngine engine(std::make_unique<Foretelling>(std::move(slots)), false, Dtype::f32);
    oracle::Random random(5);
    engine.join(1);
    static_cast<void>(engine.step(engines::numbers_of(random, {{1, 20}})));
    LengthForecast forecast = engine.keeper.forecast(1);
    return message_of<InvalidArgument>([&] { static_cast<void>(forecast.step(20)); });
  };
  EXPECT_EQ(said({24, 24}), "forecast: KVPolicy::most_kept() of foretelling gives 2 rows; allowed 4");
  EXPECT_EQ(said({24, 24, -4, 24}),
            "forecast: KVPolicy::most_kept() of foretelling gives row 2 -4 slots; allowed 1 to its 40");
  EXPECT_EQ(said({24, 24, 24, 41}),
            "forecast: KVPolicy::most_kept() of foretelling gives row 3 41 slots; allowed 1 to its 40");
}

}  // namespace
}  // namespace kvkeep::extension_test
