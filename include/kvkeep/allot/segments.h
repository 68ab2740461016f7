// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Segments: stretches of the cache that hold about equal mass. Source: AMS, Algorithm 1.
/// Differs: cuts fall after the slot that crosses the threshold, and short pieces merge before long ones are split, so
/// every length bound holds (`Variant::strict`); `official` repeats the published code.

#include <cmath>
#include <cstdint>

#include "kvkeep/allot/mass.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/score/window.h"

namespace kvkeep {

enum class Segmentation : std::uint8_t {
  mass,   ///< about `segment_mass` each, within [min_segment, max_segment] slots
  fixed,  ///< every `fixed` slots
  none,   ///< one segment: top-k over the row
};

struct SegmentOptions {
  Variant variant = Variant::strict;
  Segmentation kind = Segmentation::mass;
  std::int32_t fixed = 128;         ///< slots, `fixed` only
  double segment_mass = 0.02;       ///< in (0, 1]; at least kLeastSegmentMass is used
  std::int32_t min_segment = 32;    ///< slots
  std::int32_t max_segment = 1024;  ///< slots, at least 2 * min_segment
};

/// Shares of a row's mass below this one cannot be told apart: integer mass has 52 bits, and thresholds are counted
/// exactly in a double.
inline constexpr double kLeastSegmentMass = 0x1p-52;

/// Writes number(0) + ... + number(t) to prefix[t], for all t of [0, length). A block has its own.
template <class Team, class Number>
KVKEEP_HD void prefix_sums(Team team, std::int32_t length, const Number& number, std::uint64_t* prefix) {
  std::uint64_t before = 0;
  for (std::int32_t first = 0; first < length; first += team.size()) {
    const std::int32_t t = first + team.thread();
    const std::uint64_t mine = t < length ? number(t) : 0, through = before + team.sum_before(mine) + mine;
    if (t < length) prefix[t] = through;
    before += team.sum(mine);
  }
  team.sync();
}

/// Prefix sums of the integer mass: prefix[t] covers slots 0..t, less those in `left_out`. The order of summation does
/// not matter.
template <class Team = OneThread>
KVKEEP_HD void prefix_mass(const float* mass, std::int32_t length, std::uint64_t* prefix, Team team = {},
                           const Protected& left_out = {}) {
  const std::int32_t begin = left_out.sinks, end = length - left_out.recents;
  std::int32_t from = begin;
  float top = 0;
  for (std::int32_t i = 0; i < left_out.ranges; from = left_out.pins[i].to, ++i) {
    const float before = largest(mass + from, left_out.pins[i].from - from, team);
    top = before > top ? before : top;
  }
  const float last = largest(mass + from, end - from, team);
  const IntegerMass integers(last > top ? last : top, length);
  prefix_sums(
      team, length,
      [&](std::int32_t t) { return t >= begin && t < end && !left_out.pins_slot(t) ? integers(mass[t]) : 0; }, prefix);
}

namespace detail {

KVKEEP_HD inline double step_of(double segment_mass) {
  return segment_mass < kLeastSegmentMass ? kLeastSegmentMass : segment_mass;
}

/// Number of thresholds between segments of about `segment_mass`.
KVKEEP_HD inline std::int64_t thresholds(double segment_mass) {
  const double step = step_of(segment_mass);
  return static_cast<std::int64_t>(std::ceil((1.0 - step) / step - 1e-9));
}

/// The k-th threshold, k from 1, in units of the integer mass whose sum is `total`.
KVKEEP_HD inline double threshold(double segment_mass, std::int64_t k, std::uint64_t total) {
  return static_cast<double>(k) * step_of(segment_mass) * static_cast<double>(total);
}

/// Where the k-th threshold cuts, k from 1: after the first slot at which the mass so far reaches it (`official`:
/// before that slot).
KVKEEP_HD inline std::int32_t cut_at(const std::uint64_t* prefix, std::int32_t length, const SegmentOptions& options,
                                     std::int64_t k) {
  const double wanted = threshold(options.segment_mass, k, prefix[length - 1]);
  const std::int32_t reached =
      partition_point(0, length - 1, [&](std::int32_t t) { return static_cast<double>(prefix[t]) < wanted; });
  if (options.variant == Variant::strict) return reached + 1;
  return reached < 1 ? 1 : reached;
}

/// The first threshold after k that does not cut at `cut`, as k does; one past the last if there is none. A slot with
/// many thresholds costs no more than any other.
KVKEEP_HD inline std::int64_t next_threshold(const std::uint64_t* prefix, std::int32_t length,
                                             const SegmentOptions& options, std::int64_t k, std::int32_t cut) {
  const std::int64_t past = thresholds(options.segment_mass) + 1;
  const std::uint64_t total = prefix[length - 1];
  const auto reached = static_cast<double>(prefix[options.variant == Variant::strict ? cut - 1 : cut]);
  const double estimate = std::floor(reached / (step_of(options.segment_mass) * static_cast<double>(total)));
  if (!(estimate < static_cast<double>(past))) return past;  // also when there is no mass
  // Due to rounding, the estimate can be off by a few.
  std::int64_t next = static_cast<std::int64_t>(estimate) > k ? static_cast<std::int64_t>(estimate) : k + 1;
  while (next > k + 1 && threshold(options.segment_mass, next - 1, total) > reached) --next;
  while (next < past && threshold(options.segment_mass, next, total) <= reached) ++next;
  return next;
}

/// Writes the cut positions, ascending and inside (0, length), to `cuts` and returns their number. Cost: one cut_at()
/// per cut.
KVKEEP_HD inline std::int32_t cut_by_mass(const std::uint64_t* prefix, std::int32_t length,
                                          const SegmentOptions& options, std::int32_t* cuts) {
  const std::int64_t most = thresholds(options.segment_mass);
  std::int32_t count = 0;
  for (std::int64_t k = 1; k <= most; k = next_threshold(prefix, length, options, k, cuts[count - 1])) {
    const std::int32_t cut = cut_at(prefix, length, options, k);
    if (cut >= length) break;
    cuts[count++] = cut;
  }
  return count;
}

/// The same, given cut_at() of all `count` thresholds: cuts ascend with them, so equal ones are neighbours. Each of
/// them once is what cut_by_mass() writes, since the next threshold that it asks for is the first to cut elsewhere.
template <class Team>
KVKEEP_HD std::int32_t distinct_cuts(const std::int32_t* cached, std::int64_t count, std::int32_t length,
                                     std::int32_t* cuts, Team team) {
  std::int32_t out = 0;
  KVKEEP_UNROLL(1) for (std::int64_t first = 0; first < count; first += team.size()) {
    const std::int64_t k = first + team.thread();
    const std::int32_t cut = k < count ? cached[k] : length;
    const bool is_new = cut < length && (k == 0 || cached[k - 1] != cut);
    const std::int32_t place = out + team.count_before(is_new);
    if (is_new) cuts[place] = cut;
    out += team.count(is_new);
  }
  team.sync();
  return out;
}

/// Merges intervals shorter than `least` into the next; with `last`, a short last one into the previous. In place.
template <class Team = OneThread>
KVKEEP_HD std::int32_t merge_short(std::int32_t* ends, std::int32_t count, std::int32_t least, bool last,
                                   Team team = {}) {
  std::int32_t out = 0, start = 0, next = team.thread() == 0 ? ends[0] : 0;
  for (std::int32_t i = 0; team.thread() == 0 && i < count; ++i) {
    const std::int32_t end = next;
    if (i + 1 < count) next = ends[i + 1];  // on its way while this one is looked at
    if (end - start < least && i + 1 < count) continue;
    if (last && i + 1 == count && out >= 1 && end - start < least) --out;
    ends[out++] = start = end;
  }
  team.sync();
  return team.from_first(out);
}

/// Cuts intervals longer than `most` into near-equal pieces (`equal`) or into pieces of exactly `most` and a remainder.
/// `from` and `to` must not be the same array.
template <class Team = OneThread>
KVKEEP_HD std::int32_t split_long(const std::int32_t* from, std::int32_t count, std::int32_t most, bool equal,
                                  std::int32_t* to, Team team = {}) {
  std::int32_t out = 0;
  KVKEEP_UNROLL(1) for (std::int32_t first = 0; first < count; first += team.size()) {
    const std::int32_t i = first + team.thread(), start = i > 0 && i < count ? from[i - 1] : 0,
                       length = i < count ? from[i] - start : 0;
    const std::uint32_t pieces = length > 0 ? (length - 1) / most + 1 : 0;
    const std::int32_t place = out + static_cast<std::int32_t>(team.sum_before(pieces));
    KVKEEP_UNROLL(1) for (std::int32_t j = 1; j < static_cast<std::int32_t>(pieces); ++j) {
      to[place + j - 1] =
          start + (equal ? static_cast<std::int32_t>(static_cast<std::int64_t>(length) * j / pieces) : j * most);
    }
    if (pieces > 0) to[place + static_cast<std::int32_t>(pieces) - 1] = from[i];
    out += static_cast<std::int32_t>(team.sum(pieces));
  }
  team.sync();
  return out;
}

}  // namespace detail

/// Writes one past each segment's last slot to `ends` (ascending, the last is `length`) and returns their number.
/// `write_cuts(cuts)` writes where thresholds cut, as detail::cut_by_mass() does, and returns how many. Requires:
/// `length` is at least 1; `ends` and `scratch` hold most_segments() entries, which never exceed it. Strict lengths are
/// in [min((min_segment, (max_segment + 1) / 2), max_segment], except a single segment of a shorter row.
template <class WriteCuts, class Team = OneThread>
KVKEEP_HD std::int32_t segment_ends(std::int32_t length, const SegmentOptions& options, const WriteCuts& write_cuts,
                                    std::int32_t* ends, std::int32_t* scratch, Team team = {}) {
  if (options.kind != Segmentation::mass) {
    const std::int32_t most = options.kind == Segmentation::fixed ? options.fixed : length,
                       count = (length - 1) / most + 1;
    KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) {
      ends[i] = i + 1 < count ? (i + 1) * most : length;
    }
    team.sync();
    return count;
  }
  const bool strict = options.variant == Variant::strict;
  std::int32_t* cuts = strict ? scratch : ends;
  std::int32_t count = write_cuts(cuts);
  if (team.thread() == 0) cuts[count] = length;
  team.sync();
  ++count;
  if (strict) {
    count = detail::merge_short(cuts, count, options.min_segment, true, team);
    return detail::split_long(cuts, count, options.max_segment, true, ends, team);
  }
  count = detail::split_long(cuts, count, options.max_segment, false, scratch, team);
  count = detail::merge_short(scratch, count, options.min_segment, false, team);
  KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) ends[i] = scratch[i];
  team.sync();
  return count;
}

/// The same, cut by one thread. Cost: O(cuts * log(length)), with at most as many cuts as slots, and at most 1 /
/// segment_mass.
KVKEEP_HD inline std::int32_t segment_ends(const std::uint64_t* prefix, std::int32_t length,
                                           const SegmentOptions& options, std::int32_t* ends, std::int32_t* scratch) {
  return segment_ends(
      length, options, [&](std::int32_t* cuts) { return detail::cut_by_mass(prefix, length, options, cuts); }, ends,
      scratch);
}

}  // namespace kvkeep
