// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime for the execution model, as far as kvkeep and its tests use it: memory that is the host's, streams
// whose work runs at once or, while they are held, when somebody waits for it, captures that record kernels with their
// arguments and copies with their addresses, graphs that run them again. What waits or allocates is refused while a
// stream is captured, unless the thread has said otherwise, and ends that capture, as with CUDA. For one thread. Any
// device can be current, but streams are those of device 0, and take no work while another one is.

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "cuda_model.h"
#include "device_memory.h"
#include "resources.h"

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
struct CUevent_st {
  struct Reached {
    bool yes = true;
    std::chrono::steady_clock::time_point at;
    cudaStream_t on = nullptr;  ///< until it is reached
  };
  bool in_capture = false;
  std::shared_ptr<Reached> reached = std::make_shared<Reached>();  ///< work that is held may outlive the event
};
struct CUstream_st {
  struct Work {
    std::function<void()> run;
    std::shared_ptr<CUevent_st::Reached> after;  ///< null: of nothing on other streams
  };
  std::deque<Work> waiting;
  std::unique_ptr<CUgraph_st> captured;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool spoilt = false;  ///< the capture, by what it does not allow
};
namespace kvkeep::cuda::model {
namespace {

struct Runtime {
  CUstream_st null;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  cudaStreamCaptureMode thread = cudaStreamCaptureModeGlobal;
  bool held = false;
  std::optional<std::mt19937_64> turns;  ///< which stream goes on, while they are held; none: those that must
  int device = 0;                        ///< the current one; streams are those of device 0
  cudaError_t last_error = cudaSuccess;
  const char* launching = "";
  std::map<const void*, std::size_t> shared_bytes;  ///< dynamic, that kernels asked for
};

Runtime& runtime() {
  static auto* const only = new Runtime;  // outlives what is freed at the end of the program
  return *only;
}

/// Of what cudaMallocFromPoolAsync() gave.
std::map<void*, cudaMemPool_t>& pools() {
  static auto* const only = new std::map<void*, cudaMemPool_t>;
  return *only;
}

CUstream_st& stream_of(cudaStream_t stream) { return stream == nullptr ? runtime().null : *stream; }

void add(cudaStream_t to, cudaGraphNodeType type, std::function<void()> work,
         std::shared_ptr<CUevent_st::Reached> after = nullptr) {
  if (runtime().device != 0) throw std::logic_error("work for a stream of device 0 while another device is current");
  CUstream_st& stream = stream_of(to);
  if (stream.captured != nullptr)
    stream.captured->nodes.push_back({type, std::move(work)});
  else if (runtime().held)
    stream.waiting.push_back({std::move(work), std::move(after)});
  else
    work();
}

/// The stream that must go on before the first piece of work of this one may; this one, if it may.
CUstream_st& that_must(CUstream_st& stream) {
  const auto& after = stream.waiting.front().after;
  return after == nullptr || after->yes ? stream : that_must(stream_of(after->on));
}
/// One that may go on.
CUstream_st& that_may(std::mt19937_64& turns) {
  std::vector<CUstream_st*> all{&runtime().null};
  for (const auto& stream : runtime().streams) all.push_back(stream.get());
  std::erase_if(all, [](CUstream_st* one) { return one->waiting.empty() || &that_must(*one) != one; });
  return *all[turns() % all.size()];
}

/// Runs what is held, one piece after the other, until `done`, which the work of `stream` brings about.
template <class Done>
void run_until(CUstream_st& stream, const Done& done) {
  while (!done()) {
    std::deque<CUstream_st::Work>& next = (runtime().turns ? that_may(*runtime().turns) : that_must(stream)).waiting;
    const CUstream_st::Work work = std::move(next.front());
    next.pop_front();
    work.run();
  }
}
void finish(CUstream_st& stream) {
  run_until(stream, [&] { return stream.waiting.empty(); });
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
  if (!has_room(runtime().launching, static_cast<int>(of_block.x), shared, most))
    return told(cudaErrorLaunchOutOfResources);
  add(stream, cudaGraphNodeTypeKernel,
      [name = runtime().launching, blocks = dim3(blocks), threads = static_cast<int>(of_block.x), bytes = shared, most,
       early, body = std::move(body)] { run(name, blocks, threads, bytes, most, early, body); });
  return cudaSuccess;
}

void hold_streams(bool hold, std::uint64_t seed) {
  runtime().held = hold;
  if (hold) runtime().turns = seed == 0 ? std::nullopt : std::optional(std::mt19937_64(seed));
  if (!hold) static_cast<void>(cudaDeviceSynchronize());
}

}  // namespace kvkeep::cuda::model

using namespace kvkeep::cuda::model;  // NOLINT(google-build-using-namespace)

struct CUmemPoolHandle_st {
  std::int64_t given = 0;  ///< pieces that are out
  bool destroyed = false;
};

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
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
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
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
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* of) {
  if (of->allocType != cudaMemAllocationTypePinned || of->location.type != cudaMemLocationTypeDevice)
    return told(cudaErrorInvalidValue);
  *pool = new CUmemPoolHandle_st;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void*) {
  return told(attribute == cudaMemPoolAttrReleaseThreshold ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  pool->destroyed = true;
  if (pool->given == 0) delete pool;
  return cudaSuccess;
}
// Stands for memory that a graph would own in a capture, which is never what is meant here.
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  if (stream_of(stream).captured != nullptr) return told(cudaErrorStreamCaptureUnsupported);
  allocated();
  *memory = take_device_memory(bytes);
  pools()[*memory] = pool;
  ++pool->given;
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (stream_of(stream).captured != nullptr || !pools().contains(memory)) return told(cudaErrorInvalidValue);
  const cudaMemPool_t pool = pools().extract(memory).mapped();
  if (--pool->given == 0 && pool->destroyed) delete pool;
  add(stream, cudaGraphNodeTypeMemFree, [=] { give_device_memory(static_cast<std::byte*>(memory)); });
  return cudaSuccess;
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

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = runtime().streams.emplace_back(std::make_unique<CUstream_st>()).get();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (priority > 0 || priority < -5) return told(cudaErrorInvalidValue);
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  finish(stream_of(stream));
  std::erase_if(runtime().streams, [&](const auto& one) { return one.get() == stream; });
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
  event->in_capture = stream_of(stream).captured != nullptr;
  event->reached = std::make_shared<CUevent_st::Reached>(CUevent_st::Reached{.yes = false, .at = {}, .on = stream});
  add(stream, cudaGraphNodeTypeEventRecord, [reached = event->reached] {
    reached->at = std::chrono::steady_clock::now();
    reached->yes = true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t status = event->in_capture ? told(cudaErrorCapturedEvent) : beside_captures();
  return status != cudaSuccess ? status : event->reached->yes ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const cudaError_t status = event->in_capture ? told(cudaErrorCapturedEvent) : beside_captures();
  if (status == cudaSuccess) run_until(stream_of(event->reached->on), [&] { return event->reached->yes; });
  return status;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (stream_of(stream).captured != nullptr || event->in_capture) return told(cudaErrorStreamCaptureUnsupported);
  add(stream, cudaGraphNodeTypeWaitEvent, [] {}, event->reached);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->reached->at - begin->reached->at).count();
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
