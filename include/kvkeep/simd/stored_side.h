#pragma once
/// Not part of the interface. Numbers of a cache in whatever form they are stored.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/slot.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Largest magnitude of i8 numbers that store_slot() writes: -128 is read, and never written.
inline constexpr float kMostOfI8 = 127;

/// One side of a row, keys or values.
struct StoredSide {
  SlotAddress slots = {};
  SlotAddress scales = {};  ///< f32, one a slot, for the dtypes of 8 bits; absent: 1
  Dtype dtype = Dtype::f32;
  std::int64_t dim = 0;  ///< numbers of a slot
};

/// The dtypes that widen_slot() has code for, in messages.
inline constexpr const char* kReadable = "f32, f16, bf16, i8, f8_e4m3, f8_e5m2, q8_0, q4_0";

/// Whether widen_slot() has code for it.
[[nodiscard]] constexpr bool is_readable(Dtype dtype) {
  return is_scorable(dtype) || is_blocks(dtype) || dtype == Dtype::i8 || dtype == Dtype::f8_e4m3 ||
         dtype == Dtype::f8_e5m2;
}

namespace stored_detail {

inline float number_at(const std::byte* at, Dtype dtype) {
  const auto bits = std::to_integer<std::uint8_t>(*at);
  if (dtype == Dtype::i8) return static_cast<float>(static_cast<std::int8_t>(bits));
  if (dtype == Dtype::f8_e5m2) return Half::from_bits(static_cast<std::uint16_t>(bits << 8));  // the upper half of one
  // e4m3 has no infinities. Its exponent counts from 7, that of an f16 from 15.
  if ((bits & 0x7f) == 0x7f) return std::nanf("");
  return Half::from_bits(static_cast<std::uint16_t>(((bits & 0x80) << 8) | ((bits & 0x7f) << 7))) * 256.0F;
}

inline float scale_at(const SlotAddress& scales, std::int64_t slot) {
  if (scales.width == 0) return 1.0F;
  float scale;
  std::memcpy(&scale, scales.at(slot), sizeof(scale));
  return scale;
}

inline float half_at(const std::byte* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return Half::from_bits(bits);
}

inline void put_half(std::byte* at, float x) {
  const Half half(x);
  std::memcpy(at, &half.bits, sizeof(half.bits));
}

}  // namespace stored_detail

/// to[0..32) = the numbers of a block of Dtype::q8_0 or q4_0. Source: ggml-quants.c, `dequantize_row_q8_0` and `_q4_0`.
inline void widen_block(const std::byte* from, Dtype dtype, float* to) {
  const float scale = stored_detail::half_at(from);
  const std::byte* numbers = from + 2;
  if (dtype == Dtype::q8_0) {
    for (int i = 0; i < kBlock; ++i) to[i] = scale * static_cast<float>(std::to_integer<std::int8_t>(numbers[i]));
    return;
  }
  for (int i = 0; i < kBlock / 2; ++i) {  // low halves of the bytes, then high ones
    const auto two = std::to_integer<int>(numbers[i]);
    to[i] = scale * static_cast<float>((two & 15) - 8);
    to[i + kBlock / 2] = scale * static_cast<float>((two >> 4) - 8);
  }
}

/// The block of 32 numbers as llama.cpp stores it. Source: ggml-quants.c, `quantize_row_q8_0_ref` and `_q4_0_ref`.
inline void narrow_block(const float* from, Dtype dtype, std::byte* to) {
  float most = 0, signed_most = 0;
  for (int i = 0; i < kBlock; ++i)
    if (std::fabs(from[i]) > most) most = std::fabs(from[i]), signed_most = from[i];
  const bool eight = dtype == Dtype::q8_0;
  const float scale = eight ? most / kMostOfI8 : signed_most / -8, inverse = scale != 0 ? 1 / scale : 0;
  stored_detail::put_half(to, scale);
  const auto level = [&](int i) { return std::min(15, static_cast<int>(from[i] * inverse + 8.5F)); };
  for (int i = 0; eight && i < kBlock; ++i)
    to[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::round(from[i] * inverse)));
  for (int i = 0; !eight && i < kBlock / 2; ++i)
    to[2 + i] = static_cast<std::byte>(level(i) | (level(i + kBlock / 2) << 4));
}

/// to[0..dim) = the numbers of a slot, in f32: exact for every dtype of is_readable() but i8 and f8, whose product with
/// the scale is rounded once.
inline void widen_slot(const StoredSide& side, std::int64_t slot, float* to) {
  const std::byte* const at = side.slots.at(slot);
  if (is_scorable(side.dtype)) return widen(at, side.dtype, side.dim, to);
  if (is_blocks(side.dtype)) {
    for (std::int64_t b = 0; b < side.dim / kBlock; ++b)
      widen_block(at + b * element_size(side.dtype), side.dtype, to + b * kBlock);
    return;
  }
  const float scale = stored_detail::scale_at(side.scales, slot);
  for (std::int64_t d = 0; d < side.dim; ++d) to[d] = scale * stored_detail::number_at(at + d, side.dtype);
}

/// Stores from[0..dim) as the slot's numbers; dtype f32, f16 or bf16 (rounded to nearest even), i8, q8_0 or q4_0. i8: a
/// scale for the slot, the largest magnitude by 127, which side.scales must have room for, and the numbers rounded to
/// nearest, ties away from 0.
inline void store_slot(const StoredSide& side, std::int64_t slot, const float* from) {
  std::byte* const at = side.slots.at(slot);
  if (is_scorable(side.dtype))
    return with_dtype("store", side.dtype, [&](auto number) {
      auto* const to = reinterpret_cast<decltype(number)*>(at);
      for (std::int64_t d = 0; d < side.dim; ++d) to[d] = decltype(number)(from[d]);
    });
  if (is_blocks(side.dtype)) {
    for (std::int64_t b = 0; b < side.dim / kBlock; ++b)
      narrow_block(from + b * kBlock, side.dtype, at + b * element_size(side.dtype));
    return;
  }
  float most = 0;
  for (std::int64_t d = 0; d < side.dim; ++d) most = std::max(most, std::fabs(from[d]));
  const float scale = most / kMostOfI8, inverse = scale != 0 ? 1 / scale : 0;
  std::memcpy(side.scales.at(slot), &scale, sizeof(scale));
  for (std::int64_t d = 0; d < side.dim; ++d)
    at[d] = static_cast<std::byte>(static_cast<std::int8_t>(std::round(from[d] * inverse)));
}

}  // namespace kvkeep::cpu
