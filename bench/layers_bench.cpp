// SPDX-License-Identifier: Apache-2.0
// What a layer of a prompt costs an engine that selects: observation, ranks, variance, beside one read of the keys
// and one product with them, in the same run.
//
//   kvkeep_bench --benchmark_filter=Layers       rows: Layers/<model>/<dtype>/<T>/window:<W>
//
// Counters are medians over the iterations, in ms with the same number of threads: `observe` (prompt_scores), `ranks`
// (ranks_of), `variance` (LayerSelector::see less ranks_of, over 8 layers), their sum `layer`; `keys` reads the keys
// once, `product` is LibTorch's matrix product of the window's queries with the keys of their head in f32, which no
// exact observation can do without. `once` and `twice` are SnapKV's slots of a layer that is also ranked, from one
// observation or from two.

#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "kvkeep/torch.h"
#include "timing.h"

namespace kvkeep::layers_bench {
namespace {

struct Shape {
  const char* name;
  std::int32_t query_heads, kv_heads, dim;
};
constexpr Shape kShapes[] = {{"qwen7b", 28, 4, 128}, {"llama8b", 32, 8, 128}};
constexpr std::int32_t kObservedLayers = 8;

/// One layer of one prompt, queries after RoPE.
class PromptLayer {
 public:
  PromptLayer(const Shape& shape, Dtype dtype, std::int32_t length, std::int32_t window)
      : spec_{.query_heads = shape.query_heads,
              .kv_heads = shape.kv_heads,
              .key_dim = shape.dim,
              .value_dim = shape.dim,
              .softmax_scale = 0,
              .rope = {},
              .layers = std::vector<LayerSpec>(1)},
        positions_(static_cast<std::size_t>(length)) {
    std::iota(positions_.begin(), positions_.end(), 0);
    const auto options = at::TensorOptions().dtype(at::kFloat);
    keys_ = at::randn({shape.kv_heads, length, shape.dim}, options).to(torch_dtype(dtype));
    queries_ = at::randn({window, shape.query_heads, shape.dim}, options).to(torch_dtype(dtype));
    const auto bytes = static_cast<std::int64_t>(keys_.element_size());
    table_.key_dtype = dtype;
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      Row row;
      row.head = h, row.length = length, row.first = table_.slots;
      row.keys = {static_cast<std::byte*>(keys_.data_ptr()) + std::int64_t{h} * length * shape.dim * bytes,
                  shape.dim * bytes, shape.dim * bytes};
      row.positions = positions_.data();
      table_.slots += length;
      table_.rows.push_back(row);
    }
    RowGroup group;
    group.queries = {.data = static_cast<const std::byte*>(queries_.const_data_ptr()),
                     .dtype = dtype,
                     .token_stride = queries_.stride(0) * bytes,
                     .head_stride = queries_.stride(1) * bytes,
                     .positions = positions_.data() + length - window,
                     .ring = window,
                     .begin = 0,
                     .count = window};
    group.next_position = length;
    table_.groups.push_back(group);
  }

  [[nodiscard]] PromptScores observe(std::int32_t window) const {
    return prompt_scores(
        {.spec = spec_, .table = table_, .basis = QueryBasis::post_rope, .moment = Moment::prefill_layer},
        {.window = window});
  }

  /// Operands of `product`, in the width that it takes.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> operands() const {
    const std::int64_t group = spec_.group();
    return {keys_.to(at::kFloat), queries_.to(at::kFloat)
                                      .permute({1, 0, 2})
                                      .reshape({spec_.kv_heads, group * queries_.size(0), spec_.key_dim})
                                      .transpose(1, 2)
                                      .contiguous()};
  }

  void read_keys() const {
    std::vector<std::uint64_t> sums(table_.rows.size());
    at::parallel_for(0, static_cast<std::int64_t>(sums.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
        const auto* words = reinterpret_cast<const std::uint64_t*>(table_.rows[r].keys.base);
        sums[r] =
            std::accumulate(words, words + table_.rows[r].keys.width * table_.rows[r].length / 8, std::uint64_t{0});
      }
    });
    benchmark::DoNotOptimize(sums.data());
  }

 private:
  ModelSpec spec_;
  std::vector<std::int32_t> positions_;
  at::Tensor keys_, queries_;
  RowTable table_;
};

std::span<const float> floats(const Tensor& t) { return {t.data<float>(), static_cast<std::size_t>(t.numel())}; }

void Layers(benchmark::State& state, const Shape& shape, Dtype dtype, std::int32_t length, std::int32_t window) {
  const PromptLayer layer(shape, dtype, length, window);
  const auto [keys, queries] = layer.operands();
  const PromptScores scores = layer.observe(window);
  std::vector<float> moved(floats(scores.tokens).begin(), floats(scores.tokens).end());
  std::vector<double> observe, rank, see, read, product, once, twice;
  for (auto _ : state) {
    LayerSelector selector({.select = std::max(2048, 2 * window) < length ? std::max(2048, 2 * window) : length / 2,
                            .window = window,
                            .min_layer = kObservedLayers - 1,
                            .observed_layers = kObservedLayers,
                            .threshold = 0},
                           length);
    for (std::int32_t l = 0; l + 1 < kObservedLayers; ++l) {
      std::rotate(moved.begin(), moved.begin() + static_cast<std::ptrdiff_t>(moved.size() / 7), moved.end());
      selector.see(l, moved);
    }
    observe.push_back(milliseconds([&] { benchmark::DoNotOptimize(layer.observe(window).tokens.bytes()); }));
    rank.push_back(milliseconds([&] { benchmark::DoNotOptimize(ranks_of(floats(scores.tokens)).data()); }));
    see.push_back(
        milliseconds([&] { benchmark::DoNotOptimize(selector.see(kObservedLayers - 1, floats(scores.tokens))); }));
    state.SetIterationTime((observe.back() + see.back()) / 1e3);
    read.push_back(milliseconds([&] { layer.read_keys(); }));
    product.push_back(milliseconds([&] { benchmark::DoNotOptimize(at::bmm(keys, queries).data_ptr()); }));
    const auto slots_and_ranks = [&](bool again) {
      const PromptScores first = layer.observe(window), second = again ? layer.observe(window) : first;
      benchmark::DoNotOptimize(first.tokens.bytes());
      benchmark::DoNotOptimize(second.heads.bytes());
    };
    once.push_back(milliseconds([&] { slots_and_ranks(false); }));
    twice.push_back(milliseconds([&] { slots_and_ranks(true); }));
  }
  state.counters["observe"] = median(observe);
  state.counters["ranks"] = median(rank);
  state.counters["variance"] = median(see) - median(rank);
  state.counters["layer"] = median(observe) + median(see);
  state.counters["keys"] = median(read);
  state.counters["product"] = median(product);
  state.counters["once"] = median(once);
  state.counters["twice"] = median(twice);
}

const int kRegistered = [] {
  for (const Shape& shape : kShapes)
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const std::int32_t length : {8192, 131072}) {
        const std::string name = std::string("Layers/") + shape.name + (dtype == Dtype::f32 ? "/f32/" : "/bf16/") +
                                 std::to_string(length) + "/window:32";
        benchmark::RegisterBenchmark(name.c_str(), Layers, shape, dtype, length, 32)
            ->UseManualTime()
            ->Iterations(length > 8192 ? 5 : 21)
            ->Unit(benchmark::kMillisecond);
      }
  return 0;
}();

}  // namespace
}  // namespace kvkeep::layers_bench
