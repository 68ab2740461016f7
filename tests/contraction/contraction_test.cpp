// SPDX-License-Identifier: Apache-2.0
// What kvkeep decides must not depend on whether a consumer's compiler may fuse a multiplication with an addition.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "bodies.h"

namespace kvkeep {
contraction::Divided divide(const contraction::Row& row);
contraction::Mixed mix(const std::vector<float>& x);
}  // namespace kvkeep
namespace kvkeep_native {
contraction::Divided divide(const contraction::Row& row);
contraction::Mixed mix(const std::vector<float>& x);
}  // namespace kvkeep_native

namespace {

bool has_fma() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") != 0;
#else
  return true;
#endif
}

/// A mass for which decay * old + (1 - decay) * mass lies so close to the middle between two floats that the last bit
/// of a double says to which it rounds.
float mass_near_a_tie(double decay, float old) {
  const double kept = decay * static_cast<double>(old);
  auto below = static_cast<float>(kept);
  float above = std::nextafter(below, std::numeric_limits<float>::infinity());
  if ((static_cast<double>(below) + static_cast<double>(above)) / 2 <= kept) {
    below = above;
    above = std::nextafter(below, std::numeric_limits<float>::infinity());
  }
  return static_cast<float>(((static_cast<double>(below) + static_cast<double>(above)) / 2 - kept) / (1 - decay));
}

contraction::Row random_row(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> unit(0, 1);
  const auto between = [&](std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(random);
  };
  contraction::Row row;
  const std::int32_t length = between(1, 700);
  row.decay = seed % 2 == 0 ? 0.8 : unit(random);
  row.mix = seed % 3 == 0 ? 0.7 : unit(random);
  row.segment_mass = seed % 5 == 0 ? 0.02 : 0.5 * unit(random) + 1e-3;
  row.coverage = seed % 4 == 0 ? unit(random) : 1;
  row.official = seed % 4 == 1;
  row.min_segment = between(1, 8);
  row.max_segment = row.min_segment * between(2, 40);
  row.min_quota = between(0, 4);
  row.budget = between(1, length);
  const std::int32_t known = between(0, length);
  for (std::int32_t t = 0; t < known; ++t) row.credit.push_back(static_cast<float>(unit(random) + 1e-3));
  for (std::int32_t t = 0; t < length; ++t)
    row.mass.push_back(t < known && t % 2 == 0 ? mass_near_a_tie(row.decay, row.credit[static_cast<std::size_t>(t)])
                                               : static_cast<float>(unit(random) / length));
  return row;
}

TEST(Contraction, ChangesNoBitOfWhatConsumersCompileFromTheHeaders) {
  if (!has_fma()) GTEST_SKIP() << "this CPU has no fused multiply-add";
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    const contraction::Row row = random_row(seed);
    const contraction::Divided plain = kvkeep::divide(row), native = kvkeep_native::divide(row);
    ASSERT_EQ(plain.credit, native.credit) << "seed " << seed;
    ASSERT_EQ(plain.used, native.used) << "seed " << seed;
    ASSERT_EQ(plain.ends, native.ends) << "seed " << seed;
    ASSERT_EQ(plain.quotas, native.quotas) << "seed " << seed;
  }
}

TEST(Contraction, ChangesNoBitOfTurnsAndShares) {
  if (!has_fma()) GTEST_SKIP() << "this CPU has no fused multiply-add";
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> numbers(-1, 1);
    std::vector<float> x(4 * (1 + seed % 67));
    for (float& one : x) one = numbers(random);
    ASSERT_EQ(kvkeep::mix(x), kvkeep_native::mix(x)) << "seed " << seed;
  }
}

}  // namespace
