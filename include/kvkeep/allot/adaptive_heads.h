// SPDX-License-Identifier: Apache-2.0
#pragma once
/// AdaKV: the heads of a layer share one budget; a head whose attention is spread out gets more of it. Source: "Ada-KV:
/// Optimizing KV Cache Eviction by Adaptive Budget Allocation" (Feng et al.). Differs: rows really shrink (the
/// published wrapper overwrites masked keys and frees nothing); protected slots count toward the safeguard; the total
/// is exact; the scores are not changed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/divide.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/score/evidence.h"

namespace kvkeep {

/// Slots of a due row that no other head competes for: the protected ones, and its best others up to floor(safeguard *
/// budget).
[[nodiscard]] KVKEEP_HD inline std::int32_t own_slots(double safeguard, const RowLimit& limit, std::int32_t length) {
  const std::int32_t share = share_of(safeguard, limit.budget), guarded = limit.guarded.count(),
                     own = share > guarded ? share : guarded;
  return own < length ? own : length;
}

/// Order of a slot among those of all heads, as rank_key: higher score first, then the lower head, then the larger
/// slot. `behind`: slots of the heads after its own. Requires: fewer than 2^32 slots in all heads.
[[nodiscard]] KVKEEP_HD inline std::uint64_t head_key(float score, std::int32_t slot, std::int64_t behind) {
  return rank_key(score, static_cast<std::int32_t>(static_cast<std::uint32_t>(behind + slot)));
}

}  // namespace kvkeep

namespace kvkeep::cpu {

// Not part of the interface. Selection over all heads of a layer, shared by the allocators that use it.

/// Rows of one (layer, sequence) are due together: if together they hold more than their budgets.
void due_together(const Evidence& evidence, std::vector<RowLimit>& rows);

/// Slots that each row may keep at most, before anything is scored: the layer's budget less what its other heads keep
/// by themselves (own_slots).
std::vector<std::int32_t> most_across_heads(const Evidence& evidence, const Limits& limits, double safeguard);

/// Marks (1) the `count` best unmarked slots, by score, then the larger slot; NaN is lowest. `keys`: scratch, reused.
void mark_best(std::span<const float> scores, std::int32_t count, std::vector<std::uint64_t>& keys,
               std::uint8_t* marks);

/// Marks the guarded slots of one row and clears the others.
void mark_guarded(std::int32_t length, Protected guarded, std::uint8_t* marks);

/// Marks the protected slots of a due row, and its best others up to floor(safeguard * budget); then over all rows of
/// the group the best of the rest (score, then the lower head, then the larger slot) until the rows' total budget is
/// spent. Returns u8 [slots] flat over the event, 1: stays; all 1 in groups that are not due.
std::vector<std::uint8_t> mark_across_heads(const Evidence& evidence, const Limits& limits, double safeguard,
                                            const float* scores);

/// Marked slots of each row, ascending.
KeepSet kept_by_marks(const RowTable& table, const std::uint8_t* marks);

}  // namespace kvkeep::cpu

namespace kvkeep {

struct AdaptiveHeadsOptions {
  double safeguard = 0.2;  ///< share of the budget each head keeps by its own ranking, [0, 1], rounded to millionths

  void describe(Fields& f) {
    f.real("safeguard", safeguard, {0, 1},
           "share of the budget that every head keeps by its own ranking, protected slots included");
  }
};

/// Per (layer, sequence): every head keeps its protected slots and its best others up to floor(safeguard * budget); the
/// rest of heads * budget goes to the best slots of all heads together, by score, then the lower head, then the larger
/// slot. NaN ranks last. Scores must be comparable across the heads of a layer (shares of attention
/// are, and given scores if the engine makes them so).
class AdaptiveHeads final : public AllocatorOf<AdaptiveHeadsOptions> {
 public:
  static constexpr AllocatorTraits traits{
      .name = "adakv",
      .what = "the heads of a layer share one budget, spent on the best of all their slots",
      .source = "Ada-KV (Feng et al.)",
      .scorer = "snapkv",
      .comparable = true};
  static void context(Fields& f) { f.uneven_heads = true; }

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "adaptive_heads"; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, false); }

  /// Rows keep the policy's budget on average; all rows of a (layer, sequence) are due together, when they hold more
  /// than heads * budget slots in total.
  void spread(const Evidence& evidence, std::span<const std::int32_t> least,
              std::vector<RowLimit>& rows) const override;
  [[nodiscard]] bool ragged() const override { return true; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::scores; }

  /// Cost: O(slots) per group, no sort. Workspace: one byte per slot of the event, and per thread workspace_bytes(slots
  /// of the largest group). Groups run in parallel; a group reads only itself.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;

  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t group_slots) { return 8 * group_slots; }
};

namespace cpu {
namespace adaptive_heads_detail {

/// Calls body(key, mark) for every unmarked slot of all rows.
template <class Body>
void each_unmarked(std::span<const Row> rows, const float* scores, std::uint8_t* marks, const Body& body) {
  const std::int64_t end = rows.back().first + rows.back().length;
  for (const Row& row : rows)
    for (std::int32_t t = 0; t < row.length; ++t)
      if (marks[row.first + t] == 0)
        body(head_key(scores[row.first + t], t, end - row.first - row.length), marks[row.first + t]);
}

/// Marks the `count` best unmarked slots over all rows.
inline void mark_best_of_all(std::span<const Row> rows, std::int64_t count, const float* scores,
                             std::vector<std::uint64_t>& keys, std::uint8_t* marks) {
  if (count <= 0) return;
  keys.clear();
  each_unmarked(rows, scores, marks, [&](std::uint64_t key, std::uint8_t) { keys.push_back(key); });
  const auto last = keys.begin() + static_cast<std::ptrdiff_t>(count) - 1;
  std::nth_element(keys.begin(), last, keys.end(), std::greater<>());
  const std::uint64_t least = *last;
  each_unmarked(rows, scores, marks, [least](std::uint64_t key, std::uint8_t& mark) { mark = key >= least ? 1 : 0; });
}

}  // namespace adaptive_heads_detail

inline void due_together(const Evidence& evidence, std::vector<RowLimit>& rows) {
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  for (const RowGroup& group : evidence.table.groups) {
    const auto first = static_cast<std::size_t>(group.first_row);
    std::int64_t held = 0, allowed = 0;
    for (std::int32_t h = 0; h < evidence.spec.whole_heads(); ++h) {
      held += evidence.table.length_of(group, h, evidence.spec);
      allowed += rows[first].budget;
    }
    for (std::size_t r = first; r < first + heads; ++r) rows[r].due = held > allowed;
  }
}

inline std::vector<std::int32_t> most_across_heads(const Evidence& evidence, const Limits& limits, double safeguard) {
  const RowTable& table = evidence.table;
  std::vector<std::int32_t> most;
  for (const RowGroup& group : table.groups) {
    const std::span<const Row> rows = table.rows_of(group, evidence.spec.kv_heads);
    const RowLimit* limit = limits.rows.data() + group.first_row;
    std::int64_t left = 0;
    for (std::size_t h = 0; h < rows.size(); ++h)
      left += limit[h].budget - own_slots(safeguard, limit[h], rows[h].length);
    for (std::size_t h = 0; h < rows.size(); ++h) {
      const std::int32_t length = rows[h].length;
      const std::int64_t own = own_slots(safeguard, limit[h], length);
      most.push_back(limit->due ? static_cast<std::int32_t>(std::min<std::int64_t>(own + left, length)) : length);
    }
  }
  return most;
}

inline void mark_best(std::span<const float> scores, std::int32_t count, std::vector<std::uint64_t>& keys,
                      std::uint8_t* marks) {
  if (count <= 0) return;
  keys.clear();
  for (std::size_t t = 0; t < scores.size(); ++t)
    if (marks[t] == 0) keys.push_back(rank_key(scores[t], static_cast<std::int32_t>(t)));
  const auto wanted = std::min<std::size_t>(static_cast<std::size_t>(count), keys.size());
  if (wanted < keys.size())
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(wanted) - 1, keys.end(),
                     std::greater<>());
  for (std::size_t n = 0; n < wanted; ++n) marks[static_cast<std::uint32_t>(keys[n])] = 1;
}

inline void mark_guarded(std::int32_t length, Protected guarded, std::uint8_t* marks) {
  const auto set = [marks](std::int32_t from, std::int32_t to, int mark) {
    std::fill(marks + from, marks + to, static_cast<std::uint8_t>(mark));
  };
  set(0, guarded.sinks, 1);
  set(guarded.sinks, length - guarded.recents, 0);
  set(length - guarded.recents, length, 1);
  for (std::int32_t i = 0; i < guarded.ranges; ++i) set(guarded.pins[i].from, guarded.pins[i].to, 1);
}

inline std::vector<std::uint8_t> mark_across_heads(const Evidence& evidence, const Limits& limits, double safeguard,
                                                   const float* scores) {
  const RowTable& table = evidence.table;
  std::vector<std::uint8_t> marks(static_cast<std::size_t>(table.slots), 1);
  parallel_for(0, static_cast<std::int64_t>(table.groups.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint64_t> keys;
    for (std::int64_t g = begin; g < end; ++g) {
      const RowGroup& group = table.groups[static_cast<std::size_t>(g)];
      const std::span<const Row> rows = table.rows_of(group, evidence.spec.kv_heads);
      const RowLimit* limit = limits.rows.data() + group.first_row;
      if (!limit->due) continue;
      std::int64_t left = 0;
      for (std::size_t h = 0; h < rows.size(); ++h) {
        const Row& row = rows[h];
        std::uint8_t* own = marks.data() + row.first;
        mark_guarded(row.length, limit[h].guarded, own);
        const std::int32_t kept = own_slots(safeguard, limit[h], row.length);
        mark_best({scores + row.first, static_cast<std::size_t>(row.length)}, kept - limit[h].guarded.count(), keys,
                  own);
        left += limit[h].budget - kept;
      }
      adaptive_heads_detail::mark_best_of_all(rows, left, scores, keys, marks.data());
    }
  });
  return marks;
}

inline KeepSet kept_by_marks(const RowTable& table, const std::uint8_t* marks) {
  KeepSet keep;
  keep.indptr.push_back(0);
  for (const Row& row : table.rows)
    keep.indptr.push_back(keep.indptr.back() +
                          std::count(marks + row.first, marks + row.first + row.length, std::uint8_t{1}));
  keep.slots = empty({keep.indptr.back()}, Dtype::i32);
  each_row(table, [&](std::size_t r, const Row& row) {
    auto out = keep.room(r).begin();
    for (std::int32_t t = 0; t < row.length; ++t)
      if (marks[row.first + t] != 0) *out++ = t;
  });
  return keep;
}

}  // namespace cpu

inline void AdaptiveHeads::spread(const Evidence& evidence, std::span<const std::int32_t>,
                                  std::vector<RowLimit>& rows) const {
  cpu::due_together(evidence, rows);
}

inline void AdaptiveHeads::allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
                                 Decision& decision) const {
  require_host("adaptive_heads", evidence.table.device);
  const std::vector<std::uint8_t> marks =
      cpu::mark_across_heads(evidence, limits, options_.safeguard, scores.data.data<float>());
  decision.keep = cpu::kept_by_marks(evidence.table, marks.data());
}

}  // namespace kvkeep
