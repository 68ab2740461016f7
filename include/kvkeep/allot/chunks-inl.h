#pragma once
// Bodies of chunks.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/allot/chunks.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {
namespace chunks_detail {

using Ranked = std::pair<std::uint64_t, std::int32_t>;  ///< order_of() and number of a chunk or slot; the larger stays

/// Buffers of one thread.
struct Scratch {
  std::vector<double> sums;    ///< [length] score of each slot, over the heads
  std::vector<Ranked> chunks;  ///< mean of each chunk that has unprotected slots
  std::vector<Ranked> slots;   ///< [chunk] slots of the chunk that does not fit

  void fit(std::int64_t length, std::int64_t chunk) {
    sums.reserve(static_cast<std::size_t>(length));
    chunks.reserve(static_cast<std::size_t>((length + chunk - 1) / chunk));
    slots.reserve(static_cast<std::size_t>(std::min(length, chunk)));
  }
};

/// Slots of a row with these sums that stay: `slots.size()` of them, ascending.
inline void select_chunks(std::int32_t chunk, Protected guarded, Scratch& s, std::span<std::int32_t> slots) {
  const auto length = static_cast<std::int32_t>(s.sums.size());
  s.chunks.clear();
  for (std::int32_t c = 0; c < chunks_in(length, chunk); ++c) {
    const SlotRange free = free_slots(c, chunk, length, guarded);
    if (free_count(free, guarded) > 0) s.chunks.emplace_back(order_of(chunk_mean(s.sums.data(), free, guarded)), c);
  }
  std::sort(s.chunks.begin(), s.chunks.end(), std::greater<>());  // equal means: the newer chunk first
  auto out = slots.begin();
  for (std::int32_t t = 0; t < guarded.sinks; ++t) *out++ = t;
  for (std::int32_t t = length - guarded.recents; t < length; ++t) *out++ = t;
  for (std::int32_t i = 0; i < guarded.ranges; ++i)
    for (std::int32_t t = guarded.pins[i].from; t < guarded.pins[i].to; ++t) *out++ = t;
  for (const auto& [key, c] : s.chunks) {
    const SlotRange free = free_slots(c, chunk, length, guarded);
    const auto left = static_cast<std::size_t>(slots.end() - out);
    if (left == 0) break;
    if (left >= static_cast<std::size_t>(free_count(free, guarded))) {
      for (std::int32_t t = free.from; t < free.to; ++t)
        if (!guarded.pins_slot(t)) *out++ = t;
      continue;
    }
    s.slots.clear();
    for (std::int32_t t = free.from; t < free.to; ++t)
      if (!guarded.pins_slot(t)) s.slots.emplace_back(order_of(s.sums[static_cast<std::size_t>(t)]), t);
    std::nth_element(s.slots.begin(), s.slots.begin() + static_cast<std::ptrdiff_t>(left) - 1, s.slots.end(),
                     std::greater<>());
    for (std::size_t n = 0; n < left; ++n) *out++ = s.slots[n].second;
  }
  std::sort(slots.begin(), slots.end());
}

}  // namespace chunks_detail

KVKEEP_INLINE void Chunks::allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
                                 Decision& decision) const {
  require_host("chunks", evidence.table.device);
  const RowTable& table = evidence.table;
  const bool shared = options_.heads == ChunksOptions::Heads::shared;
  for (const RowGroup& group : table.groups)
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      const std::int32_t length = table.rows[static_cast<std::size_t>(group.first_row)].length;
      KVKEEP_REQUIRE_AS(Unsupported, !shared || row.length == length,
                        "chunks: heads \"shared\" ranks over heads of one length; given rows of ", length, " and ",
                        row.length, " slots in layer ", row.layer, "; use heads \"own\"");
    }
  decision.keep = empty_keep_set(table, limits);
  const KeepSet& keep = *decision.keep;
  const float* g = scores.data.data<float>();
  parallel_for(0, static_cast<std::int64_t>(table.groups.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    chunks_detail::Scratch scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const RowGroup& group = table.groups[static_cast<std::size_t>(i)];
      const std::span<const Row> rows = table.rows_of(group, evidence.spec.kv_heads);
      const RowLimit* limit = limits.rows.data() + group.first_row;
      const auto kept = [&](std::size_t h) { return keep.room(static_cast<std::size_t>(group.first_row) + h); };
      const Protected guarded = protected_by_any(limit, evidence.spec.kv_heads, rows.front().length, limits.variant);
      for (std::size_t h = 0; h < rows.size(); ++h) {
        const std::span<std::int32_t> own = kept(h);
        if (!limit[h].due) {
          std::iota(own.begin(), own.end(), 0);
        } else if (shared && h > 0) {
          std::copy_n(kept(0).begin(), own.size(), own.begin());
        } else {
          const float* first = g + rows[h].first;
          scratch.fit(rows[h].length, options_.chunk);
          scratch.sums.assign(first, first + rows[h].length);
          for (std::size_t other = 1; shared && other < rows.size(); ++other)
            for (std::size_t t = 0; t < scratch.sums.size(); ++t)
              scratch.sums[t] += static_cast<double>(g[rows[other].first + static_cast<std::int64_t>(t)]);
          chunks_detail::select_chunks(options_.chunk, shared ? guarded : limit[h].guarded, scratch, own);
        }
      }
    }
  });
}

}  // namespace kvkeep
