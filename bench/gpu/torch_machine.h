// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The machine as LibTorch sees it: where tensors of the benches are, and the stream that works on them.

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "cuda/fresh_accelerator.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/torch.h"
#include "machine.h"

namespace kvkeep::cuda {

/// A stream of LibTorch's that is current while this lives.
class TorchStream {
 public:
  TorchStream() : accelerator_(fresh_accelerator()) {
    if constexpr (!kModel) {
      const c10::Stream side = c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device());
      guard_.emplace(side);
      native_ = static_cast<Stream>(side.native_handle());
    }
  }
  [[nodiscard]] at::Device device() const { return torch_device(accelerator_->device()); }
  [[nodiscard]] Stream native() const { return native_; }
  [[nodiscard]] const std::shared_ptr<Machine>& accelerator() const { return accelerator_; }

 private:
  std::shared_ptr<Machine> accelerator_;
  std::optional<c10::StreamGuard> guard_;
  Stream native_ = nullptr;
};

}  // namespace kvkeep::cuda
