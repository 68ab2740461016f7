// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Slots that one machine keeps and another does not, because their scores are as close as rounding.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace kvkeep::testing {

/// A slot of some row.
struct ScoredSlot {
  std::int32_t row = 0, position = 0;
  float score = 0;

  friend bool operator==(const ScoredSlot& a, const ScoredSlot& b) {
    return a.row == b.row && a.position == b.position;
  }
};

/// True if `a` and `b`, chosen from slots that compete, are as many, and those that only one holds come in pairs, one
/// of each, whose scores differ by no more than `tolerance` of the larger: then the cut lies between the two, that
/// close to both. NaN is close to NaN.
inline bool differ_by_near_ties(std::span<const ScoredSlot> a, std::span<const ScoredSlot> b, float tolerance) {
  const auto alone = [](std::span<const ScoredSlot> own, std::span<const ScoredSlot> other) {
    std::vector<float> scores;
    for (const ScoredSlot& slot : own)
      if (std::ranges::find(other, slot) == other.end()) scores.push_back(slot.score);
    std::ranges::sort(scores, [](float x, float y) { return std::isnan(y) ? !std::isnan(x) : x < y; });
    return scores;
  };
  const std::vector<float> of_a = alone(a, b), of_b = alone(b, a);
  return std::ranges::equal(of_a, of_b, [tolerance](float x, float y) {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
    return std::abs(x - y) <= tolerance * std::max(std::abs(x), std::abs(y));
  });
}

}  // namespace kvkeep::testing
