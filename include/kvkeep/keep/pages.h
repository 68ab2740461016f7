// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What an event does to the pages of a sequence: which pages stay and in what order, which are rewritten, which are
/// copied because others hold them too, and which are given back.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// The pages of one sequence before and after an event.
struct PageMove {
  std::int32_t sequence = 0;         ///< index into the step's sequences
  std::vector<std::int32_t> before;  ///< the pages it held, in order
  std::vector<std::int32_t>
      after;  ///< the pages of the slots that stay, in order; kTake until take_pages() has found a page
  std::vector<std::int32_t> written =
      {};                           ///< those of `after` whose slots the event rewrites, in the same order; every
                                    ///< other page of `after` holds the bytes that it held before. None of them
                                    ///< has another holder, so a cache that counts as one never loses a page
  std::vector<std::int32_t> freed;  ///< pages that the sequence held before, or took for the event, and that are not in
                                    ///< `after`: each loses one holder
  std::int32_t taken = 0;           ///< pages of `after` that are new: copies of pages that others hold too
  std::int32_t longest = 0, shortest = 0;  ///< slots that its longest and its shortest row then hold

  static constexpr std::int32_t kTake = -2;
};

/// Chooses the pages of every sequence of `table`, which must be paged, with page numbers on the host. Moves and takes
/// nothing. If all kept slots of a result page come, in every row, from the same places of one page, that page is not
/// copied but only gets another place in the block table. All other slots move into the first pages that are then free.
/// Page p of the result may be written in ascending order of slots: no unread slot is overwritten. If the kept slots
/// are on a device, a page stays as it is only if KeepSet::in_place says so, and the rest moves into the first pages in
/// order. A page to be written that others hold too is replaced by a new one (`SharedPages::copy`), or refused. Throws
/// StateError, for `SharedPages::refuse`, with sequence and page. Cost: O(kept slots).
[[nodiscard]] std::vector<PageMove> plan_pages(const RowTable& table, const KeepSet& keep,
                                               std::span<const SequenceId> sequences, const PageAllocator* pages,
                                               SharedPages shared);

/// Throws StateError if a page to be written has another holder by now. Cost: O(pages written).
void check_unshared(std::span<const PageMove> moves, std::span<const SequenceId> sequences, const PageAllocator* pages);

/// The same moves where rows keep fewer slots than the plan had room for: pages behind the last slot are given back.
void shorten(std::span<PageMove> moves, const RowTable& table, const KeepSet& keep);

/// Gives back every page that is no longer held. Rethrows the first exception of give_back(), after giving back all
/// others. Does nothing if `pages` is null.
void give_back_pages(std::span<const PageMove> moves, PageAllocator* pages);

/// Takes the new pages of all moves, and returns them. `holders`: [pages that every layer has] how many sequences of
/// the step name each. Throws StateError if there are not enough, and for a page that no layer has or that is in use,
/// and what take() throws; whatever was taken has been given back then.
std::vector<std::int32_t> take_pages(std::span<PageMove> moves, PageAllocator* pages,
                                     std::span<const std::int32_t> holders);

/// Gives back what was taken for an event that failed. Errors of give_back() are left out: the first one says more.
void give_back_taken(std::span<const std::int32_t> taken, PageAllocator* pages) noexcept;

namespace pages_detail {

/// Pages of one sequence while they are chosen.
class Sequence {
 public:
  Sequence(const RowTable& table, const KeepSet& keep, std::vector<std::size_t> rows)
      : table_(table), keep_(keep), rows_(std::move(rows)), size_(table.page_size) {}

  PageMove choose() {
    std::int64_t held = 0, kept = 0;
    for (const std::size_t r : rows_) {
      held = std::max<std::int64_t>(held, table_.rows[r].length);
      kept = std::max(kept, keep_.count(r));
    }
    const Row& any = table_.rows[rows_.front()];
    PageMove move;
    move.sequence = any.sequence;
    move.before.assign(any.keys.pages, any.keys.pages + pages_for(held));
    const std::int64_t pages = pages_for(kept);
    std::vector<char> used(move.before.size(), 0);
    std::vector<std::int64_t> whole(static_cast<std::size_t>(pages), -1);
    for (std::int64_t p = 0; p < pages; ++p) {
      whole[static_cast<std::size_t>(p)] = moves_whole(p);
      if (whole[static_cast<std::size_t>(p)] >= 0)
        used[static_cast<std::size_t>(whole[static_cast<std::size_t>(p)])] = 1;
    }
    // The lowest free page is at or before the one to be filled: everything that stays of it has been read by then.
    std::size_t lowest = 0;
    for (std::int64_t p = 0; p < pages; ++p) {
      std::int64_t from = whole[static_cast<std::size_t>(p)];
      if (from < 0) {
        while (used[lowest] != 0) ++lowest;
        used[lowest] = 1;
        from = static_cast<std::int64_t>(lowest);
        move.written.push_back(move.before[static_cast<std::size_t>(from)]);
      }
      move.after.push_back(move.before[static_cast<std::size_t>(from)]);
    }
    for (std::size_t p = 0; p < move.before.size(); ++p)
      if (used[p] == 0) move.freed.push_back(move.before[p]);
    return move;
  }

 private:
  [[nodiscard]] std::int64_t pages_for(std::int64_t slots) const { return (slots + size_ - 1) / size_; }

  /// The page that supplies all slots of page p of the result, each at its own place, in every row; -1: none.
  [[nodiscard]] std::int64_t moves_whole(std::int64_t p) const {
    if (!keep_.in_place.empty())
      return std::ranges::all_of(
                 rows_, [&](std::size_t r) { return std::min((p + 1) * size_, keep_.count(r)) <= keep_.in_place[r]; })
                 ? p
                 : -1;
    std::int64_t page = -1;
    for (const std::size_t r : rows_) {
      const auto kept = keep_.row(r);
      const std::int64_t end = std::min<std::int64_t>((p + 1) * size_, static_cast<std::int64_t>(kept.size()));
      for (std::int64_t j = p * size_; j < end; ++j) {
        const std::int64_t slot = kept[static_cast<std::size_t>(j)];
        if (slot % size_ != j % size_ || (page >= 0 && slot / size_ != page)) return -1;
        page = slot / size_;
      }
    }
    return page;
  }

  const RowTable& table_;
  const KeepSet& keep_;
  std::vector<std::size_t> rows_;
  std::int64_t size_;
};

/// Says how many slots the rows of each move hold afterwards. Moves are in the order of their sequences.
inline void count_slots(std::span<PageMove> moves, const RowTable& table, const KeepSet& keep) {
  for (PageMove& move : moves) move.longest = 0, move.shortest = std::numeric_limits<std::int32_t>::max();
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const auto move = std::ranges::lower_bound(moves, table.rows[r].sequence, {}, &PageMove::sequence);
    if (move == moves.end() || move->sequence != table.rows[r].sequence) continue;
    const auto slots = static_cast<std::int32_t>(keep.count(r));
    move->longest = std::max(move->longest, slots), move->shortest = std::min(move->shortest, slots);
  }
}

}  // namespace pages_detail

inline std::vector<PageMove> plan_pages(const RowTable& table, const KeepSet& keep,
                                        std::span<const SequenceId> sequences, const PageAllocator* pages,
                                        SharedPages shared) {
  std::vector<std::vector<std::size_t>> rows(sequences.size());
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    rows[static_cast<std::size_t>(table.rows[r].sequence)].push_back(r);
  std::vector<PageMove> moves;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (rows[i].empty()) continue;
    PageMove move = pages_detail::Sequence(table, keep, std::move(rows[i])).choose();
    auto after = move.after.begin();
    for (std::int32_t& written : move.written) {
      const std::int32_t page = written, holders = pages == nullptr ? 1 : pages->references(page);
      if (holders <= 1) continue;
      KVKEEP_REQUIRE_AS(StateError, shared == SharedPages::copy, "apply: page ", page, " of sequence ", sequences[i],
                        " is held by ", holders,
                        " sequences and would be written; allowed with SharedPages::copy, or if the policy protects "
                        "shared slots");
      after = std::find(after, move.after.end(), page);  // they are in the same order
      *after = written = PageMove::kTake;
      move.freed.push_back(page);
      ++move.taken;
    }
    moves.push_back(std::move(move));
  }
  pages_detail::count_slots(moves, table, keep);
  return moves;
}

inline void check_unshared(std::span<const PageMove> moves, std::span<const SequenceId> sequences,
                           const PageAllocator* pages) {
  if (pages == nullptr) return;
  for (const PageMove& move : moves)
    for (const std::int32_t page : move.written) {
      const std::int32_t holders = page == PageMove::kTake ? 1 : pages->references(page);
      KVKEEP_REQUIRE_AS(StateError, holders <= 1, "apply: page ", page, " of sequence ",
                        sequences[static_cast<std::size_t>(move.sequence)], ", which the event writes, is held by ",
                        holders, "; allowed a plan made with this PageAllocator, and since the page has that many");
    }
}

inline void shorten(std::span<PageMove> moves, const RowTable& table, const KeepSet& keep) {
  pages_detail::count_slots(moves, table, keep);
  for (PageMove& move : moves) {
    const auto pages = static_cast<std::size_t>((move.longest + table.page_size - 1) / table.page_size);
    if (pages >= move.after.size()) continue;
    move.freed.reserve(move.freed.size() + move.after.size() - pages);
    for (; move.after.size() > pages; move.after.pop_back()) {
      if (std::ranges::find(move.before, move.after.back()) == move.before.end()) --move.taken;
      if (!move.written.empty() && move.written.back() == move.after.back()) move.written.pop_back();
      move.freed.push_back(move.after.back());
    }
  }
}

inline void give_back_pages(std::span<const PageMove> moves, PageAllocator* pages) {
  if (pages == nullptr) return;
  std::exception_ptr thrown;
  for (const PageMove& move : moves)
    for (const std::int32_t page : move.freed) try {
        pages->give_back(page);
      } catch (...) {
        if (!thrown) thrown = std::current_exception();
      }
  if (thrown) std::rethrow_exception(thrown);
}

inline void give_back_taken(std::span<const std::int32_t> taken, PageAllocator* pages) noexcept {
  for (const std::int32_t page : taken) try {
      pages->give_back(page);
    } catch (...) {
    }
}

inline std::vector<std::int32_t> take_pages(std::span<PageMove> moves, PageAllocator* pages,
                                            std::span<const std::int32_t> holders) {
  std::int64_t wanted = 0;
  for (const PageMove& move : moves) wanted += move.taken;
  std::vector<std::int32_t> taken;
  taken.reserve(static_cast<std::size_t>(wanted));
  try {
    while (static_cast<std::int64_t>(taken.size()) < wanted) {
      const std::int32_t page = pages->take();
      KVKEEP_REQUIRE_AS(StateError, page >= 0, "apply: ", wanted,
                        " free pages are needed for copies of shared ones; there are ", taken.size());
      const bool twice = std::ranges::find(taken, page) != taken.end();
      taken.push_back(page);
      KVKEEP_REQUIRE_AS(StateError, page < std::ssize(holders), "apply: take() gave page ", page,
                        "; the layers allow 0 to ", std::ssize(holders) - 1);
      KVKEEP_REQUIRE_AS(StateError, !twice && holders[static_cast<std::size_t>(page)] == 0, "apply: take() gave page ",
                        page, twice ? " twice" : ", which a sequence of the step holds", "; allowed a free page");
    }
  } catch (...) {
    give_back_taken(taken, pages);
    throw;
  }
  std::size_t next = 0, again = 0;  // every page that is taken is written
  for (PageMove& move : moves) {
    for (std::int32_t& page : move.after)
      if (page == PageMove::kTake) page = taken[next++];
    for (std::int32_t& page : move.written)
      if (page == PageMove::kTake) page = taken[again++];
  }
  return taken;
}

}  // namespace kvkeep
