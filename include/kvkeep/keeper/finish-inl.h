#pragma once
/// Keeper's part of events in which a device's scores decide how many slots stay: apply() launches them, finish()
/// completes them once the host knows.

#include <algorithm>
#include <utility>
#include <vector>

#include "kvkeep/core/header_only.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/keeper/keeper.h"

namespace kvkeep {

/// The view is as apply() had it.
KVKEEP_INLINE void Keeper::check_pending(const Plan& plan, const CacheView& view) const {
  check_planned("finish", plan, view);
  const std::int32_t rows = spec_.num_layers() * spec_.kv_heads;
  KVKEEP_REQUIRE_AS(StateError,
                    view.lengths.rows_per_sequence == rows &&
                        view.lengths.data.size() == view.sequences.size() * static_cast<std::size_t>(rows),
                    "finish: the view has ", view.lengths.data.size(), " lengths, ", view.lengths.rows_per_sequence,
                    " per sequence; allowed the view of apply()");
  for (const Row& row : plan.table.rows) {
    const auto i = static_cast<std::size_t>(row.sequence);
    const std::int32_t held = view.lengths.at(i, row.layer * spec_.kv_heads + row.head);
    KVKEEP_REQUIRE_AS(StateError, held == row.length, "finish: sequence ", view.sequences[i], " holds ", held,
                      " slots in layer ", row.layer, ", head ", row.head, ", and ", row.length,
                      " when the event began; allowed the view of apply()");
  }
  for (const PageMove& move : pending_->pages) {
    const bool as_it_was =
        view.block_table.defined() && std::ssize(move.before) <= view.block_table.size(1) &&
        std::equal(move.before.begin(), move.before.end(),
                   view.block_table.data<std::int32_t>() + move.sequence * view.block_table.stride(0));
    KVKEEP_REQUIRE_AS(StateError, as_it_was, "finish: the block table of sequence ",
                      view.sequences[static_cast<std::size_t>(move.sequence)],
                      " has other pages than when the event began; allowed the view of apply()");
  }
}

KVKEEP_INLINE Report Keeper::finish(const CacheView& view) {
  KVKEEP_REQUIRE_AS(StateError, pending_.has_value(),
                    "finish: no event is pending; allowed once after each apply() whose report says so");
  auto& [plan, pages] = *pending_;
  check_pending(plan, view);
  std::vector<std::int32_t> counts(plan.table.rows.size());
  provided_.machine().read_counts(counts);
  KeepSet& keep = *plan.decision.keep;
  for (std::size_t r = 0; r < counts.size(); ++r) keep.indptr[r + 1] = keep.indptr[r] + counts[r];
  measure(plan);
  for (PageMove& move : pages)
    for (std::size_t i = 0; i < plan.cuts.size(); ++i)
      if (plan.table.groups[i].sequence == move.sequence)
        shorten(move, plan.cuts[i].length_after, plan.table.page_size);
  Report report{.cuts = plan.cuts,
                .pages = {},
                .unscored = plan.unscored,
                .bytes_before = plan.bytes_before,
                .bytes_after = plan.bytes_after,
                .bytes_moved = bytes_to_move(plan.table, keep, pages)};
  report.pages = std::move(pages);  // nothing fails from here on but give_back()
  for (const Cut& cut : report.cuts) sequences_->at(cut.sequence).pending = false;
  settle(plan, view, nullptr, report);
  pending_.reset();
  give_back_pages(report.pages, view.pages);
  return report;
}

}  // namespace kvkeep
