#pragma once
/// Names for messages: all that are known, and the one that somebody may have meant.

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "kvkeep/core/text.h"

namespace kvkeep {

/// Letters to insert, remove or replace, or neighbours to swap, to make one name of the other. Only the first 64 bytes
/// count. Cost: the product of their lengths.
[[nodiscard]] inline std::size_t edit_distance(std::string_view one, std::string_view other) {
  constexpr std::size_t kLongest = 64;
  one = one.substr(0, kLongest);
  other = other.substr(0, kLongest);
  std::array<std::array<std::size_t, kLongest + 1>, 3> rows{};  // of the last three letters of `one`
  for (std::size_t j = 0; j <= other.size(); ++j) rows[0][j] = j;
  for (std::size_t i = 1; i <= one.size(); ++i) {
    auto &row = rows[i % 3], &above = rows[(i + 2) % 3], &before = rows[(i + 1) % 3];
    row[0] = i;
    for (std::size_t j = 1; j <= other.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (one[i - 1] == other[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return rows[one.size() % 3][other.size()];
}

/// "budget, ratio, bytes": what `name` is of each of `known`.
template <class Known, class Name = std::identity>
[[nodiscard]] std::string joined(const Known& known, Name name = {}) {
  std::string all;
  for (const auto& one : known) (all += all.empty() ? "" : ", ") += std::invoke(name, one);
  return all;
}

/// The name of one of `known` that is nearest to `given`, as in ` (did you mean "budget"?)`; empty if more than a third
/// of its letters differ. "memory.rest" is also called "rest".
template <class Known, class Name = std::identity>
[[nodiscard]] std::string did_you_mean(std::string_view given, const Known& known, Name name_of = {}) {
  std::size_t least = std::max<std::size_t>(1, given.size() / 3) + 1;
  std::string_view nearest;
  for (const auto& one : known) {
    const std::string_view name = std::invoke(name_of, one),
                           last = name.substr(name.rfind('.') + 1);  // all of it without a dot
    const std::size_t distance = std::min(edit_distance(given, name), edit_distance(given, last));
    if (distance < std::exchange(least, std::min(least, distance))) nearest = name;
  }
  return nearest.empty() ? "" : text(" (did you mean \"", nearest, "\"?)");
}

}  // namespace kvkeep
