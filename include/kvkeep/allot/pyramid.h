#pragma once
/// PyramidKV: early layers keep more slots than late ones. Source: "PyramidKV: Dynamic KV Cache Compression based on
/// Pyramidal Information Funneling" (Cai et al.), the linear profile. Differs: budgets follow from the policy's budget
/// alone, not from the cache's current length, so they stay the same from event to event; they add up exactly; none
/// falls below what the scorer never drops; they include the window's slots.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/allot/allocator.h"

namespace kvkeep {

struct PyramidOptions {
  double beta = 20;  ///< the last layer gets 1 / beta of the mean budget before clamping, the first 2 - 1 / beta of it;
                     ///< [1, 1000], rounded to millionths

  void describe(Fields& f) {
    f.real("beta", beta, {1, 1000},
           "the last layer keeps 1 / beta of the budget, the first 2 - 1 / beta of it, before small budgets are raised "
           "to sinks + window");
  }
};

/// Slots per row of each of `layers` layers, falling: linear from budget * (2 - 1 / beta) to budget / beta, rounded by
/// largest remainder (ties: the lower layer), each raised to `least`; the slots that this adds are taken from the
/// layers above `least` in proportion to their excess (largest remainder, ties: the lower layer). The sum is layers *
/// budget. A single layer gets the budget itself. Exact: integers throughout. Requires: layers >= 1. Throws
/// InvalidArgument if budget < least. Cost: O(layers * log(layers)).
[[nodiscard]] std::vector<std::int32_t> pyramid_budgets(std::int32_t layers, std::int32_t budget, double beta,
                                                        std::int32_t least);

/// Budgets by layer, then top-k of each row with protected slots. All layers whose rows could be cut count, whether
/// this cache holds them or not (LayerKind::full and `elsewhere`).
class Pyramid final : public AllocatorOf<PyramidOptions> {
 public:
  static constexpr AllocatorTraits traits{.name = "pyramidkv",
                                          .what = "early layers keep more than late ones, each the best of its rows",
                                          .source = "PyramidKV (Cai et al.)",
                                          .scorer = "snapkv"};

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "pyramid"; }
  /// Every layer keeps sinks and what the scorer never drops: no budget is below that.
  void check(AllocatorContext& policy) const override;
  void spread(const Evidence& evidence, std::span<const std::int32_t> least,
              std::vector<RowLimit>& rows) const override;
  [[nodiscard]] bool ragged() const override { return true; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  /// Cost and workspace: as Flat.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    Flat().allot(evidence, limits, scores, std::move(seen), decision);
  }
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/pyramid-inl.h"
#endif
