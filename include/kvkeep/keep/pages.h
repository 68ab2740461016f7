#pragma once
/// What an event does to the pages of a sequence: which pages stay and in what order, which are copied because others
/// hold them too, and which are given back.

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
      after;  ///< the pages of the slots that stay, in order; kTake until take_pages() has found a page
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
/// are on a device, a page stays as it is only if KeepSet::firm says so, and the rest moves into the first pages in
/// order. A page to be written that others hold too is replaced by a new one (`SharedPages::copy`), or refused. Throws
/// StateError, for `SharedPages::refuse`, with sequence and page. Cost: O(kept slots).
[[nodiscard]] std::vector<PageMove> plan_pages(const RowTable& table, const KeepSet& keep,
                                               std::span<const SequenceId> sequences, const PageAllocator* pages,
                                               SharedPages shared);

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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keep/pages-inl.h"
#endif
