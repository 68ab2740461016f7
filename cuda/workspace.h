// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How memory that is allocated as one piece is cut into arrays: a caller's workspace, and a block's shared memory. No
/// LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"

namespace kvkeep::cuda {

/// Where a caller's workspace has to begin: kernels read parts of it by 16 and 32 bytes at a time. Any memory that CUDA
/// allocates does.
inline constexpr std::uintptr_t kWorkspaceAlignment = 32;

/// Throws InvalidArgument where it does not. Every launcher that takes one asks this before it launches.
inline void require_aligned(const char* launcher, const void* workspace) {
  KVKEEP_REQUIRE(reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment == 0, launcher,
                 ": workspace: begins ", reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment,
                 " bytes behind a multiple of ", kWorkspaceAlignment, "; allowed at one");
}

/// Hands out one part after the other, each at a multiple of 32 bytes from the beginning. If the workspace is null,
/// only its size is found.
class WorkspaceParts {
 public:
  KVKEEP_HD explicit WorkspaceParts(void* workspace) : base_(static_cast<std::byte*>(workspace)) {}

  template <class T>
  [[nodiscard]] KVKEEP_HD T* take(std::int64_t count) {
    std::byte* part = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + 31) / 32 * 32;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] KVKEEP_HD std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

/// The same of the dynamic shared memory, which only a kernel has: offsets from its beginning.
struct Parts {
  std::size_t bytes = 0;
  KVKEEP_HD std::size_t take(std::size_t wanted) {
    const std::size_t at = bytes;
    bytes += (wanted + 31) / 32 * 32;
    return at;
  }
};

}  // namespace kvkeep::cuda
