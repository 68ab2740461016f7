// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Device memory of the execution model. With Settings::guard it lies in an arena that nobody can read or write but
/// kernels and copies: a host that follows a pointer to the device ends with a message. Without, each block is memory
/// of the host of exactly its size, whose ends the address sanitizer watches.

#include <cstddef>

namespace kvkeep::cuda::model {

[[nodiscard]] std::byte* take_device_memory(std::size_t bytes);
void give_device_memory(std::byte* memory) noexcept;

/// While one lives, device memory can be read and written.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

/// While one lives, nobody can, whatever else lives.
class ClosedDevice {
 public:
  ClosedDevice();
  ~ClosedDevice();
  ClosedDevice(const ClosedDevice&) = delete;
  ClosedDevice& operator=(const ClosedDevice&) = delete;

 private:
  int before_;
};

}  // namespace kvkeep::cuda::model
