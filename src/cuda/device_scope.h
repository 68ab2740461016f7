// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The current device, while work for another one is launched.

#include <c10/core/DeviceGuard.h>

#include "kvkeep/core/tensor.h"
#include "kvkeep/torch.h"
#include "memory.h"

namespace kvkeep::cuda {

/// Makes a device the current one, in LibTorch and in the runtime that the kernels are linked with, which may be two in
/// one process. Afterwards both have the caller's again.
class DeviceScope {
 public:
  explicit DeviceScope(Device device) : before_(current_device()), index_(device.index), guard_(torch_device(device)) {
    if (before_ != index_) make_current(index_);
  }
  ~DeviceScope() {
    if (before_ != index_) give_back_current(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_, index_;
  c10::DeviceGuard guard_;
};

}  // namespace kvkeep::cuda
