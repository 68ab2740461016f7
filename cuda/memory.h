// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Copies between host and device in the order of a stream. No LibTorch in here.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvkeep/core/tensor.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Page-locked host memory that uploads start from. An upload does not wait for the device, unless all buffers are
/// still in flight.
class Staging {
 public:
  Staging();
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Copies to the device; `from` may change as soon as it returns. On a stream that is being captured nothing is
  /// copied yet: every replay copies these bytes, which stay in page-locked memory of their own as long as this object
  /// does.
  void upload(void* to, const void* from, std::size_t bytes, Stream stream);

 private:
  struct Buffers;
  std::unique_ptr<Buffers> buffers_;
};

/// Page-locked host memory in which copies from the device end, one at a time.
class Readback {
 public:
  Readback();
  ~Readback();
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;

  /// Begins to copy what the stream has written by then. Does not wait, unless an earlier copy is still on its way;
  /// takes memory for the first copy of a size. Not for a stream that is being captured: only the replay would copy.
  void begin(const void* from, std::size_t bytes, Stream stream);
  /// Waits for that copy, not for what came after it on the stream.
  void finish(void* to, std::size_t bytes);

 private:
  struct Buffer;
  std::unique_ptr<Buffer> buffer_;
};

/// Page-locked host memory, which kernels can read and write at the same address.
[[nodiscard]] std::byte* take_page_locked(std::int64_t bytes);
void free_page_locked(std::byte* memory) noexcept;

/// A point in the work of a stream: after everything that was launched on it before.
class StreamMark {
 public:
  explicit StreamMark(Stream stream);
  /// From now on where this stream is now. Who waits for the point that it marked before goes on waiting for that.
  void move_to(Stream stream);
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;

  /// True if the device has got there. Does not wait.
  [[nodiscard]] bool reached() const;
  void wait() const;
  /// Work that is launched on `stream` from now on waits for it, on the device.
  void hold(Stream stream) const;

 private:
  void* event_ = nullptr;
};

/// A stream of its own on the current device, of the highest priority. Waits for no other unless it is told to.
class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  [[nodiscard]] Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

/// True if work that is launched on the stream goes into a graph.
[[nodiscard]] bool is_capturing(Stream stream);

/// Copies `rows` runs of `bytes` on the device.
void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes,
               std::int64_t rows, Stream stream);

/// Copies to the host and waits.
void download(void* to, const void* from, std::size_t bytes, Stream stream);

/// Work that is launched on `stream` from now on comes after what was launched on `before`. Does not wait.
void order_after(Stream stream, Stream before);

/// Makes a device the current one, to which launches and events of this thread go; afterwards it is the caller's again.
class DeviceScope {
 public:
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0, index_;
};

/// Shared memory that a block of the device can ask for, in bytes.
[[nodiscard]] std::size_t most_shared_bytes(int index);

/// kvkeep/cuda.h
[[nodiscard]] std::shared_ptr<DeviceResources> pool_resources(int index, void* stream);

/// Throws DeviceError if there is no GPU with that number, or if it is too old for the kernels.
void require_device(int index);

}  // namespace kvkeep::cuda
