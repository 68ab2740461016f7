// SPDX-License-Identifier: Apache-2.0
// The line on paged caches: whatever the page size, layout and form of the tensors, a sequence keeps what it keeps in a
// dense cache. What is refused changes nothing.

#include "engines.h"
#include "message_of.h"

namespace kvkeep::paged_keeper_test {
namespace {

using testing::Array;
using namespace engines;

struct PolicyCase {
  const char* name;
  const char* policy;
  bool ragged;
};
void PrintTo(const PolicyCase& one, std::ostream* out) { *out << one.name; }

class PagedKeeper : public ::testing::TestWithParam<PolicyCase> {};

/// The block table says what the report says: the pages that stay, then -1.
void expect_written(const Array& table, const std::vector<PageMove>& moves) {
  const BlockTable blocks(CacheView{.sequences = {}, .lengths = {}, .block_table = table});
  for (const PageMove& move : moves)
    for (std::size_t p = 0; p < move.before.size(); ++p)
      EXPECT_EQ(blocks.page(move.sequence, static_cast<std::int64_t>(p)), p < move.after.size() ? move.after[p] : -1)
          << p;
}

TEST_P(PagedKeeper, KeepsOnAnyPagesExactlyWhatItKeepsInADenseCache) {  // B21, B23, B24, B25
  const auto [name, policy, ragged] = GetParam();
  int which = 0;
  for (const std::int32_t page_size : {1, 16, 24, 32, 64, 100, 128})
    for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
      const Form form = static_cast<Form>(which % kForms);
      const Dtype dtype = which % 2 == 0 ? Dtype::bf16 : Dtype::f32;
      ++which;
      SCOPED_TRACE(
          text(name, ", pages of ", page_size, layout == PageLayout::slot_head ? " [slot, head]" : " [head, slot]"));
      oracle::Random random(static_cast<std::uint64_t>(7 + which));
      DenseEngine dense(policy, ragged, dtype);
      PagedEngine paged(policy, ragged, dtype, page_size, layout, form);
      if (which % 3 == 0) paged.table_dtype = Dtype::i64;
      std::int64_t events = 0, freed = 0;
      const auto step = [&](const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
        const Numbers drawn = numbers_of(random, work), numbers = form == Form::latent ? latent(drawn) : drawn;
        const Report a = dense.step(numbers), b = paged.step(numbers);
        events += static_cast<std::int64_t>(b.cuts.size());
        freed += b.pages_freed;
        expect_written(paged.block_table, b.pages);
        EXPECT_EQ(a.slots_dropped, b.slots_dropped);
        const std::int64_t size = element_size(dtype), of_latent = kKeyDim * size + kExtraDim * 4,
                           of_slot = of_latent + kValueDim * size;
        EXPECT_EQ(a.bytes_after * (form == Form::latent ? of_latent : of_slot), b.bytes_after * of_slot);
      };
      for (Engine* engine : {static_cast<Engine*>(&dense), static_cast<Engine*>(&paged)}) {
        engine->join(1);
        engine->join(2);
      }
      step({{1, 45}, {2, 170}});
      for (Engine* engine : {static_cast<Engine*>(&dense), static_cast<Engine*>(&paged)})
        engine->fork(3, 1, 37);  // a prefix, its last page shared too
      step({{3, 20}, {1, 1}});
      for (int n = 0; n < 24; ++n) {
        step(n % 3 == 0 ? std::vector<std::pair<SequenceId, std::int32_t>>{{2, 3}, {3, 1}}
                        : std::vector<std::pair<SequenceId, std::int32_t>>{{1, 2}, {2, 1}, {3, 2}});
        if (n % 6 == 0) expect_alike(dense, paged);
      }
      expect_alike(dense, paged);
      if (HasFatalFailure()) return;
      EXPECT_GE(events, 5);
      if (page_size <= 64) EXPECT_GT(freed, 0);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, PagedKeeper,
    ::testing::Values(
        PolicyCase{"amstova", "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16", false},
        PolicyCase{"keydiff", "keydiff,budget=48,interval=12", false},
        PolicyCase{"expected", "ams-expected,budget=48,interval=12", false},
        PolicyCase{"rkv", "rkv,budget=48,interval=12", false},
        PolicyCase{"snapkv", "snapkv,budget=48,interval=12,window=8", false},
        PolicyCase{"h2o", "h2o,budget=48,interval=12", false},
        PolicyCase{"given", "given,budget=48,interval=12", false},
        PolicyCase{"threshold", "threshold-given,budget=48,interval=12,recent=4,threshold=-0.5", true},
        PolicyCase{"adakv", "adakv-tova,budget=48,interval=12,recent=4", true},
        PolicyCase{"pyramidkv", "pyramidkv-knorm,budget=48,interval=12,recent=4", true}),
    [](const auto& p) { return std::string(p.param.name); });

TEST_P(PagedKeeper, MovesValuesThatLieWithinKeysOnce) {
  const auto [name, policy, ragged] = GetParam();
  oracle::Random random(11);
  DenseEngine apart(policy, ragged, Dtype::f32), within(policy, ragged, Dtype::f32, nullptr, Form::latent);
  std::int64_t moved = 0;
  for (DenseEngine* engine : {&apart, &within}) engine->join(1);
  for (int n = 0; n < 40; ++n) {
    const Numbers numbers = latent(numbers_of(random, {{1, n == 0 ? 90 : 2}}));
    const Report a = apart.step(numbers), b = within.step(numbers);
    EXPECT_EQ(a.bytes_moved * (kKeyDim + kExtraDim), b.bytes_moved * (kKeyDim + kValueDim + kExtraDim));
    moved += b.bytes_moved;
    ASSERT_NO_FATAL_FAILURE(expect_alike(apart, within));
  }
  EXPECT_GT(moved, 0);
}

/// Everything an event may write, before and after.
struct Sight {
  Sight(const PagedEngine& engine, const std::vector<SequenceId>& ids)
      : table(Array(engine.sequences.table(ids)).clone()), lengths(engine.lengths) {
    for (const LayerKv& layer : engine.layers)
      for (const Array side : {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values})
        sides.push_back(side.clone());
    for (std::int32_t p = 0; p < engine.pool.capacity(); ++p) references.push_back(engine.pool.references(p));
    for (const SequenceId id : ids)
      for (std::int32_t r = 0; r < kRows; ++r) {
        const auto row = engine.keeper.positions(id, r / kHeads, r % kHeads);
        positions.emplace_back(row.begin(), row.end());
      }
  }
  [[nodiscard]] bool same_as(const Sight& other) const {
    for (std::size_t i = 0; i < sides.size(); ++i)
      if (!sides[i].equal(other.sides[i])) return false;
    return table.equal(other.table) && lengths == other.lengths && references == other.references &&
           positions == other.positions;
  }
  Array table;
  std::map<SequenceId, Ints> lengths;
  std::vector<Array> sides;
  Ints references;
  std::vector<Ints> positions;
};

TEST(PagedEvents, WithSharedPagesRefusedThrowBeforeAnythingIsWritten) {
  oracle::Random random(3);
  PagedEngine engine("knorm,budget=24,interval=8,recent=2", false, Dtype::f32, 16, PageLayout::slot_head, Form::apart);
  engine.join(1);
  static_cast<void>(engine.step(numbers_of(random, {{1, 30}})));
  engine.fork(2, 1, 30);
  engine.shared_pages = SharedPages::refuse;
  const std::vector<SequenceId> ids{1, 2};
  static_cast<void>(engine.step(numbers_of(random, {{1, 1}, {2, 1}})));
  try {
    static_cast<void>(engine.step(numbers_of(random, {{1, 1}, {2, 1}})));
    FAIL() << "a shared page was written";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("SharedPages::copy"), std::string::npos) << error.what();
  }
  const Sight before(engine, ids);
  EXPECT_THROW(static_cast<void>(engine.cut(ids)), StateError);
  EXPECT_TRUE(before.same_as(Sight(engine, ids))) << "a refused event changes nothing";
  engine.shared_pages = SharedPages::copy;
  EXPECT_EQ(engine.cut(ids).cuts.size(), 2U) << "and comes about once it may copy";
  EXPECT_EQ(engine.lengths.at(2)[0], 24);
}

TEST(PagedEvents, WithoutFreePagesForCopiesThrowBeforeAnythingIsWritten) {
  oracle::Random random(4);
  PagedEngine engine("knorm,budget=24,interval=8,recent=2", false, Dtype::f32, 16, PageLayout::head_slot,
                     Form::pages_first, 4 * 16);
  engine.join(1);
  static_cast<void>(engine.step(numbers_of(random, {{1, 30}})));
  engine.fork(2, 1, 30);
  static_cast<void>(engine.step(numbers_of(random, {{2, 1}})));
  const std::int32_t kept_away = engine.pool.take();
  ASSERT_EQ(engine.pool.free_pages(), 0);
  const std::vector<SequenceId> ids{2};
  EXPECT_THROW(static_cast<void>(engine.step(numbers_of(random, {{2, 1}}))), StateError);
  const Sight before(engine, ids);
  EXPECT_THROW(static_cast<void>(engine.cut(ids)), StateError);
  EXPECT_TRUE(before.same_as(Sight(engine, ids))) << "a refused event changes nothing";
  engine.pool.give_back(kept_away);
  EXPECT_EQ(engine.cut(ids).cuts.size(), 1U);
}

/// An engine's block manager that has gone wrong.
class GivesThatPage final : public PageAllocator {
 public:
  GivesThatPage(PagePool& pool, std::int32_t first, std::int32_t then) : pool_(&pool), answers_{first, then} {}
  [[nodiscard]] std::int32_t references(std::int32_t page) const override { return pool_->references(page); }
  [[nodiscard]] std::int32_t take() override { return answers_[std::min<std::size_t>(taken++, 1)]; }
  void give_back(std::int32_t page) override { given_back.push_back(page); }
  std::size_t taken = 0;
  Ints given_back;

 private:
  PagePool* pool_;
  Ints answers_;
};

TEST(PagedEvents, AreRefusedOverAnotherViewThanThatOfTheirPlan) {
  oracle::Random random(4);
  PagedEngine engine("knorm,budget=24,interval=8,recent=2", false, Dtype::f32, 8, PageLayout::head_slot,
                     Form::pages_first, 16 * 8);
  engine.join(1);
  static_cast<void>(engine.step(numbers_of(random, {{1, 30}})));
  engine.fork(2, 1, 30);
  const std::vector<SequenceId> ids{2};
  engine.feed(numbers_of(random, {{2, 2}}));
  const CacheView view = engine.view(ids);
  const Plan plan = engine.keeper.plan(view);
  ASSERT_EQ(plan.pages.size(), 1U);
  ASSERT_GT(plan.pages[0].taken, 0) << "copies of shared pages";
  const Sight before(engine, ids);
  CacheView other = view;
  const auto refused = [&](const std::string& says) {
    EXPECT_EQ(testing::message_of<StateError>([&] { engine.keeper.apply(plan, other); }),
              "apply: " + says + "; allowed the view of the plan");
    other = view;
  };
  other.pages = nullptr;
  refused("the view has no PageAllocator, and the event was planned with one");
  const std::int64_t pages = view.block_table.size(1);
  for (const std::int64_t wide : {std::int64_t{1}, pages, pages + 3}) {
    other.block_table = Array::zeros({1, wide}, Dtype::i32);
    refused("the block table of sequence 2 has other pages than when the event was planned");
  }
  Ints lengths(other.lengths.data.begin(), other.lengths.data.end());
  lengths[0] += 1;
  other.lengths.data = lengths;
  refused("sequence 2 holds 33 slots in layer 0, head 0, and 32 when the event was planned");
  for (int wrong = 0; wrong < 3; ++wrong) {
    if (wrong == 0) other.block_table = Tensor();
    if (wrong == 1) other.block_table = Array::zeros({2, pages}, Dtype::i32);
    if (wrong == 2) other.lengths.data = {};
    EXPECT_THROW(engine.keeper.apply(plan, other), InvalidArgument) << wrong;
    other = view;
  }
  EXPECT_TRUE(before.same_as(Sight(engine, ids))) << "what throws changes nothing";
  EXPECT_EQ(engine.keeper.apply(plan, view).wait().cuts.size(), 1U);
}

TEST(PagedEvents, NeverWriteAPageThatIsHeldTwiceByTheTimeOfApply) {
  oracle::Random random(4);
  PagedEngine engine("knorm,budget=24,interval=8,recent=2", false, Dtype::f32, 8, PageLayout::head_slot,
                     Form::pages_first, 16 * 8);
  engine.join(1);
  static_cast<void>(engine.step(numbers_of(random, {{1, 30}})));
  engine.feed(numbers_of(random, {{1, 2}}));
  const std::vector<SequenceId> ids{1};
  CacheView view = engine.view(ids), uncounted = view;
  uncounted.pages = nullptr;
  const Plan counted = engine.keeper.plan(view), blind = engine.keeper.plan(uncounted);
  ASSERT_FALSE(counted.pages[0].written.empty());
  const std::int32_t page = counted.pages[0].written[0];
  const auto refused = [&](const Plan& plan) {
    const Sight before(engine, ids);
    EXPECT_EQ(testing::message_of<StateError>([&] { engine.keeper.apply(plan, view); }),
              text("apply: page ", page,
                   " of sequence 1, which the event writes, is held by 2; allowed a plan made "
                   "with this PageAllocator, and since the page has that many"));
    EXPECT_TRUE(before.same_as(Sight(engine, ids))) << "what throws changes nothing";
  };
  engine.pool.retain(page);  // a prefix cache takes it between plan() and apply(), or where plan() could not know
  refused(counted);
  refused(blind);
  const Plan since = engine.keeper.plan(view);
  EXPECT_EQ(since.pages[0].taken, 1);
  EXPECT_EQ(engine.keeper.apply(since, view).wait().cuts.size(), 1U);
}

TEST(PagedEvents, RefuseAPageThatIsNotFreeBeforeAnythingIsWritten) {
  oracle::Random random(4);
  const auto shared = [&] {
    auto engine = std::make_unique<PagedEngine>("knorm,budget=24,interval=8,recent=2", false, Dtype::f32, 8,
                                                PageLayout::head_slot, Form::pages_first, 16 * 8);
    engine->join(1);
    static_cast<void>(engine->step(numbers_of(random, {{1, 30}})));
    engine->fork(2, 1, 30);
    static_cast<void>(engine->step(numbers_of(random, {{2, 1}})));
    return engine;
  };
  const std::vector<SequenceId> ids{2};
  std::int32_t free = 0;
  while (shared()->pool.references(free) > 0) ++free;
  const std::int32_t held = shared()->sequences.pages(2).front();
  for (const auto& [first, then, says] : {std::tuple{16, 0, "take() gave page 16; the layers allow 0 to 15"},
                                          {4'000'000, 0, "take() gave page 4000000"},
                                          {free, 1'000'000'000, "take() gave page 1000000000"},
                                          {held, 0, "which a sequence of the step holds"},
                                          {free, free, " twice; allowed a free page"},
                                          {free, -1, "there are 1"}}) {
    const auto engine = shared();
    GivesThatPage wrong(engine->pool, first, then);
    engine->allocator = &wrong;
    EXPECT_THROW(static_cast<void>(engine->step(numbers_of(random, {{2, 1}}))), StateError);
    const Sight before(*engine, ids);
    const std::size_t taken = std::exchange(wrong.taken, 0);
    wrong.given_back.clear();
    EXPECT_NE(testing::message_of<StateError>([&] { static_cast<void>(engine->cut(ids)); }).find(says),
              std::string::npos);
    EXPECT_TRUE(before.same_as(Sight(*engine, ids))) << "a refused event changes nothing";
    EXPECT_EQ(wrong.taken, taken);
    EXPECT_EQ(wrong.given_back.size(), then == -1 ? taken - 1 : taken) << "what was taken has been given back";
    engine->allocator = &engine->pool;
    EXPECT_EQ(engine->cut(ids).cuts.size(), 1U);
  }
}

TEST(PagedRows, LieWhereTheirOffsetsSayBeyondTwoToThe31Elements) {  // B22: addresses only, the memory is not there
  constexpr std::int64_t kPages = 5'000'000, kSize = 16;
  ModelSpec spec = model();
  spec.key_dim = spec.value_dim = 128;
  std::byte nowhere[64];
  const std::int64_t slot = kHeads * 128, page = kSize * slot;
  const auto side = [&](std::int64_t) {
    return Array(nowhere, Dtype::bf16, {kPages, kSize, kHeads, 128}, {page, slot, 128, 1});
  };
  const PagedKv kv{side(0), side(0), PageLayout::slot_head};
  Array table = Array::full({1, 3}, 0, Dtype::i32);
  const std::int32_t pages[] = {4'999'999, 0, 2'000'003};
  std::copy_n(pages, 3, table.data<std::int32_t>());
  const SequenceId id = 1;
  std::int32_t length = 41;
  const std::vector<LayerKv> cache{kv, kv};
  const CacheView view{.sequences = {&id, 1}, .lengths = {{&length, 1}}, .block_table = table};
  const std::int32_t both[] = {0, 1}, first[] = {0};
  const RowTable rows = make_rows(spec, cache, view, both, first);
  ASSERT_EQ(rows.rows.size(), 4U);
  for (const Row& row : rows.rows)
    for (const std::int32_t t : {0, 5, 15, 16, 31, 32, 40}) {
      const std::int64_t elements = pages[t / kSize] * page + t % kSize * slot + row.head * 128;
      EXPECT_EQ(reinterpret_cast<std::intptr_t>(row.keys.at(t)) - reinterpret_cast<std::intptr_t>(nowhere),
                2 * elements)
          << t;
      EXPECT_EQ(row.keys.run(t), kSize - t % kSize);
    }
  EXPECT_GT(pages[0] * page, std::int64_t{1} << 31);

  // A dense cache as large: place 3000 of 4000, slot 8000 of 10000.
  const Array dense =
      Array(nowhere, Dtype::f32, {4000, kHeads, 10000, 128}, {kHeads * 10000 * 128, 10000 * 128, 128, 1});
  const std::int64_t elements = (std::int64_t{3000} * kHeads + 1) * 10000 * 128 + std::int64_t{8000} * 128;
  EXPECT_EQ(reinterpret_cast<std::intptr_t>(dense_address(dense, 3000, 1).at(8000)) -
                reinterpret_cast<std::intptr_t>(nowhere),
            4 * elements);
}

// A dimension of one has a stride that nobody uses: engines, and tensors that were sliced, leave any number there.
TEST(PagedRows, ReadNoStrideAlongADimensionOfOne) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  float slots[6] = {};
  const std::int32_t pages[] = {2, 0};
  const Tensor paged(slots, Dtype::f32, {3, 1, 1, 2}, {2, kAny, kAny, 1});
  for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
    const SlotAddress row = paged_address(paged, layout, 0, pages);
    EXPECT_EQ(row.at(0), reinterpret_cast<std::byte*>(slots + 4));
    EXPECT_EQ(row.at(1), reinterpret_cast<std::byte*>(slots));
  }
  const Tensor one_page(slots, Dtype::f32, {1, 1, 2, 2}, {kAny, kAny, 2, 1});
  EXPECT_EQ(paged_address(one_page, PageLayout::head_slot, 0, pages + 1).at(1),
            reinterpret_cast<std::byte*>(slots + 2));
  EXPECT_EQ(dense_address(one_page, 0, 0).at(1), reinterpret_cast<std::byte*>(slots + 2));
}

}  // namespace
}  // namespace kvkeep::paged_keeper_test
