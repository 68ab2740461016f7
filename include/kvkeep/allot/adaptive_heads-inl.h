#pragma once
// Bodies of adaptive_heads.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <functional>

#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"

namespace kvkeep {
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

KVKEEP_INLINE void due_together(const Evidence& evidence, std::vector<RowLimit>& rows) {
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

KVKEEP_INLINE std::vector<std::int32_t> most_across_heads(const Evidence& evidence, const Limits& limits,
                                                          double safeguard) {
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

KVKEEP_INLINE void mark_best(std::span<const float> scores, std::int32_t count, std::vector<std::uint64_t>& keys,
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

KVKEEP_INLINE void mark_guarded(std::int32_t length, Protected guarded, std::uint8_t* marks) {
  const auto set = [marks](std::int32_t from, std::int32_t to, int mark) {
    std::fill(marks + from, marks + to, static_cast<std::uint8_t>(mark));
  };
  set(0, guarded.sinks, 1);
  set(guarded.sinks, length - guarded.recents, 0);
  set(length - guarded.recents, length, 1);
  for (std::int32_t i = 0; i < guarded.ranges; ++i) set(guarded.pins[i].from, guarded.pins[i].to, 1);
}

KVKEEP_INLINE std::vector<std::uint8_t> mark_across_heads(const Evidence& evidence, const Limits& limits,
                                                          double safeguard, const float* scores) {
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

KVKEEP_INLINE KeepSet kept_by_marks(const RowTable& table, const std::uint8_t* marks) {
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

KVKEEP_INLINE void AdaptiveHeads::spread(const Evidence& evidence, std::span<const std::int32_t>,
                                         std::vector<RowLimit>& rows) const {
  cpu::due_together(evidence, rows);
}

KVKEEP_INLINE void AdaptiveHeads::allot(const Evidence& evidence, const Limits& limits, const Scores& scores,
                                        WindowAttention, Decision& decision) const {
  require_host("adaptive_heads", evidence.table.device);
  const std::vector<std::uint8_t> marks =
      cpu::mark_across_heads(evidence, limits, options_.safeguard, scores.data.data<float>());
  decision.keep = cpu::kept_by_marks(evidence.table, marks.data());
}

}  // namespace kvkeep
