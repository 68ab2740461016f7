#pragma once
/// AMS: adaptive mass-segmented allocation. Usage -> mass -> credit -> segments -> quotas -> selection inside segments.
/// Source: "Adaptive Mass-Segmented KV compression", Algorithm 1 and section on EMA credit. Differs (`strict`): docs/ams.md lists every point and why.

#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/credit.h"
#include "kvkeep/allot/quotas.h"
#include "kvkeep/allot/segments.h"

namespace kvkeep {

struct MassSegmentedOptions {
  std::int32_t window = 32;                      ///< queries whose attention makes the mass
  Segmentation segments = Segmentation::mass;
  std::int32_t fixed = 128;                      ///< slots a segment, `Segmentation::fixed` only
  double segment_mass = 0.02;                    ///< mass a segment aims at, (0, 1]
  std::int32_t min_segment = 32;                 ///< slots
  std::int32_t max_segment = 1024;               ///< slots, at least 2 * min_segment
  std::int32_t min_quota = 8;                    ///< slots every segment may keep, as far as the budget allows
  QuotaWeight quotas = QuotaWeight::mass;
  bool credit = true;
  double credit_decay = 0.8;                     ///< weight of the old credit, [0, 1)
  double credit_mix = 0.7;                       ///< weight of this event's mass, [0, 1]
  std::int32_t pool = 5;                         ///< odd; 1 or less: no pooling
  SuffixFill suffix_fill = SuffixFill::max_head;
  double coverage = 1.0;                         ///< share of the budget above the protected slots that goes through segments, [0, 1]
  bool coverage_auto = false;                    ///< instead: what the segments' floors take, so that `min_quota` slots of every segment stay and the rest is top-k
};

/// Added to every usage before it is normalised, so that an all-zero row becomes uniform.
inline constexpr double kMassEpsilon = 1e-12;

class MassSegmented final : public Allocator {
 public:
  explicit MassSegmented(MassSegmentedOptions options) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "mass_segmented"; }
  [[nodiscard]] std::int32_t window() const override { return options_.window; }

  /// Cost: O(length) a row beyond the window attention, no sort. Workspace per thread: about 40 bytes a slot of its longest row.
  /// Between window attention and compaction an event holds scores, mass and credit: 12 bytes a slot and row.
  void allot(const Evidence& evidence, const Limits& limits, WindowAttention& seen, Decision& decision) const override;

 private:
  MassSegmentedOptions options_;
};

}  // namespace kvkeep
