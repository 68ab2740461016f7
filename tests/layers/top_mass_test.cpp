// SPDX-License-Identifier: Apache-2.0
// Per-head top-p caches against plain loops in double: what stays holds the asked mass, and no head keeps more than it
// must.

#include "arrays.h"
#include "kvkeep/layers/prompt_scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "prompts.h"

namespace kvkeep::top_mass_test {
namespace {

using namespace testing;

/// Mean share of every slot of a KV head.
std::vector<double> shares(const Prompts& prompts, std::size_t s, std::int32_t head, std::int32_t window) {
  std::vector<double> all;
  for (std::int32_t h = head * prompts.spec.group(); h < (head + 1) * prompts.spec.group(); ++h) {
    const std::vector<double> u = prompts.sums(s, h);
    all.resize(u.size());
    for (std::size_t t = 0; t < u.size(); ++t) all[t] += u[t] / (window * prompts.spec.group());
  }
  return all;
}

TEST(TopMass, KeepsTheFewestSlotsThatHoldTheAskedMassInEights) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 3})
    for (const std::int32_t kv_heads : {1, 2})
      for (const double mass : {0.05, 0.5, 0.85, 0.99, 1.0})
        for (const Variant variant : {Variant::strict, Variant::official}) {
          const std::vector<std::int32_t> lengths{100, 41, 7, 5};
          constexpr std::int32_t kWindow = 5;
          const Prompts prompts(group, kv_heads, 8, lengths, kWindow, ++seed);
          const RowTable table = prompts.table();
          const KeepSet keep =
              keep_top_mass(prompts.evidence(table), {.mass = mass, .window = kWindow, .variant = variant});
          for (std::size_t r = 0; r < table.rows.size(); ++r) {
            const std::size_t s = r / static_cast<std::size_t>(kv_heads);
            const std::vector<double> share = shares(prompts, s, table.rows[r].head, kWindow);
            std::vector<std::int32_t> order(share.size());
            std::iota(order.begin(), order.end(), 0);
            std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
              return share[static_cast<std::size_t>(a)] > share[static_cast<std::size_t>(b)];
            });
            std::size_t count = 0;
            for (double held = 0; count < order.size() && held < mass - 1e-6; ++count)
              held += share[static_cast<std::size_t>(order[count])];
            count = variant == Variant::official ? count / 8 * 8 : std::min(order.size(), (count + 7) / 8 * 8);
            std::vector<std::int32_t> want(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
            want.push_back(0);
            for (std::int32_t t = lengths[s] - kWindow; t < lengths[s]; ++t) want.push_back(t);
            std::sort(want.begin(), want.end());
            want.erase(std::unique(want.begin(), want.end()), want.end());
            const auto got = keep.row(r);
            if (mass < 1) {
              ASSERT_EQ(std::vector<std::int32_t>(got.begin(), got.end()), want) << "row " << r << ", mass " << mass;
            }  // at 1 it is rounding that says where all is held
            double held = 0;
            for (const std::int32_t t : got) held += share[static_cast<std::size_t>(t)];
            if (variant == Variant::strict) {
              EXPECT_GE(held, mass - 1e-5) << "row " << r;
            }
            EXPECT_EQ(got.front(), 0);
            EXPECT_EQ(got.back(), lengths[s] - 1);
          }
        }
}

TEST(TopMass, RanksNaNLastAndLetsItHoldNothing) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr std::int32_t kLength = 400;
  const Prompts prompts(1, 1, 4, {kLength}, 1, 1);
  const RowTable table = prompts.table();
  const Array sums = Array::full({kLength}, kNaN, Dtype::f32);
  float* of = sums.data<float>();
  for (std::int32_t t = 0; t < kLength; t += 20) of[t] = 0.05F;  // twenty numbers that hold everything
  const KeepSet keep = keep_top_mass(table, sums, {.mass = 0.75, .window = 1});
  std::vector<std::int32_t> want{0};
  for (std::int32_t t = 100; t < kLength; t += 20) want.push_back(t);
  want.insert(want.begin() + 1, 80);  // fifteen hold the mass, sixteen are the next eight
  want.push_back(kLength - 1);
  EXPECT_EQ(std::vector<std::int32_t>(keep.row(0).begin(), keep.row(0).end()), want);
  of[20] = kNaN;
  EXPECT_EQ(keep_top_mass(table, sums, {.mass = 1, .window = 1}).count(0), kLength)
      << "what is left does not hold the mass";
}

TEST(TopMass, RefusesWhatItCannotKeepBy) {
  const Prompts prompts(1, 1, 4, {12}, 3, 1);
  const RowTable table = prompts.table();
  for (const double mass : {0.0, -1.0, 1.01, std::nan("")})
    EXPECT_THROW(static_cast<void>(keep_top_mass(prompts.evidence(table), {.mass = mass, .window = 3})),
                 InvalidArgument);
  EXPECT_THROW(static_cast<void>(keep_top_mass(prompts.evidence(table), {.window = 4})), InvalidArgument)
      << "fewer queries than the window";
  EXPECT_THROW(static_cast<void>(keep_top_mass(prompts.evidence(table), {.window = 0})), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::top_mass_test
