// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime for the execution model, as far as kvkeep and its tests use it: memory that is the host's, streams
// whose work runs at once or, while they are held, when somebody waits for it, captures that record kernels with their
// arguments and copies with their addresses, graphs that run them again. What waits or allocates is refused while a
// stream is captured, unless the thread has said otherwise, and ends that capture, as with CUDA. LibTorch sees these
// streams as those of the CPU. For one thread. Any device can be current, but streams are those of device 0, and take
// no work while another one is.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <map>
#include <memory>

#include "cuda_model.h"
#include "device_memory.h"

struct CUgraphNode_st {
  cudaGraphNodeType type;
  std::function<void()> work;
};
struct CUgraph_st {
  std::vector<CUgraphNode_st> nodes;
};
struct CUgraphExec_st {
  std::vector<CUgraphNode_st> nodes;
};
struct CUstream_st {
  std::vector<std::function<void()>> waiting;
  std::unique_ptr<CUgraph_st> captured;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool spoilt = false;  ///< the capture, by what it does not allow
};
struct CUevent_st {
  cudaStream_t stream = nullptr;
  bool in_capture = false, reached = true;
  std::chrono::steady_clock::time_point at;
};

namespace kvkeep::cuda::model {
namespace {

struct Runtime {
  CUstream_st null;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  cudaStreamCaptureMode thread = cudaStreamCaptureModeGlobal;
  cudaStream_t current = nullptr;
  bool held = false;
  int device = 0;  ///< the current one; streams are those of device 0
  std::vector<Recorded> recorded;
  cudaError_t last_error = cudaSuccess;
  const char* launching = "";
  std::map<const void*, std::size_t> shared_bytes;  ///< dynamic, that kernels asked for
};

Runtime& runtime() {
  static auto* const only = new Runtime;  // outlives what is freed at the end of the program
  return *only;
}

CUstream_st& stream_of(cudaStream_t stream) { return stream == nullptr ? runtime().null : *stream; }

void add(cudaStream_t to, cudaGraphNodeType type, std::function<void()> work) {
  if (runtime().device != 0) throw std::logic_error("work for a stream of device 0 while another device is current");
  CUstream_st& stream = stream_of(to);
  if (stream.captured != nullptr)
    stream.captured->nodes.push_back({type, std::move(work)});
  else if (runtime().held)
    stream.waiting.push_back(std::move(work));
  else
    work();
}

void finish(CUstream_st& stream) {
  for (const std::function<void()>& work : std::exchange(stream.waiting, {})) work();
}

/// What a call returns; an error is remembered for cudaGetLastError().
cudaError_t told(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) runtime().last_error = status;
  return status;
}

/// For calls that CUDA calls unsafe while a stream is being captured.
cudaError_t beside_captures() {
  cudaError_t status = cudaSuccess;
  if (runtime().thread == cudaStreamCaptureModeRelaxed) return status;
  for (const auto& stream : runtime().streams)
    if (stream->captured != nullptr && stream->mode != cudaStreamCaptureModeRelaxed) {
      stream->spoilt = true;
      status = cudaErrorStreamCaptureUnsupported;
    }
  return told(status);
}

void copy(void* to, const void* from, std::size_t bytes) {
  const DeviceAccess access;
  if (bytes > 0) std::memcpy(to, from, bytes);
}

cudaStream_t new_stream() { return runtime().streams.emplace_back(std::make_unique<CUstream_st>()).get(); }

/// The streams above as LibTorch's, under the device that the model's memory is on.
struct HostStreams final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> {
  const c10::impl::DeviceGuardImplInterface* before =
      c10::impl::getDeviceGuardImpl(c10::DeviceType::CPU);  // what this takes the place of, held for the leak sanitizer

  static c10::Stream as_torch(cudaStream_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), reinterpret_cast<c10::StreamId>(stream));
  }
  static cudaStream_t as_cuda(const c10::Stream& stream) { return reinterpret_cast<cudaStream_t>(stream.id()); }

  c10::Stream getStream(c10::Device) const noexcept override { return as_torch(runtime().current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(nullptr); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return as_torch(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return as_torch(std::exchange(runtime().current, as_cuda(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return as_cuda(stream); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    runtime().recorded.push_back({memory.get(), as_cuda(stream)});
  }
};
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CPU, new HostStreams);

}  // namespace

void name_launch(const char* name) { runtime().launching = name; }

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body) {
  const auto& [blocks, of_block, shared, stream, attributes, count] = config;
  constexpr std::size_t kWithoutAsking = 48 << 10;
  const bool asked = runtime().shared_bytes.contains(kernel);
  const std::size_t most = asked ? static_cast<std::size_t>(chip().shared_bytes) : kWithoutAsking;
  if (of_block.x == 0 || of_block.x > 1024 || of_block.x % 32 != 0 || of_block.y != 1 || of_block.z != 1 ||
      blocks.y > 65535 || blocks.z > 65535 || count > 1 ||
      (count == 1 && attributes->id != cudaLaunchAttributeProgrammaticStreamSerialization))
    return told(cudaErrorInvalidConfiguration);
  const bool early = count == 1 && attributes->val.programmaticStreamSerializationAllowed != 0;
  if (shared > (asked ? runtime().shared_bytes.at(kernel) : kWithoutAsking)) return told(cudaErrorInvalidValue);
  add(stream, cudaGraphNodeTypeKernel,
      [name = runtime().launching, blocks = dim3(blocks), threads = static_cast<int>(of_block.x), bytes = shared, most,
       early, body = std::move(body)] { run(name, blocks, threads, bytes, most, early, body); });
  return cudaSuccess;
}

void hold_streams(bool hold) {
  runtime().held = hold;
  if (!hold) static_cast<void>(cudaDeviceSynchronize());
}

std::vector<Recorded>& recorded() { return runtime().recorded; }

}  // namespace kvkeep::cuda::model

using namespace kvkeep::cuda::model;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorIllegalState:
      return "the operation cannot be performed in the present state";
    default:
      return "an error of the execution model";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return runtime().last_error; }

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > chip().shared_bytes)
    return told(cudaErrorInvalidValue);
  runtime().shared_bytes[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const void*) {
  *code = {};
  code->ptxVersion = code->binaryVersion = chip().compiled_for;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* chip, int) {
  *chip = {};
  std::strcpy(chip->name, "execution model");
  chip->major = 9;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = runtime().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  runtime().device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = chip().shared_bytes;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = chip().multiprocessors;
      return cudaSuccess;
    default:
      return told(cudaErrorInvalidValue);
  }
}
cudaError_t cudaDeviceSynchronize() {
  const cudaError_t status = beside_captures();
  if (status != cudaSuccess) return status;
  finish(runtime().null);
  for (const auto& stream : runtime().streams) finish(*stream);
  return status;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const cudaError_t status = beside_captures();
  if (status == cudaSuccess) *memory = take_device_memory(bytes);
  return status;
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  const cudaError_t status = beside_captures();
  if (status == cudaSuccess) *memory = new std::byte[bytes];
  return status;
}
cudaError_t cudaFree(void* memory) {
  const cudaError_t status = beside_captures();
  if (status == cudaSuccess) give_device_memory(static_cast<std::byte*>(memory));
  return status;
}
cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t status = beside_captures();
  if (status == cudaSuccess) delete[] static_cast<std::byte*>(memory);
  return status;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  const cudaError_t status = cudaDeviceSynchronize();
  if (status == cudaSuccess) copy(to, from, bytes);
  return status;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  add(stream, cudaGraphNodeTypeMemcpy, [=] { copy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_stride, const void* from, std::size_t from_stride,
                              std::size_t bytes, std::size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  add(stream, cudaGraphNodeTypeMemcpy, [=] {
    for (std::size_t r = 0; r < rows; ++r)
      copy(static_cast<std::byte*>(to) + r * to_stride, static_cast<const std::byte*>(from) + r * from_stride, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  waited();
  const cudaError_t status = beside_captures();
  if (status == cudaSuccess) finish(stream_of(stream));
  return status;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const CUstream_st& s = stream_of(stream);
  *status = s.captured == nullptr ? cudaStreamCaptureStatusNone
            : s.spoilt            ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr) return told(cudaErrorStreamCaptureUnsupported);
  if (stream->captured != nullptr) return told(cudaErrorIllegalState);
  stream->captured = std::make_unique<CUgraph_st>();
  stream->mode = mode;
  stream->spoilt = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (stream == nullptr || stream->captured == nullptr) return told(cudaErrorIllegalState);
  const std::unique_ptr<CUgraph_st> captured = std::move(stream->captured);
  *graph = stream->spoilt ? nullptr : new CUgraph_st(*captured);
  return told(stream->spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, runtime().thread);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  event->in_capture = stream_of(stream).captured != nullptr;
  event->reached = false;
  add(stream, cudaGraphNodeTypeEventRecord, [=] {
    event->at = std::chrono::steady_clock::now();
    event->reached = true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t status = event->in_capture ? told(cudaErrorCapturedEvent) : beside_captures();
  return status != cudaSuccess ? status : event->reached ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const cudaError_t status = event->in_capture ? told(cudaErrorCapturedEvent) : beside_captures();
  if (status == cudaSuccess) finish(stream_of(event->stream));
  return status;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
  for (const CUgraphNode_st& node : ready->nodes) add(stream, node.type, node.work);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
  delete ready;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (nodes != nullptr)
    for (std::size_t n = 0; n < *count; ++n) nodes[n] = &graph->nodes[n];
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}

}  // extern "C"
