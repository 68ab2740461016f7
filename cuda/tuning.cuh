#pragma once
/// Sizes of blocks and tiles, in one place.

#include <cstdint>

namespace kvkeep::cuda::tuning {

inline constexpr std::int32_t kCompactThreads = 256;
inline constexpr std::int32_t kCompactWords = 4;  ///< words of 16 bytes that a thread holds between reading and writing
inline constexpr std::int32_t kAllotThreads = 256;  ///< of the one block that divides and selects a row

}  // namespace kvkeep::cuda::tuning
