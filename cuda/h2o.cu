#include "h2o.h"

#include "key_lanes.cuh"
#include "kvkeep/core/row_window.h"
#include "kvkeep/score/h2o.h"
#include "launch.cuh"
#include "window_attention.h"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

struct H2OTask {
  H2OArguments a;
  RowWindow* windows;  ///< [count]
  void* rest;          ///< window_attention_workspace_bytes()
};

/// Divides the workspace. Returns its size.
std::int64_t divide(const H2OArguments& a, H2OTask& task) {
  WorkspaceParts parts(a.workspace);
  task.a = a;
  task.a.evidence.limits = nullptr;
  task.windows = parts.take<RowWindow>(a.evidence.count);
  task.rest = parts.take<std::byte>(window_attention_workspace_bytes(a.evidence, a.window));
  return parts.bytes();
}

__global__ void __launch_bounds__(tuning::kTurnThreads) h2o_windows_kernel(H2OTask task) {
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t r = std::int64_t{blockIdx.x} * tuning::kTurnThreads + threadIdx.x; r < e.count;
       r += std::int64_t{gridDim.x} * tuning::kTurnThreads)
    task.windows[r] = {H2O::new_queries(e.rows[r], e.queries[r / e.kv_heads], task.a.window), e.rows[r].length};
}

__global__ void __launch_bounds__(tuning::kKeyThreads) h2o_tally_kernel(H2OTask task, std::int32_t chunks) {
  each_chunk(task.a.evidence, chunks, [&](const Chunk& chunk) {
    const Row& row = task.a.evidence.rows[chunk.row];
    if (row.tally == nullptr) return;
    const std::int32_t end = row.tally_length < chunk.end ? row.tally_length : chunk.end;
    for (std::int32_t t = chunk.begin + static_cast<std::int32_t>(threadIdx.x); t < end; t += tuning::kKeyThreads)
      task.a.scores[row.first + t] += row.tally[t];
  });
}

}  // namespace

std::int64_t h2o_workspace_bytes(const H2OArguments& arguments) {
  H2OTask task{};
  return divide(arguments, task);
}

void launch_h2o(const H2OArguments& a, Stream stream) {
  require_aligned("h2o", a.workspace);
  check_dim("h2o", a.evidence.dim);
  H2OTask task{};
  divide(a, task);
  const EvidenceArguments& e = task.a.evidence;
  launch("h2o_windows", h2o_windows_kernel,
         {.blocks = blocks_of_threads(e.count, tuning::kTurnThreads), .threads = tuning::kTurnThreads}, stream, task);
  launch_window_attention({.evidence = e,
                           .windows = task.windows,
                           .window = a.window,
                           .queries = a.queries,
                           .sum = a.scores,
                           .workspace = task.rest},
                          stream);
  const std::int32_t chunks = key_chunks(e);
  launch("h2o_tally", h2o_tally_kernel,
         {.blocks = blocks_for(std::int64_t{e.count} * chunks), .threads = tuning::kKeyThreads}, stream, task, chunks);
}

}  // namespace kvkeep::cuda
