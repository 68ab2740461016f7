#pragma once
/// Elements as they are stored, and as f32.

#include <type_traits>

#include "evidence.h"
#include "kvkeep/core/error.h"
#include "platform.cuh"

namespace kvkeep::cuda {

/// One e4m3 number.
struct Fp8 {
  std::uint8_t bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline __half to_half(Fp8 x) {
  return __half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3));
}  // every e4m3 is an f16
__device__ inline float to_float(Fp8 x) { return __half2float(to_half(x)); }

__device__ inline void from_float(float x, float& to) { to = x; }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

/// Calls body(T{}) with the C++ type of an element.
template <class Body>
decltype(auto) with_element(Element element, Body&& body) {
  switch (element) {
    case Element::f16:
      return body(__half{});
    case Element::bf16:
      return body(__nv_bfloat16{});
    case Element::fp8_e4m3:
      return body(Fp8{});
    default:
      return body(float{});
  }
}

/// The same for an element that is not an 8-bit number.
template <class Body>
decltype(auto) with_wide_element(Element element, Body&& body) {
  switch (element) {
    case Element::f16:
      return body(__half{});
    case Element::bf16:
      return body(__nv_bfloat16{});
    default:
      return body(float{});
  }
}

/// The dtype that keys are multiplied in.
template <class T>
using MatrixElement = std::conditional_t<std::is_same_v<T, Fp8>, __half, T>;

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
/// a multiple of 16 bytes; from is one of kPerWord.
template <class T>
__device__ inline void load_floats(const T* vector, std::int32_t from, std::int32_t dim, bool aligned, float* to) {
  if (aligned && from + kPerWord<T> <= dim) {
    const Elements<T> word = *reinterpret_cast<const Elements<T>*>(vector + from);
#pragma unroll
    for (int i = 0; i < kPerWord<T>; ++i) to[i] = to_float(word.x[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerWord<T>; ++i) to[i] = from + i < dim ? to_float(vector[from + i]) : 0.0F;
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

/// One element as another: exact, except f32 as 16 bits.
template <class S, class T>
__device__ inline S element_as(T x) {
  if constexpr (std::is_same_v<S, T>) {
    return x;
  } else {
    S to;
    from_float(to_float(x), to);
    return to;
  }
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Piece {
  T x[kCount];
};

/// Writes slots [begin, end) of one side as S to `rows` rows of `stride` elements, with zeros from component `dim` up
/// to `padded` and in the rows after the last slot. `padded`: a multiple of 8. f32 is multiplied with scale_of(slot).
template <class T, class S, class ScaleOf>
__device__ void stage_as(const SlotAddress& side, bool aligned, std::int32_t begin, std::int32_t end, std::int32_t rows,
                         std::int32_t dim, std::int32_t padded, S* to, std::int32_t stride, const ScaleOf& scale_of) {
  constexpr std::int32_t kCount = kPerWord<S>;
  const std::int32_t words = padded / kCount;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < rows * words; i += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t row = i / words, d = (i - row * words) * kCount;
    Piece<T, kCount> from{};
    float scale = 1;
    if (begin + row < end) {
      const T* vector = reinterpret_cast<const T*>(side.at(begin + row));
      if constexpr (std::is_same_v<S, float>) scale = scale_of(begin + row);
      if (aligned && d + kCount <= dim) {
        from = *reinterpret_cast<const Piece<T, kCount>*>(vector + d);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          if (d + k < dim) from.x[k] = vector[d + k];
      }
    }
    Elements<S> word;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      word.x[k] = element_as<S>(from.x[k]);
      if constexpr (std::is_same_v<S, float>) word.x[k] = word.x[k] * scale;
    }
    *reinterpret_cast<Elements<S>*>(to + row * stride + d) = word;
  }
}

/// What the keys of a slot are multiplied with: its scale if keys are fp8, else 1.
template <class T>
__device__ inline float key_scale(const Row& row, std::int64_t slot) {
  if constexpr (std::is_same_v<T, Fp8>)
    return *reinterpret_cast<const float*>(row.key_scales.at(slot));
  else
    return 1.0F;
}

/// False for NaN and the infinities.
__device__ inline bool is_number(float x) { return x - x == 0.0F; }

/// Throws InvalidArgument for a head size that the kernels do not support.
inline void check_dim(const char* operation, std::int32_t dim) {
  KVKEEP_REQUIRE(dim >= 1 && dim <= 256, operation, ": head size; given ", dim, "; allowed 1 to 256");
}
inline void check_pool(const char* operation, std::int32_t pool) {
  KVKEEP_REQUIRE(pool >= 1 && pool % 2 == 1, operation, ": pool; given ", pool, "; allowed odd numbers from 1 on");
}

}  // namespace kvkeep::cuda
