// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One row through AMS, from the usage of its slots to segments with quotas: the code that the CPU runs with one thread
/// per row and CUDA with one block per row.

#include <cmath>
#include <cstdint>

#include "kvkeep/allot/mass.h"
#include "kvkeep/allot/quotas.h"
#include "kvkeep/allot/segments.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/score/pool.h"

namespace kvkeep {

class Fields;

struct MassSegmentedOptions {
  std::int32_t window = 32;  ///< queries whose attention makes up the mass
  Segmentation segments = Segmentation::mass;
  std::int32_t fixed = 128;         ///< slots per segment, `Segmentation::fixed` only
  double segment_mass = 0.02;       ///< target mass of a segment, (0, 1]; at least kLeastSegmentMass is used
  std::int32_t min_segment = 32;    ///< slots
  std::int32_t max_segment = 1024;  ///< slots, at least 2 * min_segment
  std::int32_t min_quota = 8;       ///< slots that every segment may keep, as far as the budget allows
  QuotaWeight quotas = QuotaWeight::mass;
  bool credit = true;
  double credit_decay = 0.8;  ///< weight of the old credit, [0, 1)
  double credit_mix = 0.7;    ///< weight of this event's mass, [0, 1]
  std::int32_t pool = 5;      ///< odd; 1 or less: no pooling
  SuffixFill suffix_fill = SuffixFill::max_head;
  bool protected_mass = true;  ///< mass of protected slots counts where segments are cut and quotas poured; they stay
                               ///< whatever the quotas are, so without it only slots that compete say where
  double coverage = 1.0;       ///< share of the budget above the protected slots that goes through segments, [0, 1]
  bool coverage_auto = false;  ///< instead: exactly what the segments' floors take, so that `min_quota` slots of every
                               ///< segment stay and the rest is top-k

  void describe(Fields& f);
};

/// Added to every usage before it is normalised, so that an all-zero row becomes uniform.
inline constexpr double kMassEpsilon = 1e-12;

/// Upper bound on the number of segments of a row of `length` slots.
KVKEEP_HD inline std::int32_t most_segments(const MassSegmentedOptions& options, std::int32_t length) {
  if (length <= 0) return 0;
  if (options.segments == Segmentation::none) return 1;
  if (options.segments == Segmentation::fixed) return (length - 1) / options.fixed + 1;
  const std::int64_t most = detail::thresholds(options.segment_mass) + 1 + length / options.max_segment;
  return most < length ? static_cast<std::int32_t>(most) : length;
}

/// Pools the history of `usage` in place. Returns its own_largest(). `scratch`: [history], used only for pooling.
template <class Team>
KVKEEP_HD float pool_history(const MassSegmentedOptions& options, float* usage, std::int32_t history, float* scratch,
                             Team team) {
  if (options.pool <= 1) return own_largest(usage, history, team);
  float own = 0;
  for (std::int32_t t = team.thread(); t < history; t += team.size()) scratch[t] = usage[t];
  team.sync();
  for (std::int32_t t = team.thread(); t < history; t += team.size()) {
    usage[t] = pooled_average(scratch, history, options.pool, t);
    own = usable(usage[t]) > own ? usable(usage[t]) : own;
  }
  team.sync();
  return own;
}

/// Fills in the usage of the suffix. `newest`: position of the newest query; `top`: the largest pooled usage in the
/// history of the row or of all heads in its group.
template <class Team>
KVKEEP_HD void fill_suffix(SuffixFill fill, const std::int32_t* positions, std::int32_t length, std::int32_t newest,
                           std::int32_t history, float top, float* usage, Team team) {
  for (std::int32_t t = history + team.thread(); t < length; t += team.size()) {
    if (fill == SuffixFill::exclude)
      usage[t] = 0;
    else if (fill != SuffixFill::causal_mean || positions[t] >= newest)
      usage[t] = top;
  }
  team.sync();
}

/// Turns usage into mass in place and writes what segments follow to `used`, which may be `usage`. If `credit` is not
/// null, it receives the new credit, computed from `old` ([known] oldest slots; may be `credit`), and `used` is the
/// mixture; otherwise `used` is the mass. `fed`: scratch [length], only for raw mass.
template <class Team>
KVKEEP_HD void weigh_row(const MassSegmentedOptions& options, const float* old, std::int32_t known, std::int32_t length,
                         float* usage, float* fed, float* credit, float* used, Team team) {
  const bool raw = options.quotas == QuotaWeight::raw_mass && credit != nullptr;
  if (raw)
    for (std::int32_t t = team.thread(); t < length; t += team.size())
      fed[t] = (usage[t] > 0 ? usage[t] : 0.0F) + static_cast<float>(kMassEpsilon);
  team.sync();
  normalise_mass(usage, length, kMassEpsilon, team);
  if (credit == nullptr) {
    if (used != usage)
      for (std::int32_t t = team.thread(); t < length; t += team.size()) used[t] = usage[t];
    team.sync();
    return;
  }
  if (old == nullptr || known > length) known = 0;
  for (std::int32_t t = team.thread(); old != credit && t < known; t += team.size()) credit[t] = old[t];
  team.sync();
  update_credit(raw ? fed : usage, length, known, {options.credit_decay, options.credit_mix}, kMassEpsilon, raw, credit,
                used, team);
}

/// A row that is not due: no mass, and its credit as it was, 0 for slots that came since. `used` may be `usage`;
/// `credit` may be null.
template <class Team>
KVKEEP_HD void pass_row(const float* old, std::int32_t known, std::int32_t length, float* usage, float* credit,
                        float* used, Team team) {
  if (old == nullptr || known > length) known = 0;
  for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    usage[t] = used[t] = 0;
    if (credit != nullptr) credit[t] = t < known ? old[t] : 0.0F;
  }
}

/// How the options cut a row.
KVKEEP_HD inline SegmentOptions segments_of(const MassSegmentedOptions& options, Variant variant) {
  return {variant, options.segments, options.fixed, options.segment_mass, options.min_segment, options.max_segment};
}

/// Slots whose mass does not count where segments are cut and quotas poured.
KVKEEP_HD inline Protected left_out(const MassSegmentedOptions& options, const Protected& guarded) {
  return options.protected_mass ? Protected{} : guarded;
}

/// Segment i as a share of the budget: its weight, length and protected slots.
KVKEEP_HD inline Share segment_share(QuotaWeight quotas, const std::uint64_t* prefix, const std::int32_t* ends,
                                     std::int32_t i, std::int32_t length, const Protected& guarded) {
  const std::int32_t start = i > 0 ? ends[i - 1] : 0, end = ends[i];
  const std::uint64_t before = start > 0 ? prefix[start - 1] : 0, total = prefix[length - 1];
  const double mass = total > 0 ? static_cast<double>(prefix[end - 1] - before) / static_cast<double>(total) : 0.0;
  const auto inside = [start, end](std::int32_t t) { return t < start ? start : t > end ? end : t; };
  const std::int32_t guarded_slots =
      inside(guarded.sinks) - start + end - inside(length - guarded.recents) + guarded.pinned_in({start, end});
  const double weight = quotas == QuotaWeight::equal    ? 1.0
                        : quotas == QuotaWeight::length ? static_cast<double>(end - start)
                                                        : mass;
  return {weight, end - start, guarded_slots < end - start ? guarded_slots : end - start, 0, 0};
}

/// Slots of the budget that go through segments: the protected ones and `coverage` of the rest, or just the segments'
/// floors.
KVKEEP_HD inline std::int32_t covered(const MassSegmentedOptions& options, const Share* shares, std::int32_t count,
                                      std::int32_t budget, const Protected& guarded) {
  if (!options.coverage_auto)
    return guarded.count() +
           static_cast<std::int32_t>(std::floor(product<double>(options.coverage, budget - guarded.count()) + 0.5));
  std::int64_t floors = 0;
  for (std::int32_t i = 0; i < count; ++i) floors += detail::floor_of(shares[i], options.min_quota);
  return floors < budget ? static_cast<std::int32_t>(floors) : budget;
}

/// floor(share * budget), the share rounded to millionths, so that 0.3 of 10 is 3 on every machine.
KVKEEP_HD inline std::int32_t share_of(double share, std::int32_t budget) {
  constexpr std::int64_t kParts = 1'000'000;
  return static_cast<std::int32_t>(static_cast<std::int64_t>(llround(share * static_cast<double>(kParts))) * budget /
                                   kParts);
}

}  // namespace kvkeep
