// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An accelerator that no keeper has taken, on the machine that the tests run on.

#if defined(KVKEEP_CUDA_MODEL)
#include "accelerator.h"
#include "torch_streams.h"
#else
#include "kvkeep/cuda.h"
#endif

namespace kvkeep::cuda {

inline std::shared_ptr<Machine> fresh_accelerator() {
#if defined(KVKEEP_CUDA_MODEL)
  return make_accelerator(Device{}, model::resources());  // the model's device memory is the host's
#else
  return accelerator(0);
#endif
}

}  // namespace kvkeep::cuda
