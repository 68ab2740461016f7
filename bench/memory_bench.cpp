// SPDX-License-Identifier: Apache-2.0
// What folded spans cost, beside LibTorch's own way of doing the same, in the same run.
//
//   kvkeep_bench --benchmark_filter=Memory

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/parallel.h"
#include "kvkeep/core/row.h"
#include "kvkeep/memory/factorise.h"
#include "kvkeep/memory/row_zoom.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/torch.h"
#include "timing.h"

namespace kvkeep::memory_bench {
namespace {

constexpr std::int64_t kDim = 128;

// ---- Factors --------------------------------------------------------------------------------------------------------
//
// rows: Memory/Factors/<span length>
//
// `ours` and `svd` are matrices [span, 128] per second: cpu::Factorisation with default options, from f32 rows to f32
// factors, against at::linalg_svd(full_matrices=False) of the batch in f32, which gives every component and decides
// nothing; `svd_alone` is the same on one thread, often the faster one. `ratio` is to the faster of both, the median
// over runs of all three in turn. `rank` is the mean of what is kept, `raw` the share of matrices whose rows are
// smaller than that.

/// f32 [matrices, L, D] that look like keys after RoPE: few directions that drift along a span, an offset, and noise,
/// rotated by position.
at::Tensor keys_like(std::int64_t matrices, std::int64_t length) {
  constexpr std::int64_t kDirections = 24;
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor sizes = at::pow(1.0 + at::arange(kDirections, options), -0.75);
  const at::Tensor drift = at::randn({matrices, length, kDirections}, options).cumsum(1) * 0.5 +
                           at::randn({matrices, length, kDirections}, options);
  const at::Tensor rows = at::bmm(drift * sizes, at::randn({matrices, kDirections, kDim}, options)) +
                          at::randn({matrices, 1, kDim}, options) + 0.15 * at::randn({matrices, length, kDim}, options);
  const at::Tensor angles =
      at::arange(length, options).unsqueeze(1) * at::pow(10000.0, at::arange(kDim / 2, options) * (-2.0 / kDim));
  const at::Tensor cos = angles.cos(), sin = angles.sin(), left = rows.narrow(2, 0, kDim / 2),
                   right = rows.narrow(2, kDim / 2, kDim / 2);
  return at::cat({left * cos - right * sin, right * cos + left * sin}, 2).contiguous();
}

/// Rows in batches of one length, as fold() folds them, batches in parallel; sums of ranks and of raw matrices.
std::pair<std::int64_t, std::int64_t> factorise(const at::Tensor& matrices, std::span<const double> weights) {
  const std::int64_t count = matrices.size(0), length = matrices.size(1),
                     batch = std::max<std::int64_t>(1, (1 << 19) / (length * kDim));
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(count)), raws(ranks.size());
  at::parallel_for(0, (count + batch - 1) / batch, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> out(static_cast<std::size_t>(length * kDim));
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t first = b * batch, here = std::min(batch, count - first);
      cpu::Factorisation f(here, length, kDim, {});
      for (std::int64_t n = 0; n < here; ++n) {
        std::copy_n(matrices.const_data_ptr<float>() + (first + n) * length * kDim, length * kDim, f.rows(n));
        benchmark::DoNotOptimize(f.weigh(n, weights));
      }
      f.run(nullptr, {});
      for (std::int64_t n = 0; n < here; ++n) {
        f.write(n, out.data());
        benchmark::DoNotOptimize(out.data());
        ranks[static_cast<std::size_t>(first + n)] = f.factors(n).rank;
        raws[static_cast<std::size_t>(first + n)] = f.factors(n).raw;
      }
    }
  });
  const auto sum = [](const std::vector<std::int64_t>& of) {
    return std::accumulate(of.begin(), of.end(), std::int64_t{0});
  };
  return {sum(ranks), sum(raws)};
}

void Factors(benchmark::State& state, std::int64_t length) {
  const std::int64_t count = std::max<std::int64_t>(256, (1 << 15) / length);
  const at::Tensor matrices = keys_like(count, length);
  std::vector<float> surprisal(static_cast<std::size_t>(length));
  for (std::size_t t = 0; t < surprisal.size(); ++t) surprisal[t] = 0.2F + static_cast<float>(t * 7 % 11) / 8;
  const std::vector<double> weights = span_weights(surprisal);
  const int threads = at::get_num_threads();
  const auto decompose = [&] { benchmark::DoNotOptimize(std::get<1>(at::linalg_svd(matrices, false)).data_ptr()); };
  std::vector<double> ours, svd, svd_alone, ratio;
  std::pair<std::int64_t, std::int64_t> kept;
  for (auto _ : state) {
    ours.push_back(milliseconds([&] { kept = factorise(matrices, weights); }));
    state.SetIterationTime(ours.back() / 1e3);
    svd.push_back(milliseconds(decompose));
    at::set_num_threads(1);
    svd_alone.push_back(milliseconds(decompose));
    at::set_num_threads(threads);
    ratio.push_back(std::min(svd.back(), svd_alone.back()) / ours.back());
  }
  const auto all = static_cast<double>(count);
  state.counters["ours"] = 1e3 * all / median(ours);
  state.counters["svd"] = 1e3 * all / median(svd);
  state.counters["svd_alone"] = 1e3 * all / median(svd_alone);
  state.counters["ratio"] = median(ratio);
  state.counters["rank"] = static_cast<double>(kept.first) / all;
  state.counters["raw"] = static_cast<double>(kept.second) / all;
}

// ---- Reading --------------------------------------------------------------------------------------------------------
//
// rows: Memory/Read/<tokens>/<dtype of factors>
//
// One decode step of one layer (llama8b: 32 query heads, 8 KV heads, D 128; f32 rows) over a memory: 1/16 of the tokens
// are dense rows, the others are in spans of 64. In turns, the median over runs: `memory` ms: attention over the dense
// rows, and read_memory() with default options (sketch, mass); `same_bytes` ms: attention over as many dense rows as
// take the same bytes near; `all` ms: over all tokens. Caches are as warm as the sizes allow: each turn reads all of
// its own. `to_same` and `to_all` are ratios within a run; `zooms`: spans opened per query head group; `near`: share of
// all bytes.

constexpr std::int64_t kKvHeads = 8, kQueryHeads = 32, kSpan = 64;

struct LongMemory {
  LongMemory(std::int64_t tokens, Dtype store) {
    const std::int64_t dense = tokens / 16, spans = (tokens - dense) / kSpan;
    std::vector<at::Tensor> sides;
    for (int side = 0; side < 2; ++side)
      sides.push_back(at::cat({keys_like(kKvHeads * spans, kSpan).view({kKvHeads, spans * kSpan, kDim}),
                               at::randn({kKvHeads, dense, kDim})},
                              1));
    keys = sides[0], values = sides[1];
    std::vector<std::int32_t> slots(static_cast<std::size_t>(spans * kSpan));
    std::iota(slots.begin(), slots.end(), 0);
    std::vector<std::int64_t> indptr;
    for (std::int64_t s = 0; s <= spans; ++s) indptr.push_back(s * kSpan);
    std::vector<RowFold> folds;
    const Tensor k = keys.unsqueeze(0), v = values.unsqueeze(0);
    for (std::int64_t h = 0; h < kKvHeads; ++h)
      folds.push_back(
          {.keys = dense_address(k, 0, h), .values = dense_address(v, 0, h), .slots = slots, .indptr = indptr});
    FactorOptions o;
    o.store = store, o.sketch = true;
    folded = fold(folds, kDim, o);
    dense_keys = keys.narrow(1, spans * kSpan, dense).contiguous(),
    dense_values = values.narrow(1, spans * kSpan, dense).contiguous();
    std::int64_t near = 0;
    for (const SpanRow& row : folded) near += row.near_bytes();
    const std::int64_t row = 2 * kDim * 4, same = dense + near / kKvHeads / row;
    same_keys = keys.narrow(1, 0, same).contiguous(), same_values = values.narrow(1, 0, same).contiguous();
    share = static_cast<double>(near + kKvHeads * dense * row) / static_cast<double>(kKvHeads * tokens * row);
    // Every head asks for one token that is folded, as a retrieval head does; the rest of its attention is spread.
    queries = at::randn({1, kQueryHeads, kDim});
    for (std::int64_t h = 0; h < kQueryHeads; ++h)
      queries[0][h].add_(keys[h / (kQueryHeads / kKvHeads)][(h * 3571) % (spans * kSpan)], 0.5);
  }

  at::Tensor keys, values, dense_keys, dense_values, same_keys, same_values, queries;
  std::vector<SpanRow> folded;  // [Hkv]
  double share = 0;
};

/// Attention of one query per head over f32 rows [Hkv, T, D], KV heads in parallel.
OpenAttention attend(const Tensor& keys, const Tensor& values, const Tensor& queries, double scale) {
  constexpr std::int64_t kRowsAtOnce = 64, kGroup = kQueryHeads / kKvHeads;
  OpenAttention open{full({1, kQueryHeads}, -HUGE_VALF), zeros({1, kQueryHeads}, Dtype::f32),
                     zeros({1, kQueryHeads, kDim}, Dtype::f32)};
  parallel_for(0, kKvHeads, 1, [&](std::int64_t begin, std::int64_t end) {
    float logits[kRowsAtOnce];
    for (std::int64_t kv = begin; kv < end; ++kv)
      for (std::int64_t first = 0; first < keys.size(1); first += kRowsAtOnce) {
        const std::int64_t count = std::min(kRowsAtOnce, keys.size(1) - first), at = (kv * keys.size(1) + first) * kDim;
        for (std::int64_t h = kv * kGroup; h < (kv + 1) * kGroup; ++h)
          cpu::merge_rows(keys.data<float>() + at, values.data<float>() + at, count, kDim,
                          queries.data<float>() + h * kDim, static_cast<float>(scale), logits,
                          open.top.data<float>()[h], open.sum.data<float>()[h], open.out.data<float>() + h * kDim);
      }
  });
  return open;
}

/// [1, Hq, D] of softmaxes to which nothing more is added.
Tensor closed(const OpenAttention& open) {
  for (std::int64_t i = 0; i < open.out.numel(); ++i) open.out.data<float>()[i] /= open.sum.data<float>()[i / kDim];
  return open.out;
}

void Read(benchmark::State& state, std::int64_t tokens, Dtype store) {
  const LongMemory m(tokens, store);
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  std::vector<MemoryRow> rows;
  for (const SpanRow& row : m.folded) rows.push_back({.spans = &row, .dense = m.dense_keys.size(1)});
  std::vector<double> memory, same, all, to_same, to_all;
  ReadCounts counts;
  for (auto _ : state) {
    memory.push_back(milliseconds([&] {
      OpenAttention open = attend(m.dense_keys, m.dense_values, m.queries, scale);
      counts = read_memory(open, rows, m.queries, scale, {});
      benchmark::DoNotOptimize(closed(open).bytes());
    }));
    state.SetIterationTime(memory.back() / 1e3);
    same.push_back(milliseconds(
        [&] { benchmark::DoNotOptimize(closed(attend(m.same_keys, m.same_values, m.queries, scale)).bytes()); }));
    all.push_back(
        milliseconds([&] { benchmark::DoNotOptimize(closed(attend(m.keys, m.values, m.queries, scale)).bytes()); }));
    to_same.push_back(memory.back() / same.back()), to_all.push_back(memory.back() / all.back());
  }
  state.counters["memory"] = median(memory), state.counters["same_bytes"] = median(same),
  state.counters["all"] = median(all);
  state.counters["to_same"] = median(to_same), state.counters["to_all"] = median(to_all);
  state.counters["zooms"] = static_cast<double>(counts.zooms) / static_cast<double>(counts.queries);
  state.counters["near"] = m.share;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

const int kRegistered = [] {
  for (const std::int64_t length : {8, 16, 32, 64, 128})
    benchmark::RegisterBenchmark(("Memory/Factors/" + std::to_string(length)).c_str(), Factors, length)
        ->UseManualTime()
        ->Iterations(9)
        ->Unit(benchmark::kMillisecond);
  for (const std::int64_t tokens : {8192, 131072})
    for (const Dtype store : {Dtype::f32, Dtype::bf16})
      benchmark::RegisterBenchmark(
          ("Memory/Read/" + std::to_string(tokens) + (store == Dtype::f32 ? "/f32" : "/bf16")).c_str(), Read, tokens,
          store)
          ->UseManualTime()
          ->Iterations(15)
          ->Unit(benchmark::kMillisecond);
  return 0;
}();

}  // namespace
}  // namespace kvkeep::memory_bench
