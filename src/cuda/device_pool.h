// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory of an accelerator: the streams that used it, and how long graphs need it.

#include <memory>
#include <vector>

#include "kvkeep/core/machine_memory.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Allocates and frees an accelerator's memory. Not thread safe.
class DevicePool {
 public:
  DevicePool(Device device, std::shared_ptr<DeviceResources> resources);

  [[nodiscard]] Device device() const;

  /// The resources' stream, for work that is about to be launched. The pool remembers it: it may use any memory of this
  /// pool.
  [[nodiscard]] Stream stream();

  /// The same without remembering it.
  [[nodiscard]] Stream current() const;

  /// A stream of the pool's own, beside that of the resources; made by the first call, and remembered. What it shares
  /// with others is ordered by the caller.
  [[nodiscard]] Stream side();

  /// Those that it remembers.
  [[nodiscard]] const std::vector<Stream>& used() const;

  /// True once work was launched on a stream while it was captured: a graph then knows addresses, and may run again at
  /// any time.
  [[nodiscard]] bool captured() const { return captured_; }

  /// At least 64 bytes. What is freed is used again only after every remembered stream has finished the work it had at
  /// that point, which the stream that it was allocated for waits for. It goes back once none of them is captured.
  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) const;

  /// Takes memory that was replaced: frees it, or keeps it as long as this pool lives if a graph may use it.
  void retire(DeviceMemory memory) {
    if (captured_ && memory) retired_.push_back(std::move(memory));
  }

 private:
  struct Home;
  std::shared_ptr<Home> home_;  ///< allocated memory may outlive the pool
  bool captured_ = false;
  std::vector<DeviceMemory> retired_;
};

}  // namespace kvkeep::cuda
