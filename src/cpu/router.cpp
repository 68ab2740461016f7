#include "kvkeep/memory/router.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/error.h"

namespace kvkeep {
namespace {

constexpr ScalarType kMark = c10::ScalarType::Byte;
constexpr double kLeastNorm = 1e-8;

Tensor marks(const Tensor& like) { return at::zeros(like.sizes(), at::TensorOptions().dtype(kMark)); }

/// Spans by descending key, then ascending index.
std::vector<std::int64_t> by_key(std::span<const float> keys) {
  std::vector<std::int64_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::int64_t a, std::int64_t b) { return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)]; });
  return order;
}

void mark_coverage(std::span<const float> mass, const ZoomOptions& o, std::uint8_t* wanted) {
  const double all = std::accumulate(mass.begin(), mass.end(), 0.0);
  double held = 0;
  for (const std::int64_t s : by_key(mass)) {
    const double share = mass[static_cast<std::size_t>(s)];
    if (held >= o.coverage * all || share < o.coverage_floor) return;
    wanted[s] = 1;
    held += share;
  }
}

/// Walks the spans that one of `heads` rows of marks wants; a span's cost is charged once. [heads, spans] of one query.
void walk(const float* relevance, const std::uint8_t* wanted, std::int64_t heads, std::int64_t spans, const ZoomBudget& budget, bool share, const std::vector<double>& cost, std::uint8_t* zoomed) {
  constexpr float kNobody = -1;  // below any relevance
  std::vector<float> keys(static_cast<std::size_t>(spans), kNobody);
  for (std::int64_t i = 0; i < heads * spans; ++i)
    if (wanted[i] != 0) keys[static_cast<std::size_t>(i % spans)] = std::max(keys[static_cast<std::size_t>(i % spans)], relevance[i]);
  double used = budget.resident;
  for (const std::int64_t s : by_key(keys)) {
    if (keys[static_cast<std::size_t>(s)] == kNobody) return;
    if (used + cost[static_cast<std::size_t>(s)] > budget.entries) continue;
    used += cost[static_cast<std::size_t>(s)];
    for (std::int64_t h = 0; h < heads; ++h) zoomed[h * spans + s] = share ? std::uint8_t{1} : wanted[h * spans + s];
  }
}

}  // namespace

std::vector<std::string> ZoomOptions::problems() const {
  std::vector<std::string> found;
  if (!(mass >= 0 && mass <= 1)) found.push_back(text("mass: ", mass, "; allowed 0 to 1"));
  if (!(coverage >= 0 && coverage <= 1)) found.push_back(text("coverage: ", coverage, "; allowed 0 to 1"));
  if (!(coverage_floor >= 0 && coverage_floor <= 1)) found.push_back(text("coverage_floor: ", coverage_floor, "; allowed 0 to 1"));
  return found;
}

Router::Router(const Tensor& projections, const Tensor& thresholds) {
  require(projections.defined() && projections.dim() == 3 && projections.numel() > 0 && projections.device().is_cpu() && is_scorable(projections.scalar_type()),
          "router: W does not fit; allowed f32, f16 or bf16 [Hq, d', D] on the CPU");
  require(thresholds.defined() && thresholds.dim() == 1 && thresholds.size(0) == projections.size(0) && thresholds.device().is_cpu() && is_scorable(thresholds.scalar_type()),
          "router: tau does not fit; allowed f32, f16 or bf16 [", projections.size(0), "] on the CPU, one for each head of W");
  require(at::isfinite(projections).all().item<bool>() && at::isfinite(thresholds).all().item<bool>(), "router: W or tau hold NaN or infinity; allowed finite numbers");
  projections_ = projections.to(kFloat32).contiguous();
  thresholds_ = thresholds.to(kFloat32).contiguous();
}

Tensor Router::norms(const SpanStore& spans) const {
  require(projections_.size(2) == spans.dim() && query_heads() % spans.kv_heads() == 0, "router: W is for ", query_heads(), " heads of ", projections_.size(2), " numbers; allowed a multiple of ",
          spans.kv_heads(), " heads of ", spans.dim());
  const std::int64_t group = query_heads() / spans.kv_heads(), inner = projections_.size(1);
  const Tensor w = projections_.view({spans.kv_heads(), group * inner, spans.dim()});
  const Tensor projected = at::matmul(w, spans.coarse(SpanStore::kKeys).transpose(1, 2)).view({query_heads(), inner, spans.size()});
  return projected.norm(2, {1}).clamp_min(kLeastNorm).reciprocal();
}

Tensor Router::relevance(const SpanStore& spans, const Tensor& norms, const Tensor& queries) const {
  require(queries.dim() == 3 && queries.size(1) == query_heads() && queries.size(2) == projections_.size(2) && norms.sizes() == at::IntArrayRef({query_heads(), spans.size()}),
          "router: queries or norms do not fit; allowed [n, ", query_heads(), ", ", projections_.size(2), "] and norms() of the same spans");
  const std::int64_t n = queries.size(0), group = query_heads() / spans.kv_heads(), dim = spans.dim();
  const Tensor q = queries.to(kFloat32).permute({1, 2, 0});                                                              // [Hq, D, n]
  const Tensor turned = at::matmul(projections_.transpose(1, 2), at::matmul(projections_, q));                           // W^T W q
  const Tensor stacked = turned.view({spans.kv_heads(), group, dim, n}).permute({0, 1, 3, 2}).reshape({spans.kv_heads(), group * n, dim});
  const Tensor products = at::matmul(stacked, spans.coarse(SpanStore::kKeys).transpose(1, 2)).view({query_heads(), n, spans.size()});
  Tensor a = (products * (norms / std::sqrt(static_cast<double>(projections_.size(1)))).unsqueeze(1)).permute({1, 0, 2}).contiguous();
  float* out = a.data_ptr<float>();
  for (std::int64_t i = 0; i < n * query_heads(); ++i)
    for (std::int64_t s = 0; s < spans.size(); ++s, ++out) *out = static_cast<float>(1 / (1 + std::exp(-(static_cast<double>(*out) + spans.log_length()[static_cast<std::size_t>(s)]))));
  return a;
}

Tensor Router::wanted(const Tensor& relevance) const { return (relevance > thresholds_.unsqueeze(1)).to(kMark); }

Tensor estimated_mass(const Tensor& coarse, const OpenAttention& dense) {
  if (coarse.numel() == 0) return coarse.clone();
  const Tensor all = at::logaddexp(at::logsumexp(coarse, {2}), dense.log_mass());
  return (coarse - all.unsqueeze(2)).exp();
}

Tensor wanted_by_mass(const Tensor& mass, const ZoomOptions& options) {
  require(options.rule != ZoomOptions::Rule::learned, "router: the rule is learned; allowed mass or coverage where there is no Router");
  if (options.rule == ZoomOptions::Rule::mass) return (mass.to(c10::ScalarType::Double) > options.mass).to(kMark);
  const Tensor m = mass.contiguous(), wanted = marks(mass);
  const std::int64_t spans = mass.size(-1), rows = spans == 0 ? 0 : mass.numel() / spans;
  at::parallel_for(0, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) mark_coverage({m.const_data_ptr<float>() + i * spans, static_cast<std::size_t>(spans)}, options, wanted.data_ptr<std::uint8_t>() + i * spans);
  });
  return wanted;
}

Tensor within_budget(const Tensor& relevance, const Tensor& wanted, const SpanStore& spans, const ZoomBudget& budget, ZoomOptions::Heads heads) {
  require(relevance.dim() == 3 && relevance.sizes() == wanted.sizes() && relevance.size(2) == spans.size() && relevance.size(1) >= spans.kv_heads() && relevance.size(1) % spans.kv_heads() == 0 &&
              relevance.scalar_type() == kFloat32 && wanted.scalar_type() == kMark,
          "zoom budget: relevance or marks do not fit; allowed f32 and u8 [n, Hq, ", spans.size(), "] with Hq a multiple of ", spans.kv_heads());
  const std::int64_t n = relevance.size(0), all = relevance.size(1), group = all / spans.kv_heads(), count = spans.size();
  const Tensor keys = relevance.contiguous(), asked = wanted.contiguous(), zoomed = marks(relevance);
  const std::int64_t walkers = budget.per_head ? all : spans.kv_heads(), together = budget.per_head ? 1 : group;
  std::vector<std::vector<double>> costs(static_cast<std::size_t>(spans.kv_heads()));
  for (std::int64_t kv = 0; kv < spans.kv_heads(); ++kv)
    for (std::int64_t s = 0; s < count; ++s)
      costs[static_cast<std::size_t>(kv)].push_back(budget.per_head ? spans.spans()[static_cast<std::size_t>(s)].length() - 1 : spans.zoom_entries(s, kv));
  at::parallel_for(0, n * walkers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * together * count;
      walk(keys.const_data_ptr<float>() + at, asked.const_data_ptr<std::uint8_t>() + at, together, count, budget, heads == ZoomOptions::Heads::group, costs[static_cast<std::size_t>(i % walkers * together / group)],
           zoomed.data_ptr<std::uint8_t>() + at);
    }
  });
  return zoomed;
}

}  // namespace kvkeep
