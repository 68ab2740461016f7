// SPDX-License-Identifier: Apache-2.0
#include "prompt_scores.h"

#include "element.cuh"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/window.h"
#include "launch.cuh"
#include "tuning.cuh"
#include "window_attention.h"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kKeyThreads;
using tuning::kTurnThreads;

struct PromptScoresTask {
  PromptScoresArguments a;
  EvidenceArguments summed;  ///< a row for every (row, part)
  std::int32_t parts;        ///< of a row: its query heads if each is pooled by itself, else 1
  Row* rows;                 ///< [summed.count]; null: those of the evidence
  RowWindow* windows;        ///< [summed.count]
  float* sums;               ///< f32 [slots * parts], those of the arguments if that is all they are
  void* rest;                ///< window_attention_workspace_bytes()
};

/// Divides the workspace. Returns its size.
std::int64_t divide(const PromptScoresArguments& a, PromptScoresTask& task) {
  WorkspaceParts parts(a.workspace);
  task.a = a;
  task.parts = a.maximum && a.pool > 1 ? a.evidence.group : 1;
  task.summed = a.evidence;
  task.summed.limits = nullptr;
  task.summed.count *= task.parts;
  task.summed.kv_heads *= task.parts;
  task.summed.group /= task.parts;
  task.rows = parts.take<Row>(task.parts > 1 ? task.summed.count : 0);
  if (task.parts > 1) task.summed.rows = task.rows;
  task.windows = parts.take<RowWindow>(task.summed.count);
  const bool as_asked = a.sums != nullptr && task.parts == 1;
  task.sums = parts.take<float>(as_asked ? 0 : a.slots * task.parts);
  if (as_asked) task.sums = a.sums;
  task.rest = parts.take<std::byte>(window_attention_workspace_bytes(task.summed, a.window, a.weights != nullptr));
  return parts.bytes();
}

/// Sets the window of every row that is summed, and the row itself if query heads are: the same keys, once for each.
__global__ void __launch_bounds__(kTurnThreads) prompt_scores_rows_kernel(PromptScoresTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kTurnThreads + threadIdx.x; n < task.summed.count;
       n += std::int64_t{gridDim.x} * kTurnThreads) {
    const std::int64_t r = n / task.parts;
    const auto part = static_cast<std::int32_t>(n - r * task.parts);
    Row row = e.rows[r];
    task.windows[n] = {task.a.window, row.length - task.a.window};
    if (task.parts == 1) continue;
    row.head = row.head * task.parts + part;
    row.first = row.first * task.parts + std::int64_t{part} * row.length;
    task.rows[n] = row;
  }
}

/// One thread per token of a group: its score of every KV head, and their sum, both added up in ascending order.
__global__ void __launch_bounds__(kKeyThreads) prompt_scores_pool_kernel(PromptScoresTask task, std::int32_t chunks) {
  wait_for_earlier_kernels();
  const PromptScoresArguments& a = task.a;
  const EvidenceArguments& e = a.evidence;
  const float weight = task.parts > 1 ? 1.0F : static_cast<float>(e.group);
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} / e.kv_heads * chunks; work += gridDim.x) {
    const std::int64_t group = work / chunks;
    const Row* rows = e.rows + group * e.kv_heads;
    const std::int32_t t =
        static_cast<std::int32_t>(work - group * chunks) * kKeyThreads + static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t length = rows[0].length, before = length - a.window;
    if (t >= length) continue;
    float token = 0;
    for (std::int32_t h = 0; h < e.kv_heads; ++h) {
      const std::int64_t first = rows[h].first;
      float head = 0;
      for (std::int32_t part = 0; part < task.parts && t < before; ++part) {
        const float* sums = task.sums + first * task.parts + std::int64_t{part} * length;
        head += weight * (a.maximum ? pooled_max(sums, before, a.pool, t) : pooled_average(sums, before, a.pool, t));
      }
      if (a.heads != nullptr) a.heads[first + t] = head;
      token += head;
    }
    if (a.tokens != nullptr && t < before) a.tokens[rows[0].first / e.kv_heads - group * a.window + t] = token;
  }
}

/// Mean over the query heads of each row, where each has sums of its own.
__global__ void __launch_bounds__(kKeyThreads) prompt_scores_mean_kernel(PromptScoresTask task, std::int32_t chunks) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * chunks; work += gridDim.x) {
    const Row& row = e.rows[work / chunks];
    const std::int32_t t =
        static_cast<std::int32_t>(work % chunks) * kKeyThreads + static_cast<std::int32_t>(threadIdx.x);
    if (t >= row.length) continue;
    float sum = 0;
    for (std::int32_t part = 0; part < task.parts; ++part)
      sum += task.sums[row.first * task.parts + std::int64_t{part} * row.length + t];
    task.a.sums[row.first + t] = sum / static_cast<float>(task.parts);
  }
}

/// One thread per token of a group.
__global__ void __launch_bounds__(kKeyThreads) prompt_scores_tokens_kernel(TokenSumsArguments a, std::int32_t chunks) {
  wait_for_earlier_kernels();
  for (std::int64_t work = blockIdx.x; work < std::int64_t{a.count} / a.heads * chunks; work += gridDim.x) {
    const std::int64_t group = work / chunks;
    const Row* rows = a.rows + group * a.heads;
    const std::int32_t t =
        static_cast<std::int32_t>(work - group * chunks) * kKeyThreads + static_cast<std::int32_t>(threadIdx.x);
    if (t >= rows[0].length - a.window) continue;
    float token = 0;
    for (std::int32_t h = 0; h < a.heads; ++h) token += a.weight * a.sums[rows[h].first + t];
    a.tokens[rows[0].first / a.heads - group * a.window + t] = t < a.sinks ? INFINITY : token;
  }
}

}  // namespace

std::int64_t prompt_scores_workspace_bytes(const PromptScoresArguments& arguments) {
  PromptScoresTask task{};
  return divide(arguments, task);
}

void launch_prompt_scores(const PromptScoresArguments& a, Stream stream) {
  require_aligned("prompt scores", a.workspace);
  const EvidenceArguments& e = a.evidence;
  check_dim("prompt scores", e.dim);
  check_pool("prompt scores", a.pool);
  KVKEEP_REQUIRE(a.window >= 1, "prompt scores: window; given ", a.window, "; allowed 1 or more");
  KVKEEP_REQUIRE(e.kv_heads >= 1 && e.count % e.kv_heads == 0, "prompt scores: rows; given ", e.count,
                 "; allowed whole groups of ", e.kv_heads, ", one row a KV head");
  KVKEEP_REQUIRE(e.count == 0 || e.longest > a.window, "prompt scores: the longest row holds ", e.longest,
                 " slots; allowed more than the window of ", a.window);
  PromptScoresTask task{};
  divide(a, task);
  launch("prompt_scores_rows", prompt_scores_rows_kernel,
         {.blocks = blocks_of_threads(task.summed.count, kTurnThreads), .threads = kTurnThreads}, stream, task);
  launch_window_attention({.evidence = task.summed,
                           .windows = task.windows,
                           .window = a.window,
                           .queries = a.queries,
                           .log_sum_exp = a.log_sum_exp,
                           .weights = a.weights,
                           .sum = task.sums,
                           .workspace = task.rest},
                          stream);
  const std::int32_t chunks = (e.longest + kKeyThreads - 1) / kKeyThreads;
  if (a.heads != nullptr || a.tokens != nullptr)
    launch("prompt_scores_pool", prompt_scores_pool_kernel,
           {.blocks = blocks_for(std::int64_t{e.count} / e.kv_heads * chunks), .threads = kKeyThreads}, stream, task,
           chunks);
  if (a.sums != nullptr && task.parts > 1)
    launch("prompt_scores_mean", prompt_scores_mean_kernel,
           {.blocks = blocks_for(std::int64_t{e.count} * chunks), .threads = kKeyThreads}, stream, task, chunks);
}

void launch_token_sums(const TokenSumsArguments& a, Stream stream) {
  KVKEEP_REQUIRE(a.heads >= 1 && a.count % a.heads == 0, "token sums: rows; given ", a.count,
                 "; allowed whole groups of ", a.heads, ", one row a KV head");
  const std::int32_t chunks = (a.longest + kKeyThreads - 1) / kKeyThreads;
  launch("prompt_scores_tokens", prompt_scores_tokens_kernel,
         {.blocks = blocks_for(std::int64_t{a.count} / a.heads * chunks), .threads = kKeyThreads}, stream, a, chunks);
}

}  // namespace kvkeep::cuda
