// SPDX-License-Identifier: Apache-2.0
// exp for vectors, once per instruction set: included by files that are compiled once per instruction set.

#if defined(KVKEEP_EXPONENTIAL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_EXPONENTIAL_INL_H
#undef KVKEEP_EXPONENTIAL_INL_H
#else
#define KVKEEP_EXPONENTIAL_INL_H
#endif

#include "kvkeep/simd/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

/// exp(x) for x <= 0: 2^n * p(r), degree-6 polynomial in fp32, relative error below 2e-7; 0 below -87 and for -inf.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V ExpOfNegative(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  const V least = hn::Set(d, -87.0F);
  const auto tiny = hn::Lt(x, least);
  x = hn::Max(x, least);
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

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
