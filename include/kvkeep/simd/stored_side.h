// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Numbers of a cache in whatever form they are stored.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/dtype.h"
#include "kvkeep/core/hd.h"
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
  std::int64_t dim = 0;      ///< numbers of a slot
  std::int32_t rotated = 0;  ///< DenseKv::keys_rotated
  /// Whether the numbers are stored as they are, in a dtype that loops read.
  [[nodiscard]] bool plain() const { return is_scorable(dtype) && rotated == 0; }
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

inline void put_half(std::byte* at, float x) {
  const Half half(x);
  std::memcpy(at, &half.bits, sizeof(half.bits));
}

}  // namespace stored_detail

/// The block of 32 numbers as llama.cpp stores it; NaN throughout if one of them is not finite. Source: ggml-quants.c,
/// `quantize_row_q8_0_ref` and `_q4_0_ref`.
inline void narrow_block(const float* from, Dtype dtype, std::byte* to) {
  float most = 0, signed_most = 0;
  for (int i = 0; i < kBlockNumbers; ++i)
    if (std::fabs(from[i]) > most) most = std::fabs(from[i]), signed_most = from[i];
  const bool eight = dtype == Dtype::q8_0;
  if (!std::all_of(from, from + kBlockNumbers, [](float x) { return std::isfinite(x); })) {
    std::fill_n(to, element_size(dtype), std::byte{0});
    return stored_detail::put_half(to, std::nanf(""));
  }
  const float scale = eight ? most / kMostOfI8 : signed_most / -8, inverse = scale != 0 ? 1 / scale : 0;
  stored_detail::put_half(to, scale);
  const auto level = [&](int i) { return std::min(15, static_cast<int>(product(from[i], inverse) + 8.5F)); };
  for (int i = 0; eight && i < kBlockNumbers; ++i)
    to[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::round(from[i] * inverse)));
  for (int i = 0; !eight && i < kBlockNumbers / 2; ++i)
    to[2 + i] = static_cast<std::byte>(level(i) | (level(i + kBlockNumbers / 2) << 4));
}

/// The orthonormal Walsh-Hadamard transform of every run of `run` numbers, a power of two, in place. It is its own
/// inverse. Source: llama.cpp, `ggml_gen_hadamard`; computed by butterflies in f32.
inline void rotate(float* x, std::int64_t dim, std::int32_t run) {
  const float scale = 1 / std::sqrt(static_cast<float>(run));
  for (std::int64_t first = 0; first < dim; first += run)
    for (std::int32_t half = 1; half < run; half *= 2)
      for (float* pair = x + first; pair < x + first + run; pair += 2 * half)
        for (std::int32_t i = 0; i < half; ++i) {
          const float a = pair[i], b = pair[i + half];
          pair[i] = a + b, pair[i + half] = a - b;
        }
  for (std::int64_t d = 0; d < dim; ++d) x[d] *= scale;
}

/// to[0..dim) = the numbers of a slot in f32 as they are stored, rotated if the side is. Exact for f32, f16, bf16 and
/// blocks; those of 8 bits are multiplied by their scale.
inline void widen_stored(const StoredSide& side, std::int64_t slot, float* to) {
  const std::byte* const at = side.slots.at(slot);
  if (is_scorable(side.dtype) || is_blocks(side.dtype)) return widen(at, side.dtype, side.dim, to);
  const float scale = stored_detail::scale_at(side.scales, slot);
  for (std::int64_t d = 0; d < side.dim; ++d) to[d] = scale * stored_detail::number_at(at + d, side.dtype);
}

namespace stored_detail {

inline void store_rotated(const StoredSide& side, std::int64_t slot, const float* from) {
  std::byte* const at = side.slots.at(slot);
  if (is_scorable(side.dtype))
    return with_dtype("store", side.dtype, [&](auto number) {
      auto* const to = reinterpret_cast<decltype(number)*>(at);
      for (std::int64_t d = 0; d < side.dim; ++d) to[d] = decltype(number)(from[d]);
    });
  if (is_blocks(side.dtype)) {
    for (std::int64_t b = 0; b < side.dim / kBlockNumbers; ++b)
      narrow_block(from + b * kBlockNumbers, side.dtype, at + b * element_size(side.dtype));
    return;
  }
  float most = 0;
  bool finite = true;
  for (std::int64_t d = 0; d < side.dim; ++d)
    most = std::max(most, std::fabs(from[d])), finite = finite && std::isfinite(from[d]);
  const float scale = finite ? most / kMostOfI8 : std::nanf(""), inverse = scale > 0 ? 1 / scale : 0;
  std::memcpy(side.scales.at(slot), &scale, sizeof(scale));
  for (std::int64_t d = 0; d < side.dim; ++d)
    at[d] = static_cast<std::byte>(static_cast<std::int8_t>(finite ? std::round(from[d] * inverse) : 0));
}

}  // namespace stored_detail

/// The same, turned back if they are stored rotated, which rounds to f32.
inline void widen_slot(const StoredSide& side, std::int64_t slot, float* to) {
  widen_stored(side, slot, to);
  if (side.rotated > 0) rotate(to, side.dim, side.rotated);
}

/// Stores from[0..dim) as the slot's numbers, rotated if the side says so; dtype f32, f16 or bf16 (rounded to nearest
/// even), i8, q8_0 or q4_0. i8: a scale for the slot, the largest magnitude by 127, which side.scales must have room
/// for, and the numbers rounded to nearest, ties away from 0; all NaN if one is not finite. dim: up to 1024 if the side
/// is rotated.
inline void store_slot(const StoredSide& side, std::int64_t slot, const float* from) {
  if (side.rotated == 0) return stored_detail::store_rotated(side, slot, from);
  std::array<float, kMostRotated> turned;
  std::copy_n(from, side.dim, turned.begin());
  rotate(turned.data(), side.dim, side.rotated);
  stored_detail::store_rotated(side, slot, turned.data());
}

}  // namespace kvkeep::cpu
