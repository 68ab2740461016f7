// SPDX-License-Identifier: Apache-2.0
// Bodies of similar_lanes.h, once per instruction set.

#if defined(KVKEEP_SIMILAR_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_SIMILAR_LANES_INL_H
#undef KVKEEP_SIMILAR_LANES_INL_H
#else
#define KVKEEP_SIMILAR_LANES_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvkeep/core/hd.h"
#include "kvkeep/simd/coarse_lanes.h"
#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/similar_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::similar_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using P = hn::CappedTag<float, 16>;
using Lane = hn::Vec<P>;

inline constexpr std::int64_t kRows = kCoarseRows;  ///< keys compared with a panel at a time: twelve sums in registers
inline constexpr std::int64_t kWidest = kCoarseWidth;  ///< keys in a panel

KVKEEP_INLINE std::int64_t SimilarWidth() { return 2 * static_cast<std::int64_t>(hn::Lanes(P())); }

HWY_INLINE std::uint32_t BitsOf(hn::Mask<P> mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(P(), mask, bytes);
  return static_cast<std::uint32_t>(bytes[0]) | static_cast<std::uint32_t>(bytes[1]) << 8;
}

/// Keys side by side, one per lane.
struct Panel {
  float* elements;  ///< [dim, width]
  float inverse[kWidest];
  std::int32_t key[kWidest];
};

/// Result of comparing six keys with a panel.
struct Verdict {
  std::uint32_t hits[kRows];               ///< a bit per lane above the threshold
  HWY_ALIGN float cosine[kRows][kWidest];  ///< set if hits is not 0
};

/// Compares six keys with a panel. `key`: f32 [dim] each.
HWY_INLINE void Hold(const float* const* HWY_RESTRICT key, const float* HWY_RESTRICT inverse, std::int64_t dim,
                     const Panel& panel, float threshold, Verdict& verdict) {
  const P d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Lane a0 = hn::Zero(d), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, e0 = a0, e1 = a0, f0 = a0, f1 = a0, g0 = a0,
       g1 = a0;
  const float *ka = key[0], *kb = key[1], *kc = key[2], *ke = key[3], *kf = key[4], *kg = key[5], *at = panel.elements;
  for (std::int64_t i = 0; i < dim; ++i, at += 2 * lanes) {
    const Lane q0 = hn::LoadU(d, at), q1 = hn::LoadU(d, at + lanes);
    Lane k = hn::Set(d, ka[i]);
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
  const Lane bound = hn::Set(d, threshold), left = hn::LoadU(d, panel.inverse),
             right = hn::LoadU(d, panel.inverse + lanes);
  const auto judge = [&](std::int64_t r, Lane x0, Lane x1) HWY_ATTR {
    const Lane mine = hn::Set(d, inverse[r]);
    x0 = hn::Mul(x0, hn::Mul(mine, left));
    x1 = hn::Mul(x1, hn::Mul(mine, right));
    const auto above0 = hn::Gt(x0, bound), above1 = hn::Gt(x1, bound);
    verdict.hits[r] = 0;
    if (hn::AllFalse(d, hn::Or(above0, above1))) return;
    verdict.hits[r] = BitsOf(above0) | BitsOf(above1) << lanes;
    hn::StoreU(x0, d, verdict.cosine[r]);
    hn::StoreU(x1, d, verdict.cosine[r] + lanes);
  };
  judge(0, a0, a1);
  judge(1, b0, b1);
  judge(2, c0, c1);
  judge(3, e0, e1);
  judge(4, f0, f1);
  judge(5, g0, g1);
}

/// Slack for the rounding of the exact cosine and of the coarse one.
inline constexpr float kRounding = 1e-4F;

/// A unit key in 8 bits: q = round(k / step) + 128. `reach` is 1 + |k - step (q - 128)|. Keys that never resemble any
/// (zero, not finite) get step 0, reach 0.
HWY_INLINE void Coarsen(const float* HWY_RESTRICT key, float inverse, std::int64_t dim,
                        std::uint8_t* HWY_RESTRICT coarse, float& step, float& reach) {
  const P d;
  const hn::Rebind<std::int8_t, P> d8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Lane top = hn::Zero(d);
  float rest = 0;
  std::int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) top = hn::Max(top, hn::Abs(hn::LoadU(d, key + i)));
  for (; i < dim; ++i) rest = std::max(rest, std::abs(key[i]));
  const float largest = std::max(rest, hn::GetLane(hn::MaxOfLanes(d, top)));
  std::memset(coarse, 128, static_cast<std::size_t>(coarse_dim(dim)));
  step = reach = 0;
  if (!(largest * inverse > 0) || !std::isfinite(largest)) return;
  const float scale = 127.0F / largest, back = largest / 127.0F;
  const Lane up = hn::Set(d, scale), down = hn::Set(d, back);
  Lane squares = hn::Zero(d);
  float square = 0;
  for (i = 0; i + lanes <= dim; i += lanes) {
    const Lane k = hn::LoadU(d, key + i);
    const auto q = hn::NearestInt(hn::Mul(k, up));
    const Lane left = hn::NegMulAdd(hn::ConvertTo(d, q), down, k);
    squares = hn::MulAdd(left, left, squares);
    hn::StoreU(hn::Xor(hn::DemoteTo(d8, q), hn::Set(d8, -128)), d8, reinterpret_cast<std::int8_t*>(coarse) + i);
  }
  for (; i < dim; ++i) {
    const float q = std::nearbyint(key[i] * scale), left = key[i] - product(q, back);
    square += product(left, left);
    coarse[i] = static_cast<std::uint8_t>(static_cast<int>(q) + 128);
  }
  square += hn::GetLane(hn::SumOfLanes(d, squares));
  step = back * inverse;
  reach = 1.0F + product(std::sqrt(square), inverse);
  if (!std::isfinite(step) || !std::isfinite(reach)) step = reach = 0;
}

/// The search over the keys of one row.
class Search {
 public:
  Search(const Keys& keys, std::int64_t n, const float* inverse, float threshold, const SimilarWork& work)
      : keys_(keys),
        n_(n),
        width_(SimilarWidth()),
        coarse_allowed_(width_ == kCoarseWidth && has_coarse_products()),
        inverse_(inverse),
        threshold_(threshold),
        work_(work) {
    panel_.elements = work.panel;
  }

  void Run() {
    std::fill_n(work_.matched, n_, std::uint8_t{0});
    std::fill_n(work_.spared, n_, 0.0);
    for (std::int64_t i = 0; i < n_; ++i) work_.open[open_++] = static_cast<std::int32_t>(i);
    for (std::int64_t first = (n_ - 1) / width_ * width_; first >= 0; first -= width_)
      LookAtPanel(first, std::min(width_, n_ - first));
    LookAtLate();
  }

 private:
  [[nodiscard]] std::uint32_t Lanes(std::int64_t count) const { return count >= 32 ? ~0U : (1U << count) - 1; }
  [[nodiscard]] bool Few(std::uint32_t lanes) const { return 4 * std::popcount(lanes) < width_; }

  void Match(std::int64_t i, std::int64_t partner, float cosine) {
    work_.matched[i] = 1;
    work_.spared[partner] += static_cast<double>(cosine);
  }

  void ClearPanel() {
    std::fill_n(panel_.elements, keys_.dim * width_, 0.0F);
    std::fill_n(panel_.inverse, kWidest, 0.0F);
    laid_ = 0;
    coarse_panel_ready_ = false;
  }

  void Lay(std::int64_t lane, std::int32_t key) {
    widen(keys_.slots.at(key), keys_.dtype, keys_.dim, work_.widened);
    for (std::int64_t d = 0; d < keys_.dim; ++d) panel_.elements[d * width_ + lane] = work_.widened[d];
    panel_.inverse[lane] = inverse_[key];
    panel_.key[lane] = key;
    laid_ = std::max(laid_, lane + 1);
  }

  void CoarsenAll() {
    if (coarse_) return;
    coarse_ = true;
    for (std::int64_t i = 0; i < n_; ++i) {
      const std::byte* at = keys_.slots.at(i);
      const float* key = reinterpret_cast<const float*>(at);
      if (keys_.dtype != Dtype::f32) {
        widen(at, keys_.dtype, keys_.dim, work_.widened);
        key = work_.widened;
      }
      Coarsen(key, inverse_[i], keys_.dim, work_.coarse + i * coarse_dim(keys_.dim), work_.step[i], work_.reach[i]);
    }
  }

  void LayCoarse() {
    CoarsenAll();
    const std::int64_t words = coarse_dim(keys_.dim) / 4;
    std::fill_n(work_.coarse_panel, words * width_, 0U);
    std::fill_n(lane_step_, kWidest, 0.0F);
    std::fill_n(lane_reach_, kWidest, 0.0F);
    std::fill_n(lane_start_, kWidest, 0);
    for (std::int64_t lane = 0; lane < laid_; ++lane) {
      const std::int64_t key = panel_.key[lane];
      const std::uint8_t* from = work_.coarse + key * words * 4;
      std::int32_t sum = 0;
      for (std::int64_t i = 0; i < words; ++i) {
        std::uint32_t word = 0;
        std::memcpy(&word, from + 4 * i, 4);
        work_.coarse_panel[i * width_ + lane] = word ^ 0x80808080U;
      }
      for (std::int64_t i = 0; i < 4 * words; ++i) sum += from[i];
      lane_start_[lane] = -128 * (sum - static_cast<std::int32_t>(4 * words) * 128);
      lane_step_[lane] = work_.step[key];
      lane_reach_[lane] = work_.reach[key];
    }
    coarse_panel_ready_ = true;
  }

  /// False if the coarse cosines and their bound rule out that any of count <= 6 keys resembles one of the panel's.
  bool MayHit(const std::int32_t* which, std::int64_t count, const std::uint32_t* ignore) {
    if (!coarse_panel_ready_) LayCoarse();
    const std::int64_t bytes = coarse_dim(keys_.dim);
    const std::uint8_t* rows[kRows];
    float step[kRows], reach[kRows];
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::int32_t i = which[std::min(r, count - 1)];
      rows[r] = work_.coarse + i * bytes;
      step[r] = work_.step[i];
      reach[r] = work_.reach[i];
    }
    // cosine <= coarse cosine + reach * reach - 1
    return coarse_may_hit(rows, step, reach, ignore,
                          {bytes / 4, work_.coarse_panel, lane_start_, lane_step_, lane_reach_},
                          threshold_ + 1.0F - kRounding);
  }

  /// Compares count <= 6 keys with the panel; `own`: they belong to the panel, and no key is compared with itself.
  void HoldKeys(const std::int32_t* which, std::int64_t count, bool own = false) {
    std::uint32_t ignore[kRows] = {};
    for (std::int64_t r = 0; own && r < kRows; ++r) ignore[r] = 1U << (which[std::min(r, count - 1)] - panel_.key[0]);
    if (coarse_allowed_ && quiet_ >= kQuiet && !MayHit(which, count, ignore)) {
      std::fill_n(verdict_.hits, kRows, 0U);
      return;
    }
    const float* key[kRows];
    float inverse[kRows];
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::int32_t i = which[std::min(r, count - 1)];
      const std::byte* at = keys_.slots.at(i);
      if (keys_.dtype == Dtype::f32) {
        key[r] = reinterpret_cast<const float*>(at);
      } else if (r < count) {
        widen(at, keys_.dtype, keys_.dim, work_.widened + r * keys_.dim);
        key[r] = work_.widened + r * keys_.dim;
      } else {
        key[r] = key[r - 1];
      }
      inverse[r] = inverse_[i];
    }
    Hold(key, inverse, keys_.dim, panel_, threshold_, verdict_);
    for (std::int64_t r = 0; r < kRows; ++r) verdict_.hits[r] &= ~ignore[r];
    const bool any = std::any_of(verdict_.hits, verdict_.hits + kRows, [](std::uint32_t hits) { return hits != 0; });
    quiet_ = any ? std::max(0, quiet_ - 4) : std::min(quiet_ + 1, 2 * kQuiet);
  }

  /// Key i, without a partner among newer panels, takes the newest of the hits.
  void MatchNewest(std::int32_t i, std::int64_t r, std::uint32_t hits) {
    if (hits == 0) return;
    const int lane = 31 - std::countl_zero(hits);
    Match(i, panel_.key[lane], verdict_.cosine[r][lane]);
  }

  /// The lanes of `lanes` that key i hits take it as their partner: keys come newest first.
  std::uint32_t MatchLanes(std::int32_t i, std::int64_t r, std::uint32_t lanes) {
    for (std::uint32_t hits = verdict_.hits[r] & lanes; hits != 0; hits &= hits - 1) {
      const int lane = std::countr_zero(hits);
      Match(panel_.key[lane], i, verdict_.cosine[r][lane]);
    }
    return lanes & ~verdict_.hits[r];
  }

  /// Keys [first, first + count) as a panel: finds partners among themselves, for older keys among them, and for them
  /// among older keys. Newer keys had their turn.
  void LookAtPanel(std::int64_t first, std::int64_t count) {
    open_ = std::remove_if(work_.open, work_.open + open_, [&](std::int32_t i) { return work_.matched[i] != 0; }) -
            work_.open;
    if (open_ == 0) return;
    ClearPanel();
    for (std::int64_t lane = 0; lane < count; ++lane) Lay(lane, static_cast<std::int32_t>(first + lane));

    std::int64_t own = open_;
    while (own > 0 && work_.open[own - 1] >= first) --own;
    for (std::int64_t o = own; o < open_; o += kRows) {
      const std::int64_t group = std::min(kRows, open_ - o);
      HoldKeys(work_.open + o, group, true);
      for (std::int64_t r = 0; r < group; ++r) MatchNewest(work_.open[o + r], r, verdict_.hits[r]);
    }
    std::uint32_t lonely = 0;
    for (std::int64_t o = own; o < open_; ++o)
      if (work_.matched[work_.open[o]] == 0) lonely |= 1U << (work_.open[o] - first);
    open_ = own;

    std::int64_t below = first;
    while (below > 0 && !Few(lonely)) {  // one product serves both: the older key, and the lanes without a partner
      std::int32_t which[kRows];
      const std::int64_t group = std::min(kRows, below);
      for (std::int64_t r = 0; r < group; ++r) which[r] = static_cast<std::int32_t>(below - 1 - r);
      HoldKeys(which, group);
      for (std::int64_t r = 0; r < group; ++r) {
        if (verdict_.hits[r] == 0) continue;
        if (work_.matched[which[r]] == 0) MatchNewest(which[r], r, verdict_.hits[r]);
        lonely = MatchLanes(which[r], r, lonely);
      }
      below -= group;
    }
    for (; below > 0 && lonely != 0; lonely &= lonely - 1) {
      work_.late[late_] = panel_.key[std::countr_zero(lonely)];
      work_.late_below[late_++] = static_cast<std::int32_t>(below);
    }
    for (std::int64_t o = std::lower_bound(work_.open, work_.open + open_, below) - work_.open; o > 0;) {
      const std::int64_t group = std::min(kRows, o);
      o -= group;
      HoldKeys(work_.open + o, group);
      for (std::int64_t r = 0; r < group; ++r) MatchNewest(work_.open[o + r], r, verdict_.hits[r]);
    }
  }

  /// Keys without a partner among newer ones, set aside before all older ones were compared: a panel of them at a time,
  /// older keys newest first.
  void LookAtLate() {
    for (std::int64_t begin = 0; begin < late_; begin += width_) {
      const std::int64_t count = std::min(width_, late_ - begin);
      ClearPanel();
      std::int32_t below = 0;
      for (std::int64_t lane = 0; lane < count; ++lane) {
        Lay(lane, work_.late[begin + lane]);
        below = std::max(below, work_.late_below[begin + lane]);
      }
      std::uint32_t lonely = Lanes(count);
      while (below > 0 && lonely != 0) {
        std::int32_t which[kRows];
        const std::int64_t group = std::min<std::int64_t>(kRows, below);
        for (std::int64_t r = 0; r < group; ++r) which[r] = static_cast<std::int32_t>(below - 1 - r);
        HoldKeys(which, group);
        for (std::int64_t r = 0; r < group; ++r) {
          if (verdict_.hits[r] == 0) continue;
          std::uint32_t may = 0;  // lanes not yet compared with this key
          for (std::int64_t lane = 0; lane < count; ++lane)
            may |= static_cast<std::uint32_t>(work_.late_below[begin + lane] > which[r]) << lane;
          const std::uint32_t left = MatchLanes(which[r], r, lonely & may);
          lonely = (lonely & ~may) | left;
        }
        below -= static_cast<std::int32_t>(group);
      }
    }
  }

  const Keys& keys_;
  std::int64_t n_, width_;
  bool coarse_allowed_;
  const float* inverse_;
  float threshold_;
  const SimilarWork& work_;
  Panel panel_;
  Verdict verdict_;
  std::int64_t open_ = 0, late_ = 0, laid_ = 0;
  static constexpr int kQuiet = 8;  ///< groups without a hit after which a coarse comparison comes first
  int quiet_ = 0;
  bool coarse_ = false, coarse_panel_ready_ = false;
  float lane_step_[kWidest], lane_reach_[kWidest];
  std::int32_t lane_start_[kWidest];
};

KVKEEP_INLINE void FindSimilar(const Keys& keys, std::int64_t n, const float* inverse, float threshold,
                               const SimilarWork& work) {
  Search(keys, n, inverse, threshold, work).Run();
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::similar_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using similar_lanes::FindSimilar;
using similar_lanes::SimilarWidth;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(SimilarWidth);
HWY_EXPORT(FindSimilar);
#endif

KVKEEP_INLINE std::int64_t similar_width() { return KVKEEP_DISPATCH(SimilarWidth)(); }

KVKEEP_INLINE void find_similar(const Keys& keys, std::int64_t n, const float* inverse, float threshold,
                                const SimilarWork& work) {
  if (n > 0) KVKEEP_DISPATCH(FindSimilar)(keys, n, inverse, threshold, work);
}

}  // namespace kvkeep::cpu
#endif

#endif
