// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory and streams of the execution model as LibTorch's.

#include <memory>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cuda::model {

/// torch_resources() over the CPU, whose allocations are counted, or under Settings::guard the model's own memory.
[[nodiscard]] std::shared_ptr<DeviceResources> resources();

}  // namespace kvkeep::cuda::model
