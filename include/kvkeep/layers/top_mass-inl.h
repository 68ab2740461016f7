#pragma once
// Bodies of top_mass.h: compiled by src/layers, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/layers/top_mass.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
namespace top_mass_detail {

inline constexpr std::size_t kRounding = 8;  ///< counts are multiples of it

/// Slots of one row that stay, ascending. A NaN sum ranks last and holds nothing.
inline std::vector<std::int32_t> slots_of(const float* sums, std::int32_t length, const TopMassOptions& options) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(length));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, std::ranges::greater(), [sums](std::int32_t t) { return rank_key(sums[t], t); });
  std::size_t count = order.size();
  double held = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!std::isnan(sums[order[i]])) held += static_cast<double>(sums[order[i]]) / options.window;
    if (held < options.mass) continue;
    count = i + 1;
    break;
  }
  if (options.variant == Variant::official)
    count = count / kRounding * kRounding;
  else
    count = std::min(order.size(), (count + kRounding - 1) / kRounding * kRounding);
  order.resize(count);
  if (length > 0) order.push_back(0);
  for (std::int32_t t = std::max(0, length - options.window); t < length; ++t) order.push_back(t);
  std::ranges::sort(order);
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

inline void check(const TopMassOptions& options) {
  KVKEEP_REQUIRE(options.mass > 0 && options.mass <= 1, "top mass: mass; given ", options.mass,
                 "; allowed above 0, up to 1");
  KVKEEP_REQUIRE(options.window >= 1, "top mass: window; given ", options.window, "; allowed 1 or more");
}

}  // namespace top_mass_detail

KVKEEP_INLINE KeepSet keep_top_mass(const RowTable& table, const Tensor& sums, TopMassOptions options,
                                    const Limits* limits) {
  top_mass_detail::check(options);
  KVKEEP_REQUIRE(sums.defined() && sums.dtype() == Dtype::f32 && sums.numel() == table.slots,
                 "top mass: sums; allowed f32 [", table.slots, "], one per slot");
  const float* of_window = sums.data<float>();
  std::vector<std::vector<std::int32_t>> kept(table.rows.size());
  each_row(table, [&](std::size_t r, const Row& row) {
    if (limits == nullptr || limits->rows[r].due) {
      kept[r] = top_mass_detail::slots_of(of_window + row.first, row.length, options);
    } else {
      kept[r].resize(static_cast<std::size_t>(row.length));
      std::iota(kept[r].begin(), kept[r].end(), 0);
    }
  });
  KeepSet keep;
  keep.indptr.push_back(0);
  for (const auto& row : kept) keep.indptr.push_back(keep.indptr.back() + static_cast<std::int64_t>(row.size()));
  keep.slots = empty({keep.indptr.back()}, Dtype::i32);
  std::int32_t* slots = keep.slots.data<std::int32_t>();
  for (const auto& row : kept) slots = std::copy(row.begin(), row.end(), slots);
  return keep;
}

KVKEEP_INLINE KeepSet keep_top_mass(const Evidence& evidence, TopMassOptions options) {
  top_mass_detail::check(options);
  const RowTable& table = evidence.table;
  std::vector<RowWindow> windows;
  for (const RowGroup& group : table.groups) {
    KVKEEP_REQUIRE(group.queries.count >= options.window, "top mass: layer ", group.layer, " has ", group.queries.count,
                   " queries; allowed ", options.window, " or more, the window");
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads))
      windows.push_back({row.length == 0 ? 0 : options.window, row.length});
  }
  return keep_top_mass(table, attention_sum(evidence, windows), options);
}

}  // namespace kvkeep
