#include "given.h"

#include "element.cuh"
#include "launch.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

/// Blocks with the same y walk the tokens of one arrival.
template <class T>
__global__ void __launch_bounds__(tuning::kTurnThreads) given_push_kernel(PushGivenArguments a) {
  const GivenArrival& arrival = a.arrivals[blockIdx.y];
  const auto stride = static_cast<std::int64_t>(gridDim.x) * tuning::kTurnThreads;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * tuning::kTurnThreads + threadIdx.x; t < arrival.tokens;
       t += stride)
    arrival.to[t] = to_float(*reinterpret_cast<const T*>(arrival.from + t * a.token_stride));
}

}  // namespace

void launch_push_given(const PushGivenArguments& arguments, Stream stream) {
  check_wide("give", "scores", arguments.element);
  std::int32_t tokens = 0;
  for (std::int32_t i = 0; i < arguments.count; ++i)
    tokens = tokens < arguments.arrivals[i].tokens ? arguments.arrivals[i].tokens : tokens;
  dim3 blocks = blocks_of_threads(tokens, tuning::kTurnThreads);
  blocks.y = static_cast<unsigned>(arguments.count);
  with_wide_element(arguments.element, [&](auto element) {
    launch("given_push", given_push_kernel<decltype(element)>, {.blocks = blocks, .threads = tuning::kTurnThreads},
           stream, arguments);
  });
}

}  // namespace kvkeep::cuda
