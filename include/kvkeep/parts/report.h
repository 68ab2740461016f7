// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What events do, in numbers.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"
#include "kvkeep/keep/pages.h"

namespace kvkeep {

/// What an event does, or did, to one sequence. Lengths are those of its longest row.
struct Cut {
  SequenceId sequence = 0;
  std::int64_t logical_length = 0;  ///< tokens seen
  std::int32_t length_before = 0;   ///< slots
  std::int32_t length_after = 0;
  std::int64_t slots_before = 0;  ///< over all its rows
  std::int64_t slots_after = 0;
  std::int64_t slots_chosen = 0;  ///< of slots_after: those that stay because of their scores, being neither sinks, nor
                                  ///< recents, nor pinned, nor of a protected prompt, nor in a row that was not cut. A
                                  ///< lower bound on a device if some are pinned
};

/// A sequence that was due but was not cut: the policy reads a query of it that is NaN or infinite, so what that
/// attends to is undefined. Other sequences are cut as if it were not there. End it, or let the query leave the window.
/// On a device there is no such check: the scores are NaN, which rank last.
struct Unscored {
  SequenceId sequence = 0;
  std::int32_t layer = 0;
  std::int32_t position = 0;  ///< logical, of the query
};

/// What an event would do. Where a device's scores decide how many slots stay, its lengths, slots, bytes and pages
/// after the event are upper bounds. Refers to the view and the keeper that it was made from: apply it before either
/// changes. On a device, the keeper's next plan overwrites the memory of its tensors.
struct Plan {
  std::vector<Cut> cuts;  ///< one per sequence that is due
  RowTable table;         ///< the rows of those sequences
  Decision decision;
  std::vector<PageMove> pages;     ///< paged caches: one per sequence that is due
  bool counted = false;            ///< a PageAllocator said how many hold them
  std::vector<Unscored> unscored;  ///< sequences that are due and will not be cut
  std::int64_t bytes_before = 0;   ///< K and V bytes of live slots in full layers, for all sequences of the view
  std::int64_t bytes_after = 0;
  double seconds = 0;  ///< that plan() took, if anything is due
  std::uint64_t version = 0;
  std::shared_ptr<const void> keeper;  ///< the keeper that made the plan
};

/// What an event did: proof in numbers that compression ran.
struct Report {
  std::vector<Cut> cuts;
  std::vector<PageMove> pages;  ///< paged caches: the pages that each cut sequence now holds, as its row of the block
                                ///< table says, and those it gave back
  std::vector<Unscored> unscored;  ///< sequences that were due and were not cut
  std::int64_t slots_kept = 0;     ///< of the cut sequences, over all rows
  std::int64_t slots_chosen = 0;   ///< of these, by the scorer (Cut)
  std::int64_t slots_dropped = 0;  ///< over all rows
  std::int64_t slots_folded = 0;   ///< of these, folded into spans
  std::int64_t far_bytes = 0;      ///< of the factors stored for them; an upper bound on a device (FoldedState)
  std::int64_t bytes_before = 0;   ///< as in Plan
  std::int64_t bytes_after = 0;
  std::int64_t bytes_moved = 0;  ///< K and V bytes copied within the cache; an upper bound on a device, because the
                                 ///< host does not know which slots were already in place
  std::int64_t pages_freed = 0;  ///< holders removed, over all sequences; a page without holders is free
  bool pending = false;  ///< the device has yet to say how many slots stay: what comes after the event is an upper
                         ///< bound, `pages` is empty, and the view is as it was until EventHandle::wait()
};

/// A histogram of times, in the buckets that Prometheus expects: each counts the times up to its bound.
struct TimeHistogram {
  /// Seconds.
  static constexpr std::array<double, 15> kBounds{50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3,
                                                  25e-3, 50e-3,  0.1,    0.5,    1,    2.5,    5};
  std::array<std::int64_t, kBounds.size()> up_to{};  ///< cumulative
  std::int64_t count = 0;
  double sum = 0;  ///< seconds

  void add(double seconds) {
    for (std::size_t b = 0; b < kBounds.size(); ++b) up_to[b] += seconds <= kBounds[b] ? 1 : 0;
    ++count;
    sum += seconds;
  }
};

/// Counters since construction of the keeper. kvkeep/keeper/metrics.h writes them as Prometheus reads them.
struct Totals {
  std::int64_t steps = 0;
  std::int64_t events = 0;  ///< steps in which something was cut
  std::int64_t sequences_cut = 0;
  std::int64_t unscored = 0;      ///< sequences that were due and were not cut (Report::unscored), at each step anew
  std::int64_t slots_kept = 0;    ///< at events, as in Report
  std::int64_t slots_chosen = 0;  ///< of these; 0 after events: the scorer had no say
  std::int64_t slots_dropped = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t pages_freed = 0;
  std::int64_t slots_folded = 0;
  ReadCounts reads;             ///< of folded spans; 0 on a device
  TimeHistogram event_seconds;  ///< of the calls that plan, carry out and finish an event, those that throw left out.
                                ///< On a device it is the host's time, which does not wait for the device
};

}  // namespace kvkeep
