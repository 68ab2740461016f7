// SPDX-License-Identifier: Apache-2.0
// Memory and streams that a program gives to an accelerator: a pool of CUDA's, its own, LibTorch's. What is taken goes
// back once, in the order of its stream, after all streams that used it, and not while one of them is captured.

#include <gtest/gtest.h>

#include <map>

#include "captured_graph.h"
#include "device.h"
#include "engines.h"
#include "kvkeep/cuda.h"
#include "message_of.h"

#if defined(KVKEEP_CUDA_MODEL)
#include "accelerator.h"
#endif

namespace kvkeep::cuda::device_resources_test {
namespace {

using engines::DenseEngine;

constexpr const char* kPolicy = "ams-tova,credit=true,budget=32,interval=8,recent=4,window=8";

std::shared_ptr<Machine> accelerator_with(std::shared_ptr<DeviceResources> resources) {
#if defined(KVKEEP_CUDA_MODEL)
  return make_accelerator(Device{}, std::move(resources));  // the model's device memory is the host's
#else
  return accelerator(0, std::move(resources));
#endif
}

/// An engine's own: cudaMalloc(), with a record of what is out. Its memory is freed at the end, when the device is
/// done.
class Ledger final : public DeviceResources {
 public:
  struct Piece {
    std::int64_t bytes;
    void* stream;
  };
  ~Ledger() override {
    for (void* memory : back) static_cast<void>(cudaFree(memory));
  }
  [[nodiscard]] void* stream() override { return current; }
  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    if (exhausted) return nullptr;
    void* memory = nullptr;
    expect(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    out.emplace(memory, Piece{bytes, stream});
    return memory;
  }
  void free(void* memory, std::int64_t bytes, void* stream) noexcept override {
    const auto found = out.find(memory);
    faults += found == out.end() || found->second.bytes != bytes || found->second.stream != stream;
    if (found != out.end()) out.erase(found);
    back.push_back(memory);
  }
  void* current = nullptr;
  bool exhausted = false;
  int faults = 0;
  std::map<void*, Piece> out;
  std::vector<void*> back;
};

/// Both keep the same slots, in several events.
void expect_the_cpus_slots(DenseEngine& device) {
  DenseEngine cpu(kPolicy, true, Dtype::f32);
  oracle::Random random(5);
  std::size_t cuts = 0;
  for (DenseEngine* each : {&cpu, &device}) each->join(1), each->join(2);
  for (int n = 0; n < 24; ++n) {
    const engines::Numbers numbers = engines::numbers_of(random, {{1, n == 0 ? 50 : 1}, {2, 2}});
    cuts += cpu.step(numbers).cuts.size();
    static_cast<void>(device.step(numbers));
  }
  EXPECT_GE(cuts, 4U);
  for (const std::int64_t id : {1, 2})
    for (std::int32_t layer = 0; layer < cpu.keeper.spec().num_layers(); ++layer)
      for (std::int32_t head = 0; head < cpu.keeper.spec().kv_heads; ++head) {
        const auto a = cpu.keeper.positions(id, layer, head), b = device.keeper.positions(id, layer, head);
        ASSERT_TRUE(std::ranges::equal(a, b)) << "sequence " << id << ", layer " << layer << ", head " << head;
      }
}

using Resources = OnDevice;

TEST_F(Resources, OfAPoolServeAKeeperThatKeepsWhatTheCpuKeeps) {
  DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(pool_resources(0)));
  expect_the_cpus_slots(engine);
}

TEST_F(Resources, OfAGpuThatIsNotThereAreRefusedByItsNumber) {
  EXPECT_NE(testing::message_of<DeviceError>([] { static_cast<void>(pool_resources(99)); }).find("GPU 99 is not there"),
            std::string::npos);
}

TEST_F(Resources, OfTheProgramGoBackOnceWithTheirSizeAndStream) {
  const auto ledger = std::make_shared<Ledger>();
  {
    DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(ledger));
    expect_the_cpus_slots(engine);
    EXPECT_GE(ledger->out.size(), 5U) << "columns and queries of two sequences, tables, the workspace";
    engine.keeper.leave(1);
  }
  EXPECT_TRUE(ledger->out.empty());
  EXPECT_GE(ledger->back.size(), 5U);
  EXPECT_EQ(ledger->faults, 0);
}

TEST_F(Resources, AreAskedForNothingByEventsNoLargerThanEarlierOnes) {
  const auto ledger = std::make_shared<Ledger>();
  DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(ledger));
  oracle::Random random(6);
  engine.join(1);
  std::size_t given = 0;
  for (int n = 0; n < 64; ++n) {
    static_cast<void>(engine.step(engines::numbers_of(random, {{1, n == 0 ? 60 : 1}})));
    if (n == 32) given = ledger->out.size() + ledger->back.size();
  }
  EXPECT_EQ(ledger->out.size() + ledger->back.size(), given);
  EXPECT_GE(engine.keeper.totals().events, 6);
}

TEST_F(Resources, ThatGiveNothingAreNamed) {
  const auto ledger = std::make_shared<Ledger>();
  ledger->exhausted = true;
  const std::string said = testing::message_of<DeviceError>([&] {
    DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(ledger));
    engine.join(1);
    oracle::Random random(7);
    static_cast<void>(engine.step(engines::numbers_of(random, {{1, 50}})));
  });
  EXPECT_EQ(said.find("accelerator: its resources gave no memory for "), 0U) << said;
}

TEST_F(Resources, OfAPoolRefuseAnEventThatIsCapturedBeforeOneHasRunAndItRunsLater) {
  const c10::Stream side = side_stream(accelerator_with(pool_resources(0))->device());
  const c10::StreamGuard current(side);
  DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(pool_resources(0, side.native_handle())));
  oracle::Random random(8);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}})));  // a prompt, which is not cut
  engine.feed(engines::numbers_of(random, {{1, 12}}));
  const std::string said = testing::message_of<StateError>(
      [&] { const CapturedGraph graph(side, [&] { static_cast<void>(engine.cut({1})); }); });
  EXPECT_NE(said.find("bytes are needed while the stream is being captured; allowed what has run in this size before"),
            std::string::npos)
      << said;
  EXPECT_EQ(engine.cut({1}).cuts.size(), 1U);
}

TEST(ResourcesOfTheHost, AreNoWorkspace) {
  EXPECT_EQ(testing::message_of<Unsupported>([] { host().use_workspace({}); }),
            "workspace: the CPU takes none; allowed on a device");
}

#if defined(KVKEEP_CUDA_MODEL)  // what waits for what can be seen under the model alone

TEST_F(Resources, GoBackAfterEveryStreamThatUsedThem) {
  const auto ledger = std::make_shared<Ledger>();
  const c10::Stream other = side_stream(Device{});
  DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(ledger));
  oracle::Random random(9);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 50}})));  // on the default stream
  ledger->current = other.native_handle();
  const c10::StreamGuard guard(other);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 12}})));
  model::hold_streams(true);
  cudaEvent_t done = nullptr;
  expect(cudaEventCreate(&done));
  expect(cudaEventRecord(done, static_cast<cudaStream_t>(other.native_handle())));  // behind what the keeper launched
  engine.keeper.leave(1);  // frees columns that were allocated for the default stream
  EXPECT_GE(std::ranges::count_if(ledger->back, [](void* memory) { return memory != nullptr; }), 3);
  EXPECT_EQ(ledger->faults, 0);
  EXPECT_EQ(cudaEventQuery(done), cudaErrorNotReady);
  expect(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(cudaEventQuery(done), cudaSuccess) << "the default stream waited for the other one";
  model::hold_streams(false);
  expect(cudaEventDestroy(done));
}

TEST_F(Resources, StayWhileAStreamIsCaptured) {
  const auto ledger = std::make_shared<Ledger>();
  const c10::Stream side = side_stream(Device{});
  const c10::StreamGuard guard(side);
  ledger->current = side.native_handle();
  DenseEngine engine(kPolicy, true, Dtype::f32, accelerator_with(ledger));
  oracle::Random random(10);
  engine.join(1), engine.join(2);
  for (int n = 0; n < 3; ++n) static_cast<void>(engine.step(engines::numbers_of(random, {{1, 50}, {2, 50}})));
  engine.feed(engines::numbers_of(random, {{1, 50}}));
  const std::size_t back = ledger->back.size();
  const CapturedGraph graph(side, [&] {
    static_cast<void>(engine.cut({1}));
    engine.keeper.leave(2);
    EXPECT_EQ(ledger->back.size(), back);
  });
  engine.join(3);
  engine.feed(engines::numbers_of(random, {{3, 2}}));
  EXPECT_GT(ledger->back.size(), back) << "with the next memory that is asked for";
}

#endif

}  // namespace
}  // namespace kvkeep::cuda::device_resources_test
