// SPDX-License-Identifier: Apache-2.0
#pragma once
/// kvkeep on NVIDIA GPUs. Link kvkeep::cuda.

#include <memory>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep::cuda {

/// For one keeper whose cache and queries are on GPU `index`:
///
///     auto policy = kvkeep::make_policy("ams-tova,budget=1024");
///     kvkeep::Keeper keeper(spec, std::move(policy), {.accelerator = kvkeep::cuda::accelerator(0)});
///
/// `resources`: its memory, and the stream that its work goes to. Null: LibTorch's after use_torch() (kvkeep/torch.h),
/// else pool_resources(index). An event copies one small table from page-locked memory to the GPU, launches a handful
/// of kernels for all layers and sequences, and neither waits nor copies back. An event no larger than an earlier one
/// allocates nothing either, so it can be captured. Keeper::observe cannot be captured. Throws DeviceError if there is
/// no such GPU, or if it is older than compute capability 8.0.
[[nodiscard]] std::shared_ptr<Machine> accelerator(int index = 0, std::shared_ptr<DeviceResources> resources = nullptr);

/// Memory by cudaMallocAsync, from a pool that is made here and keeps what is given back to it; work goes to `stream`,
/// a cudaStream_t of that GPU, null: the default stream. The stream must outlive whatever uses them. allocate() throws
/// StateError while the stream is captured. Throws DeviceError as accelerator(), and for a GPU without memory pools.
[[nodiscard]] std::shared_ptr<DeviceResources> pool_resources(int index, void* stream = nullptr);

}  // namespace kvkeep::cuda
