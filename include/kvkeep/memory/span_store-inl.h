#pragma once
// Bodies of span_store.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/row.h"
#include "kvkeep/memory/span_store.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {
namespace span_store_detail {

inline void check_spans(std::span<const Span> spans, std::int64_t tokens) {
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

}  // namespace span_store_detail

KVKEEP_INLINE SpanStore::SpanStore(const Tensor& keys, const Tensor& values, std::span<const float> surprisal,
                                   std::vector<Span> spans, const FactorOptions& options, const RankGates* gates)
    : spans_(std::move(spans)) {
  KVKEEP_REQUIRE(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.size(2) >= 1 &&
                     keys.device().is_cpu() && values.device().is_cpu() && is_scorable(keys.dtype()) &&
                     is_scorable(values.dtype()),
                 "span store: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  KVKEEP_REQUIRE(keys.size(1) == static_cast<std::int64_t>(surprisal.size()), "span store: ", keys.size(1),
                 " tokens with ", surprisal.size(), " surprisals; allowed one each");
  span_store_detail::check_spans(spans_, keys.size(1));
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> indptr{0};
  std::vector<float> weights;
  for (const Span& s : spans_) {
    for (std::int32_t t = s.begin; t < s.end; ++t)
      slots.push_back(t), weights.push_back(surprisal[static_cast<std::size_t>(t)]);
    indptr.push_back(static_cast<std::int64_t>(slots.size()));
  }
  const auto alone = [](const Tensor& t) {
    return contiguous(t).reshaped({1, t.size(0), t.size(1), t.size(2)});
  };  // a batch of one
  const Tensor k = alone(keys), v = alone(values);
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
    Tensor out = zeros({size(), heads, 2, options.max_rank}, Dtype::f32);
    const std::int64_t width = 2 * std::int64_t{options.max_rank};
    for (std::int64_t i = 0; i < size() * heads; ++i)
      std::copy_n(numbers.begin() + (i % heads * size() + i / heads) * width, width, out.data<float>() + i * width);
    return out;
  };
  singular_values_ = by_span(trace.singular_values);
  if (options.rank == FactorOptions::Rank::gates) gates_ = by_span(trace.gates);
}

KVKEEP_INLINE Tensor SpanStore::coarse(KvSide side) const {
  Tensor out = zeros({kv_heads(), size(), dim()}, Dtype::f32);
  for (std::int64_t h = 0; h < kv_heads(); ++h)
    cpu::widen(row(h).coarse(side), row(h).dtype(), size() * dim(), out.data<float>() + h * size() * dim());
  return out;
}

KVKEEP_INLINE Tensor SpanStore::rows(std::int64_t span, KvSide side) const {
  Tensor out = empty({kv_heads(), spans_[static_cast<std::size_t>(span)].length(), dim()}, Dtype::f32);
  for (std::int64_t h = 0; h < kv_heads(); ++h) copy(row(h).rows(span, side), out.select(0, h));
  return out;
}

KVKEEP_INLINE std::int64_t SpanStore::near_bytes() const {
  // The rows each count the shared logarithms.
  return std::accumulate(rows_.begin(), rows_.end(), 4 * size() * (1 - kv_heads()),
                         [](std::int64_t sum, const SpanRow& r) { return sum + r.near_bytes(); });
}

KVKEEP_INLINE std::int64_t SpanStore::far_bytes() const {
  return std::accumulate(rows_.begin(), rows_.end(), std::int64_t{0},
                         [](std::int64_t sum, const SpanRow& r) { return sum + r.far_bytes(); });
}

}  // namespace kvkeep
