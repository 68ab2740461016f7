#pragma once
/// kvkeep on NVIDIA GPUs. Link kvkeep::cuda.

#include <memory>

#include "kvkeep/core/accelerator.h"

namespace kvkeep::cuda {

/// For one keeper whose cache and queries lie on GPU `index`:
///
///     kvkeep::Keeper keeper(spec, kvkeep::make_policy("ams-tova,budget=1024"), {.accelerator =
///     kvkeep::cuda::accelerator(0)});
///
/// Kernels run on the stream that is current there (c10::cuda::CUDAStreamGuard). An event copies one small table from
/// page-locked memory to the GPU, launches a handful of kernels for all layers and sequences, and neither waits nor
/// copies back; once an event of its size was there before it allocates nothing either, so that it can be captured.
/// Keeper::observe cannot be. Loads libtorch_cuda where the program has not: call it before anything asks LibTorch for
/// CUDA, or link libtorch_cuda. Throws DeviceError where there is no such GPU, or no CUDA in this LibTorch.
[[nodiscard]] std::shared_ptr<Accelerator> accelerator(int index = 0);

}  // namespace kvkeep::cuda
