// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Prompts side by side, as the kernels that rank and narrow take them.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "oracle/random_case.h"
#include "ranks.h"

namespace kvkeep::cuda {

/// Prompts whose scores, ranks and lists lie one behind the other, with `gap` elements of nobody's between them.
struct RankedPrompts {
  explicit RankedPrompts(const std::vector<std::int32_t>& ranked, std::int64_t gap = 0) {
    for (const std::int32_t n : ranked) {
      prompts.push_back({.scores = elements,
                         .ranks = elements,
                         .kept = elements,
                         .ranked = n,
                         .state = static_cast<std::int32_t>(prompts.size())});
      elements += n + gap;
    }
    for (RankedPrompt& prompt : prompts) prompt.stride = elements;
  }
  std::vector<RankedPrompt> prompts;
  std::int64_t elements = 0;
};

/// Scores with the troubles that scores have: few values, NaN, infinities, zeros of both signs, a wide range.
inline std::vector<float> troubled_scores(oracle::Random& random, std::int32_t length) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kMost = std::numeric_limits<float>::infinity();
  std::vector<float> scores(static_cast<std::size_t>(length));
  const int kind = random.between(0, 5);
  for (float& s : scores) {
    if (kind == 0)
      s = static_cast<float>(random.normal());
    else if (kind == 1)
      s = static_cast<float>(random.between(0, 2));
    else if (kind == 2)
      s = 0.5F;
    else if (kind == 3)
      s = random.one_of({kNan, -kNan, kMost, -kMost, 0.0F, -0.0F, 1.0F, -1.0F});
    else if (kind == 4)
      s = static_cast<float>(random.unit()) * 1e-30F;
    else
      s = std::ldexp(static_cast<float>(random.normal()), random.between(-140, 100));
  }
  return scores;
}

}  // namespace kvkeep::cuda
