// SPDX-License-Identifier: Apache-2.0
// What the Keeper promises an engine whatever it is given: who stands twice is refused, what throws changes nothing,
// positions are no token counts, neighbours do not matter, memory comes back.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include "arrays.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "message_of.h"

namespace kvkeep::keeper_contract_test {
namespace {

using testing::Array;
using testing::normals;
using Ints = std::vector<std::int32_t>;
using Ids = std::vector<SequenceId>;
using testing::message_of;

ModelSpec model(std::int32_t layers = 1, std::int32_t heads = 1) {
  return {.query_heads = heads,
          .kv_heads = heads,
          .key_dim = 8,
          .value_dim = 8,
          .softmax_scale = 0,
          .rope = {.inv_freq = {1.0, 0.1}},
          .layers = std::vector<LayerSpec>(static_cast<std::size_t>(layers))};
}

/// Sequences in a dense cache, each at the place that its order among the joined gives it.
class Line {
 public:
  explicit Line(const std::string& policy, ModelSpec spec = model(), std::int64_t capacity = 256)
      : spec_(spec), keeper(std::move(spec), make_policy(policy)) {
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      layers.emplace_back(DenseKv{normals(random_, {4, spec_.kv_heads, capacity, 8}),
                                  normals(random_, {4, spec_.kv_heads, capacity, 8})});
    keeper.bind(layers);
  }
  /// Another cache.
  void bind(std::vector<LayerKv> all) {
    layers = std::move(all);
    keeper.bind(layers);
  }

  void join(SequenceId id, std::int32_t tokens = 0, std::optional<std::int32_t> prompt = {}) {
    keeper.join(id, tokens, prompt);
    ids.push_back(id);
    lengths.push_back(tokens);
  }

  /// The same number of new tokens for every sequence, in every layer. `spoil` may change the queries of a layer.
  void observe(std::int32_t tokens, const Ints& positions = {},
               const std::function<void(std::int32_t, Array&)>& spoil = {}) {
    Ints indptr;
    for (std::size_t i = 0; i <= ids.size(); ++i) indptr.push_back(static_cast<std::int32_t>(i) * tokens);
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l) {
      Array queries = normals(random_, {indptr.back(), spec_.query_heads, 8});
      if (spoil) spoil(l, queries);
      keeper.observe({.layer = l, .sequences = ids, .indptr = indptr, .queries = queries, .positions = positions});
    }
    for (std::int32_t& length : lengths) length += tokens;
  }
  CacheView view() { return {.sequences = ids, .lengths = {lengths}}; }
  Report step() { return keeper.step(view()); }
  Ints positions(SequenceId id) const {
    const auto held = keeper.positions(id, 0, 0);
    return {held.begin(), held.end()};
  }

 private:
  ModelSpec spec_;
  oracle::Random random_{1};

 public:
  Keeper keeper;
  std::vector<LayerKv> layers;
  Ids ids;
  Ints lengths;
};

Ints from(std::int32_t first, std::int32_t count) {
  Ints positions(static_cast<std::size_t>(count));
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

// ---- Who stands twice -----------------------------------------------------------------------------------------------

constexpr const char* kStreaming = "streaming,budget=6,interval=2,sink=2,recent=1,prefill=cut";

TEST(KeeperContract, RefusesASequenceThatStandsTwiceInAView) {
  Line line(kStreaming);
  line.join(7, 12);
  line.ids = {7, 7};
  line.lengths = {12, 12};
  EXPECT_NE(message_of<InvalidArgument>([&] {
              static_cast<void>(line.keeper.plan(line.view()));
            }).find("sequence 7 is named twice"),
            std::string::npos);
  EXPECT_THROW(line.step(), InvalidArgument);
  EXPECT_EQ(line.positions(7), from(0, 12));
}

TEST(KeeperContract, RefusesTwoSequencesAtOnePlace) {
  Line line(kStreaming);
  line.join(1, 12);
  line.join(2, 12);
  Ints places{3, 3};
  CacheView view = line.view();
  view.places = places;
  EXPECT_NE(message_of<InvalidArgument>([&] { line.keeper.step(view); }).find("sequences 1 and 2 are both at place 3"),
            std::string::npos);
  places = {3, 4};
  EXPECT_NE(message_of<InvalidArgument>([&] {
              line.keeper.step(view);
            }).find("sequence 2 is at place 4 of the batch; allowed 0 to 3"),
            std::string::npos);
  places = {3, 0};
  EXPECT_EQ(line.keeper.step(view).wait().cuts.size(), 2U);
}

TEST(KeeperContract, RefusesAPageThatIsNamedMoreOftenThanItIsHeld) {
  Line line(kStreaming);
  line.join(1, 12);
  line.join(2, 12);
  line.bind({PagedKv{normals(1, {8, 4, 1, 8}), normals(2, {8, 4, 1, 8})}});
  Array table = Array::zeros({2, 3}, Dtype::i32);
  const auto name = [&](const Ints& pages) { std::ranges::copy(pages, table.data<std::int32_t>()); };
  CacheView view = line.view();
  view.block_table = table;
  name({0, 1, 2, 5, 2, 6});
  EXPECT_NE(message_of<InvalidArgument>([&] {
              line.keeper.step(view);
            }).find("names page 2 of sequence 1 2 times, and 1 may hold it"),
            std::string::npos);
  name({0, 1, 1, 5, 6, 7});
  EXPECT_THROW(line.keeper.step(view), InvalidArgument) << "twice in one row";
  PagePool pool(8, 4);
  for (int p = 0; p < 8; ++p) static_cast<void>(pool.take());
  view.pages = &pool;
  pool.retain(1);
  EXPECT_EQ(message_of<InvalidArgument>([&] { line.keeper.step(view); }),
            "cache: the block table names page 1 twice for sequence 1; allowed once");
  pool.give_back(1);
  name({0, 1, 2, 5, 2, 6});
  EXPECT_THROW(line.keeper.step(view), InvalidArgument) << "held once, named twice";
  EXPECT_EQ(pool.free_pages(), 0);
  pool.retain(2);
  pool.give_back(7);
  pool.give_back(3);
  EXPECT_EQ(line.keeper.step(view).wait().cuts.size(), 2U) << "a shared page";
}

TEST(KeeperContract, RefusesToApplyAPlanToAnotherView) {
  Line line(kStreaming);
  line.join(1, 12);
  line.join(2, 12);
  const Plan plan = line.keeper.plan(line.view());
  std::swap(line.ids[0], line.ids[1]);
  EXPECT_NE(message_of<StateError>([&] {
              line.keeper.apply(plan, line.view());
            }).find("the plan cuts sequence 1, which is not at place 0"),
            std::string::npos);
  std::swap(line.ids[0], line.ids[1]);
  const auto refused = [&](const CacheView& view) {
    return message_of<StateError>([&] { line.keeper.apply(plan, view); });
  };
  line.lengths[1] = 13;
  EXPECT_EQ(refused(line.view()),
            "apply: sequence 2 holds 13 slots in layer 0, head 0, and 12 when the event was planned; allowed the view "
            "of the plan");
  line.lengths = {12};
  EXPECT_THROW(line.keeper.apply(plan, line.view()), InvalidArgument) << "one length for two sequences";
  line.lengths = {12, 12};
  EXPECT_EQ(line.positions(1), from(0, 12)) << "what throws changes nothing";
  EXPECT_EQ(line.keeper.apply(plan, line.view()).wait().cuts.size(), 2U);
  line.ids = {1};
  line.lengths = {6};
  EXPECT_THROW(line.keeper.apply(plan, line.view()), StateError);
}

/// Whether an event is due or not, and under policies that have none.
TEST(KeeperContract, RefusesSequencesThatTheCacheHasNoRoomFor) {
  for (const char* policy : {"streaming,budget=40,interval=8,sink=2,recent=1", "full"}) {
    SCOPED_TRACE(policy);
    Line line(policy, model(), 12);
    for (const SequenceId id : {1, 2, 3, 4}) line.join(id);
    line.observe(12);
    line.step();
    line.observe(1);
    EXPECT_EQ(message_of<InvalidArgument>([&] { line.step(); }),
              "cache: sequence 1 holds slots 0 to 13 of layer 0; allowed up to the capacity 12");
    for (std::int32_t& length : line.lengths) --length;
    for (const SequenceId id : line.ids) line.keeper.truncate(id, 12);
    line.step();
    line.join(5);
    line.observe(0);
    EXPECT_EQ(message_of<InvalidArgument>([&] { line.step(); }),
              "cache: sequence 5 is at place 4 of the batch; allowed 0 to 3");
  }
}

// ---- What throws changes nothing ------------------------------------------------------------------------------------

/// Counts holders; fails when it is told to.
class FailingPages final : public PageAllocator {
 public:
  FailingPages(std::int32_t pages, std::int32_t size) : pool(pages, size) {}
  [[nodiscard]] std::int32_t references(std::int32_t page) const override { return pool.references(page); }
  [[nodiscard]] std::int32_t take() override {
    if (takes_left-- == 0) throw std::runtime_error("the engine has no page");
    return pool.take();
  }
  void give_back(std::int32_t page) override {
    if (gives_left-- == 0) throw std::runtime_error("the engine takes no page");
    pool.give_back(page);
  }
  PagePool pool;
  int takes_left = -1, gives_left = -1;
};

/// One sequence of 16 tokens in four pages of four.
struct PagedLine {
  explicit PagedLine(std::int32_t also_held) : line(kStreaming), pages(8, 4) {
    line.join(1, 16);
    line.bind({PagedKv{normals(3, {8, 4, 1, 8}), normals(4, {8, 4, 1, 8})}});
    for (std::int32_t p = 0; p < 4; ++p) table.data<std::int32_t>()[p] = pages.pool.take();
    for (std::int32_t p = 0; p < also_held; ++p) pages.pool.retain(table.data<std::int32_t>()[p]);
  }
  CacheView view() {
    CacheView view = line.view();
    view.block_table = table;
    view.pages = &pages;
    return view;
  }
  Line line;
  FailingPages pages;
  Array table = Array::full({1, 4}, -1, Dtype::i32);
};

TEST(KeeperContract, HasSettledAnEventBeforeItGivesBackPages) {
  PagedLine paged(0);
  paged.pages.gives_left = 0;
  CacheView view = paged.view();
  EXPECT_THROW(paged.line.keeper.step(view), std::runtime_error);
  EXPECT_EQ(paged.line.lengths[0], 6);
  EXPECT_EQ(paged.line.keeper.physical_length(1, 0, 0), 6);
  EXPECT_EQ(paged.table.data<std::int32_t>()[2], -1);
  EXPECT_EQ(paged.pages.pool.free_pages(), 4 + 1) << "the page after the one that failed came back";
  paged.line.observe(1);
  view = paged.view();
  EXPECT_NO_THROW(paged.line.keeper.step(view)) << "and the next step goes on";
}

TEST(KeeperContract, LosesNoPageWhereTakingOneFails) {
  PagedLine paged(2);  // the two pages that stay are shared, and would be copied
  paged.pages.takes_left = 1;
  const std::int32_t free = paged.pages.pool.free_pages();
  CacheView view = paged.view();
  EXPECT_THROW(paged.line.keeper.step(view), std::runtime_error);
  EXPECT_EQ(paged.pages.pool.free_pages(), free);
  EXPECT_EQ(paged.line.lengths[0], 16);
  paged.pages.takes_left = -1;
  EXPECT_EQ(paged.line.keeper.step(view).wait().cuts.size(), 1U);
}

/// Keeps slots in an order that compaction refuses.
struct Unordered final : KVPolicy {
  [[nodiscard]] std::string_view name() const override { return "unordered"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override {
    return {.budget = {.slots = 6}, .interval = 2, .prefill = Trigger::Prefill::cut};
  }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override {
    Decision decision;
    decision.keep.emplace(KeepSet{.slots = zeros({6}, Dtype::i32), .indptr = {0, 6}});
    std::ranges::copy(Ints{1, 0, 2, 3, 4, 5}, decision.keep->slots.data<std::int32_t>());
    return decision;
  }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
};

TEST(KeeperContract, LosesNoPageWhereTheMoveFails) {
  PagedLine paged(2);  // the first page is shared, and would be copied
  paged.line.keeper = Keeper(model(), std::make_unique<Unordered>());
  paged.line.keeper.bind(paged.line.layers);
  paged.line.keeper.join(1, 16);
  const std::int32_t free = paged.pages.pool.free_pages();
  EXPECT_THROW(paged.line.keeper.step(paged.view()), InvalidArgument);
  EXPECT_EQ(paged.pages.pool.free_pages(), free);
  EXPECT_EQ(paged.line.lengths[0], 16);
}

TEST(KeeperContract, RefusesASlidingLayerInThePagesOfTheTable) {
  ModelSpec spec = model(2);
  spec.layers[1] = {LayerKind::sliding, 8, -1};
  Line line(kStreaming, spec);
  line.join(1, 12);
  PagePool pool(8, 4);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 12).given());
  std::vector<LayerKv> layers{PagedKv{normals(5, {8, 4, 1, 8}), normals(6, {8, 4, 1, 8})},
                              PagedKv{normals(7, {8, 4, 1, 8}), normals(8, {8, 4, 1, 8})}};
  CacheView view = line.view();
  view.block_table = sequences.table(line.ids);
  view.pages = &pool;
  const std::string message = message_of<InvalidArgument>([&] { line.bind(layers); });
  EXPECT_NE(message.find("layer 1 has a sliding window and uses pages of the shared block table"), std::string::npos)
      << message;
  EXPECT_EQ(line.lengths[0], 12);
  layers[1] = std::monostate{};
  line.bind(layers);
  const Report report = line.keeper.step(view);
  sequences.settle(line.ids, report.pages);
  EXPECT_EQ(line.lengths[0], 6);
}

TEST(PagedSequences, EndQuietlyWhereSomebodyGaveTheirPagesBack) {
  PagePool pool(4, 4);
  {
    PagedSequences sequences(pool);
    ASSERT_TRUE(sequences.admit(1, 8).given());
    pool.give_back(sequences.pages(1)[0]);
  }
  EXPECT_EQ(pool.free_pages(), 4);
}

// ---- Positions are no token counts ----------------------------------------------------------------------------------

TEST(KeeperContract, ProtectsThePromptWhereverItsPositionsStand) {
  for (const std::int32_t first : {0, 1000}) {
    Line line("knorm,budget=12,interval=4,sink=0,recent=1,protect_prompt=true");
    line.join(1);
    line.observe(8, from(first, 8));
    line.step();
    Report report;
    for (std::int32_t t = 0; report.cuts.empty() && t < 12; ++t) {
      line.observe(1, {first + 8 + t});
      report = line.step();
    }
    ASSERT_EQ(report.cuts.size(), 1U);
    Ints kept = line.positions(1);
    kept.resize(8);
    EXPECT_EQ(kept, from(first, 8));
  }
}

TEST(KeeperContract, ProtectsAPromptThatComesInChunksWithGaps) {
  Line line("knorm,budget=12,interval=4,sink=0,recent=1,protect_prompt=true");
  line.join(1, 0, 8);
  line.observe(5, {10, 12, 14, 16, 18});
  line.step();
  line.observe(5, {20, 22, 24, 26, 28});  // the last two are decoded
  line.step();
  Report report;
  for (std::int32_t t = 0; report.cuts.empty() && t < 12; ++t) {
    line.observe(1, {30 + 3 * t});
    report = line.step();
  }
  ASSERT_EQ(report.cuts.size(), 1U);
  Ints kept = line.positions(1);
  kept.resize(8);
  EXPECT_EQ(kept, (Ints{10, 12, 14, 16, 18, 20, 22, 24}));
}

TEST(KeeperContract, CountsARatioInTokensWhereverTheirPositionsStand) {
  std::vector<Ints> kept;
  for (const std::int32_t first : {0, 1000}) {
    Line line("streaming,ratio=0.5,interval=4,sink=2,recent=1");
    line.join(1);
    line.observe(8, from(first, 8));
    line.step();
    for (std::int32_t t = 0; t < 100; ++t) {
      line.observe(1, {first + 8 + t});
      line.step();
    }
    EXPECT_LE(line.lengths[0], 58) << "positions from " << first;
    kept.push_back(line.positions(1));
    for (std::int32_t& p : kept.back()) p -= first;
  }
  EXPECT_EQ(kept[0], kept[1]);
}

TEST(KeeperContract, TakesTokensBackToThePositionAfterTheLastThatIsLeft) {
  Line line("knorm,budget=64,interval=8");
  line.join(1);
  line.observe(4);
  line.observe(2, {10, 11});
  line.keeper.truncate(1, 5);
  line.lengths = {5};
  line.observe(1);
  EXPECT_EQ(line.positions(1), (Ints{0, 1, 2, 3, 10, 11}));
  line.keeper.truncate(1, 4);
  line.lengths = {4};
  line.observe(1);
  EXPECT_EQ(line.positions(1), (Ints{0, 1, 2, 3, 4}));
}

TEST(KeeperContract, TakesTokensBackToWhatTheLastEventLeft) {
  Line line("knorm,budget=6,interval=2,sink=2,recent=0,prefill=cut");
  Array(std::get<DenseKv>(line.layers[0]).keys)[0][0][11].fill_(
      100);  // the newest token is dropped, so that no kept slot tells the next position
  line.join(1);
  line.observe(12, {0, 1, 2, 3, 4, 5, 20, 21, 22, 23, 24, 40});
  ASSERT_EQ(line.step().cuts.size(), 1U);
  line.observe(1, {50});
  line.keeper.truncate(1, 12);
  line.lengths = {6};
  line.observe(1);
  EXPECT_EQ(line.positions(1).back(), 41);
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "kvkeep_truncated.state";
  line.keeper.save(1, file);
  line.keeper.restore(2, file);
  line.keeper.truncate(2, 12);
  line.ids = {2};
  line.lengths = {6};
  line.observe(1);
  EXPECT_EQ(line.positions(2).back(), 41) << "also after a restore";
  std::filesystem::remove(file);
}

TEST(KeeperContract, TakesBackNoMoreTokensThanTheRingCanLose) {
  Line line("tova,budget=64,interval=8");  // it holds the newest query and the 32 before it
  line.join(1);
  line.observe(60);
  EXPECT_THROW(line.keeper.truncate(1, 27), StateError);
  line.keeper.truncate(1, 28);
  EXPECT_EQ(line.keeper.logical_length(1), 28);
}

TEST(KeeperContract, AppliesNoPlanThatWasMadeBeforeAPinOrUnpin) {
  Line line(kStreaming);
  line.join(1);
  line.observe(12);
  const CacheView view = line.view();
  const Plan unpinned = line.keeper.plan(view);
  line.keeper.part<parts::Pins>().pin(1, 4, 6);
  EXPECT_THROW(line.keeper.apply(unpinned, view), StateError);
  const Plan pinned = line.keeper.plan(view);
  line.keeper.part<parts::Pins>().unpin(1, 4, 6);
  EXPECT_THROW(line.keeper.apply(pinned, view), StateError);
}

TEST(KeeperContract, AsksAgainAboutTokensThatGotNoAnswer) {
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "kvkeep_asked.state";
  for (const bool restored : {false, true}) {
    Line line("tova,budget=6,interval=4,sink=1,recent=1,trigger=counter");
    line.join(1);
    line.observe(8);
    line.step();
    for (int n = 0; n < 3; ++n) {
      line.observe(1);
      EXPECT_TRUE(line.step().cuts.empty());
    }
    // The fourth token ends the interval, and nobody is asked or nothing can be scored.
    if (restored) {
      line.observe(1);
      line.keeper.save(1, file);
      line.keeper.restore(2, file);
      line.ids = {2};
    } else {
      line.observe(1, {}, [](std::int32_t, Array& queries) { queries.fill_(std::numeric_limits<float>::quiet_NaN()); });
      EXPECT_EQ(line.step().unscored.size(), 1U);
    }
    line.observe(1);
    EXPECT_EQ(line.step().cuts.size(), 1U) << restored;
  }
  std::filesystem::remove(file);
}

TEST(KeeperContract, RestoresHowQueriesAreTaken) {
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "kvkeep_basis.state";
  Line here("tova,budget=64,interval=8"), there("tova,budget=64,interval=8");
  const SequenceId id = 1;
  const std::int32_t indptr[] = {0, 5};
  here.join(id);
  here.keeper.observe({.layer = 0,
                       .sequences = {&id, 1},
                       .indptr = indptr,
                       .queries = normals(9, {5, 1, 8}),
                       .basis = QueryBasis::post_rope});
  here.keeper.save(id, file);
  there.keeper.restore(id, file);
  there.ids = {id}, there.lengths = {5};
  EXPECT_NE(message_of<InvalidArgument>([&] { there.observe(1); }).find("unlike earlier ones"), std::string::npos);
  std::filesystem::remove(file);
}

TEST(KeeperContract, RefusesUnequalRowsUnderOneLength) {
  Line line("threshold-knorm,threshold=-1,budget=10,interval=2,sink=1,recent=1", model(1, 2));
  line.join(1);
  line.observe(2);
  EXPECT_EQ(message_of<InvalidArgument>([&] { line.step(); }),
            "step: under threshold-knorm the rows of a sequence may keep different numbers of slots, but the view has "
            "one length per sequence; allowed one length per row (Lengths::rows_per_sequence)")
      << "at the first step, which has no event";
  Line one_head("pyramidkv-knorm,budget=10,interval=2,sink=1,recent=1,prefill=cut", model(2, 1));
  one_head.join(1);
  one_head.observe(2);
  one_head.step();  // rows of a layer cannot differ
  one_head.observe(30);
  EXPECT_NE(message_of<InvalidArgument>([&] { one_head.step(); }).find("but the view has one length per sequence"),
            std::string::npos);
  EXPECT_EQ(one_head.lengths, (Ints{32}));
}

TEST(KeeperContract, CountsScalesInBytes) {
  Line line("streaming,bytes=150,interval=2,sink=1,recent=1,prefill=cut");
  const auto rows = [] { return Array::full({4, 1, 256, 8}, 1, Dtype::i8); };
  const auto scales = [] { return Array::full({4, 1, 256}, 1.0F, Dtype::f32); };
  line.bind({DenseKv{rows(), rows(), scales(), scales()}});
  line.join(1);
  line.observe(12);
  const Report report = line.step();
  constexpr std::int64_t kSlot = 8 + 8 + 4 + 4;
  EXPECT_EQ(report.bytes_before, 12 * kSlot);
  EXPECT_EQ(report.bytes_after, 6 * kSlot);
  EXPECT_EQ(line.lengths, (Ints{6}));
}

TEST(KeeperContract, KeepsOneSlotMoreThanItsSinksHoweverSmallTheBudget) {
  Line line("streaming,ratio=0.9,interval=2,sink=4,recent=0,prefill=cut");
  line.join(1);
  line.observe(12);
  line.step();
  EXPECT_EQ(line.positions(1), (Ints{0, 1, 2, 3, 11}));
}

TEST(KeeperContract, ProtectsAPromptThatEndsWithinAStep) {
  Line line("streaming,budget=8,interval=2,sink=0,recent=1,protect_prompt=true");
  line.join(1, 0, 5);
  line.observe(8);
  line.step();
  for (int n = 0; n < 4; ++n) line.observe(1), line.step();
  ASSERT_LT(line.lengths[0], 12) << "an event";
  EXPECT_EQ(line.positions(1), (Ints{0, 1, 2, 3, 4, 9, 10, 11}));
}

TEST(KeeperContract, EndsAPromptThatLosesTokensWhereItsLastOneStands) {
  Line line("streaming,budget=6,interval=4,sink=2,recent=1");
  line.join(1);
  line.observe(20);
  line.step();
  line.keeper.truncate(1, 4);
  line.lengths = {4};
  EXPECT_EQ(line.keeper.prompt_length(1), 4);
  for (std::int32_t t = 0; t < 10; ++t) {
    line.observe(1);
    line.step();
    EXPECT_LE(line.lengths[0], 10);
  }
}

TEST(KeeperContract, RefusesPositionsThatNoTokenCanFollow) {
  Line line("streaming,budget=6,interval=4,sink=2,recent=1");
  line.join(1);
  EXPECT_THROW(line.observe(1, {std::numeric_limits<std::int32_t>::max()}), InvalidArgument);
  EXPECT_THROW(line.observe(1, {kMostPositions}), InvalidArgument);
  line.observe(1, {kMostPositions - 2});
  EXPECT_THROW(line.observe(2), InvalidArgument) << "the second would stand at kMostPositions";
  line.observe(1);
  EXPECT_EQ(line.positions(1).back(), kMostPositions - 1);
  EXPECT_THROW(line.keeper.join(2, kMostPositions + 1), InvalidArgument);
  Keeper surprised(model(), make_policy("sekv,recent=64"), {.surprisal = true, .reads_folded = true});
  surprised.join(1);
  const SequenceId id = 1;
  const Ints indptr{0, 1}, far{1 << 28};
  const Array query = normals(10, {1, 1, 8});
  EXPECT_THROW(surprised.observe({.layer = 0,
                                  .sequences = {&id, 1},
                                  .indptr = indptr,
                                  .queries = query,
                                  .basis = QueryBasis::post_rope,
                                  .positions = far}),
               InvalidArgument)
      << "it would keep a number for every position below";
}

// ---- Neighbours -----------------------------------------------------------------------------------------------------

TEST(KeeperContract, LeavesASequenceAloneWhoseQueriesAreNotFiniteAndCutsTheOthers) {
  const std::string policy = "snapkv,scorer.window=8,budget=16,interval=4,sink=1,recent=1";
  Line line(policy, model(2)), alone(policy, model(2));
  line.join(1);
  line.join(2);
  line.observe(16);
  line.step();
  std::int64_t told = 0;
  for (std::int32_t t = 0; t < 20; ++t) {
    line.observe(1, {}, [t](std::int32_t layer, Array& queries) {
      if (t == 2 && layer == 1) queries[1][0][3].fill_(std::numeric_limits<float>::quiet_NaN());
    });
    const Report report = line.step();
    EXPECT_LT(line.lengths[0], 20) << "sequence 1 is cut as if it were alone, step " << t;
    for (const Unscored& left : report.unscored) {
      EXPECT_EQ(left.sequence, 2);
      EXPECT_EQ(left.layer, 1);
      EXPECT_EQ(left.position, 18);
      ++told;
    }
  }
  EXPECT_GT(told, 0);
  EXPECT_LT(line.lengths[1], 20) << "and is cut again once the query has left the window";
}

TEST(KeeperContract, LetsAnyFullLayerShowTheTokensOfAPolicyWithoutQueries) {
  Keeper keeper(model(2), make_policy("streaming,budget=6,interval=4,sink=2,recent=1"));
  keeper.join(1);
  const SequenceId id = 1;
  const Ints indptr{0, 1};
  std::int32_t length = 0;
  keeper.bind({DenseKv{Array::zeros({1, 1, 16, 8}), Array::zeros({1, 1, 16, 8})},
               DenseKv{Array::zeros({1, 1, 16, 8}), Array::zeros({1, 1, 16, 8})}});
  const CacheView view{{&id, 1}, {{&length, 1}}};
  for (std::int32_t t = 0; t < 20; ++t) {
    keeper.observe({.layer = t * 7 % 3 % 2, .sequences = {&id, 1}, .indptr = indptr});
    ++length;
    EXPECT_NO_THROW(keeper.step(view)) << t;
  }
  EXPECT_EQ(keeper.logical_length(1), 20);
  EXPECT_LT(length, 10);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

TEST(Columns, GiveBackTheMemoryOfALongPrompt) {
  constexpr std::int32_t kLong = 1 << 17, kKept = 1024, kInterval = 512;
  Columns columns(4);
  columns.reserve(kLong);
  columns.append(from(0, kLong));
  std::vector<std::int64_t> indptr{0};
  for (int r = 1; r <= 4; ++r) indptr.push_back(r * kKept);
  Decision decision;
  KeepSet& keep = decision.keep.emplace(KeepSet{.slots = Array::zeros({4 * kKept}, Dtype::i32), .indptr = indptr});
  for (std::int32_t j = 0; j < 4 * kKept; ++j) keep.slots.data<std::int32_t>()[j] = j % kKept * 2;
  decision.credit = empty({kLong}, Dtype::f32);
  std::iota(decision.credit->data<float>(), decision.credit->data<float>() + kLong, 0.0F);
  for (std::int32_t r = 0; r < 4; ++r) {
    const ColumnTarget target = columns.reserve_settled(r, true, false);
    move_columns({.length = kLong}, static_cast<std::size_t>(r), decision, target);
    columns.settle(r, keep, static_cast<std::size_t>(r), true, false);
  }
  columns.finish_event(kInterval);
  EXPECT_LE(columns.bytes(), 4 * 4 * 2 * 2 * (kKept + kInterval));
  ASSERT_EQ(columns.length(3), kKept);
  EXPECT_EQ(columns.positions(3)[7], 14);
  EXPECT_EQ(columns.credit(3)[7], 14) << "it moves with its slot";
  const std::int64_t held = columns.bytes();
  columns.reserve(kInterval);
  columns.append(from(kLong, kInterval));
  EXPECT_EQ(columns.bytes(), held) << "room until the next event";
}

TEST(Columns, TakeGivenScoresAlongWithTheTokensThatContinue) {
  Columns columns(2);
  columns.append(from(0, 6));
  for (std::int32_t r = 0; r < 2; ++r) {
    columns.reserve_given();
    float* const given = columns.give(r, 5);
    std::iota(given, given + 5, 10.0F * static_cast<float>(r));
  }
  columns.narrow(1, Ints{1, 3, 5}, Ints{1, 3, 5});
  Row row;
  columns.describe(1, row);
  EXPECT_EQ(std::vector<float>(row.given, row.given + row.given_length), (std::vector<float>{11, 13}));
  columns.describe(0, row);
  EXPECT_EQ(row.given_length, 5) << "an earlier layer";
}

TEST(Columns, HoldNoMoreThanARowWhereRowsAreGiven) {
  Columns columns(64);
  std::vector<RowColumns> rows(64);
  for (std::int32_t r = 0; r < 64; ++r) rows[static_cast<std::size_t>(r)].positions = from(r * 1000, 1000);
  columns.take(std::move(rows), 0);
  EXPECT_EQ(columns.bytes(), 64 * 4000);
  EXPECT_EQ(columns.positions(5)[3], 5003);
}

TEST(Keeper, RefusesQueriesBeforeRopeThatNothingCanTurn) {
  ModelSpec spec;
  spec.query_heads = 2, spec.kv_heads = 1, spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  const SequenceId id = 1;
  const std::int32_t indptr[] = {0, 2};
  const Observation before{.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = normals(11, {2, 2, 4})};
  Keeper keeper(spec, make_policy("tova,budget=8"));
  keeper.join(id);
  const std::string says = "queries are taken before RoPE, but the model spec does not state the RoPE of layer 0";
  EXPECT_NE(testing::message_of<InvalidArgument>([&] { keeper.observe(before); }).find("observe: " + says),
            std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] {
              keeper.begin_step({.sequences = {&id, 1}, .indptr = indptr});
            }).find("begin_step: " + says),
            std::string::npos);
  EXPECT_EQ(keeper.logical_length(id), 0);
  Observation after = before;
  after.basis = QueryBasis::post_rope;
  keeper.observe(after);
  EXPECT_EQ(keeper.logical_length(id), 2);

  spec.rope.style = RopeStyle::none;
  Keeper without(spec, make_policy("tova,budget=8"));
  without.join(id);
  without.observe(before);
  EXPECT_EQ(without.logical_length(id), 2) << "queries before and after no RoPE are the same";
}

TEST(Keeper, RefusesPoliciesThatTurnWhereALayerLeavesRopeOpen) {
  ModelSpec spec;
  spec.query_heads = 2, spec.kv_heads = 1, spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(3);
  spec.rope.inv_freq = {1, 0.1};
  for (const char* policy : {"expected,budget=8", "ams-expected,budget=8"}) {
    SCOPED_TRACE(policy);
    ModelSpec open = spec;
    open.layers[1].rope = RopeSpec();
    const std::string said = message_of<InvalidArgument>([&] { Keeper(open, make_policy(policy)); });
    EXPECT_NE(said.find("does not state the RoPE of layer 1"), std::string::npos) << said;
    open.layers[1].rope = RopeSpec::absent();
    EXPECT_NO_THROW(Keeper(open, make_policy(policy)));
  }
  spec.layers[2].rope = RopeSpec();
  EXPECT_NO_THROW(Keeper(spec, make_policy("tova,budget=8"))) << "it turns nothing";
}

TEST(Keeper, SaysAllThatAPolicyLacksOnOneLine) {
  const std::string said = message_of<InvalidArgument>(
      [] { const Keeper keeper(model(), make_policy("sekv,recent=12,interval=8"), {.queries = false}); });
  EXPECT_TRUE(said.starts_with("policy sekv cannot run here: reads_folded: ")) << said;
  EXPECT_NE(said.find("; surprisal: sekv reads that of every token"), std::string::npos) << said;
  EXPECT_EQ(said.find('\\'), std::string::npos) << said;
}

TEST(Keeper, RefusesTensorsWithoutAnAddress) {
  const SequenceId id = 1;
  const std::int32_t indptr[] = {0, 2};
  Keeper keeper(model(), make_policy("tova,budget=8,recent=2"));
  keeper.join(id);
  const Observation seen{
      .layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = Tensor(nullptr, Dtype::f32, {2, 1, 8})};
  EXPECT_NE(message_of<InvalidArgument>([&] { keeper.observe(seen); }).find("queries of layer 0 have no address"),
            std::string::npos);
  EXPECT_EQ(keeper.logical_length(id), 0);
  for (const bool value : {false, true}) {
    const Tensor there = zeros({1, 1, 16, 8}, Dtype::f32), nowhere(nullptr, Dtype::f32, {1, 1, 16, 8});
    EXPECT_NE(message_of<InvalidArgument>([&] {
                keeper.bind({DenseKv{value ? there : nowhere, value ? nowhere : there}});
              }).find(value ? "values of layer 0 have no address" : "keys of layer 0 have no address"),
              std::string::npos);
  }
}

// The last step is of one token, the model of one head: of their strides the sanitizers would see an overflow.
TEST(KeeperContract, ReadsNoStrideOfWhatTheEngineGivesAlongADimensionOfOne) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const SequenceId ids[] = {1, 2};
  std::vector<float> numbers(64, 0.5F);
  const auto given = [&](std::int64_t tokens, std::initializer_list<std::int64_t> rest) {
    std::vector<std::int64_t> sizes{tokens}, strides{tokens > 1 ? std::int64_t{8} : kAny};
    for (const std::int64_t n : rest) sizes.push_back(n), strides.push_back(n > 1 ? 1 : kAny);
    return Tensor(numbers.data(), Dtype::f32, Shape(sizes), Shape(strides));
  };
  for (const char* policy : {"tova,budget=4,interval=1,sink=1,recent=1", "expected,budget=4,interval=1,sink=1,recent=1",
                             "given,budget=4,interval=1,sink=1,recent=1"}) {
    SCOPED_TRACE(policy);
    Keeper keeper(model(), make_policy(policy), {.given_scores = true});
    for (const SequenceId id : ids) keeper.join(id);
    const DenseKv rows{zeros({2, 1, 16, 8}, Dtype::f32), zeros({2, 1, 16, 8}, Dtype::f32)};
    keeper.bind({rows});
    std::vector<std::int32_t> lengths{0, 0};
    for (const Ints& tokens : {Ints{3, 2}, Ints{1, 0}, Ints{0, 1}}) {
      const std::int32_t indptr[] = {0, tokens[0], tokens[0] + tokens[1]};
      keeper.observe({.layer = 0,
                      .sequences = ids,
                      .indptr = indptr,
                      .queries = given(indptr[2], {1, 8}),
                      .basis = QueryBasis::post_rope,
                      .log_sum_exp = given(indptr[2], {1})});
      if (auto* of_engine = keeper.find<parts::Given>())
        of_engine->give({.layer = 0, .sequences = ids, .indptr = indptr, .scores = given(indptr[2], {1})});
      for (std::size_t i = 0; i < 2; ++i) lengths[i] += tokens[i];
      keeper.step({ids, {lengths}});
    }
    EXPECT_EQ(keeper.logical_length(1), 4);
    EXPECT_EQ(keeper.logical_length(2), 3);
  }
}

}  // namespace
}  // namespace kvkeep::keeper_contract_test
