// SPDX-License-Identifier: Apache-2.0
// The policy of CONTRIBUTING.md, which the library does not have: added from outside. tests/cuda/keeper_test.cpp runs
// it on a device.

#include "tapering.h"

#include <gtest/gtest.h>

#include "engines.h"
#include "kvkeep/kvkeep.h"

namespace kvkeep::tapering_test {
namespace {

[[maybe_unused]] const bool added = (register_policy(tapering()), true);

TEST(Tapering, CutsDeeperOnceATextIsLong) {
  engines::DenseEngine engine("tapering,budget=24,late=16,length=60,interval=8", false, Dtype::f32);
  oracle::Random random(3);
  engine.join(0);
  static_cast<void>(engine.step(engines::numbers_of(random, {{0, 30}})));
  std::vector<std::int32_t> lengths;
  for (int n = 0; n < 50; ++n)
    for (const Cut& cut : engine.step(engines::numbers_of(random, {{0, 1}})).cuts) {
      EXPECT_EQ(cut.length_before, 32);
      lengths.push_back(cut.length_after);
    }
  EXPECT_EQ(lengths, (std::vector<std::int32_t>{24, 24, 24, 24, 16, 16}));
}

TEST(Tapering, IsReadFromItsOwnJson) {
  const std::string json = make_policy("tapering,budget=64,late=32")->to_json();
  EXPECT_EQ(make_policy_from_json(json)->to_json(), json);
  EXPECT_THROW(static_cast<void>(make_policy("tapering,late=5")), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::tapering_test
