// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory and streams of a GPU that an accelerator takes from the program around it.

#include <atomic>
#include <cstdint>
#include <memory>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Memory of one GPU, and the stream that work goes to: an engine's own, LibTorch's (torch_resources(),
/// kvkeep/torch.h), or a pool (cuda::pool_resources(), kvkeep/cuda.h). Streams are cudaStream_t; null is the default
/// stream. Called from the threads that call the keeper, one at a time; memory may be given back after the keeper.
class DeviceResources {
 public:
  DeviceResources() = default;
  DeviceResources(const DeviceResources&) = delete;
  DeviceResources& operator=(const DeviceResources&) = delete;
  virtual ~DeviceResources() = default;

  /// Where work goes that is launched now.
  [[nodiscard]] virtual void* stream() = 0;

  /// `bytes` (64 or more) on the GPU, aligned to 256, for work that comes later on `stream`. Throws if there are none.
  [[nodiscard]] virtual void* allocate(std::int64_t bytes, void* stream) = 0;

  /// Takes it back from the same stream: work that was launched on it before may still use it. The stream is not being
  /// captured.
  virtual void free(void* memory, std::int64_t bytes, void* stream) noexcept = 0;
};

/// The resources of accelerators that are made without any.
using MakeDeviceResources = std::shared_ptr<DeviceResources> (*)(const Device& device);

namespace detail {
// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<MakeDeviceResources> device_resources{nullptr};
}  // namespace detail

/// From now on accelerators that are given no resources use these; null: pools of their own. Returns what was used
/// before.
inline MakeDeviceResources use_device_resources(MakeDeviceResources make) {
  return detail::device_resources.exchange(make, std::memory_order_acq_rel);
}

}  // namespace kvkeep
