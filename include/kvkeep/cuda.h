// SPDX-License-Identifier: Apache-2.0
#pragma once
/// kvkeep on NVIDIA GPUs. Link kvkeep::cuda.

#include <memory>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep::cuda {

/// For one keeper whose cache and queries are on GPU `index`:
///
///     auto policy = kvkeep::make_policy("ams-tova,budget=1024");
///     kvkeep::Keeper keeper(spec, std::move(policy), {.accelerator = kvkeep::cuda::accelerator(0)});
///
/// Kernels run on that GPU's current stream (c10::cuda::CUDAStreamGuard). An event copies one small table from
/// page-locked memory to the GPU, launches a handful of kernels for all layers and sequences, and neither waits nor
/// copies back. An event no larger than an earlier one allocates nothing either, so it can be captured. Keeper::observe
/// cannot be captured. Loads libtorch_cuda if the program has not: call this before anything asks LibTorch for CUDA, or
/// link libtorch_cuda. Throws DeviceError if there is no such GPU, or if this LibTorch has no CUDA.
[[nodiscard]] std::shared_ptr<Machine> accelerator(int index = 0);

}  // namespace kvkeep::cuda
