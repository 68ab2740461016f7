#pragma once
/// Whether numbers in the dtype of a cache or query are finite.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "kvkeep/core/tensor.h"

namespace kvkeep {
namespace detail {

/// Whether no number without its sign bit, read as an integer, is above `limit`. Integers order as the floating-point
/// numbers do, with infinity and NaN at the top. Signed, because vector units compare signed integers.
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

/// Largest magnitude of a query that scorers accept: the difference of two such numbers still fits f32.
inline constexpr float kLargestQuery = 1e38F;

/// True if no number is NaN or infinite or, in f32 and bf16, beyond `kLargestQuery`. data: f32, f16 or bf16 [count],
/// any alignment. Cost: one read.
[[nodiscard]] inline bool all_finite(const std::byte* data, Dtype dtype, std::int64_t count) {
  constexpr auto kLargest = std::bit_cast<std::int32_t>(kLargestQuery);
  if (dtype == Dtype::f32) return detail::none_above<std::int32_t>(data, count, kLargest);
  return detail::none_above<std::int16_t>(
      data, count, dtype == Dtype::bf16 ? static_cast<std::int16_t>(kLargest >> 16) : std::int16_t{0x7BFF});
}

/// True if no number of a CPU tensor (f32, f16, bf16 or f64) is NaN or infinite.
[[nodiscard]] inline bool all_finite(const Tensor& t) {
  const Tensor wide = as<double>(t);
  const std::span<const double> numbers(wide.data<double>(), static_cast<std::size_t>(wide.numel()));
  return std::ranges::all_of(numbers, [](double x) { return std::isfinite(x); });
}

}  // namespace kvkeep
