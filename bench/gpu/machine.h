// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The machine that the benches run on: a GPU, or under the execution model the host, whose times mean nothing. Memory,
/// copies, timing.

#if defined(KVKEEP_CUDA_MODEL)
#include "cuda_model.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cases.h"
#include "stream.h"

namespace kvkeep::cuda {

#if defined(KVKEEP_CUDA_MODEL)
inline constexpr bool kModel = true;
#else
inline constexpr bool kModel = false;
#endif

[[nodiscard]] bool has_machine();
[[nodiscard]] std::string machine_name();

/// The stream that kernels are timed on; copies below go through it and wait.
[[nodiscard]] Stream stream();
void synchronize(Stream on);

[[nodiscard]] std::byte* take_memory(std::size_t bytes);
void give_memory(std::byte* memory);
void copy_there(void* to, const void* from, std::size_t bytes);
void copy_back(void* to, const void* from, std::size_t bytes);
void copy_inside(void* to, const void* from, std::size_t bytes);

/// Fills `bytes` of memory with `pattern`, repeated.
void fill_with(std::byte* to, std::size_t bytes, const void* pattern, std::size_t pattern_bytes);

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count)
      : count_(count), data_(reinterpret_cast<T*>(take_memory(count * sizeof(T)))) {}
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    copy_there(data_, from.data(), count_ * sizeof(T));
  }
  ~DeviceArray() { give_memory(reinterpret_cast<std::byte*>(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::vector<T> download() const { return download(0, count_); }
  [[nodiscard]] std::vector<T> download(std::size_t first, std::size_t count) const {
    std::vector<T> to(count);
    copy_back(to.data(), data_ + first, count * sizeof(T));
    return to;
  }
  void fill(const std::vector<T>& pattern) const {
    fill_with(reinterpret_cast<std::byte*>(data_), count_ * sizeof(T), pattern.data(), pattern.size() * sizeof(T));
  }

 private:
  std::size_t count_;
  T* data_;
};

/// GPU milliseconds of what `work` launches on `on`, with cold caches.
[[nodiscard]] double milliseconds_there(const std::function<void()>& work, Stream on);

/// Enough repetitions for a median if one takes that long.
[[nodiscard]] int repetitions(double milliseconds);

/// Replays `work` from a CUDA graph: `graph_us`, and `launches`, the kernels in it. If it cannot be captured,
/// `not_captured` is 1.
void measure_graph(Result& result, const std::function<void()>& work, Stream on);

/// Times `work`, which only launches: `us` (from a graph if it can be captured, else eager), `eager_us`, `launches`,
/// and `bytes` as given.
void measure(Result& result, double bytes, const std::function<void()>& work);

}  // namespace kvkeep::cuda
