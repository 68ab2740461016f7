// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Elements as they are stored, and as f32.

#include <cstring>
#include <type_traits>

#include "evidence.h"
#include "kvkeep/core/error.h"
#include "platform.cuh"

namespace kvkeep::cuda {

/// One number of 8 bits. Kernels are compiled once for all of them: which format it is an Element says at run time.
struct Bits8 {
  std::uint8_t bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline void from_float(float x, float& to) { to = x; }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

/// Calls body with the format of 8-bit numbers as a constant. The branch is one for all that body does.
template <class Body>
__device__ inline void with_format(Element element, const Body& body) {
  if (element == Element::f8_e4m3)
    body(std::integral_constant<Element, Element::f8_e4m3>{});
  else if (element == Element::f8_e5m2)
    body(std::integral_constant<Element, Element::f8_e5m2>{});
  else
    body(std::integral_constant<Element, Element::i8>{});
}

/// Two f16, as bits.
__device__ inline __half2_raw as_halves(std::uint32_t bits) {
  __half2_raw halves;
  memcpy(&halves, &bits, sizeof bits);
  return halves;
}
__device__ inline std::uint32_t as_bits(__half2_raw halves) {
  std::uint32_t bits = 0;
  memcpy(&bits, &halves, sizeof bits);
  return bits;
}

/// Four 8-bit numbers, the first in the lowest bits, as f16. All three formats are exact there, NaN and infinities
/// included.
template <Element kFormat>
__device__ inline uint2 halves_of(std::uint32_t four) {
  if constexpr (kFormat == Element::f8_e4m3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const auto pair = [](std::uint32_t two) {
      return as_bits(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3));
    };
    return {pair(four), pair(four >> 16U)};
#else
    const std::uint32_t nan = ((four & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U;  // the highest bit of such a byte
    const auto pair = [](std::uint32_t two, std::uint32_t nan_of_two) {
      const std::uint32_t bits = (two & 0x80008000U) | (two & 0x7F007F00U) >> 1U;  // times 2^-8, as exponents go
      return as_bits(__hmul2(__half2(as_halves(bits)), __half2(as_halves(0x5C005C00U)))) | nan_of_two * 252U;  // 0x7E00
    };
    return {pair(__byte_perm(four, 0, 0x1404), __byte_perm(nan, 0, 0x4140)),
            pair(__byte_perm(four, 0, 0x3424), __byte_perm(nan, 0, 0x4342))};
#endif
  } else if constexpr (kFormat == Element::f8_e5m2) {
    return {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)};  // the upper half of an f16
  } else {
    const std::uint32_t from_0 = four ^ 0x80808080U;  // x + 128, which 1024 takes in without rounding
    const auto pair = [](std::uint32_t beside) {
      return as_bits(__hsub2(__half2(as_halves(beside)), __half2(as_halves(0x64806480U))));
    };
    return {pair(__byte_perm(from_0, 0x64, 0x4140)), pair(__byte_perm(from_0, 0x64, 0x4342))};
  }
}

/// kCount numbers as f16, a multiple of four. element: their format.
template <int kCount>
__device__ inline void to_halves(const Bits8* from, Element element, __half* to) {
  with_format(element, [&](auto format) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      std::uint32_t four;
      memcpy(&four, from + k, sizeof four);
      const uint2 halves = halves_of<decltype(format)::value>(four);
      memcpy(static_cast<void*>(to + k), &halves, sizeof halves);
    }
  });
}

/// kCount numbers as f32: exact. element: the format of 8-bit ones.
template <int kCount, class T>
__device__ inline void to_floats(const T* from, Element element, float* to) {
  if constexpr (std::is_same_v<T, Bits8>) {
    constexpr int kWhole = (kCount + 3) / 4 * 4;
    Bits8 bytes[kWhole] = {};
    __half halves[kWhole];
#pragma unroll
    for (int k = 0; k < kCount; ++k) bytes[k] = from[k];
    to_halves<kWhole>(bytes, element, halves);
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = __half2float(halves[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = to_float(from[k]);
  }
}

/// Calls body(T{}) with the C++ type of an element that is not an 8-bit number.
#pragma nv_exec_check_disable
template <class Body>
KVKEEP_HD decltype(auto) with_wide_element(Element element, Body&& body) {
  if (element == Element::f16) return body(__half{});
  if (element == Element::bf16) return body(__nv_bfloat16{});
  return body(float{});
}

/// The same, with Bits8 for all of 8 bits.
template <class Body>
decltype(auto) with_element(Element element, Body&& body) {
  return is_8bit(element) ? body(Bits8{}) : with_wide_element(element, body);
}

/// The dtype that keys are multiplied in.
template <class T>
using MatrixElement = std::conditional_t<std::is_same_v<T, Bits8>, __half, T>;

/// Elements of a word of 16 bytes.
template <class T>
inline constexpr std::int32_t kPerWord = static_cast<std::int32_t>(16 / sizeof(T));

template <class T>
struct alignas(16) Elements {
  T x[kPerWord<T>];
};

/// True if every slot's vector begins at a multiple of 16 bytes.
__device__ inline bool is_aligned(const SlotAddress& side) {
  return ((reinterpret_cast<std::uintptr_t>(side.base) | static_cast<std::uint64_t>(side.stride) |
           static_cast<std::uint64_t>(side.page_stride)) &
          15U) == 0;
}

/// Elements [from, from + kPerWord) of a vector of `dim` as f32, zeros after its end. `aligned`: the vector begins at
/// a multiple of 16 bytes; from is one of kPerWord. element: the format of 8-bit ones.
template <class T>
__device__ inline void load_floats(const T* vector, std::int32_t from, std::int32_t dim, bool aligned, Element element,
                                   float* to) {
  Elements<T> word;
  if (aligned && from + kPerWord<T> <= dim) {
    word = *reinterpret_cast<const Elements<T>*>(vector + from);
  } else {
#pragma unroll
    for (int i = 0; i < kPerWord<T>; ++i) word.x[i] = from + i < dim ? vector[from + i] : T{};
  }
  to_floats<kPerWord<T>>(word.x, element, to);
}

/// Copies components [d0, d0 + n) of slots [begin, end) to rows of `stride` bytes; zeros after them up to a whole word
/// of 16 bytes.
template <class T>
__device__ void stage_keys(const SlotAddress& keys, bool aligned, std::int32_t begin, std::int32_t end, std::int32_t d0,
                           std::int32_t n, std::byte* to, std::int32_t stride) {
  const std::int32_t words = (n + kPerWord<T> - 1) / kPerWord<T>, all = (end - begin) * words;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < all; i += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t slot = i / words, d = (i - slot * words) * kPerWord<T>;
    const T* key = reinterpret_cast<const T*>(keys.at(begin + slot)) + d0;
    auto* word = reinterpret_cast<Elements<T>*>(to + slot * stride) + d / kPerWord<T>;
    if (aligned && d + kPerWord<T> <= n) {
      *word = *reinterpret_cast<const Elements<T>*>(key + d);
    } else {
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) word->x[k] = d + k < n ? key[d + k] : T{};
    }
  }
}

/// kCount numbers as S: exact, except f32 as 16 bits. element: the format of 8-bit ones.
template <int kCount, class S, class T>
__device__ inline void to_elements(const T* from, Element element, S* to) {
  if constexpr (std::is_same_v<S, T>) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = from[k];
  } else if constexpr (std::is_same_v<T, Bits8> && std::is_same_v<S, __half>) {
    to_halves<kCount>(from, element, to);
  } else {
    float x[kCount];
    to_floats<kCount>(from, element, x);
#pragma unroll
    for (int k = 0; k < kCount; ++k) from_float(x[k], to[k]);
  }
}

/// Elements next to each other, which are read and written at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) PackedElements {
  T x[kCount];
};

/// Writes slots [begin, end) of one side as S to `rows` rows of `stride` elements, with zeros from component `dim` up
/// to `padded` and in the rows after the last slot. `padded`: a multiple of 8. element: the format of 8-bit numbers.
/// f32 is multiplied with scale_of(slot).
template <class T, class S, class ScaleOf>
__device__ void stage_as(const SlotAddress& side, bool aligned, std::int32_t begin, std::int32_t end, std::int32_t rows,
                         std::int32_t dim, std::int32_t padded, Element element, S* to, std::int32_t stride,
                         const ScaleOf& scale_of) {
  constexpr std::int32_t kCount = kPerWord<S>;
  const std::int32_t words = padded / kCount;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < rows * words; i += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t row = i / words, d = (i - row * words) * kCount;
    PackedElements<T, kCount> from{};
    float scale = 1;
    if (begin + row < end) {
      const T* vector = reinterpret_cast<const T*>(side.at(begin + row));
      if constexpr (std::is_same_v<S, float>) scale = scale_of(begin + row);
      if (aligned && d + kCount <= dim) {
        from = *reinterpret_cast<const PackedElements<T, kCount>*>(vector + d);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          if (d + k < dim) from.x[k] = vector[d + k];
      }
    }
    Elements<S> word;
    to_elements<kCount>(from.x, element, word.x);
    if constexpr (std::is_same_v<S, float>) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) word.x[k] = word.x[k] * scale;
    }
    *reinterpret_cast<Elements<S>*>(to + row * stride + d) = word;
  }
}

/// kCount numbers of an element that is known at run time, none of 8 bits, as f32.
template <int kCount>
__device__ inline void load_wide(const void* from, Element element, float* to) {
  with_wide_element(element, [&](auto type) {
    using T = decltype(type);
    PackedElements<T, kCount> held;
    if (reinterpret_cast<std::uintptr_t>(from) % sizeof held == 0) {
      held = *static_cast<const PackedElements<T, kCount>*>(from);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) held.x[k] = static_cast<const T*>(from)[k];
    }
    to_floats<kCount>(held.x, element, to);
  });
}

/// What the keys of a slot are multiplied with: its scale if keys have 8 bits, else 1.
template <class T>
__device__ inline float key_scale(const Row& row, std::int64_t slot) {
  if constexpr (std::is_same_v<T, Bits8>)
    return *reinterpret_cast<const float*>(row.key_scales.at(slot));
  else
    return 1.0F;
}

/// False for NaN and the infinities.
__device__ inline bool is_number(float x) { return x - x == 0.0F; }

/// Throws InvalidArgument for numbers of 8 bits.
inline void check_wide(const char* operation, const char* what, Element element) {
  KVKEEP_REQUIRE(!is_8bit(element), operation, ": ", what, " are ", name_of(element), "; allowed f32, f16, bf16");
}

/// Throws InvalidArgument for a head size that the kernels do not support.
inline void check_dim(const char* operation, std::int32_t dim) {
  KVKEEP_REQUIRE(dim >= 1 && dim <= kMostDim, operation, ": head size; given ", dim, "; allowed 1 to ", kMostDim);
}
inline void check_pool(const char* operation, std::int32_t pool) {
  KVKEEP_REQUIRE(pool >= 1 && pool % 2 == 1, operation, ": pool; given ", pool, "; allowed odd numbers from 1 on");
}

}  // namespace kvkeep::cuda
