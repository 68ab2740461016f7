// SPDX-License-Identifier: Apache-2.0
#include "kvlab/span_memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/row.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::lm {
namespace {

constexpr std::int64_t kKeysAtOnce = 64;  ///< rows that all heads of a group read while they are in a CPU cache

void check_spans(std::span<const Span> spans, std::int64_t tokens) {
  for (const Span& s : spans)
    KVKEEP_REQUIRE(s.begin >= 0 && s.length() >= 1 && s.end <= tokens, "span store: a span from ", s.begin, " to ",
                   s.end, "; allowed spans within ", tokens, " tokens");
  std::vector<Span> ordered(spans.begin(), spans.end());
  std::ranges::sort(ordered, {}, &Span::begin);
  for (std::size_t i = 1; i < ordered.size(); ++i)
    KVKEEP_REQUIRE(ordered[i - 1].end <= ordered[i].begin, "span store: spans ", ordered[i - 1].begin, " to ",
                   ordered[i - 1].end, " and ", ordered[i].begin, " to ", ordered[i].end,
                   " overlap; allowed disjoint spans");
}

/// Softmaxes of the heads of a group, starting at head `head` of query `query`.
cpu::OpenHeads open_at(OpenAttention& open, std::int64_t query, std::int64_t head) {
  const std::int64_t at = query * open.top.size(1) + head, dim = open.out.size(2);
  return {open.top.data<float>() + at, open.sum.data<float>() + at, open.out.data<float>() + at * dim};
}

void check_queries(const char* operation, const kvkeep::Tensor& queries, std::int64_t kv_heads, std::int64_t dim) {
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.device().is_cpu() && is_scorable(queries.dtype()) &&
                     queries.size(1) >= kv_heads && queries.size(1) % kv_heads == 0 && queries.size(2) == dim,
                 operation, ": queries have the wrong shape, dtype or device; allowed f32, f16 or bf16 [n, Hq, ", dim,
                 "] on the CPU with Hq a multiple of ", kv_heads);
}

kvkeep::Tensor marks(const kvkeep::Tensor& like) { return zeros(like.sizes(), Dtype::u8); }

}  // namespace

SpanStore::SpanStore(const kvkeep::Tensor& keys, const kvkeep::Tensor& values, std::span<const float> surprisal,
                     std::vector<Span> spans, const FactorOptions& options, const RankGates* gates)
    : spans_(std::move(spans)) {
  KVKEEP_REQUIRE(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.size(2) >= 1 &&
                     keys.device().is_cpu() && values.device().is_cpu() && is_scorable(keys.dtype()) &&
                     is_scorable(values.dtype()),
                 "span store: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  KVKEEP_REQUIRE(keys.size(1) == static_cast<std::int64_t>(surprisal.size()), "span store: ", keys.size(1),
                 " tokens with ", surprisal.size(), " surprisals; allowed one each");
  check_spans(spans_, keys.size(1));
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> indptr{0};
  std::vector<float> weights;
  for (const Span& s : spans_) {
    for (std::int32_t t = s.begin; t < s.end; ++t)
      slots.push_back(t), weights.push_back(surprisal[static_cast<std::size_t>(t)]);
    indptr.push_back(static_cast<std::int64_t>(slots.size()));
  }
  const auto alone = [](const kvkeep::Tensor& t) {
    return contiguous(t).reshaped({1, t.size(0), t.size(1), t.size(2)});
  };  // a batch of one
  const kvkeep::Tensor k = alone(keys), v = alone(values);
  std::vector<RowFold> folds;
  for (std::int64_t h = 0; h < keys.size(0); ++h)
    folds.push_back({.keys = dense_address(k, 0, h),
                     .values = dense_address(v, 0, h),
                     .key_dtype = k.dtype(),
                     .value_dtype = v.dtype(),
                     .slots = slots,
                     .indptr = indptr,
                     .weights = weights,
                     .label = {.head = static_cast<std::int32_t>(h)}});
  FoldTrace trace;
  rows_ = fold(folds, keys.size(2), options, gates, &trace);

  const std::int64_t heads = kv_heads();
  const auto by_span = [&](const std::vector<double>& numbers) {  // the trace is by head, then span
    kvkeep::Tensor out = zeros({size(), heads, 2, options.max_rank}, Dtype::f32);
    const std::int64_t width = 2 * std::int64_t{options.max_rank};
    for (std::int64_t i = 0; i < size() * heads; ++i)
      std::copy_n(numbers.begin() + (i % heads * size() + i / heads) * width, width, out.data<float>() + i * width);
    return out;
  };
  singular_values_ = by_span(trace.singular_values);
  if (options.rank == FactorOptions::Rank::gates) gates_ = by_span(trace.gates);
}

kvkeep::Tensor SpanStore::coarse(KvSide side) const {
  kvkeep::Tensor out = zeros({kv_heads(), size(), dim()}, Dtype::f32);
  for (std::int64_t h = 0; h < kv_heads(); ++h)
    cpu::widen(row(h).coarse(side), row(h).dtype(), size() * dim(), out.data<float>() + h * size() * dim());
  return out;
}

kvkeep::Tensor SpanStore::rows(std::int64_t span, KvSide side) const {
  kvkeep::Tensor out = empty({kv_heads(), spans_[static_cast<std::size_t>(span)].length(), dim()}, Dtype::f32);
  for (std::int64_t h = 0; h < kv_heads(); ++h) copy(row(h).rows(span, side), out.select(0, h));
  return out;
}

std::int64_t SpanStore::near_bytes() const {
  // The rows each count the shared logarithms.
  return std::accumulate(rows_.begin(), rows_.end(), 4 * size() * (1 - kv_heads()),
                         [](std::int64_t sum, const SpanRow& r) { return sum + r.near_bytes(); });
}

std::int64_t SpanStore::far_bytes() const {
  return std::accumulate(rows_.begin(), rows_.end(), std::int64_t{0},
                         [](std::int64_t sum, const SpanRow& r) { return sum + r.far_bytes(); });
}

std::int64_t SpanMemory::near_bytes() const {
  const auto bytes = [](const kvkeep::Tensor& t) { return t.numel() * t.element_size(); };
  return bytes(dense_keys) + bytes(dense_values) + spans.near_bytes();
}

SpanMemory fold_prompt(const kvkeep::Tensor& keys, const kvkeep::Tensor& values, std::span<const float> surprisal,
                       Segments segments, const FactorOptions& options, const RankGates* gates) {
  SpanMemory memory;
  memory.spans = SpanStore(keys, values, surprisal, segments.spans, options, gates);
  const std::vector<std::int32_t> dense = segments.dense();
  memory.dense_keys = gather(keys, 1, dense);
  memory.dense_values = gather(values, 1, dense);
  memory.segments = std::move(segments);
  return memory;
}

kvkeep::Tensor closed(const OpenAttention& open) {
  kvkeep::Tensor out = clone(open.out);
  const std::int64_t dim = out.size(2);
  const kvkeep::Tensor sums = contiguous(open.sum);
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    const float all = sums.data<float>()[i / dim];
    float& x = out.data<float>()[i];
    x = all > 0 ? x / all : 0;
  }
  return out;
}

kvkeep::Tensor log_mass(const OpenAttention& open) {
  kvkeep::Tensor mass = clone(open.top);
  const kvkeep::Tensor sums = contiguous(open.sum);
  for (std::int64_t i = 0; i < mass.numel(); ++i) mass.data<float>()[i] += std::log(sums.data<float>()[i]);
  return mass;
}

OpenAttention attend_rows(const kvkeep::Tensor& keys, const kvkeep::Tensor& values, const kvkeep::Tensor& queries,
                          double scale) {
  KVKEEP_REQUIRE(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.device().is_cpu() &&
                     values.device().is_cpu() && is_scorable(keys.dtype()) && is_scorable(values.dtype()),
                 "attention: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  const std::int64_t kv_heads = keys.size(0), rows = keys.size(1), dim = keys.size(2);
  check_queries("attention", queries, kv_heads, dim);
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / kv_heads;
  OpenAttention open{full({n, heads}, -std::numeric_limits<float>::infinity()), zeros({n, heads}, Dtype::f32),
                     zeros({n, heads, dim}, Dtype::f32)};
  const kvkeep::Tensor k = as<float>(keys), v = as<float>(values), q = as<float>(queries);
  const auto factor = static_cast<float>(scale);
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kKeysAtOnce> logits{};
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t query = task / kv_heads, kv = task % kv_heads;
      for (std::int64_t first = 0; first < rows; first += kKeysAtOnce) {
        const std::int64_t count = std::min(kKeysAtOnce, rows - first), at = (kv * rows + first) * dim;
        const cpu::OpenHeads heads_of = open_at(open, query, kv * group);
        for (std::int64_t h = 0; h < group; ++h)
          cpu::merge_rows(k.data<float>() + at, v.data<float>() + at, count, dim,
                          q.data<float>() + (query * heads + kv * group + h) * dim, factor, logits.data(),
                          heads_of.top[h], heads_of.sum[h], heads_of.out + h * dim);
      }
    }
  });
  return open;
}

kvkeep::Tensor coarse_logits(const SpanStore& spans, const kvkeep::Tensor& queries, double scale) {
  check_queries("coarse logits", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads();
  const kvkeep::Tensor q = as<float>(queries);
  kvkeep::Tensor logits = zeros({n, heads, spans.size()}, Dtype::f32);
  cpu::ZoomScratch scratch;
  for (std::int64_t i = 0; i < n * spans.kv_heads(); ++i)  // heads of a group are side by side
    cpu::coarse_logits(spans.row(i % spans.kv_heads()), q.data<float>() + i * group * spans.dim(), group,
                       static_cast<float>(scale), logits.data<float>() + i * group * spans.size(), scratch);
  return logits;
}

void merge_spans(OpenAttention& open, const SpanStore& spans, const kvkeep::Tensor& queries, double scale,
                 const kvkeep::Tensor& coarse, const kvkeep::Tensor& zoomed) {
  check_queries("merge of spans", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads(),
                     kv_heads = spans.kv_heads(), count = spans.size();
  KVKEEP_REQUIRE(
      open.out.sizes() == queries.sizes() && coarse.sizes() == zoomed.sizes() &&
          coarse.sizes() == Shape({n, heads, count}) && coarse.dtype() == Dtype::f32 && zoomed.dtype() == Dtype::u8,
      "merge of spans: softmaxes, logits or marks do not fit; allowed [n, Hq, D], f32 and u8 [n, Hq, ", count, "]");
  const kvkeep::Tensor q = as<float>(queries), logits = contiguous(coarse), marks = contiguous(zoomed);
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    cpu::ZoomScratch scratch;
    for (std::int64_t task = begin; task < end; ++task) {
      const SpanRow& row = spans.row(task % kv_heads);
      const std::uint8_t* own = marks.data<std::uint8_t>() + task * group * count;
      const cpu::OpenHeads softmaxes = open_at(open, task / kv_heads, task % kv_heads * group);
      cpu::merge_coarse(row, logits.data<float>() + task * group * count, own, group, softmaxes, scratch);
      for (std::int64_t s = 0; s < count; ++s) {
        if (!cpu::anyone(own, group, count, s)) continue;
        cpu::merge_opened(row, s, own, q.data<float>() + task * group * row.dim(), group, static_cast<float>(scale),
                          softmaxes, scratch);
      }
    }
  });
}

kvkeep::Tensor router_norms(const Router& router, const SpanStore& spans) {
  KVKEEP_REQUIRE(
      spans.kv_heads() > 0 && router.key_dim() == spans.dim() && router.query_heads() % spans.kv_heads() == 0,
      "router: W is for ", router.query_heads(), " heads of ", router.key_dim(), " numbers; allowed a multiple of ",
      spans.kv_heads(), " heads of ", spans.dim());
  const std::int64_t group = router.query_heads() / spans.kv_heads();
  kvkeep::Tensor all = zeros({router.query_heads(), spans.size()}, Dtype::f32);
  for (std::int64_t kv = 0; kv < spans.kv_heads(); ++kv) {
    const std::vector<float> own = router.norms(spans.row(kv), kv * group, group);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(own.size()); ++i)
      all.data<float>()[(kv * group + i % group) * spans.size() + i / group] = own[static_cast<std::size_t>(i)];
  }
  return all;
}

kvkeep::Tensor relevance(const Router& router, const SpanStore& spans, const kvkeep::Tensor& norms,
                         const kvkeep::Tensor& queries) {
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.size(1) == router.query_heads() && queries.size(2) == router.key_dim() &&
                     norms.sizes() == Shape({router.query_heads(), spans.size()}),
                 "router: queries or norms have the wrong shape; allowed [n, ", router.query_heads(), ", ",
                 router.key_dim(), "] and norms() of the same spans");
  const std::int64_t n = queries.size(0), group = router.query_heads() / spans.kv_heads();
  const kvkeep::Tensor q = as<float>(queries);
  kvkeep::Tensor a = zeros({n, router.query_heads(), spans.size()}, Dtype::f32);
  cpu::ZoomScratch scratch;
  for (std::int64_t i = 0; i < n * spans.kv_heads(); ++i) {
    const std::int64_t first = i % spans.kv_heads() * group, at = i / spans.kv_heads() * router.query_heads() + first;
    cpu::router_relevance(router, spans.row(i % spans.kv_heads()), first, group,
                          {norms.data<float>() + first * spans.size(), 1, spans.size()},
                          q.data<float>() + at * router.key_dim(), a.data<float>() + at * spans.size(), scratch);
  }
  return a;
}

kvkeep::Tensor wanted(const Router& router, const kvkeep::Tensor& relevance) {
  const kvkeep::Tensor shares = as<float>(relevance), out = marks(relevance);
  const std::int64_t spans = relevance.size(-1);
  for (std::int64_t i = 0; i < shares.numel(); ++i)
    out.data<std::uint8_t>()[i] = shares.data<float>()[i] > router.threshold(i / spans % router.query_heads()) ? 1 : 0;
  return out;
}

kvkeep::Tensor estimated_mass(const kvkeep::Tensor& coarse, const OpenAttention& dense) {
  const kvkeep::Tensor logits = contiguous(coarse), log_sums = log_mass(dense);
  kvkeep::Tensor mass = zeros(coarse.sizes(), Dtype::f32);
  const std::int64_t spans = coarse.size(2), rows = coarse.size(0) * coarse.size(1);
  for (std::int64_t i = 0; i < rows; ++i)
    cpu::coarse_mass(logits.data<float>() + i * spans, spans, log_sums.data<float>()[i],
                     mass.data<float>() + i * spans);
  return mass;
}

kvkeep::Tensor wanted_by_mass(const kvkeep::Tensor& mass, const ZoomOptions& options) {
  KVKEEP_REQUIRE(options.rule != ZoomOptions::Rule::learned,
                 "router: the rule is learned; allowed mass or coverage without a Router");
  const kvkeep::Tensor m = contiguous(mass), wanted = marks(mass);
  const std::int64_t spans = mass.size(-1), rows = spans == 0 ? 0 : mass.numel() / spans;
  parallel_for(0, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      cpu::want_by_mass({m.data<float>() + i * spans, static_cast<std::size_t>(spans)}, options,
                        wanted.data<std::uint8_t>() + i * spans);
  });
  return wanted;
}

kvkeep::Tensor within_budget(const kvkeep::Tensor& relevance, const kvkeep::Tensor& wanted, const SpanStore& spans,
                             const cpu::ZoomBudget& budget, ZoomOptions::Heads heads) {
  KVKEEP_REQUIRE(relevance.dim() == 3 && relevance.sizes() == wanted.sizes() && relevance.size(2) == spans.size() &&
                     relevance.size(1) >= spans.kv_heads() && relevance.size(1) % spans.kv_heads() == 0 &&
                     relevance.dtype() == Dtype::f32 && wanted.dtype() == Dtype::u8,
                 "zoom budget: relevance or marks have the wrong shape or dtype; allowed f32 and u8 [n, Hq, ",
                 spans.size(), "] with Hq a multiple of ", spans.kv_heads());
  const std::int64_t n = relevance.size(0), all = relevance.size(1), group = all / spans.kv_heads(),
                     count = spans.size();
  const kvkeep::Tensor keys = contiguous(relevance), asked = contiguous(wanted), zoomed = marks(relevance);
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

}  // namespace kvkeep::lm
