#pragma once
/// ChunkKV: runs of adjacent slots stay or go together. Source: "ChunkKV: Semantic-Preserving KV Cache Compression for
/// Efficient Long-Context LLM Inference" (Liu et al.). Differs: keeps exactly the budget; protected slots stay first
/// and do not count in chunk scores; decides per sequence; heads may choose for themselves.

#include <cstdint>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/chunk_slots.h"

namespace kvkeep {

inline void ChunksOptions::describe(Fields& f) {
  f.integer("chunk", chunk, 1, INT32_MAX, "slots per chunk");
  f.choice("heads", heads, {{"shared", Heads::shared}, {"own", Heads::own}},
           "chunks rank by the sum over the KV heads of a layer, or per KV head");
}

/// Protected slots stay. Chunks, cut from slot 0 on, rank by the mean score of their other slots (ties: the newer
/// chunk; NaN last). Chunks stay whole, best first, as long as they fit; the best slots of the first chunk that does
/// not fit fill the budget.
class Chunks final : public Allocator {
 public:
  using Options = ChunksOptions;
  static constexpr AllocatorTraits traits{.name = "chunkkv",
                                          .what = "runs of adjacent slots stay or go together",
                                          .source = "ChunkKV (Liu et al.)",
                                          .scorer = "snapkv"};

  explicit Chunks(ChunksOptions options) : options_(options) {}
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

  [[nodiscard]] const ChunksOptions& options() const { return options_; }

 private:
  ChunksOptions options_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/chunks-inl.h"
#endif
