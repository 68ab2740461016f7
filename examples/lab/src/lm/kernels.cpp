// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Sizeless vectors (SVE, RISC-V) cannot be in the small arrays below; those machines run the fixed-width targets.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels.cpp"
#include "hwy/foreach_target.h"
// Highway's own order: foreach_target first.
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::lm::detail {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Lanes32 = hn::ScalableTag<float>;
using Vector = hn::Vec<Lanes32>;
constexpr Lanes32 kLanes32;
constexpr auto kStride = static_cast<std::int64_t>(hn::MaxLanes(kLanes32));

HWY_INLINE Vector widen(const float* from) { return hn::LoadU(kLanes32, from); }
HWY_INLINE Vector widen(const hwy::float16_t* from) {
  return hn::PromoteTo(kLanes32, hn::LoadU(hn::Rebind<hwy::float16_t, Lanes32>(), from));
}
HWY_INLINE Vector widen(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(kLanes32, hn::LoadU(hn::Rebind<hwy::bfloat16_t, Lanes32>(), from));
}

// The last numbers of a row, followed by zeros.
template <class T>
HWY_INLINE Vector widen_first(const T* from, std::int64_t n) {
  alignas(64) T padded[kStride];
  std::memset(padded, 0, sizeof padded);
  std::memcpy(padded, from, static_cast<std::size_t>(n) * sizeof(T));
  return widen(padded);
}

HWY_INLINE float sum_lanes(Vector v) { return hn::GetLane(hn::SumOfLanes(kLanes32, v)); }

// R rows by N vectors in registers; each of the R*N sums has its own accumulator, so its order is that of one row and
// one vector alone. `kAhead` prefetches the next R rows meanwhile: short rows end before the machine's own prefetcher
// has caught up.
template <int R, int N, bool kAhead, class T>
HWY_INLINE void dot_tile(const T* rows, std::int64_t stride, std::int64_t length, const float* x, std::int64_t x_stride,
                         float* out, std::int64_t out_stride) {
  Vector sums[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) sums[r][n] = hn::Zero(kLanes32);
  std::int64_t i = 0;
  for (; i + kStride <= length; i += kStride) {
    Vector row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if constexpr (kAhead) hwy::Prefetch(rows + (r + R) * stride + i);
      row[r] = widen(rows + r * stride + i);
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      const Vector xs = hn::LoadU(kLanes32, x + n * x_stride + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][n] = hn::MulAdd(row[r], xs, sums[r][n]);
    }
  }
  if (i < length)
    for (int r = 0; r < R; ++r) {
      const Vector row = widen_first(rows + r * stride + i, length - i);
      for (int n = 0; n < N; ++n)
        sums[r][n] = hn::MulAdd(row, widen_first(x + n * x_stride + i, length - i), sums[r][n]);
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) out[n * out_stride + r] = sum_lanes(sums[r][n]);
}

// Vectors that meet four rows at once, as far as registers go: 32 of them hold 24 sums, 4 rows and a vector.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr int kVectors = 3;
#else
inline constexpr int kVectors = 6;
#endif

// Of `count` vectors, 0 to N.
template <int R, int N, bool kAhead, class T>
HWY_INLINE void dot_tile_of(std::int64_t count, const T* rows, std::int64_t stride, std::int64_t length, const float* x,
                            std::int64_t x_stride, float* out, std::int64_t out_stride) {
  if (count == N) return dot_tile<R, N, kAhead>(rows, stride, length, x, x_stride, out, out_stride);
  if constexpr (N > 1) dot_tile_of<R, N - 1, kAhead>(count, rows, stride, length, x, x_stride, out, out_stride);
}

template <int R, bool kAhead, class T>
HWY_INLINE void dot_rows(const T* rows, std::int64_t stride, std::int64_t length, const float* x, std::int64_t x_stride,
                         std::int64_t n_x, float* out, std::int64_t out_stride) {
  // Only the first vectors meet rows that are not in the cache yet.
  dot_tile_of<R, kVectors, kAhead>(std::min<std::int64_t>(kVectors, n_x), rows, stride, length, x, x_stride, out,
                                   out_stride);
  for (std::int64_t i = kVectors; i < n_x; i += kVectors)
    dot_tile_of<R, kVectors, false>(std::min(n_x - i, std::int64_t{kVectors}), rows, stride, length, x + i * x_stride,
                                    x_stride, out + i * out_stride, out_stride);
}

template <class T>
void dots_of(const T* rows, std::int64_t stride, std::int64_t n_rows, std::int64_t length, const float* x,
             std::int64_t x_stride, std::int64_t n_x, float* out, std::int64_t out_stride) {
  // Vectors in blocks that stay in the second-level cache while the rows pass by.
  constexpr std::int64_t kBlockBytes = 192 * 1024;
  constexpr std::int64_t kShortRowBytes = 8 * 1024;
  const std::int64_t block =
      std::max<std::int64_t>(kVectors, kBlockBytes / (4 * std::max<std::int64_t>(1, length)) / kVectors * kVectors);
  for (std::int64_t first = 0; first < n_x; first += block) {
    const std::int64_t count = std::min(block, n_x - first);
    const float* xs = x + first * x_stride;
    float* outs = out + first * out_stride;
    std::int64_t r = 0;
    for (; r + 4 <= n_rows; r += 4) {
      if (static_cast<std::int64_t>(sizeof(T)) * length <= kShortRowBytes)
        dot_rows<4, true>(rows + r * stride, stride, length, xs, x_stride, count, outs + r, out_stride);
      else
        dot_rows<4, false>(rows + r * stride, stride, length, xs, x_stride, count, outs + r, out_stride);
    }
    for (; r < n_rows; ++r)
      dot_rows<1, false>(rows + r * stride, stride, length, xs, x_stride, count, outs + r, out_stride);
  }
}

// N outputs, V registers of each, over `n_rows` rows.
template <int N, int V, class T>
HWY_INLINE void weighted_tile(const T* rows, std::int64_t stride, std::int64_t n_rows, const float* weights,
                              std::int64_t weights_stride, float* out, std::int64_t out_stride) {
  Vector sums[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[n][v] = hn::LoadU(kLanes32, out + n * out_stride + v * kStride);
  for (std::int64_t t = 0; t < n_rows; ++t) {
    Vector row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = widen(rows + t * stride + v * kStride);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Vector weight = hn::Set(kLanes32, weights[n * weights_stride + t]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = hn::MulAdd(weight, row[v], sums[n][v]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) hn::StoreU(sums[n][v], kLanes32, out + n * out_stride + v * kStride);
}

template <int N, class T>
HWY_INLINE void weighted_rows(const T* rows, std::int64_t stride, std::int64_t n_rows, std::int64_t length,
                              const float* weights, std::int64_t weights_stride, float* out, std::int64_t out_stride) {
  std::int64_t i = 0;
  for (; i + 2 * kStride <= length; i += 2 * kStride)
    weighted_tile<N, 2>(rows + i, stride, n_rows, weights, weights_stride, out + i, out_stride);
  for (; i + kStride <= length; i += kStride)
    weighted_tile<N, 1>(rows + i, stride, n_rows, weights, weights_stride, out + i, out_stride);
  if (i == length) return;
  const auto bytes = static_cast<std::size_t>(length - i) * sizeof(float);
  for (int n = 0; n < N; ++n) {
    Vector sum = widen_first(out + n * out_stride + i, length - i);
    for (std::int64_t t = 0; t < n_rows; ++t)
      sum = hn::MulAdd(hn::Set(kLanes32, weights[n * weights_stride + t]),
                       widen_first(rows + t * stride + i, length - i), sum);
    alignas(64) float padded[kStride];
    hn::Store(sum, kLanes32, padded);
    std::memcpy(out + n * out_stride + i, padded, bytes);
  }
}

template <class T>
void add_weighted_rows_of(const T* rows, std::int64_t stride, std::int64_t n_rows, std::int64_t length,
                          const float* weights, std::int64_t weights_stride, std::int64_t n_weights, float* out,
                          std::int64_t out_stride) {
  constexpr std::int64_t kBlock = 64;  // rows that stay in the first-level cache while the outputs pass by
  for (std::int64_t first = 0; first < n_rows; first += kBlock) {
    const std::int64_t count = std::min(kBlock, n_rows - first);
    const T* block = rows + first * stride;
    const float* w = weights + first;
    std::int64_t i = 0;
    for (; i + 4 <= n_weights; i += 4)
      weighted_rows<4>(block, stride, count, length, w + i * weights_stride, weights_stride, out + i * out_stride,
                       out_stride);
    for (; i < n_weights; ++i)
      weighted_rows<1>(block, stride, count, length, w + i * weights_stride, weights_stride, out + i * out_stride,
                       out_stride);
  }
}

void dots_any(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* x, std::int64_t x_stride,
              std::int64_t n_x, float* out, std::int64_t out_stride) {
  if (rows.dtype == at::kFloat)
    return dots_of(static_cast<const float*>(rows.data), rows.stride, n_rows, length, x, x_stride, n_x, out,
                   out_stride);
  if (rows.dtype == at::kHalf)
    return dots_of(static_cast<const hwy::float16_t*>(rows.data), rows.stride, n_rows, length, x, x_stride, n_x, out,
                   out_stride);
  dots_of(static_cast<const hwy::bfloat16_t*>(rows.data), rows.stride, n_rows, length, x, x_stride, n_x, out,
          out_stride);
}

void add_weighted_rows_any(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* weights,
                           std::int64_t weights_stride, std::int64_t n_weights, float* out, std::int64_t out_stride) {
  const auto add = [&](const auto* data) {
    add_weighted_rows_of(data, rows.stride, n_rows, length, weights, weights_stride, n_weights, out, out_stride);
  };
  if (rows.dtype == at::kFloat) return add(static_cast<const float*>(rows.data));
  if (rows.dtype == at::kHalf) return add(static_cast<const hwy::float16_t*>(rows.data));
  add(static_cast<const hwy::bfloat16_t*>(rows.data));
}

// Calls f(vector, in-place writer) for every register of x, the last one padded with `filler`.
template <class F>
HWY_INLINE void for_each_vector(float* x, std::int64_t n, float filler, F&& f) {
  std::int64_t i = 0;
  for (; i + kStride <= n; i += kStride) hn::StoreU(f(hn::LoadU(kLanes32, x + i), i, kStride), kLanes32, x + i);
  if (i == n) return;
  alignas(64) float padded[kStride];
  std::fill(padded, padded + kStride, filler);
  const auto bytes = static_cast<std::size_t>(n - i) * sizeof(float);
  std::memcpy(padded, x + i, bytes);
  hn::Store(f(hn::Load(kLanes32, padded), i, n - i), kLanes32, padded);
  std::memcpy(x + i, padded, bytes);
}

float exponentials_any(float* x, std::int64_t n, float scale, float* most) {
  Vector largest = hn::Set(kLanes32, -HUGE_VALF);
  for_each_vector(x, n, -HUGE_VALF, [&](Vector v, std::int64_t, std::int64_t) HWY_ATTR {
    largest = hn::Max(largest, v);
    return v;
  });
  const Vector top = hn::MaxOfLanes(kLanes32, largest), factor = hn::Set(kLanes32, scale);
  if (most != nullptr) *most = hn::GetLane(top);
  Vector sum = hn::Zero(kLanes32);
  for_each_vector(x, n, -HUGE_VALF, [&](Vector v, std::int64_t, std::int64_t) HWY_ATTR {
    const Vector weight = hn::Exp(kLanes32, hn::Mul(factor, hn::Sub(v, top)));
    sum = hn::Add(sum, weight);
    return weight;
  });
  return sum_lanes(sum);
}

void activate_times_any(io::Activation activation, float* gate, const float* up, std::int64_t n) {
  // Either is g times the sigmoid of something: (1 + tanh(y)) / 2 is that of 2 y.
  constexpr float kLinear = 1.5957691216057308F, kCubic = kLinear * 0.044715F;  // 2 sqrt(2 / pi)
  const bool gelu = activation == io::Activation::gelu_tanh;
  const Vector one = hn::Set(kLanes32, 1.0F), linear = hn::Set(kLanes32, kLinear), cubic = hn::Set(kLanes32, kCubic);
  for_each_vector(gate, n, 0.0F, [&](Vector g, std::int64_t i, std::int64_t count) HWY_ATTR {
    const Vector u = count == kStride ? hn::LoadU(kLanes32, up + i) : widen_first(up + i, count);
    const Vector of = gelu ? hn::Mul(g, hn::MulAdd(hn::Mul(g, g), cubic, linear)) : g;
    const Vector decay = hn::Exp(kLanes32, hn::Neg(hn::Abs(of)));  // never positive, so exp cannot overflow
    const Vector numerator = hn::IfThenElse(hn::Lt(of, hn::Zero(kLanes32)), decay, one);
    return hn::Mul(hn::Mul(g, hn::Div(numerator, hn::Add(one, decay))), u);
  });
}

void rms_norm_any(const float* x, const float* weight, float eps, std::int64_t n, float* out) {
  Vector squares = hn::Zero(kLanes32);
  std::int64_t i = 0;
  for (; i + kStride <= n; i += kStride) {
    const Vector v = hn::LoadU(kLanes32, x + i);
    squares = hn::MulAdd(v, v, squares);
  }
  if (i < n) {
    const Vector v = widen_first(x + i, n - i);
    squares = hn::MulAdd(v, v, squares);
  }
  const float scale = 1.0F / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps);
  for (std::int64_t j = 0; j < n; ++j) out[j] = weight[j] * (x[j] * scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvkeep::lm::detail
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::lm::detail {

HWY_EXPORT(dots_any);
HWY_EXPORT(add_weighted_rows_any);
HWY_EXPORT(exponentials_any);
HWY_EXPORT(activate_times_any);
HWY_EXPORT(rms_norm_any);

void dots(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* x, std::int64_t x_stride,
          std::int64_t n_x, float* out, std::int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(dots_any)(rows, n_rows, length, x, x_stride, n_x, out, out_stride);
}

void add_weighted_rows(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* weights,
                       std::int64_t weights_stride, std::int64_t n_weights, float* out, std::int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(add_weighted_rows_any)(rows, n_rows, length, weights, weights_stride, n_weights, out,
                                              out_stride);
}

float exponentials(float* x, std::int64_t n, float scale, float* most) {
  return HWY_DYNAMIC_DISPATCH(exponentials_any)(x, n, scale, most);
}

void activate_times(io::Activation activation, float* gate, const float* up, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(activate_times_any)(activation, gate, up, n);
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(rms_norm_any)(x, weight, eps, n, out);
}

}  // namespace kvkeep::lm::detail
#endif  // HWY_ONCE
