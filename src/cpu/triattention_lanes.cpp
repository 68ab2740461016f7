// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "triattention_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "triattention_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr std::int64_t kKeys = 4;  // that share a reading of the columns

std::int64_t PaddedPairs(std::int64_t pairs) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
  return (pairs + lanes - 1) / lanes * lanes;
}

/// |a + ib| within 3e-7 of itself; 0 below 1e-18. A square root costs several times as much.
HWY_INLINE V Modulus(D d, V a, V b) {
  const V square = hn::MulAdd(a, a, hn::Mul(b, b));
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  const V guess = hn::ApproximateReciprocalSqrt(square), root = hn::Mul(square, guess);  // 12 bits or more, and one step of Newton
  const V better = hn::MulAdd(hn::Mul(root, hn::Set(d, 0.5F)), hn::NegMulAdd(root, guess, hn::Set(d, 1.0F)), root);
  return hn::IfThenZeroElse(hn::Lt(square, hn::Set(d, 1e-36F)), better);
#else
  return hn::IfThenZeroElse(hn::Lt(square, hn::Set(d, 1e-36F)), hn::Sqrt(square));
#endif
}

/// One key as [3, Fp]: first components, second components, moduli.
template <class T>
HWY_INLINE void Spread(const T* HWY_RESTRICT key, std::int64_t pairs, std::int64_t padded, RopeStyle style, float* HWY_RESTRICT out) {
  const D d;
  const hn::Rebind<T, D> dt;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto widen = [&](auto v) HWY_ATTR {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    else return hn::PromoteTo(D(), v);
  };
  float *first = out, *second = out + padded, *moduli = out + 2 * padded;
  const auto put = [&](std::int64_t f, V a, V b) HWY_ATTR {
    hn::StoreU(a, d, first + f);
    hn::StoreU(b, d, second + f);
    hn::StoreU(Modulus(d, a, b), d, moduli + f);
  };
  std::int64_t f = 0;
  if (style == RopeStyle::half) {
    for (; f + lanes <= pairs; f += lanes) put(f, widen(hn::LoadU(dt, key + f)), widen(hn::LoadU(dt, key + pairs + f)));
  }
#if HWY_TARGET != HWY_SCALAR
  else if constexpr (sizeof(T) == sizeof(float)) {
    for (; f + lanes <= pairs; f += lanes) {
      V a, b;
      hn::LoadInterleaved2(d, key + 2 * f, a, b);
      put(f, a, b);
    }
  } else {
    for (; f + lanes <= pairs; f += lanes) {
      const V low = widen(hn::LoadU(dt, key + 2 * f)), high = widen(hn::LoadU(dt, key + 2 * f + lanes));
      put(f, hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low));
    }
  }
#endif
  if (f == pairs) return;
  const hn::CappedTag<float, 1> one;
  const hn::Rebind<T, decltype(one)> one_t;
  const auto scalar = [&](std::int64_t i) HWY_ATTR {
    if constexpr (sizeof(T) == sizeof(float)) return key[i];
    else return hn::GetLane(hn::PromoteTo(one, hn::LoadU(one_t, key + i)));
  };
  for (std::int64_t i = f; i < padded; ++i) {
    const bool inside = i < pairs;
    const std::int64_t at = style == RopeStyle::half ? i : 2 * i, other = style == RopeStyle::half ? i + pairs : 2 * i + 1;
    first[i] = inside ? scalar(at) : 0.0F;
    second[i] = inside ? scalar(other) : 0.0F;
  }
  for (; f < padded; f += lanes) put(f, hn::LoadU(d, first + f), hn::LoadU(d, second + f));
}

HWY_INLINE void SpreadAny(const Keys& keys, std::int64_t slot, std::int64_t padded, RopeStyle style, float* HWY_RESTRICT out) {
  const std::byte* at = keys.slots.at(slot);
  const std::int64_t pairs = keys.dim / 2;
  if (keys.dtype == kFloat16) Spread(reinterpret_cast<const hwy::float16_t*>(at), pairs, padded, style, out);
  else if (keys.dtype == kBFloat16) Spread(reinterpret_cast<const hwy::bfloat16_t*>(at), pairs, padded, style, out);
  else Spread(reinterpret_cast<const float*>(at), pairs, padded, style, out);
}

/// out[k] = sum of the lanes of vector k, always in the same order.
HWY_INLINE void FoldFour(V a, V b, V c, V e, float* HWY_RESTRICT out) {
  const D d;
#if HWY_TARGET == HWY_SCALAR
  hn::StoreU(a, d, out);
  hn::StoreU(b, d, out + 1);
  hn::StoreU(c, d, out + 2);
  hn::StoreU(e, d, out + 3);
#else
  const hn::Repartition<std::uint64_t, D> wide;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)), ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce)), high = hn::InterleaveUpper(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce));
  const V blocks = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));  // in every 128 bits: a, b, c, e
  const hn::CappedTag<float, 4> four;
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(blocks, d, lanes);
  auto sum = hn::Load(four, lanes);
  for (std::size_t i = 4; i < hn::Lanes(d); i += 4) sum = hn::Add(sum, hn::Load(four, lanes + i));
  hn::StoreU(sum, four, out);
#endif
}

/// Four keys times one or two columns: four or eight sums in registers. A column has a part for the components (trig), one for the moduli (norm), or both in one chain.
template <int kColumns, bool kTrig, bool kNorm>
HWY_INLINE void Columns(const float* HWY_RESTRICT keys, std::int64_t padded, const float* HWY_RESTRICT trig, std::int64_t next_trig, const float* HWY_RESTRICT norm,
                           std::int64_t next_norm, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t next = 3 * padded;
  V a0 = hn::Zero(d), b0 = a0, c0 = a0, e0 = a0, a1 = a0, b1 = a0, c1 = a0, e1 = a0;
  for (std::int64_t f = 0; f < padded; f += lanes) {
    const auto step = [&](const float* part, V x, V y) HWY_ATTR {
      const V a = hn::LoadU(d, part), b = hn::LoadU(d, part + next), c = hn::LoadU(d, part + 2 * next), e = hn::LoadU(d, part + 3 * next);
      a0 = hn::MulAdd(a, x, a0);
      b0 = hn::MulAdd(b, x, b0);
      c0 = hn::MulAdd(c, x, c0);
      e0 = hn::MulAdd(e, x, e0);
      if constexpr (kColumns == 2) {
        a1 = hn::MulAdd(a, y, a1);
        b1 = hn::MulAdd(b, y, b1);
        c1 = hn::MulAdd(c, y, c1);
        e1 = hn::MulAdd(e, y, e1);
      }
    };
    if constexpr (kTrig) {
      step(keys + f, hn::LoadU(d, trig + f), hn::LoadU(d, trig + next_trig + f));
      step(keys + padded + f, hn::LoadU(d, trig + padded + f), hn::LoadU(d, trig + next_trig + padded + f));
    }
    if constexpr (kNorm) step(keys + 2 * padded + f, hn::LoadU(d, norm + f), hn::LoadU(d, norm + next_norm + f));
  }
  FoldFour(a0, b0, c0, e0, out);
  if constexpr (kColumns == 2) FoldFour(a1, b1, c1, e1, out + 4);
}

/// Four keys against every query head, one column each: out[g][4].
HWY_INLINE void MeanOfFour(const float* HWY_RESTRICT keys, std::int64_t padded, const TriColumns& columns, float* HWY_RESTRICT out) {
  std::int64_t g = 0;
  for (; g + 2 <= columns.group; g += 2) Columns<2, true, true>(keys, padded, columns.trig + g * 2 * padded, 2 * padded, columns.norm + g * padded, padded, out + kKeys * g);
  if (g < columns.group) Columns<1, true, true>(keys, padded, columns.trig + g * 2 * padded, 0, columns.norm + g * padded, 0, out + kKeys * g);
}

/// Four keys against one query head at every offset.
HWY_INLINE void MaxOfFour(const float* HWY_RESTRICT keys, std::int64_t padded, const float* HWY_RESTRICT trig, std::int64_t offsets, const float* HWY_RESTRICT norm, float* HWY_RESTRICT out) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  float best[kKeys] = {kLeast, kLeast, kLeast, kLeast}, found[2 * kKeys];
  const auto raise = [&](std::int64_t count) HWY_ATTR {
    for (std::int64_t k = 0; k < count; ++k)
      if (found[k] > best[k % kKeys] || found[k] != found[k]) best[k % kKeys] = found[k];
  };
  std::int64_t o = 0;
  for (; o + 2 <= offsets; o += 2, trig += 4 * padded) {
    Columns<2, true, false>(keys, padded, trig, 2 * padded, nullptr, 0, found);
    raise(2 * kKeys);
  }
  if (o < offsets) {
    Columns<1, true, false>(keys, padded, trig, 0, nullptr, 0, found);
    raise(kKeys);
  }
  Columns<1, false, true>(keys, padded, nullptr, 0, norm, 0, found);
  for (std::int64_t k = 0; k < kKeys; ++k) out[k] = best[k] + found[k];
}

void TriScores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns, float* HWY_RESTRICT scratch, float* HWY_RESTRICT raw) {
  const std::int64_t padded = PaddedPairs(keys.dim / 2);
  float* out = scratch + kTriKeys * 3 * padded;  // [G, 4]
  for (std::int64_t t = 0; t < length; t += kTriKeys) {
    const std::int64_t n = std::min(kTriKeys, length - t);
    for (std::int64_t k = 0; k < n; ++k) {
      if (t + k + kTriKeys < length) fetch_key(keys, t + k + kTriKeys);
      SpreadAny(keys, t + k, padded, style, scratch + k * 3 * padded);
    }
    const std::int64_t whole = (n + kKeys - 1) / kKeys * kKeys;
    std::fill_n(scratch + n * 3 * padded, (whole - n) * 3 * padded, 0.0F);
    if (columns.offsets == 1) {
      for (std::int64_t k = 0; k < n; k += kKeys) {
        MeanOfFour(scratch + k * 3 * padded, padded, columns, out);
        for (std::int64_t g = 0; g < columns.group; ++g) std::copy_n(out + kKeys * g, std::min(kKeys, n - k), raw + g * length + t + k);
      }
    } else {
      for (std::int64_t g = 0; g < columns.group; ++g)  // one head's columns stay in the cache for all keys of the block
        for (std::int64_t k = 0; k < n; k += kKeys) {
          MaxOfFour(scratch + k * 3 * padded, padded, columns.trig + g * columns.offsets * 2 * padded, columns.offsets, columns.norm + g * padded, out);
          std::copy_n(out, std::min(kKeys, n - k), raw + g * length + t + k);
        }
    }
  }
}

Moments FiniteSum(const float* HWY_RESTRICT x, std::int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d), count = hn::Zero(d);
  const auto one = hn::Set(d, 1.0);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, x + i));
    const auto finite = hn::IsFinite(v);
    sum = hn::Add(sum, hn::IfThenElseZero(finite, v));
    count = hn::Add(count, hn::IfThenElseZero(finite, one));
  }
  Moments m{hn::GetLane(hn::SumOfLanes(d, sum)), static_cast<std::int64_t>(hn::GetLane(hn::SumOfLanes(d, count)))};
  for (; i < n; ++i)
    if (std::isfinite(x[i])) {
      m.sum += static_cast<double>(x[i]);
      ++m.count;
    }
  return m;
}

double FiniteSquares(const float* HWY_RESTRICT x, std::int64_t n, double about) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  const auto shift = hn::Set(d, about);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, x + i));
    const auto away = hn::IfThenElseZero(hn::IsFinite(v), hn::Sub(v, shift));
    sum = hn::MulAdd(away, away, sum);
  }
  double total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i)
    if (std::isfinite(x[i])) total += (static_cast<double>(x[i]) - about) * (static_cast<double>(x[i]) - about);
  return total;
}

void TriCombine(const float* HWY_RESTRICT raw, std::int64_t group, std::int64_t length, const float* HWY_RESTRICT shift, const float* HWY_RESTRICT factor, bool take_max,
                float* HWY_RESTRICT out) {
  const auto run = [&](auto d, std::int64_t t) HWY_ATTR {
    const auto value = [&](std::int64_t g) HWY_ATTR { return hn::Mul(hn::Sub(hn::LoadU(d, raw + g * length + t), hn::Set(d, shift[g])), hn::Set(d, factor[g])); };
    auto best = value(0), sum = best;
    for (std::int64_t g = 1; g < group; ++g) {
      const auto z = value(g);
      best = hn::Max(best, z);
      sum = hn::Add(sum, z);
    }
    hn::StoreU(take_max ? hn::IfThenElse(hn::IsNaN(sum), sum, best) : hn::Mul(sum, hn::Set(d, 1.0F / static_cast<float>(group))), d, out + t);
  };
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t t = 0;
  for (; t + lanes <= length; t += lanes) run(d, t);
  for (; t < length; ++t) run(hn::CappedTag<float, 1>(), t);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(PaddedPairs);
HWY_EXPORT(TriScores);
HWY_EXPORT(FiniteSum);
HWY_EXPORT(FiniteSquares);
HWY_EXPORT(TriCombine);

std::int64_t padded_pairs(std::int64_t pairs) { return HWY_DYNAMIC_DISPATCH(PaddedPairs)(pairs); }

void tri_scores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns, float* scratch, float* raw) {
  HWY_DYNAMIC_DISPATCH(TriScores)(keys, length, style, columns, scratch, raw);
}

Moments finite_sum(const float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(FiniteSum)(x, n); }

double finite_squares(const float* x, std::int64_t n, double about) { return HWY_DYNAMIC_DISPATCH(FiniteSquares)(x, n, about); }

void tri_combine(const float* raw, std::int64_t group, std::int64_t length, const float* shift, const float* factor, bool take_max, float* out) {
  HWY_DYNAMIC_DISPATCH(TriCombine)(raw, group, length, shift, factor, take_max, out);
}

}  // namespace kvkeep::cpu
#endif
