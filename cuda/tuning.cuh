// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Sizes of blocks and tiles, in one place.

#include <atomic>
#include <cstdint>

namespace kvkeep::cuda::tuning {

/// Kernels begin while the one before them ends, where they can (begins_early() of launch.cuh). False: for comparison.
inline std::atomic<bool> kernels_overlap = true;

inline constexpr std::int32_t kCompactThreads = 256;
inline constexpr std::int32_t kCompactWords = 4;  ///< words of 16 bytes that a thread holds between reading and writing

/// Threads of the one block that works on a row of up to `longest` slots.
inline constexpr std::int32_t kMostThreads = 512;
constexpr std::int32_t threads_for(std::int32_t longest) { return longest <= 4096 ? 256 : kMostThreads; }

inline constexpr std::int32_t kNearSlots =
    3072;  ///< of the longest row whose AMS runs in shared memory: four blocks per multiprocessor have room
inline constexpr std::int32_t kProcessors = 132;  ///< multiprocessors of an H100
/// Of the block of such a row: the fewer rows, the more, so that all are at work at once.
constexpr std::int32_t near_threads_for(std::int32_t longest, std::int32_t rows) {
  const std::int32_t most = rows <= kProcessors ? 1024 : rows <= 2 * kProcessors ? 512 : 256;
  return longest > 512 ? most : 256;
}
/// Of the block of a longer row: 64 registers each, so that two blocks of half as many fit a multiprocessor where there
/// are more rows than that.
inline constexpr std::int32_t kFarThreads = 1024;
constexpr std::int32_t far_threads_for(std::int32_t longest, std::int32_t rows) {
  return rows <= kProcessors && longest > 4096 ? kFarThreads : threads_for(longest);
}
inline constexpr std::int32_t kWarpSegment = 4096;  ///< longest segment that is left to one warp

inline constexpr std::int32_t kTurnThreads = 128;

inline constexpr std::int32_t kAttentionChunk =
    512;  ///< slots that one block looks at: many chunks fill the machine even if there are few rows
inline constexpr std::int32_t kAttentionParts = 32;  ///< most pieces of a row that have statistics of their own:
                                                     ///< whoever needs them combines them again
inline constexpr std::int32_t kAttentionTile = 128;  ///< slots that are multiplied at a time
inline constexpr std::int32_t kAttentionSlice = 64;  ///< components of them that are in shared memory at a time
inline constexpr std::int32_t kMatrixThreads = 256;  ///< each warp has slots of its own, and all queries
inline constexpr std::int32_t kSplitThreads = 128;  ///< of a block that prepares queries for them, a warp for each tile
inline constexpr std::int32_t kMatrixSlots = 4096;  ///< most that a block of them looks at
inline constexpr std::int32_t kMatrixStart = 256;   ///< slots for which it could be at work while it begins

inline constexpr std::int32_t kKeyThreads = 256;  ///< of a block that reads keys alone, eight of them per slot
inline constexpr std::int32_t kKeyChunk = 1024;   ///< slots that one such block reads

inline constexpr std::int32_t kMomentThreads = 256;  ///< of the block that forms mean and covariance of one query head
inline constexpr std::int32_t kCholeskyThreads = 192;  ///< of the block that factorises it: three per multiprocessor
inline constexpr std::int32_t kMomentQueries = 32;     ///< queries that are in shared memory at a time while it does
inline constexpr std::int32_t kGramQueries = 512;      ///< that count, from which cuBLAS multiplies them: H100, counted
inline constexpr std::int32_t kGramTokens = 512;       ///< that it adds up in f32; the sums of more are joined in f64
inline constexpr std::int32_t kGramItems = 128;  ///< so many times that it multiplies in a call: 50 MB, as H100's L2
inline constexpr std::int32_t kExpectedThreads = 128;  ///< of a block that multiplies keys with a covariance
inline constexpr std::int32_t kExpectedChunk = 512;    ///< slots that one such block looks at

inline constexpr std::int32_t kCriticalThreads = 128;  ///< of a block that multiplies values with output weights
inline constexpr std::int32_t kCriticalHidden = 32;    ///< hidden units that matrix units multiply at a time

inline constexpr std::int32_t kTriThreads =
    128;  ///< of a block that multiplies keys with TriAttention's columns, one slot each
inline constexpr std::int32_t kStandardThreads = 512;  ///< of the block that normalises one query head of a row

inline constexpr std::int32_t kSimilarThreads = 256;  ///< of a block that looks for resembling keys
inline constexpr std::int32_t kSimilarOwned = 512;    ///< keys whose partners one such block looks for
inline constexpr std::int32_t kSimilarRows = 64;      ///< of them that are multiplied at a time
inline constexpr std::int32_t kSimilarColumns = 128;  ///< keys that they are compared with at a time
inline constexpr std::int32_t kSimilarSlice = 256;    ///< bytes of a key that are in shared memory at a time

inline constexpr std::int32_t kRankThreads = 1024;  ///< of the one block that sorts a prompt's scores
constexpr std::int32_t rank_threads_for(std::int32_t longest) { return longest <= 4096 ? 256 : kRankThreads; }

inline constexpr std::int32_t kVarianceThreads = 256;  ///< of a block that compares ranks
inline constexpr std::int32_t kVarianceTokens = 4096;  ///< tokens that one such block looks at

inline constexpr std::int32_t kMemoryHeads = 8;  ///< query heads that a block reads a memory for: one warp each
inline constexpr std::int32_t kMemoryThreads = kMemoryHeads * 32;
inline constexpr std::int32_t kMemorySpans = 64;  ///< spans whose logits one block makes
inline constexpr std::int32_t kMemoryTile = 64;   ///< entries that go into a softmax at a time
inline constexpr std::int32_t kMemoryBlocks =
    264;  ///< that fill the machine: below that, a row's spans are spread over more blocks,
inline constexpr std::int32_t kMemoryParts = 32;  ///< but over no more than these

inline constexpr std::int32_t kRouterThreads = 256;  ///< of a block that projects coarse keys or queries
inline constexpr std::int32_t kRouterTokens = 4;     ///< whose queries one such block projects

inline constexpr std::int32_t kFactorThreads = 256;  ///< of a block that decomposes a matrix, at most
inline constexpr std::int32_t kFactorDepth = 32;     ///< numbers of its vectors that are in shared memory at a time

inline constexpr std::int32_t kFoldThreads = 256;  ///< of a block that lists dropped slots, or stores one span

inline constexpr std::int32_t kFetchThreads = 256;
inline constexpr std::int32_t kFetchWords = 4;    ///< words of 16 bytes that a thread holds between reading and writing
inline constexpr std::int32_t kFetchBlocks = 32;  ///< that share the pieces of one list

}  // namespace kvkeep::cuda::tuning
