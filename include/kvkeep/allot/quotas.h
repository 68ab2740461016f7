#pragma once
/// Quotas: how many slots each segment may keep. Source: AMS, section "quotas".
/// Differs (`strict`): protected slots are reserved inside the quotas, floors are honoured heaviest first, and the rest is poured by mass with
/// largest remainders, so the sum is the budget and no trimming follows. `official` rounds and then corrects round-robin.

#include <cmath>
#include <cstdint>

#include "kvkeep/allot/segments.h"
#include "kvkeep/core/hd.h"

namespace kvkeep {

/// What a segment's share of the budget is proportional to.
enum class QuotaWeight : std::uint8_t {
  mass,      ///< its mass
  equal,     ///< nothing: all alike
  length,    ///< its slots
  raw_mass,  ///< its usage before normalisation: the published "no mass" ablation
};

/// One segment while its quota is worked out.
struct Share {
  double mass;              ///< weight, not negative
  std::int32_t length;      ///< slots
  std::int32_t protect;     ///< protected slots inside
  std::int32_t quota;       ///< result
  bool remainder;           ///< scratch: takes one of the units left after whole parts
};

namespace detail {

KVKEEP_HD inline std::int32_t floor_of(const Share& s, std::int32_t min_quota) {
  const std::int32_t least = min_quota < s.length ? min_quota : s.length;
  return s.protect > least ? s.protect : least;
}

/// Heaviest segment (after rounding to fp32, lower index first) that is below its floor and lighter than, or as light and later than, `after`.
KVKEEP_HD inline std::int32_t next_below_floor(const Share* s, std::int32_t count, std::int32_t min_quota, std::int32_t after) {
  std::int32_t best = -1;
  for (std::int32_t i = 0; i < count; ++i) {
    if (s[i].quota >= floor_of(s[i], min_quota)) continue;
    const auto mass = static_cast<float>(s[i].mass);
    if (after >= 0) {
      const auto last = static_cast<float>(s[after].mass);
      if (mass > last || (mass == last && i <= after)) continue;
    }
    if (best < 0 || mass > static_cast<float>(s[best].mass)) best = i;
  }
  return best;
}

}  // namespace detail

/// Strict quotas: sum is `budget`, protect <= quota <= length, and quota >= max(protect, min(min_quota, length)) whenever those floors fit.
/// Requires: sum of protect <= budget <= sum of length. Cost: O(segments^2) at worst.
KVKEEP_HD inline void strict_quotas(Share* s, std::int32_t count, std::int32_t budget, std::int32_t min_quota) {
  std::int32_t left = budget;
  std::int64_t wanting = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    s[i].quota = s[i].protect;
    left -= s[i].protect;
    wanting += detail::floor_of(s[i], min_quota) - s[i].protect;
  }
  if (wanting <= left) {
    for (std::int32_t i = 0; i < count; ++i) s[i].quota = detail::floor_of(s[i], min_quota);
    left -= static_cast<std::int32_t>(wanting);
  } else {
    while (left > 0)
      for (std::int32_t i = detail::next_below_floor(s, count, min_quota, -1); left > 0 && i >= 0; i = detail::next_below_floor(s, count, min_quota, i)) {
        ++s[i].quota;
        --left;
      }
  }
  while (left > 0) {
    double active = 0;
    std::int32_t open = 0;
    for (std::int32_t i = 0; i < count; ++i)
      if (s[i].quota < s[i].length) {
        active += s[i].mass;
        ++open;
      }
    const auto share = [&](std::int32_t i) { return active > 0 ? left * (s[i].mass / active) : static_cast<double>(left) / open; };
    std::int32_t filled = 0;
    for (std::int32_t i = 0; i < count; ++i)
      if (s[i].quota < s[i].length && s[i].quota + share(i) >= s[i].length) filled += s[i].length - s[i].quota;
    if (filled > 0) {
      for (std::int32_t i = 0; i < count; ++i)
        if (s[i].quota < s[i].length && s[i].quota + share(i) >= s[i].length) s[i].quota = s[i].length;
      left -= filled;
      continue;
    }
    // No segment fills up: whole parts first, then the largest fractional parts.
    std::int32_t units = left;
    for (std::int32_t i = 0; i < count; ++i) {
      s[i].remainder = false;
      if (s[i].quota < s[i].length) units -= static_cast<std::int32_t>(std::floor(share(i)));
    }
    for (; units > 0; --units) {
      std::int32_t best = -1;
      float most = -1;
      for (std::int32_t i = 0; i < count; ++i) {
        if (s[i].remainder || s[i].quota >= s[i].length) continue;
        const auto fraction = static_cast<float>(share(i) - std::floor(share(i)));
        if (fraction > most) {
          most = fraction;
          best = i;
        }
      }
      s[best].remainder = true;
    }
    for (std::int32_t i = 0; i < count; ++i)
      if (s[i].quota < s[i].length) s[i].quota += static_cast<std::int32_t>(std::floor(share(i))) + (s[i].remainder ? 1 : 0);
    left = 0;
  }
}

/// The published quotas. Falls back to `strict_quotas` where the published loop never ends: more segments than budget, each with a floor of at least one.
/// Requires: budget <= sum of length.
KVKEEP_HD inline void official_quotas(Share* s, std::int32_t count, std::int32_t budget, std::int32_t min_quota) {
  if (count > budget && min_quota >= 1) return strict_quotas(s, count, budget, min_quota);
  const auto floor = [&](std::int32_t i) { return min_quota < s[i].length ? min_quota : s[i].length; };
  std::int64_t sum = 0;
  double mass = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    s[i].quota = floor(i);
    sum += s[i].quota;
    mass += s[i].mass;
  }
  if (sum >= budget) {
    for (std::int32_t i = 0; sum > budget; i = (i + 1) % count)
      if (s[i].quota > 1) {
        --s[i].quota;
        --sum;
      }
    return;
  }
  const auto rest = static_cast<double>(budget - sum);
  sum = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const double grown = s[i].quota + std::nearbyint(rest * s[i].mass / (mass + 1e-12));
    s[i].quota = grown < s[i].length ? static_cast<std::int32_t>(grown) : s[i].length;
    sum += s[i].quota;
  }
  for (std::int32_t i = 0; sum > budget; i = (i + 1) % count)
    if (s[i].quota > floor(i)) {
      --s[i].quota;
      --sum;
    }
  for (std::int32_t i = 0; sum < budget; i = (i + 1) % count)
    if (s[i].quota < s[i].length) {
      ++s[i].quota;
      ++sum;
    }
}

}  // namespace kvkeep
