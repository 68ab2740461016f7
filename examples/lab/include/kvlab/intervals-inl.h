// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of intervals.h: compiled by src/report, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvlab/intervals.h"

namespace kvkeep::report {
namespace intervals_detail {

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

/// splitmix64: the same numbers on every platform.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}
  std::size_t below(std::size_t n) {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return static_cast<std::size_t>((((z ^ (z >> 31)) >> 32) * n) >> 32);
  }

 private:
  std::uint64_t state_;
};

inline std::vector<std::vector<Ratio>> as_ratios(Strata samples) {
  std::vector<std::vector<Ratio>> all;
  for (const auto& stratum : samples) {
    all.emplace_back();
    for (const Answers& one : stratum)
      all.back().push_back({static_cast<double>(one.right), static_cast<double>(one.asked)});
  }
  return all;
}

/// The value below which `part` of the sorted values are, interpolated linearly between neighbours.
inline double quantile(const std::vector<double>& sorted, double part) {
  const double at = part * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at), high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + product(at - static_cast<double>(low), sorted[high] - sorted[low]);
}

inline bool can_vary(RatioStrata samples) {
  return std::any_of(samples.begin(), samples.end(), [](const auto& s) { return s.size() > 1; });
}

inline Interval percentile(std::vector<double> values, double confidence) {
  std::erase_if(values, [](double v) { return std::isnan(v); });
  if (values.empty()) return {kNone, kNone};
  std::sort(values.begin(), values.end());
  return {quantile(values, (1 - confidence) / 2), quantile(values, (1 + confidence) / 2)};
}

inline void check(const Bootstrap& options) {
  KVKEEP_REQUIRE(options.resamples >= 1, "bootstrap: resamples is ", options.resamples, "; allowed 1 or more");
  KVKEEP_REQUIRE(options.confidence > 0 && options.confidence < 1, "bootstrap: confidence is ", options.confidence,
                 "; allowed a number in (0, 1)");
}

}  // namespace intervals_detail

KVKEEP_INLINE double mean(RatioStrata samples) {
  Ratio sum;
  for (const auto& stratum : samples)
    for (const Ratio& one : stratum) sum.add(one);
  return sum.value();
}

KVKEEP_INLINE double share(Strata samples) { return mean(intervals_detail::as_ratios(samples)); }

KVKEEP_INLINE Interval wilson(std::int64_t right, std::int64_t asked) {
  if (asked == 0) return {intervals_detail::kNone, intervals_detail::kNone};
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(asked);
  const double p = static_cast<double>(right) / n;
  const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double reach = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {std::max(0.0, middle - reach), std::min(1.0, middle + reach)};
}

KVKEEP_INLINE Interval bootstrap(RatioStrata samples, const Bootstrap& options) {
  intervals_detail::check(options);
  if (!intervals_detail::can_vary(samples)) return {intervals_detail::kNone, intervals_detail::kNone};
  intervals_detail::Draw draw(options.seed);
  std::vector<double> values;
  for (std::int32_t i = 0; i < options.resamples; ++i) {
    Ratio sum;
    for (const auto& stratum : samples)
      for (std::size_t j = 0; j < stratum.size(); ++j) sum.add(stratum[draw.below(stratum.size())]);
    values.push_back(sum.value());
  }
  return intervals_detail::percentile(std::move(values), options.confidence);
}

KVKEEP_INLINE Interval bootstrap_difference(RatioStrata a, RatioStrata b, const Bootstrap& options) {
  intervals_detail::check(options);
  KVKEEP_REQUIRE(a.size() == b.size(), "bootstrap: ", a.size(), " strata against ", b.size(),
                 "; allowed the same number");
  for (std::size_t s = 0; s < a.size(); ++s)
    KVKEEP_REQUIRE(a[s].size() == b[s].size(), "bootstrap: stratum ", s, " has ", a[s].size(), " samples against ",
                   b[s].size(), "; allowed the same samples in both");
  if (!intervals_detail::can_vary(a)) return {intervals_detail::kNone, intervals_detail::kNone};
  intervals_detail::Draw draw(options.seed);
  std::vector<double> values;
  for (std::int32_t i = 0; i < options.resamples; ++i) {
    Ratio ours, theirs;
    for (std::size_t s = 0; s < a.size(); ++s)
      for (std::size_t j = 0; j < a[s].size(); ++j) {
        const std::size_t one = draw.below(a[s].size());
        ours.add(a[s][one]);
        theirs.add(b[s][one]);
      }
    values.push_back(ours.value() - theirs.value());
  }
  return intervals_detail::percentile(std::move(values), options.confidence);
}

KVKEEP_INLINE Interval bootstrap(Strata samples, const Bootstrap& options) {
  return bootstrap(intervals_detail::as_ratios(samples), options);
}

KVKEEP_INLINE Interval bootstrap_difference(Strata a, Strata b, const Bootstrap& options) {
  return bootstrap_difference(intervals_detail::as_ratios(a), intervals_detail::as_ratios(b), options);
}

}  // namespace kvkeep::report
