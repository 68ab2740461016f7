// The whole event on a GPU: Keeper::step over all layers and sequences of a bf16 cache, beside what LibTorch's operations need for less in the same run.
//
// Names: Event/<policy>/<model>/batch:<B>/<slots before>-><slots after>/<dense or pages>. `us` is GPU time between two CUDA events around keeper.step(), `graph_us` that of the same event
// replayed from a CUDA graph, `host_us` what the call takes on the host until it returns; medians. `torch_us`: topk, sort, and gather of K and V, layer by layer, given finished scores.
// `floor_us` is what reading and writing the kept rows and one reading of all keys would take at this chip's own copy bandwidth.

#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <benchmark/benchmark.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <numeric>

#include "gpu_timing.h"
#include "kvkeep/cuda.h"
#include "kvkeep/kvkeep.h"

namespace kvkeep::cuda {
namespace {

struct Shape {
  const char* name;
  std::int32_t layers, query_heads, kv_heads, dim;
};
constexpr Shape kShapes[] = {{"qwen7b", 28, 28, 4, 128}, {"llama8b", 32, 32, 8, 128}};

struct Size {
  std::int32_t batch, length, budget;
  std::int32_t page = 0;
};

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

/// An engine that has nothing but a cache: its keys and values are noise, its queries one tensor that every layer shows.
class Engine {
 public:
  Engine(const Shape& shape, const std::string& policy, Size size) : shape_(shape), size_(size) {
    const auto there = at::TensorOptions().dtype(kBFloat16).device(Device(c10::kCUDA, 0));
    ModelSpec spec;
    spec.query_heads = shape.query_heads, spec.kv_heads = shape.kv_heads, spec.key_dim = spec.value_dim = shape.dim;
    spec.layers.resize(static_cast<std::size_t>(shape.layers));
    for (std::int32_t f = 0; f < shape.dim / 2; ++f) spec.rope.inv_freq.push_back(std::pow(1e6, -2.0 * f / shape.dim));
    keeper = std::make_unique<Keeper>(spec, make_policy(text(policy, ",budget=", size.budget, ",interval=", size.length - size.budget)), Provided{.accelerator = accelerator(0)});
    const std::int64_t pages = size.page == 0 ? 0 : (size.length + size.page - 1) / size.page;
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      if (size.page == 0) layers.emplace_back(DenseKv{at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there), at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there)});
      else
        layers.emplace_back(PagedKv{at::randn({pages * size.batch, size.page, shape.kv_heads, shape.dim}, there), at::randn({pages * size.batch, size.page, shape.kv_heads, shape.dim}, there)});
    }
    queries_ = at::randn({std::int64_t{size.batch} * (size.length - size.budget), shape.query_heads, shape.dim}, there);
    if (size.page != 0) {
      table_ = at::empty({size.batch, pages}, at::TensorOptions().dtype(kInt32));
      std::iota(table_.data_ptr<std::int32_t>(), table_.data_ptr<std::int32_t>() + table_.numel(), 0);
    }
    lengths_.assign(static_cast<std::size_t>(size.batch), size.budget);
    for (std::int32_t s = 0; s < size.batch; ++s) {
      ids_.push_back(s);
      keeper->join(s, size.budget);
    }
  }

  /// Tokens up to the next event, which is then due.
  void fill() {
    std::vector<std::int32_t> indptr{0};
    for (std::int32_t s = 0; s < size_.batch; ++s) indptr.push_back(indptr.back() + size_.length - size_.budget);
    for (std::int32_t l = 0; l < shape_.layers; ++l) keeper->observe({.layer = l, .sequences = ids_, .indptr = indptr, .queries = queries_, .basis = QueryBasis::pre_rope});
    for (std::int32_t& length : lengths_) length = size_.length;
    if (size_.page != 0) std::iota(table_.data_ptr<std::int32_t>(), table_.data_ptr<std::int32_t>() + table_.numel(), 0);
  }
  Report cut() { return keeper->step({.layers = layers, .sequences = ids_, .lengths = {lengths_}, .block_table = table_}); }

  std::unique_ptr<Keeper> keeper;
  std::vector<LayerKv> layers;

 private:
  Shape shape_;
  Size size_;
  Tensor queries_, table_;
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> lengths_;
};

/// What LibTorch's operations take to do less: no columns, no segments, into new tensors.
double torch_milliseconds(const Shape& shape, Size size, cudaStream_t stream) {
  const auto there = at::TensorOptions().device(Device(c10::kCUDA, 0));
  std::vector<Tensor> keys, values, scores;
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    keys.push_back(at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there.dtype(kBFloat16)));
    values.push_back(at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there.dtype(kBFloat16)));
    scores.push_back(at::randn({size.batch, shape.kv_heads, size.length}, there.dtype(kFloat32)));
  }
  std::vector<double> ms;
  for (int i = 0; i < 7; ++i)
    ms.push_back(gpu_milliseconds(
        [&] {
          for (std::size_t l = 0; l < keys.size(); ++l) {
            const Tensor best = std::get<1>(at::topk(scores[l], size.budget)), slots = std::get<0>(at::sort(best));
            const Tensor index = slots.unsqueeze(3).expand({size.batch, shape.kv_heads, size.budget, shape.dim});
            benchmark::DoNotOptimize(at::gather(keys[l], 2, index));
            benchmark::DoNotOptimize(at::gather(values[l], 2, index));
          }
        },
        stream));
  return median(ms);
}

void event(benchmark::State& state, Shape shape, std::string policy, Size size) {
  const c10::Stream side = c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(Device(c10::kCUDA, 0));
  const c10::StreamGuard guard(side);
  const auto stream = static_cast<cudaStream_t>(side.native_handle());
  Engine engine(shape, policy, size);
  for (int i = 0; i < 3; ++i) {
    engine.fill();
    const Report report = engine.cut();
    if (report.cuts.size() != static_cast<std::size_t>(size.batch) || report.cuts[0].length_after != size.budget) return state.SkipWithError("the event did not cut to the budget");
  }
  std::vector<double> ms, host;
  for (auto _ : state) {
    engine.fill();
    expect(cudaStreamSynchronize(stream));
    ms.push_back(gpu_milliseconds(
        [&] {
          const auto begin = std::chrono::steady_clock::now();
          static_cast<void>(engine.cut());
          host.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
        },
        stream));
    state.SetIterationTime(ms.back() / 1e3);
  }
  engine.fill();
  expect(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  expect(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  static_cast<void>(engine.cut());
  expect(cudaStreamEndCapture(stream, &graph));
  expect(cudaGraphInstantiate(&ready, graph, 0));
  std::vector<double> replays;
  for (int i = 0; i < 21; ++i) replays.push_back(gpu_milliseconds([&] { expect(cudaGraphLaunch(ready, stream)); }, stream));
  expect(cudaGraphExecDestroy(ready));
  expect(cudaGraphDestroy(graph));

  const double rows = static_cast<double>(shape.layers) * shape.kv_heads * size.batch, width = 2.0 * shape.dim;
  const double kept = rows * size.budget * 2 * width * 2, keys = rows * size.length * width;
  state.counters["us"] = median(ms) * 1e3;
  state.counters["graph_us"] = median(replays) * 1e3;
  state.counters["host_us"] = median(host);
  state.counters["torch_us"] = torch_milliseconds(shape, size, stream) * 1e3;
  state.counters["floor_us"] = (kept + keys) / copy_bandwidth() / 1e3;
  state.counters["GBps"] = (kept + keys) / median(replays) / 1e6;
  state.counters["share"] = (kept + keys) / median(replays) / 1e6 / copy_bandwidth();
}

const bool added = [] {
  for (const Shape& shape : kShapes) {
    for (const Size& size : {Size{1, 1536, 1024}, Size{32, 1536, 1024}, Size{1, 1024, 512}, Size{32, 1536, 1024, 16}, Size{1, 32768, 2048}})
      for (const std::string policy : {"ams-tova", "tova", "ams-keydiff", "snapkv", "streaming"}) {
        if (policy != "ams-tova" && (size.length != 1536 || size.page != 0)) continue;
        const std::string name = text("Event/", policy, "/", shape.name, "/batch:", size.batch, "/", size.length, "->", size.budget, size.page == 0 ? "/dense" : "/pages:16");
        benchmark::RegisterBenchmark(name.c_str(), event, shape, policy, size)->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
      }
  }
  return true;
}();

}  // namespace
}  // namespace kvkeep::cuda
