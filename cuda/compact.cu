// SPDX-License-Identifier: Apache-2.0
#include "compact.h"

#include "launch.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kCompactThreads;
using tuning::kCompactWords;

constexpr std::int32_t kFewRows = 200;  ///< fewer of them are moved by two blocks per side

/// Moves words [begin, end) of every slot of one side of one row upwards, tile by tile. Every slot of a tile has been
/// read before the first of it is written; what is read later comes after it.
template <class Word>
__device__ void move_side(SlotAddress from, const SlotAddress& after, const std::int32_t* kept, std::int32_t count,
                          std::int32_t begin, std::int32_t end) {
  SlotAddress to = from;
  from.base += begin * static_cast<std::int32_t>(sizeof(Word));
  to.base = after.base + begin * static_cast<std::int32_t>(sizeof(Word)), to.pages = after.pages;
  const std::int32_t words = end - begin, slots = kCompactThreads / words, rest = kCompactThreads - slots * words;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  struct Place {
    std::int32_t slot, word;
  };
  const auto advance = [&](Place& place) {
    place.slot += slots, place.word += rest;
    if (place.word >= words) place.word -= words, ++place.slot;
  };
  Place place{thread / words, thread % words};
  constexpr std::int64_t kTile = std::int64_t{kCompactThreads} * kCompactWords;
  for (auto left = static_cast<std::int32_t>((std::int64_t{count} * words + kTile - 1) / kTile); left > 0; --left) {
    Word held[kCompactWords] = {};
    std::int32_t source[kCompactWords];
    std::uint32_t moves = 0;  // a bit for each
    Place read = place;
#pragma unroll
    for (int i = 0; i < kCompactWords; ++i, advance(read)) source[i] = kept[read.slot < count ? read.slot : count - 1];
    read = place;
#pragma unroll
    for (int i = 0; i < kCompactWords; ++i, advance(read)) {
      const std::byte* const at = from.at(static_cast<std::uint32_t>(source[i]));
      const bool moved = read.slot < count && at != to.at(static_cast<std::uint32_t>(read.slot));
      if (moved) held[i] = reinterpret_cast<const Word*>(at)[read.word];
      moves |= moved ? 1U << i : 0U;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCompactWords; ++i, advance(place))
      if ((moves >> i & 1U) != 0)
        reinterpret_cast<Word*>(to.at(static_cast<std::uint32_t>(place.slot)))[place.word] = held[i];
  }
}

/// What every slot of both sides must be aligned to, as set bits.
__device__ inline std::uint64_t alignment_of(const SlotAddress& a, const SlotAddress& b) {
  return reinterpret_cast<std::uintptr_t>(a.base) | reinterpret_cast<std::uintptr_t>(b.base) |
         static_cast<std::uint64_t>(a.stride) | static_cast<std::uint64_t>(b.stride) |
         static_cast<std::uint64_t>(a.width) | static_cast<std::uint64_t>(a.page_stride) |
         static_cast<std::uint64_t>(b.page_stride);
}

__device__ SlotAddress column(const void* base) {
  return {reinterpret_cast<std::byte*>(const_cast<void*>(base)), 4, 4};
}

constexpr unsigned kSides = Row::kSides + 4;  ///< those of a row, positions, credit, tally, given scores

__global__ void __launch_bounds__(tuning::kCompactThreads, 5) compact_kernel(CompactArguments a) {
  wait_for_earlier_kernels();
  const unsigned r = blockIdx.x;  // no count of rows is larger than a grid
  const std::int64_t begin = a.indptr[r];
  const auto count = a.counts != nullptr ? a.counts[r] : static_cast<std::int32_t>(a.indptr[r + 1] - begin);
  const std::int32_t* kept = a.slots + begin;
  const Row& row = a.rows[r];
  if (blockIdx.y < Row::kSides) {
    const SlotAddress* const side = row.side(static_cast<int>(blockIdx.y));
    if (side == nullptr) return;
    SlotAddress to = *side;
    if (to.pages != nullptr && a.pages_after != nullptr) to.pages = a.pages_after + row.sequence * a.pages_stride;
    with_word(alignment_of(*side, to), [&](auto word) {
      const auto words = static_cast<std::int32_t>(side->width / static_cast<std::int64_t>(sizeof word)),
                 first = static_cast<std::int32_t>(words * blockIdx.z / gridDim.z),
                 last = static_cast<std::int32_t>(words * (blockIdx.z + 1) / gridDim.z);
      if (first < last) move_side<decltype(word)>(*side, to, kept, count, first, last);
    });
  } else if (a.columns != nullptr && blockIdx.z == 0) {
    const ColumnMove& move = a.columns[r];
    const unsigned n = blockIdx.y - Row::kSides;
    const void* from = n == 0   ? static_cast<const void*>(move.positions)
                       : n == 1 ? move.new_credit
                       : n == 2 ? move.new_tally
                                : move.given;
    const void* to = n == 0   ? static_cast<const void*>(move.positions)
                     : n == 1 ? move.credit
                     : n == 2 ? move.tally
                              : move.given;
    if (from == nullptr || to == nullptr) return;
    move_side<std::uint32_t>(column(from), column(to), kept, count, 0, 1);
  }
}

template <class Word>
__device__ void gather_side(const SlotAddress& from, const std::int32_t* kept, std::int64_t count, std::byte* to) {
  const auto words = static_cast<std::int32_t>(from.width / static_cast<std::int64_t>(sizeof(Word)));
  for (std::int64_t n = threadIdx.x; n < count * words; n += blockDim.x) {
    const std::int64_t slot = n / words, word = n - slot * words;
    reinterpret_cast<Word*>(to)[n] = reinterpret_cast<const Word*>(from.at(kept[slot]))[word];
  }
}

__global__ void __launch_bounds__(tuning::kCompactThreads) compact_gather_kernel(GatherArguments a) {
  wait_for_earlier_kernels();
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const std::int64_t begin = a.indptr[r], count = a.indptr[r + 1] - begin;
    const SlotAddress& side = blockIdx.y == 0 ? a.rows[r].keys : a.rows[r].values;
    std::byte* to = blockIdx.y == 0 ? a.keys : a.values;
    if (to == nullptr) continue;
    to += begin * side.width;
    const SlotAddress packed{to, side.width, side.width};
    with_word(alignment_of(side, packed),
              [&](auto word) { gather_side<decltype(word)>(side, a.slots + begin, count, to); });
  }
}

}  // namespace

void launch_compact(const CompactArguments& arguments, Stream stream) {
  const unsigned parts = arguments.count < kFewRows ? 2 : 1;  // of every slot
  launch("compact", compact_kernel,
         {.blocks = blocks_for(arguments.count, kSides, parts), .threads = kCompactThreads, .shared_bytes = 0}, stream,
         arguments);
}

void launch_gather(const GatherArguments& arguments, Stream stream) {
  launch("compact_gather", compact_gather_kernel,
         {.blocks = blocks_for(arguments.count, 2), .threads = kCompactThreads, .shared_bytes = 0}, stream, arguments);
}

}  // namespace kvkeep::cuda
