#include "memory.h"

#include <cstring>
#include <vector>

#include "kvkeep/core/error.h"
#include "platform.cuh"

namespace kvkeep::cuda {

#if defined(KVKEEP_CUDA_MODEL)

struct Staging::Buffers {};

Staging::Staging() = default;
Staging::~Staging() = default;
bool Staging::upload(void* to, const void* from, std::size_t bytes, Stream) {
  std::memcpy(to, from, bytes);
  return true;
}

void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes, std::int64_t rows, Stream) {
  for (std::int64_t r = 0; r < rows; ++r) std::memcpy(static_cast<std::byte*>(to) + r * to_stride, static_cast<const std::byte*>(from) + r * from_stride, static_cast<std::size_t>(bytes));
}

void download(void* to, const void* from, std::size_t bytes, Stream) { std::memcpy(to, from, bytes); }

void require_device(int) {}

#else

namespace {

void expect(const char* what, cudaError_t status) { require<DeviceError>(status == cudaSuccess, what, ": ", cudaGetErrorString(status)); }

constexpr std::size_t kBuffers = 4;
constexpr int kOldestChip = 8;  ///< compute capability: bf16 products

}  // namespace

struct Staging::Buffers {
  struct Buffer {
    void* memory = nullptr;
    std::size_t bytes = 0;
    cudaEvent_t gone = nullptr;  ///< behind the last copy that left from it
  };
  std::vector<Buffer> free;
  std::vector<void*> captured;   ///< read again by every replay
  std::size_t next = 0;

  Buffer& take(std::size_t bytes, bool capturing) {
    if (!capturing) {
      free.resize(kBuffers);
      for (Buffer& buffer : free) {  // all at once, so that a capture finds them
        if (buffer.gone == nullptr) expect("upload: an event", cudaEventCreateWithFlags(&buffer.gone, cudaEventDisableTiming));
        if (buffer.bytes >= bytes) continue;
        expect("upload: a page-locked buffer is in use", cudaEventSynchronize(buffer.gone));
        if (buffer.memory != nullptr) cudaFreeHost(buffer.memory);
        buffer.memory = nullptr;
        buffer.bytes = bytes + bytes / 2;
        expect("upload: page-locked memory", cudaMallocHost(&buffer.memory, buffer.bytes));
      }
    }
    require<StateError>(!free.empty() && free[next % free.size()].bytes >= bytes, "upload: a stream is being captured, and no page-locked buffer of ", bytes,
                        " bytes is left; run an event of that size without capturing in between");
    return free[next++ % free.size()];
  }
};

Staging::Staging() : buffers_(std::make_unique<Buffers>()) {}

Staging::~Staging() {
  for (Buffers::Buffer& buffer : buffers_->free) {
    if (buffer.gone != nullptr) {
      cudaEventSynchronize(buffer.gone);
      cudaEventDestroy(buffer.gone);
    }
    if (buffer.memory != nullptr) cudaFreeHost(buffer.memory);
  }
  for (void* memory : buffers_->captured) cudaFreeHost(memory);
}

bool Staging::upload(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes == 0) return true;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  expect("upload", cudaStreamIsCapturing(stream, &status));
  const bool capturing = status != cudaStreamCaptureStatusNone;
  Buffers::Buffer& buffer = buffers_->take(bytes, capturing);
  if (!capturing) expect("upload", cudaEventSynchronize(buffer.gone));  // four uploads ago: long gone
  std::memcpy(buffer.memory, from, bytes);
  expect("upload", cudaMemcpyAsync(to, buffer.memory, bytes, cudaMemcpyHostToDevice, stream));
  if (!capturing) {
    expect("upload", cudaEventRecord(buffer.gone, stream));
    return true;
  }
  buffers_->captured.push_back(buffer.memory);
  buffer.memory = nullptr;
  buffer.bytes = 0;
  return false;
}

void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes, std::int64_t rows, Stream stream) {
  if (bytes == 0 || rows == 0) return;
  expect("copy_rows", cudaMemcpy2DAsync(to, static_cast<std::size_t>(to_stride), from, static_cast<std::size_t>(from_stride), static_cast<std::size_t>(bytes), static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, stream));
}

void download(void* to, const void* from, std::size_t bytes, Stream stream) {
  expect("download", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  expect("download", cudaStreamSynchronize(stream));
}

void require_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  require<DeviceError>(status == cudaSuccess && index >= 0 && index < count, "accelerator: GPU ", index, " is not there: ",
                       status == cudaSuccess ? "" : cudaGetErrorString(status), status == cudaSuccess ? text("this machine has ", count) : std::string());
  cudaDeviceProp chip{};
  expect("accelerator", cudaGetDeviceProperties(&chip, index));
  require<DeviceError>(chip.major >= kOldestChip, "accelerator: GPU ", index, ", ", chip.name, ", has compute capability ", chip.major, ".", chip.minor, "; allowed ", kOldestChip, ".0 or newer");
}

#endif

}  // namespace kvkeep::cuda
