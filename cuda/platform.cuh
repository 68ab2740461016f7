#pragma once
/// What every kernel builds on: CUDA itself, or, in tests on a machine without a GPU, the execution model of
/// tests/cuda_model, which compiles the same bodies with a host compiler. No LibTorch in this folder.

#include <cstddef>
#include <cstdint>

#if defined(KVKEEP_CUDA_MODEL)
#include "cuda_model.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <mma.h>

namespace kvkeep::cuda {
namespace wmma = nvcuda::wmma;

/// The block's dynamic shared memory, aligned to 32 bytes, as wmma requires for its tiles.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(32) unsigned char kvkeep_dynamic_shared[];
  return reinterpret_cast<std::byte*>(kvkeep_dynamic_shared);
}

}  // namespace kvkeep::cuda
#endif
