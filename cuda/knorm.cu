#include "knorm.h"

#include "key_lanes.cuh"
#include "launch.cuh"

namespace kvkeep::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(tuning::kKeyThreads) knorm_kernel(KnormArguments a, std::int32_t chunks) {
  const auto own = static_cast<std::int32_t>(threadIdx.x / kLanes),
             lane = static_cast<std::int32_t>(threadIdx.x % kLanes);
  each_chunk(a.evidence, chunks, [&](const Chunk& chunk) {
    const Row& row = a.evidence.rows[chunk.row];
    const bool aligned = is_aligned(row.keys);
    for (std::int32_t tile = chunk.begin; tile < chunk.end; tile += kKeysAtOnce) {
      const std::int32_t t = tile + own;
      float square = 0;
      if (t < chunk.end)
        each_word<T>(row.keys, t, a.evidence.dim, aligned, a.evidence.keys, [&](std::int32_t, const float* x) {
#pragma unroll
          for (int i = 0; i < kPerWord<T>; ++i) square = fmaf(x[i], x[i], square);
        });
      square = sum_of_lanes(square);
      if (t < chunk.end && lane == 0) a.scores[row.first + t] = -(sqrtf(square) * fabsf(key_scale<T>(row, t)));
    }
  });
}

}  // namespace

void launch_knorm(const KnormArguments& arguments, Stream stream) {
  check_dim("knorm", arguments.evidence.dim);
  const std::int32_t chunks = key_chunks(arguments.evidence);
  with_element(arguments.evidence.keys, [&](auto type) {
    launch("knorm", knorm_kernel<decltype(type)>,
           {.blocks = blocks_for(std::int64_t{arguments.evidence.count} * chunks), .threads = tuning::kKeyThreads},
           stream, arguments, chunks);
  });
}

}  // namespace kvkeep::cuda
