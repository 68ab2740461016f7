// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Work on a few threads, one LibTorch thread each.

#include <torch/torch.h>

#include <atomic>
#include <cstddef>
#include <future>
#include <vector>

namespace train {

/// Calls work(i) for every i below `count`; each thread takes the next. Exceptions are rethrown here.
template <class Work>
void each_in_parallel(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next = 0;
  const auto loop = [&] {
    torch::set_num_threads(1);
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::future<void>> workers;  // a future passes an exception on
  for (int i = 1; i < threads; ++i) workers.push_back(std::async(std::launch::async, loop));
  loop();
  for (auto& worker : workers) worker.get();
}

/// Adds up gradients, [each][parameter], in order, so that the number of threads does not matter.
inline void sum_gradients(const std::vector<std::vector<torch::Tensor>>& each,
                          const std::vector<torch::Tensor>& parameters) {
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    torch::Tensor sum = each[0][p];
    for (std::size_t i = 1; i < each.size(); ++i) sum = sum + each[i][p];
    parameters[p].mutable_grad() = sum;
  }
}

}  // namespace train
