#pragma once
/// Equal pieces of a run of things: the arithmetic that the CPU and kernels share.

#include <cstdint>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// Pieces of at most `most` that `n` things are cut into.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_count(std::int64_t n, std::int64_t most) {
  return (n + most - 1) / most;
}

/// Where piece i of `count` begins; for i = count, n. Lengths differ by at most 1.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_begin(std::int64_t n, std::int64_t i, std::int64_t count) {
  return i * n / count;
}

}  // namespace kvkeep
