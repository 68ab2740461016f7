#pragma once
/// AdaKV: the heads of a layer share one budget; a head whose attention is spread out gets more of it. Source: "Ada-KV:
/// Optimizing KV Cache Eviction by Adaptive Budget Allocation" (Feng et al.). Differs: rows really shrink (the
/// published wrapper overwrites masked keys and frees nothing); protected slots count toward the safeguard; the total
/// is exact; the scores are not changed.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/divide.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/rank_key.h"
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/adaptive_heads-inl.h"
#endif
