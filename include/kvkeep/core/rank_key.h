// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The order of scores and slots, as integers: the one tie rule.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// A score as an integer of the same order, u32 of a float and u64 of a double: NaN equals -infinity, -0 equals +0.
/// Never 0.
template <class Real>
[[nodiscard]] KVKEEP_HD auto order_of(Real score) {
  using Bits = std::conditional_t<sizeof(Real) == sizeof(std::uint32_t), std::uint32_t, std::uint64_t>;
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  constexpr Bits kLowest = sizeof(Bits) == 4 ? static_cast<Bits>(0xFF800000U) : static_cast<Bits>(0xFFF0ULL << 48);
  Bits bits;
  score += Real{0};
  memcpy(&bits, &score, sizeof bits);
  if (score != score) bits = kLowest;
  return (bits & kSign) != 0 ? static_cast<Bits>(~bits) : static_cast<Bits>(bits | kSign);
}

/// The same turned round: ascends as places do, the highest score first; NaN comes after -infinity.
[[nodiscard]] KVKEEP_HD inline std::uint32_t place_key(float score) {
  return score != score ? ~std::uint32_t{0} : ~order_of(score);
}

/// Order of two slots of one row as an integer: the larger key stays. Higher score first, then the larger (newer) slot;
/// NaN is lowest, -0 equals +0. Never 0.
[[nodiscard]] KVKEEP_HD inline std::uint64_t rank_key(float score, std::int32_t slot) {
  return static_cast<std::uint64_t>(order_of(score)) << 32 | static_cast<std::uint32_t>(slot);
}

/// The key of a slot that ranks before all others, whatever it scores; newer before older.
[[nodiscard]] KVKEEP_HD inline std::uint64_t first_key(std::int32_t slot) {
  return std::uint64_t{0xFFFFFFFF} << 32 | static_cast<std::uint32_t>(slot);
}

}  // namespace kvkeep
