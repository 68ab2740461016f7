#include "recency.h"

#include "key_lanes.cuh"
#include "launch.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kKeyThreads) recency_kernel(RecencyArguments a, std::int32_t chunks) {
  each_chunk(a.evidence, chunks, [&](const Chunk& chunk) {
    float* g = a.scores + a.evidence.rows[chunk.row].first;
    for (std::int32_t t = chunk.begin + static_cast<std::int32_t>(threadIdx.x); t < chunk.end; t += tuning::kKeyThreads)
      g[t] = static_cast<float>(t);
  });
}

}  // namespace

void launch_recency(const RecencyArguments& arguments, Stream stream) {
  const std::int32_t chunks = key_chunks(arguments.evidence);
  launch("recency", recency_kernel,
         {.blocks = blocks_for(std::int64_t{arguments.evidence.count} * chunks), .threads = tuning::kKeyThreads},
         stream, arguments, chunks);
}

}  // namespace kvkeep::cuda
