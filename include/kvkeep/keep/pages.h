#pragma once
/// What an event does to the pages of a sequence: which stay and in what order, which are copied because others hold
/// them too, which are given back.

#include <cstdint>
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
      after;  ///< the pages that hold what stays, in order; kTake until take_pages() has found one
  std::vector<std::int32_t> freed;  ///< pages of `before` that are not in `after`: each loses one holder
  std::int32_t taken = 0;           ///< pages of `after` that are new: copies of pages that others hold too

  static constexpr std::int32_t kTake = -2;
};

/// Chooses the pages of every sequence of `table`, a paged one whose block tables the host can read. Moves and takes
/// nothing. A page whose slots stay whole in every row, and arrive whole in one page, is only put in another place of
/// the block table; everything else moves into the first pages that are free by then. Page p of the result may be
/// written in ascending order of slots: nothing unread lies there. Where the kept slots lie on a device, a page stays
/// as it is only where KeepSet::firm says so, and the rest moves into the first pages in order. A page that is to be
/// written and that others hold too is replaced by a new one (`SharedPages::copy`), or refused. Throws StateError, for
/// `SharedPages::refuse`, with sequence and page. Cost: O(kept slots).
[[nodiscard]] std::vector<PageMove> plan_pages(const RowTable& table, const KeepSet& keep,
                                               std::span<const SequenceId> sequences, const PageAllocator* pages,
                                               SharedPages shared);

/// Hands back every page that is no longer held. Throws what give_back() threw first, with all others handed back.
/// `pages` null: nothing.
void give_back_pages(std::span<const PageMove> moves, PageAllocator* pages);

/// Takes the new pages of all moves. Throws StateError, with nothing taken, when there are not enough, and what take()
/// throws.
void take_pages(std::span<PageMove> moves, PageAllocator* pages);

}  // namespace kvkeep
