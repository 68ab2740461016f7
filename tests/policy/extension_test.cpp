// SPDX-License-Identifier: Apache-2.0
// Scorers and policies of one's own that remember, forget what they need, or have no parts: right, or refused by name.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engines.h"
#include "fade.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/option_fields.h"
#include "kvkeep/score/knorm.h"
#include "layer_by_layer_engine.h"
#include "message_of.h"
#include "ramp.h"
#include "told.h"

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

TEST(Extension, RowsOfAThresholdMayShareASelection) {
  for (const char* share : {"union", "union_mean", "per_head"})
    EXPECT_NE(make_policy(text("threshold-knorm,threshold=0.3,budget=48,share=", share)), nullptr);
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

using testing::ToldAllocator;
using testing::ToldPolicy;
using testing::ToldPrompts;

Tensor numbers(std::int64_t count, Dtype dtype = Dtype::f32) { return zeros({count}, dtype); }

/// What an event says of an allocator that tells `tell` after top-k, and whether it left the engine's lengths alone.
std::string allotting(ToldAllocator::Tell tell, bool ragged = true, ToldAllocator::Spread spread = {},
                      std::int32_t budget = 24) {
  engines::DenseEngine engine(
      std::make_unique<Evict>("outside", std::make_unique<Knorm>(),
                              std::make_unique<ToldAllocator>(std::move(tell), std::move(spread)),
                              Retention{.trigger = {.budget = {.slots = budget}, .interval = 8}}),
      ragged, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}})));
  return message_of<InvalidArgument>([&] { static_cast<void>(engine.step(engines::numbers_of(random, {{1, 1}}))); });
}

TEST(Extension, AnAllocatorThatDividesRowsOtherwiseThanTheyAreIsRefused) {
  const auto divides = [](auto change) {
    return allotting([change](const Evidence& e, Decision& d) {
      d.allotment.emplace();
      d.allotment->mass.data = numbers(e.table.slots);
      d.allotment->ends.assign(e.table.rows.size(), {5, 61});
      d.allotment->quotas.assign(e.table.rows.size(), {4, 20});
      change(e, *d.allotment);
    });
  };
  EXPECT_EQ(divides([](auto&, Allotment& a) { a = Allotment{}; }),
            "step: allocator told of outside says how it divides 0 rows, with the quotas of 0; allowed both of the "
            "event's 4 rows, or no Decision::allotment");
  EXPECT_EQ(divides([](auto&, Allotment& a) { a.quotas.pop_back(); }),
            "step: allocator told of outside says how it divides 4 rows, with the quotas of 3; allowed both of the "
            "event's 4 rows, or no Decision::allotment");
  EXPECT_EQ(divides([](auto&, Allotment& a) { a.ends[1] = {5, 60}; }),
            "step: allocator told of outside divides layer 0, head 1 into segments whose ends stop at 60; allowed "
            "none, or ascending ones up to its length, 61");
  EXPECT_EQ(divides([](auto&, Allotment& a) { a.ends[2] = {61, 61}; }),
            "step: allocator told of outside divides layer 1, head 0 into segments whose ends do not ascend; allowed "
            "none, or ascending ones up to its length, 61");
  EXPECT_EQ(divides([](auto&, Allotment& a) { a.quotas[0] = {1, 2, 3}; }),
            "step: allocator told of outside gives layer 0, head 0 3 quotas; allowed one for each of its 2 segments");
  EXPECT_TRUE(divides([](auto&, Allotment& a) {
                a.mass.data = numbers(2);
              }).starts_with("step: mass of allocator told of outside are f32 [2] on cpu"));
  EXPECT_TRUE(divides([](auto&, Allotment& a) {
                a.mass_used.data = numbers(2);
              }).starts_with("step: used mass of allocator told of outside are f32 [2] on cpu"));
}

TEST(Extension, AnAllocatorWhoseColumnsWouldNotFitIsRefused) {
  const auto said = [](auto change) { return allotting([change](const Evidence& e, Decision& d) { change(e, d); }); };
  EXPECT_TRUE(said([](auto& e, Decision& d) {
                d.scores.data = numbers(e.table.slots, Dtype::f16);
              }).starts_with("step: scores of allocator told of outside are f16"));
  EXPECT_TRUE(said([](auto&, Decision& d) { d.credit = numbers(3); }).starts_with("step: credit of allocator told"));
  EXPECT_TRUE(said([](auto&, Decision& d) { d.tally = Tensor(); }).starts_with("step: tally of allocator told"));
  for (const std::int32_t guarded : {-1, 25})
    EXPECT_EQ(said([&](auto&, Decision& d) { d.guarded[3] = guarded; }),
              text("step: Decision::guarded of allocator told of outside says that ", guarded,
                   " slots of layer 1, head 1 stay whatever they score; allowed 0 to the 24 that stay"));
}

/// Row r keeps its first counts[r] slots, after which the newest `recent` follow.
void keep_some(Decision& d, const Ints& counts, std::int32_t length, std::int32_t recent) {
  KeepSet keep{.slots = numbers(std::accumulate(counts.begin(), counts.end(), 0), Dtype::i32), .indptr = {0}};
  for (const std::int32_t count : counts) keep.indptr.push_back(keep.indptr.back() + count);
  for (std::size_t r = 0; r < counts.size(); ++r)
    for (std::int32_t i = 0; i < counts[r]; ++i)
      keep.room(r)[static_cast<std::size_t>(i)] = i < counts[r] - recent ? i : length - counts[r] + i;
  d.keep = std::move(keep);
}

TEST(Extension, AnAllocatorThatLeavesRowsUnequalMustSaySo) {
  for (const bool ragged : {false, true}) {
    EXPECT_EQ(allotting([](auto&, Decision& d) { keep_some(d, {24, 23, 24, 24}, 61, 6); }, ragged),
              "step: allocator told of outside leaves rows unequal: 24 slots of layer 0, head 0, and 23 of layer 0, "
              "head 1 of one sequence; allowed with ragged()");
    EXPECT_EQ(allotting([](auto&, Decision& d) { keep_some(d, {20, 20, 20, 21}, 61, 6); }, ragged),
              "step: allocator told of outside leaves rows unequal: 20 slots of layer 0, head 0, and 21 of layer 1, "
              "head 1 of one sequence; allowed with ragged()");
    const auto spare = [](const Evidence&, std::vector<RowLimit>& rows) {
      for (std::size_t r = 0; r < 2; ++r) rows[r].budget = 30, rows[r + 2].due = false;
    };
    EXPECT_EQ(allotting([](auto&, Decision&) {}, ragged, spare, 48),
              "step: allocator told of outside leaves rows unequal: 30 slots of layer 0, head 0, and 61 of layer 1, "
              "head 0 of one sequence; allowed with ragged()");
  }
}

TEST(Extension, AnAllocatorMayLeaveFewerThanTheBudgetInEveryRowAlike) {
  engines::DenseEngine engine(
      policy_of(std::make_unique<Knorm>(), std::make_unique<ToldAllocator>([](const Evidence& e, Decision& d) {
                  Ints counts;
                  for (const Row& row : e.table.rows)
                    counts.push_back(e.table.groups[0].sequence == row.sequence ? 20 : 21);
                  keep_some(d, counts, 61, 6);
                })),
      false, Dtype::f32);
  oracle::Random random(5);
  for (const SequenceId id : {1, 2}) engine.join(id);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}, {2, 60}})));
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 1}, {2, 1}})));
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 20);
  EXPECT_EQ(engine.keeper.physical_length(2, 1, 1), 21);
}

TEST(Extension, APolicyWhoseColumnsWouldNotFitIsRefused) {
  const auto said = testing::refused_decision;
  EXPECT_TRUE(
      said([](auto&, Decision& d) { d.scores.data = numbers(2); }).starts_with("step: scores of told are f32 [2]"));
  EXPECT_TRUE(
      said([](auto&, Decision& d) { d.allotment.emplace(); }).starts_with("step: told says how it divides 0 rows"));
}

TEST(Extension, ATriggerThatNoBudgetCanHaveIsRefused) {
  const auto said = [](Budget budget) {
    return message_of<InvalidArgument>([&] {
      engines::DenseEngine(std::make_unique<ToldPolicy>(Trigger{.budget = budget, .interval = 8}), false, Dtype::f32);
    });
  };
  EXPECT_EQ(said({.unit = Budget::Unit::ratio, .dropped = 1}),
            "Keeper: the trigger of told has a budget that drops a share of 1; allowed 0 up to, not including, 1");
  EXPECT_NE(said({.unit = Budget::Unit::ratio, .dropped = -0.5}).find("drops a share of -0.5"), std::string::npos);
  EXPECT_EQ(said({.unit = Budget::Unit::bytes, .bytes = 0}),
            "Keeper: the trigger of told has a budget of 0 bytes; allowed 1 or more");
  EXPECT_EQ(said({.slots = 24, .growth = -1}),
            "Keeper: the trigger of told has a budget that grows by -1 slots; allowed 0 or more");
}

TEST(Extension, ARangeWithoutAnEndIsListedAsSuch) {
  const auto listed = [](Range range, double value) {
    OptionFields fields = OptionFields::lister();
    fields.real("x", value, range, "of something");
    return fields.listed().front().allowed;
  };
  EXPECT_EQ(listed({-HUGE_VAL, HUGE_VAL}, 0), "a number");
  EXPECT_EQ(listed({0, HUGE_VAL}, 0), "a number, 0.0 or more");
  EXPECT_EQ(listed(Range::above(0, HUGE_VAL), 1), "a number, above 0.0");
  EXPECT_EQ(listed({-HUGE_VAL, 2}, 0), "a number, 2.0 or less");
  EXPECT_EQ(listed(Range::below(-HUGE_VAL, 2), 0), "a number, below 2.0");
  EXPECT_EQ(listed(Range::below(0, 1), 0), "a number in [0.0, 1.0)");
}

/// What narrow() says in the first layer of two prompts, of 30 and of 15 tokens. Nothing may have moved.
std::string narrowing(ToldPrompts::Tell tell, std::int32_t wants = 4) {
  layer_by_layer::Engine engine(std::make_unique<ToldPrompts>(std::move(tell), wants));
  for (const SequenceId id : {1, 2}) engine.join(id);
  engine.begin({{1, 30}, {2, 15}});
  engine.observe(0);
  const Ints before = engine.flat;
  const std::string said = message_of<InvalidArgument>([&] { engine.narrow(0); });
  EXPECT_EQ(engine.flat, before);
  return said;
}

TEST(Extension, APolicyThatNarrowsMayDoWhatItIsToldHere) {
  layer_by_layer::Engine engine(std::make_unique<ToldPrompts>([](auto&, auto&) {}));
  engine.join(1);
  static_cast<void>(engine.step({{1, 30}}));
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 30);
  EXPECT_EQ(engine.keeper.physical_length(1, 1, 0), 15);
}

TEST(Extension, APolicyThatNarrowsToOtherPromptsOrTokensThanThereAreIsRefused) {
  const auto said = [](auto change) {
    return narrowing([change](const Evidence&, LayerDecision& layer) { change(layer, *layer.prompts[1].narrow); });
  };
  const auto put = [](TokenSet& set, std::size_t i, std::int32_t place) { set.tokens.data<std::int32_t>()[i] = place; };
  EXPECT_EQ(said([](LayerDecision& d, auto&) { d.prompts.pop_back(); }),
            "narrow: told decides for 1 prompts; allowed the 2 of the layer");
  EXPECT_EQ(said([](LayerDecision& d, auto&) { d.prompts.resize(3); }),
            "narrow: told decides for 3 prompts; allowed the 2 of the layer");
  EXPECT_TRUE(said([](auto&, TokenSet& set) { set.tokens = {}; }).starts_with("narrow: tokens of told are an absent"));
  EXPECT_TRUE(
      said([](auto&, TokenSet& set) { set.tokens = numbers(8); }).starts_with("narrow: tokens of told are f32"));
  EXPECT_EQ(said([](auto&, TokenSet& set) { set = tokens_of({}); }),
            "narrow: told lets 0 tokens of layer 0 continue; allowed 1 to all 15");
  const std::string allowed = "; allowed ascending ones from 0 to 14",
                    words = "narrow: told lets tokens of layer 0 continue";
  EXPECT_EQ(said([&](auto&, TokenSet& set) { put(set, 0, -3); }), words + " that do not ascend" + allowed);
  EXPECT_EQ(said([&](auto&, TokenSet& set) { put(set, 1, 0); }), words + " that do not ascend" + allowed);
  EXPECT_EQ(said([&](auto&, TokenSet& set) { put(set, 7, 15); }), words + " that are beyond it" + allowed);
  for (const std::vector<std::int64_t>& indptr : {std::vector<std::int64_t>{}, {0, 9}, {0, 4, 8}})
    EXPECT_EQ(said([&](auto&, TokenSet& set) { set.indptr = indptr; }),
              "narrow: offsets of the tokens of told are not those of one prompt; allowed 0 and their number, 8 "
              "(tokens_of() makes them)");
}

TEST(Extension, APolicyThatNarrowsAndCutsOtherRowsThanThereAreIsRefused) {
  const auto said = [](auto change) {
    return narrowing([change](const Evidence&, LayerDecision& layer) {
      layer.prompts[0].cut = true;
      change(layer);
    });
  };
  EXPECT_EQ(said([](LayerDecision& d) { d.rows.keep.reset(); }),
            "narrow: told cuts rows of layer 0, and does not say what stays of them; allowed with Decision::keep");
  EXPECT_TRUE(
      said([](LayerDecision& d) { d.rows.keep->indptr.pop_back(); }).starts_with("narrow: told gave 4 offsets"));
  EXPECT_TRUE(said([](LayerDecision& d) { d.rows.keep->slots = {}; }).starts_with("narrow: kept slots of told are an"));
  EXPECT_EQ(said([](LayerDecision& d) { d.rows.keep->slots.template data<std::int32_t>()[29] = 30; }),
            "narrow: told keeps slots of layer 0, head 0 that are beyond it; allowed ascending ones from 0 to 29");
  EXPECT_TRUE(said([](LayerDecision& d) { d.rows.credit = numbers(2); }).starts_with("narrow: credit of told are f32"));
  EXPECT_TRUE(
      said([](LayerDecision& d) { d.rows.guarded = {4}; }).starts_with("narrow: Decision::guarded of told has 1"));
  EXPECT_EQ(said([](LayerDecision& d) { keep_some(d.rows, {30, 30, 14, 15}, 30, 0); }),
            "narrow: told keeps 14 slots of layer 0, head 0, of a prompt that it does not cut; allowed all 15, or with "
            "`cut`");
}

TEST(Extension, APassOfAPromptThatIsNoneOrWantsOtherQueriesThanThereAreIsRefused) {
  layer_by_layer::Engine engine(std::make_unique<ToldPrompts>(ToldPrompts::Tell()));
  engine.join(1);
  engine.begin({{1, 30}});
  EXPECT_EQ(message_of<InvalidArgument>([&] { engine.observe(0); }),
            "observe: begin_prompt() of told gives none; allowed a PromptPass, of a policy that narrows");
  for (const std::int32_t wants : {-4, 16})
    EXPECT_EQ(
        narrowing([](auto&, auto&) {}, wants),
        text("narrow: told wants the newest ", wants, " queries of layer 0 (PromptPass::wants()); allowed 0 to the ",
             wants < 0 ? 30 : 15, " tokens that reached it"));
}

}  // namespace
}  // namespace kvkeep::extension_test
