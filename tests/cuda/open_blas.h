// SPDX-License-Identifier: Apache-2.0
#pragma once
/// cuBLAS, or what the execution model has in its place, on the machine that the tests run on.

#include "device.h"
#include "gram.h"

namespace kvkeep::cuda {

class OpenBlas {
 public:
  OpenBlas() : workspace_(static_cast<std::size_t>(Blas::kWorkspace)) { blas.open(workspace_.data()); }

 private:
  DeviceArray<std::byte> workspace_;  // outlives the handle

 public:
  Blas blas;
};

/// Skips every test where there is no machine, or no cuBLAS.
class OnDeviceWithBlas : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (!IsSkipped() && !Blas::why_not().empty()) GTEST_SKIP() << Blas::why_not();
  }
};

}  // namespace kvkeep::cuda
