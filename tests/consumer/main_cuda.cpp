// SPDX-License-Identifier: Apache-2.0
// An engine over plain CUDA, with memory and a stream of its own: no LibTorch.
#include <cuda_runtime_api.h>
#include <kvkeep/cuda.h>
#include <kvkeep/kvkeep.h>

#include <cstdio>
#include <numeric>
#include <vector>

#ifndef KVKEEP_CUDA_MODEL
#include <kvkeep/cuda/compact.h>
#endif

namespace {

constexpr std::int32_t kLayers = 2, kQueryHeads = 4, kHeads = 2, kDim = 16, kCapacity = 96, kBudget = 40;

/// Memory by cudaMalloc() and a stream that the engine chose; what comes back is freed at the end.
class OfTheEngine final : public kvkeep::DeviceResources {
 public:
  explicit OfTheEngine(cudaStream_t stream) : stream_(stream) {}
  ~OfTheEngine() override {
    cudaStreamSynchronize(stream_);
    for (void* memory : taken_) cudaFree(memory);
  }
  void* stream() override { return stream_; }
  void* allocate(std::int64_t bytes, void*) override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, static_cast<std::size_t>(bytes)) == cudaSuccess) taken_.push_back(memory);
    return memory;
  }
  void free(void*, std::int64_t, void*) noexcept override {}
  [[nodiscard]] std::size_t count() const { return taken_.size(); }

 private:
  cudaStream_t stream_;
  std::vector<void*> taken_;
};

/// The engine's own cache and queries: freed by the engine, after everything that works in them.
struct DeviceMemory {
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* memory : taken) cudaFree(memory);
  }
  std::vector<void*> taken;
};

kvkeep::Tensor on_gpu(DeviceMemory& of, const kvkeep::Shape& sizes, const std::vector<float>& from) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, from.size() * sizeof(float)) == cudaSuccess) of.taken.push_back(memory);
  cudaMemcpy(memory, from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice);
  return {memory, kvkeep::Dtype::f32, sizes, kvkeep::Device{kvkeep::Device::Kind::cuda, 0}};
}

std::vector<float> numbers(std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = static_cast<float>((i * 7919 + 13) % 1009) / 1009.0F - 0.5F;
  return all;
}

int run() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  DeviceMemory memory;
  auto own = std::make_shared<OfTheEngine>(stream);
  const kvkeep::ModelSpec spec = {.query_heads = kQueryHeads,
                                  .kv_heads = kHeads,
                                  .key_dim = kDim,
                                  .value_dim = kDim,
                                  .layers = std::vector<kvkeep::LayerSpec>(kLayers)};
  std::vector<float> keys = numbers(kHeads * kCapacity * kDim);
  for (std::int32_t h = 0; h < kHeads; ++h)  // the first number of a key is its token
    for (std::int32_t t = 0; t < kCapacity; ++t)
      keys[static_cast<std::size_t>((h * kCapacity + t) * kDim)] = static_cast<float>(t);
  std::vector<kvkeep::LayerKv> layers;
  for (std::int32_t l = 0; l < kLayers; ++l)
    layers.emplace_back(kvkeep::DenseKv{on_gpu(memory, {1, kHeads, kCapacity, kDim}, keys),
                                        on_gpu(memory, {1, kHeads, kCapacity, kDim}, keys)});
  const kvkeep::Tensor queries =
      on_gpu(memory, {kCapacity, kQueryHeads, kDim}, numbers(static_cast<std::size_t>(kCapacity * kQueryHeads * kDim)));

  kvkeep::Keeper keeper(spec, kvkeep::make_policy("tova,budget=40,prefill=cut"),
                        {.accelerator = kvkeep::cuda::accelerator(0, own)});
  keeper.bind(layers);
  const std::vector<kvkeep::SequenceId> ids = {1};
  const std::vector<std::int32_t> indptr = {0, kCapacity}, places = {0};
  std::vector<std::int32_t> lengths = {kCapacity};
  keeper.join(1, 0, kCapacity);
  for (std::int32_t l = 0; l < kLayers; ++l)
    keeper.observe(
        {.layer = l, .sequences = ids, .indptr = indptr, .queries = queries, .basis = kvkeep::QueryBasis::post_rope});
  const kvkeep::Report& report = keeper.step({.sequences = ids, .lengths = {lengths, 1}, .places = places}).wait();
  if (report.cuts.empty() || lengths[0] != kBudget || own->count() < 4) return 2;
  cudaStreamSynchronize(stream);
  std::vector<float> row(kBudget * kDim);
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kHeads; ++h) {
      const auto& kept = std::get<kvkeep::DenseKv>(layers[static_cast<std::size_t>(l)]).keys;
      cudaMemcpy(row.data(), kept.data<float>() + h * kCapacity * kDim, row.size() * sizeof(float),
                 cudaMemcpyDeviceToHost);
      const auto positions = keeper.positions(1, l, h);
      for (std::size_t i = 0; i < positions.size(); ++i)
        if (row[i * kDim] != static_cast<float>(positions[i])) return 3;
    }
  std::printf("%d of %d slots of every row stay, and are those that the keeper says\n", kBudget, kCapacity);
  return 0;
}

}  // namespace

int main() {  // 0 when an engine keeps its rows, or there is no GPU and that is said
#ifndef KVKEEP_CUDA_MODEL
  kvkeep::cuda::launch_compact({}, nullptr);  // the launchers are there, too: of no rows
#endif
  try {
    return run();
  } catch (const kvkeep::DeviceError& error) {
    return std::string(error.what()).find("GPU 0 is not there") == std::string::npos ? 1 : 0;
  }
}
