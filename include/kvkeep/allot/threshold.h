// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Threshold: slots stay if their score is high enough, however many these are. Source: the decision of KVzap
/// (threshold on a learned log score, the newest 128 tokens always stay) and of DMS (arXiv 2506.05345: one decision per
/// token, carried out once it is `window` tokens old), as in kvpress's DMSPress. Differs: a budget bounds each row, and
/// if more slots pass, the best of them stay; sinks stay; rows really shrink (the published wrapper overwrites masked
/// keys and frees nothing); decisions are carried out at events, up to `interval` tokens after a token has left
/// `recent`, so that rows are longer by as much; the scores of other scorers than `given` change from event to event,
/// so a slot that once passed may go later.

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"

namespace kvkeep {

// How many slots of a row a threshold leaves. The same on every machine.

/// The protected slots of a due row and the others that score at least `least`, as far as the budget allows. Those that
/// pass rank before all others, so a selection of as many keeps them. NaN does not pass. Cost: one pass over the
/// scores.
template <class Team = OneThread>
[[nodiscard]] KVKEEP_HD std::int32_t passing_slots(const float* scores, std::int32_t length, const RowLimit& limit,
                                                   float least, Team team = {}) {
  const Protected& guarded = limit.guarded;
  const auto passing = [&](std::int32_t from, std::int32_t to) {
    std::uint64_t count = 0;
    for (std::int32_t t = from + team.thread(); t < to; t += team.size()) count += scores[t] >= least ? 1 : 0;
    return count;
  };
  std::uint64_t own = passing(guarded.sinks, length - guarded.recents);
  for (std::int32_t i = 0; i < guarded.ranges; ++i) own -= passing(guarded.pins[i].from, guarded.pins[i].to);
  // A member may have taken more from pinned ranges than it counted: the sum over all of them is right.
  const auto stay = static_cast<std::int64_t>(team.sum(own)) + guarded.count();
  const std::int32_t room = limit.budget < length ? limit.budget : length;
  return stay < room ? static_cast<std::int32_t>(stay) : room;
}

struct ThresholdOptions {
  double threshold = 0;  ///< slots that score less go

  void describe(Fields& f) {
    const bool given = f.real("threshold", threshold, {-1e30, 1e30}, "slots that score less go", {}, "required");
    KVKEEP_REQUIRE(given || f.listing(),
                   "policy: threshold is missing; allowed a number that scores are compared with");
  }
};

/// Per row: protected slots stay, and of the others those with a score of at least the threshold, compared as f32; NaN
/// does not pass. If more pass than the budget has room for, the best stay: higher score, then the larger slot. Every
/// row is due at every event (Trigger::thins).
class Threshold final : public AllocatorOf<ThresholdOptions> {
 public:
  static constexpr AllocatorTraits traits{.name = "threshold",
                                          .what = "slots above a threshold stay, at most the budget",
                                          .source = "KVzap and DMS (arXiv 2506.05345), as in kvpress"};

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "threshold"; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, true); }
  [[nodiscard]] bool ragged() const override { return true; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::counts; }
  [[nodiscard]] bool thins() const override { return true; }

  void spread(const Evidence& evidence, std::span<const std::int32_t>, std::vector<RowLimit>& rows) const override {
    for (std::size_t r = 0; r < rows.size(); ++r) rows[r].due = evidence.table.rows[r].length > 0;
  }

  /// Cost: O(slots). Workspace: 8 bytes per thread and slot of its longest row, if more slots pass than may stay.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
             Decision& decision) const override {
    require_host("threshold", evidence.table.device);
    const RowTable& table = evidence.table;
    const float* g = scores.data.data<float>();
    const auto least = static_cast<float>(options_.threshold);
    KeepSet keep;
    keep.indptr.assign(table.rows.size() + 1, 0);
    each_row(table, [&](std::size_t r, const Row& row) {
      keep.indptr[r + 1] =
          limits.rows[r].due ? passing_slots(g + row.first, row.length, limits.rows[r], least) : row.length;
    });
    std::partial_sum(keep.indptr.begin(), keep.indptr.end(), keep.indptr.begin());
    keep.slots = empty({keep.indptr.back()}, Dtype::i32);
    const auto make = [] { return std::vector<std::uint64_t>(); };
    each_row(table, make, [&](std::size_t r, const Row& row, std::vector<std::uint64_t>& keys) {
      const std::span<std::int32_t> slots = keep.room(r);
      if (!limits.rows[r].due) return std::iota(slots.begin(), slots.end(), 0);
      select({g + row.first, static_cast<std::size_t>(row.length)}, limits.rows[r].guarded, keys, slots);
    });
    decision.keep = std::move(keep);
  }
};

}  // namespace kvkeep
