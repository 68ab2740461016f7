// SPDX-License-Identifier: Apache-2.0
#pragma once
/// AMS: adaptive mass-segmented allocation. Usage -> mass -> credit -> segments -> quotas -> selection inside segments.
/// Source: "Adaptive Mass-Segmented KV compression", Algorithm 1 and section on EMA credit. Differs (`strict`):
/// docs/method/ams.md lists every point and why.

#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/divide.h"

namespace kvkeep {

class MassSegmented final : public AllocatorOf<MassSegmentedOptions> {
 public:
  static constexpr AllocatorTraits traits{
      .name = "ams",
      .what = "budget spread over segments of equal attention mass, and within each",
      .source = "Adaptive Mass-Segmented KV compression (AMS)"};
  /// Ours, those of the released scripts, or those of the paper, as option `preset` says. Variant official starts from
  /// the scripts.
  [[nodiscard]] static Options defaults(Fields& f, const AllocatorContext& policy);

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "mass_segmented"; }
  void check(AllocatorContext& policy) const override;
  [[nodiscard]] std::int32_t window() const override { return options_.window; }
  [[nodiscard]] AcrossHeads across_heads() const override {
    return options_.suffix_fill == SuffixFill::max_global ? AcrossHeads::tops : AcrossHeads::nothing;
  }
  /// The largest pooled usage in the history of every row. Workspace: 4 bytes per slot of the event.
  [[nodiscard]] std::vector<float> tops(const Evidence& evidence, const Limits& limits,
                                        const WindowAttention& seen) const override;

  /// Cost: O(length) per row beyond the window attention, no sort. Workspace per thread: about 40 bytes per slot of its
  /// longest row. Between window attention and compaction an event holds scores, mass and credit: 12 bytes per slot and
  /// row.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/allot/mass_segmented-inl.h"
#endif
