// SPDX-License-Identifier: Apache-2.0
// The line, in an engine's order of calls: sequences join, grow, are cut, take tokens back, leave.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "message_of.h"

namespace kvkeep::keeper_test {
namespace {

using testing::Array;
using testing::message_of;
using testing::normals;

/// A toy engine: random K, V and queries that depend on (sequence, layer, position) only, so that any schedule feeds
/// the same numbers.
class Engine {
 public:
  Engine(const std::string& policy, std::int32_t places, std::int32_t capacity,
         std::vector<LayerSpec> layers = std::vector<LayerSpec>(3))
      : spec_{.query_heads = 4,
              .kv_heads = 2,
              .key_dim = 8,
              .value_dim = 6,
              .softmax_scale = 0,
              .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
              .layers = std::move(layers)},
        keeper(spec_, make_policy(policy)),
        length_(static_cast<std::size_t>(places), 0) {
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      cache_.emplace_back(
          DenseKv{Array::full({places, 2, capacity, 8}, -7.0F), Array::full({places, 2, capacity, 6}, -9.0F)});
    keeper.bind(cache_);
  }

  struct Work {
    SequenceId id;
    std::int32_t place, tokens;
  };

  /// One step over any subset of the sequences. Returns what the event did.
  Report step(const std::vector<Work>& work, bool cut = true) {
    ids_.clear();
    places_.clear();
    lengths_.clear();
    std::vector<std::int32_t> indptr{0};
    for (const Work& w : work) {
      ids_.push_back(w.id);
      places_.push_back(w.place);
      indptr.push_back(indptr.back() + w.tokens);
    }
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l) {
      Array queries = Array::empty({indptr.back(), 4, 8}, Dtype::f32);
      std::int64_t row = 0;
      for (const Work& w : work)
        for (std::int32_t t = 0; t < w.tokens; ++t, ++row) {
          const std::int64_t position = seen_[w.id] + t;
          fill(queries[row], w.id, l, position, 0);
          const std::int32_t slot = length_[static_cast<std::size_t>(w.place)] + t;
          auto& dense = std::get<DenseKv>(cache_[static_cast<std::size_t>(l)]);
          fill(dense.keys.select(0, w.place).select(1, slot), w.id, l, position, 1);
          fill(dense.values.select(0, w.place).select(1, slot), w.id, l, position, 2);
        }
      const bool read = !sparing || std::ranges::any_of(work, [&](const Work& w) {
        return l > 0 ? reads_ : keeper.tokens_to_event(w.id) - keeper.queries_read() < w.tokens;
      });
      reads_ = read;
      read_ += static_cast<int>(read && l == 0);
      if (read && !unread)
        keeper.observe({.layer = l, .sequences = ids_, .indptr = indptr, .queries = queries});
      else
        keeper.observe({.layer = l, .sequences = ids_, .indptr = indptr, .unread = true});
    }
    for (const Work& w : work) {
      seen_[w.id] += w.tokens;
      length_[static_cast<std::size_t>(w.place)] += w.tokens;
      lengths_.push_back(length_[static_cast<std::size_t>(w.place)]);
    }
    if (!cut) return {};
    const Report report = keeper.step(view());
    for (std::size_t i = 0; i < work.size(); ++i) length_[static_cast<std::size_t>(work[i].place)] = lengths_[i];
    return report;
  }

  CacheView view() { return {.sequences = ids_, .lengths = {lengths_}, .places = places_}; }

  void join(SequenceId id, std::optional<std::int32_t> prompt = {}) {
    keeper.join(id, 0, prompt);
    seen_[id] = 0;
  }
  void leave(const Work& w) {
    keeper.leave(w.id);
    length_[static_cast<std::size_t>(w.place)] = 0;
  }
  void truncate(const Work& w, std::int64_t tokens) {
    const std::int64_t gone = keeper.logical_length(w.id) - tokens;
    keeper.truncate(w.id, tokens);
    seen_[w.id] -= gone;
    length_[static_cast<std::size_t>(w.place)] -= static_cast<std::int32_t>(gone);
  }
  /// Steps whose queries were given.
  [[nodiscard]] int read() const { return read_; }

  /// True when every slot of every row holds the key and value of the position that the keeper says.
  [[nodiscard]] bool holds_what_it_says(const Work& w) {
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto positions = keeper.positions(w.id, l, h);
        for (std::size_t s = 0; s < positions.size(); ++s) {
          const auto& dense = std::get<DenseKv>(cache_[static_cast<std::size_t>(l)]);
          Array both = Array::empty({2, 8}), both_values = Array::empty({2, 6});
          fill(both, w.id, l, positions[s], 1);
          fill(both_values, w.id, l, positions[s], 2);
          if (!Array(dense.keys)[w.place][h][static_cast<std::int64_t>(s)].equal(both[h])) return false;
          if (!Array(dense.values)[w.place][h][static_cast<std::int64_t>(s)].equal(both_values[h])) return false;
        }
      }
    return true;
  }

  [[nodiscard]] std::vector<std::vector<std::int32_t>> kept(SequenceId id) const {
    std::vector<std::vector<std::int32_t>> rows;
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto p = keeper.positions(id, l, h);
        rows.emplace_back(p.begin(), p.end());
      }
    return rows;
  }

 private:
  static void fill(const Array& rows, SequenceId id, std::int32_t layer, std::int64_t position, int what) {
    std::uint64_t x = (static_cast<std::uint64_t>(id) * 1000003 + static_cast<std::uint64_t>(layer)) * 1000003 +
                      static_cast<std::uint64_t>(position) * 31 + static_cast<std::uint64_t>(what);
    Array numbers = Array::empty(rows.sizes(), Dtype::f32);
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
      x = (x + 0x9E3779B97F4A7C15ULL) * 0xBF58476D1CE4E5B9ULL;
      x ^= x >> 29;
      numbers.data<float>()[i] = static_cast<float>(static_cast<double>(x >> 40) / 8388608.0 - 1.0);
    }
    rows.copy_(numbers);
  }

  ModelSpec spec_;

 public:
  Keeper keeper;
  bool sparing = false;  ///< gives only queries that an event may read
  bool unread = false;   ///< no query is given

 private:
  bool reads_ = true;
  int read_ = 0;
  std::vector<LayerKv> cache_;
  std::vector<std::int32_t> length_;
  std::map<SequenceId, std::int64_t> seen_;
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> places_, lengths_;
};

constexpr const char* kAms =
    "ams-tova,budget=24,interval=8,sink=2,recent=4,window=8,segment_mass=0.2,min_segment=2,max_segment=8,min_quota=1";

TEST(Keeper, LogicalLengthNeverShrinksAndSlotsHoldTheirPositions) {  // B1
  Engine engine(kAms, 1, 64);
  engine.join(5);
  const Engine::Work one{5, 0, 1};
  engine.step({{5, 0, 20}});
  int events = 0;
  for (int n = 0; n < 100; ++n) {
    events += static_cast<int>(engine.step({one}).cuts.size());
    EXPECT_EQ(engine.keeper.logical_length(5), 21 + n);
  }
  EXPECT_GE(events, 10);
  EXPECT_EQ(engine.keeper.totals().events, events) << "the counter proves that compression ran";  // B35
  EXPECT_TRUE(engine.holds_what_it_says(one));
}

TEST(Keeper, FiresExactlyAtBudgetPlusInterval) {
  for (const int extra : {-1, 0, 1}) {
    Engine engine(kAms, 1, 64);
    engine.join(1);
    engine.step({{1, 0, 10}});
    const Report report = engine.step({{1, 0, 14 + 8 + extra}});
    EXPECT_EQ(report.cuts.size(), extra < 0 ? 0U : 1U) << extra;
  }
}

TEST(Keeper, LeavesThePromptToTheFirstDecodedTokenUnlessAskedToCutIt) {
  const auto lengths = [](const std::string& prefill) {
    Engine engine(std::string(kAms) + ",prefill=" + prefill, 1, 64);
    engine.join(1, 40);
    engine.step({{1, 0, 30}});
    EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 30) << "no event in the middle of a prompt";
    engine.step({{1, 0, 10}});
    std::vector<std::int32_t> seen{engine.keeper.physical_length(1, 0, 0)};
    for (int n = 0; n < 9; ++n) {
      engine.step({{1, 0, 1}});
      seen.push_back(engine.keeper.physical_length(1, 0, 0));
    }
    return seen;
  };
  EXPECT_EQ(lengths("keep"), (std::vector<std::int32_t>{40, 24, 25, 26, 27, 28, 29, 30, 31, 24}));
  EXPECT_EQ(lengths("cut"), (std::vector<std::int32_t>{24, 25, 26, 27, 28, 29, 30, 31, 24, 25}));
  EXPECT_EQ(lengths("only"), (std::vector<std::int32_t>{24, 25, 26, 27, 28, 29, 30, 31, 32, 33}));
}

TEST(Keeper, TheCounterFiresEveryIntervalDecodedTokensIfThereIsMoreThanTheBudget) {
  Engine engine(std::string(kAms) + ",trigger=counter", 1, 64);
  engine.join(1);
  engine.step({{1, 0, 10}});
  std::vector<std::int32_t> fired;
  for (int n = 1; n <= 40; ++n)
    if (!engine.step({{1, 0, 1}}).cuts.empty()) fired.push_back(n);
  EXPECT_EQ(fired, (std::vector<std::int32_t>{16, 24, 32, 40})) << "at 8 there are 18 slots, not more than 24";
  EXPECT_EQ(engine.step({{1, 0, 20}}).cuts.size(), 1U) << "tokens are counted, not steps";
}

TEST(Keeper, AProtectedPromptStaysWholeAndRaisesTheBudgetWhereItDoesNotFit) {
  for (const std::int32_t prompt : {6, 18, 22, 40}) {
    Engine engine(std::string(kAms) + ",protect_prompt=true", 1, 96);
    engine.join(1, prompt);
    engine.step({{1, 0, prompt}});
    int events = 0;
    for (int n = 0; n < 60; ++n) {
      const Report report = engine.step({{1, 0, 1}});
      if (report.cuts.empty()) continue;
      ++events;
      EXPECT_EQ(report.cuts[0].length_after, std::max(24, prompt + 4)) << prompt;
      for (const auto& row : engine.kept(1)) {
        for (std::int32_t p = 0; p < prompt; ++p) ASSERT_EQ(row[static_cast<std::size_t>(p)], p);
        EXPECT_EQ(row.back(), engine.keeper.logical_length(1) - 1);
      }
    }
    EXPECT_GE(events, 3) << prompt;
  }
}

TEST(Keeper, ABudgetThatGrowsStandsOnTopOfThePrompt) {  // RPC as published, in small: 6 slots after 16 decoded tokens,
                                                        // 4 more after every further 16
  Engine engine("rpc,budget=6,style=official,interval=16,growth=4,window=2", 1, 128);
  engine.join(1);
  engine.step({{1, 0, 30}});
  std::vector<std::int32_t> lengths;
  for (std::int32_t d = 1; d <= 70; ++d) {
    if (engine.step({{1, 0, 1}}).cuts.empty()) continue;
    EXPECT_EQ(d % 16, 0);
    lengths.push_back(engine.keeper.physical_length(1, 0, 0));
    const auto rows = engine.kept(1);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::int32_t p = 0; p < 30; ++p)
        ASSERT_EQ(rows[r][static_cast<std::size_t>(p)], p) << "the prompt stays whole";
      EXPECT_EQ(rows[r].back(), 30 + d - 1);
      EXPECT_EQ(rows[r][rows[r].size() - 2], 30 + d - 2);
      EXPECT_EQ(rows[r], rows[r - r % 2]) << "the heads of a layer rank alike";
    }
  }
  EXPECT_EQ(lengths, (std::vector<std::int32_t>{36, 40, 44, 48}));
  EXPECT_TRUE(engine.holds_what_it_says({1, 0, 1}));
}

TEST(Keeper, CountsTheBudgetInSharesAndInBytes) {
  Engine half("ams-tova,ratio=0.5,interval=8,sink=2,recent=4,window=8", 1, 96);
  half.join(1);
  half.step({{1, 0, 20}});
  for (int n = 0; n < 60; ++n) {
    const Report report = half.step({{1, 0, 1}});
    for (const Cut& cut : report.cuts) EXPECT_EQ(cut.length_after, cut.logical_length / 2);
  }
  EXPECT_GE(half.keeper.totals().events, 2);

  constexpr std::int64_t kSlot = 3 * 2 * (8 + 6) * 4;  // layers, heads, floats of K and V
  Engine bytes("tova,bytes=" + std::to_string(20 * kSlot + 5) + ",interval=8,sink=2,recent=4", 1, 64);
  bytes.join(1);
  bytes.step({{1, 0, 10}});
  for (int n = 0; n < 17; ++n) bytes.step({{1, 0, 1}});
  const Report report = bytes.step({{1, 0, 1}});
  ASSERT_EQ(report.cuts.size(), 1U);
  EXPECT_EQ(report.bytes_after, 20 * kSlot);
}

TEST(Budget, IsExactForEveryRatioAndNeverNothing) {  // B11
  for (std::int64_t n = 1; n <= 300; ++n)
    for (std::int64_t percent = 0; percent < 100; ++percent) {
      const Budget budget{.unit = Budget::Unit::ratio, .dropped = static_cast<double>(percent) / 100};
      ASSERT_EQ(budget.resolve({n}, {0}, 1), std::max<std::int64_t>(1, n * (100 - percent) / 100))
          << n << " tokens, " << percent << " %";
    }
}

TEST(Budget, InBytesIsRoundedDown) {
  const Budget budget{.unit = Budget::Unit::bytes, .bytes = 100};
  EXPECT_EQ(budget.resolve({50}, {0}, 25), 4);
  EXPECT_EQ(budget.resolve({50}, {0}, 26), 3);
}

TEST(Keeper, RefusesAPolicyThatTheEngineCannotFeedWithEveryReason) {
  ModelSpec spec{.query_heads = 0,
                 .kv_heads = 2,
                 .key_dim = 8,
                 .value_dim = 6,
                 .softmax_scale = 0,
                 .rope = {},
                 .layers = std::vector<LayerSpec>(2)};
  const auto policy = make_policy("tova,budget=24");
  EXPECT_EQ(problems(*policy, spec, {.queries = false, .output_projections = {}}).size(), 2U);
  try {
    Keeper keeper(spec, make_policy("tova,budget=24"), {.queries = false, .output_projections = {}});
    ADD_FAILURE() << "was accepted";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("tova reads the newest 1"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("query_heads"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(
      problems(*make_policy("streaming,budget=24"), spec, {.queries = false, .output_projections = {}}).empty());
}

TEST(Keeper, SharedSelectionsAreTheSameInEveryRowThatShares) {
  for (const std::string share : {"per_head", "union", "union_mean"}) {
    Engine engine("tova,budget=24,interval=8,sink=2,recent=4,heads=group,share=" + share, 1, 64);
    engine.join(1);
    engine.step({{1, 0, 20}});
    for (int n = 0; n < 30; ++n) engine.step({{1, 0, 1}});
    EXPECT_GE(engine.keeper.totals().events, 3);
    const auto kept = engine.kept(1);
    for (std::size_t r = 2; r < kept.size(); ++r) EXPECT_EQ(kept[r], kept[r % 2]) << share << " row " << r;
    EXPECT_EQ(kept[0] == kept[1], share != "per_head");
    EXPECT_TRUE(engine.holds_what_it_says({1, 0, 0}));
  }
}

TEST(Keeper, ContinuousBatchingGivesEachSequenceWhatItWouldGetAlone) {  // B4, B5, B14
  Engine together(kAms, 3, 80);
  std::map<SequenceId, std::vector<std::vector<std::int32_t>>> kept;
  // Three sequences with different prompts; one leaves in mid-interval and another takes its place; steps carry
  // changing subsets.
  together.join(1);
  together.join(2);
  together.step({{1, 0, 17}, {2, 1, 30}});
  for (int n = 0; n < 11; ++n) together.step({{2, 1, 1}, {1, 0, 1}});
  together.leave({2, 1, 0});
  together.join(3);
  together.step({{3, 1, 40}, {1, 0, 1}});
  for (int n = 0; n < 30; ++n)
    together.step(n % 3 == 0 ? std::vector<Engine::Work>{{1, 0, 1}} : std::vector<Engine::Work>{{3, 1, 1}, {1, 0, 1}});
  EXPECT_TRUE(together.holds_what_it_says({1, 0, 0}));
  EXPECT_TRUE(together.holds_what_it_says({3, 1, 0}));

  Engine first(kAms, 1, 80);
  first.join(1);
  first.step({{1, 0, 17}});
  for (int n = 0; n < 42; ++n) first.step({{1, 0, 1}});
  EXPECT_EQ(together.kept(1), first.kept(1));
  Engine third(kAms, 1, 80);
  third.join(3);
  third.step({{3, 0, 40}});
  for (int n = 0; n < 20; ++n) third.step({{3, 0, 1}});
  EXPECT_EQ(together.kept(3), third.kept(3));
}

TEST(Keeper, ASecondSequenceInTheSamePlaceIsLikeAFreshKeeper) {  // B4
  Engine engine(kAms, 1, 64);
  engine.join(1);
  engine.step({{1, 0, 40}});
  engine.leave({1, 0, 0});
  EXPECT_FALSE(engine.keeper.knows(1)) << "B5: nothing stays of an aborted sequence";
  engine.join(2);
  engine.step({{2, 0, 35}});
  Engine fresh(kAms, 1, 64);
  fresh.join(2);
  fresh.step({{2, 0, 35}});
  EXPECT_EQ(engine.kept(2), fresh.kept(2));
}

TEST(Keeper, ChunkedPrefillKeepsTheSameSet) {  // B19: exact, TOVA and AMS see the last queries only
  std::vector<std::vector<std::int32_t>> want;
  for (const int chunk : {60, 1, 7, 16, 59}) {
    Engine engine(std::string(kAms) + ",prefill=cut", 1, 64);
    engine.join(9, 60);
    for (int done = 0; done < 60; done += chunk) engine.step({{9, 0, std::min(chunk, 60 - done)}});
    if (want.empty()) want = engine.kept(9);
    EXPECT_EQ(engine.kept(9), want) << "chunks of " << chunk;
    EXPECT_EQ(engine.keeper.physical_length(9, 0, 0), 24);
  }
}

TEST(Keeper, NeedsNoQueriesButThoseBeforeAnEvent) {
  for (const char* policy :
       {kAms, "tova,budget=24,interval=8", "snapkv,scorer.window=4,budget=24,interval=16,prefill=cut",
        "h2o,budget=24,interval=8", "rkv,budget=24,interval=8", "expected,budget=24,interval=12,scorer.queries=6",
        "tova,budget=24,interval=8,prefill=only", "knorm,budget=24,interval=8",
        "tova,budget=24,interval=8,recent=4,trigger=counter",
        "ams-tova,budget=24,interval=7,recent=4,window=8,min_segment=2,max_segment=8,trigger=counter",
        "snapkv,scorer.window=4,budget=24,interval=16,recent=4,trigger=counter,prefill=cut",
        "rkv,budget=24,interval=5,recent=4,trigger=counter,growth=1"}) {
    Engine all(policy, 1, 300), few(policy, 1, 300);
    few.sparing = true;
    std::mt19937 random(3);
    for (Engine* e : {&all, &few}) {
      random.seed(3);
      e->join(1);
      e->step({{1, 0, 30}});
      for (int i = 0; i < 50; ++i) {
        if (i % 4 == 3) e->step({{1, 0, 1 + static_cast<int>(random() % 9)}});  // several tokens at once
        if (i % 9 == 4 && e->keeper.tokens_to_event(1) > 3) {                   // speculation that fails
          const std::int64_t tokens = e->keeper.logical_length(1);
          e->step({{1, 0, 3}});
          e->truncate({1, 0, 0}, tokens + 1);
        }
        e->step({{1, 0, 1}});
      }
    }
    EXPECT_EQ(few.kept(1), all.kept(1)) << policy;
    EXPECT_EQ(few.keeper.totals().events, all.keeper.totals().events) << policy;
    EXPECT_LE(few.read(), all.read()) << policy;
  }
  Engine tova("tova,budget=24,interval=16", 1, 128);
  tova.sparing = true;
  tova.join(1);
  tova.step({{1, 0, 8}});
  for (int i = 0; i < 80; ++i) tova.step({{1, 0, 1}});
  EXPECT_EQ(tova.keeper.totals().events, 4);
  EXPECT_EQ(tova.read(), 1 + 4) << "the prompt, and the newest token of each event";
}

TEST(Keeper, RefusesAnEventOverQueriesThatNobodyGave) {
  Engine engine("tova,budget=24,interval=8,recent=4", 1, 128);
  engine.join(1);
  engine.step({{1, 0, 31}});
  EXPECT_EQ(engine.keeper.tokens_to_event(1), 1);
  engine.unread = true;
  const auto before = engine.kept(1);
  EXPECT_EQ(
      testing::message_of<StateError>([&] { engine.step({{1, 0, 1}}); }),
      "step: an event of sequence 1 reads the newest 1 queries of layer 0, but 1 of them were observed as unread; "
      "allowed if they were given, as tokens_to_event() and queries_read() say");
  EXPECT_EQ(engine.keeper.totals().events, 0);
  engine.unread = false;
  EXPECT_EQ(engine.step({{1, 0, 1}}).cuts.size(), 1U) << "the window holds what was given since";
}

TEST(Keeper, APromptMayEndLaterThanItWasKnownTo) {
  Engine engine("tova,budget=8,interval=4,prefill=cut", 1, 64), whole("tova,budget=8,interval=4,prefill=cut", 1, 64);
  engine.join(1, kOpenPrompt);
  EXPECT_THROW(engine.keeper.end_prompt(1), StateError) << "no tokens yet";
  engine.step({{1, 0, 20}});
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 20);
  engine.step({{1, 0, 5}}, false);
  engine.keeper.end_prompt(1);
  EXPECT_THROW(engine.keeper.end_prompt(1), StateError);
  EXPECT_EQ(engine.keeper.prompt_length(1), 25);
  engine.keeper.step(engine.view());
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 8);
  whole.join(1);
  whole.step({{1, 0, 25}});
  EXPECT_EQ(engine.kept(1), whole.kept(1));
}

TEST(Keeper, PlanSaysWhatApplyDoes) {
  Engine engine(kAms, 1, 64);
  engine.join(1);
  engine.step({{1, 0, 20}});
  engine.step({{1, 0, 20}}, false);
  const CacheView view = engine.view();
  const Plan plan = engine.keeper.plan(view);
  ASSERT_EQ(plan.cuts.size(), 1U);
  EXPECT_EQ(plan.cuts[0].length_before, 40);
  EXPECT_EQ(plan.cuts[0].length_after, 24);
  EXPECT_EQ(plan.bytes_before, 3 * 2 * 40 * (8 + 6) * 4);
  EXPECT_EQ(plan.bytes_after, 3 * 2 * 24 * (8 + 6) * 4);
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 40) << "a plan moves nothing";
  const Report report = engine.keeper.apply(plan, view);
  EXPECT_EQ(report.bytes_after, plan.bytes_after);
  EXPECT_EQ(report.slots_dropped, 3 * 2 * 16);
  EXPECT_EQ(view.lengths.at(0, 0), 24);
  EXPECT_THROW(static_cast<void>(engine.keeper.apply(plan, view)), StateError) << "a plan is good once";
}

TEST(Keeper, AppliesNoPlanOfAnother) {
  Engine engine(kAms, 1, 64), other(kAms, 1, 64);
  for (Engine* e : {&engine, &other}) {
    e->join(1);
    e->step({{1, 0, 20}});
    e->step({{1, 0, 20}}, false);
  }
  const CacheView view = engine.view();
  const Plan own = engine.keeper.plan(view), foreign = other.keeper.plan(other.view());
  ASSERT_EQ(own.version, foreign.version) << "else this would be no test";
  try {
    static_cast<void>(engine.keeper.apply(foreign, view));
    FAIL() << "the plan of another keeper was applied";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("not from this keeper"), std::string::npos) << error.what();
  }
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 40);
  EXPECT_THROW(static_cast<void>(engine.keeper.apply({}, view)), StateError) << "nobody made this one";
  EventHandle event = engine.keeper.apply(own, view);
  EXPECT_TRUE(event.done()) << "nothing is left to wait for on the CPU";
  EXPECT_EQ(event.wait().cuts.size(), 1U);
}

TEST(Keeper, AppliesEitherOfTwoCurrentPlansAndThenNotTheOther) {
  for (const bool first : {true, false}) {
    Engine engine(kAms, 1, 64);
    engine.join(1);
    engine.step({{1, 0, 20}});
    engine.step({{1, 0, 20}}, false);
    const CacheView view = engine.view();
    const Plan a = engine.keeper.plan(view), b = engine.keeper.plan(view);
    EXPECT_EQ(engine.keeper.apply(first ? a : b, view).wait().cuts.size(), 1U);
    EXPECT_THROW(static_cast<void>(engine.keeper.apply(first ? b : a, view)), StateError);
  }
}

TEST(Keeper, TruncateIsExactOrThrows) {  // B6
  Engine engine(kAms, 1, 64), other(kAms, 1, 64);
  for (Engine* e : {&engine, &other}) {
    e->join(1);
    e->step({{1, 0, 20}});
  }
  engine.step({{1, 0, 5}});
  engine.keeper.truncate(1, 20);
  EXPECT_EQ(engine.keeper.logical_length(1), 20);
  EXPECT_EQ(engine.kept(1), other.kept(1));
  EXPECT_THROW(engine.keeper.truncate(1, 21), InvalidArgument);
  other.step({{1, 0, 20}});  // an event
  EXPECT_THROW(other.keeper.truncate(1, 39), StateError) << "what was dropped is gone";
}

TEST(Keeper, FullTouchesNothing) {  // B36
  Engine engine("full", 1, 300);
  engine.join(1);
  for (int n = 0; n < 250; ++n) EXPECT_TRUE(engine.step({{1, 0, 1}}).cuts.empty());
  EXPECT_TRUE(engine.holds_what_it_says({1, 0, 0}));
  EXPECT_EQ(engine.keeper.totals().bytes_moved, 0);
  EXPECT_EQ(engine.keeper.physical_length(1, 2, 1), 250);
}

TEST(Keeper, NewTokensSurviveAtLeastRecentSteps) {  // B17
  Engine engine("tova,budget=16,interval=1,sink=2,recent=6", 1, 64);
  engine.join(1);
  engine.step({{1, 0, 16}});
  for (std::int32_t n = 0; n < 60; ++n) {
    engine.step({{1, 0, 1}});
    for (const auto& row : engine.kept(1))
      for (std::int32_t back = 0; back < 6; ++back)
        ASSERT_TRUE(std::binary_search(row.begin(), row.end(), 16 + n - back));
  }
}

TEST(Keeper, LeavesOtherLayersAlone) {  // sliding and shared layers
  std::vector<LayerSpec> layers(4);
  layers[1] = {LayerKind::sliding, 8, -1};
  layers[3] = {LayerKind::shared, 0, 2};
  Engine engine(kAms, 1, 64, layers);
  engine.join(1);
  engine.step({{1, 0, 20}});
  engine.step({{1, 0, 20}}, false);
  const auto keys = [&] { return Array(std::get<DenseKv>(engine.keeper.layers()[1]).keys); };
  const Array sliding = keys().clone();
  engine.keeper.step(engine.view());
  EXPECT_TRUE(sliding.equal(keys()));
  EXPECT_THROW(static_cast<void>(engine.keeper.positions(1, 1, 0)), InvalidArgument);
  EXPECT_EQ(engine.keeper.physical_length(1, 2, 0), 24);
}

TEST(Keeper, APrefixThatItNeverSawIsKeptTrackOf) {
  ModelSpec spec{.query_heads = 2,
                 .kv_heads = 1,
                 .key_dim = 4,
                 .value_dim = 4,
                 .softmax_scale = 0,
                 .rope = {.inv_freq = {1.0, 0.01}},
                 .layers = std::vector<LayerSpec>(1)};
  Keeper keeper(spec, make_policy("tova,budget=8,interval=4,sink=1,recent=2"));
  keeper.join(7, 10);
  const SequenceId id = 7;
  const std::int32_t indptr[] = {0, 2};
  keeper.observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = normals(1, {2, 2, 4})});
  EXPECT_EQ(keeper.logical_length(7), 12);
  std::int32_t length = 12;
  keeper.bind({DenseKv{normals(2, {1, 1, 16, 4}), normals(3, {1, 1, 16, 4})}});
  keeper.step({{&id, 1}, {{&length, 1}}});
  EXPECT_EQ(length, 8);
  EXPECT_EQ(keeper.positions(7, 0, 0).back(), 11);
}

/// What is thrown says what was wrong; afterwards everything is as before.
template <class E>
void expect_refused(Engine& engine, const std::function<void()>& call, const std::string& word) {
  const auto before = engine.kept(1);
  const auto length = engine.keeper.logical_length(1);
  try {
    call();
    ADD_FAILURE() << "was accepted; the message should have said " << word;
  } catch (const E& e) {
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
  EXPECT_EQ(engine.kept(1), before);
  EXPECT_EQ(engine.keeper.logical_length(1), length);
}

TEST(Keeper, RefusesBadInputBeforeAnythingChanges) {
  Engine engine(kAms, 1, 64);
  engine.join(1);
  engine.step({{1, 0, 30}});
  const SequenceId id = 1, stranger = 99;
  const std::int32_t indptr[] = {0, 1};
  const Array q = normals(4, {1, 4, 8});
  const auto observe = [&](Observation o) { return [&engine, o] { engine.keeper.observe(o); }; };
  expect_refused<StateError>(engine, observe({.layer = 0, .sequences = {&stranger, 1}, .indptr = indptr, .queries = q}),
                             "sequence 99 is not known");
  expect_refused<InvalidArgument>(engine, observe({.layer = 3, .sequences = {&id, 1}, .indptr = indptr, .queries = q}),
                                  "layer 3 is out of range; allowed 0 to 2");
  expect_refused<InvalidArgument>(engine, observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr}),
                                  "needs the last 8");
  expect_refused<InvalidArgument>(
      engine, observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = normals(5, {1, 4, 9})}),
      "allowed [1, 4, 8]");
  expect_refused<InvalidArgument>(
      engine, observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = q.to(Dtype::i32)}),
      "allowed f32, f16, bf16");
  expect_refused<InvalidArgument>(
      engine, observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = q.to(Dtype::bf16)}),
      "allowed one dtype");
  expect_refused<InvalidArgument>(
      engine,
      observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = q, .basis = QueryBasis::post_rope}),
      "allowed one basis");
  const std::int32_t past = 3;
  expect_refused<InvalidArgument>(
      engine, observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = q, .positions = {&past, 1}}),
      "allowed 30 or more");

  engine.step({{1, 0, 4}}, false);
  using Layers = std::vector<LayerKv>;
  const auto bind = [&](const std::function<void(Layers&)>& change) {
    return [&engine, change] {
      Layers layers(engine.keeper.layers().begin(), engine.keeper.layers().end());
      change(layers);
      engine.keeper.bind(layers);
    };
  };
  expect_refused<InvalidArgument>(engine, bind([](Layers& l) { l.pop_back(); }), "it has 2 layers");
  expect_refused<InvalidArgument>(
      engine, bind([](Layers& l) { std::get<DenseKv>(l[1]).keys = Array::zeros({1, 3, 64, 8}); }), "layer 1");
  expect_refused<InvalidArgument>(engine, bind([](Layers& l) { l[2] = std::monostate{}; }), "layer 2 has no rows");
  expect_refused<InvalidArgument>(engine, bind([](Layers& l) { l[0] = PagedKv{}; }),
                                  "keys of layer 0 are absent; allowed [pages, page_size, 2, 8]");
  const auto pages = [](std::int64_t size) {
    return PagedKv{Array::zeros({9, size, 2, 8}), Array::zeros({9, size, 2, 6})};
  };
  const auto paged = [&](std::int64_t size) {
    return bind([&, size](Layers& l) {
      for (auto& one : l)
        if (!std::holds_alternative<std::monostate>(one)) one = pages(size);
    });
  };
  expect_refused<InvalidArgument>(engine, paged(1025), "pages of layer 0 hold 1025 slots on cpu; allowed 1 to 1024");
  expect_refused<InvalidArgument>(engine, bind([&](Layers& l) { l[0] = pages(16); }), "as in the first layer");
  expect_refused<InvalidArgument>(
      engine,
      bind([](Layers& l) { l[0] = DenseKv{Array::zeros({1, 2, 64, 8}, Dtype::bf16), std::get<DenseKv>(l[0]).values}; }),
      "layer 1 holds");
  expect_refused<InvalidArgument>(
      engine, bind([](Layers& l) { std::get<DenseKv>(l[1]).keys = std::get<DenseKv>(l[0]).keys; }), "share memory");
  const Layers own(engine.keeper.layers().begin(), engine.keeper.layers().end());
  const auto step = [&] { engine.keeper.step(engine.view()); };
  paged(16)();
  expect_refused<InvalidArgument>(engine, step, "a paged layer needs one");
  engine.keeper.bind(own);
  const Plan stale = engine.keeper.plan(engine.view());
  engine.keeper.bind(own);
  expect_refused<StateError>(engine, [&] { engine.keeper.apply(stale, engine.view()); }, "the plan is out of date");
  std::int32_t wrong = 33;
  CacheView view = engine.view();
  view.lengths.data = {&wrong, 1};
  expect_refused<StateError>(engine, [&] { engine.keeper.step(view); }, "kvkeep has seen 34");
  EXPECT_EQ(engine.keeper.plan(engine.view()).cuts.size(), 1U) << "after all that the event still runs";
}

TEST(Keeper, DecidesNothingBeforeACacheIsBound) {
  Keeper keeper({.query_heads = 1, .kv_heads = 1, .key_dim = 4, .value_dim = 4, .layers = std::vector<LayerSpec>(1)},
                make_policy("streaming,budget=4,interval=2,sink=1,recent=1"));
  const SequenceId id = 1;
  std::int32_t length = 6;
  keeper.join(id, length);
  EXPECT_TRUE(keeper.layers().empty());
  EXPECT_EQ(message_of<StateError>([&] { keeper.step({{&id, 1}, {{&length, 1}}}); }),
            "step: no cache is bound; allowed after bind()");
  EXPECT_EQ(keeper.logical_length(id), 6);
}

TEST(Keeper, LeavesASequenceAsItIsWhereAQueryIsNotFiniteAndNamesIt) {
  Engine engine(kAms, 1, 64);
  engine.join(1);
  engine.step({{1, 0, 31}});
  const SequenceId id = 1;
  const std::int32_t indptr[] = {0, 1};
  Array q = normals(6, {1, 4, 8});
  q[0][2][5].fill_(std::numeric_limits<float>::quiet_NaN());
  for (std::int32_t l = 0; l < 3; ++l)
    engine.keeper.observe({.layer = l, .sequences = {&id, 1}, .indptr = indptr, .queries = q});
  std::int32_t length = 32, place = 0;
  CacheView view = engine.view();
  view.lengths.data = {&length, 1};
  view.places = {&place, 1};
  const Report report = engine.keeper.step(view);
  EXPECT_TRUE(report.cuts.empty());
  ASSERT_EQ(report.unscored.size(), 1U);
  EXPECT_EQ(report.unscored[0].sequence, 1);
  EXPECT_EQ(report.unscored[0].layer, 0);
  EXPECT_EQ(report.unscored[0].position, 31);
  EXPECT_EQ(length, 32);
  EXPECT_EQ(engine.keeper.totals().unscored, 1);
}

TEST(Keeper, AMissedLayerIsNamed) {
  Engine engine(kAms, 1, 64);
  engine.join(1);
  engine.step({{1, 0, 31}});
  const SequenceId id = 1;
  const std::int32_t indptr[] = {0, 1};
  for (const std::int32_t l : {0, 2})
    engine.keeper.observe({.layer = l, .sequences = {&id, 1}, .indptr = indptr, .queries = normals(7, {1, 4, 8})});
  std::int32_t length = 32;
  CacheView view = engine.view();
  view.lengths.data = {&length, 1};
  EXPECT_THROW(engine.keeper.step(view), StateError);
}

}  // namespace
}  // namespace kvkeep::keeper_test
