// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory of an accelerator: the streams that used it, and how long graphs need it.

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "kvkeep/core/machine_memory.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Allocates and frees an accelerator's memory. Not thread safe.
class DevicePool {
 public:
  explicit DevicePool(Device device) : device_(device), streams_(std::make_shared<std::vector<c10::Stream>>()) {}

  [[nodiscard]] Device device() const { return device_; }

  /// The stream for work that is about to be launched: that of use_stream(), else LibTorch's current one. The pool
  /// remembers it: it may use any memory of this pool.
  [[nodiscard]] Stream stream();

  /// The same without remembering it.
  [[nodiscard]] Stream current() const { return static_cast<Stream>(now().native_handle()); }

  void use_stream(Stream stream);

  /// Those that it remembers.
  [[nodiscard]] std::vector<Stream> used() const;

  /// True once work was launched on a stream while it was captured: a graph then knows addresses, and may run again at
  /// any time.
  [[nodiscard]] bool captured() const { return captured_; }

  /// At least 64 bytes. LibTorch's allocator reuses freed memory only after every remembered stream has finished the
  /// work it had at that point.
  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) const;

  /// Takes memory that was replaced: frees it, or keeps it as long as this pool lives if a graph may use it.
  void retire(DeviceMemory memory) {
    if (captured_ && memory) retired_.push_back(std::move(memory));
  }

 private:
  [[nodiscard]] c10::Stream now() const;

  Device device_;
  std::optional<c10::Stream> own_;                     ///< of use_stream()
  std::shared_ptr<std::vector<c10::Stream>> streams_;  ///< allocated memory may outlive the pool
  bool captured_ = false;
  std::vector<DeviceMemory> retired_;
};

}  // namespace kvkeep::cuda
