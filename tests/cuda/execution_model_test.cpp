// SPDX-License-Identifier: Apache-2.0
// The execution model itself: each of its harsher ways to run shows a fault that the plain one hides.

#if defined(KVKEEP_CUDA_MODEL)

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <regex>
#include <string>

#include "device.h"
#include "device_memory.h"
#include "launch.cuh"
#include "other_chip.h"
#include "resources.h"

namespace kvkeep::cuda::execution_model_test {
namespace {

/// Other settings while it lives.
class With {
 public:
  explicit With(model::Settings settings) : before_(model::settings()) { set(settings); }
  ~With() { set(before_); }
  With(const With&) = delete;
  With& operator=(const With&) = delete;

 private:
  static void set(model::Settings settings) {
    model::settings() = settings;
    model::set_order(model::Order::ascending);
  }
  model::Settings before_;
};

/// How many of the seeds 1 to 20 make `run` return false.
template <class Run>
int seeds_that_show(const Run& run) {
  int shown = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const With random({.seed = seed});
    shown += run() ? 0 : 1;
  }
  return shown;
}

void leave_behind(std::int32_t* found) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(std::int32_t, mine, 1);
  if (threadIdx.x == 0) {
    found[blockIdx.x] = mine[0];
    mine[0] = 7;
  }
}

TEST(ExecutionModel, SpoilsStaticSharedMemoryBeforeEveryBlock) {
  for (const std::uint64_t seed : {0, 3}) {
    const With settings({.seed = seed});
    const DeviceArray<std::int32_t> found(5);
    launch("leave_behind", leave_behind, {.blocks = dim3(5), .threads = 32}, nullptr, found.data());
    for (const std::int32_t one : found.download()) EXPECT_EQ(one, static_cast<std::int32_t>(0xCDCDCDCD));
  }
}

void add_without_an_atomic(std::int32_t* sum) {
  wait_for_earlier_kernels();
  if (threadIdx.x != 0) return;
  for (int n = 0; n < 8; ++n) {
    const std::int32_t before = *sum;
    __threadfence();
    *sum = before + 1;
  }
}

TEST(ExecutionModel, ShowsARaceOfBlocksThatRunAtTheSameTime) {
  const auto run = [] {
    const DeviceArray<std::int32_t> sum(std::vector<std::int32_t>{0});
    launch("add", add_without_an_atomic, {.blocks = dim3(16), .threads = 32}, nullptr, sum.data());
    return sum.download()[0] == 16 * 8;
  };
  const With plain({});
  in_every_order([&] { EXPECT_TRUE(run()) << "one block after the other hides it"; });
  EXPECT_GE(seeds_that_show(run), 5);
}

void read_without_a_barrier(std::int32_t* found) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(std::int32_t, shared, 1);
  const auto warp = threadIdx.x / 32;
  if (warp != 1 && threadIdx.x % 32 == 0) shared[0] = 7;  // by two warps, on either side of the one that reads
  if (warp == 1 && threadIdx.x % 32 == 0) *found = shared[0];
}

TEST(ExecutionModel, ShowsAMissingBarrierThatNeitherOfTwoOrdersShows) {
  const auto run = [] {
    const DeviceArray<std::int32_t> found(1);
    launch("read", read_without_a_barrier, {.blocks = dim3(1), .threads = 96}, nullptr, found.data());
    return found.download()[0] == 7;
  };
  const With plain({});
  in_every_order([&] { EXPECT_TRUE(run()); });
  EXPECT_GE(seeds_that_show(run), 3);
}

void sum_up(std::int64_t* sum, std::int32_t* last) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(std::int32_t, scratch, 96);
  scratch[threadIdx.x] = static_cast<std::int32_t>(threadIdx.x);
  __syncthreads();
  std::int32_t mine = scratch[95 - threadIdx.x];
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(0xFFFFFFFFU, mine, step);
  if (__syncthreads_count(threadIdx.x % 3 == 0) == 32 && threadIdx.x % 32 == 0) atomicAdd(sum, std::int64_t{mine});
  __threadfence();
  if (threadIdx.x == 0) atomicMax(last, static_cast<std::int32_t>(blockIdx.x));
}

TEST(ExecutionModel, RunsWhatIsRightInEveryOrder) {
  const auto run = [] {
    const DeviceArray<std::int64_t> sum(std::vector<std::int64_t>{0});
    const DeviceArray<std::int32_t> last(std::vector<std::int32_t>{-1});
    launch("sum_up", sum_up, {.blocks = dim3(9), .threads = 96}, nullptr, sum.data(), last.data());
    return sum.download()[0] == 9 * 95 * 96 / 2 && last.download()[0] == 8;
  };
  const With plain({});
  in_every_order([&] { EXPECT_TRUE(run()); });
  EXPECT_EQ(seeds_that_show(run), 0);
}

void wait_for_nobody() {
  wait_for_earlier_kernels();
  if (threadIdx.x < 32) __syncthreads();
}

TEST(ExecutionModel, NamesAKernelThatWaitsInVain) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    const With settings({.seed = seed});
    try {
      launch("wait_for_nobody", wait_for_nobody, {.blocks = dim3(3), .threads = 64}, nullptr);
      FAIL() << "it ended";
    } catch (const std::logic_error& error) {
      EXPECT_STREQ(error.what(), "wait_for_nobody: threads wait at a barrier that others never reach");
    }
  }
}

template <int kKiB>
void use_static_memory() {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(std::byte, memory, kKiB << 10);
  memory[threadIdx.x] = std::byte{1};
}

TEST(ExecutionModel, RefusesMoreSharedMemoryThanAKernelHasAskedForWithWhatIsStatic) {
  const auto without_asking = [](std::size_t dynamic, void (*kernel)()) {
    const cudaLaunchConfig_t config{dim3(1), dim3(32), dynamic, nullptr, nullptr, 0};
    return cudaLaunchKernelEx(&config, kernel);
  };
  static_cast<void>(cudaGetLastError());
  EXPECT_EQ(without_asking(49153, use_static_memory<1>), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(without_asking(26112, use_static_memory<22>), cudaSuccess);
  EXPECT_THROW(without_asking(26112, use_static_memory<23>), std::logic_error) << "the H100 refuses it as well";
  const auto asking = [](std::size_t dynamic) {
    launch("asks", use_static_memory<24>, {.blocks = dim3(1), .threads = 32, .shared_bytes = dynamic}, nullptr);
  };
  EXPECT_NO_THROW(asking(26112));
  EXPECT_NO_THROW(asking((227 - 24) << 10));
  try {
    asking((227 - 23) << 10);
    FAIL() << "it ran";
  } catch (const std::logic_error& error) {
    EXPECT_STREQ(error.what(), "asks: a block takes 233472 bytes of shared memory, static and dynamic; allowed 232448");
  }
  EXPECT_THROW(asking(228 << 10), DeviceError);
}

TEST(ExecutionModel, RefusesABlockThatAMultiprocessorHasNoRoomFor) {
  const auto as = [](const char* name, int threads, std::size_t dynamic) {
    model::name_launch(name);
    const cudaLaunchConfig_t config{dim3(1), dim3(static_cast<unsigned>(threads)), dynamic, nullptr, nullptr, 0};
    return cudaLaunchKernelEx(&config, +[] {});
  };
  ASSERT_EQ(model::kernel_resources().at("attention_matrix").registers, 128);
  EXPECT_EQ(as("attention_matrix", 512, 0), cudaSuccess);
  EXPECT_EQ(as("attention_matrix", 544, 0), cudaErrorLaunchOutOfResources) << "68 Ki registers";
  EXPECT_EQ(as("attention_matrix_columns", 544, 0), cudaErrorLaunchOutOfResources) << "the same kernel's other pass";
  EXPECT_EQ(as("a_kernel_of_a_test", 1024, 0), cudaSuccess);
  const std::size_t of_ranks = model::kernel_resources().at("ranks").shared_bytes;
  ASSERT_GT(of_ranks, 0U);
  EXPECT_EQ(as("ranks", 512, (48 << 10) - of_ranks), cudaSuccess);
  EXPECT_EQ(as("ranks", 512, (48 << 10) - of_ranks + 1), cudaErrorLaunchOutOfResources) << "with what is static";
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchOutOfResources);
}

TEST(ExecutionModel, KnowsTheResourcesOfEveryKernel) {
  int launches = 0;
  for (const auto& file : std::filesystem::directory_iterator(KVKEEP_TEST_KERNEL_DIR)) {
    std::ifstream in(file.path());
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    static const std::regex launched(R"re(\blaunch\(\s*"(\w+)")re");
    for (std::sregex_iterator at(text.begin(), text.end(), launched), end; at != end; ++at, ++launches)
      EXPECT_NE(model::resources_of((*at)[1].str()), nullptr)
          << (*at)[1] << " in " << file.path().filename() << " is not in the table of docs/inside/cuda.md";
  }
  EXPECT_GT(launches, 40);
}

TEST(ExecutionModel, CutsSumsOffWhereTheirLargestAddendEnds) {
  std::array<float, 16> products{};
  products.fill(0x1p-25F);
  EXPECT_EQ(model::matrix_sum(1.0F, products), 1.0F) << "one after the other, each is lost to rounding";
  products.fill(0x1.8p-24F);
  {
    const With plain({});
    EXPECT_EQ(model::matrix_sum(1.0F, products), 1.0F + 16 * 0x1p-23F) << "rounded up";
  }
  const With truncating({.truncate = true});
  EXPECT_EQ(model::matrix_sum(1.0F, products), 1.0F);
  products.fill(-0x1.8p-23F);
  EXPECT_EQ(model::matrix_sum(1.0F, products), 1.0F - 20 * 0x1p-23F)
      << "towards zero: eight by 2^-23 each, then, of a sum below 1, eight by 1.5 * 2^-23";
  products.fill(3.0F);
  EXPECT_EQ(model::matrix_sum(2.0F, products), 50.0F) << "exact where nothing is cut off";
  products[3] = std::nanf("");
  EXPECT_TRUE(std::isnan(model::matrix_sum(2.0F, products)));
  products[3] = HUGE_VALF;
  EXPECT_EQ(model::matrix_sum(2.0F, products), HUGE_VALF);
}

TEST(ExecutionModel, GivesApproximateFunctionsAnErrorOfTwoUnits) {
  const With approximate({.exp2 = true});
  int off[5] = {};
  for (int i = 0; i < 4000; ++i) {
    const float x = -30.0F + 0.01F * static_cast<float>(i), exact = std::exp2(x);
    const auto ulps = static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(exp2_of(x))) -
                      static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(exact));
    ASSERT_LE(std::abs(ulps), 2);
    ++off[ulps + 2];
    ASSERT_EQ(exp2_of(x), exp2_of(x)) << "the same number every time";
  }
  for (const int count : off) EXPECT_GT(count, 100);
}

void copy_one(const std::int32_t* from, std::int32_t* to) {
  wait_for_earlier_kernels();
  *to = *from;
}

TEST(ExecutionModel, EndsAHostThatTouchesDeviceMemory) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const With guarded({.guard = true});
  const DeviceArray<std::int32_t> from(std::vector<std::int32_t>{41}), to(1);
  launch("copy_one", copy_one, {.blocks = dim3(1), .threads = 32}, nullptr, from.data(), to.data());
  EXPECT_EQ(to.download()[0], 41) << "kernels and copies may";
  EXPECT_DEATH(
      {
        const With again({.guard = true});
        const DeviceArray<std::int32_t> there(std::vector<std::int32_t>{41});
        static_cast<void>(*static_cast<volatile std::int32_t*>(there.data()));
      },
      "the host touched device memory outside a copy");
}

/// Copies, and of its odd threads every one waits too late, if at all.
template <int kNth, bool kWaits>
void copy_early(const std::int32_t* from, std::int32_t* to) {
  if (threadIdx.x % 2 == 0) wait_for_earlier_kernels();
  to[threadIdx.x] = *from;
  if (kWaits) wait_for_earlier_kernels();
}

template <int kNth, bool kWaits>
std::int32_t copied_early() {
  const DeviceArray<std::int32_t> from(std::vector<std::int32_t>{41}), to(32);
  launch("copy_early", copy_early<kNth, kWaits>, {.blocks = dim3(1), .threads = 32}, nullptr, from.data(), to.data());
  return to.download()[31];
}

TEST(ExecutionModel, NamesAKernelThatBeginsEarlyAndDoesNotWait) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    const With settings({.seed = seed});
    try {
      static_cast<void>(copied_early<0, false>());
      FAIL() << "it ended";
    } catch (const std::logic_error& error) {
      EXPECT_STREQ(
          error.what(),
          "copy_early: a thread may begin before earlier kernels have ended, and does not wait for them first");
    }
  }
}

TEST(ExecutionModel, EndsAKernelThatTouchesDeviceMemoryBeforeItWaits) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(
      {
        const With guarded({.guard = true});
        static_cast<void>(copied_early<0, true>());
      },
      "a kernel touched device memory before it waited for earlier kernels");
}

TEST(ExecutionModel, BeginsNoKernelEarlyWhereItsCodeCannotWaitOrNobodyWantsIt) {
  {
    const OtherChip older({.compiled_for = 80});
    EXPECT_EQ((copied_early<1, false>()), 41);
  }
  EXPECT_EQ((copied_early<1, false>()), 41) << "the same code";
  tuning::kernels_overlap = false;
  EXPECT_EQ((copied_early<0, false>()), 41);
  tuning::kernels_overlap = true;
}

}  // namespace
}  // namespace kvkeep::cuda::execution_model_test

#endif
