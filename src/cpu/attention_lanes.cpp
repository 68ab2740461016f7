// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_lanes.h"
#include "exponential-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

std::int64_t PanelWidth() { return 2 * static_cast<std::int64_t>(hn::Lanes(D())); }

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

void WidenAny(const void* from, ScalarType dtype, std::int64_t n, float* to) {
  if (dtype == kFloat16) Widen(static_cast<const hwy::float16_t*>(from), n, to);
  else if (dtype == kBFloat16) Widen(static_cast<const hwy::bfloat16_t*>(from), n, to);
  else std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

/// Six keys against one panel: twelve sums in registers.
HWY_INLINE void SixKeys(const float* const* HWY_RESTRICT key, std::int64_t dim, const float* HWY_RESTRICT panel, float* HWY_RESTRICT out, V& top0, V& top1) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V a0 = hn::Zero(d), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, e0 = a0, e1 = a0, f0 = a0, f1 = a0, g0 = a0, g1 = a0;
  const float *ka = key[0], *kb = key[1], *kc = key[2], *ke = key[3], *kf = key[4], *kg = key[5];
  for (std::int64_t i = 0; i < dim; ++i, panel += 2 * lanes) {
    const V q0 = hn::LoadU(d, panel), q1 = hn::LoadU(d, panel + lanes);
    V k = hn::Set(d, ka[i]);
    a0 = hn::MulAdd(k, q0, a0);
    a1 = hn::MulAdd(k, q1, a1);
    k = hn::Set(d, kb[i]);
    b0 = hn::MulAdd(k, q0, b0);
    b1 = hn::MulAdd(k, q1, b1);
    k = hn::Set(d, kc[i]);
    c0 = hn::MulAdd(k, q0, c0);
    c1 = hn::MulAdd(k, q1, c1);
    k = hn::Set(d, ke[i]);
    e0 = hn::MulAdd(k, q0, e0);
    e1 = hn::MulAdd(k, q1, e1);
    k = hn::Set(d, kf[i]);
    f0 = hn::MulAdd(k, q0, f0);
    f1 = hn::MulAdd(k, q1, f1);
    k = hn::Set(d, kg[i]);
    g0 = hn::MulAdd(k, q0, g0);
    g1 = hn::MulAdd(k, q1, g1);
  }
  const auto put = [&](V x0, V x1) HWY_ATTR {
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
HWY_INLINE void OneKey(const float* HWY_RESTRICT key, std::int64_t dim, const float* HWY_RESTRICT panel, float* HWY_RESTRICT out, V& top0, V& top1) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V a0 = hn::Zero(d), a1 = a0;
  for (std::int64_t i = 0; i < dim; ++i, panel += 2 * lanes) {
    const V k = hn::Set(d, key[i]);
    a0 = hn::MulAdd(k, hn::LoadU(d, panel), a0);
    a1 = hn::MulAdd(k, hn::LoadU(d, panel + lanes), a1);
  }
  hn::StoreU(a0, d, out);
  hn::StoreU(a1, d, out + lanes);
  top0 = hn::Max(top0, a0);
  top1 = hn::Max(top1, a1);
}

void PanelLogits(const Keys& keys, std::int64_t from, std::int64_t to, const float* HWY_RESTRICT panels, std::int64_t count, std::int64_t panel_stride,
                 float* HWY_RESTRICT logits, float* HWY_RESTRICT top, float* HWY_RESTRICT widened) {
  constexpr std::int64_t kKeys = 6;
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), width = 2 * lanes;
  const float* key[kKeys];
  for (std::int64_t t = from; t < to;) {
    const std::int64_t n = std::min(kKeys, to - t);
    for (std::int64_t j = 0; j < n; ++j) {
      const std::byte* at = keys.slots.at(t + j);
      if (keys.dtype == kFloat32) {
        key[j] = reinterpret_cast<const float*>(at);
      } else {
        WidenAny(at, keys.dtype, keys.dim, widened + j * keys.dim);
        key[j] = widened + j * keys.dim;
      }
    }
    for (std::int64_t p = 0; p < count; ++p) {
      const float* panel = panels + p * keys.dim * width;
      float* out = logits + p * panel_stride + (t - from) * width;
      V top0 = hn::LoadU(d, top + p * width), top1 = hn::LoadU(d, top + p * width + lanes);
      if (n == kKeys) {
        SixKeys(key, keys.dim, panel, out, top0, top1);
      } else {
        for (std::int64_t j = 0; j < n; ++j) OneKey(key[j], keys.dim, panel, out + j * width, top0, top1);
      }
      hn::StoreU(top0, d, top + p * width);
      hn::StoreU(top1, d, top + p * width + lanes);
    }
    t += n;
  }
}

void PanelExp(float* HWY_RESTRICT x, std::int64_t slots, const float* HWY_RESTRICT top, float* HWY_RESTRICT sum) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V shift0 = hn::LoadU(d, top), shift1 = hn::LoadU(d, top + lanes);
  V sum0 = hn::Zero(d), sum1 = sum0;
  for (std::int64_t t = 0; t < slots; ++t, x += 2 * lanes) {
    const V e0 = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x), shift0));
    const V e1 = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x + lanes), shift1));
    hn::StoreU(e0, d, x);
    hn::StoreU(e1, d, x + lanes);
    sum0 = hn::Add(sum0, e0);
    sum1 = hn::Add(sum1, e1);
  }
  hn::StoreU(sum0, d, sum);
  hn::StoreU(sum1, d, sum + lanes);
}

void PanelGroupMax(const float* HWY_RESTRICT x, std::int64_t slots, std::int64_t heads, std::int64_t queries, std::int64_t stride, bool first,
                   float* HWY_RESTRICT largest, float* HWY_RESTRICT top) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), width = 2 * lanes;
  const auto used0 = hn::FirstN(d, static_cast<std::size_t>(std::min(queries, lanes)));
  const auto used1 = hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(queries - lanes, 0)));
  const V none = hn::Set(d, -std::numeric_limits<float>::infinity());
  V top0 = first ? none : hn::LoadU(d, top), top1 = first ? none : hn::LoadU(d, top + lanes);
  for (std::int64_t t = 0; t < slots; ++t, x += width, largest += width) {
    V best0 = first ? none : hn::LoadU(d, largest), best1 = first ? none : hn::LoadU(d, largest + lanes);
    for (std::int64_t h = 0; h < heads; ++h) {
      best0 = hn::Max(best0, hn::LoadU(d, x + h * stride));
      best1 = hn::Max(best1, hn::LoadU(d, x + h * stride + lanes));
    }
    best0 = hn::IfThenElseZero(used0, best0);  // the lanes behind hold another head's queries, or the next slot
    best1 = hn::IfThenElseZero(used1, best1);
    hn::StoreU(best0, d, largest);
    hn::StoreU(best1, d, largest + lanes);
    top0 = hn::Max(top0, best0);
    top1 = hn::Max(top1, best1);
  }
  hn::StoreU(top0, d, top);
  hn::StoreU(top1, d, top + lanes);
}

void PanelWeigh(const float* HWY_RESTRICT x, std::int64_t slots, const float* HWY_RESTRICT weight, float* HWY_RESTRICT usage) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V w0 = hn::LoadU(d, weight), w1 = hn::LoadU(d, weight + lanes);
  for (std::int64_t t = 0; t < slots; ++t, x += 2 * lanes, usage += lanes)
    hn::StoreU(hn::MulAdd(w1, hn::LoadU(d, x + lanes), hn::MulAdd(w0, hn::LoadU(d, x), hn::LoadU(d, usage))), d, usage);
}

void FoldLanes(const float* HWY_RESTRICT usage, std::int64_t slots, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < slots; ++t, usage += lanes) out[t] = hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, usage)));
}

void AddScaled(float* HWY_RESTRICT to, const float* HWY_RESTRICT from, float a, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V factor = hn::Set(d, a);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, from + i), hn::LoadU(d, to + i)), d, to + i);
  const hn::CappedTag<float, 1> one;
  for (; i < n; ++i) hn::StoreU(hn::MulAdd(hn::Set(one, a), hn::LoadU(one, from + i), hn::LoadU(one, to + i)), one, to + i);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(PanelWidth);
HWY_EXPORT(PanelLogits);
HWY_EXPORT(PanelExp);
HWY_EXPORT(PanelGroupMax);
HWY_EXPORT(PanelWeigh);
HWY_EXPORT(FoldLanes);
HWY_EXPORT(AddScaled);
HWY_EXPORT(WidenAny);

std::int64_t panel_width() { return HWY_DYNAMIC_DISPATCH(PanelWidth)(); }

void panel_logits(const Keys& keys, std::int64_t from, std::int64_t to, const float* panels, std::int64_t count, std::int64_t panel_stride, float* logits,
                  float* top, float* widened) {
  HWY_DYNAMIC_DISPATCH(PanelLogits)(keys, from, to, panels, count, panel_stride, logits, top, widened);
}

void panel_exp(float* x, std::int64_t slots, const float* top, float* sum) { HWY_DYNAMIC_DISPATCH(PanelExp)(x, slots, top, sum); }

void panel_group_max(const float* x, std::int64_t slots, std::int64_t heads, std::int64_t queries, std::int64_t stride, bool first, float* largest, float* top) {
  HWY_DYNAMIC_DISPATCH(PanelGroupMax)(x, slots, heads, queries, stride, first, largest, top);
}

void panel_weigh(const float* x, std::int64_t slots, const float* weight, float* usage) { HWY_DYNAMIC_DISPATCH(PanelWeigh)(x, slots, weight, usage); }

void fold_lanes(const float* usage, std::int64_t slots, float* out) { HWY_DYNAMIC_DISPATCH(FoldLanes)(usage, slots, out); }

void add_scaled(float* to, const float* from, float a, std::int64_t n) { HWY_DYNAMIC_DISPATCH(AddScaled)(to, from, a, n); }

void widen(const void* from, ScalarType dtype, std::int64_t n, float* to) { HWY_DYNAMIC_DISPATCH(WidenAny)(from, dtype, n, to); }

}  // namespace kvkeep::cpu
#endif
