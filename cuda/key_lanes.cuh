// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Passes over keys alone: eight lanes per slot, so that a warp reads whole lines of four slots. Every key is treated
/// alike wherever it is: equal keys give equal bits.

#include "element.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {

inline constexpr std::int32_t kLanes = 8;                                  ///< per slot
inline constexpr std::int32_t kKeysAtOnce = tuning::kKeyThreads / kLanes;  ///< slots per block
static_assert(kKeysAtOnce == 32, "the mean direction is added up in blocks of 32 keys, as on the CPU");

/// Sum over the slot's eight lanes, the same in each of them.
__device__ inline float sum_of_lanes(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  return x;
}

/// Calls body(d, floats) for the lane's words of a key, kPerWord components from d on, those past the end 0. element:
/// the format of 8-bit ones.
template <class T, class Body>
__device__ inline void each_word(const SlotAddress& keys, std::int64_t slot, std::int32_t dim, bool aligned,
                                 Element element, Body&& body) {
  const T* key = reinterpret_cast<const T*>(keys.at(slot));
  for (std::int32_t d = static_cast<std::int32_t>(threadIdx.x % kLanes) * kPerWord<T>; d < dim;
       d += kLanes * kPerWord<T>) {
    float x[kPerWord<T>];
    load_floats(key, d, dim, aligned, element, x);
    body(d, x);
  }
}

/// The chunk of slots that a block reads: [begin, end) of row r. Walks gridDim.x further if there are more chunks
/// than blocks.
struct Chunk {
  std::int64_t row;
  std::int32_t begin, end;
};

/// Calls body(chunk) for every chunk of `size` slots of a due row that falls to this block. chunks: of the longest row.
template <class Body>
__device__ inline void each_chunk(const EvidenceArguments& e, std::int32_t chunks, std::int32_t size, Body&& body) {
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * chunks; work += gridDim.x) {
    const std::int64_t r = work / chunks;
    const std::int32_t begin = static_cast<std::int32_t>(work - r * chunks) * size, length = e.rows[r].length;
    if (!e.due(r) || begin >= length) continue;
    body(Chunk{r, begin, length - begin < size ? length : begin + size});
  }
}

/// Floats from one key to the next when 32 of them are in shared memory.
KVKEEP_HD inline std::int32_t staged_key(std::int32_t dim) { return (dim + 15) / 16 * 16 + 4; }

/// Dynamic shared memory of weighted_sum().
inline std::size_t weighted_sum_bytes(std::int32_t dim) {
  return sizeof(float) * static_cast<std::size_t>(kKeysAtOnce) * static_cast<std::size_t>(staged_key(dim) + 1);
}

/// Component threadIdx.x of the sum of the keys [begin, end) of a row, each times its weight: in fp32 over 32 keys, in
/// f64 beyond. `weigh(t, norm)` gives the weight of a slot and is called once for each.
template <class T, class Weigh>
__device__ inline double weighted_sum(const Row& row, std::int32_t begin, std::int32_t end, std::int32_t dim,
                                      Element element, Weigh&& weigh) {
  auto* keys = reinterpret_cast<float*>(dynamic_shared());
  const std::int32_t stride = staged_key(dim);
  float* weights = keys + kKeysAtOnce * stride;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes;
  const bool aligned = is_aligned(row.keys);
  double sum = 0;
  for (std::int32_t tile = begin; tile < end; tile += kKeysAtOnce) {
    const std::int32_t t = tile + own;
    float square = 0;
    if (t < end) {
      const float scale = key_scale<T>(row, t);
      each_word<T>(row.keys, t, dim, aligned, element, [&](std::int32_t d, const float* x) {
#pragma unroll
        for (int i = 0; i < kPerWord<T>; ++i) {
          const float k = x[i] * scale;
          keys[own * stride + d + i] = k;
          square = fmaf(k, k, square);
        }
      });
    }
    const float norm = sqrtf(sum_of_lanes(square));
    if (t < end && lane == 0) weights[own] = weigh(t, norm);
    __syncthreads();
    if (thread < dim) {
      const std::int32_t count = end - tile < kKeysAtOnce ? end - tile : kKeysAtOnce;
      float part = 0;
      for (std::int32_t i = 0; i < count; ++i)
        part += weights[i] * keys[i * stride + thread];  // not fused: opposite keys cancel
      sum += static_cast<double>(part);
    }
    __syncthreads();
  }
  return sum;
}

/// Chunks of the longest row.
inline std::int32_t key_chunks(const EvidenceArguments& e) {
  return (e.longest + tuning::kKeyChunk - 1) / tuning::kKeyChunk;
}

}  // namespace kvkeep::cuda
