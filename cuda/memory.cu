// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <array>
#include <cstring>
#include <vector>

#include "kvkeep/core/error.h"
#include "platform.cuh"

namespace kvkeep::cuda {

namespace {

void expect(const char* what, cudaError_t status) {
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

constexpr std::size_t kBuffers = 4;
constexpr int kOldestChip = 8;  ///< compute capability: bf16 products

/// While it lives, this thread may wait and take page-locked memory even if a stream is being captured, here or
/// elsewhere: neither goes into a graph.
class BesideCapture {
 public:
  BesideCapture() { expect("beside a capture", cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  ///< of the thread; while this lives, its earlier mode
};

}  // namespace

namespace page_locked {

struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
using HostMemory = std::unique_ptr<void, FreeHost>;

inline HostMemory take(std::size_t bytes) {
  void* memory = nullptr;
  expect("page-locked memory", cudaMallocHost(&memory, bytes));
  return HostMemory(memory);
}

/// Page-locked memory that one copy at a time uses.
struct Buffer {
  HostMemory memory;
  std::size_t bytes = 0;
  cudaEvent_t done = nullptr;  ///< after the last copy

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (done == nullptr) return;
    cudaEventSynchronize(done);
    cudaEventDestroy(done);
  }

  /// Waits for the last copy.
  void wait() {
    if (done != nullptr) expect("a page-locked buffer is in use", cudaEventSynchronize(done));
  }

  /// Room for the next copy, once the last is done.
  void fit(std::size_t wanted) {
    wait();
    if (done == nullptr) expect("an event", cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    if (bytes >= wanted) return;
    const std::size_t larger = wanted + wanted / 2;
    bytes = 0;
    memory = take(larger);
    bytes = larger;
  }
};

}  // namespace page_locked

struct Staging::Buffers {
  std::array<page_locked::Buffer, kBuffers> in_turn;
  std::size_t next = 0;
  std::vector<page_locked::HostMemory> captured;  ///< read again by every replay
};

Staging::Staging() : buffers_(std::make_unique<Buffers>()) {}

Staging::~Staging() = default;

void Staging::upload(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const BesideCapture beside;
  if (is_capturing(stream)) {
    void* const kept = buffers_->captured.emplace_back(page_locked::take(bytes)).get();
    std::memcpy(kept, from, bytes);
    expect("upload", cudaMemcpyAsync(to, kept, bytes, cudaMemcpyHostToDevice, stream));
    return;
  }
  page_locked::Buffer& buffer = buffers_->in_turn[buffers_->next++ % kBuffers];  // that was used longest ago
  buffer.fit(bytes);
  std::memcpy(buffer.memory.get(), from, bytes);
  expect("upload", cudaMemcpyAsync(to, buffer.memory.get(), bytes, cudaMemcpyHostToDevice, stream));
  expect("upload", cudaEventRecord(buffer.done, stream));
}

struct Readback::Buffer : page_locked::Buffer {};

Readback::Readback() : buffer_(std::make_unique<Buffer>()) {}

Readback::~Readback() = default;

void Readback::begin(const void* from, std::size_t bytes, Stream stream) {
  const BesideCapture beside;
  buffer_->fit(bytes);
  expect("readback", cudaMemcpyAsync(buffer_->memory.get(), from, bytes, cudaMemcpyDeviceToHost, stream));
  expect("readback", cudaEventRecord(buffer_->done, stream));
}

void Readback::finish(void* to, std::size_t bytes) {
  const BesideCapture beside;
  buffer_->wait();
  std::memcpy(to, buffer_->memory.get(), bytes);
}

std::byte* take_page_locked(std::int64_t bytes) {
  const BesideCapture beside;
  void* memory = nullptr;
  expect("page-locked memory", cudaMallocHost(&memory, static_cast<std::size_t>(bytes)));
  return static_cast<std::byte*>(memory);
}

void free_page_locked(std::byte* memory) noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaFreeHost(memory);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

StreamMark::StreamMark(Stream stream) {
  const BesideCapture beside;
  cudaEvent_t event = nullptr;
  expect("mark: an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  event_ = event;
  const cudaError_t status = cudaEventRecord(event, stream);
  if (status != cudaSuccess) cudaEventDestroy(event);
  expect("mark", status);
}

void StreamMark::move_to(Stream stream) { expect("mark", cudaEventRecord(static_cast<cudaEvent_t>(event_), stream)); }

StreamMark::~StreamMark() { cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

bool StreamMark::reached() const {
  const BesideCapture beside;
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event_));
  if (status == cudaErrorNotReady) return false;
  expect("mark: has it been reached", status);
  return true;
}

void StreamMark::hold(Stream stream) const {
  expect("mark: hold a stream", cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event_), 0));
}

void StreamMark::wait() const {
  const BesideCapture beside;
  expect("mark: wait", cudaEventSynchronize(static_cast<cudaEvent_t>(event_)));
}

SideStream::SideStream() {
  const BesideCapture beside;
  int least = 0, greatest = 0;
  expect("a stream", cudaDeviceGetStreamPriorityRange(&least, &greatest));
  expect("a stream", cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
}

SideStream::~SideStream() { cudaStreamDestroy(stream_); }

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  expect("is_capturing", cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes,
               std::int64_t rows, Stream stream) {
  if (bytes == 0 || rows == 0) return;
  expect("copy_rows", cudaMemcpy2DAsync(to, static_cast<std::size_t>(to_stride), from,
                                        static_cast<std::size_t>(from_stride), static_cast<std::size_t>(bytes),
                                        static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, stream));
}

void download(void* to, const void* from, std::size_t bytes, Stream stream) {
  expect("download", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  expect("download", cudaStreamSynchronize(stream));
}

void order_after(Stream stream, Stream before) {
  if (stream == before) return;
  const StreamMark mark(before);
  mark.hold(stream);
}

DeviceScope::DeviceScope(int index) : index_(index) {
  expect("current device", cudaGetDevice(&before_));
  if (before_ != index_) expect("current device", cudaSetDevice(index_));
}

DeviceScope::~DeviceScope() {
  if (before_ != index_) static_cast<void>(cudaSetDevice(before_));
}

namespace {

/// A pool of CUDA's, whose memory stays with it: an event as large as an earlier one asks the driver for nothing.
class PoolResources final : public DeviceResources {
 public:
  PoolResources(int index, Stream stream) : index_(index), stream_(stream) {
    int pools = 0;
    expect("a memory pool", cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, index));
    KVKEEP_REQUIRE_AS(DeviceError, pools != 0, "accelerator: GPU ", index,
                      " has no memory pools (cudaMallocAsync); allowed resources of the program's own");
    cudaMemPoolProps of{};
    of.allocType = cudaMemAllocationTypePinned;
    of.location = {.type = cudaMemLocationTypeDevice, .id = index};
    expect("a memory pool", cudaMemPoolCreate(&pool_, &of));
    std::uint64_t all = ~std::uint64_t{0};
    expect("a memory pool", cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all));
  }
  ~PoolResources() override { cudaMemPoolDestroy(pool_); }

  [[nodiscard]] void* stream() override { return stream_; }

  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    const DeviceScope scope(index_);
    KVKEEP_REQUIRE_AS(StateError, !is_capturing(static_cast<Stream>(stream)), "accelerator: ", bytes,
                      " bytes are needed while the stream is being captured; allowed what has run in this size before");
    const BesideCapture beside;
    void* memory = nullptr;
    expect("memory of the accelerator's pool",
           cudaMallocFromPoolAsync(&memory, static_cast<std::size_t>(bytes), pool_, static_cast<Stream>(stream)));
    return memory;
  }

  void free(void* memory, std::int64_t, void* stream) noexcept override {
    try {
      const DeviceScope scope(index_);
      cudaFreeAsync(memory, static_cast<Stream>(stream));
    } catch (const std::exception&) {  // the device is gone, and its memory with it
    }
  }

 private:
  const int index_;
  const Stream stream_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace

std::shared_ptr<DeviceResources> pool_resources(int index, void* stream) {
  require_device(index);
  return std::make_shared<PoolResources>(index, static_cast<Stream>(stream));
}

std::size_t most_shared_bytes(int index) {
  int bytes = 0;
  expect("shared memory", cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return static_cast<std::size_t>(bytes);
}

void require_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess && index >= 0 && index < count, "accelerator: GPU ", index,
                    " is not there: ", status == cudaSuccess ? "" : cudaGetErrorString(status),
                    status == cudaSuccess ? text("this machine has ", count) : std::string());
  cudaDeviceProp chip{};
  expect("accelerator", cudaGetDeviceProperties(&chip, index));
  KVKEEP_REQUIRE_AS(DeviceError, chip.major >= kOldestChip, "accelerator: GPU ", index, ", ", chip.name,
                    ", has compute capability ", chip.major, ".", chip.minor, "; allowed ", kOldestChip, ".0 or newer");
}

}  // namespace kvkeep::cuda
