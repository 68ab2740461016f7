// SPDX-License-Identifier: Apache-2.0
#pragma once
/// PyramidKV: early layers keep more slots than late ones. Source: "PyramidKV: Dynamic KV Cache Compression based on
/// Pyramidal Information Funneling" (Cai et al.), the linear profile. Differs: budgets follow from the policy's budget
/// alone, not from the cache's current length, so they stay the same from event to event; they add up exactly; none
/// falls below what the scorer never drops; they include the window's slots.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/strict_math.h"

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
/// this cache holds them or not (LayerKind::full and `remote`).
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

namespace pyramid_detail {

__extension__ typedef __int128 Wide;  // budgets times layers times millionths

/// floor(whole * part[i] / divisor) each, plus one for the largest remainders (ties: the lower index) until the sum is
/// `total`.
inline std::vector<std::int64_t> largest_remainder(Wide whole, const std::vector<Wide>& part, Wide divisor,
                                                   std::int64_t total) {
  std::vector<std::int64_t> out(part.size());
  std::vector<Wide> remainder(part.size());
  for (std::size_t i = 0; i < part.size(); ++i) {
    out[i] = static_cast<std::int64_t>(whole * part[i] / divisor);
    remainder[i] = whole * part[i] % divisor;
  }
  std::vector<std::size_t> order(part.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return remainder[a] > remainder[b]; });
  const std::int64_t left = total - std::accumulate(out.begin(), out.end(), std::int64_t{0});
  for (std::int64_t i = 0; i < left; ++i) ++out[order[static_cast<std::size_t>(i)]];
  return out;
}

}  // namespace pyramid_detail

inline void Pyramid::check(AllocatorContext& policy) const {
  require_own_form(traits.name, policy, false);
  const std::int64_t keeps = std::int64_t{policy.sink} + policy.newest;
  KVKEEP_REQUIRE(keeps <= INT32_MAX, "policy: sink + the scorer's window is ", keeps,
                 " with allocator pyramidkv; allowed at most ", INT32_MAX);
  const auto least = static_cast<std::int32_t>(keeps);
  Budget& b = policy.budget;
  KVKEEP_REQUIRE(b.unit != Budget::Unit::slots || b.slots >= least, "policy: budget is ", b.slots,
                 " with allocator pyramidkv; allowed at least ", least,
                 ", which every layer keeps: sink + the scorer's window");
  b.least = std::max(b.least, least);
}

inline std::vector<std::int32_t> pyramid_budgets(std::int32_t layers, std::int32_t budget, double beta,
                                                 std::int32_t least) {
  KVKEEP_REQUIRE(budget >= least, "pyramid: the budget is ", budget, " slots per row; allowed at least the ", least,
                 " that every layer keeps (sinks and the scorer's window)");
  if (layers == 1) return {budget};
  constexpr std::int64_t kParts = 1'000'000;
  const auto b = std::llround(beta * static_cast<double>(kParts));
  // Layer l: budget * ((2 beta - 1) (layers - 1) - 2 l (beta - 1)) / (beta (layers - 1)).
  std::vector<pyramid_detail::Wide> profile;
  for (std::int64_t l = 0; l < layers; ++l)
    profile.push_back(pyramid_detail::Wide{2 * b - kParts} * (layers - 1) - pyramid_detail::Wide{2 * l} * (b - kParts));
  const std::int64_t total = std::int64_t{layers} * budget;
  std::vector<std::int64_t> slots =
      pyramid_detail::largest_remainder(budget, profile, pyramid_detail::Wide{b} * (layers - 1), total);

  std::int64_t added = 0, excess = 0;
  std::vector<pyramid_detail::Wide> above;
  for (std::int64_t& s : slots) {
    added += std::max<std::int64_t>(0, least - s);
    s = std::max<std::int64_t>(s, least);
    above.push_back(s - least);
    excess += s - least;
  }
  if (added > 0) {  // at most the whole excess, so no layer falls below its bound and one round is enough
    const std::vector<std::int64_t> taken = pyramid_detail::largest_remainder(added, above, excess, added);
    for (std::size_t l = 0; l < slots.size(); ++l) slots[l] -= taken[l];
  }
  return {slots.begin(), slots.end()};
}

inline void Pyramid::spread(const Evidence& evidence, std::span<const std::int32_t> least,
                            std::vector<RowLimit>& rows) const {
  const std::vector<LayerSpec>& layers = evidence.spec.layers;
  const auto counts = [](const LayerSpec& layer) {
    return layer.kind == LayerKind::full || layer.kind == LayerKind::remote;
  };
  const auto count = static_cast<std::int32_t>(std::count_if(layers.begin(), layers.end(), counts));
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>>
      known;  // sequences mostly have the same budget
  for (std::size_t g = 0; g < evidence.table.groups.size(); ++g) {
    const RowGroup& group = evidence.table.groups[g];
    const auto first = static_cast<std::size_t>(group.first_row);
    const std::int32_t budget = rows[first].budget;
    auto& budgets = known[{budget, least[g]}];
    if (budgets.empty()) budgets = pyramid_budgets(count, budget, options_.beta, least[g]);
    const auto place = static_cast<std::size_t>(std::count_if(layers.begin(), layers.begin() + group.layer, counts));
    for (std::size_t r = first; r < first + static_cast<std::size_t>(evidence.spec.kv_heads); ++r)
      rows[r] = {budgets[place], evidence.table.rows[r].length > budgets[place], {}};
  }
}

}  // namespace kvkeep
