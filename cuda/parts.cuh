#pragma once
/// How memory that is allocated as one piece is cut into arrays.

#include "kvkeep/core/hd.h"
#include "platform.cuh"

namespace kvkeep::cuda {

/// Parts of the dynamic shared memory, each aligned to 32 bytes.
struct Parts {
  std::size_t bytes = 0;
  KVKEEP_HD std::size_t take(std::size_t wanted) {
    const std::size_t at = bytes;
    bytes += (wanted + 31) / 32 * 32;
    return at;
  }
};

}  // namespace kvkeep::cuda
