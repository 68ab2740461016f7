#pragma once
/// GPU time, and what the chip's own copy reaches.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvkeep::cuda {

inline void expect(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

/// GPU milliseconds of `work` on a stream, which it only launches on.
template <class Work>
double gpu_milliseconds(const Work& work, cudaStream_t stream = nullptr) {
  static cudaEvent_t begin = [] { cudaEvent_t e; expect(cudaEventCreate(&e)); return e; }(), end = [] { cudaEvent_t e; expect(cudaEventCreate(&e)); return e; }();
  expect(cudaEventRecord(begin, stream));
  work();
  expect(cudaEventRecord(end, stream));
  expect(cudaEventSynchronize(end));
  float ms = 0;
  expect(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms);
}

/// GB/s that a copy inside the GPU's memory reads and writes: of 1 GiB, the median of 11.
inline double copy_bandwidth() {
  static const double found = [] {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    void *from = nullptr, *to = nullptr;
    expect(cudaMalloc(&from, kBytes));
    expect(cudaMalloc(&to, kBytes));
    std::vector<double> ms;
    for (int i = 0; i < 11; ++i) ms.push_back(gpu_milliseconds([&] { expect(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice)); }));
    cudaFree(from);
    cudaFree(to);
    std::nth_element(ms.begin(), ms.begin() + 5, ms.end());
    return 2.0 * kBytes / ms[5] / 1e6;
  }();
  return found;
}

}  // namespace kvkeep::cuda
