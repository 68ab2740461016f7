// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "softmax_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <cstring>

#include "softmax_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// exp(x) for x <= 0: 2^n * p(r), degree-6 polynomial in fp32, relative error below 2e-7; 0 below -87.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of_negative(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V floor = hn::Set(d, -87.0F);
  const auto tiny = hn::Lt(x, floor);
  x = hn::Max(x, floor);
  const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341F)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375F), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4F), r);
  V p = hn::Set(d, 1.9875691500e-4F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1F));
  const V e = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0F)));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenZeroElse(tiny, hn::Mul(e, hn::BitCast(d, exponent)));
}

float ExpShifted(float* HWY_RESTRICT x, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto lowest = hn::Set(d, -3.402823466e38F);
  auto top0 = lowest, top1 = lowest;
  std::int64_t t = 0;
  for (; t + 2 * lanes <= n; t += 2 * lanes) {
    top0 = hn::Max(top0, hn::LoadU(d, x + t));
    top1 = hn::Max(top1, hn::LoadU(d, x + t + lanes));
  }
  float top = hn::GetLane(hn::MaxOfLanes(d, hn::Max(top0, top1)));
  for (; t < n; ++t) top = x[t] > top ? x[t] : top;

  const auto shift = hn::Set(d, top);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  for (t = 0; t + 2 * lanes <= n; t += 2 * lanes) {
    const auto e0 = exp_of_negative(d, hn::Sub(hn::LoadU(d, x + t), shift));
    const auto e1 = exp_of_negative(d, hn::Sub(hn::LoadU(d, x + t + lanes), shift));
    hn::StoreU(e0, d, x + t);
    hn::StoreU(e1, d, x + t + lanes);
    sum0 = hn::Add(sum0, e0);
    sum1 = hn::Add(sum1, e1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  const hn::CappedTag<float, 1> one;
  for (; t < n; ++t) {
    const auto e = exp_of_negative(one, hn::Set(one, x[t] - top));
    x[t] = hn::GetLane(e);
    sum += x[t];
  }
  return sum;
}

void AddScaled(float* HWY_RESTRICT sum, const float* HWY_RESTRICT x, float a, const float* HWY_RESTRICT y, float b, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto va = hn::Set(d, a), vb = hn::Set(d, b);
  std::int64_t t = 0;
  if (y == nullptr) {
    for (; t + lanes <= n; t += lanes) hn::StoreU(hn::MulAdd(va, hn::LoadU(d, x + t), hn::LoadU(d, sum + t)), d, sum + t);
    for (; t < n; ++t) sum[t] += a * x[t];
    return;
  }
  for (; t + lanes <= n; t += lanes) {
    const auto first = hn::MulAdd(va, hn::LoadU(d, x + t), hn::LoadU(d, sum + t));
    hn::StoreU(hn::MulAdd(vb, hn::LoadU(d, y + t), first), d, sum + t);
  }
  for (; t < n; ++t) sum[t] += a * x[t] + b * y[t];
}

template <class Half>
HWY_INLINE void Widen(const Half* HWY_RESTRICT from, std::int64_t n, float* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<Half, decltype(d)> dh;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, from + i)), d, to + i);
  const hn::CappedTag<float, 1> one;
  const hn::Rebind<Half, decltype(one)> half_one;
  for (; i < n; ++i) to[i] = hn::GetLane(hn::PromoteTo(one, hn::LoadU(half_one, from + i)));
}

void WidenF16(const hwy::float16_t* from, std::int64_t n, float* to) { Widen(from, n, to); }
void WidenBf16(const hwy::bfloat16_t* from, std::int64_t n, float* to) { Widen(from, n, to); }

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(ExpShifted);
HWY_EXPORT(AddScaled);

float exp_shifted(float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(ExpShifted)(x, n); }

void add_scaled(float* sum, const float* x, float a, const float* y, float b, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddScaled)(sum, x, a, y, b, n);
}

HWY_EXPORT(WidenF16);
HWY_EXPORT(WidenBf16);

void widen(const void* from, ScalarType dtype, std::int64_t n, float* to) {
  if (dtype == kFloat16) {
    HWY_DYNAMIC_DISPATCH(WidenF16)(static_cast<const hwy::float16_t*>(from), n, to);
  } else if (dtype == kBFloat16) {
    HWY_DYNAMIC_DISPATCH(WidenBf16)(static_cast<const hwy::bfloat16_t*>(from), n, to);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
}

}  // namespace kvkeep::cpu
#endif
