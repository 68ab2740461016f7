// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A kernel that brings far bytes, in page-locked host memory, to the device: the device decides what is fetched, and
/// the host does not wait for it. No LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace kvkeep::cuda {

/// Bytes to copy.
struct FarPiece {
  const std::byte* from = nullptr;  ///< page-locked host memory that the device can read (cudaHostRegister,
                                    ///< cudaHostAlloc), or memory of the device
  std::byte* to = nullptr;          ///< on the device; pieces must not overlap
  std::int64_t bytes = 0;
};

struct FetchArguments {
  const FarPiece* pieces = nullptr;      ///< [lists][stride], on the device
  const std::int32_t* counts = nullptr;  ///< i32 [lists] pieces in each list, on the device
  std::int32_t lists = 0;                ///< at most 65535
  std::int32_t stride = 0;               ///< pieces from one list to the next; no list is longer
};

/// Copies every piece of every list. One launch. Cost: the bytes once over the bus, in words of 16 if both addresses
/// are multiples of 16, else in the widest that divides them. Throws InvalidArgument for negative sizes and more than
/// 65535 lists.
void launch_fetch(const FetchArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
