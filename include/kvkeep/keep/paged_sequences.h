// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Which pages of a pool each living sequence holds, as a serving engine's block manager knows it.

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/pages.h"

namespace kvkeep {

/// A fixed number of pages and a count of holders for each. It owns no K or V: page p is entry p of every layer's
/// tensors (PagedKv). Pages are taken in the order 0, 1, 2, ...; a freed page is taken next, before all that were freed
/// earlier. So the same calls give the same pages. Not thread safe.
class PagePool final : public PageAllocator {
 public:
  /// `pages` free pages of `page_size` slots. Throws InvalidArgument for fewer than 0 pages, and for a size that is not
  /// 1 to 1024 (on a GPU a cache of pages needs a power of two).
  PagePool(std::int32_t pages, std::int32_t page_size);

  /// Number of holders of a page; 0: it is free. Throws InvalidArgument for a page outside the pool.
  [[nodiscard]] std::int32_t references(std::int32_t page) const override;

  /// Returns a free page, now held once; -1 if there is none. Cost: O(1).
  [[nodiscard]] std::int32_t take() override;

  /// Removes one holder. Throws StateError for a page without holders, InvalidArgument for one outside the pool. Cost:
  /// O(1).
  void give_back(std::int32_t page) override;

  /// Adds one holder: a prefix is shared. Throws as give_back does. Cost: O(1).
  void retain(std::int32_t page);

  [[nodiscard]] std::int32_t free_pages() const { return static_cast<std::int32_t>(free_.size()); }
  [[nodiscard]] std::int32_t capacity() const { return static_cast<std::int32_t>(holders_.size()); }
  /// Slots per page.
  [[nodiscard]] std::int32_t page_size() const { return page_size_; }

 private:
  [[nodiscard]] std::int32_t& holders_of(std::int32_t page, const char* operation);

  std::int32_t page_size_;
  std::vector<std::int32_t> holders_;  ///< [pages]
  std::vector<std::int32_t> free_;     ///< the next page to be taken is last
};

inline PagePool::PagePool(std::int32_t pages, std::int32_t page_size) : page_size_(page_size) {
  KVKEEP_REQUIRE(pages >= 0, "page pool: ", pages, " pages; allowed 0 or more");
  KVKEEP_REQUIRE(is_page_size(page_size), "page pool: pages of ", page_size, " slots; allowed 1 to ", kLargestPage);
  holders_.assign(static_cast<std::size_t>(pages), 0);
  free_.resize(holders_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);
}

inline std::int32_t PagePool::references(std::int32_t page) const {
  KVKEEP_REQUIRE(page >= 0 && page < capacity(), "page pool: no page ", page, "; allowed 0 to ", capacity() - 1);
  return holders_[static_cast<std::size_t>(page)];
}

inline std::int32_t& PagePool::holders_of(std::int32_t page, const char* operation) {
  KVKEEP_REQUIRE_AS(StateError, references(page) > 0, operation, ": nobody holds page ", page,
                    "; allowed between take() and the last give_back()");
  return holders_[static_cast<std::size_t>(page)];
}

inline std::int32_t PagePool::take() {
  if (free_.empty()) return -1;
  const std::int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<std::size_t>(page)] = 1;
  return page;
}

inline void PagePool::give_back(std::int32_t page) {
  std::int32_t& holders = holders_of(page, "give back");
  if (--holders == 0) free_.push_back(page);
}

inline void PagePool::retain(std::int32_t page) { ++holders_of(page, "retain"); }

/// Copies K, V and scales of the first `slots` slots of page `from` to page `to`, in every layer. Must happen before
/// anything new is written there.
struct PageCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t slots = 0;

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

/// Result of a request for room.
struct PageGrant {
  std::int32_t missing = 0;  ///< free pages that are missing; 0: the room is granted. Otherwise nothing has changed
  std::vector<PageCopy> copies =
      {};  ///< do these (copy_pages) in the order in which they were granted, before anything is written to any page

  [[nodiscard]] bool given() const { return missing == 0; }
};

/// The pages of living sequences, from a pool that must outlive this object. Several sequences may hold a page (a
/// shared prefix); a sequence that is about to write it first gets its own copy. The engine chooses ids. Not thread
/// safe. Every call costs O(pages involved), plus O(log sequences) to find them.
///
///     PageGrant grant = sequences.append(id, 1);            // before the step: room for its tokens
///     if (!grant.given()) preempt(...);                     // nothing changed
///     copy_pages(layers, grant.copies);
///     view.block_table = sequences.table(ids, held);        // attention reads it, the event writes it
///     Report report = keeper.step(view);
///     sequences.settle(ids, report.pages);
///
/// Unknown ids and ids already in use are StateErrors. Every error is thrown before anything changes.
class PagedSequences {
 public:
  explicit PagedSequences(PagePool& pool) : pool_(pool) {}
  PagedSequences(const PagedSequences&) = delete;
  PagedSequences& operator=(const PagedSequences&) = delete;
  /// Gives back every page.
  ~PagedSequences();

  /// A sequence begins with room for `slots` slots, none of them shared, in its longest row, and for `shortest` in its
  /// shortest; absent: for as many. If there are not enough free pages, it is not added.
  [[nodiscard]] PageGrant admit(SequenceId sequence, std::int32_t slots, std::optional<std::int32_t> shortest = {});

  /// A sequence begins with `slots` slots in these pages, which others hold (a prefix cache), and holds them too. Takes
  /// no page. Throws InvalidArgument for other than ceil(slots / page_size) pages, StateError for one that nobody
  /// holds.
  void adopt(SequenceId sequence, std::span<const std::int32_t> pages, std::int32_t slots);

  /// A sequence begins with the first `slots` slots of `parent`, and holds their pages too, including a last partial
  /// one. Takes no page. These are the slots that the parent holds now: after an event, they are no longer its first
  /// tokens. Throws InvalidArgument for more slots than the parent's shortest row holds.
  void fork(SequenceId sequence, SequenceId parent, std::int32_t slots);
  /// The same with every slot of `parent`, whatever events have left of it and however long its rows are: for
  /// Keeper::fork() of a whole sequence.
  void fork(SequenceId sequence, SequenceId parent);

  /// Adds room for `slots` more in every row. Replaces each page that will be written and that others hold too by a new
  /// one, to be filled as `copies` says: the last page if it is partial; if rows differ in length, every page from the
  /// end of the shortest row on. If `missing` is not 0, nothing has changed: release a sequence (preemption) and ask
  /// again.
  [[nodiscard]] PageGrant append(SequenceId sequence, std::int32_t slots);

  /// Pages that append(sequence, slots) takes now; LengthForecast::need() counts those of a later step, and of its
  /// event. Compare with PagePool::free_pages(). Throws as append() does.
  [[nodiscard]] std::int32_t need(SequenceId sequence, std::int32_t slots) const;

  /// Cuts the longest row to `slots` slots; the others lose as many as it does. Gives back the pages after the cut.
  /// Throws InvalidArgument for more slots than the longest row has, or if the shortest row has too few to lose.
  void truncate(SequenceId sequence, std::int32_t slots);

  /// A sequence ends, or is preempted: its pages lose a holder.
  void release(SequenceId sequence);

  /// After Keeper::step: adopts lengths and pages of `moves` (Report::pages) of the step's sequences. References do not
  /// change: the event has already given back and taken pages. Throws StateError if a sequence does not hold the pages
  /// that the event found: settled twice, or changed since.
  void settle(std::span<const SequenceId> sequences, std::span<const PageMove> moves);

  /// i32 [n, max_pages] in host memory for CacheView::block_table: the pages of each sequence in order, then -1; at
  /// least one column. Written to the front of `held`, which may be wider. One that is absent, or has too few rows or
  /// columns, becomes a new tensor with room for half as many more: steps that use the same one soon allocate nothing.
  /// Throws InvalidArgument for one that is not contiguous i32 [rows, columns] in host memory.
  [[nodiscard]] Tensor table(std::span<const SequenceId> sequences, Tensor& held) const;
  /// The same in a new tensor, as narrow as can be.
  [[nodiscard]] Tensor table(std::span<const SequenceId> sequences) const;

  [[nodiscard]] bool knows(SequenceId sequence) const { return held_.contains(sequence); }
  [[nodiscard]] std::size_t count() const { return held_.size(); }
  /// Slots of the longest row.
  [[nodiscard]] std::int32_t length(SequenceId sequence) const { return at("length", sequence).longest; }
  /// Valid until the next call that changes this sequence.
  [[nodiscard]] std::span<const std::int32_t> pages(SequenceId sequence) const { return at("pages", sequence).pages; }
  [[nodiscard]] const PagePool& pool() const { return pool_; }

 private:
  struct Held {
    std::vector<std::int32_t> pages;  ///< [ceil(longest / page_size)]
    std::int32_t longest = 0;         ///< slots
    std::int32_t shortest = 0;
  };
  [[nodiscard]] const Held& at(const char* operation, SequenceId sequence) const;
  /// Pages of the longest of them; at least 1.
  [[nodiscard]] std::int64_t widest(std::span<const SequenceId> sequences) const;
  void write_table(std::span<const SequenceId> sequences, const Tensor& table) const;
  /// Begins with these pages, each held once more.
  void share(const char* operation, SequenceId sequence, Held held);
  /// Places of the pages that appending writes and that others hold too.
  [[nodiscard]] std::vector<std::size_t> shared_pages(SequenceId sequence, const Held& held, std::int32_t slots) const;
  [[nodiscard]] std::size_t pages_for(std::int64_t slots) const;

  PagePool& pool_;
  std::map<SequenceId, Held> held_;
};

/// Performs `copies`, in order, in every layer: K, V, scales and extras of all heads. Skips layers without rows. On a
/// GPU the copies are queued on the current stream. Throws InvalidArgument, before the first byte moves, for a dense
/// layer, a page outside a layer's tensors, or slots that a page does not have. Cost: slots * slot bytes, read and
/// written.
void copy_pages(std::span<const LayerKv> layers, std::span<const PageCopy> copies);

namespace paged_sequences_detail {

inline int slot_dimension(const PagedKv& kv) { return kv.layout == PageLayout::slot_head ? 1 : 2; }

/// The first `slots` slots of a page, all heads.
inline Tensor front(const Tensor& side, int slot_dim, const PageCopy& copy, std::int32_t page) {
  return side.select(0, page).narrow(slot_dim - 1, 0, copy.slots);
}

inline void check(std::span<const LayerKv> layers, std::span<const PageCopy> copies) {
  for (std::size_t l = 0; l < layers.size(); ++l) {
    KVKEEP_REQUIRE(!std::holds_alternative<DenseKv>(layers[l]), "copy pages: layer ", l,
                   " is dense; allowed paged layers");
    const auto* kv = std::get_if<PagedKv>(&layers[l]);
    if (kv == nullptr) continue;
    const std::int64_t pages = kv->keys.size(0), size = kv->keys.size(slot_dimension(*kv));
    for (const PageCopy& copy : copies)
      KVKEEP_REQUIRE(copy.from >= 0 && copy.from < pages && copy.to >= 0 && copy.to < pages && copy.from != copy.to &&
                         copy.slots >= 0 && copy.slots <= size,
                     "copy pages: ", copy.slots, " slots of page ", copy.from, " to page ", copy.to, "; layer ", l,
                     " allows 0 to ", size, " slots of two pages from 0 to ", pages - 1);
  }
}

}  // namespace paged_sequences_detail

inline PagedSequences::~PagedSequences() {
  for (const auto& [id, held] : held_)
    for (const std::int32_t page : held.pages) try {
        pool_.give_back(page);
      } catch (const StateError&) {  // already given back: nothing to release, and a destructor cannot report it
      }
}

inline const PagedSequences::Held& PagedSequences::at(const char* operation, SequenceId sequence) const {
  const auto found = held_.find(sequence);
  KVKEEP_REQUIRE_AS(StateError, found != held_.end(), operation, ": paged sequence ", sequence,
                    " is not held; allowed after admit(), adopt() or fork(), and before release()");
  return found->second;
}

inline std::size_t PagedSequences::pages_for(std::int64_t slots) const {
  return static_cast<std::size_t>((slots + pool_.page_size() - 1) / pool_.page_size());
}

inline PageGrant PagedSequences::admit(SequenceId sequence, std::int32_t slots, std::optional<std::int32_t> shortest) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "admit: sequence ", sequence,
                    " is already held; allowed after release()");
  const std::int32_t least = shortest.value_or(slots);
  KVKEEP_REQUIRE(slots >= 0 && least >= 0 && least <= slots, "admit: sequence ", sequence, " asks for ", slots,
                 " slots, ", least, " in its shortest row; allowed 0 or more, and no more in its shortest row");
  const auto wanted = static_cast<std::int32_t>(pages_for(slots));
  if (wanted > pool_.free_pages()) return {.missing = wanted - pool_.free_pages()};
  Held held{{}, slots, least};
  for (std::int32_t p = 0; p < wanted; ++p) held.pages.push_back(pool_.take());
  held_.emplace(sequence, std::move(held));
  return {};
}

inline void PagedSequences::adopt(SequenceId sequence, std::span<const std::int32_t> pages, std::int32_t slots) {
  KVKEEP_REQUIRE(slots >= 0 && pages_for(slots) == pages.size(), "adopt: sequence ", sequence, " begins with ", slots,
                 " slots in ", pages.size(), " pages of ", pool_.page_size(), "; allowed as many pages as slots need");
  for (const std::int32_t page : pages)
    KVKEEP_REQUIRE_AS(StateError, pool_.references(page) > 0, "adopt: nobody holds page ", page,
                      "; allowed pages that a cache or a sequence holds");
  std::vector<std::int32_t> sorted(pages.begin(), pages.end());
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  KVKEEP_REQUIRE(twice == sorted.end(), "adopt: page ", *twice, " twice for sequence ", sequence, "; allowed once");
  share("adopt", sequence, {{pages.begin(), pages.end()}, slots, slots});
}

inline void PagedSequences::fork(SequenceId sequence, SequenceId parent, std::int32_t slots) {
  const Held& from = at("fork", parent);
  KVKEEP_REQUIRE(slots >= 0 && slots <= from.shortest, "fork: sequence ", sequence, " wants ", slots,
                 " slots of sequence ", parent, "; allowed 0 to ", from.shortest);
  share("fork", sequence,
        {{from.pages.begin(), from.pages.begin() + static_cast<std::ptrdiff_t>(pages_for(slots))}, slots, slots});
}

inline void PagedSequences::fork(SequenceId sequence, SequenceId parent) {
  share("fork", sequence, at("fork", parent));
}

inline void PagedSequences::share(const char* operation, SequenceId sequence, Held held) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), operation, ": sequence ", sequence,
                    " is already held; allowed after release()");
  for (const std::int32_t page : held.pages) pool_.retain(page);
  held_.emplace(sequence, std::move(held));
}

inline std::vector<std::size_t> PagedSequences::shared_pages(SequenceId sequence, const Held& held,
                                                             std::int32_t slots) const {
  const std::int64_t room = std::int64_t{std::numeric_limits<std::int32_t>::max()} - held.longest;
  KVKEEP_REQUIRE(slots >= 0 && slots <= room, "append: ", slots, " slots for sequence ", sequence, "; allowed 0 to ",
                 room);
  std::vector<std::size_t> shared;
  if (slots == 0) return shared;
  for (auto p = static_cast<std::size_t>(held.shortest / pool_.page_size()); p < held.pages.size(); ++p)
    if (pool_.references(held.pages[p]) > 1) shared.push_back(p);
  return shared;
}

inline std::int32_t PagedSequences::need(SequenceId sequence, std::int32_t slots) const {
  const Held& held = at("need", sequence);
  const std::size_t copies = shared_pages(sequence, held, slots).size();
  return static_cast<std::int32_t>(pages_for(std::int64_t{held.longest} + slots) - held.pages.size() + copies);
}

inline PageGrant PagedSequences::append(SequenceId sequence, std::int32_t slots) {
  auto& held = const_cast<Held&>(at("append", sequence));
  const std::vector<std::size_t> shared = shared_pages(sequence, held, slots);
  if (slots == 0) return {};
  const std::int32_t size = pool_.page_size();
  const std::size_t pages = pages_for(std::int64_t{held.longest} + slots),
                    wanted = pages - held.pages.size() + shared.size();
  if (wanted > static_cast<std::size_t>(pool_.free_pages()))
    return {.missing = static_cast<std::int32_t>(wanted) - pool_.free_pages()};
  PageGrant grant;
  for (const std::size_t p : shared) {
    const std::int32_t from = held.pages[p], used = std::min(size, held.longest - static_cast<std::int32_t>(p) * size);
    grant.copies.push_back({.from = from, .to = pool_.take(), .slots = used});
    held.pages[p] = grant.copies.back().to;
    pool_.give_back(from);
  }
  while (held.pages.size() < pages) held.pages.push_back(pool_.take());
  held.longest += slots;
  held.shortest += slots;
  return grant;
}

inline void PagedSequences::truncate(SequenceId sequence, std::int32_t slots) {
  auto& held = const_cast<Held&>(at("truncate", sequence));
  const std::int32_t least = held.longest - held.shortest;
  KVKEEP_REQUIRE(slots >= least && slots <= held.longest, "truncate: sequence ", sequence, " holds ", held.longest,
                 " slots; given ", slots, "; allowed ", least, " to ", held.longest);
  held.shortest -= held.longest - slots;
  held.longest = slots;
  for (; held.pages.size() > pages_for(slots); held.pages.pop_back()) pool_.give_back(held.pages.back());
}

inline void PagedSequences::release(SequenceId sequence) {
  for (const std::int32_t page : at("release", sequence).pages) pool_.give_back(page);
  held_.erase(sequence);
}

inline void PagedSequences::settle(std::span<const SequenceId> sequences, std::span<const PageMove> moves) {
  for (const PageMove& move : moves) {
    const SequenceId id = sequences[static_cast<std::size_t>(move.sequence)];
    const std::vector<std::int32_t>& held = at("settle", id).pages;
    KVKEEP_REQUIRE_AS(StateError, held == move.before, "settle: sequence ", id, " holds ", held.size(),
                      " pages, not those that the event found (", move.before.size(),
                      "); allowed once, right after the step");
    KVKEEP_REQUIRE_AS(StateError, pages_for(move.longest) == move.after.size(), "settle: sequence ", id, " is ",
                      move.longest, " slots long, and the event left it ", move.after.size(), " pages of ",
                      pool_.page_size(), "; allowed pages of that size");
  }
  for (const PageMove& move : moves)
    held_.at(sequences[static_cast<std::size_t>(move.sequence)]) = {move.after, move.longest, move.shortest};
}

inline std::int64_t PagedSequences::widest(std::span<const SequenceId> sequences) const {
  std::size_t pages = 1;
  for (const SequenceId id : sequences) pages = std::max(pages, at("table", id).pages.size());
  return static_cast<std::int64_t>(pages);
}

inline void PagedSequences::write_table(std::span<const SequenceId> sequences, const Tensor& table) const {
  auto* row = table.data<std::int32_t>();
  for (const SequenceId id : sequences) {
    std::int32_t* const end = row + table.size(1);
    std::fill(std::ranges::copy(at("table", id).pages, row).out, end, -1);
    row = end;
  }
}

inline Tensor PagedSequences::table(std::span<const SequenceId> sequences, Tensor& held) const {
  KVKEEP_REQUIRE(!held.defined() || (held.dtype() == Dtype::i32 && held.dim() == 2 && held.is_contiguous() &&
                                     held.device().is_cpu() && held.has_memory()),
                 "table: the table that is held is ", held.dtype(), " ", held.sizes(), " on ", held.device().str(),
                 "; allowed none, or contiguous i32 [rows, columns] in host memory");
  const std::int64_t rows = std::ssize(sequences), columns = widest(sequences);
  if (!held.defined() || held.size(0) < rows || held.size(1) < columns) {
    const auto grown = [](std::int64_t had, std::int64_t wanted) { return had < wanted ? wanted + wanted / 2 : had; };
    held = empty({grown(held.defined() ? held.size(0) : 0, rows), grown(held.defined() ? held.size(1) : 0, columns)},
                 Dtype::i32);
  }
  Tensor table = held.narrow(0, 0, rows);
  write_table(sequences, table);
  return table;
}

inline Tensor PagedSequences::table(std::span<const SequenceId> sequences) const {
  Tensor table = empty({std::ssize(sequences), widest(sequences)}, Dtype::i32);
  write_table(sequences, table);
  return table;
}

inline void copy_pages(std::span<const LayerKv> layers, std::span<const PageCopy> copies) {
  paged_sequences_detail::check(layers, copies);
  for (const LayerKv& layer : layers) {
    const auto* kv = std::get_if<PagedKv>(&layer);
    if (kv == nullptr) continue;
    const int slot_dim = paged_sequences_detail::slot_dimension(*kv);
    for (const Tensor& side : {kv->keys, kv->values, kv->key_scales, kv->value_scales, kv->extra}) {
      if (!side.defined()) continue;
      for (const PageCopy& page : copies)
        copy(paged_sequences_detail::front(side, slot_dim, page, page.from),
             paged_sequences_detail::front(side, slot_dim, page, page.to));
    }
  }
}

}  // namespace kvkeep
