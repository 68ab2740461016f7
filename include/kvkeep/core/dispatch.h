#pragma once
/// Chooses the device function of a stem, and the C++ type behind a dtype.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Calls `cpu()` for the CPU. Throws Unsupported for another device: those have an Accelerator.
template <class Cpu>
decltype(auto) dispatch(const char* operation, Device device, Cpu&& cpu) {
  KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu(), operation, ": runs on the CPU; given device ", device.str(),
                    "; allowed cpu, or on a GPU a Keeper with kvkeep::cuda::accelerator()");
  return std::forward<Cpu>(cpu)();
}

/// Calls `body(T{})` with the C++ type of a dtype that scores can be read from.
template <class Body>
decltype(auto) with_dtype(const char* operation, ScalarType dtype, Body&& body) {
  switch (dtype) {
    case kFloat32:
      return body(float{});
    case kFloat16:
      return body(c10::Half{});
    case kBFloat16:
      return body(c10::BFloat16{});
    default:
      refuse(operation, ": dtype ", c10::toString(dtype), " cannot be scored; allowed: f32, f16, bf16");
  }
}

}  // namespace kvkeep
