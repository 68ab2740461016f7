#pragma once
/// The accelerator of kvkeep::cuda. In the tests' execution model its device is the host.

#include "kvkeep/policy/machine.h"

namespace kvkeep::cuda {

[[nodiscard]] std::shared_ptr<Machine> make_accelerator(Device device);

}  // namespace kvkeep::cuda
