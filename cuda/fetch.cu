// SPDX-License-Identifier: Apache-2.0
#include "fetch.h"

#include <algorithm>

#include "launch.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kFetchBlocks;
using tuning::kFetchThreads;
using tuning::kFetchWords;

/// Copies this thread's words of a piece, out of [0, count). A thread requests several words before it writes the first
/// of them, since their latency is long.
template <class Word>
__device__ void copy_words(const FarPiece& piece, std::int64_t count) {
  const auto* from = reinterpret_cast<const Word*>(piece.from);
  auto* to = reinterpret_cast<Word*>(piece.to);
  for (std::int64_t first = threadIdx.x; first < count; first += kFetchThreads * kFetchWords) {
    Word held[kFetchWords];
#pragma unroll
    for (int i = 0; i < kFetchWords; ++i)
      if (first + i * kFetchThreads < count) held[i] = from[first + i * kFetchThreads];
#pragma unroll
    for (int i = 0; i < kFetchWords; ++i)
      if (first + i * kFetchThreads < count) to[first + i * kFetchThreads] = held[i];
  }
}

/// Blocks with the same y walk the pieces of one list.
__global__ void __launch_bounds__(kFetchThreads) fetch_kernel(FetchArguments a) {
  wait_for_earlier_kernels();
  const FarPiece* list = a.pieces + std::int64_t{blockIdx.y} * a.stride;
  const std::int32_t count = a.counts[blockIdx.y];
  for (auto p = static_cast<std::int32_t>(blockIdx.x); p < count; p += static_cast<std::int32_t>(gridDim.x)) {
    const FarPiece piece = list[p];
    with_word(reinterpret_cast<std::uintptr_t>(piece.from) | reinterpret_cast<std::uintptr_t>(piece.to),
              [&](auto word) {
                constexpr auto kBytes = static_cast<std::int64_t>(sizeof(word));
                const std::int64_t words = piece.bytes / kBytes, last = words * kBytes;
                copy_words<decltype(word)>(piece, words);
                if (threadIdx.x < piece.bytes - last) piece.to[last + threadIdx.x] = piece.from[last + threadIdx.x];
              });
  }
}

}  // namespace

void launch_fetch(const FetchArguments& a, Stream stream) {
  constexpr std::int32_t kMostLists = 65535;
  KVKEEP_REQUIRE(a.lists >= 0 && a.lists <= kMostLists && a.stride >= 0, "fetch: ", a.lists, " lists of ", a.stride,
                 " pieces; allowed 0 to ", kMostLists, " of 0 or more");
  launch("fetch", fetch_kernel,
         {.blocks = blocks_for(std::min(a.stride, kFetchBlocks), static_cast<unsigned>(a.lists)),
          .threads = kFetchThreads},
         stream, a);
}

}  // namespace kvkeep::cuda
