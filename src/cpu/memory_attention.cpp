#include "kvkeep/memory/memory_attention.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "aligned.h"
#include "attention_lanes.h"
#include "kvkeep/core/error.h"
#include "memory_lanes.h"

namespace kvkeep {
namespace {

constexpr std::int64_t kRowsAtOnce = 64;  ///< keys, or values, that all heads of a group read while they lie in a cache

/// Rows of any dtype as f32: where they are, or in `scratch`.
const float* as_floats(const Tensor& rows, std::int64_t first, std::int64_t count, cpu::Aligned<float>& scratch) {
  const auto* at = static_cast<const std::byte*>(rows.const_data_ptr()) + first * static_cast<std::int64_t>(rows.element_size());
  if (rows.scalar_type() == kFloat32) return reinterpret_cast<const float*>(at);
  if (static_cast<std::int64_t>(scratch.size()) < count) scratch.resize(static_cast<std::size_t>(count));
  cpu::widen(at, rows.scalar_type(), count, scratch.data());
  return scratch.data();
}

/// One query head's open softmax.
struct Open {
  float& top;
  float& sum;
  float* out;
  std::int64_t dim;

  /// Turns logits into weights against `top`, which they may raise; false where all are -inf.
  bool weigh(float* logits, std::int64_t count) {
    const float most = cpu::largest(logits, count);
    if (most == -HUGE_VALF) return false;
    if (most > top) {
      const float shrink = std::exp(top - most);
      sum *= shrink;
      for (std::int64_t d = 0; d < dim; ++d) out[d] *= shrink;
      top = most;
    }
    weights_sum = cpu::exponentials(logits, count, top);
    sum += weights_sum;
    return true;
  }

  void merge(float* logits, const float* values, std::int64_t count) {
    if (weigh(logits, count)) cpu::add_rows(values, count, dim, logits, out);
  }

  float weights_sum = 0;  ///< of the last weigh()
};

Open open_at(OpenAttention& open, std::int64_t query, std::int64_t head) {
  const std::int64_t at = query * open.top.size(1) + head, dim = open.out.size(2);
  return {open.top.data_ptr<float>()[at], open.sum.data_ptr<float>()[at], open.out.data_ptr<float>() + at * dim, dim};
}

void check_queries(const char* operation, const Tensor& queries, std::int64_t kv_heads, std::int64_t dim) {
  require(queries.dim() == 3 && queries.device().is_cpu() && is_scorable(queries.scalar_type()) && queries.size(1) >= kv_heads && queries.size(1) % kv_heads == 0 && queries.size(2) == dim, operation,
          ": queries do not fit; allowed f32, f16 or bf16 [n, Hq, ", dim, "] on the CPU with Hq a multiple of ", kv_heads);
}

/// One zoomed span, its numbers widened once for all heads of a group.
struct Zoomed {
  const SpanFactors& keys;
  const SpanFactors& values;
  const float *key_numbers, *value_numbers;
  const float *coarse_key, *coarse_value;
  std::int64_t length, dim;

  /// scale * (q . (c + (A B)_t)) without forming A B.
  void logits(const float* query, float scale, float* inner, float* out) const {
    if (keys.raw) {
      cpu::row_dots(key_numbers, length, dim, query, out);
    } else {
      cpu::row_dots(key_numbers + length * keys.rank, keys.rank, dim, query, inner);
      cpu::row_dots(key_numbers, length, keys.rank, inner, out);
    }
    float offset = 0;
    if (!keys.raw && keys.centred) cpu::row_dots(coarse_key, 1, dim, query, &offset);
    for (std::int64_t t = 0; t < length; ++t) out[t] = scale * (out[t] + offset);
  }

  /// out += (sum of weights) c + (weights A) B.
  void add(const float* weights, float weights_sum, float* inner, float* out) const {
    if (values.raw) return cpu::add_rows(value_numbers, length, dim, weights, out);
    if (values.centred) cpu::add_rows(coarse_value, 1, dim, &weights_sum, out);
    std::fill_n(inner, values.rank, 0.0F);
    cpu::add_rows(value_numbers, length, values.rank, weights, inner);
    cpu::add_rows(value_numbers + length * values.rank, values.rank, dim, inner, out);
  }
};

/// What one thread works in.
struct Scratch {
  cpu::Aligned<float> keys, values, logits, inner;
};

}  // namespace

std::int64_t SpanMemory::near_bytes() const {
  const auto bytes = [](const Tensor& t) { return t.numel() * static_cast<std::int64_t>(t.element_size()); };
  return bytes(dense_keys) + bytes(dense_values) + spans.near_bytes();
}

SpanMemory fold_prompt(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, Segments segments, const FactorOptions& options, const RankGates* gates) {
  SpanMemory memory;
  memory.spans = SpanStore(keys, values, surprisal, segments.spans, options, gates);
  std::vector<std::int32_t> dense = segments.dense();
  const Tensor places = at::from_blob(dense.data(), {static_cast<std::int64_t>(dense.size())}, at::TensorOptions().dtype(kInt32));
  memory.dense_keys = keys.index_select(1, places).contiguous();
  memory.dense_values = values.index_select(1, places).contiguous();
  memory.segments = std::move(segments);
  return memory;
}

Tensor OpenAttention::close() const { return at::where((sum > 0).unsqueeze(2), out / sum.unsqueeze(2), at::zeros({1}, out.options())); }

Tensor OpenAttention::log_mass() const { return top + sum.log(); }

OpenAttention attend_rows(const Tensor& keys, const Tensor& values, const Tensor& queries, double scale) {
  require(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.device().is_cpu() && values.device().is_cpu() && is_scorable(keys.scalar_type()) && is_scorable(values.scalar_type()),
          "attention: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  const std::int64_t kv_heads = keys.size(0), rows = keys.size(1), dim = keys.size(2);
  check_queries("attention", queries, kv_heads, dim);
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / kv_heads;
  const auto floats = at::TensorOptions().dtype(kFloat32);
  OpenAttention open{at::full({n, heads}, -std::numeric_limits<float>::infinity(), floats), at::zeros({n, heads}, floats), at::zeros({n, heads, dim}, floats)};
  const Tensor k = keys.contiguous(), v = values.contiguous(), q = queries.to(kFloat32).contiguous();
  const auto factor = static_cast<float>(scale);
  at::parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch;
    std::array<float, kRowsAtOnce> logits{};
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t query = task / kv_heads, kv = task % kv_heads;
      for (std::int64_t first = 0; first < rows; first += kRowsAtOnce) {
        const std::int64_t count = std::min(kRowsAtOnce, rows - first), at = (kv * rows + first) * dim;
        const float* block_keys = as_floats(k, at, count * dim, scratch.keys);
        const float* block_values = as_floats(v, at, count * dim, scratch.values);
        for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          cpu::row_dots(block_keys, count, dim, q.const_data_ptr<float>() + (query * heads + h) * dim, logits.data());
          for (std::int64_t t = 0; t < count; ++t) logits[static_cast<std::size_t>(t)] *= factor;
          open_at(open, query, h).merge(logits.data(), block_values, count);
        }
      }
    }
  });
  return open;
}

Tensor coarse_logits(const SpanStore& spans, const Tensor& queries, double scale) {
  check_queries("coarse logits", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads();
  const Tensor q = queries.to(kFloat32).view({n, spans.kv_heads(), group, spans.dim()}).permute({1, 0, 2, 3}).reshape({spans.kv_heads(), n * group, spans.dim()});
  const Tensor products = at::matmul(q, spans.coarse(SpanStore::kKeys).transpose(1, 2));  // [Hkv, n * group, spans]
  Tensor logits = (products * scale).view({spans.kv_heads(), n, group, spans.size()}).permute({1, 0, 2, 3}).reshape({n, heads, spans.size()}).contiguous();
  float* out = logits.data_ptr<float>();
  for (std::int64_t i = 0; i < n * heads; ++i)
    for (std::int64_t s = 0; s < spans.size(); ++s) *out++ += spans.log_length()[static_cast<std::size_t>(s)];
  return logits;
}

void merge_spans(OpenAttention& open, const SpanStore& spans, const Tensor& queries, double scale, const Tensor& coarse, const Tensor& zoomed) {
  check_queries("merge of spans", queries, spans.kv_heads(), spans.dim());
  const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / spans.kv_heads(), kv_heads = spans.kv_heads(), dim = spans.dim(), count = spans.size();
  require(open.out.sizes() == queries.sizes() && coarse.sizes() == zoomed.sizes() && coarse.sizes() == at::IntArrayRef({n, heads, count}) && coarse.scalar_type() == kFloat32 &&
              zoomed.scalar_type() == c10::ScalarType::Byte,
          "merge of spans: softmaxes, logits or marks do not fit; allowed [n, Hq, D], f32 and u8 [n, Hq, ", count, "]");
  const Tensor q = queries.to(kFloat32).contiguous(), logits = coarse.contiguous(), marks = zoomed.contiguous();
  const auto factor = static_cast<float>(scale);
  at::parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t query = task / kv_heads, kv = task % kv_heads;
      const auto row = [&](std::int64_t h) { return (query * heads + h) * count; };
      const float* coarse_keys = spans.coarse(SpanStore::kKeys).const_data_ptr<float>() + kv * count * dim;
      const float* coarse_values = spans.coarse(SpanStore::kValues).const_data_ptr<float>() + kv * count * dim;
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        scratch.logits.assign(logits.const_data_ptr<float>() + row(h), logits.const_data_ptr<float>() + row(h) + count);
        for (std::int64_t s = 0; s < count; ++s)
          if (marks.const_data_ptr<std::uint8_t>()[row(h) + s] != 0) scratch.logits[static_cast<std::size_t>(s)] = -HUGE_VALF;
        open_at(open, query, h).merge(scratch.logits.data(), coarse_values, count);
      }
      for (std::int64_t s = 0; s < count; ++s) {
        const auto asks = [&](std::int64_t h) { return marks.const_data_ptr<std::uint8_t>()[row(h) + s] != 0; };
        bool any = false;
        for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) any = any || asks(h);
        if (!any) continue;
        const std::int64_t length = spans.spans()[static_cast<std::size_t>(s)].length();
        const SpanFactors &keys = spans.factors(s, kv, SpanStore::kKeys), &values = spans.factors(s, kv, SpanStore::kValues);
        const Zoomed span{keys, values, as_floats(spans.blob(s), keys.offset, keys.numbers(length, dim), scratch.keys), as_floats(spans.blob(s), values.offset, values.numbers(length, dim), scratch.values),
                          coarse_keys + s * dim, coarse_values + s * dim, length, dim};
        scratch.logits.resize(static_cast<std::size_t>(length));
        scratch.inner.resize(static_cast<std::size_t>(std::max({keys.rank, values.rank, 1})));
        for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          if (!asks(h)) continue;
          span.logits(q.const_data_ptr<float>() + (query * heads + h) * dim, factor, scratch.inner.data(), scratch.logits.data());
          Open softmax = open_at(open, query, h);
          if (softmax.weigh(scratch.logits.data(), length)) span.add(scratch.logits.data(), softmax.weights_sum, scratch.inner.data(), softmax.out);
        }
      }
    }
  });
}

}  // namespace kvkeep
