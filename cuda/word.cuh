// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Opaque bytes are moved in the widest words that they are aligned to.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "platform.cuh"

namespace kvkeep::cuda {

struct alignas(16) Word16 {
  std::uint32_t part[4];
};

/// Calls body(Word{}) with the widest word that divides every address, stride and width whose bits are set in `bits`.
#pragma nv_exec_check_disable
template <class Body>
KVKEEP_HD void with_word(std::uint64_t bits, Body&& body) {
  if (bits % 16 == 0)
    body(Word16{});
  else if (bits % 8 == 0)
    body(std::uint64_t{});
  else if (bits % 4 == 0)
    body(std::uint32_t{});
  else if (bits % 2 == 0)
    body(std::uint16_t{});
  else
    body(std::uint8_t{});
}

}  // namespace kvkeep::cuda
