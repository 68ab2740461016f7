// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Sums with the whole that they are a part of.

#include <limits>

namespace kvkeep::report {

/// Part and whole, each summed over everything seen, so that ratios can be added. For an average, the whole counts 1
/// per value.
struct Ratio {
  double part = 0;
  double whole = 0;
  void add(double p, double w) {
    part += p;
    whole += w;
  }
  void add(const Ratio& other) { add(other.part, other.whole); }
  /// NaN while nothing was seen.
  [[nodiscard]] double value() const { return whole > 0 ? part / whole : std::numeric_limits<double>::quiet_NaN(); }
};

}  // namespace kvkeep::report
