#pragma once
/// The accelerator of kvkeep::cuda. In the tests' execution model its device is the host.

#include "kvkeep/core/accelerator.h"

namespace kvkeep::cuda {

[[nodiscard]] std::shared_ptr<Accelerator> make_accelerator(Device device);

}  // namespace kvkeep::cuda
