#pragma once
/// ChunkKV: runs of adjacent slots stay or go together. Source: "ChunkKV: Semantic-Preserving KV Cache Compression for
/// Efficient Long-Context LLM Inference" (Liu et al.). Differs: keeps exactly the budget; protected slots stay first
/// and do not count in chunk scores; decides per sequence; heads may choose for themselves.

#include <cstdint>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/strict_math.h"

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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/chunks-inl.h"
#endif
