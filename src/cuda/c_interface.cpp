// SPDX-License-Identifier: Apache-2.0
// What of the C interface needs CUDA.

#include "kvkeep/c_cuda.h"

#include "accelerator.h"
#include "boundary.h"
#include "kvkeep/cuda.h"

extern "C" {

kvkeep_status kvkeep_cuda_accelerator_make(int32_t index, kvkeep_accelerator** accelerator) {
  return kvkeep::guarded([&] {
    kvkeep::required(accelerator, "accelerator") = nullptr;
    *accelerator = new kvkeep_accelerator{kvkeep::cuda::accelerator(index)};
  });
}

kvkeep_status kvkeep_cuda_use_stream(kvkeep_accelerator* accelerator, void* stream) {
  return kvkeep::guarded([&] {
    kvkeep::cuda::use_stream(*kvkeep::required(accelerator, "accelerator").machine,
                             static_cast<kvkeep::cuda::Stream>(stream));
  });
}

}  // extern "C"
