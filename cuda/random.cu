#include "random.h"

#include "key_lanes.cuh"
#include "kvkeep/score/draw.h"
#include "launch.cuh"

namespace kvkeep::cuda {
namespace {

__global__ void __launch_bounds__(tuning::kKeyThreads) random_kernel(RandomArguments a, std::int32_t chunks) {
  each_chunk(a.evidence, chunks, [&](const Chunk& chunk) {
    const Row& row = a.evidence.rows[chunk.row];
    const std::uint64_t of_row = draws_of_row(a.seed, row.layer, row.head);
    for (std::int32_t t = chunk.begin + static_cast<std::int32_t>(threadIdx.x); t < chunk.end; t += tuning::kKeyThreads)
      a.scores[row.first + t] = draw(of_row, row.positions[t]);
  });
}

}  // namespace

void launch_random(const RandomArguments& arguments, Stream stream) {
  const std::int32_t chunks = key_chunks(arguments.evidence);
  launch("random", random_kernel,
         {.blocks = blocks_for(std::int64_t{arguments.evidence.count} * chunks), .threads = tuning::kKeyThreads},
         stream, arguments, chunks);
}

}  // namespace kvkeep::cuda
