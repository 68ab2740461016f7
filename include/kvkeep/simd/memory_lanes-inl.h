// SPDX-License-Identifier: Apache-2.0
// Bodies of memory_lanes.h, once per instruction set.

#if defined(KVKEEP_MEMORY_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_MEMORY_LANES_INL_H
#undef KVKEEP_MEMORY_LANES_INL_H
#else
#define KVKEEP_MEMORY_LANES_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvkeep/simd/exponential-inl.h"
#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/memory_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::memory_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr std::int64_t kLanes = hn::MaxLanes(D());

HWY_INLINE float Sum(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

/// The last numbers of a row, padded with `fill`.
HWY_INLINE V First(const float* from, std::int64_t n, float fill = 0) {
  HWY_ALIGN float padded[kLanes];
  std::fill(padded + n, padded + kLanes, fill);
  std::memcpy(padded, from, static_cast<std::size_t>(n) * sizeof(float));
  return hn::Load(D(), padded);
}

HWY_INLINE void StoreFirst(V v, std::int64_t n, float* to) {
  HWY_ALIGN float padded[kLanes];
  hn::Store(v, D(), padded);
  std::memcpy(to, padded, static_cast<std::size_t>(n) * sizeof(float));
}

/// `kRows` rows at a time: a vector of x is loaded once for all of them.
template <int kRows>
HWY_INLINE void DotsOf(const float* HWY_RESTRICT rows, std::int64_t dim, const float* HWY_RESTRICT x,
                       float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) {
    const V v = hn::LoadU(d, x + i);
    for (int r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(hn::LoadU(d, rows + r * dim + i), v, sums[r]);
  }
  if (i < dim) {
    const V v = First(x + i, dim - i);
    for (int r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(First(rows + r * dim + i, dim - i), v, sums[r]);
  }
  for (int r = 0; r < kRows; ++r) out[r] = Sum(sums[r]);
}

KVKEEP_INLINE void RowDots(const float* HWY_RESTRICT rows, std::int64_t count, std::int64_t dim,
                           const float* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) DotsOf<4>(rows + i * dim, dim, x, out + i);
  for (; i < count; ++i) DotsOf<1>(rows + i * dim, dim, x, out + i);
}

KVKEEP_INLINE void AddRows(const float* HWY_RESTRICT rows, std::int64_t count, std::int64_t dim,
                           const float* HWY_RESTRICT weights, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= dim; j += 2 * lanes) {
    auto a = hn::LoadU(d, out + j), b = hn::LoadU(d, out + j + lanes);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto w = hn::Set(d, weights[i]);
      a = hn::MulAdd(hn::LoadU(d, rows + i * dim + j), w, a);
      b = hn::MulAdd(hn::LoadU(d, rows + i * dim + j + lanes), w, b);
    }
    hn::StoreU(a, d, out + j);
    hn::StoreU(b, d, out + j + lanes);
  }
  for (; j < dim; j += lanes) {
    const std::int64_t width = std::min(lanes, dim - j);
    V a = First(out + j, width);
    for (std::int64_t i = 0; i < count; ++i)
      a = hn::MulAdd(First(rows + i * dim + j, width), hn::Set(d, weights[i]), a);
    StoreFirst(a, width, out + j);
  }
}

KVKEEP_INLINE float Largest(const float* HWY_RESTRICT x, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto number = [&](auto v) { return hn::IfThenElse(hn::IsNaN(v), lowest, v); };
  auto top = lowest;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) top = hn::Max(top, number(hn::LoadU(d, x + i)));
  float most = hn::GetLane(hn::MaxOfLanes(d, top));
  for (; i < n; ++i)
    if (x[i] > most) most = x[i];
  return most;
}

KVKEEP_INLINE float Exponentials(float* HWY_RESTRICT x, std::int64_t n, float top) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto above = hn::Set(d, top);
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const V e = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x + i), above));
    hn::StoreU(e, d, x + i);
    sum = hn::Add(sum, e);
  }
  if (i < n) {
    const V e = ExpOfNegative(d, hn::Sub(First(x + i, n - i, -std::numeric_limits<float>::infinity()), above));
    StoreFirst(e, n - i, x + i);
    sum = hn::Add(sum, e);
  }
  return Sum(sum);
}

/// Sum of exp(x - top), each within 8e-5 of its value, far less than the error of a sketch; below e^-86 a term counts
/// as e^-86.
HWY_INLINE float SumOfRoughExponentials(const float* HWY_RESTRICT x, std::int64_t n, float top) {
  const D d;
  const hn::RebindToSigned<D> di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr float kLog2E = 1.44269504088896341F;
  const V above = hn::Set(d, top * kLog2E), least = hn::Set(d, -125.0F);
  // 2^t = 2^round(t) * cubic of the rest
  const auto rough = [&](V v) {
    const V t = hn::Max(hn::MulSub(v, hn::Set(d, kLog2E), above), least);
    const V whole = hn::Round(t), rest = hn::Sub(t, whole);
    V p = hn::MulAdd(rest, hn::Set(d, 0.0551716687F), hn::Set(d, 0.2426111328F));
    p = hn::MulAdd(p, rest, hn::Set(d, 0.6932609864F));
    p = hn::MulAdd(p, rest, hn::Set(d, 0.9999280729F));
    return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::ConvertTo(di, whole))));
  };
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) sum = hn::Add(sum, rough(hn::LoadU(d, x + i)));
  if (i < n) sum = hn::Add(sum, rough(First(x + i, n - i, -std::numeric_limits<float>::infinity())));
  return Sum(sum);
}

/// Tables of a query as whole numbers, and the value of one unit; see sketch_table(). All terms of the sums are whole
/// numbers that fit 16 bits (and so an f32), so the sums are the same everywhere. 512-bit vectors look up 32 numbers of
/// 16 bits at once: those of signs 4n to 4n+3 of the lower half of a word, then of its upper half. Others look up f32
/// numbers.
#if HWY_TARGET <= HWY_AVX3
using Entry = std::int16_t;
HWY_INLINE std::int64_t EntryAt(std::int64_t quad) { return (quad / 8 * 4 + quad % 4) * 32 + quad / 4 % 2 * 16; }
#else
using Entry = float;
HWY_INLINE std::int64_t EntryAt(std::int64_t quad) { return quad * 16; }
#endif

KVKEEP_INLINE float SketchTable(const float* HWY_RESTRICT query, std::int64_t dim, float* HWY_RESTRICT table) {
  const std::int64_t quads = (dim + 31) / 32 * 8;
  double halves[2] = {0, 0};  // lower and upper halves of words are summed separately
  for (std::int64_t i = 0; i < dim; ++i) halves[i / 16 % 2] += std::abs(static_cast<double>(query[i]));
  const double most = halves[0] + halves[1];
  const double unit = std::max(halves[0], halves[1]) / static_cast<double>(std::numeric_limits<std::int16_t>::max() -
                                                                           quads);  // each rounds by at most a half
  const bool counts = std::isfinite(most) && most > std::numeric_limits<float>::min();
  auto* entries = reinterpret_cast<Entry*>(table);
  for (std::int64_t quad = 0; quad < quads; ++quad)
    for (int pattern = 0; pattern < 16; ++pattern) {
      double sum = 0;
      for (int i = 0; counts && i < 4; ++i)
        if (4 * quad + i < dim) sum += (pattern >> i & 1) != 0 ? query[4 * quad + i] : -query[4 * quad + i];
      entries[EntryAt(quad) + pattern] = static_cast<Entry>(counts ? std::nearbyint(sum / unit) : 0);
    }
  return std::isfinite(most) ? static_cast<float>(counts ? unit : 0) : std::numeric_limits<float>::quiet_NaN();
}

/// One block of tokens, `kHeads` queries: x[h][0 to 15] = factor[h] * size[t] * (signs of t . query of h). The signs
/// are unpacked once for all of them.
template <int kHeads>
HWY_INLINE void SketchBlock(const SketchedSpans& sketch, std::int64_t block, const float* HWY_RESTRICT tables,
                            std::int64_t table_size, const float* HWY_RESTRICT factors, std::int64_t stride,
                            float* HWY_RESTRICT x) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
  for (std::int64_t lane = 0; lane < kSketchBlock; lane += lanes) {
    const std::uint32_t* signs = sketch.signs + block * sketch.words * kSketchBlock + lane;
    V sums[kHeads];
#if HWY_TARGET <= HWY_AVX3
    const __m512i four = _mm512_set1_epi16(15), upper = _mm512_set1_epi32(16 << 16);
    __m512i pairs[kHeads];
    for (int h = 0; h < kHeads; ++h) pairs[h] = _mm512_setzero_si512();
    for (std::int64_t w = 0; w < sketch.words; ++w) {
      __m512i bits = _mm512_loadu_si512(signs + w * kSketchBlock);
      for (std::int64_t n = 0; n < 4; ++n) {
        const __m512i index = _mm512_ternarylogic_epi32(bits, four, upper, 0xEA);  // (bits & four) | upper
        for (int h = 0; h < kHeads; ++h)
          pairs[h] = _mm512_add_epi16(
              pairs[h], _mm512_permutexvar_epi16(
                            index, _mm512_load_si512(reinterpret_cast<const Entry*>(tables + h * table_size) +
                                                     (w * 4 + n) * 32)));
        bits = _mm512_srli_epi16(bits, 4);
      }
    }
    for (int h = 0; h < kHeads; ++h) sums[h] = V{_mm512_cvtepi32_ps(_mm512_madd_epi16(pairs[h], _mm512_set1_epi16(1)))};
#else
    const hn::RebindToSigned<D> di;
    const auto four = hn::Set(du, 15U);
    for (int h = 0; h < kHeads; ++h) sums[h] = hn::Zero(D());
    for (std::int64_t w = 0; w < sketch.words; ++w) {
      auto bits = hn::LoadU(du, signs + w * kSketchBlock);
      for (std::int64_t n = 0; n < 8; ++n) {
        const auto index = hn::BitCast(di, hn::And(bits, four));
        for (int h = 0; h < kHeads; ++h)
          sums[h] = hn::Add(sums[h], hn::GatherIndex(D(), tables + h * table_size + (w * 8 + n) * 16, index));
        bits = hn::ShiftRight<4>(bits);
      }
    }
#endif
    const V size = hn::BitCast(
        D(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, sketch.sizes + block * kSketchBlock + lane))));
    for (int h = 0; h < kHeads; ++h)
      hn::StoreU(hn::Mul(sums[h], hn::Mul(hn::Set(D(), factors[h]), size)), D(), x + h * stride + lane);
  }
}

KVKEEP_INLINE void SketchSums(const SketchedSpans& sketch, const float* HWY_RESTRICT tables,
                              const float* HWY_RESTRICT factors, float* HWY_RESTRICT base, std::int64_t heads,
                              float* HWY_RESTRICT x, float* HWY_RESTRICT tops, float* HWY_RESTRICT out) {
  constexpr float kNegligible = 30;
  const std::int64_t blocks = (sketch.first[sketch.spans] + kSketchBlock - 1) / kSketchBlock,
                     stride = sketch_window(sketch), table_size = sketch_table_size(sketch.words * 32);
  std::fill_n(tops, heads, -std::numeric_limits<float>::infinity());
  std::int64_t span = 0, origin = 0;  // x begins with token `origin`
  // A span is summed, relative to its own largest exponent, as soon as its last block is there.
  const auto add_up = [&](std::int64_t s) {
    const std::int64_t length = sketch.first[s + 1] - sketch.first[s];
    const float* own_x = x + sketch.first[s] - origin;
    for (std::int64_t h = 0; h < heads; ++h, own_x += stride) {
      const float largest = Largest(own_x, length);
      float& own = base[h * sketch.spans + s];
      own += largest;
      tops[h] = std::max(tops[h], own);
      out[h * sketch.spans + s] = own < tops[h] - kNegligible ? 0 : SumOfRoughExponentials(own_x, length, largest);
    }
  };
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t token = block * kSketchBlock;
    if (token + kSketchBlock - origin > stride) {
      const std::int64_t moved = sketch.first[span] / kSketchBlock * kSketchBlock;
      for (std::int64_t h = 0; h < heads; ++h)
        std::memmove(x + h * stride, x + h * stride + moved - origin,
                     static_cast<std::size_t>(token - moved) * sizeof(float));
      origin = moved;
    }
    float* at = x + token - origin;
    std::int64_t h = 0;
    for (; h + 4 <= heads; h += 4)
      SketchBlock<4>(sketch, block, tables + h * table_size, table_size, factors + h, stride, at + h * stride);
    for (; h < heads; ++h)
      SketchBlock<1>(sketch, block, tables + h * table_size, table_size, factors + h, stride, at + h * stride);
    while (span < sketch.spans && sketch.first[span + 1] <= token + kSketchBlock) add_up(span++);
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    float *own = base + h * sketch.spans, *sums = out + h * sketch.spans;
    Exponentials(own, sketch.spans, tops[h]);
    for (std::int64_t s = 0; s < sketch.spans; ++s) sums[s] *= own[s];
  }
}

KVKEEP_INLINE bool AnyNan(const float* HWY_RESTRICT x, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const V v = hn::LoadU(d, x + i);
    if (!hn::AllTrue(d, hn::Eq(v, v))) return true;
  }
  for (; i < n; ++i)
    if (x[i] != x[i]) return true;
  return false;
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::memory_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using memory_lanes::AddRows;
using memory_lanes::AnyNan;
using memory_lanes::Exponentials;
using memory_lanes::Largest;
using memory_lanes::RowDots;
using memory_lanes::SketchSums;
using memory_lanes::SketchTable;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(RowDots);
HWY_EXPORT(AddRows);
HWY_EXPORT(Largest);
HWY_EXPORT(SketchTable);
HWY_EXPORT(SketchSums);
HWY_EXPORT(Exponentials);
HWY_EXPORT(AnyNan);
#endif

KVKEEP_INLINE void row_dots(const float* rows, std::int64_t count, std::int64_t dim, const float* x, float* out) {
  KVKEEP_DISPATCH(RowDots)(rows, count, dim, x, out);
}
KVKEEP_INLINE void add_rows(const float* rows, std::int64_t count, std::int64_t dim, const float* weights, float* out) {
  KVKEEP_DISPATCH(AddRows)(rows, count, dim, weights, out);
}
KVKEEP_INLINE std::int64_t sketch_table_size(std::int64_t dim) { return (dim + 31) / 32 * 8 * 16; }
KVKEEP_INLINE std::int64_t sketch_window(const SketchedSpans& sketch) {
  constexpr std::int64_t kBlocks = 64;  // read before the rest of a span moves to the front
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < sketch.spans; ++s) longest = std::max(longest, sketch.first[s + 1] - sketch.first[s]);
  return (longest / kSketchBlock + 2 + kBlocks) * kSketchBlock;
}
KVKEEP_INLINE float sketch_table(const float* query, std::int64_t dim, float* table) {
  return KVKEEP_DISPATCH(SketchTable)(query, dim, table);
}
KVKEEP_INLINE void sketch_sums(const SketchedSpans& spans, const float* tables, const float* factors, float* base,
                               std::int64_t heads, float* x, float* top, float* out) {
  KVKEEP_DISPATCH(SketchSums)(spans, tables, factors, base, heads, x, top, out);
}
KVKEEP_INLINE float largest(const float* x, std::int64_t n) { return KVKEEP_DISPATCH(Largest)(x, n); }
KVKEEP_INLINE float exponentials(float* x, std::int64_t n, float top) {
  return KVKEEP_DISPATCH(Exponentials)(x, n, top);
}
KVKEEP_INLINE void round_to(const float* from, std::int64_t n, Dtype dtype, std::byte* to) {
  if (dtype == Dtype::f32) std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  if (dtype == Dtype::f16)
    std::transform(from, from + n, reinterpret_cast<Half*>(to), [](float x) { return static_cast<Half>(x); });
  if (dtype == Dtype::bf16)
    std::transform(from, from + n, reinterpret_cast<BFloat16*>(to), [](float x) { return static_cast<BFloat16>(x); });
}
KVKEEP_INLINE bool any_nan(const float* x, std::int64_t n) { return KVKEEP_DISPATCH(AnyNan)(x, n); }

}  // namespace kvkeep::cpu
#endif

#endif
