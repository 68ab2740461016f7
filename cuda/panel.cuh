// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Products in f32 of slots in shared memory with rows that are brought there one panel at a time. A warp has 16 slots,
/// a thread four of them and four rows.

#include "platform.cuh"

namespace kvkeep::cuda {

inline constexpr std::int32_t kPanelRows = 32, kPanelSlots = 64, kPanelThreads = 128;
inline constexpr std::int32_t kPanelSlice = 64;                ///< components of the rows that are there at a time
inline constexpr std::int32_t kPanelStride = kPanelSlice + 4;  ///< threads read rows of it without conflicts

/// Which slots and rows the thread has: slot0 and every fourth from there, row0 and every eighth.
struct PanelPlace {
  std::int32_t slot0, row0;

  __device__ PanelPlace()
      : slot0(static_cast<std::int32_t>(threadIdx.x / 32 * 16 + threadIdx.x % 4)),
        row0(static_cast<std::int32_t>(threadIdx.x % 32 / 4)) {}
};

/// products[4 i + j]: slot slot0 + 4 i times row row0 + 8 j, components [d0, padded), one chain of multiply-adds.
/// load(row, d): four components of a row from d on, zeros where there are none. `padded`: a multiple of 4. The whole
/// block calls, and waits before anything is read.
template <class Load>
__device__ __forceinline__ void multiply_panel(const Load& load, std::int32_t d0, std::int32_t padded,
                                               const float* slots, std::int32_t stride, PanelPlace place, float* panel,
                                               float (&products)[16]) {
#pragma unroll
  for (int k = 0; k < 16; ++k) products[k] = 0;
  for (; d0 < padded; d0 += kPanelSlice) {
    const std::int32_t words = (padded - d0 < kPanelSlice ? padded - d0 : kPanelSlice) / 4;
    __syncthreads();
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < kPanelRows * words; i += kPanelThreads) {
      const std::int32_t row = i / words, d = (i - row * words) * 4;
      *reinterpret_cast<float4*>(panel + row * kPanelStride + d) = load(row, d0 + d);
    }
    __syncthreads();
    for (std::int32_t d = 0; d < 4 * words; d += 4) {
      float4 u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        u[j] = *reinterpret_cast<const float4*>(panel + (place.row0 + 8 * j) * kPanelStride + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 k = *reinterpret_cast<const float4*>(slots + (place.slot0 + 4 * i) * stride + d0 + d);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          products[4 * i + j] =
              fmaf(k.w, u[j].w, fmaf(k.z, u[j].z, fmaf(k.y, u[j].y, fmaf(k.x, u[j].x, products[4 * i + j]))));
      }
    }
  }
}

/// Sum over the threads that have the same slot, in a fixed order, the same in each of them.
__device__ inline float sum_of_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  return x;
}

}  // namespace kvkeep::cuda
