#include "rpc.h"

#include "key_lanes.cuh"
#include "kvkeep/core/pool.h"
#include "launch.cuh"
#include "window_attention.h"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

struct RpcTask {
  RpcArguments a;
  float* attention;      ///< [slots]
  RowWindow* selectors;  ///< [count] `official`: one query fewer, the history stays that of the whole window
  std::int32_t* first;   ///< [count] where the history begins
  void* rest;            ///< window_attention_workspace_bytes()
};

KVKEEP_HD inline bool is_official(const RpcArguments& a) { return a.options.style == RpcOptions::Style::official; }

/// Divides the workspace. Returns its size.
std::int64_t divide(const RpcArguments& a, RpcTask& task) {
  WorkspaceParts parts(a.workspace);
  task.a = a;
  task.attention = parts.take<float>(a.slots);
  task.selectors = parts.take<RowWindow>(a.evidence.count);
  task.first = parts.take<std::int32_t>(a.evidence.count);
  task.rest = parts.take<std::byte>(window_attention_workspace_bytes(a.evidence, a.options.window));
  return parts.bytes();
}

__global__ void __launch_bounds__(tuning::kTurnThreads) rpc_selectors_kernel(RpcTask task) {
  for (std::int64_t r = std::int64_t{blockIdx.x} * tuning::kTurnThreads + threadIdx.x; r < task.a.evidence.count;
       r += std::int64_t{gridDim.x} * tuning::kTurnThreads) {
    RowWindow window = task.a.windows[r];
    const std::int32_t sinks = task.a.evidence.limits[r].guarded.sinks;
    task.first[r] = sinks < window.history ? sinks : window.history;
    if (window.queries > 1) --window.queries;
    task.selectors[r] = window;
  }
}

/// Score of slot t of a row that has queries.
__device__ float pooled(const RpcTask& task, std::int64_t r, std::int32_t t) {
  const RowWindow window = task.a.windows[r];
  const std::int32_t begin = is_official(task.a) ? task.first[r] : 0;
  if (t < begin || t >= window.history) return 0;
  const float* attention = task.attention + task.a.evidence.rows[r].first + begin;
  return pooled_average(attention, window.history - begin, task.a.options.pool, t - begin) *
         static_cast<float>(window.queries);
}

/// One block per chunk of a row; with all heads, of the first row, for all rows of its group.
__global__ void __launch_bounds__(tuning::kKeyThreads) rpc_kernel(RpcTask task, std::int32_t chunks) {
  const EvidenceArguments& e = task.a.evidence;
  each_chunk(e, chunks, [&](const Chunk& chunk) {
    float* g = task.a.scores + e.rows[chunk.row].first;
    const std::int32_t first = chunk.begin + static_cast<std::int32_t>(threadIdx.x);
    if (task.a.windows[chunk.row].queries == 0) {  // no query was seen: the oldest leave first
      for (std::int32_t t = first; t < chunk.end; t += tuning::kKeyThreads) g[t] = static_cast<float>(t);
      return;
    }
    if (task.a.options.heads != RpcOptions::Heads::all) {
      for (std::int32_t t = first; t < chunk.end; t += tuning::kKeyThreads) g[t] = pooled(task, chunk.row, t);
      return;
    }
    if (chunk.row % e.kv_heads != 0) return;
    const float share = 1.0F / static_cast<float>(e.kv_heads);
    for (std::int32_t t = first; t < chunk.end; t += tuning::kKeyThreads) {
      float sum = pooled(task, chunk.row, t);
      for (std::int32_t h = 1; h < e.kv_heads; ++h) sum += pooled(task, chunk.row + h, t);
      for (std::int32_t h = 0; h < e.kv_heads; ++h) task.a.scores[e.rows[chunk.row + h].first + t] = sum * share;
    }
  });
}

}  // namespace

std::int64_t rpc_workspace_bytes(const RpcArguments& arguments) {
  RpcTask task{};
  return divide(arguments, task);
}

void launch_rpc(const RpcArguments& a, Stream stream) {
  require_aligned("rpc", a.workspace);
  check_dim("rpc", a.evidence.dim);
  check_pool("rpc", a.options.pool);
  RpcTask task{};
  divide(a, task);
  if (is_official(a))
    launch("rpc_selectors", rpc_selectors_kernel,
           {.blocks = blocks_of_threads(a.evidence.count, tuning::kTurnThreads), .threads = tuning::kTurnThreads},
           stream, task);
  launch_history_attention({.evidence = a.evidence,
                            .windows = is_official(a) ? task.selectors : a.windows,
                            .window = a.options.window,
                            .queries = a.queries,
                            .newest_counts = is_official(a) ? 2 : 1,
                            .first = is_official(a) ? task.first : nullptr,
                            .out = task.attention,
                            .workspace = task.rest},
                           stream);
  const std::int32_t chunks = key_chunks(a.evidence);
  launch("rpc", rpc_kernel,
         {.blocks = blocks_for(std::int64_t{a.evidence.count} * chunks), .threads = tuning::kKeyThreads}, stream, task,
         chunks);
}

}  // namespace kvkeep::cuda
