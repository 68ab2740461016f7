// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where C begins: what is thrown becomes a status, structs of other versions, and what a C program holds of a GPU.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/c.h"
#include "kvkeep/core/error.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep::cuda {
class ChosenStream;
}  // namespace kvkeep::cuda

struct kvkeep_accelerator {
  std::shared_ptr<kvkeep::Machine> machine;
  std::shared_ptr<kvkeep::cuda::ChosenStream> stream;  ///< its resources
};

/// A keeper with what its newest result points to.
struct kvkeep_keeper {
  kvkeep_keeper(kvkeep::ModelSpec spec, std::unique_ptr<kvkeep::KVPolicy> policy, kvkeep::Provided provided)
      : accelerator(provided.accelerator),
        keeper(std::move(spec), std::move(policy), std::move(provided)),
        json(keeper.policy().to_json()) {}

  [[nodiscard]] kvkeep::MachineMemory& memory() const {
    return accelerator == nullptr ? kvkeep::host_memory() : accelerator->memory();
  }

  std::shared_ptr<kvkeep::Machine> accelerator;
  kvkeep::Keeper keeper;
  std::string json;
  std::vector<std::byte> bytes;
  std::string text;
  std::optional<kvkeep::Plan> plan;
  std::vector<kvkeep::PageMove> moves;
  std::vector<kvkeep::Narrowing> narrowed;
  std::vector<kvkeep_cut> cuts;
  std::vector<kvkeep_page_move> pages;
  std::vector<kvkeep_unscored> unscored;
  std::vector<kvkeep_narrowing> prompts;
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

/// The size of a caller's struct.
template <class T>
std::size_t size_of(const T& of_caller, const char* what) {
  constexpr std::size_t kLeast = sizeof(std::size_t) + sizeof(std::int64_t), kMost = 4096;
  KVKEEP_REQUIRE(of_caller.size >= kLeast && of_caller.size <= kMost, what, ": size is ", of_caller.size,
                 "; allowed sizeof of the struct");
  return of_caller.size;
}

/// A struct of a caller that was compiled with this, an older or a newer header. Newer fields must be 0.
template <class T>
T given(const T* from, const char* what) {
  const std::size_t size = size_of(required(from, what), what);
  T known{};
  std::memcpy(&known, from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i)
    KVKEEP_REQUIRE_AS(Unsupported, bytes[i] == 0, what, ": a field that version ", KVKEEP_C_VERSION,
                      " of the interface does not know is not 0; allowed with a newer libkvkeep");
  return known;
}

/// Writes what the caller's struct has room for.
template <class T>
void give_back(T known, T* to) {
  known.size = to->size;
  std::memcpy(to, &known, std::min(to->size, sizeof(T)));
}

}  // namespace kvkeep
