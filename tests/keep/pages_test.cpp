// SPDX-License-Identifier: Apache-2.0
// Paged caches: the same event as in a dense cache, on whatever pages a sequence holds; nobody else's pages are
// touched; pages are really given back.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "arrays.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/keep/compact.h"
#include "oracle/random_case.h"

namespace kvkeep::pages_test {
namespace {

using testing::Array;
using testing::whole_numbers;

/// A plain allocator that also knows what nobody may do.
class CountedPages final : public PageAllocator {
 public:
  explicit CountedPages(std::vector<std::int32_t> holders) : holders_(std::move(holders)) {}
  [[nodiscard]] std::int32_t references(std::int32_t page) const override {
    return holders_.at(static_cast<std::size_t>(page));
  }
  [[nodiscard]] std::int32_t take() override {
    const auto free = std::find(holders_.begin(), holders_.end(), 0);
    if (free == holders_.end()) return -1;
    *free = 1;
    return static_cast<std::int32_t>(free - holders_.begin());
  }
  void give_back(std::int32_t page) override {
    ASSERT_GT(holders_.at(static_cast<std::size_t>(page)), 0) << "page " << page << " was given back twice";
    --holders_[static_cast<std::size_t>(page)];
  }

 private:
  std::vector<std::int32_t> holders_;
};

/// Sequences on random pages of a pool, two layers, with what each slot holds in a plain copy beside.
struct Case {
  static constexpr std::int32_t kHeads = 2, kLayers = 2;

  Case(oracle::Random& random, std::int32_t page_size, PageLayout layout, Dtype dtype, std::int32_t sequences,
       bool scales)
      : size(page_size),
        spec{.query_heads = 2,
             .kv_heads = kHeads,
             .key_dim = 5,
             .value_dim = 3,
             .softmax_scale = 0,
             .rope = {},
             .layers = std::vector<LayerSpec>(kLayers)} {
    const std::int64_t most = std::min<std::int64_t>(5 * page_size, 4 * 64);
    std::vector<std::vector<std::int32_t>> tables;
    std::int32_t used = 0, widest = 1;
    for (std::int32_t s = 0; s < sequences; ++s) {
      lengths.push_back(random.between(0, static_cast<std::int32_t>(most)));
      tables.emplace_back(static_cast<std::size_t>((lengths.back() + size - 1) / size));
      used += static_cast<std::int32_t>(tables.back().size());
      widest = std::max(widest, static_cast<std::int32_t>(tables.back().size()));
      ids.push_back(100 + s);
    }
    pool = used + 3;
    std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(i) - 1))]);
    block_table = Array::full({sequences, widest + 1}, 77777, Dtype::i32);
    holders.assign(static_cast<std::size_t>(pool), 0);
    std::size_t next = 0;
    for (std::int32_t s = 0; s < sequences; ++s)
      for (std::size_t p = 0; p < tables[static_cast<std::size_t>(s)].size(); ++p) {
        // Now and then the first pages of the sequence before: a shared prefix.
        std::int32_t page = order[next];
        const bool share = s > 0 && p < tables[static_cast<std::size_t>(s) - 1].size() && sharing_;
        if (share)
          page = block_table[s - 1][static_cast<std::int64_t>(p)].item<std::int32_t>();
        else
          ++next;
        ++holders[static_cast<std::size_t>(page)];
        block_table[s][static_cast<std::int64_t>(p)].fill_(page);
        sharing_ = p + 1 < 2 ? random.chance(0.5) : false;
      }
    const std::vector<std::int64_t> middle = layout == PageLayout::slot_head ? std::vector<std::int64_t>{size, kHeads}
                                                                             : std::vector<std::int64_t>{kHeads, size};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto side = [&](std::int64_t dim) {
        return whole_numbers(random, 120, {pool, middle[0], middle[1], dim + 2}, dtype).narrow(3, 1, dim);
      };
      PagedKv kv{side(5), side(3), layout};
      if (scales) {
        kv.key_scales = whole_numbers(random, 1000, {pool, middle[0], middle[1]});
        kv.value_scales = whole_numbers(random, 1000, {pool, middle[0], middle[1]});
        kv.extra = side(4);
      }
      layers.emplace_back(kv);
    }
  }

  [[nodiscard]] CacheView view() { return {.sequences = ids, .lengths = {lengths}, .block_table = block_table}; }

  /// Tensors of a layer by name.
  [[nodiscard]] std::vector<Array> sides(std::int32_t layer) const {
    const auto& kv = std::get<PagedKv>(layers[static_cast<std::size_t>(layer)]);
    std::vector<Array> found{kv.keys, kv.values};
    for (const Array t : {kv.key_scales, kv.value_scales})
      if (t.defined()) found.push_back(t.unsqueeze(3));
    if (kv.extra.defined()) found.emplace_back(kv.extra);
    return found;
  }

  /// One slot of one side, by its array alone.
  [[nodiscard]] Array slot(const Array& side, PageLayout layout, std::int64_t page, std::int64_t offset,
                           std::int64_t head) const {
    return layout == PageLayout::slot_head ? side[page][offset][head] : side[page][head][offset];
  }

  std::int32_t size, pool = 0;
  ModelSpec spec;
  std::vector<SequenceId> ids;
  std::vector<std::int32_t> lengths, holders;
  std::vector<LayerKv> layers;
  Array block_table;

 private:
  bool sharing_ = true;
};

const std::int32_t kAllLayers[] = {0, 1};

std::vector<std::int32_t> everyone(const Case& c) {
  std::vector<std::int32_t> due(c.ids.size());
  std::iota(due.begin(), due.end(), 0);
  return due;
}

/// How the slots that stay are drawn.
enum class Draw { each_row_its_own, alike_in_all_rows, whole_pages };

KeepSet random_keep(oracle::Random& random, const Case& c, const RowTable& table, Draw draw) {
  KeepSet keep{{}, {0}};
  std::vector<std::int32_t> all;
  std::map<std::int32_t, std::vector<std::int32_t>> chosen;
  for (const Row& row : table.rows) {
    std::vector<std::int32_t>& slots = chosen[row.sequence];
    if (slots.empty() || draw == Draw::each_row_its_own) {
      const std::size_t wanted = slots.size();
      const bool first = row.layer == 0 && row.head == 0;
      slots.clear();
      if (draw == Draw::whole_pages) {
        for (std::int32_t p = 0; p * c.size < row.length; ++p)
          if (random.chance(0.6))
            for (std::int32_t t = p * c.size; t < std::min(row.length, (p + 1) * c.size); ++t) slots.push_back(t);
      } else {
        // As many in every row, as with one budget for all.
        const std::size_t count = first ? static_cast<std::size_t>(random.between(0, row.length)) : wanted;
        std::vector<std::int32_t> order(static_cast<std::size_t>(row.length));
        std::iota(order.begin(), order.end(), 0);
        const std::int32_t still =
            random.between(0, static_cast<std::int32_t>(count));  // a prefix that stays where it is
        for (std::size_t i = static_cast<std::size_t>(still); i < order.size(); ++i)
          std::swap(order[i], order[static_cast<std::size_t>(random.between(
                                  static_cast<std::int32_t>(i), static_cast<std::int32_t>(order.size()) - 1))]);
        slots.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
        std::sort(slots.begin(), slots.end());
      }
    }
    all.insert(all.end(), slots.begin(), slots.end());
    keep.indptr.push_back(static_cast<std::int64_t>(all.size()));
  }
  keep.slots = empty({static_cast<std::int64_t>(all.size())}, Dtype::i32);
  std::copy(all.begin(), all.end(), keep.slots.data<std::int32_t>());
  return keep;
}

class Pages : public ::testing::TestWithParam<std::tuple<std::int32_t, PageLayout>> {};

TEST_P(Pages, HoldAfterwardsExactlyWhatStaysAndNobodyElsesPageChanges) {  // B21, B23, B24, B25, B27
  const auto [size, layout] = GetParam();
  oracle::Random random(static_cast<std::uint64_t>(size * 2 + (layout == PageLayout::slot_head ? 1 : 0)));
  std::int64_t copies = 0, linked = 0, freed = 0, written = 0, untouched = 0;
  for (int round = 0; round < 60; ++round) {
    const Dtype dtype = round % 3 == 0 ? Dtype::f32 : round % 3 == 1 ? Dtype::bf16 : Dtype::u8;
    Case c(random, size, layout, dtype, random.between(1, 4), round % 2 == 0);
    CountedPages pages(c.holders);
    CacheView view = c.view();
    const RowTable table = make_rows(c.spec, c.layers, view, kAllLayers, everyone(c));
    const KeepSet keep = random_keep(random, c, table, static_cast<Draw>(round / 3 % 3));
    std::vector<PageMove> moves = plan_pages(table, keep, c.ids, &pages, SharedPages::copy);
    std::int32_t wanted = 0, free = 0;
    for (const PageMove& move : moves) wanted += move.taken;
    for (const std::int32_t n : c.holders) free += n == 0 ? 1 : 0;
    if (wanted > free) {
      EXPECT_THROW(take_pages(moves, &pages, c.holders), StateError);
      for (std::int32_t p = 0; p < c.pool; ++p)
        ASSERT_EQ(pages.references(p), c.holders[static_cast<std::size_t>(p)]) << "nothing is taken then";
      continue;
    }
    take_pages(moves, &pages, c.holders);
    std::vector<std::vector<Array>> before;
    for (std::int32_t l = 0; l < Case::kLayers; ++l) {
      before.emplace_back();
      for (const Array& side : c.sides(l)) before.back().push_back(side.clone());
    }
    compact(table, keep, moves);

    std::set<std::int32_t> writable;
    for (const PageMove& move : moves) {
      copies += move.taken;
      untouched += std::ssize(move.after) - std::ssize(move.written);
      freed += static_cast<std::int64_t>(move.freed.size());
      ASSERT_EQ(std::set<std::int32_t>(move.after.begin(), move.after.end()).size(), move.after.size())
          << "a page stands twice in a table";
      std::multiset<std::int32_t> balance(move.after.begin(), move.after.end());
      balance.insert(move.freed.begin(), move.freed.end());
      std::multiset<std::int32_t> held(move.before.begin(), move.before.end());
      for (const std::int32_t page : move.after)
        if (std::find(move.before.begin(), move.before.end(), page) == move.before.end()) held.insert(page);
      ASSERT_EQ(balance, held) << "pages held before and taken are held after or freed";
      writable.insert(move.written.begin(), move.written.end());
      for (const std::int32_t page : move.written) {
        EXPECT_LE(c.holders[static_cast<std::size_t>(page)], 1) << "page " << page << " has other holders";
        EXPECT_NE(std::find(move.after.begin(), move.after.end(), page), move.after.end());
        written += 1;
      }
      for (std::size_t p = 0; p < move.after.size(); ++p)
        linked += move.after[p] != move.before[p] && c.holders[static_cast<std::size_t>(move.after[p])] > 0 ? 1 : 0;
    }
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const auto move =
          std::find_if(moves.begin(), moves.end(), [&](const PageMove& m) { return m.sequence == row.sequence; });
      const auto kept = keep.row(r);
      const std::vector<Array> sides = c.sides(row.layer);
      for (std::size_t j = 0; j < kept.size(); ++j)
        for (std::size_t side = 0; side < sides.size(); ++side) {
          const auto page = move->after[j / static_cast<std::size_t>(size)],
                     from = move->before[static_cast<std::size_t>(kept[j] / size)];
          ASSERT_TRUE(c.slot(sides[side], layout, page, static_cast<std::int64_t>(j) % size, row.head)
                          .equal(c.slot(before[static_cast<std::size_t>(row.layer)][side], layout, from, kept[j] % size,
                                        row.head)))
              << "slot " << j << " of row " << r << ", side " << side;
        }
    }
    for (std::int32_t l = 0; l < Case::kLayers; ++l) {
      const std::vector<Array> sides = c.sides(l);
      for (std::size_t side = 0; side < sides.size(); ++side)
        for (std::int32_t p = 0; p < c.pool; ++p)
          if (!writable.contains(p))
            ASSERT_TRUE(sides[side][p].equal(before[static_cast<std::size_t>(l)][side][p]))
                << "page " << p << " is another's, shared, free, or not said to be written";
    }
  }
  EXPECT_GT(freed, 0);
  EXPECT_GT(copies, 0) << "no case wrote a shared page";
  EXPECT_GT(written, 0);
  EXPECT_GT(untouched, 0);
  EXPECT_GT(linked, 0) << "no case kept a whole page in another place";
}

TEST(PageMoves, EndWithThePageOfTheLastSlotThatStays) {
  const PageMove planned{
      .sequence = 0, .before = {7, 3, 9, 4}, .after = {7, 11, 12}, .written = {11, 12}, .freed = {3, 9, 4}, .taken = 2};
  const auto shortened = [&](std::int64_t longest) {
    PageMove move = planned;
    RowTable table;
    table.page_size = 16;
    table.rows.resize(2);  // of the sequence; the second keeps one slot less
    shorten({&move, 1}, table, {.slots = {}, .indptr = {0, longest, 2 * longest - std::min<std::int64_t>(longest, 1)}});
    EXPECT_EQ(move.longest, longest);
    EXPECT_EQ(move.shortest, std::max<std::int64_t>(longest - 1, 0));
    return move;
  };
  for (const std::int64_t longest : {33, 48}) EXPECT_EQ(shortened(longest).after, planned.after) << longest;
  const PageMove two = shortened(32), one = shortened(1), none = shortened(0);
  EXPECT_EQ(two.after, (std::vector<std::int32_t>{7, 11}));
  EXPECT_EQ(two.freed, (std::vector<std::int32_t>{3, 9, 4, 12}));
  EXPECT_EQ(two.written, (std::vector<std::int32_t>{11}));
  EXPECT_EQ(two.taken, 1) << "12 was taken, and goes again";
  EXPECT_EQ(one.after, (std::vector<std::int32_t>{7}));
  EXPECT_EQ(one.taken, 0);
  EXPECT_TRUE(none.after.empty());
  EXPECT_EQ(none.freed, (std::vector<std::int32_t>{3, 9, 4, 12, 11, 7}));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Pages,
                         ::testing::Combine(::testing::Values(1, 2, 5, 16, 24, 32, 64),
                                            ::testing::Values(PageLayout::slot_head, PageLayout::head_slot)),
                         [](const auto& p) {
                           return std::to_string(std::get<0>(p.param)) +
                                  (std::get<1>(p.param) == PageLayout::slot_head ? "_slot_head" : "_head_slot");
                         });

}  // namespace
}  // namespace kvkeep::pages_test
