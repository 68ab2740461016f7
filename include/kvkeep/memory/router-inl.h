// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of router.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/router.h"
#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/memory_lanes.h"

namespace kvkeep {
namespace router_detail {

inline constexpr double kLeastNorm = 1e-8;

}  // namespace router_detail

KVKEEP_INLINE void ZoomOptions::describe(Fields& f) {
  f.choice("zoom", rule,
           {{"auto", Rule::automatic}, {"learned", Rule::learned}, {"mass", Rule::mass}, {"coverage", Rule::coverage}},
           "which spans a query opens: by a trained router, by estimated share of attention, or the fewest that hold "
           "`coverage` of what spans draw; auto: learned if there is a router, else mass");
  f.real("mass", mass, {0, 1}, "with zoom=mass: share of attention above which a span opens");
  f.real("coverage", coverage, {0, 1}, "with zoom=coverage: opened spans hold this share of what all spans draw");
  f.real("coverage_floor", coverage_floor, {0, 1},
         "with zoom=coverage: spans below this share of attention stay folded");
  f.choice("zoom_heads", heads, {{"own", Heads::own}, {"group", Heads::group}},
           "a query head reads in full the spans it asked for, or those that any head of its group asked for");
}

KVKEEP_INLINE std::vector<std::string> ZoomOptions::problems() const {
  std::vector<std::string> found;
  if (!(mass >= 0 && mass <= 1)) found.push_back(text("mass: ", mass, "; allowed 0 to 1"));
  if (!(coverage >= 0 && coverage <= 1)) found.push_back(text("coverage: ", coverage, "; allowed 0 to 1"));
  if (!(coverage_floor >= 0 && coverage_floor <= 1))
    found.push_back(text("coverage_floor: ", coverage_floor, "; allowed 0 to 1"));
  return found;
}

KVKEEP_INLINE Router::Router(const Tensor& projections, const Tensor& thresholds) {
  KVKEEP_REQUIRE(projections.defined() && projections.dim() == 3 && projections.numel() > 0 &&
                     projections.device().is_cpu() && is_scorable(projections.dtype()),
                 "router: W has the wrong shape, dtype or device; allowed f32, f16 or bf16 [Hq, d', D] on the CPU");
  KVKEEP_REQUIRE(thresholds.defined() && thresholds.dim() == 1 && thresholds.size(0) == projections.size(0) &&
                     thresholds.device().is_cpu() && is_scorable(thresholds.dtype()),
                 "router: tau has the wrong shape, dtype or device; allowed f32, f16 or bf16 [", projections.size(0),
                 "] on the CPU, one per head of W");
  KVKEEP_REQUIRE(all_finite(projections) && all_finite(thresholds),
                 "router: W or tau hold NaN or infinity; allowed finite numbers");
  projections_ = as<float>(projections);
  thresholds_ = as<float>(thresholds);
}

KVKEEP_INLINE std::vector<float> Router::norms(const SpanRow& spans, std::int64_t first_head,
                                               std::int64_t heads) const {
  std::vector<float> out(static_cast<std::size_t>(spans.size() * heads));
  std::vector<float> keys(static_cast<std::size_t>(spans.size() * spans.dim())),
      projected(static_cast<std::size_t>(inner()));
  cpu::widen(spans.coarse(KvSide::keys), spans.dtype(), spans.size() * spans.dim(), keys.data());
  for (std::int64_t s = 0; s < spans.size(); ++s)
    for (std::int64_t h = 0; h < heads; ++h) {
      cpu::row_dots(projection(first_head + h), inner(), key_dim(), keys.data() + s * key_dim(), projected.data());
      const double squares = std::inner_product(projected.begin(), projected.end(), projected.begin(), 0.0);
      out[static_cast<std::size_t>(s * heads + h)] =
          static_cast<float>(1 / std::max(std::sqrt(squares), router_detail::kLeastNorm));
    }
  return out;
}

}  // namespace kvkeep
