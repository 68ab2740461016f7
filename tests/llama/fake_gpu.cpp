// SPDX-License-Identifier: Apache-2.0
// The stand-in for llama.cpp keeps its caches in the execution model's device memory, which under
// KVKEEP_CUDA_MODEL=guard the host cannot touch. Its own work is done at once, as on streams that wait for nobody; work
// of kvkeep's kernels is held until somebody waits for it. So what llama.cpp must not overtake, and was not waited for,
// shows.

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda_model.h"
#include "device_memory.h"
#include "llama.h"

namespace {

std::vector<std::unique_ptr<kvkeep::cuda::model::DeviceAccess>> open;

const bool used = [] {
  fake_llama_use_device([](std::size_t bytes) -> void* { return kvkeep::cuda::model::take_device_memory(bytes); },
                        [](void* memory) { kvkeep::cuda::model::give_device_memory(static_cast<std::byte*>(memory)); },
                        [] { open.push_back(std::make_unique<kvkeep::cuda::model::DeviceAccess>()); },
                        [] { open.pop_back(); });
  kvkeep::cuda::model::hold_streams(true);
  return true;
}();

}  // namespace
