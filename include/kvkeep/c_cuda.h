// SPDX-License-Identifier: Apache-2.0
/// NVIDIA GPUs for C programs. Link kvkeep::cuda beside kvkeep::kvkeep. CUDA's headers are not needed.
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

/// Memory and the stream of a GPU, from the engine (kvkeep::DeviceResources). Called by the threads that call the
/// keeper, one at a time; free() may come after kvkeep_keeper_free(). Streams are cudaStream_t.
typedef struct kvkeep_cuda_resources {
  size_t size;                     ///< sizeof(kvkeep_cuda_resources)
  void* context;                   ///< passed to each
  void* (*stream)(void* context);  ///< where work goes that is launched now; NULL: to the default stream
  /// `bytes` on the GPU, aligned to 256, for work that comes later on `stream`; NULL: there are none.
  void* (*allocate)(void* context, size_t bytes, void* stream);
  /// Takes it back: work that is on `stream` by now may still use it.
  void (*free)(void* context, void* memory, size_t bytes, void* stream);
} kvkeep_cuda_resources;

/// For one keeper (kvkeep::cuda::accelerator()), with a pool of its own by cudaMallocAsync and the default stream.
/// index: of the GPU. KVKEEP_DEVICE_ERROR if there is no such GPU.
KVKEEP_C_API kvkeep_status kvkeep_cuda_accelerator_make(int32_t index, kvkeep_accelerator** accelerator);
/// The same with resources of the engine, which are copied.
KVKEEP_C_API kvkeep_status kvkeep_cuda_accelerator_make_with(int32_t index, const kvkeep_cuda_resources* resources,
                                                             kvkeep_accelerator** accelerator);

/// From now on, in every thread, calls of its keeper launch on `stream`: a cudaStream_t of that GPU, which must outlive
/// the keeper; NULL: the default stream. Work that was launched before is not waited for.
KVKEEP_C_API kvkeep_status kvkeep_cuda_use_stream(kvkeep_accelerator* accelerator, void* stream);

#ifdef __cplusplus
}
#endif

#endif
