// SPDX-License-Identifier: Apache-2.0
// Bodies of expected_lanes.h, once per instruction set.

#if defined(KVKEEP_EXPECTED_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_EXPECTED_LANES_INL_H
#undef KVKEEP_EXPECTED_LANES_INL_H
#else
#define KVKEEP_EXPECTED_LANES_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvkeep/core/hd.h"
#include "kvkeep/simd/expected_lanes.h"
#include "kvkeep/simd/exponential-inl.h"
#include "kvkeep/simd/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::expected_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Doubles = hn::ScalableTag<double>;

// Rows of a tile: their sums, two vectors of columns and one more vector fill the registers, 32 or 16 of them.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr int kRows = 6;
#else
inline constexpr int kRows = 12;
#endif

template <class D>
inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
inline constexpr std::int64_t kWidth = 2 * kLanes<Floats>;

constexpr std::int64_t RoundUp(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

KVKEEP_INLINE std::int64_t ColumnWidth() { return kWidth; }
KVKEEP_INLINE std::int64_t TileKeys() { return kRows; }
KVKEEP_INLINE std::int64_t GramStride(std::int64_t dim) { return RoundUp(dim, kWidth); }
KVKEEP_INLINE std::int64_t GramRows(std::int64_t dim) { return RoundUp(dim, kRows); }
KVKEEP_INLINE std::int64_t CholeskyStride(std::int64_t dim) { return RoundUp(dim, kRows) + 2 * kLanes<Doubles>; }

/// The sums of kRows rows times one or two vectors of columns.
template <class D>
struct Sums {
  hn::Vec<D> first[kRows], second[kRows];
  HWY_INLINE Sums() {
    const D d;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) first[r] = second[r] = hn::Zero(d);
  }
};

/// sums[r] += a[i * a_step + r] * b[i * b_step + lane], i in [0, n). `kBoth`: two vectors of b.
template <bool kBoth, class D>
HWY_INLINE void Accumulate(D d, const hn::TFromD<D>* HWY_RESTRICT a, std::int64_t a_step,
                           const hn::TFromD<D>* HWY_RESTRICT b, std::int64_t b_step, std::int64_t n, Sums<D>& sums) {
  for (std::int64_t i = 0; i < n; ++i, a += a_step, b += b_step) {
    const auto b0 = hn::LoadU(d, b);
    const auto b1 = kBoth ? hn::LoadU(d, b + kLanes<D>) : b0;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto x = hn::Set(d, a[r]);
      sums.first[r] = hn::MulAdd(x, b0, sums.first[r]);
      if constexpr (kBoth) sums.second[r] = hn::MulAdd(x, b1, sums.second[r]);
    }
  }
}

KVKEEP_INLINE void PackTiles(const Keys& keys, std::int64_t from, std::int64_t to, float* HWY_RESTRICT tiles,
                             float* HWY_RESTRICT widened) {
  for (std::int64_t t = from; t < to; t += kRows, tiles += keys.dim * kRows)
    for (std::int64_t r = 0; r < kRows; ++r) {
      if (t + r >= to) {
        for (std::int64_t i = 0; i < keys.dim; ++i) tiles[i * kRows + r] = 0;
        continue;
      }
      const std::byte* at = keys.slots.at(t + r);
      const float* key = widened;
      if (keys.dtype == Dtype::f32)
        key = reinterpret_cast<const float*>(at);
      else
        widen(at, keys.dtype, keys.dim, widened);
      for (std::int64_t i = 0; i < keys.dim; ++i) tiles[i * kRows + r] = key[i];
    }
}

KVKEEP_INLINE void AddSquares(const float* HWY_RESTRICT tiles, std::int64_t count, std::int64_t dim,
                              const float* HWY_RESTRICT panel, std::int64_t start, bool triangular,
                              float* HWY_RESTRICT out) {
  const Floats d;
  const std::int64_t single = triangular ? std::min(kLanes<Floats>, dim - start) : 0;
  for (std::int64_t t = 0; t < count; ++t, tiles += dim * kRows, out += kRows * kLanes<Floats>) {
    Sums<Floats> sums;
    Accumulate<false>(d, tiles + start * kRows, kRows, panel, kWidth, single, sums);
    Accumulate<true>(d, tiles + (start + single) * kRows, kRows, panel + single * kWidth, kWidth, dim - start - single,
                     sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto before = hn::LoadU(d, out + r * kLanes<Floats>);
      hn::StoreU(hn::MulAdd(sums.second[r], sums.second[r], hn::MulAdd(sums.first[r], sums.first[r], before)), d,
                 out + r * kLanes<Floats>);
    }
  }
}

KVKEEP_INLINE void TileProducts(const float* HWY_RESTRICT tiles, std::int64_t count, std::int64_t dim,
                                const float* HWY_RESTRICT panel, float* HWY_RESTRICT out) {
  const Floats d;
  for (std::int64_t t = 0; t < count; ++t, tiles += dim * kRows, out += kRows * kWidth) {
    Sums<Floats> sums;
    Accumulate<true>(d, tiles, kRows, panel, kWidth, dim, sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(sums.first[r], d, out + r * kWidth);
      hn::StoreU(sums.second[r], d, out + r * kWidth + kLanes<Floats>);
    }
  }
}

KVKEEP_INLINE void AddProductSquares(const float* HWY_RESTRICT products, std::int64_t keys, std::int64_t columns,
                                     float* HWY_RESTRICT sums) {
  const Floats d;
  for (std::int64_t t = 0; t < keys; ++t, products += columns, sums += kLanes<Floats>) {
    auto sum = hn::LoadU(d, sums);
    for (std::int64_t c = 0; c < columns; c += kLanes<Floats>) {
      const auto y = hn::LoadU(d, products + c);
      sum = hn::MulAdd(y, y, sum);
    }
    hn::StoreU(sum, d, sums);
  }
}

KVKEEP_INLINE void AddKeyProducts(const float* HWY_RESTRICT products, const std::uint16_t* HWY_RESTRICT keys,
                                  std::int64_t key_stride, std::int64_t count, std::int64_t columns,
                                  float* HWY_RESTRICT sums) {
  const Floats d;
  const hn::Rebind<hwy::bfloat16_t, Floats> narrow;
  const auto* key = reinterpret_cast<const hwy::bfloat16_t*>(keys);
  for (std::int64_t t = 0; t < count; ++t, products += columns, key += key_stride, sums += kLanes<Floats>) {
    auto sum = hn::LoadU(d, sums);
    for (std::int64_t c = 0; c < columns; c += kLanes<Floats>)
      sum = hn::MulAdd(hn::LoadU(d, products + c), hn::PromoteTo(d, hn::LoadU(narrow, key + c)), sum);
    hn::StoreU(sum, d, sums);
  }
}

#if HWY_TARGET == HWY_SCALAR
using Four = Floats;
HWY_INLINE hn::Vec<Four> RowSums(const float* sums) { return hn::LoadU(Four(), sums); }
#else
using Four = hn::Full128<float>;

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<Four> Folded(D d, V v) {
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<D> half;
    return Folded(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

/// Sums over the lanes of four keys, each in the same order.
HWY_INLINE hn::Vec<Four> RowSums(const float* sums) {
  const Floats d;
  const Four four;
  const hn::Full128<double> wide;
  const auto load = [&](int r) HWY_ATTR { return Folded(d, hn::LoadU(d, sums + r * kLanes<Floats>)); };
  const auto p = load(0), q = load(1), r = load(2), s = load(3);
  const auto pq = hn::BitCast(wide, hn::Add(hn::InterleaveLower(four, p, q), hn::InterleaveUpper(four, p, q)));
  const auto rs = hn::BitCast(wide, hn::Add(hn::InterleaveLower(four, r, s), hn::InterleaveUpper(four, r, s)));
  return hn::Add(hn::BitCast(four, hn::InterleaveLower(wide, pq, rs)),
                 hn::BitCast(four, hn::InterleaveUpper(wide, pq, rs)));
}
#endif

KVKEEP_INLINE void ExpectedLogits(const float* HWY_RESTRICT sums, std::int64_t keys, float factor,
                                  const float* HWY_RESTRICT linear, std::int64_t stride, float* HWY_RESTRICT logits) {
  const Four d;
  constexpr std::int64_t kFour = kLanes<Four>;
  const auto most = hn::Set(d, std::numeric_limits<float>::max() / 2), zero = hn::Zero(d);
  for (std::int64_t t = 0; t < keys; t += kFour, linear += kFour * stride) {
    HWY_ALIGN float lines[kFour];
    for (std::int64_t i = 0; i < kFour; ++i) lines[i] = linear[i * stride];
    auto line = hn::LoadU(d, lines), square = hn::Mul(hn::Set(d, factor), RowSums(sums + t * kLanes<Floats>));
    square = hn::IfThenElse(hn::Gt(square, most), most, square);
    square = hn::IfThenElse(hn::Lt(square, zero), zero, square);
    square = hn::IfThenElse(hn::Eq(square, square), square, hn::IfThenElse(hn::Eq(line, line), most, line));
    line = hn::IfThenElse(hn::Gt(line, most), most, line);
    line = hn::IfThenElse(hn::Lt(line, hn::Neg(most)), hn::Neg(most), line);
    hn::StoreU(hn::Add(square, line), d, logits + t);
  }
}

/// Means of `kStrips` vectors of columns from x on.
template <int kStrips>
HWY_INLINE void StripMeans(const float* HWY_RESTRICT x, std::int64_t rows, std::int64_t stride,
                           double* HWY_RESTRICT mean) {
  const Doubles d;
  const hn::Rebind<float, Doubles> half;
  hn::Vec<Doubles> sum[kStrips];
#pragma GCC unroll 8
  for (auto& s : sum) s = hn::Zero(d);
  for (std::int64_t r = 0; r < rows; ++r, x += stride)
#pragma GCC unroll 8
    for (int i = 0; i < kStrips; ++i)
      sum[i] = hn::Add(sum[i], hn::PromoteTo(d, hn::LoadU(half, x + i * kLanes<Doubles>)));
#pragma GCC unroll 8
  for (int i = 0; i < kStrips; ++i)
    hn::StoreU(hn::Div(sum[i], hn::Set(d, static_cast<double>(rows))), d, mean + i * kLanes<Doubles>);
}

KVKEEP_INLINE bool ColumnMeans(const float* HWY_RESTRICT x, std::int64_t rows, std::int64_t dim, std::int64_t stride,
                               double* HWY_RESTRICT mean) {
  constexpr int kStrips = 8;
  std::int64_t c = 0;
  for (; c + kStrips * kLanes<Doubles> <= dim; c += kStrips * kLanes<Doubles>)
    StripMeans<kStrips>(x + c, rows, stride, mean + c);
  for (; c + kLanes<Doubles> <= dim; c += kLanes<Doubles>) StripMeans<1>(x + c, rows, stride, mean + c);
  for (; c < dim; ++c) {
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) sum += static_cast<double>(x[r * stride + c]);
    mean[c] = sum / static_cast<double>(rows);
  }
  return std::all_of(mean, mean + dim, [](double m) { return std::isfinite(m); });
}

KVKEEP_INLINE float CentreRows(float* HWY_RESTRICT x, std::int64_t rows, std::int64_t dim, std::int64_t stride,
                               const float* HWY_RESTRICT mean) {
  const Floats d;
  auto top = hn::Zero(d);
  float rest = 0;
  for (std::int64_t r = 0; r < rows; ++r, x += stride) {
    std::int64_t c = 0;
    for (; c + kLanes<Floats> <= dim; c += kLanes<Floats>) {
      const auto z = hn::Sub(hn::LoadU(d, x + c), hn::LoadU(d, mean + c));
      top = hn::Max(top, hn::Abs(z));
      hn::StoreU(z, d, x + c);
    }
    for (; c < dim; ++c) {
      x[c] -= mean[c];
      rest = std::max(rest, std::abs(x[c]));
    }
    std::fill(x + dim, x + stride, 0.0F);
  }
  return std::max(rest, hn::GetLane(hn::MaxOfLanes(d, top)));
}

KVKEEP_INLINE void ScaleRows(float* HWY_RESTRICT x, std::int64_t rows, std::int64_t stride, float factor) {
  const Floats d;
  const std::int64_t n = rows * stride;
  std::int64_t i = 0;
  for (; i + kLanes<Floats> <= n; i += kLanes<Floats>)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i);
  for (; i < n; ++i) x[i] *= factor;
}

KVKEEP_INLINE void TurnRows(float* HWY_RESTRICT x, std::int64_t rows, std::int64_t stride, std::int64_t pairs,
                            const float* HWY_RESTRICT cosines, const float* HWY_RESTRICT sines) {
  const Floats d;
  for (std::int64_t r = 0; r < rows; ++r, x += stride) {
    std::int64_t f = 0;
    for (; f + kLanes<Floats> <= pairs; f += kLanes<Floats>) {
      const auto a = hn::LoadU(d, x + f), b = hn::LoadU(d, x + f + pairs), c = hn::LoadU(d, cosines + f),
                 s = hn::LoadU(d, sines + f);
      hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, x + f);
      hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, x + f + pairs);
    }
    for (; f < pairs; ++f) {
      const float a = x[f], b = x[f + pairs];
      x[f] = product(a, cosines[f]) - product(b, sines[f]);
      x[f + pairs] = product(b, cosines[f]) + product(a, sines[f]);
    }
  }
}

KVKEEP_INLINE void Gram(const float* HWY_RESTRICT x, std::int64_t rows, std::int64_t dim, float* HWY_RESTRICT out) {
  constexpr std::int64_t kBlock = 64;  // rows that fit in the first cache
  const Floats d;
  const std::int64_t stride = GramStride(dim);
  std::fill_n(out, GramRows(dim) * stride, 0.0F);
  for (std::int64_t from = 0; from < rows; from += kBlock) {
    const std::int64_t n = std::min(kBlock, rows - from);
    const float* block = x + from * stride;
    for (std::int64_t i = 0; i < dim; i += kRows)
      for (std::int64_t j = i / kWidth * kWidth; j < dim; j += kWidth) {
        Sums<Floats> sums;
        Accumulate<true>(d, block + i, stride, block + j, stride, n, sums);
        float* to = out + i * stride + j;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r, to += stride) {
          hn::StoreU(hn::Add(sums.first[r], hn::LoadU(d, to)), d, to);
          hn::StoreU(hn::Add(sums.second[r], hn::LoadU(d, to + kLanes<Floats>)), d, to + kLanes<Floats>);
        }
      }
  }
}

KVKEEP_INLINE void Cholesky(double* HWY_RESTRICT a, std::int64_t dim) {
  constexpr std::int64_t kStep = 2 * kLanes<Doubles>;
  const Doubles d;
  const std::int64_t stride = CholeskyStride(dim);
  for (std::int64_t i0 = 0; i0 < dim; i0 += kRows) {
    const std::int64_t block = std::min<std::int64_t>(kRows, dim - i0);
    double noise[kRows];
    for (std::int64_t r = 0; r < block; ++r)
      noise[r] = a[(i0 + r) * stride + i0 + r] * static_cast<double>(dim) * 0x1p-23;
    for (std::int64_t j = i0; j < dim; j += kStep) {  // what the rows above subtract from this block
      Sums<Doubles> sums;
      Accumulate<true>(d, a + i0, stride, a + j, stride, i0, sums);
      double* to = a + i0 * stride + j;
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r, to += stride) {
        hn::StoreU(hn::Sub(hn::LoadU(d, to), sums.first[r]), d, to);
        hn::StoreU(hn::Sub(hn::LoadU(d, to + kLanes<Doubles>), sums.second[r]), d, to + kLanes<Doubles>);
      }
    }
    for (std::int64_t i = i0; i < i0 + block; ++i) {  // the rows of the block, one by one
      double* row = a + i * stride;
      const double pivot = row[i];
      const double factor = pivot > noise[i - i0] ? 1.0 / std::sqrt(pivot) : 0.0;
      for (std::int64_t j = i; j < dim; j += kLanes<Doubles>) {
        const auto u = hn::LoadU(d, row + j);
        hn::StoreU(factor > 0 ? hn::Mul(u, hn::Set(d, factor)) : hn::Zero(d), d, row + j);
      }
      for (std::int64_t k = i + 1; k < i0 + block; ++k) {
        const auto u = hn::Set(d, row[k]);
        double* below = a + k * stride;
        for (std::int64_t j = k; j < dim; j += kLanes<Doubles>)
          hn::StoreU(hn::NegMulAdd(u, hn::LoadU(d, row + j), hn::LoadU(d, below + j)), d, below + j);
      }
    }
  }
}

/// The nearest bf16 in the high half of each lane; the rest is 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto Rounded(D, V x) {
  const hn::RebindToUnsigned<D> du;
  return hn::And(hn::Add(hn::BitCast(du, x), hn::Set(du, 0x8000)), hn::Set(du, 0xFFFF0000));
}

/// High halves of a below those of b.
template <class U>
HWY_INLINE auto Paired(U a, U b) {
  return hn::Or(hn::ShiftRight<16>(a), b);
}

KVKEEP_INLINE void SplitPairs(const float* HWY_RESTRICT panel, std::int64_t stride, std::int64_t rows,
                              std::int64_t width, float factor, std::uint16_t* HWY_RESTRICT high,
                              std::uint16_t* HWY_RESTRICT low) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto times = hn::Set(d, factor);
  auto* to_high = reinterpret_cast<std::uint32_t*>(high);
  auto* to_low = reinterpret_cast<std::uint32_t*>(low);
  for (std::int64_t i = 0; i < rows; i += 2, panel += 2 * stride)
    for (std::int64_t c = 0; c < width; c += lanes, to_high += lanes, to_low += lanes) {
      const auto a = hn::Mul(hn::LoadU(d, panel + c), times), b = hn::Mul(hn::LoadU(d, panel + stride + c), times);
      const auto ha = Rounded(d, a), hb = Rounded(d, b);
      hn::StoreU(Paired(ha, hb), du, to_high);
      hn::StoreU(Paired(Rounded(d, hn::Sub(a, hn::BitCast(d, ha))), Rounded(d, hn::Sub(b, hn::BitCast(d, hb)))), du,
                 to_low);
    }
}

KVKEEP_INLINE void TransposePairs(const std::uint16_t* HWY_RESTRICT pairs, std::int64_t rows, std::int64_t width,
                                  std::uint16_t* HWY_RESTRICT out, std::int64_t stride) {
  const auto* from = reinterpret_cast<const std::uint32_t*>(pairs);
  auto* to = reinterpret_cast<std::uint32_t*>(out);
  stride /= 2;
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t i = 0; i < rows / 2; ++i)
    for (std::int64_t c = 0; c < width; ++c) to[c * stride + i] = from[i * width + c];
#else
  const hn::Full128<std::uint32_t> d;
  const hn::Full128<std::uint64_t> wide;
  const auto two = [&](auto v) HWY_ATTR { return hn::BitCast(wide, v); };
  constexpr std::int64_t kBlock = 16;  // of a cache line on either side
  for (std::int64_t first = 0; first < width; first += kBlock)
    for (std::int64_t i = 0; i < rows / 2; i += 4)
      for (std::int64_t c = first; c < std::min(first + kBlock, width); c += 4) {
        const std::uint32_t* at = from + i * width + c;
        const auto p = hn::LoadU(d, at), q = hn::LoadU(d, at + width), r = hn::LoadU(d, at + 2 * width),
                   s = hn::LoadU(d, at + 3 * width);
        const auto pq = two(hn::InterleaveLower(d, p, q)), rs = two(hn::InterleaveLower(d, r, s));
        const auto pq_high = two(hn::InterleaveUpper(d, p, q)), rs_high = two(hn::InterleaveUpper(d, r, s));
        std::uint32_t* row = to + c * stride + i;
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(wide, pq, rs)), d, row);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(wide, pq, rs)), d, row + stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(wide, pq_high, rs_high)), d, row + 2 * stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(wide, pq_high, rs_high)), d, row + 3 * stride);
      }
#endif
}

KVKEEP_INLINE float RowTop(const float* HWY_RESTRICT x, std::int64_t n) {
  const Floats d;
  auto top = hn::Set(d, -std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes<Floats> <= n; i += kLanes<Floats>) {
    const auto v = hn::LoadU(d, x + i);
    top = hn::IfThenElse(hn::Gt(v, top), v, top);
  }
  float best = hn::GetLane(hn::MaxOfLanes(d, top));
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

KVKEEP_INLINE float RowExp(float* HWY_RESTRICT x, std::int64_t n, float top) {
  const Floats d;
  auto sum = hn::Zero(d);
  for (std::int64_t i = 0; i < n; i += kLanes<Floats>) {
    const auto v = hn::LoadU(d, x + i);
    const auto number = hn::Eq(v, v);
    const auto e = ExpOfNegative(d, hn::Sub(hn::IfThenElseZero(number, v), hn::Set(d, top)));
    sum = hn::Add(sum, hn::IfThenElseZero(number, e));
    hn::StoreU(hn::IfThenElse(number, e, v), d, x + i);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE hn::Vec<Floats> Load(const float* from) { return hn::LoadU(Floats(), from); }
template <class Half>
HWY_INLINE hn::Vec<Floats> Load(const Half* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(hn::Rebind<Half, Floats>(), from));
}

template <class T>
HWY_INLINE void Norms(const Keys& values, std::int64_t from, std::int64_t to, float* HWY_RESTRICT out,
                      float* HWY_RESTRICT widened) {
  const Floats d;
  for (std::int64_t t = from; t < to; ++t) {
    const std::byte* at = values.slots.at(t);
    const auto* v = reinterpret_cast<const T*>(at);
    auto sum = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + kLanes<Floats> <= values.dim; i += kLanes<Floats>) {
      const auto x = Load(v + i);
      sum = hn::MulAdd(x, x, sum);
    }
    float squares = hn::GetLane(hn::SumOfLanes(d, sum));
    if (i < values.dim) widen(v + i, values.dtype, values.dim - i, widened + i);
    for (; i < values.dim; ++i) squares += product(widened[i], widened[i]);
    if (squares > 1e-30F && squares < 1e38F) {
      out[t - from] = std::sqrt(squares);
      continue;
    }
    widen(at, values.dtype, values.dim, widened);
    double wide = 0;
    for (i = 0; i < values.dim; ++i) wide += product(static_cast<double>(widened[i]), static_cast<double>(widened[i]));
    out[t - from] = static_cast<float>(std::sqrt(wide));
  }
}

KVKEEP_INLINE void VectorNorms(const Keys& values, std::int64_t from, std::int64_t to, float* HWY_RESTRICT out,
                               float* HWY_RESTRICT widened) {
  if (values.dtype == Dtype::f16)
    Norms<hwy::float16_t>(values, from, to, out, widened);
  else if (values.dtype == Dtype::bf16)
    Norms<hwy::bfloat16_t>(values, from, to, out, widened);
  else
    Norms<float>(values, from, to, out, widened);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::expected_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using expected_lanes::AddKeyProducts;
using expected_lanes::AddProductSquares;
using expected_lanes::AddSquares;
using expected_lanes::CentreRows;
using expected_lanes::Cholesky;
using expected_lanes::CholeskyStride;
using expected_lanes::ColumnMeans;
using expected_lanes::ColumnWidth;
using expected_lanes::ExpectedLogits;
using expected_lanes::Gram;
using expected_lanes::GramRows;
using expected_lanes::GramStride;
using expected_lanes::PackTiles;
using expected_lanes::RowExp;
using expected_lanes::RowTop;
using expected_lanes::ScaleRows;
using expected_lanes::SplitPairs;
using expected_lanes::TileKeys;
using expected_lanes::TileProducts;
using expected_lanes::TransposePairs;
using expected_lanes::TurnRows;
using expected_lanes::VectorNorms;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(ColumnWidth);
HWY_EXPORT(TileKeys);
HWY_EXPORT(GramStride);
HWY_EXPORT(GramRows);
HWY_EXPORT(CholeskyStride);
HWY_EXPORT(PackTiles);
HWY_EXPORT(AddSquares);
HWY_EXPORT(TileProducts);
HWY_EXPORT(AddProductSquares);
HWY_EXPORT(AddKeyProducts);
HWY_EXPORT(ExpectedLogits);
HWY_EXPORT(ColumnMeans);
HWY_EXPORT(CentreRows);
HWY_EXPORT(ScaleRows);
HWY_EXPORT(TurnRows);
HWY_EXPORT(Gram);
HWY_EXPORT(Cholesky);
HWY_EXPORT(SplitPairs);
HWY_EXPORT(TransposePairs);
HWY_EXPORT(RowTop);
HWY_EXPORT(RowExp);
HWY_EXPORT(VectorNorms);
#endif

KVKEEP_INLINE std::int64_t column_width() { return KVKEEP_DISPATCH(ColumnWidth)(); }
KVKEEP_INLINE std::int64_t tile_keys() { return KVKEEP_DISPATCH(TileKeys)(); }
KVKEEP_INLINE std::int64_t gram_stride(std::int64_t dim) { return KVKEEP_DISPATCH(GramStride)(dim); }
KVKEEP_INLINE std::int64_t gram_rows(std::int64_t dim) { return KVKEEP_DISPATCH(GramRows)(dim); }
KVKEEP_INLINE std::int64_t cholesky_stride(std::int64_t dim) { return KVKEEP_DISPATCH(CholeskyStride)(dim); }

KVKEEP_INLINE void pack_tiles(const Keys& keys, std::int64_t from, std::int64_t to, float* tiles, float* widened) {
  KVKEEP_DISPATCH(PackTiles)(keys, from, to, tiles, widened);
}

KVKEEP_INLINE void add_squares(const float* tiles, std::int64_t count, std::int64_t dim, const float* panel,
                               std::int64_t start, bool triangular, float* sums) {
  KVKEEP_DISPATCH(AddSquares)(tiles, count, dim, panel, start, triangular, sums);
}

KVKEEP_INLINE void tile_products(const float* tiles, std::int64_t count, std::int64_t dim, const float* panel,
                                 float* out) {
  KVKEEP_DISPATCH(TileProducts)(tiles, count, dim, panel, out);
}

KVKEEP_INLINE void add_product_squares(const float* products, std::int64_t keys, std::int64_t columns, float* sums) {
  KVKEEP_DISPATCH(AddProductSquares)(products, keys, columns, sums);
}

KVKEEP_INLINE void add_key_products(const float* products, const std::uint16_t* keys, std::int64_t key_stride,
                                    std::int64_t count, std::int64_t columns, float* sums) {
  KVKEEP_DISPATCH(AddKeyProducts)(products, keys, key_stride, count, columns, sums);
}

KVKEEP_INLINE void expected_logits(const float* sums, std::int64_t keys, float factor, const float* linear,
                                   std::int64_t stride, float* logits) {
  KVKEEP_DISPATCH(ExpectedLogits)(sums, keys, factor, linear, stride, logits);
}

KVKEEP_INLINE bool column_means(const float* x, std::int64_t rows, std::int64_t dim, std::int64_t stride,
                                double* mean) {
  return KVKEEP_DISPATCH(ColumnMeans)(x, rows, dim, stride, mean);
}

KVKEEP_INLINE float centre_rows(float* x, std::int64_t rows, std::int64_t dim, std::int64_t stride, const float* mean) {
  return KVKEEP_DISPATCH(CentreRows)(x, rows, dim, stride, mean);
}

KVKEEP_INLINE void scale_rows(float* x, std::int64_t rows, std::int64_t stride, float factor) {
  KVKEEP_DISPATCH(ScaleRows)(x, rows, stride, factor);
}

KVKEEP_INLINE void turn_rows(float* x, std::int64_t rows, std::int64_t stride, std::int64_t pairs, const float* cosines,
                             const float* sines) {
  KVKEEP_DISPATCH(TurnRows)(x, rows, stride, pairs, cosines, sines);
}

KVKEEP_INLINE void gram(const float* x, std::int64_t rows, std::int64_t dim, float* out) {
  KVKEEP_DISPATCH(Gram)(x, rows, dim, out);
}

KVKEEP_INLINE void cholesky(double* a, std::int64_t dim) { KVKEEP_DISPATCH(Cholesky)(a, dim); }

KVKEEP_INLINE void split_pairs(const float* panel, std::int64_t stride, std::int64_t rows, std::int64_t width,
                               float factor, std::uint16_t* high, std::uint16_t* low) {
  KVKEEP_DISPATCH(SplitPairs)(panel, stride, rows, width, factor, high, low);
}

KVKEEP_INLINE void transpose_pairs(const std::uint16_t* pairs, std::int64_t rows, std::int64_t width,
                                   std::uint16_t* out, std::int64_t stride) {
  KVKEEP_DISPATCH(TransposePairs)(pairs, rows, width, out, stride);
}

KVKEEP_INLINE float row_top(const float* x, std::int64_t n) { return KVKEEP_DISPATCH(RowTop)(x, n); }

KVKEEP_INLINE float row_exp(float* x, std::int64_t n, float top) { return KVKEEP_DISPATCH(RowExp)(x, n, top); }

KVKEEP_INLINE void vector_norms(const Keys& values, std::int64_t from, std::int64_t to, float* out, float* widened) {
  KVKEEP_DISPATCH(VectorNorms)(values, from, to, out, widened);
}

}  // namespace kvkeep::cpu
#endif

#endif
