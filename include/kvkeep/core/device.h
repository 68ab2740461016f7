#pragma once
/// Where memory is.

#include <cstdint>
#include <string>

#include "kvkeep/core/error.h"

namespace kvkeep {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda, other };
  Kind kind = Kind::cpu;
  std::int32_t index = 0;  ///< among devices of this kind

  [[nodiscard]] bool is_cpu() const { return kind == Kind::cpu; }
  [[nodiscard]] bool is_cuda() const { return kind == Kind::cuda; }
  [[nodiscard]] std::string str() const {
    return kind == Kind::cpu ? "cpu" : (kind == Kind::cuda ? "cuda:" : "other:") + std::to_string(index);
  }
  friend bool operator==(const Device&, const Device&) = default;
};

/// Throws Unsupported unless `device` is the CPU: others are served by a Machine.
inline void require_host(const char* operation, Device device) {
  KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu(), operation, ": runs on the CPU; given device ", device.str(),
                    "; allowed cpu, or a Keeper with kvkeep::cuda::accelerator() on a GPU");
}

}  // namespace kvkeep
