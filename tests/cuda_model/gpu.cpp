// SPDX-License-Identifier: Apache-2.0
#include "accelerator.h"
#include "cuda_model.h"

namespace kvkeep::cuda {

Device gpu(int index) { return model::settings().host ? Device{} : Device{.kind = Device::Kind::cuda, .index = index}; }

}  // namespace kvkeep::cuda
