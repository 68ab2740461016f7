// SPDX-License-Identifier: Apache-2.0
/// NVIDIA GPUs for C programs. Link kvkeep::cuda, which brings LibTorch, beside kvkeep::kvkeep. CUDA's and LibTorch's
/// headers are not needed.
///
///     kvkeep_accelerator* gpu = NULL;
///     kvkeep_cuda_accelerator_make(0, &gpu);
///     kvkeep_cuda_use_stream(gpu, stream);
///     provided.queries = 1;
///     provided.accelerator = gpu;  // of one keeper, whose cache and queries are on that GPU
///
/// kvkeep_accelerator_free() frees it. docs/inside/cuda.md says what runs there, and when it waits.
#ifndef KVKEEP_C_CUDA_H
#define KVKEEP_C_CUDA_H

#include "kvkeep/c.h"

#ifdef __cplusplus
extern "C" {
#endif

/// For one keeper (kvkeep::cuda::accelerator()). index: of the GPU. KVKEEP_DEVICE_ERROR if there is no such GPU, or if
/// this LibTorch has no CUDA.
KVKEEP_C_API kvkeep_status kvkeep_cuda_accelerator_make(int32_t index, kvkeep_accelerator** accelerator);

/// From now on, in every thread, calls of its keeper launch on `stream`: a cudaStream_t of that GPU, which must outlive
/// the keeper; NULL: the default stream. Without this call they launch on LibTorch's current stream, which for a thread
/// that never chose one is the default stream. Work that was launched before is not waited for.
KVKEEP_C_API kvkeep_status kvkeep_cuda_use_stream(kvkeep_accelerator* accelerator, void* stream);

#ifdef __cplusplus
}
#endif

#endif
