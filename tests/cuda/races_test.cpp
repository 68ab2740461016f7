// SPDX-License-Identifier: Apache-2.0
// What the execution model takes for a race: accesses that CUDA does not order, and none that it does.

#if defined(KVKEEP_CUDA_MODEL) && defined(KVKEEP_WATCHED)

#include <gtest/gtest.h>

#include <string>

#include "device.h"
#include "launch.cuh"
#include "other_chip.h"

namespace kvkeep::cuda::races_test {
namespace {

/// Races are looked for while it lives, on a chip where kernels need not wait for earlier ones.
class Watching {
 public:
  explicit Watching(std::uint64_t seed = 0) : before_(model::settings()) {
    model::settings() = {};
    model::settings().races = true;
    model::settings().seed = seed;
    model::set_order(model::Order::ascending);
  }
  ~Watching() {
    model::settings() = before_;
    model::set_order(model::Order::ascending);
  }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  model::Settings before_;
  OtherChip older_{{.compiled_for = 80}};
};

using Kernel = void (*)(std::int32_t*, std::int32_t*);

/// What a launch is refused with, in the order of a seed; empty if it is not.
std::string said(Kernel kernel, unsigned blocks, std::int32_t threads, std::uint64_t seed = 0) {
  const Watching watching(seed);
  const DeviceArray<std::int32_t> memory(std::vector<std::int32_t>(256)), found(2048);
  try {
    launch("kernel", kernel, {.blocks = dim3(blocks), .threads = threads, .shared_bytes = 1024}, nullptr, memory.data(),
           found.data());
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "";
}

void expect_race(Kernel kernel, unsigned blocks, std::int32_t threads) {
  EXPECT_NE(said(kernel, blocks, threads), "");
  EXPECT_NE(said(kernel, blocks, threads, 5), "") << "in another order";
}
void expect_none(Kernel kernel, unsigned blocks, std::int32_t threads) {
  for (const std::uint64_t seed : {0, 1, 2, 3, 4}) EXPECT_EQ(said(kernel, blocks, threads, seed), "");
}

std::int32_t me() { return static_cast<std::int32_t>(threadIdx.x); }
std::int32_t number() { return static_cast<std::int32_t>(blockIdx.x * blockDim.x) + me(); }
std::int32_t* shared() { return reinterpret_cast<std::int32_t*>(dynamic_shared()); }

TEST(Races, AreFoundBetweenBlocksThatRunOneAfterAnother) {
  expect_race(
      [](std::int32_t* memory, std::int32_t*) {
        if (me() == 0) memory[7] = 1;
      },
      2, 32);
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        if (me() == 0 && blockIdx.x == 0) memory[7] = 1;
        if (blockIdx.x != 0) found[number()] = memory[7];
      },
      3, 32);
  expect_none(
      [](std::int32_t* memory, std::int32_t* found) {
        memory[64 + number()] = 1;
        found[number()] = memory[64 + number()] + memory[7];
      },
      3, 32);
}

TEST(Races, AreFoundAfterMoreReadersThanAWordRemembers) {
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        found[number()] = memory[7];
        if (blockIdx.x == 7 && me() == 0) memory[7] = 1;
      },
      8, 128);
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        if (me() == 0) shared()[7] = 1;
        __syncthreads();
        found[number()] = shared()[7];
        if (me() == 511) shared()[7] = 2;
      },
      1, 512);
}

TEST(Races, AreNotFoundBetweenLaunchesNorInSharedMemoryOfTwoBlocks) {
  const Watching watching;
  const DeviceArray<std::int32_t> memory(std::vector<std::int32_t>(256));
  const auto kernel = +[](std::int32_t* at) {
    KVKEEP_SHARED(std::int32_t, own, 1);
    if (me() == 0) shared()[0] = own[0] = 1;
    if (number() == 0) at[0] = 1;
  };
  for (int n = 0; n < 2; ++n)
    EXPECT_NO_THROW(
        launch("twice", kernel, {.blocks = dim3(3), .threads = 64, .shared_bytes = 64}, nullptr, memory.data()));
}

TEST(Races, OfWarpsEndAtABarrierAlone) {
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        found[number()] = shared()[63 - me()];
      },
      1, 64);
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncwarp();
        found[number()] = shared()[63 - me()];
      },
      1, 64);
  expect_none(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncthreads();
        found[number()] = shared()[63 - me()];
      },
      2, 64);
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncthreads();
        found[number()] = shared()[63 - me()];
        shared()[me()] = 0;  // before others have read it
      },
      1, 64);
}

TEST(Races, OfLanesEndWhereTheyWaitForEachOtherByTheirMask) {
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        found[number()] = shared()[31 - me()];
      },
      1, 32);
  expect_none(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncwarp();
        found[number()] = shared()[31 - me()];
      },
      1, 32);
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncwarp(me() < 16 ? 0xFFFFU : 0xFFFF0000U);
        found[number()] = shared()[31 - me()];
      },
      1, 32);
  expect_none(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        __syncwarp(me() < 16 ? 0xFFFFU : 0xFFFF0000U);
        found[number()] = shared()[me() ^ 15];
        __syncwarp(0x10001U << me() % 16);  // pairs, which have learned of the others
        found[number()] += shared()[31 - me()];
      },
      1, 32);
}

TEST(Races, AreNotOrderedByWhatOnlyExchanges) {
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        shared()[me()] = me();
        found[number()] = __shfl_sync(0xFFFFFFFFU, me(), 3);
        found[number()] += shared()[31 - me()];
      },
      1, 32);
  expect_race(
      [](std::int32_t*, std::int32_t* found) {
        if (me() == 0) shared()[0] = 1;
        if (__ballot_sync(0xFFFFFFFFU, 1) != 0) found[number()] = shared()[0];
      },
      1, 32);
}

TEST(Races, OfAtomicsAreThoseWithOtherAccesses) {
  expect_none([](std::int32_t* memory, std::int32_t*) { atomicAdd(memory, 1); }, 3, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        atomicAdd(memory, 1);
        found[number()] = *memory;
      },
      1, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t*) {
        if (me() == 0) *memory = 0;
        atomicMax(memory, me());
      },
      1, 64);
  expect_none(
      [](std::int32_t*, std::int32_t* found) {
        if (me() == 0) shared()[0] = 0;
        __syncthreads();
        atomicMax(shared(), me());
        __syncthreads();
        found[number()] = shared()[0];
      },
      2, 64);
}

/// The first block to arrive leaves a number, which the second one reads: with the fences that are asked for.
template <bool kFirst, bool kSecond>
void hand_on(std::int32_t* memory, std::int32_t* found) {
  if (me() != 0) return;
  memory[8 + blockIdx.x] = 1;
  if (kFirst) __threadfence();
  if (atomicAdd(memory, 1) == 0) return;
  if (kSecond) __threadfence();
  found[0] = memory[8] + memory[9];
}

/// The same by all threads, of which one counts.
template <bool kOwnFence>
void hand_on_together(std::int32_t* memory, std::int32_t* found) {
  memory[64 + number()] = 1;
  if (!kOwnFence) __threadfence();
  __syncthreads();
  bool last = false;
  if (me() == 0) {
    if (kOwnFence) __threadfence();
    last = atomicAdd(memory, 1) == 1;
    if (kOwnFence) __threadfence();
  }
  if (__syncthreads_or(last ? 1 : 0) == 0) return;
  if (!kOwnFence) __threadfence();
  found[me()] = memory[64 + me()] + memory[128 + me()];
}

TEST(Races, OfBlocksEndWhereAnAtomicIsBetweenFencesOfItsThreads) {
  expect_none(hand_on<true, true>, 2, 32);
  expect_race(hand_on<false, true>, 2, 32);
  expect_race(hand_on<true, false>, 2, 32);
  expect_none(hand_on_together<true>, 2, 64);
  expect_race(hand_on_together<false>, 2, 64);  // the fence of who counts is before the barrier
}

TEST(Races, AreFoundWhileACopyIsUnderWay) {
  expect_none(
      [](std::int32_t* memory, std::int32_t* found) {
        copy_ahead<4>(shared() + me(), memory + me());
        wait_for_copies();
        found[number()] = shared()[me()];
        __syncthreads();
        found[number()] += shared()[63 - me()];
      },
      2, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        copy_ahead<4>(shared() + me(), memory + me());
        found[number()] = shared()[me()];
        wait_for_copies();
      },
      1, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        copy_ahead<4>(shared() + me(), memory + me());
        wait_for_copies();
        found[number()] = shared()[63 - me()];
      },
      1, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t* found) {
        copy_ahead<4>(shared() + me(), memory + me());
        __syncthreads();
        found[number()] = shared()[63 - me()];  // between barriers, and before the wait of who copies
        __syncthreads();
        wait_for_copies();
      },
      1, 64);
}

template <bool kWait>
void square(std::int32_t*, std::int32_t* found) {
  auto* const tile = reinterpret_cast<float*>(shared());
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 2.0F);
  wmma::store_matrix_sync(tile, sum, 16, wmma::mem_row_major);
  if (kWait) __syncwarp();
  float all = 0;
  for (int i = 0; i < 8; ++i) all += tile[me() * 8 + i];  // half a row
  found[number()] = static_cast<std::int32_t>(all);
}

TEST(Races, OfTilesEndWhereTheWarpWaits) {
  expect_none(square<true>, 1, 32);
  expect_race(square<false>, 1, 32);
}

TEST(Races, AreOfBytesThatOverlap) {
  expect_none([](std::int32_t* memory, std::int32_t*) { reinterpret_cast<std::uint8_t*>(memory)[me()] = 1; }, 1, 64);
  expect_race(
      [](std::int32_t* memory, std::int32_t*) {
        if (me() == 40) reinterpret_cast<std::uint8_t*>(memory)[10] = 1;
        if (me() == 3) reinterpret_cast<std::uint64_t*>(memory)[1] = 1;
      },
      1, 64);
}

TEST(Races, AreToldWithTheirThreads) {
  const std::string text = said(
      [](std::int32_t* memory, std::int32_t* found) {
        if (me() == 37) memory[3] = 1;
        if (me() == 5 && blockIdx.x == 1) found[0] = memory[3];
      },
      2, 64);
  EXPECT_TRUE(text.starts_with("kernel: accesses that nothing orders:\n  thread 37 of block 0 writes (")) << text;
  EXPECT_NE(text.find("), thread 5 of block 1 reads ("), std::string::npos) << text;
}

}  // namespace
}  // namespace kvkeep::cuda::races_test

#endif
