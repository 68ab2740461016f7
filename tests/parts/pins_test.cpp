// SPDX-License-Identifier: Apache-2.0
// Pinned spans: what an engine protects stays through every event, under every scorer and allocator, and everything
// else goes on as it would.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "engines.h"
#include "folding_engine.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/state/state_file.h"
#include "message_of.h"

namespace kvkeep::pin_test {
namespace {

using testing::Array;
using namespace engines;
using testing::FoldingEngine;
using testing::message_of;

Ints positions_of(const Keeper& keeper, SequenceId id, std::int32_t row = 0) {
  const auto held = keeper.positions(id, row / kHeads, row % kHeads);
  return {held.begin(), held.end()};
}

Ints from_to(std::int32_t begin, std::int32_t end) {
  Ints all(static_cast<std::size_t>(end - begin));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

/// Every row holds all positions of the spans that have come.
void expect_pinned(const Keeper& keeper, SequenceId id) {
  for (const PositionSpan& span : keeper.part<parts::Pins>().pinned(id))
    for (std::int32_t r = 0; r < kRows; ++r) {
      const Ints held = positions_of(keeper, id, r);
      for (std::int64_t p = span.begin; p < std::min<std::int64_t>(span.end, keeper.logical_length(id)); ++p)
        ASSERT_TRUE(std::ranges::binary_search(held, p)) << "position " << p << " is gone from row " << r;
    }
}

/// One sequence, fed so many tokens a step.
struct Fed {
  explicit Fed(const std::string& policy, std::uint64_t seed = 1, bool ragged = true)
      : engine(policy, ragged, Dtype::f32), random(seed) {
    engine.join(1);
  }
  Report feed(std::int32_t tokens) { return engine.step(numbers_of(random, {{1, tokens}})); }
  void decode(int steps) {
    for (int n = 0; n < steps; ++n) static_cast<void>(feed(1));
  }
  [[nodiscard]] Keeper& keeper() { return engine.keeper; }
  DenseEngine engine;
  oracle::Random random;
};

// ---- The set, and its slots

TEST(Pins, AreASetOfPositions) {
  PositionSpans pins;
  std::set<std::int32_t> plain;
  oracle::Random random(3);
  for (int n = 0; n < 3000; ++n) {
    const std::int32_t begin = random.between(0, 60), end = begin + random.between(1, 12), what = random.between(0, 9);
    if (what == 0) {
      pins.truncate(begin);
      plain.erase(plain.lower_bound(begin), plain.end());
    } else if (what < 4) {
      pins.remove({begin, end});
      plain.erase(plain.lower_bound(begin), plain.lower_bound(end));
    } else {
      pins.add({begin, end});
      for (std::int32_t p = begin; p < end; ++p) plain.insert(p);
    }
    std::set<std::int32_t> held;
    std::int32_t last = -2;
    for (const PositionSpan& span : pins.spans()) {
      ASSERT_LT(last, span.begin) << "spans neither overlap nor touch";
      for (std::int32_t p = span.begin; p < span.end; ++p) held.insert(p);
      last = span.end;
    }
    ASSERT_EQ(held, plain);
    ASSERT_EQ(pins.empty(), plain.empty());
    ASSERT_EQ(holds(pins.spans(), begin), plain.contains(begin));
    ASSERT_EQ(positions_from(begin, pins.spans()), std::distance(plain.lower_bound(begin), plain.end()));
  }
}

TEST(Pins, AreSlotsBetweenSinksAndRecents) {
  const Ints positions{0, 1, 4, 5, 6, 9, 12, 13, 14, 15};
  Row row;
  row.length = 10, row.positions = positions.data();
  const PositionSpan spans[] = {{1, 2}, {5, 10}, {14, 30}};
  SlotRange ranges[3];
  Protected guarded{2, 3};
  protect_pinned(row, spans, 3, 8, guarded, ranges);
  // Sinks 0 and 1; pinned 3, 4, 5; two of the newest are pinned as well, so all three recents fit.
  EXPECT_EQ(guarded.recents, 3);
  EXPECT_EQ(guarded.pinned, 3);
  EXPECT_EQ(guarded.count(), 8);
  for (const std::int32_t t : {0, 1, 3, 4, 5, 7, 8, 9}) EXPECT_TRUE(guarded.holds(t, 10)) << t;
  for (const std::int32_t t : {2, 6}) EXPECT_FALSE(guarded.holds(t, 10)) << t;
  EXPECT_EQ(guarded.pinned_in({4, 9}), 2);
}

TEST(Pins, LeaveRecentsWhatFits) {
  for (int seed = 0; seed < oracle::random_case_count(3000); ++seed) {
    oracle::Random random(static_cast<std::uint64_t>(seed));
    Ints positions;
    for (std::int32_t p = 0; std::ssize(positions) < random.between(1, 60); p += random.between(1, 3))
      positions.push_back(p);
    Row row;
    row.length = static_cast<std::int32_t>(positions.size()), row.positions = positions.data();
    PositionSpans pins;
    for (int n = random.between(0, 4); n > 0; --n) {
      const std::int32_t begin = random.between(0, 90);
      pins.add({begin, begin + random.between(1, 15)});
    }
    const std::int32_t sinks = random.between(0, std::min(4, row.length)), recent = random.between(0, 20),
                       count = static_cast<std::int32_t>(pins.spans().size());
    const std::int32_t pinned = pinned_slots(row, pins.spans().data(), count, sinks),
                       room = random.between(sinks + pinned, row.length);
    std::vector<SlotRange> ranges(4);
    Protected guarded{sinks, std::min(recent, room - sinks)};
    const std::int32_t wanted = guarded.recents;
    protect_pinned(row, pins.spans().data(), count, room, guarded, ranges.data());
    const auto held_with = [&](std::int32_t recents) {
      std::int32_t held = 0;
      for (std::int32_t t = 0; t < row.length; ++t)
        held += t < sinks || t >= row.length - recents || holds(pins.spans(), positions[static_cast<std::size_t>(t)]);
      return held;
    };
    std::int32_t most = wanted;
    while (held_with(most) > room) --most;
    ASSERT_EQ(guarded.count(), held_with(most)) << "seed " << seed;
    for (std::int32_t t = 0; t < row.length; ++t)
      ASSERT_EQ(guarded.holds(t, row.length),
                t < sinks || t >= row.length - most || holds(pins.spans(), positions[static_cast<std::size_t>(t)]))
          << "seed " << seed << ", slot " << t;
  }
}

// ---- By hand

TEST(KeeperPins, KeepsTheSpanAndTheNewestOfTheRest) {
  Fed run("streaming,budget=8,interval=4,sink=1,recent=1", 1, false);
  run.keeper().part<parts::Pins>().pin(1, 3, 5);
  static_cast<void>(run.feed(6));
  run.decode(6);  // twelve slots: an event
  EXPECT_EQ(positions_of(run.keeper(), 1), (Ints{0, 3, 4, 7, 8, 9, 10, 11}));
  run.decode(4);
  EXPECT_EQ(positions_of(run.keeper(), 1), (Ints{0, 3, 4, 11, 12, 13, 14, 15}));
  run.keeper().part<parts::Pins>().unpin(1, 4, 100);
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1).size(), 1U);
  run.decode(4);
  EXPECT_EQ(positions_of(run.keeper(), 1), (Ints{0, 3, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(run.keeper().totals().events, 3);
}

TEST(KeeperPins, HoldsSpansThatCameBeforeTheirTokens) {
  Fed run("tova,budget=40,interval=8,sink=2,recent=4,prefill=cut");
  run.engine.keeper.leave(1), run.engine.keeper.join(1);
  run.engine.keeper.leave(1);
  run.engine.keeper.join(1, 0, 90);
  run.keeper().part<parts::Pins>().pin(1, 10, 25);
  run.keeper().part<parts::Pins>().pin(1, 88, 94);  // two of the prompt, four decoded
  for (const std::int32_t chunk : {12, 40, 38}) static_cast<void>(run.feed(chunk));
  EXPECT_EQ(run.keeper().physical_length(1, 0, 0), 40);
  expect_pinned(run.keeper(), 1);
  run.decode(40);
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1).size(), 2U);
  expect_pinned(run.keeper(), 1);
  EXPECT_GT(run.keeper().totals().events, 3);
}

// ---- Every policy

/// With options small enough for these engines; empty: it needs a calibration or layers, or pins nothing.
std::string small(const PolicyInfo& policy) {
  if (policy.name == "full" || policy.name == "sekv") return "";
  std::string options = ",budget=48,interval=12,sink=2,recent=4,protect_prompt=false";
  if (policy.name.starts_with("ams-")) options += ",allocator.window=8,min_segment=2,max_segment=16";
  if (policy.name.starts_with("chunkkv")) options += ",chunk=7";
  if (policy.name.starts_with("pyramidkv")) options += ",beta=2";  // by default the last layer has room for sinks alone
  for (const char* window : {",scorer.window=8", ""}) try {
      const auto made = make_policy(policy.name + options + window);
      if (!made->narrows() && problems(*made, model(), {.output_projections = output_projections({})}).empty())
        return policy.name + options + window;
    } catch (const Error&) {
    }
  return "";
}

TEST(KeeperPins, HoldUnderEveryPolicyTheBudgetToo) {
  int policies_met = 0;
  for (const PolicyInfo& policy : policies()) {
    const std::string options = small(policy);
    if (options.empty()) continue;
    SCOPED_TRACE(options);
    ++policies_met;
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      Fed run(options, seed);
      const std::int32_t begin = run.random.between(0, 60), length = run.random.between(1, 5);
      run.keeper().part<parts::Pins>().pin(1, begin, begin + length);
      if (seed > 0) run.keeper().part<parts::Pins>().pin(1, begin + 9, begin + 12);
      static_cast<void>(run.feed(run.random.between(20, 70)));
      for (int n = 0; n < 40; ++n) {
        const Report report = run.feed(n % 7 == 0 ? 3 : 1);
        ASSERT_NO_FATAL_FAILURE(expect_pinned(run.keeper(), 1));
        for (const Cut& cut : report.cuts) EXPECT_LE(cut.slots_after, 48 * kRows);
      }
      EXPECT_GT(run.keeper().totals().events, 0);
    }
  }
  EXPECT_GT(policies_met, 30);
}

TEST(KeeperPins, LeaveNoTraceOnceTheyAreGone) {
  for (const char* policy :
       {"ams-tova,budget=48,interval=12,window=8,min_segment=2,max_segment=16",
        "chunkkv-snapkv,budget=48,interval=12,window=8,chunk=5", "h2o,budget=48,interval=12",
        "pyramidkv-knorm,budget=48,interval=12,recent=4,beta=2", "adakv-tova,budget=48,interval=12"}) {
    Fed never(policy), once(policy);
    once.keeper().part<parts::Pins>().pin(1, 3, 30);
    once.keeper().part<parts::Pins>().unpin(1, 0, kMostPositions);
    for (int n = 0; n < 40; ++n) {
      static_cast<void>(never.feed(n == 0 ? 50 : 1));
      static_cast<void>(once.feed(n == 0 ? 50 : 1));
      expect_alike(never.engine, once.engine);
    }
    EXPECT_GT(never.keeper().totals().events, 1);
  }
}

TEST(KeeperPins, HoldInRowsThatShareASelectionAndInRatiosBytesAndPrompts) {
  for (const char* policy :
       {"tova,budget=40,interval=8,share=union", "knorm,budget=40,interval=8,share=per_head",
        "keydiff,budget=40,interval=8,share=union_mean", "tova,ratio=0.5,interval=8,prefill=cut",
        "snapkv,bytes=9000,interval=8,window=4", "tova,budget=60,interval=8,protect_prompt=true",
        "ams-tova,budget=40,interval=8,window=8,min_segment=2,max_segment=16,protected_mass=false,coverage=auto",
        "criticalkv-tova,budget=40,interval=8", "adakv-snapkv,budget=40,interval=8,window=4,safeguard=0"}) {
    SCOPED_TRACE(policy);
    Fed run(policy);
    run.keeper().part<parts::Pins>().pin(1, 12, 20);
    run.keeper().part<parts::Pins>().pin(1, 62, 66);
    static_cast<void>(run.feed(60));
    for (int n = 0; n < 40; ++n) {
      static_cast<void>(run.feed(1));
      ASSERT_NO_FATAL_FAILURE(expect_pinned(run.keeper(), 1));
    }
    EXPECT_GT(run.keeper().totals().events, 0);
  }
}

TEST(KeeperPins, BelongToOneSequenceAlsoInSharedPages) {
  PagedEngine engine("tova,budget=40,interval=8,sink=2,recent=4", false, Dtype::f32, 16, PageLayout::head_slot,
                     Form::apart);
  DenseEngine dense("tova,budget=40,interval=8,sink=2,recent=4", false, Dtype::f32);
  oracle::Random random(5), same(5);
  for (Engine* each : {static_cast<Engine*>(&engine), static_cast<Engine*>(&dense)}) {
    oracle::Random& own = each == &engine ? random : same;
    each->join(1);
    static_cast<void>(each->step(numbers_of(own, {{1, 45}})));
    each->fork(2, 1, 32);
    each->keeper.part<parts::Pins>().pin(2, 10, 24);
    for (int n = 0; n < 30; ++n) static_cast<void>(each->step(numbers_of(own, {{1, 1}, {2, 2}})));
    expect_pinned(each->keeper, 2);
    EXPECT_TRUE(each->keeper.part<parts::Pins>().pinned(1).empty());
    each->keeper.leave(2);
    each->keeper.join(2);
    EXPECT_TRUE(each->keeper.part<parts::Pins>().pinned(2).empty()) << "an id that is used again pins nothing (B4)";
  }
  const Ints a = positions_of(engine.keeper, 1), b = positions_of(dense.keeper, 1);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, from_to(0, static_cast<std::int32_t>(a.size())));
}

// ---- What is refused

TEST(KeeperPins, RefusesWhatDoesNotFitBeforeAnythingIsWritten) {
  Fed run("snapkv,budget=40,interval=8,sink=4,window=8");
  static_cast<void>(run.feed(30));
  run.keeper().part<parts::Pins>().pin(1, 2, 30);  // 26 behind the sinks
  EXPECT_EQ(message_of([&] { run.keeper().part<parts::Pins>().pin(1, 40, 43); }),
            "pin: 29 positions after the 4 sinks of snapkv, whose budget is 40 slots, of which the newest 8 always "
            "stay; allowed up to 28");
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1).size(), 1U);
  run.keeper().part<parts::Pins>().pin(1, 40, 42);
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1)[1], (PositionSpan{40, 42}));
  EXPECT_THROW(run.keeper().part<parts::Pins>().pin(1, 5, 5), InvalidArgument);
  EXPECT_THROW(run.keeper().part<parts::Pins>().pin(1, -1, 5), InvalidArgument);
  EXPECT_THROW(run.keeper().part<parts::Pins>().pin(1, 0, std::int64_t{kMostPositions} + 1), InvalidArgument);
  EXPECT_THROW(run.keeper().part<parts::Pins>().unpin(1, 5, 4), InvalidArgument);
  EXPECT_THROW(run.keeper().part<parts::Pins>().pin(2, 0, 5), StateError);
  EXPECT_THROW(run.keeper().part<parts::Pins>().unpin(2, 0, 5), StateError);
}

TEST(KeeperPins, RefusesAnEventWhoseBudgetIsTooSmallAndGoesOnOnceItFits) {
  Fed run("tova,ratio=0.75,interval=4,sink=2,recent=4,prefill=cut");
  run.keeper().part<parts::Pins>().pin(1, 10, 40);
  const Numbers numbers = numbers_of(run.random, {{1, 80}});
  run.engine.feed(numbers);
  const std::string said = message_of([&] { static_cast<void>(run.engine.cut({1})); });
  EXPECT_NE(said.find("holds 30 pinned slots"), std::string::npos) << said;
  EXPECT_NE(said.find("budget is now 20 slots"), std::string::npos) << said;
  EXPECT_NE(said.find("allowed up to 17"), std::string::npos) << said;
  EXPECT_EQ(run.keeper().physical_length(1, 0, 0), 80) << "nothing was written";
  run.keeper().part<parts::Pins>().unpin(1, 20, 40);
  static_cast<void>(run.engine.cut({1}));
  EXPECT_EQ(run.keeper().physical_length(1, 0, 0), 20);
  expect_pinned(run.keeper(), 1);
}

TEST(KeeperPins, RefusesPositionsThatARowHasDropped) {
  Fed run("streaming,budget=8,interval=4,sink=1,recent=1", 1, false);
  static_cast<void>(run.feed(12));
  run.decode(1);
  ASSERT_EQ(run.keeper().physical_length(1, 0, 0), 8);
  EXPECT_EQ(message_of([&] { run.keeper().part<parts::Pins>().pin(1, 2, 5); }),
            "pin: position 2 of sequence 1 is no longer in layer 0, head 0; allowed positions that every row holds, or "
            "that are still to come");
  run.keeper().part<parts::Pins>().pin(1, 7, 9);
  run.decode(20);
  expect_pinned(run.keeper(), 1);
}

TEST(KeeperPins, AreRefusedByNameWhereNothingIsProtected) {
  Fed official("tova,variant=official,budget=40,interval=8");
  EXPECT_EQ(message_of([&] { official.keeper().part<parts::Pins>().pin(1, 0, 4); }),
            "pin: tova has variant official, and its published form pins nothing; allowed strict");
  const auto narrowing = make_policy("fastkv,layer=1,budget=96,window=16");
  EXPECT_THROW(narrowing->check_pins({}), Unsupported);
  EXPECT_NE(message_of([&] { narrowing->check_pins({}); }).find("fastkv narrows prompts"), std::string::npos);
  Fed full("full");
  full.keeper().part<parts::Pins>().pin(1, 0, 400);
  static_cast<void>(full.feed(30));
}

/// Knows nothing of protected slots.
class Newest final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "newest"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores&, WindowAttention,
             Decision& decision) const override {
    decision.keep = empty_keep_set(evidence.table, limits);
    for (std::size_t r = 0; r < evidence.table.rows.size(); ++r) {
      auto* slots = decision.keep->slots.data<std::int32_t>() + decision.keep->indptr[r];
      std::iota(slots, slots + decision.keep->count(r),
                evidence.table.rows[r].length - static_cast<std::int32_t>(decision.keep->count(r)));
    }
  }
};

TEST(KeeperPins, RefusesTheDecisionOfAnAllocatorThatDropsThem) {
  Retention retention;
  retention.trigger.budget.slots = 20, retention.trigger.interval = 4, retention.sink = 0;
  DenseEngine engine(
      std::make_unique<Evict>("mine", std::make_unique<Knorm>(), std::make_unique<Newest>(), retention, "{}"), false,
      Dtype::f32);
  engine.join(1);
  engine.keeper.part<parts::Pins>().pin(1, 2, 4);
  oracle::Random random(1);
  static_cast<void>(engine.step(numbers_of(random, {{1, 24}})));
  const Numbers numbers = numbers_of(random, {{1, 1}});
  engine.feed(numbers);
  EXPECT_NE(message_of([&] { static_cast<void>(engine.cut({1})); }).find("mine drops pinned slots of layer 0, head 0"),
            std::string::npos);
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 25);
}

// ---- Over time

TEST(KeeperPins, AreTruncatedWithTheirTokens) {
  Fed run("tova,budget=40,interval=8");
  run.keeper().part<parts::Pins>().pin(1, 5, 25);
  static_cast<void>(run.feed(20));
  run.keeper().truncate(1, 15);
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1).size(), 1U);
  EXPECT_EQ(run.keeper().part<parts::Pins>().pinned(1)[0], (PositionSpan{5, 15}));
  run.keeper().leave(1), run.keeper().join(1);
  EXPECT_TRUE(run.keeper().part<parts::Pins>().pinned(1).empty());
}

TEST(KeeperPins, DoNotFold) {
  for (const char* policy :
       {FoldingEngine::kSekv, "sekv,budget=120,recent=12,interval=8,sink=2,memory.max_span=16,memory.min_span=3",
        "ams-tova,budget=32,interval=8,recent=8,window=4,rest=fold,memory.max_span=16,memory.min_span=4"}) {
    SCOPED_TRACE(policy);
    FoldingEngine engine(policy);
    engine.join(1);
    engine.keeper.part<parts::Pins>().pin(1, 20, 31);
    engine.keeper.part<parts::Pins>().pin(1, 90, 94);
    static_cast<void>(engine.step({{1, 80}}));
    for (int n = 0; n < 60; ++n) static_cast<void>(engine.step({{1, 1}}));
    expect_pinned(engine.keeper, 1);
    engine.expect_nothing_lost(1);
    EXPECT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 4);
  }
}

TEST(KeeperPins, ComeBackFromAFile) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / text("kvkeep-pin-", ::getpid(), ".safetensors");
  const char* policy = "tova,budget=40,interval=8,sink=2,recent=4";
  Fed here(policy), there(policy);
  here.keeper().part<parts::Pins>().pin(1, 10, 20);
  here.keeper().part<parts::Pins>().pin(1, 95, 99);
  static_cast<void>(here.feed(60));
  here.decode(3);
  here.keeper().save(1, file);
  there.keeper().leave(1);
  there.keeper().restore(1, file);
  std::filesystem::remove(file);
  ASSERT_TRUE(
      std::ranges::equal(here.keeper().part<parts::Pins>().pinned(1), there.keeper().part<parts::Pins>().pinned(1)));
  there.engine.lengths = here.engine.lengths;
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (const engines::Sided one : engines::kAllSides) {
      const auto side = [&](Fed& run) {
        return Array(engines::side_of(std::get<DenseKv>(run.engine.layers[static_cast<std::size_t>(l)]), one));
      };
      side(there).copy_(side(here));
    }
  there.random = here.random;
  here.decode(40);
  there.decode(40);
  expect_alike(here.engine, there.engine);
  expect_pinned(there.keeper(), 1);
}

TEST(KeeperPins, AreRefusedFromAFileWhoseSpansAreNone) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / text("kvkeep-forged-pin-", ::getpid(), ".safetensors");
  Fed run("tova,budget=40,interval=8,sink=2,recent=4");
  static_cast<void>(run.feed(60));
  run.decode(1);
  run.keeper().save(1, file);
  const io::SafetensorsFile honest = io::SafetensorsFile::open(file);
  EXPECT_EQ(honest.metadata().at("kvkeep_sequence"), "3") << "nothing is pinned: earlier versions read it";
  StateTensors whole;
  for (const std::string& name : honest.names()) whole.emplace_back(name, clone(honest.tensor(name)));
  Ints held;  // by one row alone
  for (std::int32_t p = 2; held.empty(); ++p) {
    std::int32_t rows = 0;
    for (std::int32_t r = 0; r < kRows; ++r) rows += std::ranges::binary_search(positions_of(run.keeper(), 1, r), p);
    if (rows > 0 && rows < kRows) held = {p, p + 1};
  }
  for (const Ints& spans :
       {Ints{5, 5}, Ints{-1, 4}, Ints{3, 9, 9, 12}, Ints{60, 62, 20, 22}, Ints{0, kMostPositions + 1}, held}) {
    Tensor pinned = empty({std::ssize(spans) / 2, 2}, Dtype::i32);
    std::ranges::copy(spans, pinned.data<std::int32_t>());
    StateTensors forged = whole;
    forged.emplace_back("pinned", pinned);
    write_state(file, {forged, honest.metadata()});
    EXPECT_NE(message_of([&] { run.keeper().restore(2, file); }).find("allowed spans that ascend"), std::string::npos);
    EXPECT_FALSE(run.keeper().knows(2));
  }
  StateTensors too_many = whole;
  Tensor pinned = empty({1, 2}, Dtype::i32);
  pinned.data<std::int32_t>()[0] = 61, pinned.data<std::int32_t>()[1] = 500;
  too_many.emplace_back("pinned", pinned);
  write_state(file, {too_many, honest.metadata()});
  EXPECT_NE(message_of([&] { run.keeper().restore(2, file); }).find("allowed up to 37"), std::string::npos);
  std::filesystem::remove(file);
}

TEST(KeeperPins, MakeOlderPlansOutdated) {
  Fed run("tova,budget=20,interval=4");
  run.engine.feed(numbers_of(run.random, {{1, 10}}));
  std::vector<SequenceId> ids{1};
  Ints lengths(kRows, 10), places{1};
  const CacheView view{.sequences = ids, .lengths = {lengths, kRows}, .places = places};
  const Plan plan = run.keeper().plan(view);
  run.keeper().part<parts::Pins>().pin(1, 0, 4);
  EXPECT_THROW(static_cast<void>(run.keeper().apply(plan, view)), StateError);
}

}  // namespace
}  // namespace kvkeep::pin_test
