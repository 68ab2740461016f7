#pragma once
/// Refuses devices that a host function cannot serve.

#include "kvkeep/core/device.h"
#include "kvkeep/core/error.h"

namespace kvkeep {

/// Throws Unsupported unless `device` is the CPU: others are served by a Machine.
inline void require_host(const char* operation, Device device) {
  KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu(), operation, ": runs on the CPU; given device ", device.str(),
                    "; allowed cpu, or a Keeper with kvkeep::cuda::accelerator() on a GPU");
}

}  // namespace kvkeep
