#pragma once
/// Sizes of blocks and tiles, in one place.

#include <cstdint>

namespace kvkeep::cuda::tuning {

inline constexpr std::int32_t kCompactThreads = 256;
inline constexpr std::int32_t kCompactWords = 4;  ///< words of 16 bytes that a thread holds between reading and writing

/// Threads of the one block that works on a row of up to `longest` slots.
inline constexpr std::int32_t kMostThreads = 512;
constexpr std::int32_t threads_for(std::int32_t longest) { return longest <= 4096 ? 256 : kMostThreads; }

inline constexpr std::int32_t kWarpSegment = 4096;  ///< longest segment that is left to one warp

}  // namespace kvkeep::cuda::tuning
