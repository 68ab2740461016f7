// SPDX-License-Identifier: Apache-2.0
// An engine whose cache and queries are LibTorch's tensors, and whose accelerator takes memory and streams from
// LibTorch.
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <kvkeep/cuda.h>
#include <kvkeep/kvkeep.h>
#include <kvkeep/torch.h>

#include <cstdio>

namespace {

constexpr std::int64_t kLayers = 2, kQueryHeads = 4, kHeads = 2, kDim = 16, kCapacity = 96, kBudget = 40;

int run() {
  kvkeep::use_torch();  // copies, memory and streams are LibTorch's from here on
  const std::shared_ptr<kvkeep::Machine> gpu = kvkeep::cuda::accelerator(0);
  const at::TensorOptions options = at::TensorOptions().device(kvkeep::torch_device(gpu->device())).dtype(at::kFloat);
  const kvkeep::ModelSpec spec = {.query_heads = kQueryHeads,
                                  .kv_heads = kHeads,
                                  .key_dim = kDim,
                                  .value_dim = kDim,
                                  .layers = std::vector<kvkeep::LayerSpec>(kLayers)};
  kvkeep::Keeper keeper(spec, kvkeep::make_policy("ams-tova,budget=40,prefill=cut,window=8"), {.accelerator = gpu});
  std::vector<at::Tensor> keys;
  std::vector<kvkeep::LayerKv> layers;
  for (std::int64_t l = 0; l < kLayers; ++l) {
    keys.push_back(at::randn({1, kHeads, kCapacity, kDim}, options));
    keys.back().select(3, 0).copy_(at::arange(kCapacity, options));  // the first number of a key is its token
    layers.emplace_back(kvkeep::DenseKv{keys.back(), at::randn({1, kHeads, kCapacity, kDim}, options)});
  }
  keeper.bind(layers);
  const std::vector<kvkeep::SequenceId> ids = {1};
  const std::vector<std::int32_t> indptr = {0, kCapacity}, places = {0};
  std::vector<std::int32_t> lengths = {kCapacity};
  keeper.join(1, 0, kCapacity);
  for (std::int32_t l = 0; l < kLayers; ++l)
    keeper.observe({.layer = l,
                    .sequences = ids,
                    .indptr = indptr,
                    .queries = at::randn({kCapacity, kQueryHeads, kDim}, options),
                    .basis = kvkeep::QueryBasis::post_rope});
  const kvkeep::Report& report = keeper.step({.sequences = ids, .lengths = {lengths, 1}, .places = places}).wait();
  if (report.cuts.empty() || lengths[0] != kBudget) return 2;
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kHeads; ++h) {
      const at::Tensor row = keys[static_cast<std::size_t>(l)][0][h].select(1, 0).cpu();
      const auto positions = keeper.positions(1, l, h);
      for (std::int64_t i = 0; i < kBudget; ++i)
        if (row[i].item<float>() != static_cast<float>(positions[static_cast<std::size_t>(i)])) return 3;
    }
  std::printf("%d of %d slots of every row stay, and are those that the keeper says\n", static_cast<int>(kBudget),
              static_cast<int>(kCapacity));
  return 0;
}

}  // namespace

int main() {  // 0 when an engine keeps its rows, or there is no GPU and that is said
  try {
    return run();
  } catch (const kvkeep::DeviceError& error) {
    return std::string(error.what()).find("GPU 0 is not there") == std::string::npos ? 1 : 0;
  }
}
