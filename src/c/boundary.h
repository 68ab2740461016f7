// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where C begins: what is thrown becomes a status, and what a C program holds of a GPU.

#include <memory>

#include "kvkeep/c.h"
#include "kvkeep/policy/machine.h"

struct kvkeep_accelerator {
  std::shared_ptr<kvkeep::Machine> machine;
};

namespace kvkeep {

/// The status of the exception that is being handled, whose sentence kvkeep_last_error() then has.
[[nodiscard]] kvkeep_status status_of_exception() noexcept;

/// Runs `body`; what it throws becomes a status.
template <class Body>
[[nodiscard]] kvkeep_status guarded(Body&& body) noexcept {
  try {
    body();
    return KVKEEP_OK;
  } catch (...) {
    return status_of_exception();
  }
}

template <class T>
T& required(T* pointer, const char* what) {
  KVKEEP_REQUIRE(pointer != nullptr, what, " is NULL; allowed an address");
  return *pointer;
}

}  // namespace kvkeep
