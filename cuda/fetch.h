#pragma once
/// Bytes that lie far, in page-locked host memory, brought to the device by a kernel: what is fetched was decided on
/// the device, and the host does not wait for it. No LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace kvkeep::cuda {

/// Bytes on their way.
struct FarPiece {
  const std::byte* from = nullptr;  ///< page-locked host memory that the device can read (cudaHostRegister, or
                                    ///< FarStoreOptions::allocate over cudaHostAlloc), or memory of the device
  std::byte* to = nullptr;          ///< on the device; pieces must not overlap
  std::int64_t bytes = 0;
};

struct FetchArguments {
  const FarPiece* pieces = nullptr;      ///< [lists][stride], on the device
  const std::int32_t* counts = nullptr;  ///< i32 [lists] pieces of each list that are there, on the device
  std::int32_t lists = 0;                ///< at most 65535
  std::int32_t stride = 0;               ///< pieces from list to list; no list is longer
};

/// Copies every piece of every list. One launch. Cost: the bytes once over the bus, in words of 16 where both addresses
/// are multiples of 16, else in the widest that divides them. Throws InvalidArgument for negative sizes and more than
/// 65535 lists.
void launch_fetch(const FetchArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
