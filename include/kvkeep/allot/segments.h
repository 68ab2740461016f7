#pragma once
/// Segments: stretches of the cache that hold about equal mass. Source: AMS, Algorithm 1.
/// Differs: cuts fall after the slot that crosses the threshold, short pieces merge before long ones are split, so every length bound holds
/// (`Variant::strict`); `official` repeats the published code.

#include <cmath>
#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/variant.h"

namespace kvkeep {

enum class Segmentation : std::uint8_t {
  mass,   ///< about `segment_mass` each, within [min_segment, max_segment] slots
  fixed,  ///< every `fixed` slots
  none,   ///< one segment: top-k over the row
};

struct SegmentOptions {
  Variant variant = Variant::strict;
  Segmentation kind = Segmentation::mass;
  std::int32_t fixed = 128;        ///< slots, `fixed` only
  double segment_mass = 0.02;      ///< in (0, 1]
  std::int32_t min_segment = 32;   ///< slots
  std::int32_t max_segment = 1024; ///< slots, at least 2 * min_segment
};

/// Mass as integers, summed: prefix[t] is the scaled mass of slots 0..t. Sums of integers do not depend on their order, so CPU and CUDA cut at
/// the same slots. The largest mass maps to 2^52 or, for long rows, to what keeps the total below 2^63. Order: any; rows up to 2^30 slots.
KVKEEP_HD inline void prefix_mass(const float* mass, std::int32_t length, std::uint64_t* prefix) {
  const float top = [&] {
    float best = 0;
    for (std::int32_t t = 0; t < length; ++t) best = mass[t] > best ? mass[t] : best;
    return best;
  }();
  int bits = 62;
  for (std::int32_t n = length; n > 0; n >>= 1) --bits;
  if (bits > 52) bits = 52;
  const double scale = static_cast<double>(std::uint64_t{1} << bits);
  std::uint64_t sum = 0;
  for (std::int32_t t = 0; t < length; ++t) {
    if (top > 0 && mass[t] > 0) sum += static_cast<std::uint64_t>(static_cast<double>(mass[t]) / static_cast<double>(top) * scale);
    prefix[t] = sum;
  }
}

namespace detail {

/// Keeps cut positions ascending and inside (0, length); returns their new count.
KVKEEP_HD inline std::int32_t cut_by_mass(const std::uint64_t* prefix, std::int32_t length, const SegmentOptions& options, std::int32_t* cuts) {
  const auto total = static_cast<double>(prefix[length - 1]);
  const auto thresholds = static_cast<std::int64_t>(std::ceil((1.0 - options.segment_mass) / options.segment_mass - 1e-9));
  const bool strict = options.variant == Variant::strict;
  std::int32_t count = 0;
  std::int32_t t = 0;
  for (std::int64_t k = 1; k <= thresholds; ++k) {
    const double threshold = static_cast<double>(k) * options.segment_mass * total;
    while (t < length - 1 && static_cast<double>(prefix[t]) < threshold) ++t;
    std::int32_t cut = strict ? t + 1 : t;
    if (!strict && cut < 1) cut = 1;
    if (cut >= length) break;
    if (count == 0 || cuts[count - 1] != cut) cuts[count++] = cut;
  }
  return count;
}

/// Absorbs intervals shorter than `least` into what follows; with `tail`, a short last one into its predecessor. In place.
KVKEEP_HD inline std::int32_t merge_short(std::int32_t* ends, std::int32_t count, std::int32_t least, bool tail) {
  std::int32_t out = 0, start = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    if (ends[i] - start < least && i + 1 < count) continue;
    ends[out++] = ends[i];
    start = ends[i];
  }
  if (tail && out >= 2 && ends[out - 1] - ends[out - 2] < least) {
    ends[out - 2] = ends[out - 1];
    --out;
  }
  return out;
}

/// Cuts intervals longer than `most` into near-equal pieces (`equal`) or into pieces of exactly `most` and a remainder. `from` and `to` differ.
KVKEEP_HD inline std::int32_t split_long(const std::int32_t* from, std::int32_t count, std::int32_t most, bool equal, std::int32_t* to) {
  std::int32_t out = 0, start = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t length = from[i] - start;
    const std::int32_t pieces = (length + most - 1) / most;
    for (std::int32_t j = 1; j < pieces; ++j)
      to[out++] = start + (equal ? static_cast<std::int32_t>(static_cast<std::int64_t>(length) * j / pieces) : j * most);
    to[out++] = from[i];
    start = from[i];
  }
  return out;
}

}  // namespace detail

/// Writes one past each segment's last slot to `ends` (ascending, the last is `length`) and returns their number.
/// Requires: length >= 1; `ends` and `scratch` hold `length` entries. Strict lengths lie in [min((min_segment, (max_segment + 1) / 2), max_segment],
/// except a single segment of a shorter row. Cost: O(length + 1 / segment_mass).
KVKEEP_HD inline std::int32_t segment_ends(const std::uint64_t* prefix, std::int32_t length, const SegmentOptions& options, std::int32_t* ends,
                                           std::int32_t* scratch) {
  if (options.kind == Segmentation::none) {
    ends[0] = length;
    return 1;
  }
  if (options.kind == Segmentation::fixed) {
    const std::int32_t whole = length;
    return detail::split_long(&whole, 1, options.fixed, false, ends);
  }
  const bool strict = options.variant == Variant::strict;
  std::int32_t count = detail::cut_by_mass(prefix, length, options, strict ? scratch : ends);
  std::int32_t* cuts = strict ? scratch : ends;
  cuts[count++] = length;
  if (strict) {
    count = detail::merge_short(cuts, count, options.min_segment, true);
    return detail::split_long(cuts, count, options.max_segment, true, ends);
  }
  count = detail::split_long(cuts, count, options.max_segment, false, scratch);
  count = detail::merge_short(scratch, count, options.min_segment, false);
  for (std::int32_t i = 0; i < count; ++i) ends[i] = scratch[i];
  return count;
}

}  // namespace kvkeep
