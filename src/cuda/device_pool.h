#pragma once
/// Memory of an accelerator: which streams used it, and how long graphs need it.

#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "kvkeep/core/accelerator.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Where an accelerator's memory comes from and goes. Not thread safe.
class DevicePool {
 public:
  explicit DevicePool(Device device) : device_(device), streams_(std::make_shared<std::vector<c10::Stream>>()) {}

  [[nodiscard]] Device device() const { return device_; }

  /// The stream that is current on the device, for work that is about to be launched. It is remembered: it may use any
  /// memory of this pool.
  [[nodiscard]] Stream stream();

  /// True once work was launched on a stream that was being captured: a graph knows addresses then, and may run again
  /// at any time.
  [[nodiscard]] bool captured() const { return captured_; }

  /// At least 64 bytes. LibTorch's allocator hands freed memory out again only after every stream that was remembered
  /// has done what it was given until then.
  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) const;

  /// Takes memory that was replaced: frees it, or keeps it as long as this pool lives where a graph may use it.
  void retire(DeviceMemory memory) {
    if (captured_ && memory) retired_.push_back(std::move(memory));
  }

 private:
  Device device_;
  std::shared_ptr<std::vector<c10::Stream>> streams_;  ///< what was allocated may outlive the pool
  bool captured_ = false;
  std::vector<DeviceMemory> retired_;
};

}  // namespace kvkeep::cuda
