// SPDX-License-Identifier: Apache-2.0
// The allocators beside AMS: examples by hand, slow second implementations on random events, and what must hold
// whatever the scores are.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "arrays.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/pyramid.h"
#include "kvkeep/kvkeep.h"
#include "loop_threads.h"
#include "oracle/allocators_oracle.h"
#include "oracle/random_case.h"
#include "scorer_case.h"

namespace kvkeep::allocators_test {
namespace {

using oracle::AllotHead;
using oracle::Random;
using testing::Array;
using testing::LoopThreads;
using testing::normals;
using testing::ScorerArrangement;
using testing::ScorerCase;
using Ints = std::vector<std::int32_t>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Rows of one layer, sequence after sequence, `heads` each, of these lengths.
RowTable rows_of_lengths(const Ints& lengths, std::int32_t heads, std::int32_t layer = 0) {
  RowTable table;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    const std::int32_t head = static_cast<std::int32_t>(r) % heads, sequence = static_cast<std::int32_t>(r) / heads;
    if (head == 0) {
      RowGroup& group = table.groups.emplace_back();
      group.layer = layer, group.sequence = sequence, group.first_row = static_cast<std::int64_t>(r);
    }
    Row& row = table.rows.emplace_back();
    row.layer = layer, row.sequence = sequence, row.head = head, row.length = lengths[r], row.first = table.slots;
    table.slots += lengths[r];
  }
  return table;
}

ModelSpec small_spec(std::int32_t heads, std::int32_t dim = 1) {
  return {
      .query_heads = heads, .kv_heads = heads, .key_dim = dim, .value_dim = dim, .rope = {}, .layers = {LayerSpec{}}};
}

Decision decision_with(const std::vector<float>& scores) {
  Decision decision;
  decision.scores.data = Array::empty({static_cast<std::int64_t>(scores.size())}, Dtype::f32);
  std::copy(scores.begin(), scores.end(), decision.scores.data.data<float>());
  return decision;
}

std::int64_t sum_of(const Ints& v) { return std::accumulate(v.begin(), v.end(), std::int64_t{0}); }

/// Scores as shares of attention are: not negative, few large ones; sometimes with ties, one value only, or NaN and
/// infinity among them.
std::vector<float> random_scores(Random& random, std::int64_t n) {
  const int kind = random.between(0, 4);
  std::vector<float> scores(static_cast<std::size_t>(n));
  for (float& g : scores) {
    const double heavy = std::exp(2 * random.normal()) / 100;
    if (kind <= 1)
      g = static_cast<float>(heavy);
    else if (kind == 2)
      g = static_cast<float>(random.between(0, 3)) / 4;
    else if (kind == 3)
      g = 0.25F;
    else
      g = random.chance(0.2) ? random.one_of({kNaN, kInfinity, -kInfinity, 0.0F, -0.0F}) : static_cast<float>(heavy);
  }
  return scores;
}

/// A random event with scores and limits of the allocator.
struct Event {
  ScorerCase made;
  ScorerArrangement memory;
  std::vector<float> scores;  ///< flat over the rows
  Limits limits;

  Event(const Allocator& allocator, std::uint64_t seed, bool ragged)
      : made(seed, {.longest = 120, .most_queries = 1, .ragged = ragged}), memory(made.arranged()) {
    Random random(seed + 99);
    scores = random_scores(random, memory.table().slots);
    settle(allocator, random.one_of({0, 0, 1, 4}), random.one_of({0, 0, 1, 8}));
    if (random.chance(0.4)) pin(random);
  }
  Event(const ScorerCase& from, const ScorerCase::Layout& layout) : made(from), memory(made.arranged(layout)) {}

  [[nodiscard]] const RowTable& table() const { return memory.table(); }
  [[nodiscard]] std::int32_t budget_of(const RowGroup& group) const {  // the same for every head
    return memory.input(table().rows[static_cast<std::size_t>(group.first_row)]).heads.front().budget;
  }

  void settle(const Allocator& allocator, std::int32_t sink, std::int32_t recent) {
    limits.rows.resize(table().rows.size());
    std::vector<std::int32_t> least;
    for (const RowGroup& group : table().groups) {
      least.push_back(0);
      for (std::int32_t h = 0; h < made.spec().kv_heads; ++h) {
        const auto r = static_cast<std::size_t>(group.first_row + h);
        limits.rows[r] = {budget_of(group), table().rows[r].length > budget_of(group), {}};
      }
    }
    allocator.spread(memory.evidence(), least, limits.rows);
    for (std::size_t r = 0; r < limits.rows.size(); ++r)
      limits.rows[r].guarded = protect(table().rows[r].length, limits.rows[r].budget, sink, recent, Variant::strict);
  }

  /// Pins a few ranges between sinks and recents, the same ones in heads that guard the same slots.
  void pin(Random& random) {
    constexpr std::int32_t kMost = 3;
    const std::shared_ptr<SlotRange[]> pins(new SlotRange[limits.rows.size() * kMost]);
    limits.pins = pins;
    for (const RowGroup& group : table().groups) {
      Ints starts;
      for (std::int32_t i = random.between(0, kMost); i > 0; --i) starts.push_back(random.between(0, 120));
      std::sort(starts.begin(), starts.end());
      const std::int32_t each = random.between(1, 12);
      for (std::int32_t h = 0; h < made.spec().kv_heads; ++h) {
        const auto r = static_cast<std::size_t>(group.first_row + h);
        Protected& guarded = limits.rows[r].guarded;
        SlotRange* own = pins.get() + r * kMost;
        guarded.pins = own;
        std::int32_t from = guarded.sinks;
        for (const std::int32_t start : starts) {
          const std::int32_t room = std::min(limits.rows[r].budget, table().rows[r].length) - guarded.count();
          from = std::max(from, start);
          const std::int32_t to = std::min({from + each, from + room, table().rows[r].length - guarded.recents});
          if (from >= to) continue;
          own[guarded.ranges++] = {from, to};
          guarded.pinned += to - from;
          from = to;
        }
      }
    }
  }

  [[nodiscard]] KeepSet kept(const Allocator& allocator) const {
    Decision decision = decision_with(scores);
    WindowAttention seen;
    allocator.allot(memory.evidence(), limits, decision.scores, seen, decision);
    EXPECT_EQ(std::memcmp(decision.scores.data.data<float>(), scores.data(), scores.size() * sizeof(float)), 0)
        << "the allocator wrote to the scores (B18)";
    return *decision.keep;
  }

  [[nodiscard]] std::vector<AllotHead> heads(const RowGroup& group, bool weights = false) const {
    std::vector<AllotHead> out;
    for (const Row& row : table().rows_of(group, made.spec().kv_heads)) {
      const Protected guarded = limits.rows[static_cast<std::size_t>(group.first_row) + out.size()].guarded;
      AllotHead& head = out.emplace_back(AllotHead{row.length, guarded.sinks, guarded.recents, {}, {}});
      for (int t = 0; t < row.length && guarded.ranges > 0; ++t) head.pinned.push_back(guarded.pins_slot(t));
      head.scores.assign(scores.begin() + row.first, scores.begin() + row.first + row.length);
      const oracle::ScorerInput& in = memory.input(row);
      for (int t = 0; weights && t < row.length; ++t)
        head.weights.push_back(oracle::value_weight(in.output_projection, in.hidden, in.Hq, in.Hkv, in.Dv, row.head,
                                                    in.heads[static_cast<std::size_t>(row.head)].value(t, in.Dv)));
    }
    return out;
  }
};

Ints slots_of(const KeepSet& keep, std::size_t row) { return {keep.row(row).begin(), keep.row(row).end()}; }

void expect_a_set(const Event& e, const KeepSet& keep) {
  for (std::size_t r = 0; r < e.table().rows.size(); ++r) {
    const Ints slots = slots_of(keep, r);
    const std::int32_t length = e.table().rows[r].length;
    ASSERT_TRUE(std::adjacent_find(slots.begin(), slots.end(), std::greater_equal<>()) == slots.end())
        << "slots do not ascend";
    ASSERT_TRUE(slots.empty() || (slots.front() >= 0 && slots.back() < length)) << "a slot outside the row";
    for (std::int32_t t = 0; t < length; ++t)
      if (e.limits.rows[r].due && e.limits.rows[r].guarded.holds(t, length))
        ASSERT_TRUE(std::binary_search(slots.begin(), slots.end(), t)) << "guarded slot " << t;
    if (!e.limits.rows[r].due) ASSERT_EQ(static_cast<std::int32_t>(slots.size()), length);
  }
}

// ---- PyramidKV

TEST(Pyramid, BudgetsByHand) {
  EXPECT_EQ(pyramid_budgets(5, 10, 5, 0), (Ints{18, 14, 10, 6, 2}));
  EXPECT_EQ(pyramid_budgets(5, 10, 1, 0), (Ints{10, 10, 10, 10, 10})) << "beta 1 is flat";
  EXPECT_EQ(pyramid_budgets(1, 7, 20, 3), (Ints{7}));
  EXPECT_EQ(pyramid_budgets(2, 10, 20, 0), (Ints{20, 0}))
      << "19.5 and 0.5: equal fractions, the lower layer takes the unit";
  EXPECT_EQ(pyramid_budgets(4, 10, 2, 0), (Ints{15, 12, 8, 5})) << "15, 11.67, 8.33, 5";
  // 18, 14, 10, 6, 2 with at least 6: 4 are missing; the excess 12, 8, 4 pays 2, 1.33, 0.67.
  EXPECT_EQ(pyramid_budgets(5, 10, 5, 6), (Ints{16, 13, 9, 6, 6}));
  EXPECT_EQ(pyramid_budgets(5, 10, 5, 10), (Ints{10, 10, 10, 10, 10}));
  EXPECT_THROW(static_cast<void>(pyramid_budgets(5, 10, 5, 11)), InvalidArgument);
  const Ints twenty = pyramid_budgets(20, 100, 20, 4);
  for (std::size_t l = 0; l < twenty.size(); ++l) EXPECT_EQ(twenty[l], 195 - 10 * static_cast<std::int32_t>(l));
}

TEST(Pyramid, BudgetsOfTheGoldenTable) {
  std::ifstream in(KVKEEP_TEST_GOLDEN_DIR "/scorers/pyramidkv_budgets.json");
  int compared = 0;
  const auto table = nlohmann::json::parse(in);
  for (const auto& c : table.at("cases")) {
    if (c["kvkeep"].is_null()) continue;  // a layer is raised to its bound, which the table leaves open
    EXPECT_EQ(pyramid_budgets(c["layers"], c["budget"], c["beta"], c["window"].get<int>() + c["sink"].get<int>()),
              c["kvkeep"].get<Ints>())
        << c.dump();
    ++compared;
  }
  EXPECT_GE(compared, 4);
}

TEST(Pyramid, BudgetsAddUpFallAndKeepTheirBound) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const int layers = random.one_of({1, 2, 3, 20, 28, 32, 61, random.between(1, 128)}),
              least = random.one_of({0, 1, 5, 68, random.between(0, 300)});
    const int budget = least + random.one_of({0, 1, 3, 100, random.between(0, 4000)});
    const double beta = random.one_of({1.0, 1.5, 2.0, 20.0, 20.0, 1000.0, 1 + random.between(0, 100000) / 1000.0});
    const Ints budgets = pyramid_budgets(layers, budget, beta, least);
    SCOPED_TRACE(text(layers, " layers, budget ", budget, ", beta ", beta, ", least ", least));
    ASSERT_EQ(budgets, oracle::pyramid(layers, budget, beta, least));
    ASSERT_EQ(sum_of(budgets), std::int64_t{layers} * budget);
    for (std::size_t l = 0; l < budgets.size(); ++l) {
      ASSERT_GE(budgets[l], least);
      // Layers with the same excess pay alike but for the last unit, which the lower layer pays.
      if (l > 0) ASSERT_GE(budgets[l - 1] + (budgets.back() == least ? 1 : 0), budgets[l]);
    }
  }
  const Ints huge = pyramid_budgets(128, INT32_MAX / 2, 1000, 68);
  EXPECT_EQ(sum_of(huge), std::int64_t{128} * (INT32_MAX / 2));
}

TEST(Pyramid, CountsLayersThatAreElsewhereAndNotThoseThatAreNeverCut) {
  ModelSpec spec = small_spec(2);
  spec.layers.assign(6, {.kind = LayerKind::remote});
  spec.layers[1] = {.kind = LayerKind::sliding, .window = 4};
  spec.layers[2] = {.kind = LayerKind::full};
  const RowTable table = rows_of_lengths({20, 12}, 2, 2);
  std::vector<RowLimit> limits(table.rows.size(), RowLimit{10, true, {}});
  const std::vector<std::int32_t> least{0};
  Pyramid({.beta = 5}).spread({.spec = spec, .table = table}, least, limits);
  for (std::size_t r = 0; r < limits.size(); ++r) {
    EXPECT_EQ(limits[r].budget, 14) << "second of five: 18, 14, 10, 6, 2";
    EXPECT_EQ(limits[r].due, table.rows[r].length > 14);
  }
}

// ---- AdaKV

TEST(AdaptiveHeads, KeepWhatTheSecondImplementationKeeps) {
  for (int seed = 0; seed < oracle::random_case_count(300); ++seed) {
    Random random(static_cast<std::uint64_t>(seed) + 5);
    const double safeguard = random.one_of({0.0, 0.2, 0.2, 0.29, 0.5, 1.0});
    const AdaptiveHeads allocator({safeguard});
    const Event e(allocator, static_cast<std::uint64_t>(seed), true);
    SCOPED_TRACE(e.made.description() + text(", safeguard ", safeguard));
    const KeepSet keep = e.kept(allocator);
    expect_a_set(e, keep);
    const Ints most = cpu::most_across_heads(e.memory.evidence(), e.limits, safeguard);
    for (std::size_t r = 0; r < most.size(); ++r) ASSERT_LE(keep.count(r), most[r]) << "row " << r;
    for (const RowGroup& group : e.table().groups) {
      const std::vector<AllotHead> heads = e.heads(group);
      const auto want = oracle::adaptive(heads, e.budget_of(group), safeguard);
      const auto first = static_cast<std::size_t>(group.first_row);
      std::int64_t total = 0, held = 0;
      const std::int64_t allowed = std::int64_t{e.budget_of(group)} * e.made.spec().kv_heads;
      for (std::size_t h = 0; h < heads.size(); ++h) {
        ASSERT_EQ(slots_of(keep, first + h), want[h]) << "head " << h;
        total += keep.count(first + h);
        held += heads[h].T;
        if (e.limits.rows[first + h].due)
          ASSERT_GE(keep.count(first + h),
                    std::min<std::int64_t>(heads[h].T, std::max(static_cast<int>(safeguard * e.budget_of(group) + 1e-9),
                                                                heads[h].sinks + heads[h].recents)));
      }
      ASSERT_EQ(total, std::min(allowed, held));
    }
  }
}

TEST(AdaptiveHeads, KeepAtMostWhatOtherHeadsLeaveWhateverTheyScore) {
  RowTable table = rows_of_lengths({30, 12}, 2);
  Limits limits = even_limits(table, 10, 3, 1);
  const ModelSpec spec = small_spec(2);
  AdaptiveHeads({0.2}).spread({.spec = spec, .table = table}, {}, limits.rows);
  // Each keeps 4 protected slots, or 5 by its own half: the other one has what is left of 20, and no more than it
  // holds.
  EXPECT_EQ(cpu::most_across_heads({.spec = spec, .table = table}, limits, 0.2), (Ints{16, 12}));
  EXPECT_EQ(cpu::most_across_heads({.spec = spec, .table = table}, limits, 0.5), (Ints{15, 12}));
  EXPECT_EQ(cpu::most_across_heads({.spec = spec, .table = table}, limits, 1.0), (Ints{10, 10}));
  for (RowLimit& limit : limits.rows) limit.due = false;
  EXPECT_EQ(cpu::most_across_heads({.spec = spec, .table = table}, limits, 0.2), (Ints{30, 12}));
}

TEST(AdaptiveHeads, KeepNoWorseSlotBeyondTheSafeguardThanTheyDrop) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const AdaptiveHeads allocator({0.2});
    const Event e(allocator, seed, true);
    const KeepSet keep = e.kept(allocator);
    for (const RowGroup& group : e.table().groups) {
      double best_dropped = -HUGE_VAL, worst_kept = HUGE_VAL;
      for (std::size_t h = 0; h < static_cast<std::size_t>(e.made.spec().kv_heads); ++h) {
        const auto r = static_cast<std::size_t>(group.first_row) + h;
        const AllotHead head = e.heads(group)[h];
        const Ints slots = slots_of(keep, r);
        const auto score = [&](int t) {
          return std::isnan(head.scores[static_cast<std::size_t>(t)]) ? -HUGE_VAL
                                                                      : head.scores[static_cast<std::size_t>(t)];
        };
        const bool at_its_safeguard = static_cast<std::int64_t>(slots.size()) <=
                                      std::max<std::int64_t>(e.budget_of(group) / 5, head.sinks + head.recents);
        for (int t = 0; t < head.T; ++t) {
          if (!std::binary_search(slots.begin(), slots.end(), t))
            best_dropped = std::max(best_dropped, score(t));
          else if (!head.guarded(t) && !at_its_safeguard)
            worst_kept = std::min(worst_kept, score(t));
        }
      }
      ASSERT_GE(worst_kept, best_dropped) << e.made.description();
    }
  }
}

TEST(AdaptiveHeads, GiveTheBudgetToTheHeadThatNeedsIt) {
  // Two heads of six slots, budget 3 each, one guarded slot in front, safeguard floor(0.5 * 3) = 1: the guarded slot.
  const std::vector<float> scores{0, .1F, .2F, .3F, .05F, .4F, 0, .9F, .8F, .05F, .7F, .05F};
  const RowTable table = rows_of_lengths({6, 6}, 2);
  const ModelSpec spec = small_spec(2);
  const Evidence evidence{.spec = spec, .table = table};
  const auto kept = [&](const std::vector<float>& g, double safeguard) {
    Limits limits = even_limits(table, 3, 1);
    const AdaptiveHeads allocator({safeguard});
    allocator.spread(evidence, Ints{1}, limits.rows);
    Decision decision = decision_with(g);
    WindowAttention seen;
    allocator.allot(evidence, limits, decision.scores, seen, decision);
    return std::vector<Ints>{slots_of(*decision.keep, 0), slots_of(*decision.keep, 1)};
  };
  EXPECT_EQ(kept(scores, 0.5), (std::vector<Ints>{{0, 5}, {0, 1, 2, 4}}));
  EXPECT_EQ(kept(scores, 1.0), (std::vector<Ints>{{0, 3, 5}, {0, 1, 2}})) << "a safeguard of 1 is top-k per head";
  EXPECT_EQ(kept(std::vector<float>(12, .5F), 0), (std::vector<Ints>{{0, 2, 3, 4, 5}, {0}}))
      << "ties: the lower head, then the newer slot";
}

TEST(AdaptiveHeads, AreDueTogetherAndOnlyOverTheirTotal) {
  const RowTable table = rows_of_lengths({2, 9, 2, 8}, 2);
  const ModelSpec spec = small_spec(2);
  std::vector<RowLimit> limits(4, RowLimit{5, false, {}});
  AdaptiveHeads({0.2}).spread({.spec = spec, .table = table}, Ints{0, 0}, limits);
  EXPECT_TRUE(limits[0].due && limits[1].due) << "11 slots, 10 may stay: the short row is scored too";
  EXPECT_FALSE(limits[2].due || limits[3].due) << "10 slots, 10 may stay";
}

// ---- ChunkKV

TEST(Chunks, KeepWhatTheSecondImplementationKeeps) {
  for (int seed = 0; seed < oracle::random_case_count(300); ++seed) {
    Random random(static_cast<std::uint64_t>(seed) + 6);
    const ChunksOptions options{random.one_of({1, 2, 5, 20, 20, 1000, INT32_MAX}),
                                random.chance(0.5) ? ChunksOptions::Heads::shared : ChunksOptions::Heads::own};
    const bool shared = options.heads == ChunksOptions::Heads::shared;
    const Chunks allocator(options);
    const Event e(allocator, static_cast<std::uint64_t>(seed), !shared);
    SCOPED_TRACE(e.made.description() + text(", chunk ", options.chunk, shared ? ", shared" : ", own"));
    const KeepSet keep = e.kept(allocator);
    expect_a_set(e, keep);
    for (const RowGroup& group : e.table().groups) {
      const std::vector<AllotHead> heads = e.heads(group);
      const auto want = oracle::chunks(heads, e.budget_of(group), options.chunk, shared);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const auto r = static_cast<std::size_t>(group.first_row) + h;
        ASSERT_EQ(slots_of(keep, r), want[h]) << "head " << h;
        ASSERT_EQ(keep.count(r), std::min(heads[h].T, e.budget_of(group)));
        if (shared) ASSERT_EQ(slots_of(keep, r), slots_of(keep, static_cast<std::size_t>(group.first_row)));
      }
    }
  }
}

TEST(Chunks, OfOneSlotAreTopKPerHead) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Chunks allocator({1, ChunksOptions::Heads::own});
    const Event e(allocator, seed, true);
    const KeepSet a = e.kept(allocator), b = e.kept(Flat());
    for (std::size_t r = 0; r < e.table().rows.size(); ++r)
      ASSERT_EQ(slots_of(a, r), slots_of(b, r)) << e.made.description();
  }
}

TEST(Chunks, ShareOneSelectionOfLayersAndHeadsWhereThePolicySaysSo) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(3);
  for (const std::string share : {"union", "per_head"})
    for (const std::string heads : {"shared", "own"}) {
      const SequenceId id = 1;
      std::int32_t length = 40;
      std::vector<LayerKv> layers;
      for (std::size_t l = 0; l < spec.layers.size(); ++l)
        layers.emplace_back(DenseKv{normals(2 * l + 1, {1, 2, length, 4}), normals(2 * l + 2, {1, 2, length, 4})});
      Keeper keeper(spec, make_policy("chunkkv-knorm,budget=20,interval=4,sink=1,recent=2,prefill=cut,chunk=3,share=" +
                                      share + ",heads=" + heads));
      keeper.join(id, length);
      keeper.bind(layers);
      keeper.step({{&id, 1}, {{&length, 1}}});
      for (std::int32_t head = 0; head < 2; ++head) {
        const auto first = keeper.positions(id, 0, share == "union" ? 0 : head);
        ASSERT_EQ(first.size(), 20U);
        for (std::int32_t layer = 0; layer < 3; ++layer)
          EXPECT_TRUE(std::ranges::equal(keeper.positions(id, layer, head), first))
              << share << ", " << heads << ", layer " << layer << ", head " << head;
      }
    }
}

TEST(Chunks, ByHand) {
  // Ten slots in chunks of 3, 3, 3, 1; slot 0 guarded. Means: (1 + 8) / 2, (2 + 2 + 9) / 3, (4 + 5 + 4) / 3, 7.
  const RowTable table = rows_of_lengths({10}, 1);
  const ModelSpec spec = small_spec(1);
  const std::vector<float> scores{99, 1, 8, 2, 2, 9, 4, 5, 4, 7};
  const auto kept = [&](std::int32_t budget) {
    const Limits limits = even_limits(table, budget, 1);
    Decision decision = decision_with(scores);
    WindowAttention seen;
    Chunks({3, ChunksOptions::Heads::shared})
        .allot({.spec = spec, .table = table}, limits, decision.scores, seen, decision);
    return slots_of(*decision.keep, 0);
  };
  EXPECT_EQ(kept(1), (Ints{0}));
  EXPECT_EQ(kept(2), (Ints{0, 9}));
  EXPECT_EQ(kept(3), (Ints{0, 2, 9})) << "mean 4.5 is next, its better slot fits";
  EXPECT_EQ(kept(4), (Ints{0, 1, 2, 9}));
  EXPECT_EQ(kept(5), (Ints{0, 1, 2, 7, 9})) << "equal means: the newer chunk, of it the best slot";
  EXPECT_EQ(kept(6), (Ints{0, 1, 2, 7, 8, 9})) << "4 and 4: the newer slot";
  EXPECT_EQ(kept(8), (Ints{0, 1, 2, 5, 6, 7, 8, 9}));
}

// ---- CriticalKV

TEST(Critical, KeepsWhatTheSecondImplementationKeeps) {
  int compared = 0, close = 0;
  for (int seed = 0; seed < oracle::random_case_count(200); ++seed) {
    Random random(static_cast<std::uint64_t>(seed) + 7);
    const bool adaptive = random.chance(0.4);
    const CriticalOptions options{.first_stage = random.one_of({0.0, 0.5, 0.5, 0.3, 1.0}),
                                  .heads = adaptive ? CriticalOptions::Heads::adaptive : CriticalOptions::Heads::equal,
                                  .safeguard = 0.2};
    const Critical allocator(options);
    const Event e(allocator, static_cast<std::uint64_t>(seed), true);
    SCOPED_TRACE(e.made.description() +
                 text(", first stage ", options.first_stage, adaptive ? ", adaptive" : ", equal"));
    const KeepSet keep = e.kept(allocator);
    expect_a_set(e, keep);
    for (const RowGroup& group : e.table().groups) {
      const std::vector<AllotHead> heads = e.heads(group, true);
      const auto shares = oracle::adaptive(heads, e.budget_of(group), options.safeguard);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const int budget = adaptive ? static_cast<int>(shares[h].size()) : e.budget_of(group);
        const oracle::CriticalRow want = oracle::critical(heads[h], budget, options.first_stage);
        const auto r = static_cast<std::size_t>(group.first_row) + h;
        ASSERT_EQ(keep.count(r), static_cast<std::int64_t>(want.slots.size())) << "head " << h;
        ++compared;
        close += want.margin < 1e-5;
        if (want.margin >= 1e-5) ASSERT_EQ(slots_of(keep, r), want.slots) << "head " << h;
      }
    }
  }
  EXPECT_LT(close, compared / 20) << "too many rows hang on rounding to prove anything";
}

TEST(Critical, WithEverythingInTheFirstStageIsTopK) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Critical allocator({.first_stage = 1});
    const Event e(allocator, seed, true);
    const KeepSet a = e.kept(allocator), b = e.kept(Flat());
    for (std::size_t r = 0; r < e.table().rows.size(); ++r)
      ASSERT_EQ(slots_of(a, r), slots_of(b, r)) << e.made.description();
  }
}

TEST(Critical, PrefersTheValueThatMovesTheOutput) {
  // One head, four slots, budget 2, first stage 1 slot. W_o = [[1, 0], [0, -2]]: values (x, y) weigh |x| + 2 |y|.
  std::vector<float> values{1, 0, 1, 0, 0, 3, 4, 0};
  const ModelSpec spec = small_spec(1, 2);
  RowTable table = rows_of_lengths({4}, 1);
  table.rows[0].values = {reinterpret_cast<std::byte*>(values.data()), 8, 8};
  std::vector<Tensor> projections{zeros({2, 2}, Dtype::f32)};
  projections[0].data<float>()[0] = 1;
  projections[0].data<float>()[3] = -2;
  Decision decision = decision_with({.5F, .3F, .1F, .1F});
  WindowAttention seen;
  Critical(CriticalOptions{})
      .allot({.spec = spec, .table = table, .output_projections = projections}, even_limits(table, 2), decision.scores,
             seen, decision);
  EXPECT_EQ(slots_of(*decision.keep, 0), (Ints{0, 2})) << ".3 * 1, .1 * 6, .1 * 4";
  EXPECT_THROW(Critical(CriticalOptions{})
                   .allot({.spec = spec, .table = table}, even_limits(table, 2), decision.scores, seen, decision),
               InvalidArgument);
}

TEST(Critical, RanksValuesThatAreNotFiniteLastAndLetsThemReachNoOtherRow) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Critical allocator({.first_stage = 0});
    Event e(allocator, seed, false);
    e.limits = even_limits(e.table(), 1);
    std::fill(e.scores.begin(), e.scores.end(), 0.1F);
    for (std::size_t r = 0; r < e.limits.rows.size(); ++r) {
      e.limits.rows[r].budget = std::max(1, e.table().rows[r].length / 2);
      e.limits.rows[r].due = e.table().rows[r].length > e.limits.rows[r].budget;
    }
    const KeepSet before = e.kept(allocator);
    const Row& row = e.table().rows.front();
    if (!e.limits.rows.front().due) continue;
    const std::int32_t bad = before.row(0).front();
    std::fill_n(row.values.at(bad), row.values.width,
                std::byte{static_cast<unsigned char>(seed % 2 == 0 ? 0xFF : 0x7F)});  // NaN, or NaN and huge
    const KeepSet after = e.kept(allocator);
    if (seed % 2 == 0)
      EXPECT_FALSE(std::binary_search(after.row(0).begin(), after.row(0).end(), bad)) << e.made.description();
    for (std::size_t r = 1; r < e.table().rows.size(); ++r) ASSERT_EQ(slots_of(after, r), slots_of(before, r));
  }
}

TEST(Critical, IsTheSameOnEveryInstructionSet) {
  testing::for_every_instruction_set([] {
    for (std::uint64_t seed = 0; seed < 15; ++seed) {
      const Critical allocator(CriticalOptions{});
      const Event e(allocator, seed, true);
      const KeepSet keep = e.kept(allocator);
      for (const RowGroup& group : e.table().groups)
        for (std::size_t h = 0; h < static_cast<std::size_t>(e.made.spec().kv_heads); ++h) {
          const oracle::CriticalRow want = oracle::critical(e.heads(group, true)[h], e.budget_of(group), 0.5);
          if (want.margin >= 1e-5)
            ASSERT_EQ(slots_of(keep, static_cast<std::size_t>(group.first_row) + h), want.slots)
                << e.made.description();
        }
    }
  });
}

TEST(Critical, NeedsWhatTheEngineGivesOrSaysSoAtOnce) {
  const auto policy = make_policy("criticalkv-tova,budget=64");
  EXPECT_TRUE(policy->needs().output_projection);
  EXPECT_TRUE(policy->needs().values);
  const ModelSpec spec = small_spec(2, 8);
  EXPECT_EQ(problems(*policy, spec, {.queries = false}).size(), 2U);
  EXPECT_THROW(Keeper(spec, make_policy("criticalkv-tova,budget=64")), InvalidArgument);
}

// ---- All of them

std::vector<std::unique_ptr<Allocator>> all_allocators() {
  std::vector<std::unique_ptr<Allocator>> all;
  all.push_back(std::make_unique<Pyramid>(PyramidOptions{3}));
  all.push_back(std::make_unique<AdaptiveHeads>(AdaptiveHeadsOptions{}));
  all.push_back(std::make_unique<Chunks>(ChunksOptions{5, ChunksOptions::Heads::shared}));
  all.push_back(std::make_unique<Critical>(CriticalOptions{}));
  all.push_back(std::make_unique<Critical>(CriticalOptions{.heads = CriticalOptions::Heads::adaptive}));
  return all;
}

TEST(Allocators, DecideASequenceWithoutRegardToItsBatchItsPlaceAndTheThreads) {  // B14
  for (const auto& allocator : all_allocators())
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const ScorerCase c(seed, {.longest = 90, .most_queries = 1, .ragged = false});
      SCOPED_TRACE(std::string(allocator->name()) + ", " + c.description());
      const auto score = [&](Event& e) {  // follows from layer, sequence, head and slot
        for (const Row& row : e.table().rows) {
          Random random(seed * 1000 +
                        static_cast<std::uint64_t>(row.layer * 100 + e.memory.sequence_of(row) * 10 + row.head));
          for (std::int32_t t = 0; t < row.length; ++t)
            e.scores.push_back(static_cast<float>(random.between(0, 40)) / 64);
        }
        e.settle(*allocator, 1, 2);
      };
      Event together(c, {});
      score(together);
      const KeepSet all = [&] {
        const LoopThreads one(1);
        return together.kept(*allocator);
      }();
      const LoopThreads three(3);
      for (std::int32_t s = 0; s < c.sequences(); ++s) {
        Event alone(c, {.order = {s}, .transposed = true, .tight = true});
        score(alone);
        const KeepSet own = alone.kept(*allocator);
        for (std::size_t r = 0; r < alone.table().rows.size(); ++r) {
          const Row& row = alone.table().rows[r];
          const auto& rows = together.table().rows;
          const auto same = std::find_if(rows.begin(), rows.end(), [&](const Row& o) {
            return o.layer == row.layer && o.head == row.head && together.memory.sequence_of(o) == s;
          });
          ASSERT_EQ(slots_of(own, r), slots_of(all, static_cast<std::size_t>(same - rows.begin())));
        }
      }
    }
}

TEST(Allocators, WorkspaceGrowsWithTheSlotsAndNotWithTheirSquare) {
  EXPECT_EQ(AdaptiveHeads::workspace_bytes(2000) - AdaptiveHeads::workspace_bytes(1000), 8000);
  EXPECT_EQ(Chunks::workspace_bytes(2000, 20) - Chunks::workspace_bytes(1000, 20), 8 * 1000 + 16 * 50);
  const std::int64_t thousand = Critical::workspace_bytes(2000, 128) - Critical::workspace_bytes(1000, 128);
  EXPECT_EQ(Critical::workspace_bytes(100'000, 128) - Critical::workspace_bytes(1000, 128), 99 * thousand)
      << "linear in the row; hidden and Hq do not enter";
  EXPECT_LE(thousand, 1000 * 4 * (32 + 4)) << "at most 36 floats a slot";
}

}  // namespace
}  // namespace kvkeep::allocators_test
