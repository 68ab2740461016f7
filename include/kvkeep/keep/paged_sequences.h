#pragma once
/// Which pages of a pool each living sequence holds, as a serving engine's block manager knows it.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/page_pool.h"
#include "kvkeep/keep/pages.h"

namespace kvkeep {

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
///     view.block_table = sequences.table(ids);              // attention reads it, the event writes it
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

  /// A sequence begins with room for `slots` slots, none of them shared. If there are not enough free pages, it is not
  /// added.
  [[nodiscard]] PageGrant admit(SequenceId sequence, std::int32_t slots);

  /// A sequence begins with the first `slots` slots of `parent`, and holds their pages too, including a last partial
  /// one. Takes no page. These are the slots that the parent holds now: after an event, they are no longer its first
  /// tokens. Throws InvalidArgument for more slots than the parent's shortest row holds.
  void fork(SequenceId sequence, SequenceId parent, std::int32_t slots);

  /// Adds room for `slots` more in every row. Replaces each page that will be written and that others hold too by a new
  /// one, to be filled as `copies` says: the last page if it is partial; if rows differ in length, every page from the
  /// end of the shortest row on. If `missing` is not 0, nothing has changed: release a sequence (preemption) and ask
  /// again.
  [[nodiscard]] PageGrant append(SequenceId sequence, std::int32_t slots);

  /// Cuts the longest row to `slots` slots; the others lose as many as it does. Gives back the pages after the cut.
  /// Throws InvalidArgument for more slots than the longest row has, or if the shortest row has too few to lose.
  void truncate(SequenceId sequence, std::int32_t slots);

  /// A sequence ends, or is preempted: its pages lose a holder.
  void release(SequenceId sequence);

  /// After Keeper::step: adopts lengths and pages of `moves` (Report::pages) of the step's sequences. References do not
  /// change: the event has already given back and taken pages. Throws StateError if a sequence does not hold the pages
  /// that the event found: settled twice, or changed since.
  void settle(std::span<const SequenceId> sequences, std::span<const PageMove> moves);

  /// i32 [n, max_pages] for CacheView::block_table: the pages of each sequence in order, then -1; at least one column.
  /// A new tensor in host memory.
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

/// Performs `copies`, in order, in every layer: K, V and scales of all heads. Skips layers without rows. On a GPU the
/// copies are queued on the current stream. Throws InvalidArgument, before the first byte moves, for a dense layer, a
/// page outside a layer's tensors, or slots that a page does not have. Cost: slots * slot bytes, read and written.
void copy_pages(std::span<const LayerKv> layers, std::span<const PageCopy> copies);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keep/paged_sequences-inl.h"
#endif
