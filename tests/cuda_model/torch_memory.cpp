// SPDX-License-Identifier: Apache-2.0
#include "torch_memory.h"

#include "cuda_model.h"
#include "device_memory.h"

namespace kvkeep::cuda {

c10::DataPtr memory_of_torch(Device, std::size_t bytes) {
  model::allocated();
  if (!model::settings().guard) return c10::GetAllocator(c10::kCPU)->allocate(bytes);
  std::byte* const memory = model::take_device_memory(bytes);
  return {memory, memory, [](void* taken) { model::give_device_memory(static_cast<std::byte*>(taken)); }, c10::kCPU};
}

}  // namespace kvkeep::cuda
