// SPDX-License-Identifier: Apache-2.0
// A memory of folded spans on a GPU: what the CPU opens, and its answers.

#include "memory_attention.h"

#include "arrays.h"
#include "kvkeep/core/error.h"
#include "memory_case.h"
#include "router.h"
#include "trained_router.h"

namespace kvkeep::cuda::memory_attention_test {
namespace {

using testing::Array;
using MemoryRoute = OnDevice;
using MemoryMerge = OnDevice;
using MemoryFetch = OnDevice;
using MemoryAhead = OnDevice;
using Ints = std::vector<std::int32_t>;
using Centred = FactorOptions::Centred;
constexpr double kAll = std::numeric_limits<double>::infinity();

/// How a case is read.
struct Rule {
  double mass = 0.05;
  bool share = false, per_head = false;
  double room = kAll;               ///< entries above what is resident
  double coverage = -1, floor = 0;  ///< the rule, from 0 on
  const Router* router = nullptr;   ///< the rule, if there is one
};

Reading reading_of(const MemoryCase& c, const Rule& rule, std::size_t n) {
  Reading r{.zoom = {.rule = ZoomOptions::Rule::mass,
                     .heads = rule.share ? ZoomOptions::Heads::group : ZoomOptions::Heads::own,
                     .mass = rule.mass},
            .per_head = rule.per_head};
  if (rule.coverage >= 0)
    r.zoom.rule = ZoomOptions::Rule::coverage, r.zoom.coverage = rule.coverage, r.zoom.coverage_floor = rule.floor;
  if (rule.router != nullptr) r.zoom.rule = ZoomOptions::Rule::learned, r.router = rule.router;
  r.entries = c.shape.dense + static_cast<double>(c.sequences[n].spans.size()) + rule.room;
  return r;
}

/// The case's rows, on the device with the same rule.
void set_rule(const MemoryCase& c, const Rule& rule, CaseOnDevice& there) {
  using Named = MemoryAttentionArguments::Rule;
  there.arguments.rule = rule.router != nullptr ? Named::learned : rule.coverage >= 0 ? Named::coverage : Named::mass;
  there.arguments.coverage = rule.coverage, there.arguments.coverage_floor = rule.floor;
  there.arguments.mass = rule.mass, there.arguments.share = rule.share, there.arguments.per_head = rule.per_head;
  for (FoldedRow& row : there.rows) {
    row.resident = c.shape.dense + static_cast<double>(row.spans);
    row.entries = row.resident + rule.room;
  }
  there.upload_rows();
}

/// Decisions of every token and KV head, and answers, as read_memory() gives them; returns how many spans were opened.
std::int64_t expect_as_on_cpu(const MemoryCase& c, const Rule& rule, const CaseOnDevice& there,
                              const std::string& what) {
  const Ints opened = there.opened->download(), counts = there.opened_count->download();
  const std::vector<std::uint8_t> marks = there.marks->download();
  const std::vector<float> out = there.out->download(), lse = there.lse->download();
  const std::int64_t spans = c.most_spans(), dim = c.shape.dim, heads = c.shape.kv_heads * c.shape.group;
  const double tolerance = c.shape.store == Element::f32 ? 1e-4 : 2e-2;
  std::int64_t token = 0, zooms = 0;
  for (std::size_t n = 0; n < c.sequences.size(); ++n)
    for (std::int64_t q = 0; q < c.shape.queries[n]; ++q, ++token) {
      const MemoryCase::Sequence& sequence = c.sequences[n];
      const Array query = sequence.queries.narrow(0, q, 1).contiguous();
      OpenAttention open = testing::plain_attention(sequence.dense_keys, sequence.dense_values, query, c.scale);
      std::vector<MemoryRow> rows;
      for (std::int64_t kv = 0; kv < c.shape.kv_heads; ++kv) rows.push_back({&sequence.spans.row(kv), c.shape.dense});
      std::vector<std::vector<std::int32_t>> want;
      zooms += read_memory(open, rows, query, c.scale, reading_of(c, rule, n), &want).zooms;
      for (std::int64_t kv = 0; kv < c.shape.kv_heads; ++kv) {
        const std::int64_t at = token * c.shape.kv_heads + kv;
        const Ints got(opened.begin() + at * spans,
                       opened.begin() + at * spans + std::max(0, counts[static_cast<std::size_t>(at)]));
        EXPECT_EQ(got, want[static_cast<std::size_t>(kv)]) << what << ", token " << token << ", KV head " << kv;
        for (std::int64_t s = 0; s < sequence.spans.size(); ++s) {
          int marked = 0;
          for (std::int64_t h = 0; h < c.shape.group; ++h)
            marked += marks[static_cast<std::size_t>(((token * heads) + kv * c.shape.group + h) * spans + s)];
          const bool listed = std::find(got.begin(), got.end(), s) != got.end();
          EXPECT_TRUE(listed ? marked >= 1 && marked <= c.shape.group &&
                                   (!rule.share || rule.per_head || marked == c.shape.group)
                             : marked == 0)
              << what << ", span " << s << " has " << marked << " marks";
        }
      }
      const Array answer = testing::closed(open), mass = testing::log_mass(open);
      for (std::int64_t h = 0; h < heads; ++h) {
        const float want_mass = mass.data<float>()[h], got_mass = lse[static_cast<std::size_t>(token * heads + h)];
        if (std::isinf(want_mass))
          EXPECT_EQ(got_mass, want_mass) << what;
        else
          EXPECT_NEAR(got_mass, want_mass, tolerance) << what << ", token " << token << ", head " << h;
        double apart = 0;
        for (std::int64_t d = 0; d < dim; ++d)
          apart = std::max(apart,
                           std::abs(static_cast<double>(out[static_cast<std::size_t>((token * heads + h) * dim + d)]) -
                                    answer.data<float>()[h * dim + d]));
        EXPECT_LE(apart, tolerance) << what << ", token " << token << ", head " << h;
      }
    }
  return zooms;
}

/// What a router makes of the queries of a case.
class RoutedQueries {
 public:
  RoutedQueries(const Router* router, MemoryAttentionArguments& a) {
    if (router == nullptr) return;
    const auto heads = static_cast<std::size_t>(a.query_heads());
    std::vector<float> projections(router->projection(0),
                                   router->projection(0) + router->query_heads() * router->inner() * router->key_dim()),
        thresholds;
    for (std::size_t h = 0; h < heads; ++h) thresholds.push_back(router->threshold(static_cast<std::int64_t>(h)));
    projections_ = std::make_unique<DeviceArray<float>>(projections);
    thresholds_ = std::make_unique<DeviceArray<float>>(thresholds);
    queries_ = std::make_unique<DeviceArray<float>>(
        std::vector<float>(static_cast<std::size_t>(a.tokens) * heads * static_cast<std::size_t>(a.dim), -77));
    a.routed = queries_->data(), a.thresholds = thresholds_->data();
    a.inner = static_cast<std::int32_t>(router->inner());
    launch_router_queries(a, {projections_->data(), a.query_heads(), a.inner}, 0, queries_->data(), nullptr);
  }

 private:
  std::unique_ptr<DeviceArray<float>> projections_, thresholds_, queries_;
};

/// Routes and merges on both machines; returns the spans that were opened.
std::int64_t read_on_both(const MemoryCase& c, const Rule& rule, const std::string& what) {
  std::int64_t zooms = 0;
  in_every_order([&] {
    CaseOnDevice there(c);
    set_rule(c, rule, there);
    const RoutedQueries routed(rule.router, there.arguments);
    there.route();
    there.merge();
    zooms = expect_as_on_cpu(c, rule, there, what);
  });
  return zooms;
}

TEST_F(MemoryMerge, GivesTheCpusAnswersForEveryWayThatASpanIsStored) {
  std::uint64_t seed = 300;
  for (const Centred centred : {Centred::always, Centred::never})
    for (const bool raw : {true, false}) {
      FactorOptions factors{.centred = centred, .max_rank = 64, .energy = 0.5, .raw = raw};
      const MemoryCase c(
          ++seed,
          {.kv_heads = 1, .group = 2, .dim = 16, .lengths = {{1, 7, 66, 2, 33}}, .factors = factors, .loudness = 0.5});
      EXPECT_GT(read_on_both(c, {.mass = 0.01}, text("centred ", static_cast<int>(centred), ", raw ", raw)), 2);
    }
}

TEST_F(MemoryMerge, GivesTheCpusAnswersInEveryDtypeAndHeadSize) {
  std::uint64_t seed = 320;
  for (const Element store : {Element::f32, Element::f16, Element::bf16})
    for (const std::int32_t dim : {1, 7, 33, 80, 256}) {
      const Element query = dim == 7 ? Element::f16 : dim == 33 ? Element::bf16 : Element::f32;
      const MemoryCase c(++seed, {.kv_heads = 1,
                                  .group = 2,
                                  .dim = dim,
                                  .lengths = {{4, 17}},
                                  .store = store,
                                  .query = query,
                                  .factors = {.energy = 0.4},
                                  .loudness = 0.5});
      EXPECT_GT(read_on_both(c, {.mass = 0.03}, text(name_of(store), ", dim ", dim)), 0);
    }
}

TEST_F(MemoryMerge, ServesRowsOfSeveralSequencesQueriesAndAnyGroup) {
  std::uint64_t seed = 340;
  for (const std::int32_t group : {1, 3, 9}) {
    const MemoryCase c(++seed, {.kv_heads = 2,
                                .group = group,
                                .dim = 8,
                                .lengths = {{3, 4}, {}, {6, 2, 5}},
                                .queries = {1, 2, 2},
                                .factors = {.energy = 0.3}});
    EXPECT_GT(read_on_both(c, {.mass = 0.1}, text("group ", group)), 0);
  }
}

TEST_F(MemoryMerge, TakesManySpansInSeveralParts) {
  for (const std::int32_t spans : {63, 64, 65, 131}) {
    Ints lengths;
    for (std::int32_t i = 0; i < spans; ++i) lengths.push_back(1 + i % 3);
    const MemoryCase c(350 + static_cast<std::uint64_t>(spans),
                       {.group = 2, .dim = 8, .lengths = {lengths}, .loudness = 2});
    EXPECT_GT(read_on_both(c, {.mass = 0.05}, text(spans, " spans")), 0);
  }
}

TEST_F(MemoryMerge, IsAllThereIsWhereNoRowStayed) {
  const MemoryCase c(360, {.group = 2, .dim = 8, .lengths = {{3, 9, 4}}, .dense = 0});
  EXPECT_GT(read_on_both(c, {.mass = 0.2}, "no dense rows"), 0);
}

TEST_F(MemoryMerge, LeavesRowsWithoutSpansAsTheyAre) {
  const MemoryCase c(361, {.group = 2, .dim = 8, .lengths = {{}, {2}}, .queries = {1, 1}});
  CaseOnDevice there(c);
  const std::vector<float> before = there.out->download();
  there.route();
  there.merge();
  const std::vector<float> after = there.out->download();
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 16, after.begin())) << "bit for bit";
  EXPECT_FALSE(std::equal(before.begin() + 16, before.end(), after.begin() + 16));
  EXPECT_EQ(there.opened_count->download()[0], 0);
}

TEST_F(MemoryMerge, PassesOnWhatIsNotANumberToItsOwnHeadAlone) {
  const MemoryCase c(362, {.group = 2, .dim = 8, .lengths = {{3, 9, 4}}});
  c.sequences[0].queries.data<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  in_every_order([&] {
    CaseOnDevice there(c);
    set_rule(c, {.mass = 0.1}, there);
    there.route();
    there.merge();
    const std::vector<float> out = there.out->download();
    for (std::size_t d = 0; d < 8; ++d) EXPECT_TRUE(std::isfinite(out[8 + d])) << "of the other head";
    for (std::size_t s = 0; s < 3; ++s)
      EXPECT_EQ(there.marks->download()[s], 0) << "nothing is above a share that is no number";
  });
}

TEST_F(MemoryRoute, OpensWhatTheCpuOpensByCoarseEntriesAndBySketches) {
  std::uint64_t seed = 400;
  for (const bool sketch : {false, true})
    for (const std::int32_t dim : {8, 33, 64}) {
      const MemoryCase c(++seed, {.kv_heads = 2,
                                  .group = 3,
                                  .dim = dim,
                                  .lengths = {{1, 5, 18, 2, 31, 16, 9, 3}},
                                  .queries = {2},
                                  .factors = {.energy = 0.4, .sketch = sketch},
                                  .loudness = 2});
      EXPECT_GT(read_on_both(c, {.mass = 0.02}, text("sketch ", sketch, ", dim ", dim)), 1);
    }
}

TEST_F(MemoryRoute, OpensTheMostRelevantSpansThatFitTheBudget) {
  std::uint64_t seed = 420;
  for (const bool share : {false, true})
    for (const bool per_head : {false, true})
      for (const double room : {-1.0, 0.0, 4.0, 15.0, 40.0}) {
        const MemoryCase c(
            ++seed,
            {.kv_heads = 1, .group = 3, .dim = 8, .lengths = {{4, 9, 3, 12, 5, 20, 2, 7, 1, 6}}, .loudness = 2});
        const std::int64_t opened = read_on_both(c, {.mass = 0, .share = share, .per_head = per_head, .room = room},
                                                 text("share ", share, ", per head ", per_head, ", room ", room));
        EXPECT_TRUE(room < 0 ? opened == 0 : room < 4 || (opened > 0 && opened <= 10));
      }
}

TEST_F(MemoryRoute, OpensTheFewestSpansThatHoldWhatCoverageSays) {
  Ints lengths;
  oracle::Random random(433);
  for (int i = 0; i < 70; ++i) lengths.push_back(random.between(1, 6));
  std::uint64_t seed = 450;
  for (const bool sketch : {false, true})
    for (const double floor : {0.0, 0.012}) {
      const MemoryCase c(++seed, {.kv_heads = 2,
                                  .group = 2,
                                  .dim = 8,
                                  .lengths = {lengths, {3, 4, 5}},
                                  .queries = {2, 1},
                                  .factors = {.energy = 0.4, .sketch = sketch},
                                  .loudness = 2});
      std::int64_t before = -1;
      for (const double coverage : {0.0, 0.3, 0.8, 0.97, 1.0}) {
        const std::int64_t opened = read_on_both(c, {.coverage = coverage, .floor = floor},
                                                 text("sketch ", sketch, ", coverage ", coverage, ", floor ", floor));
        EXPECT_GT(opened, before) << coverage;
        before = opened;
        if (coverage == 1 && floor == 0) EXPECT_EQ(opened, 2 * (2 * 70 + 3)) << "all of them";
        if (coverage == 0.97 && floor > 0) break;  // nothing above the floor is left
      }
      EXPECT_LT(read_on_both(c, {.room = 10, .coverage = 1, .floor = floor}, "a budget"), before);
    }
}

TEST_F(MemoryRoute, TakesTheLowerOfEqualSpansIntoWhatCovers) {
  MemoryCase c(434, {.group = 1, .dim = 8, .lengths = {{2, 2, 2, 2}}, .factors = {.rank = FactorOptions::Rank::max}});
  c.sequences[0].queries.fill_(0.0F);  // every span draws alike: a quarter of what they draw
  for (const auto& [coverage, opened] : {std::pair{0.2, 1}, {0.4, 2}, {0.7, 3}, {0.8, 4}})
    in_every_order([&, coverage = coverage, opened = opened] {
      CaseOnDevice there(c);
      set_rule(c, {.coverage = coverage}, there);
      there.route();
      ASSERT_EQ(there.opened_count->download()[0], opened) << coverage;
      for (std::int32_t s = 0; s < opened; ++s) EXPECT_EQ(there.opened->download()[static_cast<std::size_t>(s)], s);
    });
}

TEST_F(MemoryRoute, OpensWhatALearnedRouterFindsRelevant) {
  std::uint64_t seed = 460;
  for (const std::int32_t dim : {7, 16, 33})
    for (const std::int32_t group : {1, 3, 9})
      for (const Element query : {Element::f32, Element::bf16}) {
        MemoryCase c(++seed, {.kv_heads = 2,
                              .group = group,
                              .dim = dim,
                              .lengths = {{1, 5, 18, 2, 31, 16, 9, 3, 12, 8}, {6, 11}},
                              .queries = {3, 2},
                              .query = query,
                              .factors = {.energy = 0.4},
                              .loudness = 2});
        const TrainedParameters p =
            testing::trained_router(seed, {.heads = 2 * group, .inner = 5 + dim / 8, .dim = dim});
        const Router router(p.projections.select(0, 0), p.thresholds.select(0, 0));
        for (MemoryCase::Sequence& sequence : c.sequences)
          for (std::int64_t kv = 0; kv < 2; ++kv)
            sequence.spans.rows[static_cast<std::size_t>(kv)].set_norms(
                router.norms(sequence.spans.row(kv), kv * group, group));
        const std::int64_t all =
            read_on_both(c, {.router = &router}, text("dim ", dim, ", group ", group, ", ", name_of(query)));
        EXPECT_TRUE(all > 0 && (group > 1 || all < 2 * (3 * 10 + 2 * 2))) << all << " spans";
        EXPECT_LT(read_on_both(c, {.room = 6, .router = &router}, "a budget"), all);
      }
}

TEST_F(MemoryRoute, PrefersTheLowerOfEquallyRelevantSpans) {
  MemoryCase c(430, {.group = 1, .dim = 8, .lengths = {{2, 2, 2, 2}}, .factors = {.rank = FactorOptions::Rank::max}});
  c.sequences[0].queries.fill_(0.0F);  // every span draws alike
  in_every_order([&] {
    CaseOnDevice there(c);
    set_rule(c, {.mass = 0.01, .room = 4}, there);
    there.route();
    EXPECT_EQ(there.opened_count->download()[0], 2);
    const Ints opened = there.opened->download();
    EXPECT_EQ(Ints(opened.begin(), opened.begin() + 2), (Ints{0, 1}));
  });
}

/// Greedy over hundreds of candidates: more than a warp, and than one digit of the sort.
TEST_F(MemoryRoute, WalksMoreSpansThanAWarpHasLanes) {
  Ints lengths;
  oracle::Random random(431);
  for (int i = 0; i < 70; ++i) lengths.push_back(random.between(1, 6));
  const MemoryCase c(432, {.group = 1, .dim = 4, .lengths = {lengths}});
  for (const double room : {11.0, 60.0}) {
    in_every_order([&] {
      CaseOnDevice there(c);
      const Rule rule{.mass = 0, .room = room};
      set_rule(c, rule, there);
      there.route();
      OpenAttention open = c.open(0);
      std::vector<std::vector<std::int32_t>> want;
      const MemoryRow row{&c.sequences[0].spans.row(0), c.shape.dense};
      static_cast<void>(read_memory(open, {&row, 1}, c.sequences[0].queries, c.scale, reading_of(c, rule, 0), &want));
      const Ints opened = there.opened->download();
      EXPECT_EQ(Ints(opened.begin(), opened.begin() + there.opened_count->download()[0]), want[0]) << room;
      EXPECT_GT(want[0].size(), 3U);
    });
  }
}

TEST_F(MemoryFetch, BringsOpenedSpansNearAndReadsTheOthersFromAfar) {
  const MemoryCase c(440, {.kv_heads = 2,
                           .group = 2,
                           .dim = 8,
                           .lengths = {{4, 9, 3, 12, 5}},
                           .queries = {2},
                           .store = Element::f16,
                           .factors = {.energy = 0.3},
                           .loudness = 2});
  for (const std::int64_t arena : {std::int64_t{1} << 14, std::int64_t{176}, std::int64_t{0}}) {
    in_every_order([&] {
      CaseOnDevice there(c, false, arena);
      const Rule rule{.mass = 0.05};
      set_rule(c, rule, there);
      for (int step = 0; step < 2; ++step) {  // what the first left in the arena is not near any more
        there.route();
        there.fetch();
      }
      there.merge();
      EXPECT_GT(expect_as_on_cpu(c, rule, there, text("arena of ", arena)), 0);
      for (std::size_t r = 0; r < there.rows.size(); ++r) {
        const std::vector<const std::byte*> near = there.near(r);
        std::int64_t brought = 0, afar = 0;
        for (std::size_t s = 0; s < near.size(); ++s) {
          afar += near[s] != nullptr && near[s] == there.far(r)[s] ? 1 : 0;
          if (near[s] == nullptr || near[s] == there.far(r)[s]) continue;
          ++brought;
          EXPECT_TRUE(near[s] >= there.rows[r].arena && near[s] < there.rows[r].arena + arena) << "in its arena";
        }
        EXPECT_EQ(there.counts->download()[r], brought);
        if (arena == 0) EXPECT_EQ(brought, 0);
        if (arena > 1 << 10) EXPECT_EQ(afar, 0);
      }
    });
  }
}

TEST_F(MemoryFetch, LeavesWhatTheCallerHoldsNearWhereItIs) {
  const MemoryCase c(441, {.group = 1, .dim = 8, .lengths = {{4, 9}}, .factors = {.energy = 0.3}});
  CaseOnDevice there(c, false);
  set_rule(c, {.mass = 0}, there);
  const DeviceArray<std::byte> own(1024);
  std::vector<const std::byte*> near{own.data(), nullptr};
  const DeviceArray<const std::byte*> table(near);
  there.rows[0].near = table.data();
  there.upload_rows();
  there.route();
  there.fetch();
  EXPECT_EQ(there.counts->download()[0], 1);
  EXPECT_EQ(there.pieces->download()[0].from, there.far(0)[1]);
  EXPECT_EQ(table.download()[0], own.data());
}

MemoryCase case_ahead(bool sketch = true) {
  return {450,
          {.kv_heads = 2,
           .group = 3,
           .dim = 8,
           .lengths = {{4, 9, 3, 12, 5, 7, 2}, {}, {6, 8, 3}},
           .queries = {2, 1, 3},
           .store = Element::f16,
           .factors = {.energy = 0.3, .sketch = sketch},
           .loudness = 2}};
}

/// What the rows of a case draw from the last query of each: [rows, group].
std::vector<float> drawn_last(const MemoryCase& c) {
  std::vector<float> all;
  for (std::size_t n = 0; n < c.sequences.size(); ++n) {
    const Array mass = testing::log_mass(c.open(n)), last = mass.narrow(0, c.shape.queries[n] - 1, 1);
    all.insert(all.end(), last.contiguous().data<float>(), last.contiguous().data<float>() + last.numel());
  }
  return all;
}

TEST_F(MemoryAhead, GivesTheSameBitsWhateverWasGuessed) {
  const MemoryCase c = case_ahead();
  const std::vector<float> drawn = drawn_last(c);
  const auto all_alike = [&](float dense) { return std::vector<float>(drawn.size(), dense); };
  const float never = std::numeric_limits<float>::infinity();
  const auto expect_same = [&](const Rule& rule, std::int64_t arena, const std::vector<float>& expected) {
    in_every_order([&] {
      CaseOnDevice plain(c, false, arena), ahead(c, false, arena);
      set_rule(c, rule, plain), set_rule(c, rule, ahead);
      plain.arguments.keeps_near = false;
      plain.route();
      plain.fetch();
      plain.merge();
      ahead.read_ahead(expected);
      ahead.guess();
      ahead.open();
      ahead.merge();
      EXPECT_EQ(ahead.marks->download(), plain.marks->download());
      EXPECT_EQ(ahead.opened_count->download(), plain.opened_count->download());
      EXPECT_EQ(ahead.out->download(), plain.out->download());
      EXPECT_EQ(ahead.lse->download(), plain.lse->download());
      EXPECT_GT(expect_as_on_cpu(c, rule, ahead, "ahead"), 4);
    });
  };
  constexpr std::int64_t kAmple = 1 << 14;
  for (const Rule& rule : {Rule{.mass = 0.05}, Rule{.mass = 0.02, .share = true}, Rule{.mass = 0, .room = 9},
                           Rule{.mass = 0.02, .per_head = true, .room = 6}})
    expect_same(rule, kAmple, drawn);
  for (const std::int64_t arena : {std::int64_t{176}, std::int64_t{0}}) expect_same({.mass = 0.05}, arena, drawn);
  for (const float dense : {-never, 1.0F, never, std::nanf("")})
    expect_same({.mass = 0.05}, dense == 1.0F ? 176 : kAmple, all_alike(dense));
}

/// Pieces that one call lists for row r.
std::vector<FarPiece> listed(const CaseOnDevice& there, std::size_t r) {
  const auto all = there.pieces->download();
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(r) * there.arguments.most_spans;
  return {first, first + there.counts->download()[r]};
}

TEST_F(MemoryAhead, BringsWhatOpensIfRowsDrawWhatTheyDrewAndTheRestLater) {
  const MemoryCase c = case_ahead();
  const std::vector<float> drawn = drawn_last(c);
  for (const bool guessed : {true, false})
    in_every_order([&] {
      CaseOnDevice there(c, false);
      set_rule(c, {.mass = 0.05}, there);
      there.read_ahead(guessed ? std::vector<float>(drawn.size(), -std::numeric_limits<float>::infinity())
                               : std::vector<float>(drawn.size(), std::numeric_limits<float>::infinity()));
      there.guess();
      std::vector<std::vector<FarPiece>> early;
      for (std::size_t r = 0; r < there.rows.size(); ++r) early.push_back(listed(there, r));
      there.open();
      std::size_t earlier = 0, later = 0;
      for (std::size_t r = 0; r < there.rows.size(); ++r) earlier += early[r].size(), later += listed(there, r).size();
      EXPECT_GT(guessed ? earlier : later, 4U);
      EXPECT_EQ(guessed ? later : earlier, 0U) << "rows that draw nothing leave the most to spans";
      const std::vector<float> kept = there.dense->download();
      for (std::size_t i = 0; i < drawn.size(); ++i)
        if (there.rows[i / 3].spans > 0)
          EXPECT_EQ(kept[i], drawn[i]) << "as the last query found it, for the next guess";
    });
  CaseOnDevice one(c, false);  // of the last query of each row alone nothing is missed
  set_rule(c, {.mass = 0.05}, one);
  for (FoldedRow& row : one.rows) row.first_query += row.queries - 1, row.queries = 1;
  one.arguments.most_queries = 1;
  one.read_ahead(drawn);
  one.guess();
  const Ints marked = one.opened_count->download();
  EXPECT_GT(*std::max_element(marked.begin(), marked.end()), 0);
  one.open();
  EXPECT_EQ(one.opened_count->download(), marked);
  EXPECT_EQ(one.counts->download(), Ints(one.rows.size(), 0));
}

TEST_F(MemoryAhead, GoesOnInTheArenaBehindWhatWasBrought) {
  const MemoryCase c = case_ahead();
  std::vector<float> expected = drawn_last(c);
  for (float& dense : expected) dense += 5;  // rows are expected to draw more than they do
  std::size_t both = 0;
  for (const std::int64_t arena : {std::int64_t{1} << 14, std::int64_t{700}}) {
    CaseOnDevice there(c, false, arena);
    set_rule(c, {.mass = 0.04}, there);
    there.read_ahead(expected);
    there.guess();
    std::vector<std::vector<FarPiece>> early;
    for (std::size_t r = 0; r < there.rows.size(); ++r) early.push_back(listed(there, r));
    there.open();
    for (std::size_t r = 0; r < there.rows.size(); ++r) {
      std::vector<FarPiece> all = listed(there, r);
      both += !early[r].empty() && !all.empty() ? 1 : 0;
      all.insert(all.begin(), early[r].begin(), early[r].end());
      const std::byte* end = there.rows[r].arena;
      for (const FarPiece& piece : all) {
        EXPECT_GE(piece.to, end) << "row " << r << ": over what was brought before";
        end = piece.to + piece.bytes;
      }
      EXPECT_LE(end, there.rows[r].arena + arena);
    }
  }
  EXPECT_GE(both, 3U);
}

TEST_F(MemoryRoute, RefusesSizesAndDtypesThatItDoesNotKnow) {
  const auto refuses = [](auto change) {
    MemoryAttentionArguments a{.dim = 8};
    change(a);
    EXPECT_THROW(launch_memory_route(a, nullptr), InvalidArgument);
    EXPECT_THROW(launch_memory_guess(a, nullptr), InvalidArgument);
    EXPECT_THROW(launch_memory_open(a, nullptr), InvalidArgument);
    EXPECT_THROW(launch_memory_pieces(a, nullptr, nullptr, nullptr), InvalidArgument);
    EXPECT_THROW(launch_memory_merge(a, nullptr), InvalidArgument);
  };
  refuses([](auto& a) { a.dim = 0; });
  refuses([](auto& a) { a.dim = 257; });
  refuses([](auto& a) { a.group = 0; });
  refuses([](auto& a) { a.kv_heads = 0; });
  refuses([](auto& a) { a.count = -1; });
  refuses([](auto& a) { a.most_spans = -1; });
  refuses([](auto& a) { a.store = Element::f8_e4m3; });
  refuses([](auto& a) { a.query = Element::f8_e4m3; });
  refuses([](auto& a) { a.count = 1 << 20, a.most_queries = 1 << 20; });
  refuses([](auto& a) { a.rule = MemoryAttentionArguments::Rule::learned; });
  EXPECT_NO_THROW(launch_memory_route({.dim = 8}, nullptr)) << "nothing to do";
  EXPECT_THROW(launch_memory_guess({.count = 1, .dim = 8}, nullptr), InvalidArgument) << "no `brought`";
}

}  // namespace
}  // namespace kvkeep::cuda::memory_attention_test
