#pragma once
/// Whether numbers of a cache's or query's dtype are finite.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvkeep/core/tensor.h"

namespace kvkeep {
namespace detail {

/// Whether no number, its sign taken off, is above `limit` as an integer: the order of floating-point numbers, with
/// infinity and NaN at the top. Signed, because vector units compare signed integers.
template <class Bits>
[[nodiscard]] bool none_above(const std::byte* data, std::int64_t count, Bits limit) {
  Bits above = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
    above = static_cast<Bits>(above | ((bits & std::numeric_limits<Bits>::max()) > limit ? 1 : 0));
  }
  return above == 0;
}

}  // namespace detail

/// Largest magnitude that running statistics of queries take in: differences of two such numbers are still f32.
inline constexpr float kLargestQuery = 1e38F;

/// True where no number is NaN or infinite or, in f32 and bf16, beyond `kLargestQuery`. data: f32, f16 or bf16 [count],
/// any alignment. Cost: one read.
[[nodiscard]] inline bool all_finite(const std::byte* data, ScalarType dtype, std::int64_t count) {
  constexpr auto largest = std::bit_cast<std::int32_t>(kLargestQuery);
  if (dtype == kFloat32) return detail::none_above<std::int32_t>(data, count, largest);
  return detail::none_above<std::int16_t>(
      data, count, dtype == kBFloat16 ? static_cast<std::int16_t>(largest >> 16) : std::int16_t{0x7BFF});
}

}  // namespace kvkeep
