// SPDX-License-Identifier: Apache-2.0
// Plans: only the newest one of a keeper moves anything on a device, a keeper applies none but its own on either
// machine, and no two keepers share an accelerator.

#include "device.h"
#include "engines.h"
#include "fresh_accelerator.h"

namespace kvkeep::cuda::plans_test {
namespace {

using testing::Array;
using namespace engines;

const char* const kPolicy = "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16";

/// Two sequences of one engine, both due.
class TwoDue {
 public:
  explicit TwoDue(const std::shared_ptr<Machine>& accelerator, std::uint64_t seed = 31)
      : engine(kPolicy, false, Dtype::f32, accelerator) {
    oracle::Random random(seed);
    engine.join(1);
    engine.join(2);
    static_cast<void>(engine.step(numbers_of(random, {{1, 50}, {2, 50}})));
    engine.feed(numbers_of(random, {{1, 12}, {2, 12}}));
  }
  [[nodiscard]] CacheView view_of(std::size_t i) {
    return {.sequences = std::span(ids_).subspan(i, 1),
            .lengths = {std::span(lengths_).subspan(i, 1), 1},
            .places = std::span(places_).subspan(i, 1)};
  }
  [[nodiscard]] Plan plan(std::size_t i) { return engine.keeper.plan(view_of(i)); }
  Report apply(const Plan& plan, std::size_t i) {
    const CacheView view = view_of(i);
    const Report report = engine.keeper.apply(plan, view);
    for (std::int32_t& length : engine.lengths.at(ids_[i])) length = view.lengths.at(0, 0);
    return report;
  }
  [[nodiscard]] std::vector<Array> bytes() const {
    std::vector<Array> all;
    for (const LayerKv& layer : engine.layers)
      for (const Tensor& side : {std::get<DenseKv>(layer).keys, std::get<DenseKv>(layer).values})
        all.push_back(Array(side).clone());
    return all;
  }

  DenseEngine engine;

 private:
  std::vector<SequenceId> ids_{1, 2};
  Ints lengths_{62, 62}, places_{1, 2};
};

template <class Body>
std::string refusal(Body&& body) {
  try {
    static_cast<void>(body());
  } catch (const StateError& error) {
    return error.what();
  }
  return "";
}

void expect_same(const std::vector<Array>& before, const std::vector<Array>& after) {
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(same_bits(before[i], after[i])) << "K or V number " << i << " moved";
}

using DevicePlans = OnDevice;

TEST_F(DevicePlans, ThatALaterOneReplacedAreRefusedBeforeAByteMoves) {
  TwoDue cpu(nullptr), device(fresh_accelerator());
  const Plan first = device.plan(0), second = device.plan(1);
  ASSERT_EQ(first.cuts.size(), 1U);
  ASSERT_EQ(second.cuts.size(), 1U);
  const std::vector<Array> before = device.bytes();
  EXPECT_NE(refusal([&] { return device.apply(first, 0); }).find("allowed the newest plan"), std::string::npos);
  expect_same(before, device.bytes());
  EXPECT_EQ(device.engine.keeper.physical_length(1, 0, 0), 62);
  EXPECT_EQ(device.engine.keeper.totals().events, 0);
  for (const std::size_t i : {1, 0}) {
    EXPECT_EQ(device.apply(i == 1 ? second : device.plan(i), i).cuts.size(), 1U);
    EXPECT_EQ(cpu.apply(cpu.plan(i), i).cuts.size(), 1U);
  }
  expect_alike(cpu.engine, device.engine);
}

TEST_F(DevicePlans, WhoseMemoryWasTakenAwayAreRefused) {
  const std::shared_ptr<Machine> accelerator = fresh_accelerator();
  TwoDue device(accelerator);
  const Plan plan = device.plan(0);
  const Array memory = Array::empty({1 << 22}, Dtype::u8, accelerator->device());
  accelerator->use_workspace(
      memory.narrow(0, (256 - reinterpret_cast<std::intptr_t>(memory.bytes()) % 256) % 256, (1 << 22) - 256));
  const std::vector<Array> before = device.bytes();
  EXPECT_NE(refusal([&] { return device.apply(plan, 0); }).find("use_workspace()"), std::string::npos);
  expect_same(before, device.bytes());
}

TEST_F(DevicePlans, StandThoughAViewIsMeasuredAndAStepWithoutAnEventComesBetween) {
  TwoDue cpu(nullptr), device(fresh_accelerator());
  const Plan plan = device.plan(0);
  EXPECT_GT(device.engine.workspace_bytes({1, 2}), 0);
  device.engine.join(3);
  cpu.engine.join(3);
  const std::vector<SequenceId> ids{3};
  Ints lengths{0}, places{3};
  EXPECT_TRUE(device.engine.keeper.plan({ids, {lengths, 1}, places}).cuts.empty());
  EXPECT_EQ(device.apply(plan, 0).cuts.size(), 1U);
  EXPECT_EQ(cpu.apply(cpu.plan(0), 0).cuts.size(), 1U);
  expect_alike(cpu.engine, device.engine);
}

TEST_F(DevicePlans, OfAnotherKeeperAreRefusedBeforeAByteMoves) {
  TwoDue one(fresh_accelerator()), other(fresh_accelerator(), 32);
  const Plan own = one.plan(0), foreign = other.plan(0);
  EXPECT_EQ(own.version, foreign.version) << "else this would be no test";
  const std::vector<Array> before = one.bytes();
  EXPECT_NE(refusal([&] { return one.apply(foreign, 0); }).find("not from this keeper"), std::string::npos);
  expect_same(before, one.bytes());
  EXPECT_EQ(one.apply(own, 0).cuts.size(), 1U);
}

TEST_F(DevicePlans, OfTwoKeepersNeverMeetForAnAcceleratorServesOne) {
  const std::shared_ptr<Machine> accelerator = fresh_accelerator();
  EXPECT_THROW(Keeper(engines::model(), make_policy("ams-tova,budget=48,rest=fold"), {.accelerator = accelerator}),
               InvalidArgument);
  {
    const Keeper first(engines::model(), make_policy("knorm,budget=48,interval=12"), {.accelerator = accelerator});
    EXPECT_NE(refusal([&] {
                return Keeper(engines::model(), make_policy("knorm,budget=48,interval=12"),
                              {.accelerator = accelerator});
              }).find("one accelerator per keeper"),
              std::string::npos);
  }
  // Constants of the first are known by addresses that another keeper may get now.
  EXPECT_NE(refusal([&] {
              return Keeper(engines::model(), make_policy("knorm,budget=48,interval=12"), {.accelerator = accelerator});
            }).find("or served one before"),
            std::string::npos);
}

}  // namespace
}  // namespace kvkeep::cuda::plans_test
