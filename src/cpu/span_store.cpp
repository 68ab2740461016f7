#include "kvkeep/memory/span_store.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "factorise.h"
#include "kvkeep/core/error.h"
#include "memory_lanes.h"

namespace kvkeep {
namespace {

constexpr std::int64_t kBatchNumbers = 1 << 19;  ///< fp64 numbers of the matrices that are decomposed together: they stay in a cache

}  // namespace

std::vector<std::string> FactorOptions::problems() const {
  std::vector<std::string> found;
  if (max_rank < 1) found.push_back(text("max_rank: ", max_rank, "; allowed 1 or more"));
  if (!(energy >= 0 && energy <= 1)) found.push_back(text("energy: ", energy, "; allowed 0 to 1"));
  if (!(gate_keep >= 0 && gate_keep <= 1)) found.push_back(text("gate_keep: ", gate_keep, "; allowed 0 to 1"));
  if (!is_scorable(store)) found.push_back(text("store: ", c10::toString(store), "; allowed f32, bf16 or f16"));
  return found;
}

/// Spans of one length that are folded together, and their rows.
struct SpanStore::Batch {
  std::vector<std::int64_t> spans;  ///< numbers of the spans
  std::int64_t length;
  const Tensor& keys;               ///< f32 [Hkv, T, D], contiguous
  const Tensor& values;
  std::span<const float> surprisal;
};

SpanStore::SpanStore(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, std::vector<Span> spans, const FactorOptions& options, const RankGates* gates)
    : options_(options), spans_(std::move(spans)), store_(options.store) {
  std::string wrong;
  for (const std::string& one : options.problems()) wrong += (wrong.empty() ? "" : "; ") + one;
  require(wrong.empty(), "span store: ", wrong);
  require(keys.dim() == 3 && keys.sizes() == values.sizes() && keys.size(0) >= 1 && keys.size(2) >= 1 && keys.device().is_cpu() && values.device().is_cpu() && is_scorable(keys.scalar_type()) &&
              is_scorable(values.scalar_type()),
          "span store: keys or values do not fit; allowed f32, f16 or bf16 [Hkv, T, D] of one shape on the CPU");
  require(keys.size(1) == static_cast<std::int64_t>(surprisal.size()), "span store: ", keys.size(1), " tokens with ", surprisal.size(), " surprisals; allowed one each");
  for (const Span& s : spans_) require(s.begin >= 0 && s.length() >= 1 && s.end <= keys.size(1), "span store: a span from ", s.begin, " to ", s.end, "; allowed inside ", keys.size(1), " tokens");
  kv_heads_ = keys.size(0);
  dim_ = keys.size(2);
  if (options.rank == FactorOptions::Rank::gates) {
    require(gates != nullptr, "span store: rank is gates, and there are none; allowed with RankGates");
    require(gates->max_rank() == options.max_rank && gates->key_dim() == dim_, "span store: gates for ", gates->max_rank(), " components and keys of ", gates->key_dim(), " numbers; allowed max_rank = ",
            options.max_rank, " and ", dim_);
    gates_ = at::zeros({size(), kv_heads_, 2, options.max_rank}, at::TensorOptions().dtype(kFloat32));
  }
  singular_values_ = at::zeros({size(), kv_heads_, 2, options.max_rank}, at::TensorOptions().dtype(kFloat32));
  for (Tensor& c : coarse_) c = at::zeros({kv_heads_, size(), dim_}, at::TensorOptions().dtype(kFloat32));
  factors_.resize(static_cast<std::size_t>(size() * kv_heads_ * 2));
  blobs_.resize(static_cast<std::size_t>(size()));
  for (const Span& s : spans_) log_length_.push_back(static_cast<float>(std::log(static_cast<double>(s.length()))));

  const Tensor k = keys.to(kFloat32).contiguous(), v = values.to(kFloat32).contiguous();
  std::vector<std::int64_t> order(static_cast<std::size_t>(size()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::int64_t i) { return spans_[static_cast<std::size_t>(i)].length(); });
  std::vector<Batch> batches;
  for (const std::int64_t i : order) {
    const std::int64_t length = spans_[static_cast<std::size_t>(i)].length();
    const std::int64_t most = std::max<std::int64_t>(1, kBatchNumbers / (2 * kv_heads_ * length * dim_));
    if (batches.empty() || batches.back().length != length || static_cast<std::int64_t>(batches.back().spans.size()) == most) batches.push_back({{}, length, k, v, surprisal});
    batches.back().spans.push_back(i);
  }
  at::parallel_for(0, static_cast<std::int64_t>(batches.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) fold(batches[static_cast<std::size_t>(b)], gates);
  });
  for (Tensor& c : coarse_) c = c.to(store_).to(kFloat32);
}

void SpanStore::fold(const Batch& batch, const RankGates* gates) {
  const std::int64_t per_span = 2 * kv_heads_, places = static_cast<std::int64_t>(batch.spans.size()), numbers = batch.length * dim_;
  cpu::Factorisation matrices(places * per_span, batch.length, dim_, options_);  // for each span and each head keys, then values
  std::vector<std::int64_t> key_of;
  for (std::int64_t i = 0; i < places; ++i) {
    const Span& at = spans_[static_cast<std::size_t>(batch.spans[static_cast<std::size_t>(i)])];
    const std::vector<double> weights = span_weights(batch.surprisal.subspan(static_cast<std::size_t>(at.begin), static_cast<std::size_t>(batch.length)));
    for (std::int64_t j = 0; j < per_span; ++j) {
      const std::int64_t n = i * per_span + j, head = j / 2;
      std::copy_n((j % 2 == kKeys ? batch.keys : batch.values).const_data_ptr<float>() + (head * batch.keys.size(1) + at.begin) * dim_, numbers, matrices.rows(n));
      require(matrices.weigh(n, weights), "span store: ", j % 2 == kKeys ? "keys" : "values", " of head ", head, " hold NaN or infinity in tokens ", at.begin, " to ", at.end - 1, "; allowed finite numbers");
      if (options_.rank == FactorOptions::Rank::gates) key_of.push_back(n - j % 2 + kKeys);
    }
  }
  matrices.run(gates, key_of);
  for (std::int64_t i = 0; i < places; ++i) {
    const std::int64_t span = batch.spans[static_cast<std::size_t>(i)];
    std::int64_t total = 0;
    for (std::int64_t j = 0; j < per_span; ++j) {
      const std::int64_t n = i * per_span + j, place = span * per_span + j;
      SpanFactors& f = factors_[static_cast<std::size_t>(place)];
      f = matrices.factors(n);
      f.offset = total;
      total += f.numbers(batch.length, dim_);
      std::ranges::copy(matrices.singular_values(n), singular_values_.data_ptr<float>() + place * options_.max_rank);
      if (gates_.defined()) std::ranges::copy(matrices.gates(n), gates_.data_ptr<float>() + place * options_.max_rank);
      std::copy_n(matrices.mean(n), dim_, coarse_[static_cast<std::size_t>(j % 2)].data_ptr<float>() + (j / 2 * size() + span) * dim_);
    }
    const Tensor blob = at::empty({total}, at::TensorOptions().dtype(kFloat32));
    for (std::int64_t j = 0; j < per_span; ++j) matrices.write(i * per_span + j, blob.data_ptr<float>() + factors_[static_cast<std::size_t>(span * per_span + j)].offset);
    blobs_[static_cast<std::size_t>(span)] = blob.to(store_);
  }
}

double SpanStore::zoom_entries(std::int64_t span, std::int64_t head) const {
  const std::int64_t length = spans_[static_cast<std::size_t>(span)].length();
  return static_cast<double>(factors(span, head, kKeys).numbers(length, dim_) + factors(span, head, kValues).numbers(length, dim_)) / (2.0 * static_cast<double>(dim_));
}

Tensor SpanStore::rows(std::int64_t span, Side side) const {
  const std::int64_t length = spans_[static_cast<std::size_t>(span)].length();
  const Tensor stored = blob(span).to(kFloat32);
  Tensor out = at::zeros({kv_heads_, length, dim_}, at::TensorOptions().dtype(kFloat32));
  const float* from = stored.const_data_ptr<float>();
  for (std::int64_t h = 0; h < kv_heads_; ++h) {
    const SpanFactors& f = factors(span, h, side);
    if (f.raw) {
      out.select(0, h).copy_(stored.narrow(0, f.offset, length * dim_).view({length, dim_}));
      continue;
    }
    if (f.centred) out.select(0, h).copy_(coarse_[side].select(0, h).narrow(0, span, 1).expand({length, dim_}));
    for (std::int64_t t = 0; t < length; ++t) cpu::add_rows(from + f.offset + length * f.rank, f.rank, dim_, from + f.offset + t * f.rank, out.data_ptr<float>() + (h * length + t) * dim_);
  }
  return out;
}

std::int64_t SpanStore::near_bytes() const { return size() * (2 * kv_heads_ * dim_ * static_cast<std::int64_t>(c10::elementSize(store_)) + 4); }

std::int64_t SpanStore::far_bytes() const {
  std::int64_t bytes = 0;
  for (const Tensor& blob : blobs_) bytes += blob.numel() * static_cast<std::int64_t>(blob.element_size());
  return bytes;
}

}  // namespace kvkeep
