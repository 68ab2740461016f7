// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The one way a kernel starts.

#include <map>
#include <utility>

#include "kvkeep/core/error.h"
#include "platform.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {

/// How a kernel is spread over the machine.
struct Grid {
  dim3 blocks{1, 1, 1};
  std::int32_t threads = 0;      ///< per block, a multiple of 32
  std::size_t shared_bytes = 0;  ///< dynamic
};

/// Blocks for `n` pieces of work in x: as many, up to what x can hold; a kernel walks the rest in strides of gridDim.x.
inline dim3 blocks_for(std::int64_t n, unsigned y = 1, unsigned z = 1) {
  constexpr std::int64_t kMost = 0x7FFFFFFF;
  return {static_cast<unsigned>(n < kMost ? n : kMost), y, z};
}

/// Blocks of `threads` for `n` pieces of work, one per thread.
inline dim3 blocks_of_threads(std::int64_t n, std::int32_t threads) { return blocks_for((n + threads - 1) / threads); }

/// Whether `kernel` may begin before the one in front of it has ended: its code on the current device waits for that,
/// wait_for_earlier_kernels(), as code for sm_90 and newer does. Code for older chips that a newer one translates does
/// not, so the chip alone says nothing. Graphs know of it since CUDA 12.3.
inline bool begins_early(const void* kernel) {
  if (!tuning::kernels_overlap) return false;
  constexpr int kFirstDriver = 12030;
  static const bool known = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= kFirstDriver;
  }();
  if (!known) return false;
  thread_local std::map<std::pair<const void*, int>, bool> found;  // asking takes a microsecond
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const auto [place, is_new] = found.try_emplace({kernel, device}, false);
  if (cudaFuncAttributes code{}; is_new && cudaFuncGetAttributes(&code, kernel) == cudaSuccess)
    place->second = code.ptxVersion >= 90;
  return place->second;
}

/// Starts `kernel` on `stream`, before the one in front of it has ended if it can. Does nothing if there is no block.
/// Throws DeviceError with the kernel's name when CUDA refuses it.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            Arguments&&... arguments) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
#if defined(KVKEEP_CUDA_MODEL)
  model::name_launch(name);
#endif
  cudaError_t status = cudaSuccess;
  // Without asking a block gets 48 KiB, what the kernel declares as static included, which is not known here.
  if (grid.shared_bytes > 0)
    status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(grid.shared_bytes));
  if (status == cudaSuccess) {
    // Returns what became of this launch. cudaGetLastError() would also tell of an error that some earlier call left.
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{grid.blocks,
                                    dim3(static_cast<unsigned>(grid.threads)),
                                    grid.shared_bytes,
                                    stream,
                                    &early,
                                    begins_early(reinterpret_cast<const void*>(kernel)) ? 1U : 0U};
    status = cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...);
  }
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, name, ": the launch failed: ", cudaGetErrorString(status),
                    "; given ", grid.blocks.x, " x ", grid.blocks.y, " x ", grid.blocks.z, " blocks of ", grid.threads,
                    " threads with ", grid.shared_bytes, " bytes of shared memory");
}

}  // namespace kvkeep::cuda
