#pragma once
// Bodies of router.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/finite.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/memory/router.h"
#include "kvkeep/memory/row_zoom.h"
#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/memory_lanes.h"

namespace kvkeep {
namespace router_detail {

inline constexpr Dtype kMark = Dtype::u8;
inline constexpr double kLeastNorm = 1e-8;

inline Tensor marks(const Tensor& like) { return zeros(like.sizes(), kMark); }

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

KVKEEP_INLINE Tensor Router::norms(const SpanStore& spans) const {
  KVKEEP_REQUIRE(spans.kv_heads() > 0 && key_dim() == spans.dim() && query_heads() % spans.kv_heads() == 0,
                 "router: W is for ", query_heads(), " heads of ", key_dim(), " numbers; allowed a multiple of ",
                 spans.kv_heads(), " heads of ", spans.dim());
  const std::int64_t group = query_heads() / spans.kv_heads();
  Tensor all = zeros({query_heads(), spans.size()}, Dtype::f32);
  for (std::int64_t kv = 0; kv < spans.kv_heads(); ++kv) {
    const std::vector<float> own = norms(spans.row(kv), kv * group, group);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(own.size()); ++i)
      all.data<float>()[(kv * group + i % group) * spans.size() + i / group] = own[static_cast<std::size_t>(i)];
  }
  return all;
}

KVKEEP_INLINE Tensor Router::relevance(const SpanStore& spans, const Tensor& norms, const Tensor& queries) const {
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.size(1) == query_heads() && queries.size(2) == key_dim() &&
                     norms.sizes() == Shape({query_heads(), spans.size()}),
                 "router: queries or norms have the wrong shape; allowed [n, ", query_heads(), ", ", key_dim(),
                 "] and norms() of the same spans");
  const std::int64_t n = queries.size(0), group = query_heads() / spans.kv_heads();
  const Tensor q = as<float>(queries);
  Tensor a = zeros({n, query_heads(), spans.size()}, Dtype::f32);
  cpu::ZoomScratch scratch;
  for (std::int64_t i = 0; i < n * spans.kv_heads(); ++i) {
    const std::int64_t first = i % spans.kv_heads() * group, at = i / spans.kv_heads() * query_heads() + first;
    cpu::router_relevance(*this, spans.row(i % spans.kv_heads()), first, group,
                          {norms.data<float>() + first * spans.size(), 1, spans.size()},
                          q.data<float>() + at * key_dim(), a.data<float>() + at * spans.size(), scratch);
  }
  return a;
}

KVKEEP_INLINE Tensor Router::wanted(const Tensor& relevance) const {
  const Tensor shares = as<float>(relevance), out = router_detail::marks(relevance);
  const std::int64_t spans = relevance.size(-1);
  for (std::int64_t i = 0; i < shares.numel(); ++i)
    out.data<std::uint8_t>()[i] = shares.data<float>()[i] > threshold(i / spans % query_heads()) ? 1 : 0;
  return out;
}

KVKEEP_INLINE Tensor estimated_mass(const Tensor& coarse, const OpenAttention& dense) {
  const Tensor logits = contiguous(coarse), log_mass = dense.log_mass();
  Tensor mass = zeros(coarse.sizes(), Dtype::f32);
  const std::int64_t spans = coarse.size(2), rows = coarse.size(0) * coarse.size(1);
  for (std::int64_t i = 0; i < rows; ++i)
    cpu::coarse_mass(logits.data<float>() + i * spans, spans, log_mass.data<float>()[i],
                     mass.data<float>() + i * spans);
  return mass;
}

KVKEEP_INLINE Tensor wanted_by_mass(const Tensor& mass, const ZoomOptions& options) {
  KVKEEP_REQUIRE(options.rule != ZoomOptions::Rule::learned,
                 "router: the rule is learned; allowed mass or coverage without a Router");
  const Tensor m = contiguous(mass), wanted = router_detail::marks(mass);
  const std::int64_t spans = mass.size(-1), rows = spans == 0 ? 0 : mass.numel() / spans;
  parallel_for(0, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      cpu::want_by_mass({m.data<float>() + i * spans, static_cast<std::size_t>(spans)}, options,
                        wanted.data<std::uint8_t>() + i * spans);
  });
  return wanted;
}

KVKEEP_INLINE Tensor within_budget(const Tensor& relevance, const Tensor& wanted, const SpanStore& spans,
                                   const ZoomBudget& budget, ZoomOptions::Heads heads) {
  KVKEEP_REQUIRE(relevance.dim() == 3 && relevance.sizes() == wanted.sizes() && relevance.size(2) == spans.size() &&
                     relevance.size(1) >= spans.kv_heads() && relevance.size(1) % spans.kv_heads() == 0 &&
                     relevance.dtype() == Dtype::f32 && wanted.dtype() == router_detail::kMark,
                 "zoom budget: relevance or marks have the wrong shape or dtype; allowed f32 and u8 [n, Hq, ",
                 spans.size(), "] with Hq a multiple of ", spans.kv_heads());
  const std::int64_t n = relevance.size(0), all = relevance.size(1), group = all / spans.kv_heads(),
                     count = spans.size();
  const Tensor keys = contiguous(relevance), asked = contiguous(wanted), zoomed = router_detail::marks(relevance);
  parallel_for(0, n * spans.kv_heads(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * group * count;
      static_cast<void>(cpu::open_within(spans.row(i % spans.kv_heads()), keys.data<float>() + at,
                                         asked.data<std::uint8_t>() + at, group, budget, heads,
                                         zoomed.data<std::uint8_t>() + at));
    }
  });
  return zoomed;
}

}  // namespace kvkeep
