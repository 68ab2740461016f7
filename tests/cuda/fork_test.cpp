// SPDX-License-Identifier: Apache-2.0
// Forks and state in memory where the cache is on a device: no copy passes through the host.

#include "device.h"
#include "engines.h"
#include "forked.h"
#include "fresh_accelerator.h"
#include "kvkeep/keeper/copy_rows.h"
#include "message_of.h"

namespace kvkeep::cuda::fork_test {
namespace {

using namespace engines;
using testing::message_of;

class DeviceFork : public ::testing::TestWithParam<EngineCase> {
 protected:
  void SetUp() override {
    if (!has_machine()) GTEST_SKIP() << "no GPU here";
  }
  static std::unique_ptr<Engine> on_device(bool paged) {
    return engine_of(GetParam(), paged, PageLayout::slot_head, fresh_accelerator());
  }
};

TEST_P(DeviceFork, GoesOnAsItsParent) {
  for (const bool paged : {false, true}) {
    SCOPED_TRACE(paged ? "pages" : "dense");
    ASSERT_NO_FATAL_FAILURE(expect_forks_go_on(*on_device(paged)));
  }
}

TEST_P(DeviceFork, OfAPrefixScoresAsIfItHadRunIt) {
  for (const bool paged : {false, true}) {
    SCOPED_TRACE(paged ? "pages" : "dense");
    ASSERT_NO_FATAL_FAILURE(expect_prefix_hits_score_as_if_run(*on_device(paged)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, DeviceFork,
    ::testing::Values(EngineCase{"amstova",
                                 "ams-tova,credit=true,budget=32,interval=8,sink=2,recent=8,window=4,min_segment=2"},
                      EngineCase{"h2o", "h2o,budget=32,interval=8,sink=2,recent=8"},
                      EngineCase{"snapkv", "snapkv,budget=32,interval=8,sink=2,window=6"},
                      EngineCase{"given", "given,budget=32,interval=8,sink=2"},
                      EngineCase{"adakv", "adakv-snapkv,budget=32,interval=8,window=6", true}),
    [](const auto& p) { return std::string(p.param.name); });

TEST(DeviceCopyRows, BringsRowsToTheHostAndBack) {
  if (!has_machine()) GTEST_SKIP() << "no GPU here";
  const auto machine = fresh_accelerator();
  PagedEngine engine("tova,budget=20,interval=4", false, Dtype::f16, 4, PageLayout::head_slot, Form::apart, 1600,
                     machine);
  oracle::Random random(6);
  engine.join(3);
  for (int i = 0; i < 12; ++i) engine.step(numbers_of(random, {{3, 3}}));
  ASSERT_GT(engine.keeper.totals().events, 0);
  std::vector<SequenceId> ids{3};
  Ints lengths{engine.lengths.at(3)[0]};
  CacheView view{.sequences = ids, .lengths = {lengths}, .block_table = engine.sequences.table(ids)};
  const std::vector<std::byte> rows =
      copy_rows(engine.keeper.spec(), engine.keeper.layers(), view, 0, machine->memory());
  ASSERT_EQ(std::ssize(rows), kRows * lengths[0] * ((kKeyDim + kValueDim) * 2 + kExtraDim * 4));
  ASSERT_TRUE(engine.sequences.admit(5, lengths[0]).given());
  engine.lengths[5] = engine.lengths.at(3);
  ids[0] = 5;
  view.block_table = engine.sequences.table(ids);
  restore_rows(engine.keeper.spec(), engine.keeper.layers(), view, 0, rows, machine->memory());
  for (std::int32_t r = 0; r < kRows; ++r)
    for (std::int32_t t = 0; t < lengths[0]; ++t)
      for (const Sided side : kAllSides)
        ASSERT_TRUE(same_bits(engine.slot_of(3, r / kHeads, r % kHeads, t, side),
                              engine.slot_of(5, r / kHeads, r % kHeads, t, side)));
}

TEST(DeviceFork, LengthsAreKnownBeforeScores) {
  if (!has_machine()) GTEST_SKIP() << "no GPU here";
  DenseEngine engine("ams-tova,budget=24,interval=6,window=4,recent=4", false, Dtype::f32, fresh_accelerator());
  oracle::Random random(5);
  engine.join(1);
  for (int i = 0; i < 40; ++i) {
    LengthForecast ahead = engine.keeper.forecast(1);
    const std::int32_t tokens = i == 0 ? 30 : random.between(1, 3), length = ahead.step(tokens);
    engine.step(numbers_of(random, {{1, tokens}}));
    ASSERT_TRUE(ahead.exact());
    ASSERT_EQ(length, engine.lengths.at(1)[0]) << "step " << i;
  }
}

}  // namespace
}  // namespace kvkeep::cuda::fork_test
