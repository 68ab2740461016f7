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

/// Number of members i that come before segment `of`: those with a larger value; among equal values, those with a lower
/// index.
template <class Member, class Value>
KVKEEP_HD std::int32_t rank_of(std::int32_t of, std::int32_t count, const Member& member, const Value& value) {
  const float mine = value(of);
  std::int32_t before = 0;
  for (std::int32_t i = 0; i < count; ++i)
    if (member(i) && (value(i) > mine || (value(i) == mine && i < of))) ++before;
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
    for (std::int32_t i = 0; i < count; ++i) next += need(i) > rounds ? 1 : 0;
    if (next > left || next == given) {
      left -= static_cast<std::int32_t>(given);
      break;
    }
    given = next;
  }
  for (std::int32_t i = team.thread(); i < count; i += team.size()) {
    const auto wants = [&](std::int32_t n) { return need(n) > rounds; };
    const bool last =
        wants(i) && rank_of(i, count, wants, [&](std::int32_t n) { return static_cast<float>(s[n].mass); }) < left;
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
  std::int32_t left = budget;
  std::int64_t wanting = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    left -= s[i].protect;
    wanting += detail::floor_of(s[i], min_quota) - s[i].protect;
  }
  if (wanting > left) return detail::pour_floors(s, count, left, min_quota, team);
  for (std::int32_t i = team.thread(); i < count; i += team.size()) s[i].quota = detail::floor_of(s[i], min_quota);
  team.sync();
  left -= static_cast<std::int32_t>(wanting);
  const auto open = [&](std::int32_t i) { return s[i].quota < s[i].length; };
  while (left > 0) {
    double active = 0;
    std::int32_t opened = 0;
    for (std::int32_t i = 0; i < count; ++i)
      if (open(i)) {
        active += s[i].mass;
        ++opened;
      }
    team.sync();
    for (std::int32_t i = team.thread(); i < count; i += team.size()) {
      s[i].part = active > 0 ? left * (s[i].mass / active) : static_cast<double>(left) / opened;
      s[i].more = open(i) && s[i].quota + s[i].part >= s[i].length ? s[i].length - s[i].quota : 0;
    }
    team.sync();
    std::int32_t filled = 0, units = left;
    for (std::int32_t i = 0; i < count; ++i) {
      filled += s[i].more;
      if (open(i)) units -= static_cast<std::int32_t>(std::floor(s[i].part));
    }
    team.sync();
    if (filled == 0) {  // no segment fills up: whole parts first, then the largest fractional parts
      const auto fraction = [&](std::int32_t i) { return static_cast<float>(s[i].part - std::floor(s[i].part)); };
      for (std::int32_t i = team.thread(); i < count; i += team.size())
        if (open(i))
          s[i].more = static_cast<std::int32_t>(std::floor(s[i].part)) +
                      (detail::rank_of(i, count, open, fraction) < units ? 1 : 0);
      team.sync();
      filled = left;
    }
    for (std::int32_t i = team.thread(); i < count; i += team.size()) s[i].quota += s[i].more;
    team.sync();
    left -= filled;
  }
}

/// The published quotas. Falls back to `strict_quotas` when the published loop would never end: more segments than
/// budget, each with a floor of at least one. Requires: budget <= sum of length. Runs on one thread.
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
