// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What every kernel builds on: CUDA itself, or, in tests on a machine without a GPU, the execution model of
/// tests/cuda_model, which compiles the same bodies with a host compiler. No LibTorch in this folder.

#include <cstddef>
#include <cstdint>

#if defined(KVKEEP_CUDA_MODEL)
#include "cuda_model.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <type_traits>

/// An array in the block's static shared memory. The execution model has one of exactly that size for every block.
#define KVKEEP_SHARED(Type, name, count) __shared__ Type name[count]

namespace kvkeep::cuda {
namespace wmma = nvcuda::wmma;

/// The block's dynamic shared memory, aligned to 32 bytes, as wmma requires for its tiles.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(32) unsigned char kvkeep_dynamic_shared[];
  return reinterpret_cast<std::byte*>(kvkeep_dynamic_shared);
}

/// 2^x in one instruction, to 2 units in the last place; 0 for results below the smallest normal number.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Begins to copy kBytes, 4, 8 or 16, from global to shared memory, both aligned to that. They are there after
/// wait_for_copies() of the same thread, and for others after a barrier behind it.
template <int kBytes = 16>
__device__ inline void copy_ahead(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Begins to bring what is there to the L2.
__device__ inline void fetch_ahead(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

/// The first statement of every kernel. launch() may let it begin while the kernel before it on the stream is at work:
/// this waits until all of that has been written, and then lets the next kernel begin.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// sum += left * right of 16 x 16 and 16 x 8 numbers of type S, by a warp: mma.m16n8k16 of PTX. With g = lane / 4 and
/// c = lane % 4, left[0] is row g, columns 2c and 2c + 1; left[1] the same of row g + 8; left[2] and left[3] the same,
/// 8 columns further. right[0] is column g, rows 2c and 2c + 1; right[1] 8 rows further. sum[0] and sum[1] are row g,
/// columns 2c and 2c + 1; sum[2] and sum[3] the same of row g + 8.
template <class S>
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  if constexpr (std::is_same_v<S, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace kvkeep::cuda
#endif
