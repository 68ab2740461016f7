// SPDX-License-Identifier: Apache-2.0
// Bodies of attention_lanes.h, once per instruction set.

#if defined(KVKEEP_ATTENTION_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_ATTENTION_LANES_INL_H
#undef KVKEEP_ATTENTION_LANES_INL_H
#else
#define KVKEEP_ATTENTION_LANES_INL_H
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/exponential-inl.h"
#include "kvkeep/simd/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::attention_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;

/// Layout of a panel's queries: two machine vectors, or one vector of at most eight lanes.
struct Wide {
  using D = hn::ScalableTag<float>;
  static constexpr bool kTwo = true;
  static constexpr std::int64_t kKeys = 6;  ///< multiplied at a time: twelve sums in registers
};
struct Narrow {
  using D = hn::CappedTag<float, 8>;
  static constexpr bool kTwo = false;
  static constexpr std::int64_t kKeys = 12;
};
template <class Form>
using V = hn::Vec<typename Form::D>;

template <class Form>
HWY_INLINE std::int64_t WidthOf() {
  return (Form::kTwo ? 2 : 1) * static_cast<std::int64_t>(hn::Lanes(typename Form::D()));
}

KVKEEP_INLINE std::int64_t WidestPanel() { return WidthOf<Wide>(); }
KVKEEP_INLINE std::int64_t PanelWidth(std::int64_t queries) {
  return queries <= WidthOf<Narrow>() ? WidthOf<Narrow>() : WidthOf<Wide>();
}
KVKEEP_INLINE std::int64_t PanelVector(std::int64_t width) { return width == WidthOf<Wide>() ? width / 2 : width; }

template <class Half>
HWY_INLINE void Widen(const Half* HWY_RESTRICT from, std::int64_t n, float* HWY_RESTRICT to) {
  const D d;
  const hn::Rebind<Half, D> dh;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, from + i)), d, to + i);
  const hn::CappedTag<float, 1> one;
  const hn::Rebind<Half, decltype(one)> half_one;
  for (; i < n; ++i) to[i] = hn::GetLane(hn::PromoteTo(one, hn::LoadU(half_one, from + i)));
}

/// Whole blocks. Source: ggml-quants.c, `dequantize_row_q8_0` and `_q4_0`.
HWY_INLINE void WidenBlocks(const std::uint8_t* HWY_RESTRICT block, bool eight, std::int64_t n,
                            float* HWY_RESTRICT to) {
  const hn::CappedTag<float, kBlockNumbers / 2> d;
  const hn::Rebind<std::int32_t, decltype(d)> d32;
  const hn::Rebind<std::int8_t, decltype(d)> d8;
  const hn::Rebind<std::uint8_t, decltype(d)> du8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (const float* end = to + n; to < end; to += kBlockNumbers) {
    std::uint16_t bits;
    std::memcpy(&bits, block, sizeof(bits));
    const auto scale = hn::Set(d, Half::from_bits(bits));
    block += sizeof(bits);
    const auto put = [&](auto numbers, float* at)
                         HWY_ATTR { hn::StoreU(hn::Mul(scale, hn::ConvertTo(d, numbers)), d, at); };
    if (eight) {
      for (std::int64_t i = 0; i < kBlockNumbers; i += lanes)
        put(hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(block) + i)), to + i);
      block += kBlockNumbers;
    } else {  // the low halves of 16 bytes, then the high ones
      const auto less = hn::Set(d32, 8);
      for (std::int64_t i = 0; i < kBlockNumbers / 2; i += lanes) {
        const auto two = hn::PromoteTo(d32, hn::LoadU(du8, block + i));
        put(hn::Sub(hn::And(two, hn::Set(d32, 15)), less), to + i);
        put(hn::Sub(hn::ShiftRight<4>(two), less), to + i + kBlockNumbers / 2);
      }
      block += kBlockNumbers / 2;
    }
  }
}

KVKEEP_INLINE void WidenAny(const void* from, Dtype dtype, std::int64_t n, float* to) {
  if (n == 0) return;  // `from` may be null
  if (is_blocks(dtype)) return WidenBlocks(static_cast<const std::uint8_t*>(from), dtype == Dtype::q8_0, n, to);
  if (dtype == Dtype::f16)
    Widen(static_cast<const hwy::float16_t*>(from), n, to);
  else if (dtype == Dtype::bf16)
    Widen(static_cast<const hwy::bfloat16_t*>(from), n, to);
  else
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

/// Form::kKeys keys against one panel.
template <class Form>
HWY_INLINE void SomeKeys(const float* const* HWY_RESTRICT key, std::int64_t dim, const float* HWY_RESTRICT panel,
                         float* HWY_RESTRICT out, V<Form>& top0, V<Form>& top1) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  using Sum = V<Form>;
  Sum a0 = hn::Zero(d), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, e0 = a0, e1 = a0, f0 = a0, f1 = a0, g0 = a0,
      g1 = a0;
  constexpr int kStep = Form::kTwo ? 1 : 2;  // a pair of sums belongs to one key or to two
  const float *ka = key[0], *kb = key[kStep], *kc = key[2 * kStep], *ke = key[3 * kStep], *kf = key[4 * kStep],
              *kg = key[5 * kStep];
  const float *la = key[kStep - 1], *lb = key[2 * kStep - 1], *lc = key[3 * kStep - 1], *le = key[4 * kStep - 1],
              *lf = key[5 * kStep - 1], *lg = key[6 * kStep - 1];
  for (std::int64_t i = 0; i < dim; ++i, panel += WidthOf<Form>()) {
    const Sum q0 = hn::LoadU(d, panel), q1 = Form::kTwo ? hn::LoadU(d, panel + lanes) : q0;
    const auto add = [&](const float* k0, const float* k1, Sum& x0, Sum& x1) HWY_ATTR {
      x0 = hn::MulAdd(hn::Set(d, k0[i]), q0, x0);
      x1 = hn::MulAdd(hn::Set(d, k1[i]), q1, x1);
    };
    add(ka, la, a0, a1);
    add(kb, lb, b0, b1);
    add(kc, lc, c0, c1);
    add(ke, le, e0, e1);
    add(kf, lf, f0, f1);
    add(kg, lg, g0, g1);
  }
  const auto put = [&](Sum x0, Sum x1) HWY_ATTR {
    hn::StoreU(x0, d, out);
    hn::StoreU(x1, d, out + lanes);
    out += 2 * lanes;
  };
  put(a0, a1);
  put(b0, b1);
  put(c0, c1);
  put(e0, e1);
  put(f0, f1);
  put(g0, g1);
  top0 = hn::Max(top0, hn::Max(hn::Max(hn::Max(a0, b0), hn::Max(c0, e0)), hn::Max(f0, g0)));
  top1 = hn::Max(top1, hn::Max(hn::Max(hn::Max(a1, b1), hn::Max(c1, e1)), hn::Max(f1, g1)));
}

/// The last keys of a row, one at a time: the same chain of multiply-adds.
template <class Form>
HWY_INLINE void OneKey(const float* HWY_RESTRICT key, std::int64_t dim, const float* HWY_RESTRICT panel,
                       float* HWY_RESTRICT out, V<Form>& top0, V<Form>& top1) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V<Form> a0 = hn::Zero(d), a1 = a0;
  for (std::int64_t i = 0; i < dim; ++i, panel += WidthOf<Form>()) {
    const V<Form> k = hn::Set(d, key[i]);
    a0 = hn::MulAdd(k, hn::LoadU(d, panel), a0);
    if constexpr (Form::kTwo) a1 = hn::MulAdd(k, hn::LoadU(d, panel + lanes), a1);
  }
  hn::StoreU(a0, d, out);
  top0 = hn::Max(top0, a0);
  if constexpr (Form::kTwo) {
    hn::StoreU(a1, d, out + lanes);
    top1 = hn::Max(top1, a1);
  }
}

#if HWY_TARGET != HWY_SCALAR && HWY_CAP_GE512
#define KVKEEP_PAIRS 1

inline constexpr std::int64_t kPairs =
    16;  ///< pairs of keys per multiplication: a vector holds two keys side by side, and every query twice
inline constexpr std::int64_t kPart = 8;  ///< components of a pair that are stored together: a vector

/// Two keys, component by component: every vector holds kPart components of both, and vectors are kPairs apart.
template <class T>
HWY_INLINE void WidenPair(const std::byte* HWY_RESTRICT first, const std::byte* HWY_RESTRICT second, std::int64_t dim,
                          float* HWY_RESTRICT to) {
  const D d;
  constexpr std::int64_t kNext = kPairs * 2 * kPart;
  const T *a = reinterpret_cast<const T*>(first), *b = reinterpret_cast<const T*>(second);
  if constexpr (std::is_same_v<T, hwy::bfloat16_t>) {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<std::uint16_t, D> half;
    alignas(64) static constexpr std::uint32_t kTurned[16] = {
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};  // interleaving splits every 128 bits
    const auto turned = hn::SetTableIndices(du, kTurned);
    const auto load = [&](const T* from) HWY_ATTR {
      return hn::BitCast(half,
                         hn::TableLookupLanes(hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(from)), turned));
    };
    const auto none = hn::Zero(half);
    for (std::int64_t i = 0; i < dim; i += 4 * kPart, to += 4 * kNext) {
      const auto x = load(a + i), y = load(b + i), lower = hn::InterleaveLower(half, x, y),
                 upper = hn::InterleaveUpper(half, x, y);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(half, none, lower)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(half, none, lower)), d, to + kNext);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(half, none, upper)), d, to + 2 * kNext);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(half, none, upper)), d, to + 3 * kNext);
    }
  } else {
    alignas(64) static constexpr std::int32_t kTurned[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const auto turned = hn::SetTableIndices(d, kTurned);
    const auto load = [&](const T* from) HWY_ATTR {
      if constexpr (sizeof(T) == sizeof(float))
        return hn::TableLookupLanes(hn::LoadU(d, from), turned);
      else
        return hn::TableLookupLanes(hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, D>(), from)), turned);
    };
    for (std::int64_t i = 0; i < dim; i += 2 * kPart, to += 2 * kNext) {
      const auto x = load(a + i), y = load(b + i);
      hn::StoreU(hn::InterleaveLower(d, x, y), d, to);
      hn::StoreU(hn::InterleaveUpper(d, x, y), d, to + kNext);
    }
  }
}

/// kPairs pairs of keys against a narrow panel that holds its queries twice: the chains of SomeKeys<Narrow>. `next`:
/// the keys that follow, prefetched little by little, because too many requests under way stall the machine.
HWY_INLINE void SomePairs(const float* HWY_RESTRICT pairs, std::int64_t dim, const float* HWY_RESTRICT doubled,
                          const std::byte* const* HWY_RESTRICT next, bool two_lines, float* HWY_RESTRICT out,
                          hn::Vec<D>& top) {
  const D d;
  const hn::Repartition<std::uint64_t, D> wide;
  using Sum = hn::Vec<D>;
  Sum a0 = hn::Zero(d), b0 = a0, c0 = a0, e0 = a0, f0 = a0, g0 = a0, h0 = a0, i0 = a0, a1 = a0, b1 = a0, c1 = a0,
      e1 = a0, f1 = a0, g1 = a0, h1 = a0, i1 = a0;
  for (std::int64_t i = 0; i < dim; i += kPart, pairs += kPairs * 2 * kPart) {
    for (std::int64_t c = 0; c < kPart; ++c, doubled += 2 * kPart) {
      const std::byte* ahead = next[(i + c) % (2 * kPairs)] + (i + c) / (2 * kPairs) * (two_lines ? 128 : 64);
      hwy::Prefetch(ahead);
      if (two_lines) hwy::Prefetch(ahead + 64);
      const Sum q = hn::LoadU(d, doubled);
      const auto add = [&](std::int64_t pair, Sum& sum) HWY_ATTR {
        std::uint64_t both;
        std::memcpy(&both, pairs + pair * 2 * kPart + 2 * c, sizeof(both));
        sum = hn::MulAdd(hn::BitCast(d, hn::Set(wide, both)), q, sum);
      };
      add(0, a0);
      add(1, b0);
      add(2, c0);
      add(3, e0);
      add(4, f0);
      add(5, g0);
      add(6, h0);
      add(7, i0);
      add(8, a1);
      add(9, b1);
      add(10, c1);
      add(11, e1);
      add(12, f1);
      add(13, g1);
      add(14, h1);
      add(15, i1);
    }
  }
  alignas(64) static constexpr std::int32_t kApart[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  const auto apart = hn::SetTableIndices(d, kApart);
  const auto put = [&](Sum sum) HWY_ATTR {
    const Sum rows = hn::TableLookupLanes(sum, apart);
    hn::StoreU(rows, d, out);
    top = hn::Max(top, rows);
    out += 2 * kPart;
  };
  for (const Sum* sum : {&a0, &b0, &c0, &e0, &f0, &g0, &h0, &i0, &a1, &b1, &c1, &e1, &f1, &g1, &h1, &i1}) put(*sum);
}

/// Logits<Narrow> for the part of [from, to) that is whole blocks of pairs; returns the first slot that is left.
HWY_INLINE std::int64_t PairLogits(const Keys& keys, std::int64_t from, std::int64_t to,
                                   const float* HWY_RESTRICT panel, float* HWY_RESTRICT logits, float* HWY_RESTRICT top,
                                   float* HWY_RESTRICT widened) {
  constexpr std::int64_t kKeys = 2 * kPairs;
  if (to - from < kKeys || keys.dim % (4 * kPart) != 0) return from;
  const D d;
  const hn::Half<D> narrow;
  float* doubled = widened + kKeys * keys.dim;
  for (std::int64_t i = 0; i < keys.dim * kPart; ++i) doubled[2 * i] = doubled[2 * i + 1] = panel[i];
  const auto held = hn::LoadU(narrow, top);
  auto largest = hn::Combine(d, held, held);
  const std::byte *row[kKeys], *next[kKeys];
  for (std::int64_t j = 0; j < kKeys; ++j) next[j] = keys.slots.at(from + j);
  std::int64_t t = from;
  for (; t + kKeys <= to; t += kKeys, logits += kKeys * kPart) {
    for (std::int64_t j = 0; j < kKeys; ++j) {
      row[j] = next[j];
      next[j] = keys.slots.at(std::min(t + kKeys + j, to - 1));
    }
    for (std::int64_t j = 0; j < kPairs; ++j) {
      float* pair = widened + j * 2 * kPart;
      if (keys.dtype == Dtype::bf16)
        WidenPair<hwy::bfloat16_t>(row[2 * j], row[2 * j + 1], keys.dim, pair);
      else if (keys.dtype == Dtype::f16)
        WidenPair<hwy::float16_t>(row[2 * j], row[2 * j + 1], keys.dim, pair);
      else
        WidenPair<float>(row[2 * j], row[2 * j + 1], keys.dim, pair);
    }
    SomePairs(widened, keys.dim, doubled, next, keys.dtype == Dtype::f32, logits, largest);
  }
  hn::StoreU(hn::Max(hn::LowerHalf(narrow, largest), hn::UpperHalf(narrow, largest)), narrow, top);
  return t;
}
#endif

template <class Form>
HWY_INLINE void Logits(const Keys& keys, std::int64_t from, std::int64_t to, const float* HWY_RESTRICT panels,
                       std::int64_t count, std::int64_t panel_stride, float* HWY_RESTRICT logits,
                       float* HWY_RESTRICT top, float* HWY_RESTRICT widened) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), width = WidthOf<Form>();
  const float* key[Form::kKeys];
  std::int64_t begin = from;
#ifdef KVKEEP_PAIRS
  if constexpr (!Form::kTwo) {
    if (count == 1) begin = PairLogits(keys, from, to, panels, logits, top, widened);
  }
#endif
  for (std::int64_t t = begin; t < to;) {
    const std::int64_t n = std::min(Form::kKeys, to - t);
    for (std::int64_t j = 0; j < n; ++j) {
      const std::byte* at = keys.slots.at(t + j);
      if (t + j + Form::kKeys < to) fetch_key(keys, t + j + Form::kKeys);
      if (keys.dtype == Dtype::f32) {
        key[j] = reinterpret_cast<const float*>(at);
      } else {
        WidenAny(at, keys.dtype, keys.dim, widened + j * keys.dim);
        key[j] = widened + j * keys.dim;
      }
    }
    for (std::int64_t p = 0; p < count; ++p) {
      const float* panel = panels + p * keys.dim * width;
      float *out = logits + p * panel_stride + (t - from) * width, *largest = top + p * width;
      V<Form> top0 = hn::LoadU(d, largest), top1 = Form::kTwo ? hn::LoadU(d, largest + lanes) : top0;
      if (n == Form::kKeys) {
        SomeKeys<Form>(key, keys.dim, panel, out, top0, top1);
      } else {
        for (std::int64_t j = 0; j < n; ++j) OneKey<Form>(key[j], keys.dim, panel, out + j * width, top0, top1);
      }
      if constexpr (Form::kTwo)
        hn::StoreU(top1, d, largest + lanes);
      else
        top0 = hn::Max(top0, top1);
      hn::StoreU(top0, d, largest);
    }
    t += n;
  }
}

KVKEEP_INLINE void PanelLogits(std::int64_t width, const Keys& keys, std::int64_t from, std::int64_t to,
                               const float* panels, std::int64_t count, std::int64_t panel_stride, float* logits,
                               float* top, float* widened) {
  if (width == WidthOf<Wide>())
    Logits<Wide>(keys, from, to, panels, count, panel_stride, logits, top, widened);
  else
    Logits<Narrow>(keys, from, to, panels, count, panel_stride, logits, top, widened);
}

/// tanh: an odd polynomial near 0 (Cephes, tanhf), else (1 - e) / (1 + e) with e = exp(-2 |x|).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V size = hn::Abs(x), square = hn::Mul(x, x), one = hn::Set(d, 1.0F);
  V p = hn::Set(d, -5.70498872745e-3F);
  p = hn::MulAdd(p, square, hn::Set(d, 2.06390887954e-2F));
  p = hn::MulAdd(p, square, hn::Set(d, -5.37397155531e-2F));
  p = hn::MulAdd(p, square, hn::Set(d, 1.33314422036e-1F));
  p = hn::MulAdd(p, square, hn::Set(d, -3.33332819422e-1F));
  const V near = hn::MulAdd(hn::Mul(p, square), x, x), e = ExpOfNegative(d, hn::Mul(size, hn::Set(d, -2.0F))),
          far = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.625F)), near, hn::IfThenElse(hn::IsNaN(x), x, far));
}

KVKEEP_INLINE void CapLogits(float* HWY_RESTRICT x, std::int64_t n, float cap) {
  const auto put = [&](auto d, float* at) HWY_ATTR {
    const auto c = hn::Set(d, cap);
    hn::StoreU(hn::Mul(c, Tanh(d, hn::Div(hn::LoadU(d, at), c))), d, at);
  };
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) put(d, x + i);
  for (; i < n; ++i) put(hn::CappedTag<float, 1>(), x + i);
}

template <class Form>
HWY_INLINE void Exp(float* HWY_RESTRICT x, std::int64_t slots, const float* HWY_RESTRICT top, float* HWY_RESTRICT sum) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V<Form> shift0 = hn::LoadU(d, top), shift1 = Form::kTwo ? hn::LoadU(d, top + lanes) : shift0;
  V<Form> sum0 = hn::Zero(d), sum1 = sum0;
  for (std::int64_t t = 0; t < slots; ++t, x += WidthOf<Form>()) {
    const V<Form> e0 = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x), shift0));
    hn::StoreU(e0, d, x);
    sum0 = hn::Add(sum0, e0);
    if constexpr (Form::kTwo) {
      const V<Form> e1 = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x + lanes), shift1));
      hn::StoreU(e1, d, x + lanes);
      sum1 = hn::Add(sum1, e1);
    }
  }
  hn::StoreU(sum0, d, sum);
  if constexpr (Form::kTwo) hn::StoreU(sum1, d, sum + lanes);
}

KVKEEP_INLINE void PanelExp(std::int64_t width, float* x, std::int64_t slots, const float* top, float* sum) {
  if (width == WidthOf<Wide>())
    Exp<Wide>(x, slots, top, sum);
  else
    Exp<Narrow>(x, slots, top, sum);
}

template <class Form>
HWY_INLINE void GroupMax(const float* HWY_RESTRICT x, std::int64_t slots, std::int64_t heads, std::int64_t queries,
                         std::int64_t stride, bool first, float* HWY_RESTRICT largest, float* HWY_RESTRICT top) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), width = WidthOf<Form>();
  const auto used0 = hn::FirstN(d, static_cast<std::size_t>(std::min(queries, lanes)));
  const auto used1 = hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(queries - lanes, 0)));
  const V<Form> none = hn::Set(d, -std::numeric_limits<float>::infinity());
  V<Form> top0 = first ? none : hn::LoadU(d, top), top1 = first || !Form::kTwo ? none : hn::LoadU(d, top + lanes);
  for (std::int64_t t = 0; t < slots; ++t, x += width, largest += width) {
    V<Form> best0 = first ? none : hn::LoadU(d, largest),
            best1 = first || !Form::kTwo ? none : hn::LoadU(d, largest + lanes);
    for (std::int64_t h = 0; h < heads; ++h) {
      best0 = hn::Max(best0, hn::LoadU(d, x + h * stride));
      if constexpr (Form::kTwo) best1 = hn::Max(best1, hn::LoadU(d, x + h * stride + lanes));
    }
    best0 = hn::IfThenElseZero(used0, best0);  // later lanes hold another head's queries, or the next slot
    hn::StoreU(best0, d, largest);
    top0 = hn::Max(top0, best0);
    if constexpr (Form::kTwo) {
      best1 = hn::IfThenElseZero(used1, best1);
      hn::StoreU(best1, d, largest + lanes);
      top1 = hn::Max(top1, best1);
    }
  }
  hn::StoreU(top0, d, top);
  if constexpr (Form::kTwo) hn::StoreU(top1, d, top + lanes);
}

KVKEEP_INLINE void PanelGroupMax(std::int64_t width, const float* x, std::int64_t slots, std::int64_t heads,
                                 std::int64_t queries, std::int64_t stride, bool first, float* largest, float* top) {
  if (width == WidthOf<Wide>())
    GroupMax<Wide>(x, slots, heads, queries, stride, first, largest, top);
  else
    GroupMax<Narrow>(x, slots, heads, queries, stride, first, largest, top);
}

template <class Form>
HWY_INLINE void Weigh(const float* HWY_RESTRICT x, std::int64_t slots, const float* HWY_RESTRICT weight,
                      float* HWY_RESTRICT usage) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V<Form> w0 = hn::LoadU(d, weight), w1 = Form::kTwo ? hn::LoadU(d, weight + lanes) : w0;
  for (std::int64_t t = 0; t < slots; ++t, x += WidthOf<Form>(), usage += lanes) {
    V<Form> sum = hn::MulAdd(w0, hn::LoadU(d, x), hn::LoadU(d, usage));
    if constexpr (Form::kTwo) sum = hn::MulAdd(w1, hn::LoadU(d, x + lanes), sum);
    hn::StoreU(sum, d, usage);
  }
}

KVKEEP_INLINE void PanelWeigh(std::int64_t width, const float* x, std::int64_t slots, const float* weight,
                              float* usage) {
  if (width == WidthOf<Wide>())
    Weigh<Wide>(x, slots, weight, usage);
  else
    Weigh<Narrow>(x, slots, weight, usage);
}

template <class Form>
HWY_INLINE void Gather(const float* HWY_RESTRICT x, std::int64_t slots, const float* HWY_RESTRICT weight,
                       float* HWY_RESTRICT out) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V<Form> w0 = hn::LoadU(d, weight), w1 = Form::kTwo ? hn::LoadU(d, weight + lanes) : w0;
  const auto counts0 = hn::Ne(w0, hn::Zero(d)), counts1 = hn::Ne(w1, hn::Zero(d));
  for (std::int64_t t = 0; t < slots; ++t, x += WidthOf<Form>()) {
    V<Form> share = hn::IfThenElseZero(counts0, hn::Mul(w0, hn::LoadU(d, x)));
    if constexpr (Form::kTwo) share = hn::Add(share, hn::IfThenElseZero(counts1, hn::Mul(w1, hn::LoadU(d, x + lanes))));
    out[t] += hn::GetLane(hn::SumOfLanes(d, share));
  }
}

KVKEEP_INLINE void PanelGather(std::int64_t width, const float* x, std::int64_t slots, const float* weight,
                               float* out) {
  if (width == WidthOf<Wide>())
    Gather<Wide>(x, slots, weight, out);
  else
    Gather<Narrow>(x, slots, weight, out);
}

template <class Form>
HWY_INLINE void Fold(const float* HWY_RESTRICT usage, std::int64_t slots, float* HWY_RESTRICT out) {
  const typename Form::D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < slots; ++t, usage += lanes) out[t] = hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, usage)));
}

KVKEEP_INLINE void FoldLanes(std::int64_t width, const float* usage, std::int64_t slots, float* out) {
  if (width == WidthOf<Wide>())
    Fold<Wide>(usage, slots, out);
  else
    Fold<Narrow>(usage, slots, out);
}

KVKEEP_INLINE void AddScaled(float* HWY_RESTRICT to, const float* HWY_RESTRICT from, float a, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, a);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, from + i), hn::LoadU(d, to + i)), d, to + i);
  const hn::CappedTag<float, 1> one;
  for (; i < n; ++i)
    hn::StoreU(hn::MulAdd(hn::Set(one, a), hn::LoadU(one, from + i), hn::LoadU(one, to + i)), one, to + i);
}

#undef KVKEEP_PAIRS
KVKEEP_INLINE void PanelSizes(const float* HWY_RESTRICT x, std::int64_t slots, float* HWY_RESTRICT sums) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < slots; ++t, x += 2 * lanes, sums += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Add(hn::Abs(hn::LoadU(d, x)), hn::Abs(hn::LoadU(d, x + lanes)))), d,
               sums);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::attention_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using attention_lanes::AddScaled;
using attention_lanes::CapLogits;
using attention_lanes::FoldLanes;
using attention_lanes::PanelExp;
using attention_lanes::PanelGather;
using attention_lanes::PanelGroupMax;
using attention_lanes::PanelLogits;
using attention_lanes::PanelSizes;
using attention_lanes::PanelVector;
using attention_lanes::PanelWeigh;
using attention_lanes::PanelWidth;
using attention_lanes::WidenAny;
using attention_lanes::WidestPanel;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(WidestPanel);
HWY_EXPORT(PanelWidth);
HWY_EXPORT(PanelVector);
HWY_EXPORT(PanelLogits);
HWY_EXPORT(CapLogits);
HWY_EXPORT(PanelExp);
HWY_EXPORT(PanelGroupMax);
HWY_EXPORT(PanelWeigh);
HWY_EXPORT(PanelGather);
HWY_EXPORT(FoldLanes);
HWY_EXPORT(AddScaled);
HWY_EXPORT(WidenAny);
HWY_EXPORT(PanelSizes);
#endif

KVKEEP_INLINE std::int64_t panel_width() { return KVKEEP_DISPATCH(WidestPanel)(); }

KVKEEP_INLINE std::int64_t panel_width(std::int64_t queries) { return KVKEEP_DISPATCH(PanelWidth)(queries); }

KVKEEP_INLINE std::int64_t panel_vector(std::int64_t width) { return KVKEEP_DISPATCH(PanelVector)(width); }

KVKEEP_INLINE void panel_logits(std::int64_t width, const Keys& keys, std::int64_t from, std::int64_t to,
                                const float* panels, std::int64_t count, std::int64_t panel_stride, float* logits,
                                float* top, float* widened) {
  KVKEEP_DISPATCH(PanelLogits)(width, keys, from, to, panels, count, panel_stride, logits, top, widened);
}

KVKEEP_INLINE void cap_logits(float* x, std::int64_t n, float cap) { KVKEEP_DISPATCH(CapLogits)(x, n, cap); }

KVKEEP_INLINE void panel_exp(std::int64_t width, float* x, std::int64_t slots, const float* top, float* sum) {
  KVKEEP_DISPATCH(PanelExp)(width, x, slots, top, sum);
}

KVKEEP_INLINE void panel_group_max(std::int64_t width, const float* x, std::int64_t slots, std::int64_t heads,
                                   std::int64_t queries, std::int64_t stride, bool first, float* largest, float* top) {
  KVKEEP_DISPATCH(PanelGroupMax)(width, x, slots, heads, queries, stride, first, largest, top);
}

KVKEEP_INLINE void panel_weigh(std::int64_t width, const float* x, std::int64_t slots, const float* weight,
                               float* usage) {
  KVKEEP_DISPATCH(PanelWeigh)(width, x, slots, weight, usage);
}

KVKEEP_INLINE void panel_gather(std::int64_t width, const float* x, std::int64_t slots, const float* weight,
                                float* out) {
  KVKEEP_DISPATCH(PanelGather)(width, x, slots, weight, out);
}

KVKEEP_INLINE void fold_lanes(std::int64_t width, const float* usage, std::int64_t slots, float* out) {
  KVKEEP_DISPATCH(FoldLanes)(width, usage, slots, out);
}

KVKEEP_INLINE void add_scaled(float* to, const float* from, float a, std::int64_t n) {
  KVKEEP_DISPATCH(AddScaled)(to, from, a, n);
}

KVKEEP_INLINE void widen(const void* from, Dtype dtype, std::int64_t n, float* to) {
  KVKEEP_DISPATCH(WidenAny)(from, dtype, n, to);
}

KVKEEP_INLINE void panel_sizes(const float* x, std::int64_t slots, float* sums) {
  KVKEEP_DISPATCH(PanelSizes)(x, slots, sums);
}

}  // namespace kvkeep::cpu
#endif

#endif
