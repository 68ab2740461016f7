// What folded spans cost, beside LibTorch's own way to do the same, in the same run.
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
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../src/cpu/factorise.h"
#include "timing.h"

namespace kvkeep {
namespace {

constexpr std::int64_t kDim = 128;

// ---- Factors -------------------------------------------------------------------------------------------------------------------------------
//
// rows: Memory/Factors/<span length>
//
// `ours` and `svd` are matrices [span, 128] a second: cpu::Factorisation with default options, from f32 rows to f32 factors, against at::linalg_svd(full_matrices=False) of the batch in f32, which
// gives every component and decides nothing; `svd_alone` is the same on one thread, often the faster one. `ratio` is to the faster of both, the median over runs of all three in turn.
// `rank` is the mean of what is kept, `raw` the share of matrices whose rows are smaller than that.

/// f32 [matrices, L, D] that look like keys after RoPE: few directions that drift along a span, an offset, and noise, rotated by position.
Tensor keys_like(std::int64_t matrices, std::int64_t length) {
  constexpr std::int64_t kDirections = 24;
  const auto options = at::TensorOptions().dtype(kFloat32);
  const Tensor sizes = at::pow(1.0 + at::arange(kDirections, options), -0.75);
  const Tensor drift = at::randn({matrices, length, kDirections}, options).cumsum(1) * 0.5 + at::randn({matrices, length, kDirections}, options);
  const Tensor rows = at::bmm(drift * sizes, at::randn({matrices, kDirections, kDim}, options)) + at::randn({matrices, 1, kDim}, options) + 0.15 * at::randn({matrices, length, kDim}, options);
  const Tensor angles = at::arange(length, options).unsqueeze(1) * at::pow(10000.0, at::arange(kDim / 2, options) * (-2.0 / kDim));
  const Tensor cos = angles.cos(), sin = angles.sin(), left = rows.narrow(2, 0, kDim / 2), right = rows.narrow(2, kDim / 2, kDim / 2);
  return at::cat({left * cos - right * sin, right * cos + left * sin}, 2).contiguous();
}

/// Rows in batches of one length, as SpanStore folds them, batches in parallel; sums of ranks and of raw matrices.
std::pair<std::int64_t, std::int64_t> factorise(const Tensor& matrices, std::span<const double> weights) {
  const std::int64_t count = matrices.size(0), length = matrices.size(1), batch = std::max<std::int64_t>(1, (1 << 19) / (length * kDim));
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
  const auto sum = [](const std::vector<std::int64_t>& of) { return std::accumulate(of.begin(), of.end(), std::int64_t{0}); };
  return {sum(ranks), sum(raws)};
}

void Factors(benchmark::State& state, std::int64_t length) {
  const std::int64_t count = std::max<std::int64_t>(256, (1 << 15) / length);
  const Tensor matrices = keys_like(count, length);
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

// ---- Rows ----------------------------------------------------------------------------------------------------------------------------------

const int kRegistered = [] {
  for (const std::int64_t length : {8, 16, 32, 64, 128})
    benchmark::RegisterBenchmark(("Memory/Factors/" + std::to_string(length)).c_str(), Factors, length)->UseManualTime()->Iterations(9)->Unit(benchmark::kMillisecond);
  return 0;
}();

}  // namespace
}  // namespace kvkeep
