// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory of a device from LibTorch's allocator: the one place that the execution model of the tests replaces by its
/// own.

#include <c10/core/Allocator.h>

#include <cstddef>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cuda {

/// For use on the stream that is LibTorch's current one.
[[nodiscard]] c10::DataPtr memory_of_torch(Device device, std::size_t bytes);

}  // namespace kvkeep::cuda
