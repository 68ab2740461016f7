// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Strided: every n-th slot stays, and the best of the others.

#include <limits>
#include <utility>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

struct StridedOptions {
  std::int32_t stride = 8;  ///< slots from one that stays to the next

  void describe(Fields& f) { f.integer("stride", stride, 2, INT32_MAX, "slots from one that stays to the next"); }
};

class Strided final : public AllocatorOf<StridedOptions> {
 public:
  static constexpr AllocatorTraits traits{
      .name = "strided", .what = "every n-th slot stays, and the best of the others", .source = "none"};

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return traits.name; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, true); }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }

  /// Cost: one copy of the scores, then as Flat.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    require_host("strided", evidence.table.device);
    const Scores ranked{clone(scores.data)};  // scores are read, never written
    each_due_row(evidence.table, limits, [&](std::size_t, const Row& row) {
      float* g = ranked.data.data<float>() + row.first;
      for (std::int32_t t = 0; t < row.length; t += options_.stride) g[t] = std::numeric_limits<float>::infinity();
    });
    Flat().allot(evidence, limits, ranked, std::move(seen), decision);
  }
};

}  // namespace kvkeep
