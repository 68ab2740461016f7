// SPDX-License-Identifier: Apache-2.0
// The C interface on a GPU, beside the Keeper on the CPU: the same slots, and a sentence for what is refused.

#include "c_engine.h"
#include "captured_graph.h"
#include "kvkeep/c_cuda.h"

#if defined(KVKEEP_CUDA_MODEL)
#include "accelerator.h"
#include "boundary.h"
#include "chosen_stream.h"
#include "torch_streams.h"
#endif

namespace kvkeep::cuda::c_interface_test {
namespace {

using testing::Array;
using namespace c_engine;

/// An accelerator as C holds it, on the machine that the tests run on.
class CAccelerator {
 public:
  CAccelerator() {
#if defined(KVKEEP_CUDA_MODEL)
    const auto stream = std::make_shared<ChosenStream>(model::resources());
    gpu =
        new kvkeep_accelerator{make_accelerator(Device{}, stream), stream};  // the model's device memory is the host's
    device = Device{};
#else
    EXPECT_EQ(kvkeep_cuda_accelerator_make(0, &gpu), KVKEEP_OK) << kvkeep_last_error();
    device = Device{Device::Kind::cuda, 0};
#endif
    provided.size = sizeof provided;
    provided.queries = 1;
    provided.accelerator = gpu;
  }
  ~CAccelerator() { kvkeep_accelerator_free(gpu); }
  CAccelerator(const CAccelerator&) = delete;
  CAccelerator& operator=(const CAccelerator&) = delete;

  [[nodiscard]] CEngine engine(const char* policy, std::int32_t page_size = 0, bool ragged = false) const {
    return CEngine(policy, page_size, &provided, device, ragged);
  }

  kvkeep_accelerator* gpu = nullptr;
  kvkeep_provided provided{};
  Device device = Device{};
};

bool says(const std::string& what) { return std::string(kvkeep_last_error()).find(what) != std::string::npos; }

constexpr const char* kPolicy = "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16";
constexpr const char* kScoresDecide = "adakv-tova,budget=48,interval=12,recent=4";

using COnDevice = OnDevice;

TEST_F(COnDevice, KeepsWhatTheCpuKeepsDenseAndInPagesAndByEitherCallOfALayer) {
  for (const std::int32_t page_size : {0, 16})
    for (const char* policy : {kPolicy, "keydiff,budget=48,interval=12"})
      for (const bool records : {false, true}) {
        SCOPED_TRACE(text(policy, ", pages of ", page_size, records ? ", recorded" : ", observed"));
        DenseEngine cpp(policy, false, Dtype::f32);
        CAccelerator accelerator;
        CEngine c = accelerator.engine(policy, page_size);
        c.records = records;
        std::int64_t cuts = 0;
        ASSERT_NO_FATAL_FAILURE(expect_same_steps(
            cpp, c, 20, [&](const Report&, const kvkeep_report& report) { cuts += report.num_cuts; }));
        EXPECT_GE(cuts, 3);
      }
}

TEST_F(COnDevice, WaitsForCountsWhereTheReportCannotSayThatTheyArePending) {
  for (const bool launches : {false, true}) {
    DenseEngine cpp(kScoresDecide, true, Dtype::f32);
    CAccelerator accelerator;
    CEngine c = accelerator.engine(kScoresDecide, 16, true);
    oracle::Random random(6);
    cpp.join(1);
    c.join(1);
    std::int64_t pending = 0, cuts = 0;
    for (int n = 0; n < 30; ++n) {
      const Numbers numbers = numbers_of(random, {{1, n == 0 ? 50 : 2}});
      const Report expected = cpp.step(numbers);
      c.feed(numbers);
      kvkeep_report report{};
      ASSERT_EQ(c.call(
                    [&](const kvkeep_cache& cache) {
                      if (!launches) report.size = offsetof(kvkeep_report, pending);
                      const kvkeep_status status = kvkeep_step(c.keeper.get(), &cache, &report);
                      if (status != KVKEEP_OK || report.pending == 0) return status;
                      ++pending;
                      EXPECT_EQ(report.num_pages, 0);
                      std::int32_t slots = 0;
                      EXPECT_EQ(kvkeep_physical_length(c.keeper.get(), 1, 0, 0, &slots), KVKEEP_STATE_ERROR);
                      EXPECT_TRUE(says("sequence 1 is pending; allowed after finish()")) << kvkeep_last_error();
                      return kvkeep_finish(c.keeper.get(), &cache, &report);
                    },
                    numbers.ids, report, true),
                KVKEEP_OK)
          << kvkeep_last_error();
      EXPECT_EQ(report.pending, 0);
      EXPECT_EQ(report.slots_dropped, expected.slots_dropped);
      cuts += report.num_cuts;
      if (HasFatalFailure()) return;
    }
    ASSERT_NO_FATAL_FAILURE(expect_same(cpp, c));
    EXPECT_GE(cuts, 3);
    EXPECT_EQ(pending, launches ? cuts : 0);
  }
}

TEST_F(COnDevice, RunsOnTheStreamThatItIsGivenWhateverIsCurrent) {
  DenseEngine cpp(kPolicy, false, Dtype::f32);
  CAccelerator accelerator;
  const c10::Stream side = side_stream(accelerator.device);
  ASSERT_EQ(kvkeep_cuda_use_stream(accelerator.gpu, side.native_handle()), KVKEEP_OK) << kvkeep_last_error();
  CEngine c = accelerator.engine(kPolicy);
  oracle::Random random(7);
  cpp.join(1);
  c.join(1);
  kvkeep_report report{};
  const auto feed = [&](std::int32_t tokens) {
    const Numbers numbers = numbers_of(random, {{1, tokens}});
    cpp.feed(numbers);
    c.feed(numbers);
    expect(cudaDeviceSynchronize());  // the rows were written on another stream
  };
  for (const std::int32_t tokens : {50, 12, 12}) {
    feed(tokens);
    static_cast<void>(cpp.cut({1}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  }
  feed(12);
  EXPECT_EQ(cpp.cut({1}).cuts.size(), 1U);
  const CapturedGraph graph(side,
                            [&] { ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error(); });
  EXPECT_EQ(report.num_cuts, 1);
  EXPECT_GE(graph.nodes(cudaGraphNodeTypeKernel), 6);
  graph.replay();
  expect(cudaDeviceSynchronize());
  ASSERT_NO_FATAL_FAILURE(expect_same(cpp, c));
}

TEST_F(COnDevice, WorksInMemoryOfTheCaller) {
  CAccelerator accelerator;
  CEngine c = accelerator.engine(kPolicy);
  oracle::Random random(8);
  c.join(1);
  c.feed(numbers_of(random, {{1, 50}}));
  kvkeep_report report{};
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  c.feed(numbers_of(random, {{1, 20}}));
  std::int64_t bytes = 0;
  const auto ask = [&](const kvkeep_cache& cache) { return kvkeep_workspace_bytes(c.keeper.get(), &cache, &bytes); };
  ASSERT_EQ(c.call(ask, {1}, report, false), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_GT(bytes, 256);
  const Array memory = Array::full({bytes + 256}, 0, Dtype::u8, accelerator.device);
  const std::int64_t begin = (256 - reinterpret_cast<std::intptr_t>(memory.bytes()) % 256) % 256;
  Arrays arrays;
  ASSERT_EQ(kvkeep_use_workspace(accelerator.gpu, arrays.of(memory.narrow(0, begin, bytes - 256))), KVKEEP_OK);
  EXPECT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_STATE_ERROR);
  EXPECT_TRUE(says(text("decide: the workspace holds ", bytes - 256, " bytes, but this event needs ", bytes)))
      << kvkeep_last_error();
  ASSERT_EQ(kvkeep_use_workspace(accelerator.gpu, arrays.of(memory.narrow(0, begin, bytes))), KVKEEP_OK);
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(report.num_cuts, 1);
  EXPECT_EQ(kvkeep_use_workspace(accelerator.gpu, arrays.of(Array::zeros({bytes}, Dtype::f32).to(accelerator.device))),
            KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(says("workspace: not usable; given f32")) << kvkeep_last_error();
}

TEST_F(COnDevice, RefusesAnotherDeviceByBothNames) {
  CAccelerator accelerator;
  const CEngine c = accelerator.engine(kPolicy);
  const std::string mine = accelerator.device.str(), other = accelerator.device.is_cpu() ? "cuda:3" : "cpu";
  const std::int64_t id = 1;
  const std::int32_t indptr[2] = {0, 1};
  ASSERT_EQ(kvkeep_join(c.keeper.get(), id, 0, -1), KVKEEP_OK);
  Arrays arrays;
  const auto elsewhere = [&](const Array& t) {
    kvkeep_tensor moved = *arrays.of(t);
    moved.device = other == "cpu" ? decltype(moved.device){KVKEEP_CPU, 0} : decltype(moved.device){KVKEEP_CUDA, 3};
    return moved;
  };
  const Array any = Array::full({1, 4, kKeyDim}, 1, Dtype::f32);
  const kvkeep_tensor queries = elsewhere(any), keys = elsewhere(c.keys[0]), values = elsewhere(c.values[0]);
  kvkeep_observation seen{};
  seen.size = sizeof seen;
  seen.num_sequences = 1;
  seen.sequences = &id;
  seen.indptr = indptr;
  seen.queries = &queries;
  EXPECT_EQ(kvkeep_observe(c.keeper.get(), &seen), KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(says(text("queries of layer 0 are on ", other, ", but the keeper works on ", mine)))
      << kvkeep_last_error();

  const kvkeep_layer_cache layers[kLayers] = {{KVKEEP_DENSE, &keys, &values, nullptr, nullptr},
                                              {KVKEEP_DENSE, &keys, &values, nullptr, nullptr}};
  EXPECT_EQ(kvkeep_bind(c.keeper.get(), layers), KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(says(text("cache: it is on ", other, ", but the keeper works on ", mine))) << kvkeep_last_error();
}

TEST_F(COnDevice, AnAcceleratorServesOneKeeperWhichOutlivesItsHandle) {
  auto accelerator = std::make_unique<CAccelerator>();
  CEngine c = accelerator->engine(kPolicy);
  const CModel model;
  kvkeep_keeper* second = nullptr;
  EXPECT_EQ(kvkeep_keeper_make(&model.of_c, kPolicy, &accelerator->provided, &second), KVKEEP_STATE_ERROR);
  EXPECT_EQ(second, nullptr);
  EXPECT_TRUE(says("serves another keeper, or served one before; allowed one accelerator per keeper"))
      << kvkeep_last_error();
  accelerator.reset();
  oracle::Random random(9);
  c.join(1);
  c.feed(numbers_of(random, {{1, 70}}));
  kvkeep_report report{};
  EXPECT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
}

TEST_F(COnDevice, RefusesAGpuThatIsNotThereAndNull) {
  kvkeep_accelerator* gpu = nullptr;
  EXPECT_EQ(kvkeep_cuda_accelerator_make(99, &gpu), KVKEEP_DEVICE_ERROR);
  EXPECT_EQ(gpu, nullptr);
  EXPECT_TRUE(says("GPU 99 is not there")) << kvkeep_last_error();
  EXPECT_EQ(kvkeep_cuda_accelerator_make(-1, &gpu), KVKEEP_DEVICE_ERROR);
  EXPECT_EQ(kvkeep_cuda_accelerator_make(0, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_EQ(kvkeep_cuda_use_stream(nullptr, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(says("accelerator is NULL; allowed an address")) << kvkeep_last_error();
}

TEST_F(COnDevice, RefusesWhatHasNoKernelByName) {
  CAccelerator accelerator;
  const CModel model;
  kvkeep_keeper* keeper = nullptr;
  accelerator.provided.surprisal = accelerator.provided.reads_folded = 1;
  EXPECT_EQ(kvkeep_keeper_make(&model.of_c, "adakv-tova,budget=48,rest=fold", &accelerator.provided, &keeper),
            KVKEEP_INVALID_ARGUMENT)
      << kvkeep_last_error();
  EXPECT_TRUE(says("the scores decide how many slots fold")) << kvkeep_last_error();
}

}  // namespace
}  // namespace kvkeep::cuda::c_interface_test
