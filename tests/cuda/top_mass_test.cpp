// SPDX-License-Identifier: Apache-2.0
// Slots that hold a share of attention, on a GPU: the CPU's counts and slots, ties and NaN included.

#include "top_mass.h"

#include <cmath>

#include "counted_case.h"

namespace kvkeep::cuda::top_mass_test {
namespace {

using TopMassKernel = OnDevice;

/// The case's scores as sums of attention over a window: none is negative or infinite.
void make_sums(CountedCase& c, oracle::Random& random, std::int32_t window) {
  for (const Row& row : c.table.rows) {
    float* const sums = c.scores.data() + row.first;
    double all = 0;
    for (std::int32_t t = 0; t < row.length; ++t) {
      sums[t] = std::isinf(sums[t]) ? 0.5F : std::abs(sums[t]);
      if (random.chance(0.1)) sums[t] *= 30;
      all += std::isnan(sums[t]) ? 0 : static_cast<double>(sums[t]);
    }
    for (std::int32_t t = 0; t < row.length; ++t)
      if (all > 0 && sums[t] > 0) sums[t] = static_cast<float>(static_cast<double>(sums[t]) * window / all);
  }
}

void expect_as_on_cpu(const CountedCase& c, const TopMassOptions& options) {
  Tensor sums = empty({c.table.slots}, Dtype::f32);
  std::ranges::copy(c.scores, sums.data<float>());
  const KeepSet wanted = keep_top_mass(c.table, sums, options, &c.limits);
  std::vector<std::int32_t> lengths;
  for (const Row& row : c.table.rows) lengths.push_back(row.length);
  in_every_order([&] {
    const DeviceCounted there(c, lengths);
    launch_top_mass({there.as_allotted(c), options, there.counts.data()}, nullptr);
    ASSERT_NO_FATAL_FAILURE(there.expect_kept(wanted));
  });
}

TEST_F(TopMassKernel, KeepsTheSlotsThatTheCpuKeeps) {
  oracle::Random random(51);
  for (int round = 0; round < 120; ++round) {
    SCOPED_TRACE(round);
    CountedCase c(random, random.between(1, 3), random.between(0, 3), {0, 1, 2, 31, 33, 90, 256, 257});
    const TopMassOptions options{.mass = random.one_of({1e-9, 0.05, 0.5, 0.8, 0.99, 0.9999, 1.0}),
                                 .window = random.one_of({1, 6, 32}),
                                 .variant = random.one_of({Variant::strict, Variant::official})};
    make_sums(c, random, options.window);
    for (RowLimit& limit : c.limits.rows) limit.due = random.chance(0.8);
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, options));
  }
}

TEST_F(TopMassKernel, TakesARowThatNeedsTheLargestBlock) {
  oracle::Random random(52);
  for (const double mass : {0.3, 0.9}) {
    CountedCase c(random, 1, 3, {4097, 5003});
    make_sums(c, random, 32);
    for (RowLimit& limit : c.limits.rows) limit.due = true;
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, {.mass = mass, .window = 32}));
  }
}

TEST_F(TopMassKernel, RefusesSharesAndWindowsThatAreNone) {
  EXPECT_THROW(launch_top_mass({.options = {.mass = 0}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_top_mass({.options = {.mass = 1.5}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_top_mass({.options = {.window = 0}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::top_mass_test
