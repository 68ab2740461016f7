// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Confidence intervals for shares of right answers, and for means.

#include <cstdint>
#include <span>
#include <vector>

#include "kvlab/ratio.h"

namespace kvkeep::report {

struct Interval {
  double low = 0, high = 0;  ///< NaN if there is none
};

/// Answers of one sample. They are not independent: they share a prompt and a cache.
struct Answers {
  std::int64_t right = 0, asked = 0;
};

/// Samples by task. Resampled within each task, because the tasks are not a random draw.
using Strata = std::span<const std::vector<Answers>>;

/// The same for means: each sample with its own sum, and the number of values in it.
using RatioStrata = std::span<const std::vector<Ratio>>;

struct Bootstrap {
  std::int32_t resamples = 1000;
  std::uint64_t seed = 1;
  double confidence = 0.95;
};

/// right / asked over all strata; NaN if nothing was asked.
[[nodiscard]] double share(Strata samples);

/// Sum of parts / sum of wholes over all strata: a sample with many values weighs more than one with few. NaN if there
/// are none.
[[nodiscard]] double mean(RatioStrata samples);

/// Wilson's score interval at 95 %: right for independent answers, too narrow for answers that share a sample.
[[nodiscard]] Interval wilson(std::int64_t right, std::int64_t asked);

/// Percentile bootstrap of share() or mean() over whole samples: how far another draw of samples could differ.
/// Deterministic: the same seed and samples give the same interval on every platform. No interval if every stratum has
/// fewer than two samples. If every sample has the same value, the interval has no width: for shares of 0 or 1,
/// Wilson's interval then says more. Cost: O(resamples * samples).
[[nodiscard]] Interval bootstrap(Strata samples, const Bootstrap& options = {});
[[nodiscard]] Interval bootstrap(RatioStrata samples, const Bootstrap& options = {});

/// The same for share(a) - share(b) or mean(a) - mean(b), where sample i of a and of b are one sample: both are drawn
/// together, so their common variation cancels. Throws InvalidArgument if the strata differ in size.
[[nodiscard]] Interval bootstrap_difference(Strata a, Strata b, const Bootstrap& options = {});
[[nodiscard]] Interval bootstrap_difference(RatioStrata a, RatioStrata b, const Bootstrap& options = {});

}  // namespace kvkeep::report

#ifdef KVKEEP_HEADER_ONLY
#include "kvlab/intervals-inl.h"
#endif
