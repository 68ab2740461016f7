#pragma once
/// Which pages of a pool each living sequence holds: what a serving engine's block manager knows.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/page_pool.h"
#include "kvkeep/keep/pages.h"

namespace kvkeep {

/// K, V and scales of the first `slots` slots of page `from` belong into page `to` too, in every layer, before anything
/// new is written there.
struct PageCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t slots = 0;

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

/// What became of a wish for room.
struct PageGrant {
  std::int32_t missing = 0;  ///< pages that were free too few; 0: the room is there. Otherwise nothing has changed
  std::vector<PageCopy> copies = {};  ///< to be done (copy_pages) in the order in which they were granted, before
                                      ///< anything is written into any page

  [[nodiscard]] bool given() const { return missing == 0; }
};

/// The pages of living sequences over a pool that outlives this object. A page may be held by several sequences (a
/// shared prefix); the one that is about to write it gets its own copy first. Ids are the engine's. Not thread safe;
/// every call costs O(pages it is about), and O(log sequences) to find them.
///
///     PageGrant grant = sequences.append(id, 1);            // before the step: room for its tokens
///     if (!grant.given()) preempt(...);                     // nothing changed
///     copy_pages(layers, grant.copies);
///     view.block_table = sequences.table(ids);              // attention reads it, the event writes it
///     Report report = keeper.step(view);
///     sequences.settle(view, report.pages);
///
/// Unknown ids, and ids that are here already, are StateErrors. Every error is thrown before anything changes.
class PagedSequences {
 public:
  explicit PagedSequences(PagePool& pool) : pool_(pool) {}
  PagedSequences(const PagedSequences&) = delete;
  PagedSequences& operator=(const PagedSequences&) = delete;
  /// Gives every page back.
  ~PagedSequences();

  /// A sequence begins with room for `slots` slots, none of them shared. Without enough free pages it is not here
  /// afterwards.
  [[nodiscard]] PageGrant admit(SequenceId sequence, std::int32_t slots);

  /// A sequence begins with the first `slots` slots of `parent`, whose pages (a last partial one included) it holds
  /// too. Takes no page. Those slots are what the parent holds now: after an event, no longer its first tokens. Throws
  /// InvalidArgument for more slots than every row of the parent holds.
  void fork(SequenceId sequence, SequenceId parent, std::int32_t slots);

  /// Room for `slots` more in every row. A page that will be written and that others hold too is replaced by a new one,
  /// to be filled as `copies` says: the last one, where it is partial; where rows differ in length, every one from the
  /// end of the shortest row on. Where `missing` pages are not free, nothing has changed: release a sequence
  /// (preemption) and ask again.
  [[nodiscard]] PageGrant append(SequenceId sequence, std::int32_t slots);

  /// The longest row holds `slots` slots from now on, the others lose as many as it does; pages behind are given back.
  /// Throws InvalidArgument for more slots than it has, or fewer than the shortest row can lose.
  void truncate(SequenceId sequence, std::int32_t slots);

  /// A sequence ends, or is preempted: its pages lose a holder.
  void release(SequenceId sequence);

  /// After Keeper::step: takes over the lengths of `view` and the pages of `moves` (Report::pages). References do not
  /// change: the event gave back and took already. Lengths are those of the rows of paged layers. Throws StateError
  /// where a sequence does not hold what the event found: settled twice, or changed since.
  void settle(const CacheView& view, std::span<const PageMove> moves);

  /// i32 [n, max_pages] for CacheView::block_table: the pages of each sequence in order, -1 behind them; at least one
  /// column. A new tensor in host memory.
  [[nodiscard]] Tensor table(std::span<const SequenceId> sequences) const;

  [[nodiscard]] bool knows(SequenceId sequence) const { return held_.contains(sequence); }
  [[nodiscard]] std::size_t count() const { return held_.size(); }
  /// Slots of the longest row.
  [[nodiscard]] std::int32_t length(SequenceId sequence) const { return at(sequence).longest; }
  /// Valid until the next call that changes this sequence.
  [[nodiscard]] std::span<const std::int32_t> pages(SequenceId sequence) const { return at(sequence).pages; }
  [[nodiscard]] const PagePool& pool() const { return pool_; }

 private:
  struct Held {
    std::vector<std::int32_t> pages;  ///< [ceil(longest / page_size)]
    std::int32_t longest = 0;         ///< slots
    std::int32_t shortest = 0;
  };
  [[nodiscard]] const Held& at(SequenceId sequence) const;
  [[nodiscard]] std::size_t pages_for(std::int64_t slots) const;

  PagePool& pool_;
  std::map<SequenceId, Held> held_;
};

/// Does `copies`, one after the other, in every layer: K, V and scales of all heads. Layers without rows are left out;
/// on a GPU the copies are queued on the current stream. Throws InvalidArgument, before the first byte moves, for a
/// dense layer, a page outside a layer's tensors, or slots that a page does not have. Cost: slots * slot bytes, read
/// and written.
void copy_pages(std::span<const LayerKv> layers, std::span<const PageCopy> copies);

}  // namespace kvkeep
