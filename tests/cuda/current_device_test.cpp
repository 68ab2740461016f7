// SPDX-License-Identifier: Apache-2.0
// A caller whose current device is another one than the keeper's: all work goes to the keeper's, and the caller's is
// current again after every call. In the execution model, where device 0 takes no work while another one is current.

#include <gtest/gtest.h>

#include "device.h"

#if defined(KVKEEP_CUDA_MODEL)
#include "engines.h"
#include "folding_engine.h"
#include "fresh_accelerator.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/pins.h"
#include "layer_by_layer_engine.h"
#include "restored.h"

namespace kvkeep::cuda::current_device_test {
namespace {

class CurrentDevice : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    expect(cudaSetDevice(1));
  }
  void TearDown() override {
    expect_elsewhere();
    expect(cudaSetDevice(0));
  }
  static void expect_elsewhere() {
    int current = -1;
    expect(cudaGetDevice(&current));
    EXPECT_EQ(current, 1);
  }
};

TEST_F(CurrentDevice, MayBeAnotherOneInAllCallsOfAStep) {
  for (const char* policy :
       {"ams-tova,budget=32,interval=8,recent=4,window=8", "adakv-tova,budget=32,interval=8,recent=4",
        "expected,budget=32,interval=8", "given,budget=32,interval=8",
        "ams-tova,credit=true,budget=32,interval=8,recent=4,window=8"}) {
    SCOPED_TRACE(policy);
    const testing::StateFileOfATest file("elsewhere");
    engines::DenseEngine here(policy, true, Dtype::f32, fresh_accelerator()),
        there(policy, true, Dtype::f32, fresh_accelerator());
    oracle::Random random(41);
    here.join(1), here.join(2);
    here.keeper.part<parts::Pins>().pin(1, 2, 5);
    for (int n = 0; n < 20; ++n) {
      here.feed(engines::numbers_of(random, {{1, n == 0 ? 50 : 1}, {2, 2}}));
      expect_elsewhere();
      EXPECT_GE(here.workspace_bytes({1, 2}), 0);
      static_cast<void>(here.cut({1, 2}));
      expect_elsewhere();
    }
    EXPECT_GE(here.keeper.totals().events, 2);
    EXPECT_FALSE(here.keeper.positions(1, 1, 1).empty());
    static_cast<void>(here.keeper.credit(1, 1, 1));
    here.feed(engines::numbers_of(random, {{1, 1}, {2, 3}}));
    here.keeper.truncate(2, here.keeper.logical_length(2) - 2);
    here.keeper.save(1, file.path);
    there.keeper.restore(1, file.path);
    here.keeper.leave(1);
  }
}

TEST_F(CurrentDevice, MayBeAnotherOneWhereSpansFoldAndAreRead) {
  testing::FoldingEngine engine(testing::FoldingEngine::kTova, 2, 4, Dtype::f32, fresh_accelerator());
  engine.join(1), engine.join(2);
  engine.step({{1, 90}, {2, 30}});
  for (int n = 0; n < 12; ++n) {
    engine.step({{1, 1}, {2, 2}});
    expect_elsewhere();
  }
  EXPECT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 0);
  engine.leave(1);
  expect_elsewhere();
}

TEST_F(CurrentDevice, MayBeAnotherOneWherePromptsNarrow) {
  for (const char* policy : {"asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6,cache=16",
                             "fastkv,budget=24,window=6,layer=2,cache=24+adakv-tova,budget=16,interval=4,recent=2"}) {
    layer_by_layer::Engine engine(policy, 4, fresh_accelerator());
    engine.join(1);
    static_cast<void>(engine.step({{1, 70}}));
    expect_elsewhere();
    for (int n = 0; n < 8; ++n) static_cast<void>(engine.step({{1, 1}}));
    expect_elsewhere();
    EXPECT_LT(engine.keeper.physical_length(1, 4, 0), 70);
  }
}

}  // namespace
}  // namespace kvkeep::cuda::current_device_test
#endif
