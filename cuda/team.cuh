// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Teams of CUDA threads that work on one row: a block or a warp. See kvkeep/core/hd.h.

#include "kvkeep/core/strict_math.h"
#include "platform.cuh"

namespace kvkeep::cuda {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;

/// Sum over a warp in a fixed order, the same in every lane.
template <class T>
__device__ inline T sum_of_warp(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

/// The 32 lanes of a warp.
struct WarpTeam {
  [[nodiscard]] __device__ std::int32_t thread() const { return static_cast<std::int32_t>(threadIdx.x % 32); }
  [[nodiscard]] __device__ constexpr std::int32_t size() const { return 32; }
  __device__ void sync() const { __syncwarp(kWholeWarp); }
  template <class T>
  [[nodiscard]] __device__ T sum(T mine) const {
    return sum_of_warp(mine);
  }
  [[nodiscard]] __device__ std::uint32_t sum(std::uint32_t mine) const { return __reduce_add_sync(kWholeWarp, mine); }
  [[nodiscard]] __device__ float largest(float mine) const {
    // As integers, floats ascend but for those below zero, which descend.
    const auto turned = [](std::int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };
    const std::int32_t own = mine == mine ? turned(static_cast<std::int32_t>(__float_as_uint(mine))) : INT32_MIN;
    return __uint_as_float(static_cast<unsigned>(turned(__reduce_max_sync(kWholeWarp, own))));
  }
  template <class T>
  [[nodiscard]] __device__ T sum_before(T mine) const {
    T x = mine;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
      const T below = __shfl_up_sync(kWholeWarp, x, step);
      if (thread() >= static_cast<std::int32_t>(step)) x += below;
    }
    return x - mine;
  }
  [[nodiscard]] __device__ std::int32_t count(bool mine) const {
    return __popc(__ballot_sync(kWholeWarp, mine ? 1 : 0));
  }
  [[nodiscard]] __device__ std::int32_t count_before(bool mine) const {
    return __popc(__ballot_sync(kWholeWarp, mine ? 1 : 0) & ((1U << thread()) - 1));
  }
  template <class T>
  [[nodiscard]] __device__ T from_first(T mine) const {
    return __shfl_sync(kWholeWarp, mine, 0);
  }
};

/// Sum over a block in a fixed order, the same in every thread. `shared`: one double per warp.
__device__ inline double sum_of_block(double x, double* shared, std::int32_t warps) {
  x = sum_of_warp(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (std::int32_t w = 0; w < warps; ++w) sum += shared[w];
  return sum;
}
template <std::int32_t kThreads>
__device__ inline double sum_of_block(double x, double* shared) {
  return sum_of_block(x, shared, kThreads / 32);
}

/// All threads of a block, a multiple of 32. `scratch`: kBlockScratch words of shared memory that nothing else uses
/// while the team works.
inline constexpr std::int32_t kBlockScratch = 33;

class BlockTeam {
 public:
  __device__ explicit BlockTeam(unsigned long long* scratch) : scratch_(scratch) {}
  [[nodiscard]] __device__ std::int32_t thread() const { return static_cast<std::int32_t>(threadIdx.x); }
  [[nodiscard]] __device__ std::int32_t size() const { return static_cast<std::int32_t>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  [[nodiscard]] __device__ std::uint64_t sum(std::uint64_t mine) const {
    const std::uint64_t of_warp = WarpTeam{}.sum(mine);
    publish(of_warp);
    unsigned long long all = lane() < warps() ? scratch_[lane()] : 0;
    all = WarpTeam{}.sum(all);
    __syncthreads();
    return all;
  }
  [[nodiscard]] __device__ double sum_in_order(double mine) const {
    const double all = sum_of_block(mine, reinterpret_cast<double*>(scratch_), warps());
    __syncthreads();
    return all;
  }
  [[nodiscard]] __device__ float largest(float mine) const {
    const float of_warp = WarpTeam{}.largest(mine);
    publish(__float_as_uint(of_warp));
    const float all =
        WarpTeam{}.largest(__uint_as_float(static_cast<unsigned>(scratch_[lane() < warps() ? lane() : 0])));
    __syncthreads();
    return all;
  }
  [[nodiscard]] __device__ std::uint64_t sum_before(std::uint64_t mine) const {
    const std::uint64_t before = WarpTeam{}.sum_before(mine);
    std::uint64_t all;
    return before + sum_before_warp(before + mine, all);
  }
  /// Sum over the warps before this one, and over all, of their last lanes' numbers.
  [[nodiscard]] __device__ std::uint64_t sum_before_warp(std::uint64_t of_warp, std::uint64_t& all) const {
    if (lane() == 31) scratch_[warp()] = of_warp;
    __syncthreads();
    const unsigned long long of_lane = lane() < warps() ? scratch_[lane()] : 0;
    const unsigned long long before_warp = WarpTeam{}.sum_before(of_lane);
    const unsigned long long offset = __shfl_sync(kWholeWarp, before_warp, warp());
    all = __shfl_sync(kWholeWarp, before_warp + of_lane, 31);
    __syncthreads();
    return offset;
  }
  /// The first thread's number, for every thread.
  template <class T>
  [[nodiscard]] __device__ T from_first(T mine) const {
    if (thread() == 0) scratch_[32] = static_cast<unsigned long long>(mine);
    __syncthreads();
    const T first = static_cast<T>(scratch_[32]);
    __syncthreads();
    return first;
  }

 private:
  [[nodiscard]] __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  [[nodiscard]] __device__ int warp() const { return static_cast<int>(threadIdx.x / 32); }
  [[nodiscard]] __device__ int warps() const { return static_cast<int>(blockDim.x / 32); }
  __device__ void publish(std::uint64_t of_warp) const {
    if (lane() == 0) scratch_[warp()] = of_warp;
    __syncthreads();
  }

  unsigned long long* scratch_;
};

inline constexpr std::int32_t kFewOfThread = 12;

/// prefix_sums() of kvkeep/allot/segments.h: each warp adds up slots next to each other, then what is before its first.
template <class Number>
__device__ void prefix_sums(const BlockTeam& team, std::int32_t length, const Number& number, std::uint64_t* prefix) {
  const std::int32_t own = (length + team.size() - 1) / team.size();
  if (own <= kFewOfThread) {  // each thread, where that takes few
    const std::int32_t from = team.thread() * own, to = length - from < own ? length : from + own;
    std::uint64_t sum = 0;
    for (std::int32_t t = from; t < to; ++t) prefix[t] = sum += number(t);
    const std::uint64_t before = team.sum_before(sum);
    for (std::int32_t t = from; t < to; ++t) prefix[t] += before;
    return team.sync();
  }
  const WarpTeam warp;
  const std::int32_t each = own * 32, begin = team.thread() / 32 * each,
                     end = length - begin < each ? length : begin + each;
  std::uint64_t sum = 0;
  for (std::int32_t first = begin; first < end; first += 32) {
    const std::int32_t t = first + warp.thread();
    const std::uint64_t mine = t < end ? number(t) : 0, through = sum + warp.sum_before(mine) + mine;
    if (t < end) prefix[t] = through;
    sum = __shfl_sync(kWholeWarp, through, 31);
  }
  std::uint64_t all;
  const std::uint64_t before = team.sum_before_warp(sum, all);
  for (std::int32_t t = begin + warp.thread(); t < end; t += 32) prefix[t] += before;
  team.sync();
}

}  // namespace kvkeep::cuda
