// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Usage mass: the share of the recent window's attention that each slot draws.
/// Source: AMS, section "mass"; our spec of it is docs/method/ams.md.

#include <cmath>
#include <cstdint>

#include "kvkeep/core/strict_math.h"
#include "kvkeep/score/pool.h"

namespace kvkeep {

/// Usage of the suffix (slots that some window query cannot see), since the window cuts off its own attention.
enum class SuffixFill : std::uint8_t {
  max_head,     ///< the largest usage of the row's history (default)
  max_global,   ///< the largest usage over all heads of the (layer, sequence), as the published code does
  causal_mean,  ///< mean over the strictly later window queries; the newest slot takes the row's maximum
  exclude,      ///< nothing: segments and quotas follow the history alone
};

/// Usage that can be weighed: NaN and negative values count as 0, infinity as the largest float.
KVKEEP_HD inline float usable(float u) {
  constexpr float kMost = 3.402823466e38F;
  return u > 0 ? (u < kMost ? u : kMost) : 0.0F;
}

/// x / divisor of many x, each rounded as a division rounds it.
class Quotient {
 public:
  KVKEEP_HD explicit Quotient(double divisor) : divisor_(divisor), inverse_(1.0 / divisor) {}
  [[nodiscard]] KVKEEP_HD double operator()(double x) const {
#if defined(__CUDA_ARCH__)
    return by_inverse(x);
#else
    return x / divisor_;
#endif
  }
  /// The same by multiplications, where a division takes a GPU forty instructions. Two corrections: the first is within
  /// one unit in the last place, the second then rounds right, since the inverse does (Markstein). Requires: nothing
  /// overflows or is denormal, as floats and sums of them do not in a double.
  [[nodiscard]] KVKEEP_HD double by_inverse(double x) const {
    double q = x * inverse_;
    q = std::fma(std::fma(-q, divisor_, x), inverse_, q);
    return std::fma(std::fma(-q, divisor_, x), inverse_, q);
  }

 private:
  double divisor_, inverse_;
};

/// Usage as integers: sums of integers do not depend on their order, so one thread and many weigh and cut a row alike.
/// The largest usage maps to 2^52 or, in long rows, to the value that keeps the row's total below 2^63. Rows have at
/// most 2^30 slots.
class IntegerMass {
 public:
  KVKEEP_HD IntegerMass(float top, std::int32_t length) : top_(top), share_(static_cast<double>(top)) {
    int bits = 62;
    for (std::int32_t n = length; n > 0; n >>= 1) --bits;
    unit_ = static_cast<double>(std::uint64_t{1} << (bits < 52 ? bits : 52));
  }
  [[nodiscard]] KVKEEP_HD std::uint64_t operator()(float u) const {
    return top_ > 0 ? static_cast<std::uint64_t>(share_(static_cast<double>(usable(u))) * unit_) : 0;
  }
  /// The usage that a sum of such integers represents.
  [[nodiscard]] KVKEEP_HD double value(std::uint64_t sum) const {
    return static_cast<double>(sum) / unit_ * static_cast<double>(top_);
  }

 private:
  float top_;
  Quotient share_;
  double unit_;
};

/// Largest usable number, at least 0, of those of x[0, n) that are this member's.
template <class Team>
KVKEEP_HD float own_largest(const float* x, std::int32_t n, Team team) {
  float best = 0;
  KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < n; t += team.size()) {
    best = usable(x[t]) > best ? usable(x[t]) : best;
  }
  return best;
}

/// Largest usable number of x[0, n), at least 0.
template <class Team = OneThread>
KVKEEP_HD float largest(const float* x, std::int32_t n, Team team = {}) {
  return team.largest(own_largest(x, n, team));
}

/// Sum of the usable numbers of x[0, n), exact to 2^-50 of the largest. `own`: own_largest().
template <class Team = OneThread>
KVKEEP_HD double total(const float* x, std::int32_t n, float own, Team team = {}) {
  const IntegerMass integers(team.largest(own), n);
  std::uint64_t sum = 0;
  KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < n; t += team.size()) sum += integers(x[t]);
  return integers.value(team.sum(sum));
}

/// Turns usage into mass in place: m = (max(u, 0) + eps) / sum. NaN counts as 0. `own`: own_largest().
template <class Team>
KVKEEP_HD void normalise_mass(float* u, std::int32_t length, double epsilon, float own, Team team) {
  const Quotient share(total(u, length, own, team) + product<double>(length, epsilon));
  KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    u[t] = static_cast<float>(share(static_cast<double>(usable(u[t])) + epsilon));
  }
  team.sync();
}
template <class Team = OneThread>
KVKEEP_HD void normalise_mass(float* u, std::int32_t length, double epsilon, Team team = {}) {
  normalise_mass(u, length, epsilon, own_largest(u, length, team), team);
}

// EMA credit: the mass that a slot drew at earlier events. Source: AMS, section "credit".

struct CreditOptions {
  double decay = 0.8;  ///< lambda in [0, 1): weight of the old credit
  double mix = 0.7;    ///< beta in [0, 1]: weight of this event's mass in the mixture
};

/// `credit` holds the old credit of the oldest `known` slots and is overwritten with decay * old + (1 - decay) * mass
/// for all `length` slots (slots past `known` enter with 0). `used` gets mix * mass + (1 - mix) * credit / sum(credit),
/// normalised. With `raw` (the published "no mass" ablation) `mass` is usage that was not normalised, and credit enters
/// the mixture without division by its sum. A `known` larger than `length` means that the credit belongs to another
/// sequence: it is ignored. fp32 storage, arithmetic in double.
template <class Team = OneThread>
KVKEEP_HD void update_credit(const float* mass, std::int32_t length, std::int32_t known, CreditOptions options,
                             double epsilon, bool raw, float* credit, float* used, Team team = {}) {
  if (known > length) known = 0;
  float own = 0;
  KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    const double old = t < known ? static_cast<double>(credit[t]) : 0.0;
    credit[t] =
        static_cast<float>(product(options.decay, old) + product(1.0 - options.decay, static_cast<double>(mass[t])));
    own = usable(credit[t]) > own ? usable(credit[t]) : own;
  }
  team.sync();
  const Quotient share(total(credit, length, own, team) + product<double>(length, epsilon));
  own = 0;
  KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    const double part = raw ? static_cast<double>(credit[t]) : share(static_cast<double>(usable(credit[t])) + epsilon);
    used[t] = static_cast<float>(product(options.mix, static_cast<double>(mass[t])) + product(1.0 - options.mix, part));
    own = usable(used[t]) > own ? usable(used[t]) : own;
  }
  team.sync();
  normalise_mass(used, length, epsilon, own, team);
}

}  // namespace kvkeep
