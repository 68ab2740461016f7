#include "snapkv.h"

#include "key_lanes.cuh"
#include "kvkeep/core/pool.h"
#include "launch.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kKeyThreads) snapkv_kernel(SnapKVArguments a, std::int32_t chunks) {
  each_chunk(a.evidence, chunks, [&](const Chunk& chunk) {
    const std::int64_t first = a.evidence.rows[chunk.row].first;
    const RowWindow window = a.windows[chunk.row];
    for (std::int32_t t = chunk.begin + static_cast<std::int32_t>(threadIdx.x); t < chunk.end;
         t += tuning::kKeyThreads) {
      float g = 0;
      if (window.queries == 0)
        g = static_cast<float>(t);
      else if (t < window.history)
        g = a.average ? pooled_average(a.attention + first, window.history, a.pool, t)
                      : pooled_max(a.attention + first, window.history, a.pool, t);
      a.scores[first + t] = g;
    }
  });
}

}  // namespace

void launch_snapkv(const SnapKVArguments& arguments, Stream stream) {
  check_pool("snapkv", arguments.pool);
  const std::int32_t chunks = key_chunks(arguments.evidence);
  launch("snapkv", snapkv_kernel,
         {.blocks = blocks_for(std::int64_t{arguments.evidence.count} * chunks), .threads = tuning::kKeyThreads},
         stream, arguments, chunks);
}

}  // namespace kvkeep::cuda
