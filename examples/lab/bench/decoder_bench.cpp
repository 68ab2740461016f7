// SPDX-License-Identifier: Apache-2.0
// Decode tokens/s of the reference decoder on a random checkpoint of more than 200 MB, beside the memory-read bandwidth
// of the same run. A decode step must read every weight once, so `read_share` says how close it is to the least time.

#include <ATen/Parallel.h>
#include <ATen/ops/randperm.h>
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvlab/decoder.h"

namespace kvkeep::lm::decoder_bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Bytes/s of summing a buffer far larger than any cache with all threads, each reading along four streams; the best of
// several passes.
double read_bandwidth() {
  static const double best = [] {
    constexpr std::int64_t kStreams = 4, kWords = std::int64_t{256} << 17;  // 256 MB
    const std::vector<std::uint64_t> buffer(kWords, 1);
    const std::int64_t threads = at::get_num_threads();
    double fastest = 0;
    for (int pass = 0; pass < 16; ++pass) {
      const auto start = Clock::now();
      at::parallel_for(0, threads, 1, [&](std::int64_t first, std::int64_t last) {
        const std::int64_t begin = first * kWords / threads,
                           stream = (last * kWords / threads - begin) / kStreams / 8 * 8;
        std::uint64_t sums[8] = {};
        for (std::int64_t i = 0; i < stream; i += 8)
          for (std::int64_t k = 0; k < kStreams; ++k)
            for (std::int64_t lane = 0; lane < 8; ++lane)
              sums[lane] += buffer[static_cast<std::size_t>(begin + k * stream + i + lane)];
        benchmark::DoNotOptimize(std::accumulate(sums, sums + 8, std::uint64_t{0}));
      });
      fastest = std::max(fastest, static_cast<double>(kWords * sizeof(std::uint64_t)) / seconds_since(start));
    }
    return fastest;
  }();
  return best;
}

// A checkpoint in the shape of Qwen2 with about 7 M weights per layer, written once per run and removed at its end.
class Checkpoint {
 public:
  Checkpoint(Dtype dtype, std::int32_t layers)
      : folder_(std::filesystem::temp_directory_path() /
                ("kvkeep_bench_" + std::to_string(::getpid()) + name_of(dtype) + std::to_string(layers))) {
    io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen2, layers, 896, 2432, 14, 2, 64, 16384);
    write_random_checkpoint(folder_, config, 1, dtype);
    decoder = std::make_unique<Decoder>(Decoder::open(folder_));
  }
  ~Checkpoint() {
    decoder.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::unique_ptr<Decoder> decoder;

 private:
  std::filesystem::path folder_;
};

Decoder& decoder_of(Dtype dtype, std::int32_t layers) {
  static std::map<std::pair<Dtype, std::int32_t>, std::unique_ptr<Checkpoint>> made;
  auto& checkpoint = made[{dtype, layers}];
  if (!checkpoint) checkpoint = std::make_unique<Checkpoint>(dtype, layers);
  return *checkpoint->decoder;
}

// About 60 M weights in f32 and 115 M in bf16: more than 200 MB.
Decoder& decoder_of(Dtype dtype) { return decoder_of(dtype, dtype == Dtype::f32 ? 8 : 16); }

// `page_size` 0: a dense cache.
void decode(benchmark::State& state, Dtype dtype, std::int32_t page_size = 0) {
  Decoder& decoder = decoder_of(dtype);
  const auto batch = static_cast<std::int32_t>(state.range(0));
  constexpr std::int32_t kHeld = 256;  // slots in use, as after an eviction
  const std::vector<DenseKv> dense = decoder.make_cache(batch, kHeld + 1, dtype);
  std::vector<LayerKv> cache(dense.begin(), dense.end());
  at::Tensor block_table;
  if (page_size > 0) {
    const std::int32_t pages = kHeld / page_size + 1;
    cache = decoder.make_pages(batch * pages, page_size, dtype);
    block_table = at::randperm(batch * pages, at::TensorOptions().dtype(at::kInt)).view({batch, pages});
  }
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(batch), 7), positions(ids.size(), 4096),
      lengths(ids.size(), kHeld);
  std::vector<std::int32_t> indptr(ids.size() + 1), rows(ids.size());
  std::iota(indptr.begin(), indptr.end(), 0);
  std::iota(rows.begin(), rows.end(), 0);
  const Step step{ids, indptr, positions, rows, lengths};
  benchmark::DoNotOptimize(decoder.forward(step, cache, block_table));  // faults the weights in
  const double bandwidth = read_bandwidth();
  double fastest = 1e9,
         seconds = 0;  // the bandwidth is that of the best pass, so the share compares it with the best step
  for (auto _ : state) {
    const auto start = Clock::now();
    benchmark::DoNotOptimize(decoder.forward(step, cache, block_table));
    const double took = seconds_since(start);
    fastest = std::min(fastest, took);
    seconds += took;
  }
  const double weights_per_second = static_cast<double>(decoder.bytes_per_step()) / fastest;
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(batch) * static_cast<double>(state.iterations()) / seconds);
  state.counters["weight_bytes"] = static_cast<double>(decoder.bytes_per_step());
  state.counters["weight_bytes/s"] = weights_per_second;
  state.counters["read_bytes/s"] = bandwidth;
  state.counters["read_share"] = weights_per_second / bandwidth;
}

void prefill(benchmark::State& state, Dtype dtype) {
  Decoder& decoder = decoder_of(dtype);
  const auto tokens = static_cast<std::int32_t>(state.range(0));
  const auto cache = decoder.make_cache(1, tokens, dtype);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 7), indptr{0, tokens}, row{0}, length{0};
  std::vector<std::int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), 0);
  const Step step{ids, indptr, positions, row, length};
  for (auto _ : state) benchmark::DoNotOptimize(decoder.forward(step, cache));
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsIterationInvariantRate);
  const double flops =
      2.0 * static_cast<double>(decoder.bytes_per_step()) / static_cast<double>(element_size(dtype)) * tokens;
  state.counters["flop/s"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

// A prompt from position 0, over the same cache again and again.
class Prompt {
 public:
  Prompt(Decoder& decoder, std::int32_t tokens)
      : decoder_(decoder),
        cache_(decoder.make_cache(1, tokens)),
        ids_(static_cast<std::size_t>(tokens), 7),
        positions_(ids_.size()),
        indptr_{0, tokens} {
    std::iota(positions_.begin(), positions_.end(), 0);
  }
  double seconds(const StepOptions& options = {}) {
    const auto start = Clock::now();
    benchmark::DoNotOptimize(decoder_.forward({ids_, indptr_, positions_, zero_, zero_}, cache_, options));
    return seconds_since(start);
  }
  double fastest(int runs) {
    double best = 1e9;
    for (int run = 0; run < runs; ++run) best = std::min(best, seconds());
    return best;
  }

 private:
  Decoder& decoder_;
  std::vector<LayerCache> cache_;
  std::vector<std::int32_t> ids_, positions_, indptr_, zero_{0};
};

// A prompt of which some tokens continue after one layer. `layer_work` is what its layers cost on the tokens that they
// see, each as in a full run on that many.
void narrowed_prefill(benchmark::State& state) {
  constexpr std::int32_t kLayers = 12;
  Decoder& decoder = decoder_of(Dtype::f32, kLayers);
  const auto tokens = static_cast<std::int32_t>(state.range(0)), layer = static_cast<std::int32_t>(state.range(1)),
             kept = static_cast<std::int32_t>(state.range(2));
  std::vector<std::int32_t> places;  // evenly over the prompt, including the last token
  for (std::int32_t i = 1; i <= kept; ++i)
    places.push_back(static_cast<std::int32_t>(std::int64_t{i} * tokens / kept - 1));
  const StepOptions options{.on_attended = [&](const LayerSight& sight) {
    return sight.layer == layer ? std::optional(Onward{places, {0, kept}}) : std::nullopt;
  }};
  Prompt prompt(decoder, tokens);
  const double full = prompt.fastest(3), narrow = Prompt(decoder, kept).fastest(5);
  double fastest = 1e9;
  for (auto _ : state) fastest = std::min(fastest, prompt.seconds(options));
  const double layer_work = ((layer + 1) * full + (kLayers - layer - 1) * narrow) / kLayers;
  state.counters["seconds"] = fastest;
  state.counters["full_seconds"] = full;
  state.counters["kept_alone_seconds"] = narrow;
  state.counters["layer_work_seconds"] = layer_work;
  state.counters["of_layer_work"] = fastest / layer_work;
}

BENCHMARK_CAPTURE(decode, f32, Dtype::f32)
    ->ArgName("batch")
    ->Arg(1)
    ->Arg(4)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decode, bf16, Dtype::bf16)
    ->ArgName("batch")
    ->Arg(1)
    ->Arg(4)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decode, bf16_pages_of_16, Dtype::bf16, 16)
    ->ArgName("batch")
    ->Arg(1)
    ->Arg(4)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, f32, Dtype::f32)->ArgName("tokens")->Arg(512)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, bf16, Dtype::bf16)
    ->ArgName("tokens")
    ->Arg(512)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(narrowed_prefill)
    ->ArgNames({"tokens", "layer", "kept"})
    ->Args({2048, 4, 256})
    ->Iterations(3)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvkeep::lm::decoder_bench
