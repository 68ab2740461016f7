// SPDX-License-Identifier: Apache-2.0
// A step in which no sequence is due, through the public API: what an engine pays for kvkeep with every token. One
// observe() per layer, then step().
//
//   kvkeep_bench --benchmark_filter=Step        rows: Step/<policy>/<batch>, 30 layers, 9 query heads and 3 KV heads of
//   64 (SmolLM2-135M)
//
// `observe_us` and `step_us` are medians per step; steps with an event do not count.

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <chrono>
#include <numeric>

#include "kvkeep/kvkeep.h"
#include "kvkeep/torch.h"
#include "timing.h"

namespace kvkeep::step_bench {
namespace {

constexpr std::int32_t kLayers = 30, kQueryHeads = 9, kKvHeads = 3, kDim = 64, kPrompt = 64;

class Subject {
 public:
  Subject(const char* policy, std::int32_t batch)
      : keeper({.query_heads = kQueryHeads,
                .kv_heads = kKvHeads,
                .key_dim = kDim,
                .value_dim = kDim,
                .softmax_scale = 0,
                .rope = {},
                .layers = std::vector<LayerSpec>(kLayers)},
               make_policy(policy)),
        ids_(static_cast<std::size_t>(batch)),
        lengths_(ids_.size()),
        indptr_(ids_.size() + 1),
        queries_(at::randn({batch, kQueryHeads, kDim})) {
    std::iota(ids_.begin(), ids_.end(), 1);
    std::iota(indptr_.begin(), indptr_.end(), 0);
    for (const SequenceId id : ids_) keeper.join(id, kPrompt);
    std::ranges::fill(lengths_, kPrompt);
    std::vector<LayerKv> layers;
    for (std::int32_t l = 0; l < kLayers; ++l)
      layers.emplace_back(
          DenseKv{at::zeros({batch, kKvHeads, kCapacity, kDim}), at::zeros({batch, kKvHeads, kCapacity, kDim})});
    keeper.bind(std::move(layers));
    view_.sequences = ids_;
    view_.lengths.data = lengths_;
  }

  void observe() {
    for (std::int32_t l = 0; l < kLayers; ++l)
      keeper.observe(
          {.layer = l, .sequences = ids_, .indptr = indptr_, .queries = queries_, .basis = QueryBasis::post_rope});
    for (std::int32_t& length : lengths_) ++length;
  }
  Report step() { return keeper.step(view_); }

  static constexpr std::int32_t kCapacity = 1024;
  Keeper keeper;

 private:
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> lengths_, indptr_;
  at::Tensor queries_;
  CacheView view_;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void idle_step(benchmark::State& state, const char* policy) {
  Subject subject(policy, static_cast<std::int32_t>(state.range(0)));
  std::vector<double> observing, stepping;
  for ([[maybe_unused]] auto iteration : state) {
    const double start = now();
    subject.observe();
    const double observed = now();
    const Report report = subject.step();
    const double end = now();
    if (!report.cuts.empty()) {
      state.SetIterationTime(1e-9);
      continue;
    }
    observing.push_back(observed - start);
    stepping.push_back(end - observed);
    state.SetIterationTime(end - start);
  }
  state.counters["observe_us"] = 1e6 * median(observing);
  state.counters["step_us"] = 1e6 * median(stepping);
}

BENCHMARK_CAPTURE(idle_step, tova, "tova,budget=256,interval=512")
    ->Name("Step/tova")
    ->Arg(1)
    ->Arg(32)
    ->UseManualTime()
    ->Iterations(2000)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(idle_step, ams_tova, "ams-tova,budget=256,interval=512")
    ->Name("Step/ams-tova")
    ->Arg(1)
    ->Arg(32)
    ->UseManualTime()
    ->Iterations(2000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kvkeep::step_bench
