#pragma once
/// Threads that work on one row together. One body serves both the CPU, where a team is one thread, and CUDA, where it
/// is a block or a warp.
///
/// Every member calls the same functions in the same order with the same arguments except `mine`. Work over n elements
/// is split by `for (i = thread(); i < n; i += size())`. Members see each other's writes after sync(). Sums are over
/// integers, so they do not depend on the order of addition; sum_in_order() alone is not.

#include <cstdint>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

struct OneThread {
  /// Number of this member, 0 to size() - 1.
  [[nodiscard]] KVKEEP_HD constexpr std::int32_t thread() const { return 0; }
  [[nodiscard]] KVKEEP_HD constexpr std::int32_t size() const { return 1; }
  KVKEEP_HD void sync() const {}
  /// Sum over all members, the same for each.
  [[nodiscard]] KVKEEP_HD std::uint64_t sum(std::uint64_t mine) const { return mine; }
  /// The same of numbers that round, in an order that depends on size() alone.
  [[nodiscard]] KVKEEP_HD double sum_in_order(double mine) const { return mine; }
  /// Largest over all members; NaN is ignored.
  [[nodiscard]] KVKEEP_HD float largest(float mine) const { return mine; }
  /// Sum over the members before this one.
  [[nodiscard]] KVKEEP_HD std::uint64_t sum_before(std::uint64_t mine) const { return mine - mine; }
};

}  // namespace kvkeep
