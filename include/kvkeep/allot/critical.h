// SPDX-License-Identifier: Apache-2.0
#pragma once
/// CriticalKV: part of the budget by score, the rest by score times how strongly the slot's value moves the layer's
/// output. Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective" (Feng et al.),
/// two-stage selection; CriticalAdaKV with Heads::adaptive. Differs: protected slots count toward the first stage; a
/// head's output weights are read in blocks, so nothing of size [T, hidden] exists; the scores are not changed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {

struct CriticalOptions {
  enum class Heads : std::uint8_t {
    equal,     ///< every head keeps the budget
    adaptive,  ///< heads keep as many slots as AdaptiveHeads gives them (CriticalAdaKV)
  };
  double first_stage = 0.5;  ///< share of a row's budget that the score alone decides, [0, 1], rounded to millionths
  Heads heads = Heads::equal;
  double safeguard = 0.2;  ///< AdaptiveHeadsOptions::safeguard, Heads::adaptive only

  void describe(Fields& f) {
    f.real("first_stage", first_stage, {0, 1},
           "share of the budget that the score alone decides, protected slots included");
    f.choice("heads", heads, {{"equal", Heads::equal}, {"adaptive", Heads::adaptive}},
             "every head keeps the budget, or as much of the layer's as `adakv` would give it");
    f.real("safeguard", safeguard, {0, 1},
           "with heads=adaptive: share of the budget that every head keeps by its own ranking");
  }
};

/// Added to scores before they are multiplied, so that a slot without attention still counts by its value.
inline constexpr float kCriticalEpsilon = 1e-4F;

/// Per row: protected slots and the best others by score, max(protected, floor(first_stage * budget)) in total; then
/// the best of the rest by (score + 1e-4) * v[t], where v[t] = mean over the group's query heads of the L1 norm of
/// W_o,head * V[t]. Ties: the larger slot; NaN, and a slot whose v[t] is not finite, rank last. Scores must not be
/// negative and must mean the same in every head (shares of attention do).
class Critical final : public AllocatorOf<CriticalOptions> {
 public:
  static constexpr AllocatorTraits traits{
      .name = "criticalkv",
      .what = "half of the budget by score, the rest by score times the size of the value after the output projection",
      .source = "CriticalKV (Feng et al.)",
      .scorer = "snapkv",
      .probability = true};
  static void context(Fields& f) {
    f.values_weighed = true;
    f.uneven_heads = f.uneven_heads || f.says("allocator", "heads", "adaptive");
  }

  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return "critical"; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, false); }
  void spread(const Evidence& evidence, std::span<const std::int32_t> least,
              std::vector<RowLimit>& rows) const override;
  [[nodiscard]] bool ragged() const override { return options_.heads == CriticalOptions::Heads::adaptive; }
  [[nodiscard]] AcrossHeads across_heads() const override {
    return ragged() ? AcrossHeads::scores : AcrossHeads::nothing;
  }
  [[nodiscard]] Needs needs() const override { return {.values = true, .output_projection = true}; }

  /// Throws InvalidArgument if W_o of a layer is missing or the values are of a dtype that cannot be read.
  /// Cost: 2 * Hq * T * Dv * hidden flop per layer, for rows that are cut. Workspace: one byte per slot of the event,
  /// and per thread workspace_bytes(longest row, Dv). Rows run in parallel; equal values get bit-identical weights,
  /// wherever they are stored.
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override;

  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t length, std::int64_t value_dim);
};

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

inline std::int64_t Critical::workspace_bytes(std::int64_t length, std::int64_t value_dim) {
  const std::int64_t width = cpu::panel_width();
  return 4 * (critical_detail::kPanels * width * (value_dim + critical_detail::kTile + 1) +
              (cpu::kPanelKeys + 1) * value_dim + length * (width / 2 + 2)) +
         8 * length;
}

inline void Critical::spread(const Evidence& evidence, std::span<const std::int32_t>,
                             std::vector<RowLimit>& rows) const {
  if (ragged()) cpu::due_together(evidence, rows);
}

inline void Critical::allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention,
                            Decision& decision) const {
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
    if (row.remote()) return;
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
