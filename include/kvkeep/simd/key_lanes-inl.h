// SPDX-License-Identifier: Apache-2.0
// Bodies of key_lanes.h, once per instruction set.

#if defined(KVKEEP_KEY_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_KEY_LANES_INL_H
#undef KVKEEP_KEY_LANES_INL_H
#else
#define KVKEEP_KEY_LANES_INL_H
#endif

#include <cmath>
#include <cstring>

#include "kvkeep/core/hd.h"
#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/key_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::key_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using Lanes32 = hn::Vec<F32>;

/// a * b, as `product`: opposite terms cancel, so it must not be fused with a sum.
HWY_INLINE Lanes32 Product(Lanes32 a, Lanes32 b) {
  Lanes32 c = hn::Mul(a, b);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  KVKEEP_HIDE(c.raw);
#endif
  return c;
}

HWY_INLINE Lanes32 Load(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE Lanes32 Load(const hwy::float16_t* from) {
  return hn::PromoteTo(F32(), hn::LoadU(hn::Rebind<hwy::float16_t, F32>(), from));
}
HWY_INLINE Lanes32 Load(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(F32(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, F32>(), from));
}

/// The first n elements, then zeros.
template <class T>
HWY_INLINE Lanes32 LoadFirst(const T* from, std::int64_t n) {
  HWY_ALIGN T part[hn::MaxLanes(F32())] = {};
  std::memcpy(part, from, static_cast<std::size_t>(n) * sizeof(T));
  return Load(part);
}

/// body(element type) with the keys' own type.
template <class Body>
HWY_INLINE void WithType(const Keys& keys, Body&& body) {
  if (keys.dtype == Dtype::f16)
    body(hwy::float16_t{});
  else if (keys.dtype == Dtype::bf16)
    body(hwy::bfloat16_t{});
  else
    body(float{});
}

/// Sum over d of k[d] * other[d], four sums side by side; other(k, d): the other factor of the lanes k from d on.
/// at d.
template <class T, class Other>
HWY_INLINE float Dot(const T* HWY_RESTRICT key, std::int64_t dim, Other&& other) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Lanes32 a = hn::Zero(d), b = a, c = a, e = a;
  std::int64_t i = 0;
  for (; i + 4 * lanes <= dim; i += 4 * lanes) {
    const Lanes32 k0 = Load(key + i), k1 = Load(key + i + lanes), k2 = Load(key + i + 2 * lanes),
                  k3 = Load(key + i + 3 * lanes);
    a = hn::MulAdd(k0, other(k0, i), a);
    b = hn::MulAdd(k1, other(k1, i + lanes), b);
    c = hn::MulAdd(k2, other(k2, i + 2 * lanes), c);
    e = hn::MulAdd(k3, other(k3, i + 3 * lanes), e);
  }
  for (; i + lanes <= dim; i += lanes) {
    const Lanes32 k = Load(key + i);
    a = hn::MulAdd(k, other(k, i), a);
  }
  if (i < dim) {
    const Lanes32 k = LoadFirst(key + i, dim - i);
    b = hn::MulAdd(k, other(k, i), b);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

KVKEEP_INLINE void KeyNorms(const Keys& keys, std::int64_t from, std::int64_t to, float* HWY_RESTRICT norms) {
  WithType(keys, [&](auto type) HWY_ATTR {
    for (std::int64_t t = from; t < to; ++t)
      norms[t - from] = std::sqrt(Dot(reinterpret_cast<const decltype(type)*>(keys.slots.at(t)), keys.dim,
                                      [](Lanes32 k, std::int64_t) HWY_ATTR { return k; }));
  });
}

KVKEEP_INLINE void KeyDots(const Keys& keys, std::int64_t from, std::int64_t to, const float* HWY_RESTRICT vector,
                           float* HWY_RESTRICT dots) {
  const std::int64_t whole = keys.dim - keys.dim % static_cast<std::int64_t>(hn::Lanes(F32()));
  const Lanes32 last = whole < keys.dim ? LoadFirst(vector + whole, keys.dim - whole) : hn::Zero(F32());
  WithType(keys, [&](auto type) HWY_ATTR {
    for (std::int64_t t = from; t < to; ++t)
      dots[t - from] = Dot(reinterpret_cast<const decltype(type)*>(keys.slots.at(t)), keys.dim,
                           [&](Lanes32, std::int64_t i) HWY_ATTR { return i < whole ? Load(vector + i) : last; });
  });
}

KVKEEP_INLINE void AddWeightedKeys(const Keys& keys, std::int64_t from, std::int64_t to,
                                   const float* HWY_RESTRICT weights, double* HWY_RESTRICT sum) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  HWY_ALIGN float part[4 * hn::MaxLanes(F32())];
  WithType(keys, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    std::int64_t i = 0;
    for (; i + 4 * lanes <= keys.dim; i += 4 * lanes) {
      Lanes32 a = hn::Zero(d), b = a, c = a, e = a;
      for (std::int64_t t = from; t < to; ++t) {
        const auto* key = reinterpret_cast<const T*>(keys.slots.at(t)) + i;
        const Lanes32 w = hn::Set(d, weights[t - from]);
        a = hn::Add(a, Product(w, Load(key)));
        b = hn::Add(b, Product(w, Load(key + lanes)));
        c = hn::Add(c, Product(w, Load(key + 2 * lanes)));
        e = hn::Add(e, Product(w, Load(key + 3 * lanes)));
      }
      hn::StoreU(a, d, part);
      hn::StoreU(b, d, part + lanes);
      hn::StoreU(c, d, part + 2 * lanes);
      hn::StoreU(e, d, part + 3 * lanes);
      for (std::int64_t j = 0; j < 4 * lanes; ++j) sum[i + j] += static_cast<double>(part[j]);
    }
    for (; i < keys.dim; i += lanes) {
      const std::int64_t n = keys.dim - i < lanes ? keys.dim - i : lanes;
      Lanes32 a = hn::Zero(d);
      for (std::int64_t t = from; t < to; ++t) {
        const auto* key = reinterpret_cast<const T*>(keys.slots.at(t)) + i;
        a = hn::Add(a, Product(hn::Set(d, weights[t - from]), n == lanes ? Load(key) : LoadFirst(key, n)));
      }
      hn::StoreU(a, d, part);
      for (std::int64_t j = 0; j < n; ++j) sum[i + j] += static_cast<double>(part[j]);
    }
  });
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::key_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using key_lanes::AddWeightedKeys;
using key_lanes::KeyDots;
using key_lanes::KeyNorms;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(KeyNorms);
HWY_EXPORT(KeyDots);
HWY_EXPORT(AddWeightedKeys);
#endif

KVKEEP_INLINE void key_norms(const Keys& keys, std::int64_t from, std::int64_t to, float* norms) {
  KVKEEP_DISPATCH(KeyNorms)(keys, from, to, norms);
}

KVKEEP_INLINE void key_dots(const Keys& keys, std::int64_t from, std::int64_t to, const float* vector, float* dots) {
  KVKEEP_DISPATCH(KeyDots)(keys, from, to, vector, dots);
}

KVKEEP_INLINE void add_weighted_keys(const Keys& keys, std::int64_t from, std::int64_t to, const float* weights,
                                     double* sum) {
  KVKEEP_DISPATCH(AddWeightedKeys)(keys, from, to, weights, sum);
}

}  // namespace kvkeep::cpu
#endif

#endif
