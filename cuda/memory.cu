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
  BesideCapture() { expect("upload: beside a capture", cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  ///< of the thread; while this lives, its earlier mode
};

}  // namespace

struct Staging::Buffers {
  struct FreeHost {
    void operator()(void* memory) const { cudaFreeHost(memory); }
  };
  using HostMemory = std::unique_ptr<void, FreeHost>;
  struct Buffer {
    HostMemory memory;
    std::size_t bytes = 0;
    cudaEvent_t gone = nullptr;  ///< after the last copy out of it
  };
  std::array<Buffer, kBuffers> in_turn;
  std::size_t next = 0;
  std::vector<HostMemory> captured;  ///< read again by every replay

  static HostMemory page_locked(std::size_t bytes) {
    void* memory = nullptr;
    expect("upload: page-locked memory", cudaMallocHost(&memory, bytes));
    return HostMemory(memory);
  }

  /// The buffer that was used longest ago, once its copy is done.
  Buffer& take(std::size_t bytes) {
    Buffer& buffer = in_turn[next++ % kBuffers];
    if (buffer.gone == nullptr)
      expect("upload: an event", cudaEventCreateWithFlags(&buffer.gone, cudaEventDisableTiming));
    expect("upload: a page-locked buffer is in use", cudaEventSynchronize(buffer.gone));
    if (buffer.bytes < bytes) {
      const std::size_t larger = bytes + bytes / 2;
      buffer.bytes = 0;
      buffer.memory = page_locked(larger);
      buffer.bytes = larger;
    }
    return buffer;
  }
};

Staging::Staging() : buffers_(std::make_unique<Buffers>()) {}

Staging::~Staging() {
  for (Buffers::Buffer& buffer : buffers_->in_turn) {
    if (buffer.gone == nullptr) continue;
    cudaEventSynchronize(buffer.gone);
    cudaEventDestroy(buffer.gone);
  }
}

void Staging::upload(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const BesideCapture beside;
  if (is_capturing(stream)) {
    void* const kept = buffers_->captured.emplace_back(Buffers::page_locked(bytes)).get();
    std::memcpy(kept, from, bytes);
    expect("upload", cudaMemcpyAsync(to, kept, bytes, cudaMemcpyHostToDevice, stream));
    return;
  }
  Buffers::Buffer& buffer = buffers_->take(bytes);
  std::memcpy(buffer.memory.get(), from, bytes);
  expect("upload", cudaMemcpyAsync(to, buffer.memory.get(), bytes, cudaMemcpyHostToDevice, stream));
  expect("upload", cudaEventRecord(buffer.gone, stream));
}

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
