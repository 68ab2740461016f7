// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of row_zoom.h and read_memory.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/memory/opening.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/row_zoom.h"
#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/memory_lanes.h"

namespace kvkeep::cpu {
namespace row_zoom_detail {

inline constexpr std::int64_t kRowsAtOnce = 64;  ///< coarse entries that all heads of a group read while in a CPU cache

/// `count` numbers of any dtype as f32: in place, or in `scratch`.
inline const float* as_floats(const std::byte* at, Dtype dtype, std::int64_t count, Aligned<float>& scratch) {
  if (dtype == Dtype::f32) return reinterpret_cast<const float*>(at);
  if (static_cast<std::int64_t>(scratch.size()) < count) scratch.resize(static_cast<std::size_t>(count));
  widen(at, dtype, count, scratch.data());
  return scratch.data();
}

inline const float* coarse_rows(const SpanRow& spans, KvSide side, std::int64_t first, std::int64_t count,
                                Aligned<float>& scratch) {
  return as_floats(spans.coarse(side) + first * spans.dim() * element_size(spans.dtype()), spans.dtype(),
                   count * spans.dim(), scratch);
}

/// Spans by descending key, NaN last, then ascending index.
inline std::vector<std::int64_t> by_key(std::span<const float> keys, std::vector<std::int64_t> order) {
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [keys](std::int64_t s) { return order_of(keys[static_cast<std::size_t>(s)]); });
  return order;
}

inline void want_coverage(std::span<const float> mass, const ZoomOptions& o, std::uint8_t* wanted) {
  const double all = std::accumulate(mass.begin(), mass.end(), 0.0);
  std::vector<std::int64_t> worth;  // spans below the floor stay folded, whatever they would add
  for (std::size_t s = 0; s < mass.size(); ++s)
    if (!(static_cast<double>(mass[s]) < o.coverage_floor)) worth.push_back(static_cast<std::int64_t>(s));
  double held = 0;
  for (const std::int64_t s : by_key(mass, std::move(worth))) {
    if (o.coverage < 1 && held >= o.coverage * all) return;  // with 1: all of them, even those that rounding loses
    wanted[s] = 1;
    held += mass[static_cast<std::size_t>(s)];
  }
}

/// Walks the spans that any of `heads` rows of marks wants, most relevant first; a span's cost is charged once. [heads,
/// spans]. Returns how many did not fit.
inline std::int64_t walk(const SpanRow& row, const float* relevance, const std::uint8_t* wanted, std::int64_t heads,
                         const ZoomBudget& budget, bool share, std::uint8_t* zoomed) {
  const std::int64_t spans = row.size();
  std::vector<std::int64_t> asked;
  std::vector<float> keys(static_cast<std::size_t>(spans));
  for (std::int64_t s = 0; s < spans; ++s) {
    bool any = false;
    for (std::int64_t h = 0; h < heads; ++h) {
      if (wanted[h * spans + s] == 0) continue;
      const float key = relevance[h * spans + s];
      keys[static_cast<std::size_t>(s)] = any ? std::max(keys[static_cast<std::size_t>(s)], key) : key;
      any = true;
    }
    if (any) asked.push_back(s);
  }
  double used = budget.resident;
  std::int64_t unmet = 0;
  const OpeningCost costs{row.dim(), budget.per_head};
  for (const std::int64_t s : by_key(keys, std::move(asked))) {
    const FoldedSpan& span = row.span(s);
    const double cost = costs.entries(span.factors[0], span.factors[1], span.length);
    if (used + cost > budget.entries) {
      ++unmet;
      continue;
    }
    used += cost;
    for (std::int64_t h = 0; h < heads; ++h) zoomed[h * spans + s] = share ? std::uint8_t{1} : wanted[h * spans + s];
  }
  return unmet;
}

/// Turns logits into weights relative to `top`, which they may raise, and returns their sum; 0 if all are -inf.
inline float weigh(float* logits, std::int64_t count, float& top, float& sum, float* out, std::int64_t dim) {
  const float most = largest(logits, count);
  if (most == -HUGE_VALF) return 0;
  if (most > top) {
    const float shrink = std::exp(top - most);
    sum *= shrink;
    for (std::int64_t d = 0; d < dim; ++d) out[d] *= shrink;
    top = most;
  }
  const float weights = exponentials(logits, count, top);
  sum += weights;
  return weights;
}

/// One opened span; its numbers are widened once for all heads of a group.
struct Opened {
  const SpanFactors& keys;
  const SpanFactors& values;
  const float *key_numbers, *value_numbers;
  const float *coarse_key, *coarse_value;
  std::int64_t length, dim;

  /// scale * (q . (c + (A B)_t)) without forming A B.
  void logits(const float* query, float scale, float* inner, float* out) const {
    if (keys.raw) {
      row_dots(key_numbers, length, dim, query, out);
    } else {
      row_dots(key_numbers + length * keys.rank, keys.rank, dim, query, inner);
      row_dots(key_numbers, length, keys.rank, inner, out);
    }
    float offset = 0;
    if (!keys.raw && keys.centred) row_dots(coarse_key, 1, dim, query, &offset);
    for (std::int64_t t = 0; t < length; ++t) out[t] = scale * (out[t] + offset);
  }

  /// out += (sum of weights) c + (weights A) B.
  void add(const float* weights, float weights_sum, float* inner, float* out) const {
    if (values.raw) return add_rows(value_numbers, length, dim, weights, out);
    if (values.centred) add_rows(coarse_value, 1, dim, &weights_sum, out);
    std::fill_n(inner, values.rank, 0.0F);
    add_rows(value_numbers, length, values.rank, weights, inner);
    add_rows(value_numbers + length * values.rank, values.rank, dim, inner, out);
  }
};

}  // namespace row_zoom_detail

KVKEEP_INLINE void coarse_products(const SpanRow& spans, const float* queries, std::int64_t heads, float* out,
                                   ZoomScratch& scratch) {
  const std::int64_t n = spans.size(), dim = spans.dim();
  for (std::int64_t first = 0; first < n; first += row_zoom_detail::kRowsAtOnce) {
    const std::int64_t count = std::min(row_zoom_detail::kRowsAtOnce, n - first);
    const float* keys = row_zoom_detail::coarse_rows(spans, KvSide::keys, first, count, scratch.coarse);
    for (std::int64_t h = 0; h < heads; ++h) row_dots(keys, count, dim, queries + h * dim, out + h * n + first);
  }
}

KVKEEP_INLINE void coarse_logits(const SpanRow& spans, const float* queries, std::int64_t heads, float scale,
                                 float* out, ZoomScratch& scratch) {
  coarse_products(spans, queries, heads, out, scratch);
  const std::span<const float> lengths = spans.log_length();
  for (std::int64_t h = 0; h < heads; ++h, out += spans.size())
    for (std::size_t s = 0; s < lengths.size(); ++s) out[s] = product(scale, out[s]) + lengths[s];
}

KVKEEP_INLINE void sketch_mass(const SpanRow& spans, const float* queries, std::int64_t heads, float scale,
                               const float* coarse, const float* dense, float* mass, ZoomScratch& scratch) {
  const std::int64_t dim = spans.dim(), n = spans.size(), table = sketch_table_size(dim);
  const SketchedSpans sketched{spans.sketch().signs.data(),
                               reinterpret_cast<const std::uint16_t*>(spans.sketch().sizes.data()),
                               spans.first_tokens().data(), KeySketch::words(dim), n};
  scratch.inner.resize(static_cast<std::size_t>(heads * table));
  scratch.tokens.resize(static_cast<std::size_t>(heads * sketch_window(sketched)));
  scratch.base.resize(static_cast<std::size_t>(heads * (n + 2)));
  float *base = scratch.base.data(), *top = base + heads * n, *factors = top + heads;
  for (std::int64_t h = 0; h < heads; ++h)
    factors[h] = scale * sketch_table(queries + h * dim, dim, scratch.inner.data() + h * table);
  for (std::int64_t i = 0; i < heads * n; ++i)
    base[i] = coarse[i] - spans.log_length()[static_cast<std::size_t>(i % n)];
  sketch_sums(sketched, scratch.inner.data(), factors, base, heads, scratch.tokens.data(), top, mass);
  for (std::int64_t h = 0; h < heads; ++h) {
    float* own = mass + h * n;
    const float factor = share_factor(top[h], std::accumulate(own, own + n, 0.0), dense[h]);
    for (std::int64_t s = 0; s < n; ++s) own[s] *= factor;
  }
}

KVKEEP_INLINE void coarse_mass(const float* logits, std::int64_t spans, float dense, float* mass) {
  std::copy_n(logits, spans, mass);
  const float top = largest(mass, spans);
  if (top == -HUGE_VALF) {
    std::fill_n(mass, spans, 0.0F);
    return;
  }
  const float factor = share_factor(top, exponentials(mass, spans, top), dense);
  for (std::int64_t s = 0; s < spans; ++s) mass[s] *= factor;
}

KVKEEP_INLINE void want_by_mass(std::span<const float> mass, const ZoomOptions& options, std::uint8_t* wanted) {
  if (options.rule == ZoomOptions::Rule::coverage) return row_zoom_detail::want_coverage(mass, options, wanted);
  for (std::size_t s = 0; s < mass.size(); ++s) wanted[s] = static_cast<double>(mass[s]) > options.mass ? 1 : 0;
}

KVKEEP_INLINE void router_relevance(const Router& router, const SpanRow& spans, std::int64_t first_head,
                                    std::int64_t heads, const RouterNorms& norms, const float* queries,
                                    float* relevance, ZoomScratch& scratch) {
  const std::int64_t dim = spans.dim(), inner = router.inner();
  // (W q) . (W k) = (W^T W q) . k: only the coarse keys are read.
  scratch.logits.assign(static_cast<std::size_t>(heads * dim), 0.0F);
  scratch.inner.resize(static_cast<std::size_t>(inner));
  for (std::int64_t h = 0; h < heads; ++h) {
    row_dots(router.projection(first_head + h), inner, dim, queries + h * dim, scratch.inner.data());
    add_rows(router.projection(first_head + h), inner, dim, scratch.inner.data(), scratch.logits.data() + h * dim);
  }
  coarse_products(spans, scratch.logits.data(), heads, relevance, scratch);
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t s = 0; s < spans.size(); ++s) {
      float& a = relevance[h * spans.size() + s];
      a = kvkeep::router_relevance(a, norms.at[s * norms.span_stride + h * norms.head_stride],
                                   static_cast<std::int32_t>(inner), spans.log_length()[static_cast<std::size_t>(s)]);
    }
}

KVKEEP_INLINE std::int64_t open_within(const SpanRow& spans, const float* relevance, const std::uint8_t* wanted,
                                       std::int64_t group, const ZoomBudget& budget, ZoomOptions::Heads heads,
                                       std::uint8_t* zoomed) {
  const std::int64_t together = budget.per_head ? 1 : group;
  std::int64_t unmet = 0;
  for (std::int64_t at = 0; at < group * spans.size(); at += together * spans.size())
    unmet += row_zoom_detail::walk(spans, relevance + at, wanted + at, together, budget,
                                   heads == ZoomOptions::Heads::group, zoomed + at);
  return unmet;
}

KVKEEP_INLINE void merge_coarse(const SpanRow& spans, const float* logits, const std::uint8_t* zoomed,
                                std::int64_t heads, const OpenHeads& open, ZoomScratch& scratch) {
  const std::int64_t n = spans.size(), dim = spans.dim();
  scratch.logits.assign(logits, logits + heads * n);
  for (std::int64_t h = 0; h < heads; ++h) {
    float* own = scratch.logits.data() + h * n;
    for (std::int64_t s = 0; s < n; ++s)
      if (zoomed[h * n + s] != 0) own[s] = -HUGE_VALF;
    if (row_zoom_detail::weigh(own, n, open.top[h], open.sum[h], open.out + h * dim, dim) == 0)
      std::fill_n(own, n, 0.0F);
  }
  for (std::int64_t first = 0; first < n; first += row_zoom_detail::kRowsAtOnce) {
    const std::int64_t count = std::min(row_zoom_detail::kRowsAtOnce, n - first);
    const float* values = row_zoom_detail::coarse_rows(spans, KvSide::values, first, count, scratch.coarse);
    for (std::int64_t h = 0; h < heads; ++h)
      add_rows(values, count, dim, scratch.logits.data() + h * n + first, open.out + h * dim);
  }
}

KVKEEP_INLINE void merge_opened(const SpanRow& spans, std::int64_t i, const std::uint8_t* zoomed, const float* queries,
                                std::int64_t heads, float scale, const OpenHeads& open, ZoomScratch& scratch) {
  const std::byte* const blob = spans.factors(i).data();
  const FoldedSpan& span = spans.span(i);
  const std::int64_t dim = spans.dim(), length = span.length, n = spans.size(), bytes = element_size(spans.dtype());
  const SpanFactors &keys = span.factors[0], &values = span.factors[1];
  const row_zoom_detail::Opened opened{
      .keys = keys,
      .values = values,
      .key_numbers = row_zoom_detail::as_floats(blob + keys.offset * bytes, spans.dtype(), keys.numbers(length, dim),
                                                scratch.numbers[0]),
      .value_numbers = row_zoom_detail::as_floats(blob + values.offset * bytes, spans.dtype(),
                                                  values.numbers(length, dim), scratch.numbers[1]),
      .coarse_key = row_zoom_detail::coarse_rows(spans, KvSide::keys, i, 1, scratch.coarse),
      .coarse_value = row_zoom_detail::coarse_rows(spans, KvSide::values, i, 1, scratch.coarse_value),
      .length = length,
      .dim = dim};
  scratch.logits.resize(static_cast<std::size_t>(length));
  scratch.inner.resize(static_cast<std::size_t>(std::max({keys.rank, values.rank, 1})));
  for (std::int64_t h = 0; h < heads; ++h) {
    if (zoomed[h * n + i] == 0) continue;
    float* out = open.out + h * dim;
    opened.logits(queries + h * dim, scale, scratch.inner.data(), scratch.logits.data());
    const float weights = row_zoom_detail::weigh(scratch.logits.data(), length, open.top[h], open.sum[h], out, dim);
    if (weights > 0) opened.add(scratch.logits.data(), weights, scratch.inner.data(), out);
  }
}

KVKEEP_INLINE void RowReader::route(const MemoryRow& row, std::int64_t first_head, const float* queries,
                                    const OpenHeads& open, ReadCounts& counts) {
  const SpanRow& spans = *row.spans;
  const std::int64_t n = spans.size();
  const auto all = static_cast<std::size_t>(group_ * n);
  coarse_.resize(all), relevance_.resize(all);
  wanted_.assign(all, 0), zoomed_.assign(all, 0);
  coarse_logits(spans, queries, group_, scale_, coarse_.data(), scratch_);
  if (reading_.zoom.learned(reading_.router != nullptr)) {
    router_relevance(*reading_.router, spans, first_head, group_, {spans.norms().data(), group_, 1}, queries,
                     relevance_.data(), scratch_);
    for (std::int64_t i = 0; i < group_ * n; ++i)
      wanted_[static_cast<std::size_t>(i)] =
          relevance_[static_cast<std::size_t>(i)] > reading_.router->threshold(first_head + i / n) ? 1 : 0;
  } else {
    dense_.resize(static_cast<std::size_t>(group_));
    for (std::int64_t h = 0; h < group_; ++h) dense_[static_cast<std::size_t>(h)] = open.top[h] + std::log(open.sum[h]);
    if (!spans.sketch().sizes.empty())
      sketch_mass(spans, queries, group_, scale_, coarse_.data(), dense_.data(), relevance_.data(), scratch_);
    else
      for (std::int64_t h = 0; h < group_; ++h)
        coarse_mass(coarse_.data() + h * n, n, dense_[static_cast<std::size_t>(h)], relevance_.data() + h * n);
    for (std::int64_t h = 0; h < group_; ++h)
      want_by_mass({relevance_.data() + h * n, static_cast<std::size_t>(n)}, reading_.zoom, wanted_.data() + h * n);
  }
  const ZoomBudget budget{.entries = reading_.entries,
                          .resident = static_cast<double>(row.dense) +
                                      product(reading_.entries_per_span, static_cast<double>(n)) +
                                      product(reading_.entries_per_token, static_cast<double>(spans.tokens())),
                          .per_head = reading_.per_head};
  counts.resident = std::llround(std::ceil(budget.resident));
  counts.unmet =
      open_within(spans, relevance_.data(), wanted_.data(), group_, budget, reading_.zoom.heads, zoomed_.data());
}

KVKEEP_INLINE ReadCounts RowReader::read(const MemoryRow& row, std::int64_t first_head, const float* queries,
                                         const OpenHeads& open) {
  const SpanRow& spans = *row.spans;
  const std::int64_t n = spans.size();
  ReadCounts counts{.queries = 1};
  route(row, first_head, queries, open, counts);
  opened_.clear();
  for (std::int64_t s = 0; s < n; ++s) {
    if (!anyone(zoomed_.data(), group_, n, s)) continue;
    opened_.push_back(static_cast<std::int32_t>(s));
    ++counts.zooms;
    counts.tokens += spans.span(s).length;
    counts.bytes += std::ssize(spans.factors(s));
  }
  merge_coarse(spans, coarse_.data(), zoomed_.data(), group_, open, scratch_);
  for (const std::int32_t s : opened_) merge_opened(spans, s, zoomed_.data(), queries, group_, scale_, open, scratch_);
  return counts;
}

KVKEEP_INLINE void merge_rows(const float* keys, const float* values, std::int64_t count, std::int64_t dim,
                              const float* query, float scale, float* logits, float& top, float& sum, float* out) {
  row_dots(keys, count, dim, query, logits);
  for (std::int64_t t = 0; t < count; ++t) logits[t] *= scale;
  if (row_zoom_detail::weigh(logits, count, top, sum, out, dim) > 0) add_rows(values, count, dim, logits, out);
}

}  // namespace kvkeep::cpu

namespace kvkeep {
namespace read_memory_detail {

/// Softmaxes of the heads of a group, starting at head `head` of query `query`.
inline cpu::OpenHeads open_at(OpenAttention& open, std::int64_t query, std::int64_t head) {
  const std::int64_t at = query * open.top.size(1) + head, dim = open.out.size(2);
  return {open.top.data<float>() + at, open.sum.data<float>() + at, open.out.data<float>() + at * dim};
}

}  // namespace read_memory_detail

KVKEEP_INLINE ReadCounts& ReadCounts::operator+=(const ReadCounts& other) {
  queries += other.queries, zooms += other.zooms, tokens += other.tokens, bytes += other.bytes;
  unmet += other.unmet, resident += other.resident;
  return *this;
}

KVKEEP_INLINE ReadCounts read_memory(OpenAttention& open, std::span<const MemoryRow> rows, const Tensor& queries,
                                     double scale, const Reading& reading,
                                     std::vector<std::vector<std::int32_t>>* opened, std::span<ReadCounts> by_head) {
  const auto kv_heads = static_cast<std::int64_t>(rows.size());
  KVKEEP_REQUIRE(kv_heads > 0, "memory: no rows; allowed one per KV head");
  const std::int64_t dim = rows.front().spans->dim();
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.device().is_cpu() && is_scorable(queries.dtype()) &&
                     queries.size(1) >= kv_heads && queries.size(1) % kv_heads == 0 && queries.size(2) == dim,
                 "memory: queries have the wrong shape, dtype or device; allowed f32, f16 or bf16 [n, Hq, ", dim,
                 "] on the CPU with Hq a multiple of ", kv_heads);
  KVKEEP_REQUIRE(open.out.sizes() == queries.sizes() && open.out.is_contiguous() && open.top.is_contiguous() &&
                     open.sum.is_contiguous(),
                 "memory: softmaxes do not match the queries; allowed f32 [n, Hq, D], contiguous");
  KVKEEP_REQUIRE(reading.router == nullptr ||
                     (reading.router->query_heads() == queries.size(1) && reading.router->key_dim() == dim),
                 "memory: the router is for other heads; allowed one for ", queries.size(1), " heads of ", dim);
  const std::int64_t n = queries.size(0), group = queries.size(1) / kv_heads;
  const Tensor q = as<float>(queries);
  if (opened != nullptr) opened->assign(rows.size(), {});
  std::vector<ReadCounts> counts(static_cast<std::size_t>(n * kv_heads));
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    cpu::RowReader reader(reading, group, static_cast<float>(scale));
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t kv = task % kv_heads;
      const MemoryRow& row = rows[static_cast<std::size_t>(kv)];
      if (row.spans->size() == 0) continue;
      const cpu::OpenHeads softmaxes = read_memory_detail::open_at(open, task / kv_heads, kv * group);
      counts[static_cast<std::size_t>(task)] =
          reader.read(row, kv * group, q.data<float>() + task * group * dim, softmaxes);
      if (opened != nullptr && task / kv_heads == n - 1) (*opened)[static_cast<std::size_t>(kv)] = reader.opened();
    }
  });
  for (std::size_t task = 0; !by_head.empty() && task < counts.size(); ++task)
    by_head[task % rows.size()] += counts[task];
  return std::accumulate(counts.begin(), counts.end(), ReadCounts{});
}

}  // namespace kvkeep
