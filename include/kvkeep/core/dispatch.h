#pragma once
/// Refuses devices that a host function cannot serve.

#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Calls `cpu()` for the CPU. Throws Unsupported for any other device: those use an Accelerator.
template <class Cpu>
decltype(auto) dispatch(const char* operation, Device device, Cpu&& cpu) {
  KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu(), operation, ": runs on the CPU; given device ", device.str(),
                    "; allowed cpu, or a Keeper with kvkeep::cuda::accelerator() on a GPU");
  return std::forward<Cpu>(cpu)();
}

}  // namespace kvkeep
