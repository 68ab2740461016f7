// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Number types of caches, scores and files.

#include <bit>
#include <cstdint>
#include <ostream>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Names are those of safetensors, the array API and, of blocks, ggml. f32, f16 and bf16 can be scored as they are, on
/// the CPU those of 8 bits and blocks, too; every type can be moved.
enum class Dtype : std::uint8_t {
  f32,
  f16,
  bf16,
  f64,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  f8_e4m3,
  f8_e5m2,
  complex64,
  q8_0,  ///< blocks of 32 numbers: an f16 scale, 32 signed bytes
  q4_0   ///< blocks of 32 numbers: an f16 scale, 32 numbers of 4 bits less 8; the low halves of 16 bytes are the first
};

/// Numbers of a block.
inline constexpr std::int32_t kBlockNumbers = 32;

/// Whether an element is a block of kBlockNumbers numbers: a tensor's last dimension counts blocks.
[[nodiscard]] constexpr bool is_blocks(Dtype dtype) { return dtype == Dtype::q8_0 || dtype == Dtype::q4_0; }

/// Numbers of an element.
[[nodiscard]] constexpr std::int64_t numbers_of(Dtype dtype) { return is_blocks(dtype) ? kBlockNumbers : 1; }

/// Bytes of one element.
[[nodiscard]] constexpr std::int64_t element_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::q8_0:
      return 2 + kBlockNumbers;
    case Dtype::q4_0:
      return 2 + kBlockNumbers / 2;
    case Dtype::f64:
    case Dtype::i64:
    case Dtype::u64:
    case Dtype::complex64:
      return 8;
    case Dtype::f32:
    case Dtype::i32:
    case Dtype::u32:
      return 4;
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::i16:
    case Dtype::u16:
      return 2;
    default:
      return 1;
  }
}

[[nodiscard]] constexpr const char* name_of(Dtype dtype) {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "f64",  "i64",     "i32",     "i16",       "i8",   "u64",
                                    "u32", "u16", "u8",   "bool", "f8_e4m3", "f8_e5m2", "complex64", "q8_0", "q4_0"};
  return kNames[static_cast<int>(dtype)];
}

inline std::ostream& operator<<(std::ostream& out, Dtype dtype) { return out << name_of(dtype); }

/// True for the dtypes that can be scored as they are: f32, f16, bf16.
[[nodiscard]] constexpr bool is_scorable(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

/// Largest finite number of a dtype that can be scored.
[[nodiscard]] constexpr float largest_of(Dtype dtype) {
  return dtype == Dtype::f16 ? 65504.0F : std::bit_cast<float>(dtype == Dtype::bf16 ? 0x7f7f0000U : 0x7f7fffffU);
}

/// The upper half of an f32, rounded to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float x) {
    const auto wide = std::bit_cast<std::uint32_t>(x);
    bits = x != x ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((wide + 0x7fffU + ((wide >> 16) & 1U)) >> 16);
  }
  [[nodiscard]] static BFloat16 from_bits(std::uint16_t bits) {
    BFloat16 b;
    b.bits = bits;
    return b;
  }
  operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

/// IEEE binary16, rounded to nearest even; infinite if that is beyond 65504.
struct Half {
  std::uint16_t bits = 0;

  Half() = default;
  explicit Half(float x) {
    const auto wide = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (wide >> 16) & 0x8000U, size = wide & 0x7fffffffU;
    std::uint32_t out = 0;
    if (size > 0x7f800000U)
      out = 0x7e00U;  // NaN
    else if (size >= 0x477ff000U)
      out = 0x7c00U;  // rounds to 65536 or more
    else if (size >= 0x38800000U)
      out = (size - 0x38000000U + 0xfffU + ((size >> 13) & 1U)) >> 13;
    else
      out = std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + 0.5F) -
            0x3f000000U;  // subnormal: the addition rounds at 2^-24
    bits = static_cast<std::uint16_t>(sign | out);
  }
  [[nodiscard]] static Half from_bits(std::uint16_t bits) {
    Half h;
    h.bits = bits;
    return h;
  }
  operator float() const {
    const std::uint32_t sign = (bits & 0x8000U) << 16U, size = bits & 0x7fffU;
    if (size >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | ((size & 0x3ffU) << 13));
    if (size >= 0x400U) return std::bit_cast<float>(sign | ((size << 13) + 0x38000000U));
    const float value = static_cast<float>(size) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
};

/// The dtype of a C++ type.
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::f32;
};
template <>
struct DtypeOf<Half> {
  static constexpr Dtype value = Dtype::f16;
};
template <>
struct DtypeOf<BFloat16> {
  static constexpr Dtype value = Dtype::bf16;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::f64;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr Dtype value = Dtype::i64;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr Dtype value = Dtype::i32;
};
template <>
struct DtypeOf<std::uint8_t> {
  static constexpr Dtype value = Dtype::u8;
};

}  // namespace kvkeep
