// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"
#include "softmax.cuh"
#include "window_attention_task.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using attention::AttentionPlan;
using attention::AttentionTask;
using attention::kFirst;
using attention::Kind;
using tuning::kAttentionChunk;
using tuning::kAttentionParts;
using tuning::kAttentionSlice;
using tuning::kAttentionTile;

/// Rows of the product that a tile of queries shares.
struct QueryArrays {
  std::int32_t* position;
  float* shift;
  float* weight;  ///< in the column
  float* share;   ///< in newest
};

/// What one block looks at: a chunk of a row, or a part of it when statistics are taken.
struct AttentionPiece {
  std::int64_t row;
  std::int32_t begin;
  std::int32_t slots;  ///< 0: nothing to do
};

template <bool kApply>
__device__ std::int32_t pieces_of_a_row(const AttentionTask& task) {
  return kApply ? attention::pieces(task.e.longest, kAttentionChunk) : task.parts;
}

template <bool kApply>
__device__ AttentionPiece piece_of(const AttentionTask& task, std::int64_t work) {
  const std::int32_t pieces = pieces_of_a_row<kApply>(task);
  const std::int64_t r = work / pieces;
  if (!task.e.due(r)) return {r, 0, 0};
  const std::int32_t length = task.e.rows[r].length, slots = kApply ? kAttentionChunk : attention::part_of(length);
  const std::int64_t begin = (work - r * pieces) * slots;
  return begin < length ? AttentionPiece{r, static_cast<std::int32_t>(begin), slots} : AttentionPiece{r, 0, 0};
}

/// What is subtracted from the logits of row n of the product, and the factor of their exponentials: what the parts of
/// the row found. The whole warp calls, a lane for each part.
__device__ float2 standard_of(const AttentionTask& task, const AttentionPlan& plan, std::int64_t r, std::int32_t n) {
  static_assert(kAttentionParts <= 32);
  const std::int32_t length = plan.row->length, parts = attention::pieces(length, attention::part_of(length));
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int64_t at = (r * task.parts + lane) * task.most + n;
  if (task.kind == Kind::worst) {
    RunningWorst seen;
    if (lane < parts) {
      const float4 of_part = reinterpret_cast<const float4*>(task.partial)[at];
      seen = {{of_part.x, of_part.y}, of_part.z, of_part.w};
    }
    seen = over_lanes<32>(seen);
    if (!(seen.pooled > 0)) return {0, 0};
    return {seen.all.top, seen.older / (seen.all.sum + sink_of(task, plan, n, seen.all.top)) / seen.pooled};
  }
  Running seen;
  if (lane < parts) {
    const float2 of_part = task.partial[at];
    seen.top = of_part.x;
    seen.sum = of_part.y;
  }
  seen = over_lanes<32>(seen);
  if (!(seen.sum > 0)) return {0, 0};
  return {seen.top, 1.0F / (seen.sum + sink_of(task, plan, n, seen.top))};
}

/// Fills the arrays with rows [n0, n0 + count) of the product, and after the last one with rows that count nothing. A
/// warp for each.
__device__ void set_queries(const AttentionTask& task, const AttentionPlan& plan, std::int64_t r, std::int32_t n0,
                            std::int32_t count, bool apply, const QueryArrays& to) {
  for (auto q = static_cast<std::int32_t>(threadIdx.x / 32); q < count; q += kAttentionTile / 32) {
    const std::int32_t n = n0 + q;
    const bool there = n < plan.total, writes = threadIdx.x % 32 == 0;
    const std::int32_t i = there ? plan.query_of(n) : 0;
    if (writes) to.position[q] = there ? plan.position(i) : kFirst;
    if (!apply) continue;
    float2 s{0, 0};
    if (there && plan.lse != nullptr) {
      const float lse = plan.lse[std::int64_t{n / plan.window} * task.window + i];
      s = is_number(lse) ? float2{lse, 1.0F} : s;
    } else if (there) {
      s = standard_of(task, plan, r, n);
    }
    if (!writes) continue;
    to.shift[q] = s.x;
    to.weight[q] =
        task.kind == Kind::history && i == plan.window - 1 ? s.y * static_cast<float>(task.newest_counts) : s.y;
    to.share[q] = i == plan.window - 1 ? s.y / static_cast<float>(task.e.group) : 0.0F;
  }
}

/// Adds what one query gives one slot. `x`: the logit.
__device__ inline void add_share(Kind kind, float x, std::int32_t slot_at, std::int32_t query_at, bool open,
                                 float shift, float weight, float share, float& column, float& newest) {
  if (slot_at > query_at || !is_number(x)) return;
  const float p = __expf(x - shift);
  newest += share == 0 ? 0.0F : p * share;
  if (kind == Kind::window && !open && slot_at == query_at) return;  // on the suffix only strictly later queries count
  column += weight == 0 ? 0.0F : p * weight;
}

/// Writes the chunk's part of the result. columns, newest: [kAttentionChunk], the sums over the queries.
__device__ void finish(const AttentionTask& task, const AttentionPlan& plan, std::int32_t begin, const float* columns,
                       const float* newest) {
  const std::int32_t left = plan.row->length - begin, count = left < kAttentionChunk ? left : kAttentionChunk;
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < count; j += kAttentionTile)
    write_slot(task, plan, begin + j, columns[j], newest[j]);
}

/// In how many pools of older slots slot t is; 0: it is not older.
__device__ inline float pools_of(const AttentionTask& task, const AttentionPlan& plan, std::int32_t t) {
  if (t >= plan.end) return 0;
  const std::int32_t first = t - task.reach > plan.from ? t - task.reach : plan.from,
                     last = t + task.reach + 1 < plan.end ? t + task.reach + 1 : plan.end;
  return static_cast<float>(last - first);
}

// In f32: a thread has one slot, and multiplies its key with kQ queries that all threads read alike.

/// How the query heads and the queries of a row are combined.
enum class Form : std::uint8_t { mean, maximum, worst };

template <class T, int kQ, Form kForm>
struct AttentionF32Shared {
  using Seen = std::conditional_t<kForm == Form::worst, RunningWorst, Running>;
  static constexpr std::int32_t kStride = kAttentionSlice * static_cast<std::int32_t>(sizeof(T)) +
                                          16;  ///< of a slot: threads read rows of it without conflicts
  std::size_t keys, queries, position, shift, weight, share, running, columns, newest, shares, bytes;
  std::int32_t padded;  ///< components of a query, in whole words of keys
  std::int32_t around;  ///< Form::worst: slots of a chunk, and those that share a pool with them

  KVKEEP_HD AttentionF32Shared(std::int32_t dim, std::int32_t reach)
      : padded((dim + 15) / 16 * 16), around(kForm == Form::worst ? kAttentionChunk + 2 * reach : 0) {
    Parts parts;
    keys = parts.take(static_cast<std::size_t>(kAttentionTile) * kStride);
    queries = parts.take(sizeof(float) * kQ * static_cast<std::size_t>(padded));
    position = parts.take(sizeof(std::int32_t) * kQ);
    shift = parts.take(sizeof(float) * kQ);
    weight = parts.take(sizeof(float) * kQ);
    share = parts.take(sizeof(float) * kQ);
    running = parts.take(sizeof(Seen) * kQ * (kAttentionTile / 32));
    columns = parts.take(sizeof(float) * kAttentionChunk);
    newest = parts.take(sizeof(float) * kAttentionChunk);
    shares = parts.take(sizeof(float) * kQ * static_cast<std::size_t>(around));
    bytes = parts.bytes;
  }
};

/// Pools the shares of kQ queries, and lets the largest of each slot of a chunk stand. begin: the chunk's first slot;
/// shares: of the slots from begin - reach on, of [from, to) alone.
template <int kQ>
__device__ void pool_shares(const AttentionTask& task, std::int32_t begin, std::int32_t from, std::int32_t to,
                            const float* shares, std::int32_t around, const float* weight, float* columns) {
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < kAttentionChunk; j += kAttentionTile) {
    const std::int32_t t = begin + j, first = t - task.reach > from ? t - task.reach : from,
                       last = t + task.reach + 1 < to ? t + task.reach + 1 : to;
    if (t < from || t >= to) continue;
    float worst = columns[j];
    for (int q = 0; q < kQ; ++q) {
      float pooled = 0;
      for (std::int32_t n = first; n < last; ++n) pooled += shares[q * around + n - begin + task.reach];
      const float x = pooled * weight[q];
      worst = worst < x ? x : worst;
    }
    columns[j] = worst;
  }
}

template <class T, int kQ, bool kApply, Form kForm>
__global__ void __launch_bounds__(kAttentionTile, 4) attention_f32_kernel(AttentionTask task) {
  wait_for_earlier_kernels();
  using Shared = AttentionF32Shared<T, kQ, kForm>;
  constexpr bool kMaximum = kForm == Form::maximum, kWorst = kForm == Form::worst;
  const Shared parts(task.e.dim, kApply ? task.reach : 0);
  std::byte* shared = dynamic_shared();
  std::byte* keys = shared + parts.keys;
  auto* queries = reinterpret_cast<float*>(shared + parts.queries);
  auto* running = reinterpret_cast<typename Shared::Seen*>(shared + parts.running);
  auto* columns = reinterpret_cast<float*>(shared + parts.columns);
  auto* newest = reinterpret_cast<float*>(shared + parts.newest);
  auto* shares = reinterpret_cast<float*>(shared + parts.shares);
  const QueryArrays arrays{
      reinterpret_cast<std::int32_t*>(shared + parts.position), reinterpret_cast<float*>(shared + parts.shift),
      reinterpret_cast<float*>(shared + parts.weight), reinterpret_cast<float*>(shared + parts.share)};
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.e.dim, heads = kMaximum ? task.e.group : 1;

  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * pieces_of_a_row<kApply>(task);
       work += gridDim.x) {
    const AttentionPiece piece = piece_of<kApply>(task, work);
    if (piece.slots == 0) continue;
    const std::int64_t r = piece.row;
    const AttentionPlan plan = plan_of(task, r);
    const Row& row = *plan.row;
    const bool aligned = is_aligned(row.keys);
    const std::int32_t begin = piece.begin, halo = kWorst && kApply ? task.reach : 0,
                       to = kWorst && kApply ? plan.end : plan.to,
                       end = to - begin < piece.slots + halo ? to : begin + piece.slots + halo;
    if constexpr (kApply)
      for (std::int32_t j = thread; j < kAttentionChunk; j += kAttentionTile) columns[j] = newest[j] = 0;

    for (std::int32_t n0 = 0; n0 < plan.total; n0 += kQ) {
      __syncthreads();
      set_queries(task, plan, r, n0, kQ, kApply, arrays);
      const auto stage_queries = [&](std::int32_t head) {
        for (std::int32_t i = thread; i < kQ * parts.padded; i += kAttentionTile) {
          const std::int32_t q = i / parts.padded, d = i - q * parts.padded, n = n0 + q;
          const bool there = n < plan.total && d < dim;
          queries[i] = there ? plan.queries[(n / plan.window + head) * head_stride(task) +
                                            std::int64_t{plan.query_of(n)} * dim + d]
                             : 0.0F;
        }
      };
      if constexpr (!kMaximum) stage_queries(0);
      typename Shared::Seen seen[kQ];
      for (std::int32_t tile = begin > halo ? begin - halo : 0; tile < end; tile += kAttentionTile) {
        const std::int32_t slot = tile + thread, tile_end = tile + kAttentionTile < end ? tile + kAttentionTile : end;
        const bool live = slot >= plan.from && slot < tile_end;
        float x[kQ] = {};
        for (std::int32_t head = 0; head < heads; ++head) {
          float sum[kQ] = {};
          for (std::int32_t d0 = 0; d0 < dim; d0 += kAttentionSlice) {
            const std::int32_t n = dim - d0 < kAttentionSlice ? dim - d0 : kAttentionSlice;
            __syncthreads();
            if (kMaximum && d0 == 0) stage_queries(head);
            stage_keys<T>(row.keys, aligned, tile, tile_end, d0, n, keys, parts.kStride);
            __syncthreads();
            if (!live) continue;
            const auto* mine = reinterpret_cast<const Elements<T>*>(keys + thread * parts.kStride);
            for (std::int32_t d = 0; d < n; d += kPerWord<T>) {
              const Elements<T> word = mine[d / kPerWord<T>];
#pragma unroll
              for (int k = 0; k < kPerWord<T>; k += 4) {
                float a[4];
                to_floats<4>(word.x + k, task.e.keys, a);
#pragma unroll
                for (int q = 0; q < kQ; ++q) {
                  const float4 f = *reinterpret_cast<const float4*>(queries + q * parts.padded + d0 + d + k);
                  sum[q] = fmaf(a[0], f.x, sum[q]);
                  sum[q] = fmaf(a[1], f.y, sum[q]);
                  sum[q] = fmaf(a[2], f.z, sum[q]);
                  sum[q] = fmaf(a[3], f.w, sum[q]);
                }
              }
            }
          }
#pragma unroll
          for (int q = 0; q < kQ; ++q) x[q] = !kMaximum || head == 0 ? sum[q] : fmaxf(x[q], sum[q]);
        }
        if (!live) continue;
        const float scale = key_scale<T>(row, slot) * task.e.scale;
        const std::int32_t at = slot_position(task, plan, slot);
        float column = 0, of_newest = 0;
#pragma unroll
        for (int q = 0; q < kQ; ++q) {
          float logit = x[q] * scale;
          if (task.e.logit_cap > 0 && is_number(logit)) logit = task.e.logit_cap * tanhf(logit / task.e.logit_cap);
          if constexpr (kApply && kWorst) {
            shares[q * parts.around + slot - begin + halo] = is_number(logit) ? __expf(logit - arrays.shift[q]) : 0.0F;
          } else if constexpr (kApply) {
            add_share(task.kind, logit, at, arrays.position[q], slot < plan.history, arrays.shift[q], arrays.weight[q],
                      arrays.share[q], column, of_newest);
          } else {
            if (at <= arrays.position[q] && is_number(logit)) {
              if constexpr (kWorst)
                seen[q].add(logit, pools_of(task, plan, slot));
              else
                seen[q].add(logit);
            }
          }
        }
        if constexpr (kApply && !kWorst) {
          columns[slot - begin] += column;
          newest[slot - begin] += of_newest;
        }
      }
      if constexpr (kApply && kWorst) {
        __syncthreads();
        pool_shares<kQ>(task, begin, plan.from, plan.end, shares, parts.around, arrays.weight, columns);
      }
      if constexpr (!kApply) {
#pragma unroll
        for (int q = 0; q < kQ; ++q) {
          seen[q] = over_lanes<32>(seen[q]);
          if (thread % 32 == 0) running[thread / 32 * kQ + q] = seen[q];
        }
        __syncthreads();
        if (thread < kQ && n0 + thread < plan.total) {
          typename Shared::Seen all = running[thread];
          for (std::int32_t warp = 1; warp < kAttentionTile / 32; ++warp) all.add(running[warp * kQ + thread]);
          if constexpr (kWorst)
            reinterpret_cast<float4*>(task.partial)[work * task.most + n0 + thread] = {all.all.top, all.all.sum,
                                                                                       all.older, all.pooled};
          else
            task.partial[work * task.most + n0 + thread] = {all.top, all.sum};
        }
      }
    }
    if constexpr (kApply) {
      __syncthreads();
      finish(task, plan, begin, columns, newest);
      __syncthreads();
    }
  }
}

/// The log-sum-exp of every query, less that of its weight, to [groups, Hq, window]: a warp for each. The shares that
/// follow from it have the weight.
__global__ void __launch_bounds__(kAttentionTile) attention_f32_weigh_kernel(AttentionTask task, float* shifted) {
  wait_for_earlier_kernels();
  const std::int64_t all = std::int64_t{task.e.count} * task.most;
  for (std::int64_t work = blockIdx.x * std::int64_t{kAttentionTile / 32} + threadIdx.x / 32; work < all;
       work += std::int64_t{gridDim.x} * (kAttentionTile / 32)) {
    const std::int64_t r = work / task.most;
    const auto n = static_cast<std::int32_t>(work - r * task.most);
    if (!task.e.due(r)) continue;
    const AttentionPlan plan = plan_of(task, r);
    if (n >= plan.total) continue;
    float lse = INFINITY;  // a query that sees nothing
    const std::int64_t at = std::int64_t{n / plan.window} * task.window + plan.query_of(n);
    if (plan.lse != nullptr) {
      lse = plan.lse[at];
    } else {
      const float2 standard = standard_of(task, plan, r, n);
      if (standard.y > 0) lse = standard.x - logf(standard.y);
    }
    if (threadIdx.x % 32 != 0) continue;
    const std::int64_t oldest =
        (r / task.e.kv_heads * task.e.query_heads() + plan.row->head * task.e.group) * std::int64_t{task.window} +
        task.window - plan.window;
    shifted[oldest + at] = lse - logf(weight_of(task, plan, n));
  }
}

/// kAtOnce: queries whose result is taken at a time, where that is not kQ.
template <class T, int kQ, Form kForm, int kAtOnce = kQ>
void launch_f32(AttentionTask task, float* shifted, Stream stream) {
  const auto grid = [&](std::int32_t pieces, std::size_t shared_bytes) {
    return Grid{.blocks = blocks_for(std::int64_t{task.e.count} * pieces),
                .threads = kAttentionTile,
                .shared_bytes = shared_bytes};
  };
  if (task.log_sum_exp == nullptr)
    launch("attention_f32_statistics", attention_f32_kernel<T, kQ, false, kForm>,
           grid(task.parts, AttentionF32Shared<T, kQ, kForm>(task.e.dim, 0).bytes), stream, task);
  if (task.weights != nullptr) {
    launch("attention_f32_weigh", attention_f32_weigh_kernel,
           {.blocks = blocks_of_threads(std::int64_t{task.e.count} * task.most * 32, kAttentionTile),
            .threads = kAttentionTile},
           stream, task, shifted);
    task.log_sum_exp = shifted;
  }
  launch("attention_f32", attention_f32_kernel<T, kAtOnce, true, kForm>,
         grid(attention::pieces(task.e.longest, kAttentionChunk),
              AttentionF32Shared<T, kAtOnce, kForm>(task.e.dim, task.reach).bytes),
         stream, task);
}

std::int32_t parts_of(const EvidenceArguments& e) {
  const std::int32_t chunks = attention::pieces(e.longest, kAttentionChunk);
  return chunks < kAttentionParts ? chunks : kAttentionParts;
}

/// Statistics of every part of every row.
std::int64_t partial_bytes(const EvidenceArguments& e, std::int32_t window, std::size_t each) {
  return std::int64_t{e.count} * e.group * window * parts_of(e) * static_cast<std::int64_t>(each);
}

void run(AttentionTask task, void* workspace, Stream stream) {
  check_dim("window_attention", task.e.dim);
  if (task.e.count == 0 || task.e.longest == 0) return;
  task.most = (task.max_logit ? 1 : task.e.group) * task.window;
  task.parts = parts_of(task.e);
  if (!task.max_logit && task.kind != Kind::worst && attention::suits_matrix_units(task.e, task.most))
    return attention::launch_on_matrix_units(task, workspace, stream);
  KVKEEP_REQUIRE(task.queries != nullptr, "window_attention: queries; given none, of ", task.most, " rows for ",
                 name_of(task.e.keys), " keys; allowed only where window_attention_reads_views()");
  task.partial = static_cast<float2*>(workspace);
  auto* const shifted =
      reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + partial_bytes(task.e, task.window, sizeof(float2)));
  with_element(task.e.keys, [&](auto type) {
    using T = decltype(type);
    if (task.kind == Kind::worst && task.reach < 256)
      launch_f32<T, 8, Form::worst>(task, nullptr, stream);
    else if (task.kind == Kind::worst)
      launch_f32<T, 8, Form::worst, 1>(task, nullptr, stream);
    else if (task.max_logit)
      launch_f32<T, 8, Form::maximum>(task, nullptr, stream);
    else if (task.most <= 4)
      launch_f32<T, 4, Form::mean>(task, shifted, stream);
    else
      launch_f32<T, 8, Form::mean>(task, shifted, stream);
  });
}

}  // namespace

std::int64_t window_attention_workspace_bytes(const EvidenceArguments& evidence, std::int32_t window, bool weighted) {
  if (window_attention_reads_views(evidence, window))
    return attention::matrix_workspace_bytes(evidence, window, parts_of(evidence));
  const std::int64_t queries = std::int64_t{evidence.count} * evidence.group * window;
  return partial_bytes(evidence, window, sizeof(float2)) +
         (weighted ? queries * static_cast<std::int64_t>(sizeof(float)) : 0);
}

std::int64_t history_attention_workspace_bytes(const EvidenceArguments& evidence, const WindowReading& reading) {
  return reading.history.window == WindowReduce::worst ? partial_bytes(evidence, reading.window, sizeof(float4))
                                                       : window_attention_workspace_bytes(evidence, reading.window);
}

bool window_attention_reads_views(const EvidenceArguments& evidence, std::int32_t window) {
  return attention::suits_matrix_units(evidence, evidence.group * window);
}

void launch_window_attention(const WindowAttentionArguments& a, Stream stream) {
  require_aligned("window_attention", a.workspace);
  KVKEEP_REQUIRE(a.usage == nullptr || a.sum == nullptr, "window_attention: usage and sum are reduced one at a time");
  KVKEEP_REQUIRE(a.weights == nullptr || (a.sum != nullptr && a.newest == nullptr),
                 "window_attention: weights; allowed for sum alone");
  AttentionTask task{};
  task.e = a.evidence;
  task.windows = a.windows;
  task.window = a.window;
  task.queries = a.queries;
  task.log_sum_exp = a.log_sum_exp;
  task.weights = a.weights;
  task.column = a.usage != nullptr ? a.usage : a.sum;
  task.newest = a.newest;
  task.newest_counts = 1;
  task.kind = a.sum != nullptr ? Kind::sum : Kind::window;
  run(task, a.workspace, stream);
}

void launch_history_attention(const HistoryAttentionArguments& a, Stream stream) {
  require_aligned("history_attention", a.workspace);
  AttentionTask task{};
  task.e = a.evidence;
  task.windows = a.windows;
  const HistoryOptions& history = a.reading.history;
  check_pool("history_attention", history.pool);
  task.window = a.reading.window;
  task.queries = a.queries;
  task.column = a.out;
  task.newest_counts = history.newest_counts;
  task.reach = history.pool / 2;
  task.kind = history.window == WindowReduce::worst ? Kind::worst : Kind::history;
  task.max_logit = history.group == GroupReduce::max_logit;
  task.after_sinks = a.reading.after_sinks;
  run(task, a.workspace, stream);
}

}  // namespace kvkeep::cuda
