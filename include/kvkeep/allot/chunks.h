// SPDX-License-Identifier: Apache-2.0
#pragma once
/// ChunkKV: runs of adjacent slots stay or go together. Source: "ChunkKV: Semantic-Preserving KV Cache Compression for
/// Efficient Long-Context LLM Inference" (Liu et al.). Differs: keeps exactly the budget; protected slots stay first
/// and do not count in chunk scores; decides per sequence; heads may choose for themselves.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

struct ChunksOptions {
  std::int32_t chunk = 20;  ///< slots per chunk; the last may be shorter
  enum class Heads : std::uint8_t {
    shared,  ///< chunks rank by the sum over the KV heads of the layer, and every head keeps the same slots (published)
    own,     ///< each KV head ranks its own
  };
  Heads heads = Heads::shared;

  void describe(Fields& f) {
    f.integer("chunk", chunk, 1, INT32_MAX, "slots per chunk");
    f.choice("heads", heads, {{"shared", Heads::shared}, {"own", Heads::own}},
             "chunks rank by the sum over the KV heads of a layer, or per KV head");
  }
};

// The values that ChunkKV ranks, bit-identical on the CPU and on a GPU.

/// Chunks of a row of `length` slots.
KVKEEP_HD inline std::int32_t chunks_in(std::int32_t length, std::int32_t chunk) {
  return static_cast<std::int32_t>((std::int64_t{length} + chunk - 1) / chunk);
}

/// Slots of chunk `c` between sinks and recents.
KVKEEP_HD inline SlotRange free_slots(std::int32_t c, std::int32_t chunk, std::int32_t length, Protected guarded) {
  const auto least = [](std::int64_t a, std::int64_t b) { return static_cast<std::int32_t>(a < b ? a : b); };
  const auto most = [](std::int32_t a, std::int32_t b) { return a > b ? a : b; };
  const std::int32_t at = least(std::int64_t{c} * chunk, length), end = least(std::int64_t{at} + chunk, length);
  const std::int32_t from = least(most(guarded.sinks, at), end);
  return {from, least(most(length - guarded.recents, from), end)};
}

/// How many of them are not protected.
KVKEEP_HD inline std::int32_t free_count(SlotRange slots, const Protected& guarded) {
  return slots.to - slots.from - guarded.pinned_in(slots);
}

/// Mean of `sums` over the slots of a range that are not pinned, summed in slot order; at least one is not.
KVKEEP_HD inline double chunk_mean(const double* sums, SlotRange slots, const Protected& guarded) {
  double mean = 0;
  for (std::int32_t t = slots.from; t < slots.to; ++t)
    if (!guarded.pins_slot(t)) mean += sums[t];
  return mean / free_count(slots, guarded);
}

/// Protected slots stay. Chunks, cut from slot 0 on, rank by the mean score of their other slots (ties: the newer
/// chunk; NaN last). Chunks stay whole, best first, as long as they fit; the best slots of the first chunk that does
/// not fit fill the budget.
class Chunks final : public AllocatorOf<ChunksOptions> {
 public:
  static constexpr AllocatorTraits traits{.name = "chunkkv",
                                          .what = "runs of adjacent slots stay or go together",
                                          .source = "ChunkKV (Liu et al.)",
                                          .scorer = "snapkv"};

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "chunks"; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, true); }

  [[nodiscard]] AcrossHeads across_heads() const override {
    return options_.heads == ChunksOptions::Heads::shared ? AcrossHeads::scores : AcrossHeads::nothing;
  }

  /// Heads::shared needs rows of one length. Order of sums: ascending slots, heads within each, fp64.
  /// Cost: O(slots) per row, and a sort of its chunks. Workspace per thread: workspace_bytes(longest row, chunk).
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;

  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t length, std::int64_t chunk) {
    return 8 * length + 16 * ((length + chunk - 1) / chunk + (length < chunk ? length : chunk));
  }
};

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

inline void Chunks::allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
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
