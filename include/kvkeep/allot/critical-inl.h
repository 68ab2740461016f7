#pragma once
// Bodies of critical.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {
namespace critical_detail {

inline constexpr std::int64_t kPanels = 8;  ///< panels of output weights that share one read of a value
inline constexpr std::int64_t kTile = 96;   ///< slots whose products are held at once

/// Buffers of one thread.
struct Scratch {
  std::vector<float> panels;        ///< [kPanels, Dv, width] output weights, one hidden unit per lane
  std::vector<float> products;      ///< [kPanels, kTile, width]
  std::vector<float> top;           ///< [kPanels, width] unused output of panel_logits
  std::vector<float> widened;       ///< [kPanelKeys, Dv]
  std::vector<float> weights;       ///< [Dv] of one hidden unit
  std::vector<float> lanes;         ///< [T, width / 2] sums of absolute products
  std::vector<float> sizes;         ///< [T] the result
  std::vector<float> ranks;         ///< [T] what the second stage ranks by
  std::vector<std::uint64_t> keys;  ///< [T]

  void fit(std::int64_t length, std::int64_t dim) {
    const std::int64_t width = cpu::panel_width();
    const auto grow = [](auto& v, std::int64_t n) {
      if (v.size() < static_cast<std::size_t>(n)) v.resize(static_cast<std::size_t>(n));
    };
    grow(panels, kPanels * dim * width);
    grow(products, kPanels * kTile * width);
    grow(top, kPanels * width);
    grow(widened, cpu::kPanelKeys * dim);
    grow(weights, dim);
    grow(lanes, length * width / 2);
    grow(sizes, length);
    grow(ranks, length);
    keys.reserve(static_cast<std::size_t>(length));
  }
};

/// Hidden units [first, first + count) of one query head's output weights as panels; lanes after the last unit hold
/// zeros.
inline void gather_weights(const Tensor& projection, std::int64_t first, std::int64_t count, std::int64_t head,
                           std::int64_t dim, Scratch& s) {
  const std::int64_t width = cpu::panel_width(), panels = (count + width - 1) / width;
  std::fill_n(s.panels.begin(), panels * dim * width, 0.0F);
  const auto* base = static_cast<const std::byte*>(projection.bytes());
  const auto bytes = projection.element_size();
  for (std::int64_t n = 0; n < count; ++n) {
    cpu::widen(base + ((first + n) * projection.size(1) + head * dim) * bytes, projection.dtype(), dim,
               s.weights.data());
    float* lane = s.panels.data() + n / width * dim * width + n % width;
    for (std::int64_t d = 0; d < dim; ++d) lane[d * width] = s.weights[static_cast<std::size_t>(d)];
  }
}

/// s.sizes[t] = mean over the group of the L1 norm of W_o,head * V[t].
inline void value_sizes(const Evidence& evidence, const Row& row, const Tensor& projection, Scratch& s) {
  const std::int64_t dim = evidence.spec.value_dim, length = row.length, group = evidence.spec.group(),
                     hidden = projection.size(0);
  const std::int64_t width = cpu::panel_width(), block = kPanels * width;
  s.fit(length, dim);
  const cpu::Keys values{row.values, evidence.table.value_dtype, dim};
  std::fill_n(s.lanes.begin(), length * width / 2, 0.0F);
  for (std::int64_t g = 0; g < group; ++g)
    for (std::int64_t first = 0; first < hidden; first += block) {
      const std::int64_t count = std::min(block, hidden - first), panels = (count + width - 1) / width;
      gather_weights(projection, first, count, row.head * group + g, dim, s);
      for (std::int64_t t = 0; t < length; t += kTile) {
        const std::int64_t slots = std::min(kTile, length - t);
        cpu::panel_logits(width, values, t, t + slots, s.panels.data(), panels, kTile * width, s.products.data(),
                          s.top.data(), s.widened.data());
        for (std::int64_t p = 0; p < panels; ++p)
          cpu::panel_sizes(s.products.data() + p * kTile * width, slots, s.lanes.data() + t * width / 2);
      }
    }
  cpu::fold_lanes(width, s.lanes.data(), length, s.sizes.data());
  std::transform(s.sizes.begin(), s.sizes.begin() + length, s.sizes.begin(),
                 [group](float x) { return x / static_cast<float>(group); });
}

inline const Tensor& projection_of(const Evidence& evidence, std::int32_t layer) {
  const auto l = static_cast<std::size_t>(layer);
  KVKEEP_REQUIRE(l < evidence.output_projections.size() && evidence.output_projections[l].defined(),
                 "critical: W_o of layer ", layer,
                 " is missing; allowed a contiguous f32, f16 or bf16 [hidden, Hq * Dv] for each layer that is cut");
  return evidence.output_projections[l];
}

}  // namespace critical_detail

KVKEEP_INLINE std::int64_t Critical::workspace_bytes(std::int64_t length, std::int64_t value_dim) {
  const std::int64_t width = cpu::panel_width();
  return 4 * (critical_detail::kPanels * width * (value_dim + critical_detail::kTile + 1) +
              (cpu::kPanelKeys + 1) * value_dim + length * (width / 2 + 2)) +
         8 * length;
}

KVKEEP_INLINE void Critical::spread(const Evidence& evidence, std::span<const std::int32_t>,
                                    std::vector<RowLimit>& rows) const {
  if (ragged()) cpu::due_together(evidence, rows);
}

KVKEEP_INLINE void Critical::allot(const Evidence& evidence, const Limits& limits, const Scores& scores,
                                   WindowAttention, Decision& decision) const {
  require_host("critical", evidence.table.device);
  const RowTable& table = evidence.table;
  KVKEEP_REQUIRE(is_scorable(table.value_dtype), "critical: values are ", table.value_dtype,
                 "; allowed f32, f16, bf16");
  for (const RowGroup& group : table.groups) static_cast<void>(critical_detail::projection_of(evidence, group.layer));
  const float* g = scores.data.data<float>();
  std::vector<std::uint8_t>
      marks;  // 1: stays; with Heads::adaptive, the slots AdaptiveHeads keeps, until a row has counted them
  if (ragged())
    marks = cpu::mark_across_heads(evidence, limits, options_.safeguard, g);
  else
    marks.assign(static_cast<std::size_t>(table.slots), 1);
  const auto make = [] { return critical_detail::Scratch(); };
  each_due_row(table, limits, make, [&](std::size_t r, const Row& row, critical_detail::Scratch& scratch) {
    if (row.elsewhere()) return;
    const RowLimit& limit = limits.rows[r];
    std::uint8_t* own = marks.data() + row.first;
    const auto budget =
        ragged() ? static_cast<std::int32_t>(std::count(own, own + row.length, std::uint8_t{1})) : limit.budget;
    if (budget >= row.length) return;
    const std::span row_scores{g + row.first, static_cast<std::size_t>(row.length)};
    critical_detail::value_sizes(evidence, row, critical_detail::projection_of(evidence, row.layer), scratch);
    const std::int32_t guarded = limit.guarded.count(),
                       first = std::max(guarded, share_of(options_.first_stage, budget));
    cpu::mark_guarded(row.length, limit.guarded, own);
    cpu::mark_best(row_scores, first - guarded, scratch.keys, own);
    for (std::size_t t = 0; t < row_scores.size(); ++t)
      scratch.ranks[t] = std::isfinite(scratch.sizes[t]) ? (row_scores[t] + kCriticalEpsilon) * scratch.sizes[t]
                                                         : std::numeric_limits<float>::quiet_NaN();
    cpu::mark_best({scratch.ranks.data(), static_cast<std::size_t>(row.length)}, budget - first, scratch.keys, own);
  });
  decision.keep = cpu::kept_by_marks(table, marks.data());
}

}  // namespace kvkeep
