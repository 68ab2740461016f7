// SPDX-License-Identifier: Apache-2.0
#include "torch_memory.h"

#include "kvkeep/torch.h"

namespace kvkeep::cuda {

c10::DataPtr memory_of_torch(Device device, std::size_t bytes) {
  return c10::GetAllocator(torch_device(device).type())->allocate(bytes);
}

}  // namespace kvkeep::cuda
