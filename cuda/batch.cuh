// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Descriptions of prompts that travel with a launch, so that nothing is copied before it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvkeep::cuda {

inline constexpr std::int32_t kPromptsAtOnce = 64;  ///< per launch

template <class T>
struct Batch {
  T of[kPromptsAtOnce];
  std::int32_t count = 0;
};

/// Calls body(batch) for all of `prompts`, as many at a time as a launch takes.
template <class T, class Body>
void each_batch(std::span<const T> prompts, const Body& body) {
  for (; !prompts.empty(); prompts = prompts.subspan(std::min<std::size_t>(kPromptsAtOnce, prompts.size()))) {
    Batch<T> batch;
    batch.count = static_cast<std::int32_t>(std::min<std::size_t>(kPromptsAtOnce, prompts.size()));
    std::copy_n(prompts.begin(), batch.count, batch.of);
    body(batch);
  }
}

}  // namespace kvkeep::cuda
