// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The accelerator of kvkeep::cuda. In the tests' execution model its device is the host.

#include "kvkeep/core/tensor.h"
#include "kvkeep/policy/machine.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Workspace of folded spans. What needs more is done in several turns.
struct FoldBounds {
  std::int64_t matrix_bytes = std::int64_t{64} << 20;  ///< of matrices that are factorised together
  std::int64_t view_bytes = std::int64_t{256} << 20;   ///< that tokens may need that read a memory together
  std::int64_t near_bytes = std::int64_t{64} << 20;    ///< of a layer's opened factors; the rest is read over the bus
};

[[nodiscard]] std::shared_ptr<Machine> make_accelerator(Device device, std::shared_ptr<DeviceResources> resources,
                                                        FoldBounds bounds = {});

/// Of accelerators that are given none. Throws as require_device().
[[nodiscard]] std::shared_ptr<DeviceResources> default_resources(int index);

/// The GPU of that number. Under the execution model it can be the host.
[[nodiscard]] Device gpu(int index);

}  // namespace kvkeep::cuda
