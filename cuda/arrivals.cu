// SPDX-License-Identifier: Apache-2.0
#include "arrivals.h"

#include <algorithm>

#include "element.cuh"
#include "launch.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

/// All threads of the block copy the query of one token.
__device__ void copy_query(const QueryLayout& layout, std::int32_t token, std::byte* to) {
  const std::byte* from = layout.from + token * layout.token_stride;
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                             static_cast<std::uint64_t>(layout.head_stride) |
                             static_cast<std::uint64_t>(layout.head_bytes);
  with_word(bits, [&](auto typed) {
    using Word = decltype(typed);
    const auto words = static_cast<std::int32_t>(layout.head_bytes / static_cast<std::int64_t>(sizeof(Word)));
    for (auto n = static_cast<std::int32_t>(threadIdx.x); n < layout.heads * words; n += tuning::kTurnThreads) {
      const std::int32_t head = n / words, word = n - head * words;
      reinterpret_cast<Word*>(to)[n] = reinterpret_cast<const Word*>(from + head * layout.head_stride)[word];
    }
  });
}

/// And their log-sum-exps, which came with them.
__device__ void copy_normalisers(const QueryLayout& layout, std::int32_t token, float* to) {
  const float* from = layout.normalisers + token * layout.normaliser_token_stride;
  for (auto h = static_cast<std::int32_t>(threadIdx.x); h < layout.heads; h += tuning::kTurnThreads)
    to[h] = from[h * layout.normaliser_head_stride];
}

/// Blocks with the same y walk the tokens of one arrival.
__global__ void __launch_bounds__(tuning::kTurnThreads) arrivals_queries_kernel(PushQueriesArguments a) {
  wait_for_earlier_kernels();
  const QueryArrival& arrival = a.arrivals[blockIdx.y];
  const std::int64_t token_bytes = a.layout.heads * a.layout.head_bytes;
  for (auto i = static_cast<std::int32_t>(blockIdx.x); i < arrival.tokens; i += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t place = (arrival.at + i) % arrival.capacity;
    if (threadIdx.x == 0) arrival.positions[place] = arrival.position + i;
    copy_query(a.layout, arrival.first + i, arrival.ring + place * token_bytes);
    if (a.layout.normalisers != nullptr)
      copy_normalisers(a.layout, arrival.first + i, arrival.normalisers + place * a.layout.heads);
  }
}

/// One token per block.
__global__ void __launch_bounds__(tuning::kTurnThreads) arrivals_queries_step_kernel(PushStepArguments a) {
  wait_for_earlier_kernels();
  for (auto t = static_cast<std::int32_t>(blockIdx.x); t < a.tokens; t += static_cast<std::int32_t>(gridDim.x)) {
    const QueryPlace place = a.places[t];
    if (place.query == nullptr) continue;
    if (threadIdx.x == 0) *place.position = place.logical;
    copy_query(a.layout, t, place.query + a.offset.queries);
    if (a.layout.normalisers != nullptr) copy_normalisers(a.layout, t, place.normalisers + a.offset.normalisers);
  }
}

/// Blocks with the same y walk the tokens of one arrival.
template <class T>
__global__ void __launch_bounds__(tuning::kTurnThreads) arrivals_given_kernel(PushGivenArguments a) {
  wait_for_earlier_kernels();
  const GivenArrival& arrival = a.arrivals[blockIdx.y];
  const auto stride = static_cast<std::int64_t>(gridDim.x) * tuning::kTurnThreads;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * tuning::kTurnThreads + threadIdx.x; t < arrival.tokens;
       t += stride)
    arrival.to[t] = to_float(*reinterpret_cast<const T*>(arrival.from + t * a.token_stride));
}

/// Tokens of the longest arrival.
template <class Arguments>
std::int32_t most_tokens(const Arguments& arguments) {
  std::int32_t most = 0;
  for (std::int32_t i = 0; i < arguments.count; ++i) most = std::max(most, arguments.arrivals[i].tokens);
  return most;
}

}  // namespace

void launch_push_queries(const PushQueriesArguments& arguments, Stream stream) {
  launch("arrivals_queries", arrivals_queries_kernel,
         {.blocks = blocks_for(most_tokens(arguments), static_cast<unsigned>(arguments.count)),
          .threads = tuning::kTurnThreads},
         stream, arguments);
}

void launch_push_step(const PushStepArguments& arguments, Stream stream) {
  launch("arrivals_queries_step", arrivals_queries_step_kernel,
         {.blocks = blocks_for(arguments.tokens), .threads = tuning::kTurnThreads}, stream, arguments);
}

void launch_push_given(const PushGivenArguments& arguments, Stream stream) {
  check_wide("give", "scores", arguments.element);
  dim3 blocks = blocks_of_threads(most_tokens(arguments), tuning::kTurnThreads);
  blocks.y = static_cast<unsigned>(arguments.count);
  with_wide_element(arguments.element, [&](auto element) {
    launch("arrivals_given", arrivals_given_kernel<decltype(element)>,
           {.blocks = blocks, .threads = tuning::kTurnThreads}, stream, arguments);
  });
}

}  // namespace kvkeep::cuda
