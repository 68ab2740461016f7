// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Memory of the machine that a kernel test runs on: a GPU's, or under the execution model the host's. Each test runs
/// the kernel there and compares with the CPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#if defined(KVKEEP_CUDA_MODEL)
#include "cuda_model.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace kvkeep::cuda {

inline void expect(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// True where kernels can run. Tests without it are skipped in sight.
inline bool has_machine() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

/// Calls `body` as often as the machine has ways to run a kernel: the model runs blocks and threads upwards, then
/// downwards.
template <class Body>
void in_every_order(Body&& body) {
#if defined(KVKEEP_CUDA_MODEL)
  if (model::settings().seed != 0 || model::settings().races) {  // random whatever is set; or seen in any order
    body();
    return;
  }
  for (const model::Order order : {model::Order::ascending, model::Order::descending}) {
    model::set_order(order);
    body();
  }
  model::set_order(model::Order::ascending);
#else
  body();
#endif
}

/// An array on that machine. Exactly as large as asked, so that a sanitizer sees what lies beside it.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    expect(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(count * sizeof(T), 1)));
  }
  /// Filled with a pattern: for output of which a kernel writes a part and a test reads all.
  [[nodiscard]] static DeviceArray poisoned(std::size_t count) { return DeviceArray(std::vector<T>(count, T(-77))); }
  DeviceArray(std::span<const T> from) : DeviceArray(from.size()) {
    upload(from);
  }  // NOLINT(google-explicit-constructor)
  DeviceArray(const std::vector<T>& from)
      : DeviceArray(std::span<const T>(from)) {}  // NOLINT(google-explicit-constructor)
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void upload(std::span<const T> from) {
    if (!from.empty()) expect(cudaMemcpy(data_, from.data(), from.size_bytes(), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> to(count_);
    if (count_ > 0) expect(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

/// Skips every test where there is no machine.
class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_machine()) GTEST_SKIP() << "no GPU here";
  }
};

}  // namespace kvkeep::cuda
