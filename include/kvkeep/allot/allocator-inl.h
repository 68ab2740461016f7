// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of allocator.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <numeric>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"

namespace kvkeep {

KVKEEP_INLINE void require_own_form(std::string_view allocator, const AllocatorContext& policy, bool alike) {
  KVKEEP_REQUIRE(policy.variant == Variant::strict, "policy: variant is official with allocator ", allocator,
                 "; allowed strict (docs/method/allocators.md describes how that differs from the published form)");
  KVKEEP_REQUIRE(alike || policy.share == Sharing::per_layer_per_head,
                 "policy: share is not per_layer_per_head with allocator ", allocator,
                 "; allowed per_layer_per_head (its rows keep different slots)");
}

KVKEEP_INLINE KeepSet empty_keep_set(const RowTable& table, const Limits& limits) {
  KeepSet keep;
  keep.indptr.reserve(table.rows.size() + 1);
  keep.indptr.push_back(0);
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    keep.indptr.push_back(keep.indptr.back() + (limits.rows[r].due
                                                    ? std::min(table.rows[r].length, limits.rows[r].budget)
                                                    : table.rows[r].length));
  keep.slots = empty({keep.indptr.back()}, Dtype::i32);
  return keep;
}

KVKEEP_INLINE KeepSet keep_everything(const RowTable& table) {
  KeepSet keep = empty_keep_set(table, {Variant::strict, {}, std::vector<RowLimit>(table.rows.size())});
  for (std::size_t r = 0; r < table.rows.size(); ++r) std::iota(keep.room(r).begin(), keep.room(r).end(), 0);
  return keep;
}

KVKEEP_INLINE void Flat::allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
                               Decision& decision) const {
  require_host("flat", evidence.table.device);
  const RowTable& table = evidence.table;
  decision.keep = empty_keep_set(table, limits);
  const float* g = scores.data.data<float>();
  const auto make = [] { return std::vector<std::uint64_t>(); };
  each_row(table, make, [&](std::size_t r, const Row& row, std::vector<std::uint64_t>& keys) {
    const std::span<std::int32_t> kept = decision.keep->room(r);
    if (!limits.rows[r].due) return std::iota(kept.begin(), kept.end(), 0);
    const Protected always = stays(limits, r, row.length);
    KVKEEP_REQUIRE(always.count() <= std::ssize(kept), "flat: ", always.count(), " slots of layer ", row.layer,
                   ", head ", row.head, " always stay, and its budget is ", kept.size(),
                   "; allowed a budget of that many or more (Allocator::spread gives rows other budgets)");
    select({g + row.first, static_cast<std::size_t>(row.length)}, always, keys, kept);
  });
}

}  // namespace kvkeep
