// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the two forms of window attention share on a device: products in f32 (window_attention.cu) and on matrix units
/// (window_attention_matrix.cu).

#include <limits>

#include "element.cuh"
#include "kvkeep/score/window.h"
#include "tuning.cuh"
#include "window_attention.h"

namespace kvkeep::cuda::attention {

constexpr std::int32_t kFirst = std::numeric_limits<std::int32_t>::min(),
                       kNever = std::numeric_limits<std::int32_t>::max();

enum class Kind : std::uint8_t { window, sum, history, worst };

/// The arguments of the kernels.
struct AttentionTask {
  EvidenceArguments e;
  const RowWindow* windows;
  const float* queries;
  const float* log_sum_exp;
  const float* weights;
  float* column;  ///< usage, sum or history
  float* newest;
  float2* partial;  ///< [count, parts, most] maximum and sum of one part of a row; Kind::worst: float4, RunningWorst
  std::int32_t window;
  std::int32_t most;           ///< rows of the largest product
  std::int32_t parts;          ///< of the longest row
  std::int32_t newest_counts;  ///< in place of as many of the oldest, less one
  std::int32_t reach;          ///< Kind::worst: of the pool, on both sides
  Kind kind;
  bool max_logit;
  bool after_sinks;
};

/// One row of the table and the rows of its product: n counts query head by query head, under max_logit only the
/// queries.
struct AttentionPlan {
  const Row* row;
  const QueryView* view;
  const float* queries;  ///< of the row's first query head, at its window's oldest query; null: as the view has them
  const float* lse;
  std::int32_t window = 0;  ///< W of this row
  std::int32_t history = 0;
  std::int32_t from = 0, to = 0;  ///< slots of the softmax
  std::int32_t end = 0;           ///< Kind::worst: of the slots that get a share
  std::int32_t total = 0;
  std::int32_t oldest = 0;  ///< on matrix units: position of the oldest query

  [[nodiscard]] __device__ std::int32_t query_of(std::int32_t n) const { return n % window; }
  [[nodiscard]] __device__ std::int32_t position(std::int32_t i) const {
    return view->position(view->count - window + i);
  }
};

__device__ inline AttentionPlan plan_of(const AttentionTask& task, std::int64_t r) {
  const EvidenceArguments& e = task.e;
  AttentionPlan plan;
  plan.row = e.rows + r;
  plan.view = e.queries + r / e.kv_heads;
  const RowWindow window = task.windows[r].without_oldest(task.newest_counts - 1);
  plan.window = window.queries;
  plan.history = window.history;
  if (plan.window == 0) return plan;
  const std::int64_t oldest =
      (r / e.kv_heads * e.query_heads() + plan.row->head * e.group) * std::int64_t{task.window} + task.window -
      plan.window;
  plan.queries = task.queries == nullptr ? nullptr : task.queries + oldest * e.dim;
  plan.lse = task.log_sum_exp == nullptr ? nullptr : task.log_sum_exp + oldest;
  plan.total = task.max_logit ? plan.window : e.group * plan.window;
  plan.to = plan.row->length;
  if (task.kind == Kind::window || task.kind == Kind::sum) return plan;
  const std::int32_t seen_by_all = plan.position(0);
  // The history ends where the oldest query sees no further.
  plan.end = partition_point(0, plan.history, [&](std::int32_t t) { return plan.row->positions[t] <= seen_by_all; });
  if (task.kind == Kind::history) plan.to = plan.end;
  if (task.after_sinks) plan.from = e.limits[r].guarded.sinks < plan.end ? e.limits[r].guarded.sinks : plan.end;
  return plan;
}

/// What the sink logit of row n of the product adds to a sum of exponentials below `top`; under max_logit the largest
/// of the group is a row's. 0: there is none.
__device__ inline float sink_of(const AttentionTask& task, const AttentionPlan& plan, std::int32_t n, float top) {
  const float* const sinks = task.e.sinks_of(*plan.row);
  if (sinks == nullptr) return 0;
  float sink = sinks[task.max_logit ? 0 : n / plan.window];
  for (std::int32_t h = 1; task.max_logit && h < task.e.group; ++h) sink = fmaxf(sink, sinks[h]);
  return expf(sink - top);
}

/// Weight of row n of the product.
__device__ inline float weight_of(const AttentionTask& task, const AttentionPlan& plan, std::int32_t n) {
  return task.weights[task.window - plan.window + plan.query_of(n)];
}

/// Where the next query head's queries begin, in floats.
__device__ inline std::int64_t head_stride(const AttentionTask& task) { return std::int64_t{task.window} * task.e.dim; }

/// What a query's position is compared with: a slot is seen by the queries at or after it.
__device__ inline std::int32_t slot_position(const AttentionTask& task, const AttentionPlan& plan, std::int32_t slot) {
  if (slot < plan.from || slot >= plan.to) return kNever;
  return task.kind == Kind::history ? kFirst : plan.row->positions[slot];
}

/// How many pieces of `of` slots a row has.
[[nodiscard]] KVKEEP_HD inline std::int32_t pieces(std::int32_t length, std::int32_t of) {
  return (length + of - 1) / of;
}

/// Slots of a part of a row, which has statistics of its own: whole chunks, so that no row has more than
/// kAttentionParts such parts.
KVKEEP_HD inline std::int32_t part_of(std::int32_t length) {
  return pieces(pieces(length, tuning::kAttentionChunk), tuning::kAttentionParts) * tuning::kAttentionChunk;
}

/// Writes what slot t of a row gets. column, newest: the sums over the queries.
__device__ inline void write_slot(const AttentionTask& task, const AttentionPlan& plan, std::int32_t t, float column,
                                  float newest) {
  const std::int64_t at = plan.row->first + t;
  if (task.newest != nullptr) task.newest[at] = plan.total == 0 ? 0.0F : newest;
  if (task.column == nullptr) return;
  float divisor = 0;
  if (plan.total == 0 || t < plan.from || t >= plan.to) {
    divisor = 0;
  } else if (task.kind == Kind::worst) {
    divisor = 1;
  } else if (task.kind == Kind::sum) {
    divisor = static_cast<float>(task.e.group);
  } else if (task.kind == Kind::history) {
    divisor = static_cast<float>((task.max_logit ? 1 : task.e.group) * (plan.window - 1 + task.newest_counts));
  } else if (t < plan.history) {
    divisor = static_cast<float>(plan.total);
  } else {
    std::int32_t later = plan.window;
    while (later > 0 && plan.position(plan.window - later) <= plan.row->positions[t]) --later;
    divisor = static_cast<float>(later * task.e.group);
  }
  task.column[at] = divisor == 0 ? 0.0F : column / divisor;
}

/// True if matrix units can multiply the keys with so many queries.
[[nodiscard]] inline bool suits_matrix_units(const EvidenceArguments& e, std::int32_t queries) {
  return e.keys != Element::f32 && queries >= 16 && e.dim % 16 == 0 && e.logit_cap == 0;
}
/// Workspace of launch_on_matrix_units() for rows of up to `parts` parts.
[[nodiscard]] std::int64_t matrix_workspace_bytes(const EvidenceArguments& e, std::int32_t window, std::int32_t parts);
void launch_on_matrix_units(const AttentionTask& task, void* workspace, Stream stream);

}  // namespace kvkeep::cuda::attention
