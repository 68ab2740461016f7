#pragma once
// Bodies of memory_attention.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/memory/memory_attention.h"
#include "kvkeep/memory/row_zoom.h"
#include "kvkeep/memory/zoom.h"
#include "kvkeep/simd/aligned.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {
namespace memory_attention_detail {

inline constexpr std::int64_t kRowsAtOnce =
    64;  ///< keys, or values, that all heads of a group read while in a CPU cache

/// `count` numbers of a tensor as f32, starting at number `first`: in place, or in `scratch`.
inline const float* as_floats(const Tensor& rows, std::int64_t first, std::int64_t count,
                              cpu::Aligned<float>& scratch) {
  return cpu::as_floats(static_cast<const std::byte*>(rows.bytes()) + first * rows.element_size(), rows.dtype(), count,
                        scratch);
}

/// Softmaxes of the heads of a group, starting at head `head` of query `query`.
inline cpu::OpenHeads open_at(OpenAttention& open, std::int64_t query, std::int64_t head) {
  const std::int64_t at = query * open.top.size(1) + head, dim = open.out.size(2);
  return {open.top.data<float>() + at, open.sum.data<float>() + at, open.out.data<float>() + at * dim};
}

inline void check_queries(const char* operation, const Tensor& queries, std::int64_t kv_heads, std::int64_t dim) {
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.device().is_cpu() && is_scorable(queries.dtype()) &&
                     queries.size(1) >= kv_heads && queries.size(1) % kv_heads == 0 && queries.size(2) == dim,
                 operation, ": queries have the wrong shape, dtype or device; allowed f32, f16 or bf16 [n, Hq, ", dim,
                 "] on the CPU with Hq a multiple of ", kv_heads);
}

}  // namespace memory_attention_detail

KVKEEP_INLINE std::int64_t SpanMemory::near_bytes() const {
  const auto bytes = [](const Tensor& t) { return t.numel() * t.element_size(); };
  return bytes(dense_keys) + bytes(dense_values) + spans.near_bytes();
}

KVKEEP_INLINE SpanMemory fold_prompt(const Tensor& keys, const Tensor& values, std::span<const float> surprisal,
                                     Segments segments, const FactorOptions& options, const RankGates* gates) {
  SpanMemory memory;
  memory.spans = SpanStore(keys, values, surprisal, segments.spans, options, gates);
  const std::vector<std::int32_t> dense = segments.dense();
  memory.dense_keys = gather(keys, 1, dense);
  memory.dense_values = gather(values, 1, dense);
  memory.segments = std::move(segments);
  return memory;
}

KVKEEP_INLINE Tensor OpenAttention::close() const {
  Tensor closed = clone(out);
  const std::int64_t dim = out.size(2);
  const Tensor sums = contiguous(sum);
  for (std::int64_t i = 0; i < closed.numel(); ++i) {
    const float all = sums.data<float>()[i / dim];
    float& x = closed.data<float>()[i];
    x = all > 0 ? x / all : 0;
  }
  return closed;
}

KVKEEP_INLINE Tensor OpenAttention::log_mass() const {
  Tensor mass = clone(top);
  const Tensor sums = contiguous(sum);
  for (std::int64_t i = 0; i < mass.numel(); ++i) mass.data<float>()[i] += std::log(sums.data<float>()[i]);
  return mass;
}

KVKEEP_INLINE OpenAttention attend_rows(const Tensor& keys, const Tensor& values, const Tensor& queries, double scale) {
  KVKEEP_REQUIRE(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.device().is_cpu() &&
                     values.device().is_cpu() && is_scorable(keys.dtype()) && is_scorable(values.dtype()),
                 "attention: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  const std::int64_t kv_heads = keys.size(0), rows = keys.size(1), dim = keys.size(2);
  memory_attention_detail::check_queries("attention", queries, kv_heads, dim);
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / kv_heads;
  OpenAttention open{full({n, heads}, -std::numeric_limits<float>::infinity()), zeros({n, heads}, Dtype::f32),
                     zeros({n, heads, dim}, Dtype::f32)};
  const Tensor k = contiguous(keys), v = contiguous(values), q = as<float>(queries);
  const auto factor = static_cast<float>(scale);
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    cpu::Aligned<float> wide_keys, wide_values;
    std::array<float, memory_attention_detail::kRowsAtOnce> logits{};
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t query = task / kv_heads, kv = task % kv_heads;
      for (std::int64_t first = 0; first < rows; first += memory_attention_detail::kRowsAtOnce) {
        const std::int64_t count = std::min(memory_attention_detail::kRowsAtOnce, rows - first),
                           at = (kv * rows + first) * dim;
        const float* block_keys = memory_attention_detail::as_floats(k, at, count * dim, wide_keys);
        const float* block_values = memory_attention_detail::as_floats(v, at, count * dim, wide_values);
        const cpu::OpenHeads heads_of = memory_attention_detail::open_at(open, query, kv * group);
        for (std::int64_t h = 0; h < group; ++h)
          cpu::merge_rows(block_keys, block_values, count, dim,
                          q.data<float>() + (query * heads + kv * group + h) * dim, factor, logits.data(),
                          heads_of.top[h], heads_of.sum[h], heads_of.out + h * dim);
      }
    }
  });
  return open;
}

KVKEEP_INLINE Tensor coarse_logits(const SpanStore& spans, const Tensor& queries, double scale) {
  memory_attention_detail::check_queries("coarse logits", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads();
  const Tensor q = as<float>(queries);
  Tensor logits = zeros({n, heads, spans.size()}, Dtype::f32);
  cpu::ZoomScratch scratch;
  for (std::int64_t i = 0; i < n * spans.kv_heads(); ++i)  // heads of a group are side by side
    cpu::coarse_logits(spans.row(i % spans.kv_heads()), q.data<float>() + i * group * spans.dim(), group,
                       static_cast<float>(scale), logits.data<float>() + i * group * spans.size(), scratch);
  return logits;
}

KVKEEP_INLINE void merge_spans(OpenAttention& open, const SpanStore& spans, const Tensor& queries, double scale,
                               const Tensor& coarse, const Tensor& zoomed) {
  memory_attention_detail::check_queries("merge of spans", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads(),
                     kv_heads = spans.kv_heads(), count = spans.size();
  KVKEEP_REQUIRE(
      open.out.sizes() == queries.sizes() && coarse.sizes() == zoomed.sizes() &&
          coarse.sizes() == Shape({n, heads, count}) && coarse.dtype() == Dtype::f32 && zoomed.dtype() == Dtype::u8,
      "merge of spans: softmaxes, logits or marks do not fit; allowed [n, Hq, D], f32 and u8 [n, Hq, ", count, "]");
  const Tensor q = as<float>(queries), logits = contiguous(coarse), marks = contiguous(zoomed);
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    cpu::ZoomScratch scratch;
    for (std::int64_t task = begin; task < end; ++task) {
      const SpanRow& row = spans.row(task % kv_heads);
      const std::uint8_t* own = marks.data<std::uint8_t>() + task * group * count;
      const cpu::OpenHeads softmaxes = memory_attention_detail::open_at(open, task / kv_heads, task % kv_heads * group);
      cpu::merge_coarse(row, logits.data<float>() + task * group * count, own, group, softmaxes, scratch);
      for (std::int64_t s = 0; s < count; ++s) {
        if (!cpu::anyone(own, group, count, s)) continue;
        cpu::merge_opened(row, s, own, q.data<float>() + task * group * row.dim(), group, static_cast<float>(scale),
                          softmaxes, scratch);
      }
    }
  });
}

KVKEEP_INLINE ReadCounts read_memory(OpenAttention& open, std::span<const MemoryRow> rows, const Tensor& queries,
                                     double scale, const Reading& reading,
                                     std::vector<std::vector<std::int32_t>>* opened, std::span<ReadCounts> by_head) {
  const auto kv_heads = static_cast<std::int64_t>(rows.size());
  KVKEEP_REQUIRE(kv_heads > 0, "memory: no rows; allowed one per KV head");
  const std::int64_t dim = rows.front().spans->dim();
  memory_attention_detail::check_queries("memory", queries, kv_heads, dim);
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
      const cpu::OpenHeads softmaxes = memory_attention_detail::open_at(open, task / kv_heads, kv * group);
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
