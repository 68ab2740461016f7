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
    hn::StoreU(hn::Sqrt(hn::MulAdd(a, a, hn::Mul(b, b))), d, moduli + f);
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

/// Lane k: the sum of the lanes of vector k.
HWY_INLINE void FoldFour(V a, V b, V c, V e, float* HWY_RESTRICT out) {
  const D d;
  out[0] = hn::GetLane(hn::SumOfLanes(d, a));
  out[1] = hn::GetLane(hn::SumOfLanes(d, b));
  out[2] = hn::GetLane(hn::SumOfLanes(d, c));
  out[3] = hn::GetLane(hn::SumOfLanes(d, e));
}

/// Four keys against one query head: products of all three parts in one chain.
HWY_INLINE void MeanHead(const float* HWY_RESTRICT keys, std::int64_t padded, const float* HWY_RESTRICT trig, const float* HWY_RESTRICT norm, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t next = 3 * padded;
  V a = hn::Zero(d), b = a, c = a, e = a;
  for (std::int64_t f = 0; f < padded; f += lanes) {
    const V u = hn::LoadU(d, trig + f), v = hn::LoadU(d, trig + padded + f), n = hn::LoadU(d, norm + f);
    const float* k = keys + f;
    const auto chain = [&](const float* x, V sum) HWY_ATTR {
      return hn::MulAdd(n, hn::LoadU(d, x + 2 * padded), hn::MulAdd(v, hn::LoadU(d, x + padded), hn::MulAdd(u, hn::LoadU(d, x), sum)));
    };
    a = chain(k, a);
    b = chain(k + next, b);
    c = chain(k + 2 * next, c);
    e = chain(k + 3 * next, e);
  }
  FoldFour(a, b, c, e, out);
}

/// Four keys against one query head at every offset.
HWY_INLINE void MaxHead(const float* HWY_RESTRICT keys, std::int64_t padded, const float* HWY_RESTRICT trig, std::int64_t offsets, const float* HWY_RESTRICT norm, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t next = 3 * padded;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  float best[kKeys] = {kLeast, kLeast, kLeast, kLeast}, found[kKeys];
  for (std::int64_t o = 0; o < offsets; ++o, trig += 2 * padded) {
    V a = hn::Zero(d), b = a, c = a, e = a;
    for (std::int64_t f = 0; f < padded; f += lanes) {
      const V u = hn::LoadU(d, trig + f), v = hn::LoadU(d, trig + padded + f);
      const float* k = keys + f;
      const auto chain = [&](const float* x, V sum) HWY_ATTR { return hn::MulAdd(v, hn::LoadU(d, x + padded), hn::MulAdd(u, hn::LoadU(d, x), sum)); };
      a = chain(k, a);
      b = chain(k + next, b);
      c = chain(k + 2 * next, c);
      e = chain(k + 3 * next, e);
    }
    FoldFour(a, b, c, e, found);
    for (std::int64_t k = 0; k < kKeys; ++k)
      if (found[k] > best[k] || found[k] != found[k]) best[k] = found[k];
  }
  V a = hn::Zero(d), b = a, c = a, e = a;
  for (std::int64_t f = 0; f < padded; f += lanes) {
    const V n = hn::LoadU(d, norm + f);
    const float* k = keys + 2 * padded + f;
    a = hn::MulAdd(n, hn::LoadU(d, k), a);
    b = hn::MulAdd(n, hn::LoadU(d, k + next), b);
    c = hn::MulAdd(n, hn::LoadU(d, k + 2 * next), c);
    e = hn::MulAdd(n, hn::LoadU(d, k + 3 * next), e);
  }
  FoldFour(a, b, c, e, found);
  for (std::int64_t k = 0; k < kKeys; ++k) out[k] = best[k] + found[k];
}

void TriScores(const Keys& keys, std::int64_t length, RopeStyle style, const TriColumns& columns, float* HWY_RESTRICT scratch, float* HWY_RESTRICT raw) {
  const std::int64_t padded = PaddedPairs(keys.dim / 2);
  for (std::int64_t t = 0; t < length; t += kKeys) {
    const std::int64_t n = std::min(kKeys, length - t);
    for (std::int64_t k = 0; k < n; ++k) SpreadAny(keys, t + k, padded, style, scratch + k * 3 * padded);
    for (std::int64_t k = n; k < kKeys; ++k) std::fill_n(scratch + k * 3 * padded, 3 * padded, 0.0F);
    for (std::int64_t g = 0; g < columns.group; ++g) {
      float out[kKeys];
      const float *trig = columns.trig + g * columns.offsets * 2 * padded, *norm = columns.norm + g * padded;
      if (columns.offsets == 1) MeanHead(scratch, padded, trig, norm, out);
      else MaxHead(scratch, padded, trig, columns.offsets, norm, out);
      std::copy_n(out, n, raw + g * length + t);
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
