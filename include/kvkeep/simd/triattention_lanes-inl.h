// SPDX-License-Identifier: Apache-2.0
// Bodies of triattention_lanes.h, once per instruction set.

#if defined(KVKEEP_TRIATTENTION_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_TRIATTENTION_LANES_INL_H
#undef KVKEEP_TRIATTENTION_LANES_INL_H
#else
#define KVKEEP_TRIATTENTION_LANES_INL_H
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvkeep/core/hd.h"
#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/triattention_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::triattention_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

#if HWY_TARGET != HWY_SCALAR && HWY_CAP_GE512
inline constexpr int kColumns = 8;  ///< multiplied at a time: sixteen sums in registers
#else
inline constexpr int kColumns = 4;
#endif

HWY_INLINE std::int64_t Lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

/// Keys of a block: two machine vectors.
HWY_INLINE std::int64_t BlockKeys() { return 2 * Lanes(); }

KVKEEP_INLINE std::int64_t TriScratch(std::int64_t group, std::int64_t pairs) {
  return (3 * pairs + group) * BlockKeys();
}

/// |a + ib| to within 3e-7 of itself; below 1e-18 it may be less. A square root costs several times as much.
HWY_INLINE V Modulus(D d, V a, V b) {
  const V square = hn::MulAdd(a, a, hn::Mul(b, b));
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  const V guess = hn::ApproximateReciprocalSqrt(hn::Max(square, hn::Set(d, 1e-36F))),
          root = hn::Mul(square, guess);  // 12 bits or more, and one Newton step
  return hn::MulAdd(hn::Mul(root, hn::Set(d, 0.5F)), hn::NegMulAdd(root, guess, hn::Set(d, 1.0F)), root);
#else
  return hn::IfThenZeroElse(hn::Lt(square, hn::Set(d, 1e-36F)), hn::Sqrt(square));
#endif
}

#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
/// Four floats from each of row[0], row[4], row[8], ...
template <class Part>
HWY_INLINE hn::Vec<Part> Quarters(Part d, const float* const* HWY_RESTRICT row, std::int64_t i) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return hn::LoadU(d, row[0] + i);
  } else {
    const hn::Half<Part> half;
    return hn::Combine(d, Quarters(half, row + hn::MaxLanes(half), i), Quarters(half, row, i));
  }
}
#endif

/// Components of one vector of keys: out[c * BlockKeys() + k] = key k's component c. `row`: the keys; a float holds two
/// components of 16-bit keys.
template <class T>
HWY_INLINE void Turn(const float* const* HWY_RESTRICT row, std::int64_t dim, float* HWY_RESTRICT out) {
  const std::int64_t block = BlockKeys();
  constexpr std::int64_t kPacked = sizeof(float) / sizeof(T);
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
  const D d;
  const auto put = [&](V v) HWY_ATTR {
    if constexpr (kPacked == 1) {
      hn::Store(v, d, out);
    } else {
      const hn::RebindToUnsigned<D> du;
      const auto bits = hn::BitCast(du, v);
      hn::Store(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, out);
      hn::Store(hn::BitCast(d, hn::And(bits, hn::Set(du, 0xFFFF0000U))), d, out + block);
    }
    out += kPacked * block;
  };
  const hn::Repartition<std::uint64_t, D> wide;
  const auto lower = [&](V a, V b) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveLower(wide, hn::BitCast(wide, a), hn::BitCast(wide, b)));
  };
  const auto upper = [&](V a, V b) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveUpper(wide, hn::BitCast(wide, a), hn::BitCast(wide, b)));
  };
  for (; kPacked * (i + 4) <= dim; i += 4) {
    const V a = Quarters(d, row, i), b = Quarters(d, row + 1, i), c = Quarters(d, row + 2, i),
            e = Quarters(d, row + 3, i);
    const V ab = hn::InterleaveLower(d, a, b), ab_behind = hn::InterleaveUpper(d, a, b),
            ce = hn::InterleaveLower(d, c, e), ce_behind = hn::InterleaveUpper(d, c, e);
    put(lower(ab, ce));
    put(upper(ab, ce));
    put(lower(ab_behind, ce_behind));
    put(upper(ab_behind, ce_behind));
  }
#endif
  const hn::CappedTag<float, 1> one;
  const hn::Rebind<T, decltype(one)> one_t;
  for (std::int64_t c = kPacked * i; c < dim; ++c, out += block)
    for (std::int64_t k = 0; k < Lanes(); ++k) {
      const T* at = reinterpret_cast<const T*>(row[k]) + c;
      if constexpr (kPacked == 1)
        out[k] = *at;
      else
        out[k] = hn::GetLane(hn::PromoteTo(one, hn::LoadU(one_t, at)));
    }
}

/// Prefetches the keys of the next block line by line while this one is multiplied: the machine stalls when it has too
/// many requests under way.
struct Ahead {
  const std::byte* const* row;
  std::int64_t lines;  ///< per call
  std::int64_t key = 0, line = 0;

  HWY_INLINE void ask() {
    for (std::int64_t n = 0; n < lines; ++n) {
      hwy::Prefetch(row[key] + line);
      if (++key == BlockKeys()) key = 0, line += 64;
    }
  }
};

/// A block of keys as [3 F, BlockKeys()]: their components, then the moduli of their pairs.
HWY_INLINE void Spread(const std::byte* const* HWY_RESTRICT at, const Keys& keys, RopeStyle style,
                       float* HWY_RESTRICT out) {
  const D d;
  const std::int64_t dim = keys.dim, pairs = dim / 2, lanes = Lanes(), block = BlockKeys();
  float* moduli = out + dim * block;
  const float* row[hn::MaxLanes(d)];
  for (std::int64_t first = 0; first < block; first += lanes) {
    for (std::int64_t k = 0; k < lanes; ++k) {
      row[k] = reinterpret_cast<const float*>(at[first + k]);
      if (keys.dtype != Dtype::f16) continue;
      widen(at[first + k], Dtype::f16, dim, moduli + k * dim);  // their place is free until all components are in
      row[k] = moduli + k * dim;
    }
    if (keys.dtype == Dtype::bf16)
      Turn<hwy::bfloat16_t>(row, dim, out + first);
    else
      Turn<float>(row, dim, out + first);
  }
  const bool half = style == RopeStyle::half;
  const float *a = out, *b = out + (half ? pairs : 1) * block;
  for (std::int64_t f = 0; f < pairs; ++f, a += (half ? 1 : 2) * block, b += (half ? 1 : 2) * block)
    for (std::int64_t k = 0; k < block; k += lanes)
      hn::Store(Modulus(d, hn::Load(d, a + k), hn::Load(d, b + k)), d, moduli + f * block + k);
}

/// Factors of a block of keys: `trig` multiplies the components and `norm` the moduli; null: not multiplied.
struct Factors {
  const float *trig, *norm;
  std::int64_t next_trig, next_norm;  ///< from one component's columns to the next
};

/// A block times `count` columns side by side, one chain per key in ascending order of pairs: put(column, sums, sums of
/// the second half).
template <int kCount, bool kTrig, bool kNorm, class Put>
HWY_INLINE void Columns(const float* HWY_RESTRICT keys, std::int64_t pairs, RopeStyle style, Factors by,
                        std::int64_t count, Ahead ahead, const Put& put) {
  if constexpr (kCount > 1) {
    if (count < kCount) return Columns<kCount - 1, kTrig, kNorm>(keys, pairs, style, by, count, ahead, put);
  }
  const D d;
  const std::int64_t lanes = Lanes(), block = BlockKeys(), next = style == RopeStyle::half ? block : 2 * block;
  const float *first = keys, *second = keys + (style == RopeStyle::half ? pairs : 1) * block,
              *modulus = keys + 2 * pairs * block;
  V a0 = hn::Zero(d), b0 = a0, c0 = a0, e0 = a0, f0 = a0, g0 = a0, h0 = a0, i0 = a0, a1 = a0, b1 = a0, c1 = a0, e1 = a0,
    f1 = a0, g1 = a0, h1 = a0, i1 = a0;
  const auto step = [&](const float* part, const float* factor) HWY_ATTR {
    const V x = hn::Load(d, part), y = hn::Load(d, part + lanes);
    const auto add = [&](int column, V& sum0, V& sum1) HWY_ATTR {
      const V w = hn::Set(d, factor[column]);
      sum0 = hn::MulAdd(x, w, sum0);
      sum1 = hn::MulAdd(y, w, sum1);
    };
    add(0, a0, a1);
    if constexpr (kCount > 1) add(1, b0, b1);
    if constexpr (kCount > 2) add(2, c0, c1);
    if constexpr (kCount > 3) add(3, e0, e1);
    if constexpr (kCount > 4) add(4, f0, f1);
    if constexpr (kCount > 5) add(5, g0, g1);
    if constexpr (kCount > 6) add(6, h0, h1);
    if constexpr (kCount > 7) add(7, i0, i1);
  };
  for (std::int64_t f = 0; f < pairs; ++f) {
    ahead.ask();
    if constexpr (kTrig) {
      step(first, by.trig);
      step(second, by.trig + by.next_trig);
      first += next;
      second += next;
      by.trig += 2 * by.next_trig;
    }
    if constexpr (kNorm) {
      step(modulus, by.norm);
      modulus += block;
      by.norm += by.next_norm;
    }
  }
  put(0, a0, a1);
  if constexpr (kCount > 1) put(1, b0, b1);
  if constexpr (kCount > 2) put(2, c0, c1);
  if constexpr (kCount > 3) put(3, e0, e1);
  if constexpr (kCount > 4) put(4, f0, f1);
  if constexpr (kCount > 5) put(5, g0, g1);
  if constexpr (kCount > 6) put(6, h0, h1);
  if constexpr (kCount > 7) put(7, i0, i1);
}

/// body(first, count) for `columns` columns in as few parts as they fit, of nearly equal size: a part of one column
/// would wait for its own sums.
template <class Body>
HWY_INLINE void InParts(std::int64_t columns, const Body& body) {
  for (std::int64_t first = 0, parts = (columns + kColumns - 1) / kColumns; parts > 0; --parts) {
    const std::int64_t count = (columns - first + parts - 1) / parts;
    body(first, count);
    first += count;
  }
}

KVKEEP_INLINE void TriScores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns,
                             float* HWY_RESTRICT scratch, float* HWY_RESTRICT raw) {
  if (length == 0) return;  // there is no last key
  const D d;
  const std::int64_t pairs = keys.dim / 2, lanes = Lanes(), block = BlockKeys(), group = columns.group,
                     offsets = columns.offsets;
  float* norms = scratch + 3 * pairs * block;  // [G, block] for the maximum
  const V least = hn::Set(d, -std::numeric_limits<float>::infinity());
  const std::int64_t bytes = keys.dim * (keys.dtype == Dtype::f32 ? 4 : 2),
                     lines = (bytes + 63) / 64 * block / pairs;           // the remainder is fetched when it is read
  const std::byte *row[2 * hn::MaxLanes(d)], *next[2 * hn::MaxLanes(d)];  // past the last key: the last key again
  for (std::int64_t k = 0; k < block; ++k) next[k] = keys.slots.at(std::min(k, length - 1));
  for (std::int64_t t = 0; t < length; t += block) {
    for (std::int64_t k = 0; k < block; ++k) {
      row[k] = next[k];
      next[k] = keys.slots.at(std::min(t + block + k, length - 1));
    }
    Spread(row, keys, style, scratch);
    const auto ahead = [&](std::int64_t g) HWY_ATTR { return Ahead{next, g == 0 ? lines : 0}; };
    const auto store = [&](std::int64_t g, std::int64_t at, V x) HWY_ATTR {
      float* out = raw + g * length + at;
      if (at + lanes <= length) return hn::StoreU(x, d, out);
      HWY_ALIGN float last[hn::MaxLanes(D())];
      hn::Store(x, d, last);
      if (at < length) std::copy_n(last, length - at, out);
    };
    if (offsets == 1) {
      InParts(group, [&](std::int64_t g, std::int64_t count) HWY_ATTR {
        Columns<kColumns, true, true>(scratch, pairs, style, {columns.trig + g, columns.norm + g, group, group}, count,
                                      ahead(g), [&](std::int64_t column, V x, V y) HWY_ATTR {
                                        store(g + column, t, x);
                                        store(g + column, t + lanes, y);
                                      });
      });
      continue;
    }
    InParts(group, [&](std::int64_t g, std::int64_t count) HWY_ATTR {
      Columns<kColumns, false, true>(scratch, pairs, style, {nullptr, columns.norm + g, 0, group}, count, ahead(g),
                                     [&](std::int64_t column, V x, V y) HWY_ATTR {
                                       hn::Store(x, d, norms + (g + column) * block);
                                       hn::Store(y, d, norms + (g + column) * block + lanes);
                                     });
    });
    for (std::int64_t g = 0; g < group; ++g) {
      V best0 = least, best1 = least;
      const auto raise = [](V& best, V found) HWY_ATTR {
        best = hn::IfThenElse(hn::Or(hn::Gt(found, best), hn::IsNaN(found)), found, best);
      };
      InParts(offsets, [&](std::int64_t first, std::int64_t count) HWY_ATTR {
        Columns<kColumns, true, false>(scratch, pairs, style,
                                       {columns.trig + g * pairs * 2 * offsets + first, nullptr, offsets, 0}, count,
                                       ahead(1), [&](std::int64_t, V x, V y) HWY_ATTR {
                                         raise(best0, x);
                                         raise(best1, y);
                                       });
      });
      store(g, t, hn::Add(best0, hn::Load(d, norms + g * block)));
      store(g, t + lanes, hn::Add(best1, hn::Load(d, norms + g * block + lanes)));
    }
  }
}

KVKEEP_INLINE Moments FiniteSum(const float* HWY_RESTRICT x, std::int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d), sum_behind = sum, count = sum, count_behind = sum;
  const auto one = hn::Set(d, 1.0);
  const auto add = [&](const float* from, auto& to, auto& number) HWY_ATTR {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, from));
    const auto finite = hn::IsFinite(v);
    to = hn::Add(to, hn::IfThenElseZero(finite, v));
    number = hn::Add(number, hn::IfThenElseZero(finite, one));
  };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    add(x + i, sum, count);
    add(x + i + lanes, sum_behind, count_behind);
  }
  Moments m{hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, sum_behind))),
            static_cast<std::int64_t>(hn::GetLane(hn::SumOfLanes(d, hn::Add(count, count_behind))))};
  for (; i < n; ++i)
    if (std::isfinite(x[i])) {
      m.sum += static_cast<double>(x[i]);
      ++m.count;
    }
  return m;
}

KVKEEP_INLINE double FiniteSquares(const float* HWY_RESTRICT x, std::int64_t n, double about) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d), sum_behind = sum;
  const auto shift = hn::Set(d, about);
  const auto add = [&](const float* from, auto& to) HWY_ATTR {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, from));
    const auto away = hn::IfThenElseZero(hn::IsFinite(v), hn::Sub(v, shift));
    to = hn::MulAdd(away, away, to);
  };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    add(x + i, sum);
    add(x + i + lanes, sum_behind);
  }
  double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, sum_behind)));
  for (; i < n; ++i)
    if (std::isfinite(x[i])) total += product(static_cast<double>(x[i]) - about, static_cast<double>(x[i]) - about);
  return total;
}

KVKEEP_INLINE void TriCombine(const float* HWY_RESTRICT raw, std::int64_t group, std::int64_t length,
                              const float* HWY_RESTRICT shift, const float* HWY_RESTRICT factor, bool take_max,
                              float* HWY_RESTRICT out) {
  const auto run = [&](auto d, std::int64_t t) HWY_ATTR {
    const auto value = [&](std::int64_t g) HWY_ATTR {
      return hn::Mul(hn::Sub(hn::LoadU(d, raw + g * length + t), hn::Set(d, shift[g])), hn::Set(d, factor[g]));
    };
    auto best = value(0), sum = best;
    for (std::int64_t g = 1; g < group; ++g) {
      const auto z = value(g);
      best = hn::Max(best, z);
      sum = hn::Add(sum, z);
    }
    hn::StoreU(take_max ? hn::IfThenElse(hn::IsNaN(sum), sum, best)
                        : hn::Mul(sum, hn::Set(d, 1.0F / static_cast<float>(group))),
               d, out + t);
  };
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t t = 0;
  for (; t + lanes <= length; t += lanes) run(d, t);
  for (; t < length; ++t) run(hn::CappedTag<float, 1>(), t);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::triattention_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using triattention_lanes::FiniteSquares;
using triattention_lanes::FiniteSum;
using triattention_lanes::TriCombine;
using triattention_lanes::TriScores;
using triattention_lanes::TriScratch;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(TriScratch);
HWY_EXPORT(TriScores);
HWY_EXPORT(FiniteSum);
HWY_EXPORT(FiniteSquares);
HWY_EXPORT(TriCombine);
#endif

KVKEEP_INLINE std::int64_t tri_scratch(std::int64_t group, std::int64_t pairs) {
  return KVKEEP_DISPATCH(TriScratch)(group, pairs);
}

KVKEEP_INLINE void tri_scores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns,
                              float* scratch, float* raw) {
  KVKEEP_DISPATCH(TriScores)(keys, length, style, columns, scratch, raw);
}

KVKEEP_INLINE Moments finite_sum(const float* x, std::int64_t n) { return KVKEEP_DISPATCH(FiniteSum)(x, n); }

KVKEEP_INLINE double finite_squares(const float* x, std::int64_t n, double about) {
  return KVKEEP_DISPATCH(FiniteSquares)(x, n, about);
}

KVKEEP_INLINE void tri_combine(const float* raw, std::int64_t group, std::int64_t length, const float* shift,
                               const float* factor, bool take_max, float* out) {
  KVKEEP_DISPATCH(TriCombine)(raw, group, length, shift, factor, take_max, out);
}

}  // namespace kvkeep::cpu
#endif

#endif
