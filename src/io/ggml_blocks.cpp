// SPDX-License-Identifier: Apache-2.0
#include "ggml_blocks.h"
#include "kvkeep/core/dtype.h"
#include "kvkeep/simd/attention_lanes.h"
#include "regular_file.h"

#include <array>
#include <bit>
#include <cstring>

namespace kvkeep::io {
namespace {

constexpr std::int32_t kSmall = 32;   // values per block of the older types
constexpr std::int32_t kLarge = 256;  // of types with K in their names: sub-blocks with their own scales

float half(const std::uint8_t* bytes) { return static_cast<float>(Half::from_bits(load<std::uint16_t>(bytes))); }

// Every block below is kBytes for kValues numbers. Products and sums are rounded to f32 one by one, in this order.

struct F32 {
  static constexpr std::int32_t kValues = 1, kBytes = 4;
  static void widen(const std::uint8_t* block, float* out) { std::memcpy(out, block, sizeof(float)); }
};

struct F16 {
  static constexpr std::int32_t kValues = 1, kBytes = 2;
  static void widen(const std::uint8_t* block, float* out) { *out = half(block); }
};

struct BF16 {
  static constexpr std::int32_t kValues = 1, kBytes = 2;
  static void widen(const std::uint8_t* block, float* out) {
    *out = std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(block)} << 16);
  }
};

// f16 scale; 32 signed bytes.
struct Q8_0 {
  static constexpr std::int32_t kValues = kSmall, kBytes = 2 + kSmall;
  static void widen(const std::uint8_t* block, float* out) { cpu::widen(block, Dtype::q8_0, kSmall, out); }
};

// The low halves of 16 bytes are the first 16 values, the high halves the others.
struct Q4_0 {
  static constexpr std::int32_t kValues = kSmall, kBytes = 2 + 16;
  static void widen(const std::uint8_t* block, float* out) { cpu::widen(block, Dtype::q4_0, kSmall, out); }
};

// Value i of 32 whose low bits are stored as in Q4_0, and a fifth one as bit i of `fifth`.
float small_value(const std::uint8_t* halves, std::uint32_t fifth, unsigned i) {
  const unsigned low = i < 16 ? halves[i] & 15U : halves[i - 16] >> 4U;
  return static_cast<float>(low | ((fifth >> i & 1U) << 4));
}

struct Q4_1 {
  static constexpr std::int32_t kValues = kSmall, kBytes = 4 + 16;
  static void widen(const std::uint8_t* block, float* out) {
    const float scale = half(block), least = half(block + 2);
    for (unsigned i = 0; i < kSmall; ++i) out[i] = scale * small_value(block + 4, 0, i) + least;
  }
};

struct Q5_0 {
  static constexpr std::int32_t kValues = kSmall, kBytes = 2 + 4 + 16;
  static void widen(const std::uint8_t* block, float* out) {
    const float scale = half(block);
    const auto fifth = load<std::uint32_t>(block + 2);
    for (unsigned i = 0; i < kSmall; ++i) out[i] = scale * (small_value(block + 6, fifth, i) - 16);
  }
};

struct Q5_1 {
  static constexpr std::int32_t kValues = kSmall, kBytes = 4 + 4 + 16;
  static void widen(const std::uint8_t* block, float* out) {
    const float scale = half(block), least = half(block + 2);
    const auto fifth = load<std::uint32_t>(block + 4);
    for (unsigned i = 0; i < kSmall; ++i) out[i] = scale * small_value(block + 8, fifth, i) + least;
  }
};

// f16 scales of the scales and of the offsets; twelve bytes of these, six bits each; 8 sub-blocks of 32 values, two per
// 32 bytes: the low halves are those of the even one. With five bits, the fifth of value i of sub-block s is bit s of
// byte i before the halves.
template <bool kFive>
struct OffsetK {
  static constexpr std::int32_t kFifths = kFive ? kLarge / 8 : 0;
  static constexpr std::int32_t kValues = kLarge, kBytes = 4 + 12 + kFifths + kLarge / 2;
  static void widen(const std::uint8_t* block, float* out) {
    const float scales = half(block), leasts = half(block + 2);
    const std::uint8_t *packed = block + 4, *fifth = block + 16;
    for (int s = 0; s < 8; ++s) {
      const int own_scale = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 6 << 4);
      const int own_least = s < 4 ? packed[s + 4] & 63 : (packed[s + 4] >> 4) | (packed[s] >> 6 << 4);
      const float scale = scales * static_cast<float>(own_scale), least = leasts * static_cast<float>(own_least);
      const std::uint8_t* halves = fifth + kFifths + 32 * (s / 2);
      const int shift = 4 * (s % 2);
      for (int i = 0; i < 32; ++i) {
        const int high = kFive ? (fifth[i] >> s & 1) << 4 : 0;
        out[32 * s + i] = scale * static_cast<float>((halves[i] >> shift & 15) | high) - least;
      }
    }
  }
};
using Q4_K = OffsetK<false>;
using Q5_K = OffsetK<true>;

// Two halves of 128 values: 64 bytes of low halves, 32 bytes of pairs of bits above them; then 16 signed scales, one
// per 16 values, and their f16 scale.
struct Q6_K {
  static constexpr std::int32_t kValues = kLarge, kBytes = kLarge / 2 + kLarge / 4 + kLarge / 16 + 2;
  static void widen(const std::uint8_t* block, float* out) {
    const std::uint8_t* scales = block + 192;
    const float scale_of_scales = half(block + 208);
    for (int s = 0; s < 16; ++s) {
      const float scale = scale_of_scales * static_cast<float>(static_cast<std::int8_t>(scales[s]));
      const int half_block = s / 8, quarter = s % 8 / 2, first = 16 * (s % 2);
      const std::uint8_t* low = block + 64 * half_block + 32 * (quarter % 2) + first;
      const std::uint8_t* high = block + 128 + 32 * half_block + first;
      const int low_shift = 4 * (quarter / 2), high_shift = 2 * quarter;
      for (int i = 0; i < 16; ++i)
        out[16 * s + i] =
            scale * static_cast<float>(((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
    }
  }
};

template <class Block>
void widen_all(const std::byte* blocks, std::int64_t count, float* out) {
  const auto* block = reinterpret_cast<const std::uint8_t*>(blocks);
  for (std::int64_t i = 0; i < count; ++i) Block::widen(block + i * Block::kBytes, out + i * Block::kValues);
}

template <class Block>
constexpr GgmlType readable(std::uint32_t number, std::string_view name) {
  return {number, name, Block::kValues, Block::kBytes, &widen_all<Block>};
}

constexpr std::array<GgmlType, 11> kReadable{
    readable<F32>(0, "F32"),    readable<F16>(1, "F16"),    readable<BF16>(30, "BF16"), readable<Q4_0>(2, "Q4_0"),
    readable<Q4_1>(3, "Q4_1"),  readable<Q5_0>(6, "Q5_0"),  readable<Q5_1>(7, "Q5_1"),  readable<Q8_0>(8, "Q8_0"),
    readable<Q4_K>(12, "Q4_K"), readable<Q5_K>(13, "Q5_K"), readable<Q6_K>(14, "Q6_K")};

// By number. Source: ggml.h, `enum ggml_type`, with the names of types that ggml has dropped.
constexpr std::array<std::string_view, 42> kNames{
    "F32",        "F16",        "Q4_0",       "Q4_1",  "Q4_2",     "Q4_3",     "Q5_0",     "Q5_1",    "Q8_0",
    "Q8_1",       "Q2_K",       "Q3_K",       "Q4_K",  "Q5_K",     "Q6_K",     "Q8_K",     "IQ2_XXS", "IQ2_XS",
    "IQ3_XXS",    "IQ1_S",      "IQ4_NL",     "IQ3_S", "IQ2_S",    "IQ4_XS",   "I8",       "I16",     "I32",
    "I64",        "F64",        "IQ1_M",      "BF16",  "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",   "TQ2_0",
    "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",    "Q1_0"};

}  // namespace

const GgmlType* ggml_type(std::uint32_t number) {
  for (const GgmlType& type : kReadable)
    if (type.number == number) return &type;
  return nullptr;
}

std::string_view ggml_type_name(std::uint32_t number) { return number < kNames.size() ? kNames[number] : "unknown"; }

}  // namespace kvkeep::io
