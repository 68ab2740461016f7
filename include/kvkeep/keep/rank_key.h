#pragma once
/// The order of slots, as integers. No LibTorch in here.

#include <cstdint>
#include <cstring>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Order of two slots of one row as an integer: the larger key stays. Higher score first, then the larger (newer) slot;
/// NaN is lowest, -0 equals +0. Never 0.
KVKEEP_HD inline std::uint64_t rank_key(float score, std::int32_t slot) {
  std::uint32_t bits;
  score += 0.0F;
  memcpy(&bits, &score, sizeof bits);
  if (score != score) bits = 0xFF800000U;
  bits = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return (static_cast<std::uint64_t>(bits) << 32) | static_cast<std::uint32_t>(slot);
}

/// The key of a slot that ranks before all others, whatever it scores; newer before older.
KVKEEP_HD inline std::uint64_t first_key(std::int32_t slot) {
  return std::uint64_t{0xFFFFFFFF} << 32 | static_cast<std::uint32_t>(slot);
}

}  // namespace kvkeep
