#pragma once
/// Random numbers that depend only on their arguments, the same on every machine. Does not use LibTorch.

#include <cstdint>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// The finalizer of splitmix64: every bit of the result depends on every bit of x.
KVKEEP_HD inline std::uint64_t mixed_bits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Seed for the draws of one (layer, KV head).
KVKEEP_HD inline std::uint64_t draws_of_row(std::int64_t seed, std::int32_t layer, std::int32_t head) {
  return mixed_bits(mixed_bits(static_cast<std::uint64_t>(seed)) ^
                    (static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint32_t>(head)));
}

/// In [0, 1), a multiple of 2^-24. `position`: the slot's logical position.
KVKEEP_HD inline float draw(std::uint64_t of_row, std::int32_t position) {
  return static_cast<float>(mixed_bits(of_row ^ static_cast<std::uint32_t>(position)) >> 40) * 0x1p-24F;
}

}  // namespace kvkeep
