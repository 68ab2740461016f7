// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Quotas: how many slots each segment may keep. Source: AMS, section "quotas".
/// Differs (`strict`): protected slots are reserved inside the quotas, floors are honoured heaviest first, and the rest
/// is poured by mass with largest remainders, so the sum is the budget and no trimming follows. `official` rounds and
/// then corrects round-robin.

#include <cmath>
#include <cstdint>

#include "kvkeep/allot/segments.h"
#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// What a segment's share of the budget is proportional to.
enum class QuotaWeight : std::uint8_t {
  mass,      ///< its mass
  equal,     ///< nothing: all shares are equal
  length,    ///< its slots
  raw_mass,  ///< its usage before normalisation: the published "no mass" ablation
};

/// One segment while its quota is computed.
struct Share {
  double mass;           ///< weight, not negative
  std::int32_t length;   ///< slots
  std::int32_t protect;  ///< protected slots inside
  std::int32_t quota;    ///< result
  std::int32_t more;     ///< scratch: slots it is about to get
  double part = 0;       ///< scratch: its part of the slots that are left
};

namespace detail {

KVKEEP_HD inline std::int32_t floor_of(const Share& s, std::int32_t min_quota) {
  const std::int32_t least = min_quota < s.length ? min_quota : s.length;
  return s.protect > least ? s.protect : least;
}

/// Number of segments that come before segment `of`: those with a larger value; among equal values, those with a lower
/// index.
template <class Value>
KVKEEP_HD std::int32_t rank_of(std::int32_t of, std::int32_t count, const Value& value) {
  const double mine = value(of);
  std::int32_t before = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const double other = value(i);
    before += other > mine || (other == mine && i < of) ? 1 : 0;
  }
  return before;
}

/// For floors that do not fit: each round gives one slot to every segment below its floor, heaviest first (mass rounded
/// to fp32; ties: the lower index), until `left` is used up.
template <class Team>
KVKEEP_HD void pour_floors(Share* s, std::int32_t count, std::int32_t left, std::int32_t min_quota, Team team) {
  const auto need = [&](std::int32_t i) { return floor_of(s[i], min_quota) - s[i].protect; };
  std::int32_t rounds = 0;
  for (std::int64_t given = 0;; ++rounds) {  // whole rounds that fit
    std::int64_t next = given;
    KVKEEP_UNROLL(1) for (std::int32_t i = 0; i < count; ++i) next += need(i) > rounds ? 1 : 0;
    if (next > left || next == given) {
      left -= static_cast<std::int32_t>(given);
      break;
    }
    given = next;
  }
  KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) {
    const auto value = [&](std::int32_t n) { return need(n) > rounds ? static_cast<float>(s[n].mass) : -1.0F; };
    const bool last = need(i) > rounds && rank_of(i, count, value) < left;
    s[i].quota = s[i].protect + (need(i) < rounds ? need(i) : rounds) + (last ? 1 : 0);
  }
  team.sync();
}

}  // namespace detail

/// Strict quotas: the sum is `budget`, protect <= quota <= length, and quota >= max(protect, min(min_quota, length))
/// whenever those floors fit. Requires: sum of protect <= budget <= sum of length. Cost: O(segments) per round of
/// filling up, O(segments^2) comparisons for remainders.
template <class Team = OneThread>
KVKEEP_HD void strict_quotas(Share* s, std::int32_t count, std::int32_t budget, std::int32_t min_quota,
                             Team team = {}) {
  const auto each = [&](const auto& body) {
    KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) body(s[i]);
  };
  const auto sum_of = [&](const auto& number) {  // sums of slots, which are no more than the row's
    std::int32_t mine = 0;
    each([&](const Share& share) { mine += number(share); });
    return static_cast<std::int32_t>(team.sum(static_cast<std::uint32_t>(mine)));
  };
  std::int32_t left = budget - sum_of([](const Share& x) { return x.protect; });
  const std::int32_t wanting = sum_of([&](const Share& x) { return detail::floor_of(x, min_quota) - x.protect; });
  if (wanting > left) return detail::pour_floors(s, count, left, min_quota, team);
  each([&](Share& x) { x.quota = detail::floor_of(x, min_quota); });
  left -= wanting;
  const auto open = [](const Share& x) { return x.quota < x.length; };
  while (left > 0) {
    each([&](Share& x) { x.part = open(x) ? x.mass : 0.0; });
    team.sync();
    double active = 0;
    for (std::int32_t i = 0; i < count; ++i) active += s[i].part;  // every member: in this order
    team.sync();
    const double opened =
        active > 0 ? 1.0 : static_cast<double>(sum_of([&](const Share& x) { return open(x) ? 1 : 0; }));
    each([&](Share& x) {
      x.part = active > 0 ? left * (x.mass / active) : left / opened;
      x.more = open(x) && x.quota + x.part >= x.length ? x.length - x.quota : 0;
    });
    std::int32_t filled = sum_of([](const Share& x) { return x.more; });
    if (filled == 0) {  // no segment fills up: whole parts first, then the largest fractional parts
      each([&](Share& x) {
        const double whole = std::floor(x.part);
        x.more = open(x) ? static_cast<std::int32_t>(whole) : 0;
        x.part = open(x) ? static_cast<double>(static_cast<float>(x.part - whole)) : -1.0;
      });
      const std::int32_t units = left - sum_of([](const Share& x) { return x.more; });
      team.sync();
      KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) {
        if (open(s[i]) && detail::rank_of(i, count, [&](std::int32_t n) { return s[n].part; }) < units) ++s[i].more;
      }
      filled = left;
    }
    each([](Share& x) { x.quota += x.more; });
    left -= filled;
    team.sync();
  }
  team.sync();
}

/// Whether the published loop would never end: more segments than budget, each with a floor of at least one.
/// Published quotas are then strict ones.
KVKEEP_HD inline bool never_fits(std::int32_t count, std::int32_t budget, std::int32_t min_quota) {
  return count > budget && min_quota >= 1;
}

/// The published quotas, where they are not never_fits(). Runs on one thread.
KVKEEP_HD inline void published_quotas(Share* s, std::int32_t count, std::int32_t budget, std::int32_t min_quota) {
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

/// The published quotas, or strict ones where they are never_fits(). Requires: budget <= sum of length.
KVKEEP_HD inline void official_quotas(Share* s, std::int32_t count, std::int32_t budget, std::int32_t min_quota) {
  never_fits(count, budget, min_quota) ? strict_quotas(s, count, budget, min_quota)
                                       : published_quotas(s, count, budget, min_quota);
}

}  // namespace kvkeep
