// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <cstring>
#include <stdexcept>

#include "kvkeep/core/error.h"
#include "timing.h"

namespace kvkeep::cuda {

void fill_with(std::byte* to, std::size_t bytes, const void* pattern, std::size_t pattern_bytes) {
  std::size_t done = std::min(bytes, pattern_bytes);
  copy_there(to, pattern, done);
  for (std::size_t more = 0; done < bytes; done += more) {
    more = std::min(done, bytes - done);
    copy_inside(to + done, to, more);
  }
}

int repetitions(double milliseconds) {
  constexpr double kInAll = 300;
  return static_cast<int>(std::clamp(kInAll / std::max(milliseconds, 1e-3), 3.0, 21.0));
}

void measure(Result& result, double bytes, const std::function<void()>& work) {
  result.set("bytes", bytes);
  work();
  synchronize(stream());
  if (options().once) return;
  std::vector<double> ms{milliseconds_there(work, stream())};
  for (int n = repetitions(ms[0]); static_cast<int>(ms.size()) < n;) ms.push_back(milliseconds_there(work, stream()));
  result.set("eager_us", median(ms) * 1e3);
  measure_graph(result, work, stream());
  const auto graph = std::find_if(result.numbers.begin(), result.numbers.end(),
                                  [](const auto& number) { return number.first == "graph_us"; });
  result.set("us", graph != result.numbers.end() ? graph->second : median(ms) * 1e3);
}

#if defined(KVKEEP_CUDA_MODEL)

bool has_machine() { return true; }
std::string machine_name() { return "the execution model, on the host: times mean nothing"; }
Stream stream() { return nullptr; }
void synchronize(Stream) {}
std::byte* take_memory(std::size_t bytes) {
  void* memory = nullptr;
  cudaMalloc(&memory, std::max<std::size_t>(bytes, 1));
  return static_cast<std::byte*>(memory);
}
void give_memory(std::byte* memory) { cudaFree(memory); }
void copy_there(void* to, const void* from, std::size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }
void copy_back(void* to, const void* from, std::size_t bytes) { copy_there(to, from, bytes); }
void copy_inside(void* to, const void* from, std::size_t bytes) { copy_there(to, from, bytes); }

double milliseconds_there(const std::function<void()>& work, Stream) { return milliseconds(work); }

void measure_graph(Result& result, const std::function<void()>& work, Stream) {
  const std::int64_t before = model::counters().launches;
  work();
  result.set("launches", static_cast<double>(model::counters().launches - before));
}

#else

namespace {

void expect(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(text("CUDA: ", cudaGetErrorString(status)));
}

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  expect(cudaEventCreate(&event));
  return event;
}

/// Writes more than any L2 holds.
void flush(Stream on) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  static std::byte* const memory = take_memory(kBytes);
  expect(cudaMemsetAsync(memory, 0, kBytes, on));
}

int kernels_of(cudaGraph_t graph) {
  std::size_t count = 0;
  expect(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  expect(cudaGraphGetNodes(graph, nodes.data(), &count));
  return static_cast<int>(std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    expect(cudaGraphNodeGetType(node, &type));
    return type == cudaGraphNodeTypeKernel;
  }));
}

}  // namespace

bool has_machine() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

std::string machine_name() {
  cudaDeviceProp chip{};
  int driver = 0;
  expect(cudaGetDeviceProperties(&chip, 0));
  expect(cudaDriverGetVersion(&driver));
  return text(chip.name, ", ", chip.multiProcessorCount, " SMs, L2 ", chip.l2CacheSize >> 20,
              " MiB, CUDA of the driver ", driver / 1000, ".", driver % 1000 / 10);
}

Stream stream() {
  static const Stream own = [] {
    cudaStream_t made = nullptr;
    expect(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return own;
}

void synchronize(Stream on) { expect(cudaStreamSynchronize(on)); }

std::byte* take_memory(std::size_t bytes) {
  void* memory = nullptr;
  expect(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)));
  return static_cast<std::byte*>(memory);
}
void give_memory(std::byte* memory) { cudaFree(memory); }

void copy_there(void* to, const void* from, std::size_t bytes) {
  expect(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()));
  synchronize(stream());
}
void copy_back(void* to, const void* from, std::size_t bytes) {
  expect(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()));
  synchronize(stream());
}
void copy_inside(void* to, const void* from, std::size_t bytes) {
  expect(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()));
  synchronize(stream());
}

double milliseconds_there(const std::function<void()>& work, Stream on) {
  static const cudaEvent_t begin = new_event(), end = new_event();
  flush(on);
  expect(cudaEventRecord(begin, on));
  work();
  expect(cudaEventRecord(end, on));
  expect(cudaEventSynchronize(end));
  float ms = 0;
  expect(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms);
}

void measure_graph(Result& result, const std::function<void()>& work, Stream on) {
  cudaGraph_t graph = nullptr;
  synchronize(on);
  // While a stream is captured in this mode, anything that waits, allocates or copies to the host is an error.
  expect(cudaStreamBeginCapture(on, cudaStreamCaptureModeGlobal));
  std::string why;
  try {
    work();
  } catch (const std::exception& error) {
    why = error.what();
  }
  const cudaError_t status = cudaStreamEndCapture(on, &graph);
  if (status != cudaSuccess || !why.empty()) {
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) cudaGraphDestroy(graph);
    return result.set("not_captured", 1);
  }
  cudaGraphExec_t ready = nullptr;
  expect(cudaGraphInstantiate(&ready, graph, 0));
  const auto replay = [&] { expect(cudaGraphLaunch(ready, on)); };
  replay();
  std::vector<double> ms{milliseconds_there(replay, on)};
  for (int n = repetitions(ms[0]); static_cast<int>(ms.size()) < n;) ms.push_back(milliseconds_there(replay, on));
  result.set("graph_us", median(ms) * 1e3);
  result.set("launches", kernels_of(graph));
  expect(cudaGraphExecDestroy(ready));
  expect(cudaGraphDestroy(graph));
}

#endif

}  // namespace kvkeep::cuda
