#include "tova.h"

#include "key_lanes.cuh"
#include "launch.cuh"

namespace kvkeep::cuda {
namespace {

/// One block per chunk of a row; with all heads, of the first row, for all rows of its group.
__global__ void __launch_bounds__(tuning::kKeyThreads, 4) tova_kernel(TovaArguments a, std::int32_t chunks) {
  const EvidenceArguments& e = a.evidence;
  each_chunk(e, chunks, [&](const Chunk& chunk) {
    float* g = a.scores + e.rows[chunk.row].first;
    const float* newest = a.newest + e.rows[chunk.row].first;
    const bool asked = a.windows[chunk.row].queries > 0;  // else the oldest leave first
    if (asked && a.all_heads && chunk.row % e.kv_heads != 0) return;
    const float share = 1.0F / static_cast<float>(e.kv_heads);
    for (std::int32_t t = chunk.begin + static_cast<std::int32_t>(threadIdx.x); t < chunk.end;
         t += tuning::kKeyThreads) {
      if (!asked || !a.all_heads) {
        g[t] = asked ? newest[t] : static_cast<float>(t);
        continue;
      }
      float sum = newest[t];
      for (std::int32_t h = 1; h < e.kv_heads; ++h) sum += a.newest[e.rows[chunk.row + h].first + t];
      for (std::int32_t h = 0; h < e.kv_heads; ++h) a.scores[e.rows[chunk.row + h].first + t] = sum * share;
    }
  });
}

}  // namespace

void launch_tova(const TovaArguments& arguments, Stream stream) {
  const std::int32_t chunks = key_chunks(arguments.evidence);
  launch("tova", tova_kernel,
         {.blocks = blocks_for(std::int64_t{arguments.evidence.count} * chunks), .threads = tuning::kKeyThreads},
         stream, arguments, chunks);
}

}  // namespace kvkeep::cuda
