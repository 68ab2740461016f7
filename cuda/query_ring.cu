#include "query_ring.h"

#include "launch.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

template <class Word>
__device__ void copy_token(const QueryLayout& layout, const std::byte* from, std::byte* to) {
  const auto words = static_cast<std::int32_t>(layout.head_bytes / static_cast<std::int64_t>(sizeof(Word)));
  for (auto n = static_cast<std::int32_t>(threadIdx.x); n < layout.heads * words; n += tuning::kTurnThreads) {
    const std::int32_t head = n / words, word = n - head * words;
    reinterpret_cast<Word*>(to)[n] = reinterpret_cast<const Word*>(from + head * layout.head_stride)[word];
  }
}

/// Blocks with the same y walk the tokens of one arrival.
__global__ void __launch_bounds__(tuning::kTurnThreads) push_queries_kernel(PushQueriesArguments a) {
  const QueryArrival& arrival = a.arrivals[blockIdx.y];
  const QueryLayout& layout = a.layout;
  const std::int64_t token_bytes = layout.heads * layout.head_bytes;
  for (auto i = static_cast<std::int32_t>(blockIdx.x); i < arrival.tokens; i += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t place = (arrival.at + i) % arrival.capacity;
    const std::byte* from = arrival.from + i * layout.token_stride;
    std::byte* to = arrival.ring + place * token_bytes;
    if (threadIdx.x == 0) arrival.positions[place] = arrival.position + i;
    const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                               static_cast<std::uint64_t>(layout.head_stride) |
                               static_cast<std::uint64_t>(layout.head_bytes);
    with_word(bits, [&](auto word) { copy_token<decltype(word)>(layout, from, to); });
  }
}

}  // namespace

void launch_push_queries(const PushQueriesArguments& arguments, Stream stream) {
  std::int32_t tokens = 0;
  for (std::int32_t i = 0; i < arguments.count; ++i)
    tokens = tokens < arguments.arrivals[i].tokens ? arguments.arrivals[i].tokens : tokens;
  launch("push_queries", push_queries_kernel,
         {.blocks = blocks_for(tokens, static_cast<unsigned>(arguments.count)), .threads = tuning::kTurnThreads},
         stream, arguments);
}

}  // namespace kvkeep::cuda
