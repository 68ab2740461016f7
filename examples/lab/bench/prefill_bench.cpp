// SPDX-License-Identifier: Apache-2.0
// Time to the first token under policies that narrow prompts, beside what their layers' work would cost: a random Llama
// of 24 layers, the whole pipeline (decoder, keeper, policy).
//
//   kvkeep_bench --benchmark_filter=Prefill      rows: Prefill/<policy>/<tokens>
//
// Counters: `ms` of the prompt, median; `full_ms` of the same prompt under `full`, in turns with it; `speed_up` full_ms
// / ms; `model_ms` the layer-work model: the sum over the layers that ran, of both passes if there are two, of A(n)
// for the n tokens that entered each, where A(n) = a n + b n^2 is fitted to runs under `full` of the whole prompt and
// of a quarter of it (nothing for observing); `against_model` ms / model_ms.

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"
#include "timing.h"

namespace kvkeep::lm::prefill_bench {
namespace {

constexpr std::int32_t kLayers = 24, kTokens = 4096;

// Written once per run and removed at its end.
class DeepModel {
 public:
  DeepModel()
      : folder_(std::filesystem::temp_directory_path() / ("kvkeep_prefill_bench_" + std::to_string(::getpid()))) {
    io::ModelConfig config = io::ModelConfig::shape(io::Architecture::llama, kLayers, 256, 768, 8, 2, 32, 256);
    write_random_checkpoint(folder_, config, 1, Dtype::f32);
    decoder = std::make_unique<Decoder>(Decoder::open(folder_));
  }
  ~DeepModel() {
    decoder.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  DeepModel(const DeepModel&) = delete;
  DeepModel& operator=(const DeepModel&) = delete;
  std::unique_ptr<Decoder> decoder;

 private:
  std::filesystem::path folder_;
};

Completion first_token(const std::string& policy, std::int32_t tokens) {
  static DeepModel model;
  Request request{.prompt = {}, .new_tokens = 1};
  for (std::int32_t i = 0; i < tokens; ++i) request.prompt.push_back(i * 7919 % 251);
  return std::move(generate(*model.decoder, make_policy(policy), {std::move(request)}).completions.front());
}

double full_ms(std::int32_t tokens) { return 1e3 * first_token("full", tokens).first_token_seconds; }

// A(n) of one layer, in ms.
struct LayerWork {
  double linear = 0, square = 0;
  [[nodiscard]] double at(double n) const { return linear * n + square * n * n; }
};

LayerWork layer_work(double whole, double quarter) {
  const double n = kTokens, m = n / 4;
  LayerWork work;
  work.square = (whole / n - quarter / m) / (n - m) / kLayers;
  work.linear = whole / n / kLayers - work.square * n;
  return work;
}

void Prefill(benchmark::State& state, const std::string& policy) {
  std::vector<double> narrowed, full, quarter;
  Completion done = first_token(policy, kTokens);  // faults the weights in
  for (auto _ : state) {
    quarter.push_back(full_ms(kTokens / 4));
    full.push_back(full_ms(kTokens));
    done = first_token(policy, kTokens);
    narrowed.push_back(1e3 * done.first_token_seconds);
    state.SetIterationTime(done.first_token_seconds);
  }
  const LayerWork work = layer_work(median(full), median(quarter));
  double model = 0;
  for (const std::int32_t entered : done.prompt->entered) model += work.at(entered);
  if (done.prompt->second_pass) model += kLayers * work.at(static_cast<double>(done.prompt->going_on.size()));
  state.counters["ms"] = median(narrowed);
  state.counters["full_ms"] = median(full);
  state.counters["speed_up"] = median(full) / median(narrowed);
  state.counters["model_ms"] = model;
  state.counters["against_model"] = median(narrowed) / model;
  state.counters["layer"] = done.prompt->selection_layer;
  state.counters["going_on"] = static_cast<double>(done.prompt->going_on.size());
}

const int kRegistered = [] {
  for (const char* policy :
       {"asl,budget=512,threshold=0", "asl,budget=512,threshold=0,cache=512", "asl,budget=512,threshold=0.9",
        "asl,budget=512,threshold=2", "asl,budget=512,threshold=2,cache=512", "asl-2pass,budget=512,threshold=2",
        "fastkv,budget=512,layer=12", "fastkv,budget=512,layer=12,window=8,cache=512", "fastkv,budget=512,layer=4",
        "gemfilter,budget=512,layer=9", "pyramidinfer"})
    benchmark::RegisterBenchmark((std::string("Prefill/") + policy + "/" + std::to_string(kTokens)).c_str(),
                                 [policy](benchmark::State& state) { Prefill(state, policy); })
        ->UseManualTime()
        ->Iterations(5)
        ->Unit(benchmark::kMillisecond);
  return 0;
}();

}  // namespace
}  // namespace kvkeep::lm::prefill_bench
