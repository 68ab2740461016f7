#pragma once
/// Binary search that the CPU and kernels share.

#include <cstdint>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// The first i of [low, high) that is not `before`; `high` if all are. `before` holds for all up to some i, and for
/// none after that.
template <class Before>
KVKEEP_HD std::int32_t partition_point(std::int32_t low, std::int32_t high, const Before& before) {
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (before(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace kvkeep
