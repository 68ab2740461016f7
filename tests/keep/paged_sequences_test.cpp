// SPDX-License-Identifier: Apache-2.0
// A pool of pages and the sequences that hold them: small examples, then many random operations beside a plain model
// that knows what every slot must hold.

#include "kvkeep/keep/paged_sequences.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/policy/registry.h"
#include "message_of.h"
#include "oracle/random_case.h"

namespace kvkeep::paged_sequences_test {
namespace {

using testing::Array;
using testing::message_of;
using testing::whole_numbers;
using Ints = std::vector<std::int32_t>;

Ints pages_of(const PagedSequences& sequences, SequenceId id) {
  return {sequences.pages(id).begin(), sequences.pages(id).end()};
}

TEST(PagePool, HandsOutPagesInOrderAndTheNewestFreeOneFirst) {
  PagePool pool(4, 16);
  EXPECT_EQ(pool.capacity(), 4);
  EXPECT_EQ(pool.page_size(), 16);
  for (const std::int32_t page : {0, 1, 2, 3}) EXPECT_EQ(pool.take(), page);
  EXPECT_EQ(pool.take(), -1);
  EXPECT_EQ(pool.free_pages(), 0);
  pool.give_back(1);
  pool.give_back(3);
  for (const std::int32_t page : {3, 1, -1}) EXPECT_EQ(pool.take(), page);
}

TEST(PagedSequences, AdoptsPagesThatACacheHoldsEachOnce) {
  PagePool pool(8, 4);
  PagedSequences sequences(pool);
  for (int p = 0; p < 6; ++p) static_cast<void>(pool.take());
  sequences.adopt(1, Ints{5, 0, 3}, 11);
  EXPECT_EQ(pages_of(sequences, 1), (Ints{5, 0, 3}));
  EXPECT_EQ(pool.references(0), 2);
  const auto refused = [&](SequenceId id, const Ints& pages, std::int32_t slots) {
    return message_of<Error>([&] { sequences.adopt(id, pages, slots); });
  };
  EXPECT_EQ(refused(2, {5, 0, 5}, 12), "adopt: page 5 twice for sequence 2; allowed once");
  EXPECT_EQ(refused(2, {5, 6}, 8), "adopt: nobody holds page 6; allowed pages that a cache or a sequence holds");
  EXPECT_EQ(refused(1, {4}, 4), "adopt: sequence 1 is already held; allowed after release()");
  EXPECT_NE(refused(2, {5, 0}, 9).find("begins with 9 slots in 2 pages of 4"), std::string::npos);
  EXPECT_FALSE(sequences.knows(2));
  EXPECT_EQ(pool.references(5), 2) << "what throws changes nothing";
}

TEST(PagePool, CountsHoldersAndRefusesAPageThatNobodyHolds) {
  PagePool pool(2, 1);
  EXPECT_EQ(pool.references(0), 0);
  const std::int32_t page = pool.take();
  pool.retain(page);
  EXPECT_EQ(pool.references(page), 2);
  pool.give_back(page);
  EXPECT_EQ(pool.free_pages(), 1) << "one holder is left";
  pool.give_back(page);
  EXPECT_EQ(pool.free_pages(), 2);
  EXPECT_THROW(pool.give_back(page), StateError);
  EXPECT_THROW(pool.retain(page), StateError);
  EXPECT_EQ(pool.free_pages(), 2);
  EXPECT_THROW(static_cast<void>(pool.references(2)), InvalidArgument);
  EXPECT_THROW(pool.give_back(-1), InvalidArgument);
  EXPECT_THROW(PagePool(-1, 16), InvalidArgument);
  for (const std::int32_t size : {0, 1025, 2048, -16}) EXPECT_THROW(PagePool(1, size), InvalidArgument) << size;
  EXPECT_EQ(PagePool(0, 16).take(), -1);
}

TEST(PagedSequences, GrowPageByPageAndSayHowManyAreMissing) {
  PagePool pool(4, 4);
  PagedSequences sequences(pool);
  EXPECT_TRUE(sequences.admit(7, 5).given());
  EXPECT_EQ(pages_of(sequences, 7), (Ints{0, 1}));
  EXPECT_TRUE(sequences.append(7, 3).given());
  EXPECT_EQ(pages_of(sequences, 7), (Ints{0, 1})) << "the last page had room";
  EXPECT_TRUE(sequences.append(7, 1).given());
  EXPECT_EQ(pages_of(sequences, 7), (Ints{0, 1, 2}));
  EXPECT_EQ(sequences.length(7), 9);
  EXPECT_EQ(sequences.append(7, 12).missing, 2) << "21 slots are 6 pages";
  EXPECT_EQ(sequences.admit(8, 12).missing, 2);
  EXPECT_FALSE(sequences.knows(8));
  EXPECT_EQ(sequences.length(7), 9);
  EXPECT_EQ(pool.free_pages(), 1) << "nothing changes where pages are missing";
  sequences.truncate(7, 4);
  EXPECT_EQ(pages_of(sequences, 7), (Ints{0}));
  sequences.release(7);
  EXPECT_EQ(pool.free_pages(), 4);
  EXPECT_TRUE(sequences.admit(7, 0).given());
  EXPECT_TRUE(sequences.pages(7).empty());
}

TEST(PagedSequences, WriteATableThatIsHeld) {
  PagePool pool(16, 4);
  PagedSequences sequences(pool);
  for (const SequenceId id : {1, 2}) ASSERT_TRUE(sequences.admit(id, id == 1 ? 9 : 4).given());
  const std::vector<SequenceId> both{1, 2}, one{2};
  const auto rows_of = [](const Tensor& table) {
    std::vector<Ints> rows;
    for (std::int64_t i = 0; i < table.size(0); ++i) {
      const Tensor row = table.select(0, i);
      rows.emplace_back(row.data<std::int32_t>(), row.data<std::int32_t>() + row.numel());
    }
    return rows;
  };
  Tensor held;
  EXPECT_EQ(rows_of(sequences.table(both)), (std::vector<Ints>{{0, 1, 2}, {3, -1, -1}}));
  EXPECT_EQ(rows_of(sequences.table(both, held)), (std::vector<Ints>{{0, 1, 2, -1}, {3, -1, -1, -1}}));
  EXPECT_EQ(held.sizes(), Shape({3, 4})) << "with room for half as many more";
  const std::byte* const memory = held.bytes();
  EXPECT_EQ(rows_of(sequences.table(one, held)), (std::vector<Ints>{{3, -1, -1, -1}})) << "nothing older is left";
  EXPECT_EQ(held.bytes(), memory);
  ASSERT_TRUE(sequences.append(1, 8).given());
  EXPECT_EQ(rows_of(sequences.table(both, held)).front(), (Ints{0, 1, 2, 4, 5, -1, -1}));
  EXPECT_EQ(held.sizes(), Shape({3, 7})) << "rows were enough";
  Ints own(20, 9);
  held = Tensor(own.data(), Dtype::i32, {2, 10});
  EXPECT_EQ(sequences.table(both, held).bytes(), reinterpret_cast<std::byte*>(own.data())) << "memory of the caller's";
  EXPECT_EQ(own, (Ints{0, 1, 2, 4, 5, -1, -1, -1, -1, -1, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
  Tensor wide = zeros({2, 10}, Dtype::i64), apart = held.narrow(1, 0, 8);
  EXPECT_EQ(
      message_of<InvalidArgument>([&] { static_cast<void>(sequences.table(both, wide)); }),
      "table: the table that is held is i64 [2, 10] on cpu; allowed none, or contiguous i32 [rows, columns] in host "
      "memory");
  EXPECT_THROW(static_cast<void>(sequences.table(both, apart)), InvalidArgument);
  EXPECT_EQ(message_of<StateError>([&] { static_cast<void>(sequences.table(std::vector<SequenceId>{7}, held)); }),
            "table: paged sequence 7 is not held; allowed after admit(), adopt() or fork(), and before release()");
}

TEST(PagedSequences, WhoWritesASharedPageGetsItsOwnCopy) {
  PagePool pool(8, 4);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 6).given());
  sequences.fork(2, 1, 6);
  sequences.fork(3, 1, 4);
  EXPECT_EQ(pages_of(sequences, 2), (Ints{0, 1}));
  EXPECT_EQ(pages_of(sequences, 3), (Ints{0}));
  EXPECT_EQ(pool.references(0), 3);
  EXPECT_EQ(pool.references(1), 2);

  const PageGrant grant = sequences.append(2, 1);
  ASSERT_TRUE(grant.given());
  EXPECT_EQ(grant.copies, (std::vector<PageCopy>{{.from = 1, .to = 2, .slots = 2}}));
  EXPECT_EQ(pages_of(sequences, 2), (Ints{0, 2}));
  EXPECT_TRUE(sequences.append(1, 1).copies.empty()) << "its last page is its own again";
  EXPECT_TRUE(sequences.append(3, 1).copies.empty()) << "a full page is not written";
  EXPECT_EQ(pages_of(sequences, 3), (Ints{0, 3}));
  for (const SequenceId id : {1, 2, 3}) sequences.release(id);
  EXPECT_EQ(pool.free_pages(), 8);
}

TEST(PagedSequences, ASharedLastPageCountsAmongTheMissingOnes) {
  PagePool pool(2, 4);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 8).given());
  sequences.fork(2, 1, 6);
  EXPECT_EQ(sequences.append(2, 1).missing, 1);
  EXPECT_EQ(pages_of(sequences, 2), (Ints{0, 1}));
  EXPECT_EQ(pool.references(1), 2);
  sequences.release(1);
  EXPECT_TRUE(sequences.append(2, 1).copies.empty());
}

TEST(PagedSequences, RefuseWhatTheyDoNotKnow) {
  PagePool pool(2, 4);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 3).given());
  EXPECT_THROW(static_cast<void>(sequences.admit(1, 1)), StateError);
  EXPECT_THROW(static_cast<void>(sequences.append(2, 1)), StateError);
  EXPECT_THROW(sequences.release(2), StateError);
  EXPECT_THROW(sequences.fork(1, 1, 1), StateError);
  EXPECT_THROW(sequences.fork(2, 3, 1), StateError);
  EXPECT_THROW(sequences.fork(2, 1, 4), InvalidArgument);
  EXPECT_THROW(sequences.truncate(1, 4), InvalidArgument);
  EXPECT_THROW(sequences.truncate(1, -1), InvalidArgument);
  EXPECT_THROW(static_cast<void>(sequences.append(1, -1)), InvalidArgument);
  const SequenceId unknown[] = {1, 9};
  EXPECT_THROW(static_cast<void>(sequences.table(unknown)), StateError);
  EXPECT_FALSE(sequences.knows(2));
  EXPECT_EQ(pool.free_pages(), 1);
}

TEST(PagedSequences, TheTableHoldsPagesInOrderAndMinusOneBehindThem) {
  PagePool pool(5, 2);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 1).given() && sequences.admit(2, 5).given() && sequences.admit(3, 0).given());
  const SequenceId order[] = {2, 3, 1};
  const Array table = sequences.table(order);
  ASSERT_EQ(table.sizes(), (std::vector<std::int64_t>{3, 3}));
  const std::int32_t* p = table.data<std::int32_t>();
  EXPECT_EQ(Ints(p, p + 9), (Ints{1, 2, 3, -1, -1, -1, 0, -1, -1}));
  EXPECT_EQ(sequences.table({}).sizes(), (std::vector<std::int64_t>{0, 1}));
}

TEST(PagedSequences, TakeOverAnEventOnceAndOnlyTheOneThatHappened) {
  PagePool pool(6, 2);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 8).given());
  const SequenceId id = 1;
  PageMove move{.before = {0, 1, 2, 3}, .after = {0, 3}, .freed = {1, 2}, .longest = 4, .shortest = 4};
  pool.give_back(1);
  pool.give_back(2);
  move.longest = 5;
  EXPECT_THROW(sequences.settle({&id, 1}, {&move, 1}), StateError) << "5 slots are not 2 pages";
  move.longest = 4;
  sequences.settle({&id, 1}, {&move, 1});
  EXPECT_EQ(pages_of(sequences, 1), (Ints{0, 3}));
  EXPECT_EQ(sequences.length(1), 4);
  EXPECT_THROW(sequences.settle({&id, 1}, {&move, 1}), StateError) << "a second time";
  sequences.release(1);
  EXPECT_EQ(pool.free_pages(), 6);
}

TEST(PagedSequences, RowsOfUnequalLengthMayWriteAnySharedPageFromTheShortestOn) {
  PagePool pool(8, 2);
  PagedSequences sequences(pool);
  ASSERT_TRUE(sequences.admit(1, 6).given());
  const SequenceId id = 1;
  const PageMove move{.before = {0, 1, 2}, .after = {0, 1, 2}, .freed = {}, .longest = 6, .shortest = 3};
  sequences.settle({&id, 1}, {&move, 1});
  EXPECT_THROW(sequences.fork(2, 1, 4), InvalidArgument) << "one row holds 3 slots";
  sequences.fork(2, 1, 3);
  const PageGrant grant = sequences.append(1, 1);
  EXPECT_EQ(grant.copies, (std::vector<PageCopy>{{.from = 1, .to = 3, .slots = 2}}))
      << "the short row writes slot 3 of a page that is shared";
  EXPECT_EQ(pages_of(sequences, 1), (Ints{0, 3, 2, 4}));
  sequences.truncate(1, 5);
  EXPECT_THROW(sequences.truncate(1, 2), InvalidArgument) << "the short row has only 2 slots to lose";
}

TEST(CopyPages, CopiesTheSlotsInUseOfEverySideAndNothingElse) {
  oracle::Random random(21);
  for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
    const bool slot_first = layout == PageLayout::slot_head;
    const std::vector<std::int64_t> middle =
        slot_first ? std::vector<std::int64_t>{4, 3} : std::vector<std::int64_t>{3, 4};
    const Array both = whole_numbers(random, 100, {5, 2, middle[0], middle[1], 6}, Dtype::bf16);
    const Array scales = whole_numbers(random, 100, {5, middle[0], middle[1]}, Dtype::i64);
    const Array extra = whole_numbers(random, 100, {5, middle[0], middle[1], 2}, Dtype::u8);
    PagedKv kv{both.select(1, 0), both.select(1, 1), layout, scales, {}};
    kv.extra = extra;
    const Array before = both.clone(), scales_before = scales.clone(), extra_before = extra.clone();
    const LayerKv layers[] = {kv, std::monostate{}};
    const PageCopy copies[] = {{.from = 1, .to = 4, .slots = 3}, {.from = 4, .to = 0, .slots = 1}};
    copy_pages(layers, copies);
    const int slot_dim = slot_first ? 1 : 2;
    for (std::int64_t page = 0; page < 5; ++page)
      for (std::int64_t slot = 0; slot < 4; ++slot) {
        const std::int64_t from = (page == 4 && slot < 3) || (page == 0 && slot < 1) ? 1 : page;
        EXPECT_TRUE(both[page].select(slot_dim, slot).equal(before[from].select(slot_dim, slot)))
            << page << " " << slot;
        EXPECT_TRUE(extra[page].select(slot_dim - 1, slot).equal(extra_before[from].select(slot_dim - 1, slot)))
            << page << " " << slot;
        EXPECT_TRUE(scales[page].select(slot_dim - 1, slot).equal(scales_before[from].select(slot_dim - 1, slot)))
            << page << " " << slot;
      }
    const Array after = both.clone();
    for (const PageCopy& bad : {PageCopy{0, 5, 1}, PageCopy{-1, 0, 1}, PageCopy{0, 1, 5}, PageCopy{2, 2, 1}}) {
      const PageCopy two[] = {{.from = 1, .to = 2, .slots = 4}, bad};
      EXPECT_THROW(copy_pages(layers, two), InvalidArgument);
    }
    EXPECT_TRUE(both.equal(after));
    const LayerKv dense[] = {kv, DenseKv{}};
    EXPECT_THROW(copy_pages(dense, copies), InvalidArgument);
  }
}

// ---- Many random operations

/// An engine that decodes nothing: every slot of every row holds a number of its own, and a plain list beside says
/// which.
class Serving {
 public:
  static constexpr std::int32_t kLayers = 2, kHeads = 2, kRows = kLayers * kHeads;

  Serving(std::uint64_t seed, std::int32_t page_size, const std::string& policy)
      : random_(seed),
        size_(page_size),
        pages_(std::min(40, 160 / page_size)),
        pool_(pages_, page_size),
        sequences_(pool_),
        keeper_(spec(), make_policy(policy)) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto side = [&] { return Array::full({pages_, size_, kHeads, 1}, -1, Dtype::f32); };
      layers_.emplace_back(PagedKv{side(), side(), PageLayout::slot_head});
    }
    keeper_.bind(layers_);
  }

  void operate() {
    const double what = random_.unit();
    if (what < 0.62)
      step();
    else if (what < 0.76)
      admit();
    else if (what < 0.88)
      fork();
    else if (what < 0.92)
      truncate();
    else if (what < 0.96)
      leave(any());  // finished
    else
      abort();
  }

  /// No page is lost or held by more than its counter says, and every sequence reads back what it wrote.
  void check() const {
    std::vector<std::int32_t> holders(static_cast<std::size_t>(pages_), 0);
    for (const auto& [id, mine] : model_) {
      const auto pages = sequences_.pages(id);
      ASSERT_EQ(pages.size(), static_cast<std::size_t>((sequences_.length(id) + size_ - 1) / size_));
      ASSERT_EQ(std::set<std::int32_t>(pages.begin(), pages.end()).size(), pages.size())
          << "a page stands twice in sequence " << id;
      for (const std::int32_t page : pages) ++holders[static_cast<std::size_t>(page)];
      ASSERT_EQ(static_cast<std::size_t>(sequences_.length(id)), mine.rows[0].size());
      for (std::int32_t r = 0; r < kRows; ++r)
        for (std::size_t t = 0; t < mine.rows[static_cast<std::size_t>(r)].size(); ++t) {
          const float tag = mine.rows[static_cast<std::size_t>(r)][t];
          const std::int32_t page = pages[t / static_cast<std::size_t>(size_)],
                             slot = static_cast<std::int32_t>(t) % size_;
          ASSERT_EQ(*at(0, r, page, slot), tag) << "key of slot " << t << ", row " << r << ", sequence " << id;
          ASSERT_EQ(*at(1, r, page, slot), -tag) << "value of slot " << t << ", row " << r << ", sequence " << id;
        }
    }
    std::int32_t free = 0;
    for (std::int32_t page = 0; page < pages_; ++page) {
      ASSERT_EQ(pool_.references(page), holders[static_cast<std::size_t>(page)]) << "page " << page;
      free += holders[static_cast<std::size_t>(page)] == 0 ? 1 : 0;
    }
    ASSERT_EQ(pool_.free_pages(), free);
    ASSERT_EQ(sequences_.count(), model_.size());
  }

  std::map<std::string, std::int64_t> count;

 private:
  struct Mine {
    std::vector<std::vector<float>> rows = std::vector<std::vector<float>>(kRows);  ///< tag of each slot
    std::int32_t since_event = 0;  ///< tokens that may still be taken back
    bool observed = false;         ///< the keeper has seen a token of it
  };

  static ModelSpec spec() {
    return {.query_heads = 2,
            .kv_heads = kHeads,
            .key_dim = 1,
            .value_dim = 1,
            .softmax_scale = 0,
            .rope = {},
            .layers = std::vector<LayerSpec>(kLayers)};
  }

  [[nodiscard]] float* at(int side, std::int32_t row, std::int32_t page, std::int32_t slot) const {
    const auto& kv = std::get<PagedKv>(layers_[static_cast<std::size_t>(row / kHeads)]);
    return (side == 0 ? kv.keys : kv.values).data<float>() + (page * size_ + slot) * kHeads + row % kHeads;
  }

  SequenceId any() {
    if (model_.empty()) return -1;
    auto found = model_.begin();
    std::advance(found, random_.between(0, static_cast<int>(model_.size()) - 1));
    return found->first;
  }

  /// New tokens at the end of a sequence that has room for them.
  void write(SequenceId id, std::int32_t tokens) {
    Mine& mine = model_.at(id);
    for (std::int32_t r = 0; r < kRows; ++r)
      for (std::int32_t t = 0; t < tokens; ++t) {
        auto& row = mine.rows[static_cast<std::size_t>(r)];
        const auto slot = static_cast<std::int32_t>(row.size());
        const std::int32_t page = sequences_.pages(id)[static_cast<std::size_t>(slot / size_)];
        ASSERT_EQ(pool_.references(page), 1) << "a shared page is written";
        next_tag_ = next_tag_ % 15'000'000 + 1;
        *at(0, r, page, slot % size_) = static_cast<float>(next_tag_);
        *at(1, r, page, slot % size_) = -static_cast<float>(next_tag_);
        row.push_back(static_cast<float>(next_tag_));
      }
    mine.since_event += tokens;
  }

  void admit() {
    const SequenceId id = next_id_++;
    const std::int32_t slots = random_.between(0, 20);
    const PageGrant grant = sequences_.admit(id, slots);
    if (!grant.given()) {
      ++count["refused"];
      EXPECT_FALSE(sequences_.knows(id));
      return preempt();
    }
    ++count["admitted"];
    model_[id] = {};
    write(id, slots);
    keeper_.join(id, slots);
    model_[id].since_event = 0;
  }

  void fork() {
    const SequenceId parent = any(), id = next_id_++;
    if (parent < 0 || model_.size() > 12) return;
    const std::int32_t slots = random_.between(0, sequences_.length(parent));
    sequences_.fork(id, parent, slots);
    Mine child;
    for (std::size_t r = 0; r < kRows; ++r)
      child.rows[r].assign(model_.at(parent).rows[r].begin(), model_.at(parent).rows[r].begin() + slots);
    model_[id] = std::move(child);
    keeper_.join(id, slots);
    ++count["forks"];
  }

  void leave(SequenceId id) {
    if (id < 0) return;
    sequences_.release(id);
    keeper_.leave(id);
    model_.erase(id);
    ++count["left"];
  }

  void preempt() {
    if (model_.empty()) return;
    ++count["preempted"];
    leave(model_.rbegin()->first);
  }

  /// A request goes away between the room for its tokens and the step that would have written them.
  void abort() {
    const SequenceId id = any();
    if (id < 0) return;
    const PageGrant grant = sequences_.append(id, random_.between(0, 6));
    copy_pages(layers_, grant.copies);
    leave(id);
    ++count["aborted"];
  }

  void truncate() {
    const SequenceId id = any();
    if (id < 0) return;
    Mine& mine = model_.at(id);
    const std::int32_t taken = random_.between(0, std::min(mine.since_event, 4));
    keeper_.truncate(id, keeper_.logical_length(id) - taken);
    sequences_.truncate(id, sequences_.length(id) - taken);
    for (auto& row : mine.rows) row.resize(row.size() - static_cast<std::size_t>(taken));
    mine.since_event -= taken;
    ++count["truncated"];
  }

  /// A step over some of the sequences: room, copies, tokens, event.
  void step() {
    std::vector<SequenceId> ids;
    Ints indptr{0};
    std::vector<PageCopy> copies;
    for (const auto& [id, mine] : model_)
      if (random_.chance(0.6)) ids.push_back(id);
    std::vector<std::int32_t> tokens;
    for (std::size_t i = 0; i < ids.size(); ++i) tokens.push_back(random_.chance(0.2) ? random_.between(0, 7) : 1);
    for (std::size_t i = 0; i < ids.size();) {
      const PageGrant grant = sequences_.append(ids[i], tokens[i]);
      if (grant.given()) {
        copies.insert(copies.end(), grant.copies.begin(), grant.copies.end());
        ++i;
        continue;
      }
      // The newest goes; where it has its room already, or is the one that asks, the step goes on without it.
      const SequenceId newest = model_.rbegin()->first;
      const auto at = std::find(ids.begin(), ids.end(), newest);
      const auto index = static_cast<std::size_t>(at - ids.begin());
      preempt();
      if (at == ids.end()) continue;
      ids.erase(at);
      tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(index));
      if (index < i) --i;
    }
    if (ids.empty()) return;
    copy_pages(layers_, copies);
    count["copied"] += static_cast<std::int64_t>(copies.size());
    Ints lengths;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      write(ids[i], tokens[i]);
      indptr.push_back(indptr.back() + tokens[i]);
      lengths.push_back(sequences_.length(ids[i]));
    }
    for (std::int32_t l = 0; l < kLayers; ++l)
      keeper_.observe({.layer = l, .sequences = ids, .indptr = indptr, .queries = {}});
    CacheView view{.sequences = ids, .lengths = {lengths}, .block_table = sequences_.table(ids), .pages = &pool_};
    cut(view, lengths);
  }

  void cut(CacheView& view, const Ints& lengths) {
    const Plan plan = keeper_.plan(view);
    const Ints before = lengths;
    Ints holders;
    for (std::int32_t page = 0; page < pages_; ++page) holders.push_back(pool_.references(page));
    const std::vector<Array> bytes = everything();
    Report report;
    try {
      report = keeper_.apply(plan, view);
    } catch (const StateError&) {
      ++count["events without pages"];
      const std::vector<Array> now = everything();
      for (std::size_t side = 0; side < now.size(); ++side)
        ASSERT_TRUE(now[side].equal(bytes[side])) << "a refused event has moved something";
      ASSERT_EQ(before, lengths);
      return check();  // due again at the next step
    }
    sequences_.settle(view.sequences, report.pages);
    for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
      if (!plan.decision.keep) break;
      const Row& row = plan.table.rows[r];
      auto& tags = model_.at(view.sequences[static_cast<std::size_t>(row.sequence)])
                       .rows[static_cast<std::size_t>(row.layer * kHeads + row.head)];
      std::vector<float> kept;
      for (const std::int32_t slot : plan.decision.keep->row(r)) kept.push_back(tags[static_cast<std::size_t>(slot)]);
      tags = std::move(kept);
    }
    const std::vector<Array> now = everything();
    std::set<std::int32_t> taken;
    for (const PageMove& move : report.pages) {
      model_.at(view.sequences[static_cast<std::size_t>(move.sequence)]).since_event = 0;
      taken.insert(move.after.begin(), move.after.end());
      count["copied by events"] += move.taken;
    }
    for (std::int32_t page = 0; page < pages_; ++page) {
      const std::int32_t before_event = holders[static_cast<std::size_t>(page)];
      if (before_event == 1 || (before_event == 0 && taken.contains(page))) continue;
      for (std::size_t side = 0; side < now.size(); ++side)
        ASSERT_TRUE(now[side][page].equal(bytes[side][page])) << "an event wrote page " << page << ", shared or free";
    }
    count["events"] += static_cast<std::int64_t>(report.cuts.size());
    count["freed by events"] += report.pages_freed;
  }

  [[nodiscard]] std::vector<Array> everything() const {
    std::vector<Array> sides;
    for (const LayerKv& layer : layers_)
      for (const Array side : {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values})
        sides.push_back(side.clone());
    return sides;
  }

  oracle::Random random_;
  std::int32_t size_, pages_;  ///< so few pages that they run out
  PagePool pool_;
  PagedSequences sequences_;
  Keeper keeper_;
  std::vector<LayerKv> layers_;
  std::map<SequenceId, Mine> model_;
  SequenceId next_id_ = 1;
  std::int32_t next_tag_ = 0;
};

class PageModel : public ::testing::TestWithParam<std::tuple<std::int32_t, const char*>> {};

TEST_P(PageModel, EverySequenceReadsBackItsOwnSlotsAndNoPageIsLostOverManyRandomOperations) {  // B21, B23, B24, B27
  const auto [size, policy] = GetParam();
  const int operations = oracle::random_case_count(18'000);
  const auto seed = static_cast<std::uint64_t>(1000 + size);
  Serving serving(seed, size, policy);
  for (int n = 0; n < operations; ++n) {
    serving.operate();
    serving.check();
    if (HasFatalFailure()) FAIL() << "operation " << n << " of seed " << seed;
  }
  if (operations < 10'000) return;
  for (const char* what :
       {"admitted", "refused", "forks", "left", "preempted", "aborted", "truncated", "events", "freed by events"})
    EXPECT_GT(serving.count[what], 0) << what << " never happened";
  if (size == 1) return;  // a page of one slot is never partial, and an event links it as it is
  for (const char* what : {"copied", "copied by events", "events without pages"})
    EXPECT_GT(serving.count[what], 0) << what << " never happened";
}

INSTANTIATE_TEST_SUITE_P(Sizes, PageModel,
                         ::testing::Combine(::testing::Values(1, 4, 6, 8),
                                            ::testing::Values("streaming,budget=12,interval=6,sink=2",
                                                              "knorm,budget=12,interval=6,sink=2,recent=2")),
                         [](const auto& p) {
                           return std::string(std::get<1>(p.param)).substr(0, 5) + std::to_string(std::get<0>(p.param));
                         });

}  // namespace
}  // namespace kvkeep::paged_sequences_test
