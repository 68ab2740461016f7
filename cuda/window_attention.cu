#include "window_attention.h"

#include <limits>

#include "element.cuh"
#include "kvkeep/core/partition_point.h"
#include "launch.cuh"
#include "parts.cuh"
#include "softmax.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kAttentionChunk;
using tuning::kAttentionParts;
using tuning::kAttentionSlice;
using tuning::kAttentionTile;
using tuning::kMatrixQueries;
using tuning::kMatrixThreads;

constexpr std::int32_t kFirst = std::numeric_limits<std::int32_t>::min(),
                       kNever = std::numeric_limits<std::int32_t>::max();

enum class Kind : std::uint8_t { window, sum, history };

/// The arguments of the kernels.
struct Task {
  EvidenceArguments e;
  const RowWindow* windows;
  const float* queries;
  const float* log_sum_exp;
  const std::int32_t* first;
  float* column;  ///< usage, sum or history
  float* newest;
  float2* partial;  ///< [count, parts, most] maximum and sum of one part of a row
  std::int32_t window;
  std::int32_t most;    ///< rows of the largest product
  std::int32_t chunks;  ///< of the longest row
  std::int32_t parts;   ///< the same of the parts whose statistics are taken at a time
  std::int32_t newest_counts;
  Kind kind;
  bool max_logit;
};

/// One row of the table and the rows of its product: n counts query head by query head, under max_logit only the
/// queries.
struct Plan {
  const Row* row;
  const QueryView* view;
  const float* queries;  ///< of the row's first query head, at its window's oldest query
  const float* lse;
  std::int32_t window = 0;  ///< W of this row
  std::int32_t history = 0;
  std::int32_t from = 0, to = 0;  ///< slots of the softmax
  std::int32_t total = 0;

  [[nodiscard]] __device__ std::int32_t query_of(std::int32_t n) const { return n % window; }
  [[nodiscard]] __device__ std::int32_t position(std::int32_t i) const {
    return view->position(view->count - window + i);
  }
};

__device__ Plan plan_of(const Task& task, std::int64_t r) {
  const EvidenceArguments& e = task.e;
  Plan plan;
  plan.row = e.rows + r;
  plan.view = e.queries + r / e.kv_heads;
  plan.window = task.windows[r].queries;
  plan.history = task.windows[r].history;
  if (plan.window == 0) return plan;
  const std::int64_t oldest =
      (r / e.kv_heads * e.query_heads() + plan.row->head * e.group) * std::int64_t{task.window} + task.window -
      plan.window;
  plan.queries = task.queries + oldest * e.dim;
  plan.lse = task.log_sum_exp == nullptr ? nullptr : task.log_sum_exp + oldest;
  plan.total = task.max_logit ? plan.window : e.group * plan.window;
  plan.to = plan.row->length;
  if (task.kind != Kind::history) return plan;
  const std::int32_t seen_by_all = plan.position(0);
  // The history ends where the oldest query sees no further.
  plan.to = partition_point(0, plan.history, [&](std::int32_t t) { return plan.row->positions[t] <= seen_by_all; });
  plan.from = task.first == nullptr ? 0 : task.first[r] < plan.to ? task.first[r] : plan.to;
  return plan;
}

/// Where the next query head's queries begin, in floats.
__device__ inline std::int64_t head_stride(const Task& task) { return std::int64_t{task.window} * task.e.dim; }

/// What a query's position is compared with: a slot is seen by the queries at or after it.
__device__ inline std::int32_t slot_position(const Task& task, const Plan& plan, std::int32_t slot) {
  if (slot < plan.from || slot >= plan.to) return kNever;
  return task.kind == Kind::history ? kFirst : plan.row->positions[slot];
}

/// Rows of the product that a tile of queries shares.
struct QueryArrays {
  std::int32_t* position;
  float* shift;
  float* weight;  ///< in the column
  float* share;   ///< in newest
};

/// Slots of a row whose statistics one block takes: whole chunks, so that no row has more than kAttentionParts such
/// parts.
KVKEEP_HD inline std::int32_t part_of(std::int32_t length) {
  const std::int32_t chunks = (length + kAttentionChunk - 1) / kAttentionChunk;
  return (chunks + kAttentionParts - 1) / kAttentionParts * kAttentionChunk;
}

/// What one block looks at: a chunk of a row, or a part of it when statistics are taken.
struct Piece {
  std::int64_t row;
  std::int32_t begin;
  std::int32_t slots;  ///< 0: nothing to do
};

template <bool kApply>
__device__ std::int32_t pieces_of_a_row(const Task& task) {
  return kApply ? task.chunks : task.parts;
}

template <bool kApply>
__device__ Piece piece_of(const Task& task, std::int64_t work) {
  const std::int32_t pieces = pieces_of_a_row<kApply>(task);
  const std::int64_t r = work / pieces;
  if (!task.e.due(r)) return {r, 0, 0};
  const std::int32_t length = task.e.rows[r].length, slots = kApply ? kAttentionChunk : part_of(length);
  const std::int64_t begin = (work - r * pieces) * slots;
  return begin < length ? Piece{r, static_cast<std::int32_t>(begin), slots} : Piece{r, 0, 0};
}

/// What is subtracted from the logits of row n of the product, and the factor of their exponentials: what the parts of
/// the row found, combined in ascending order.
__device__ float2 standard_of(const Task& task, const Plan& plan, std::int64_t r, std::int32_t n) {
  const std::int32_t part = part_of(plan.row->length), parts = (plan.row->length + part - 1) / part;
  Running seen;
  for (std::int32_t p = 0; p < parts; ++p) {
    const float2 of_part = task.partial[(r * task.parts + p) * task.most + n];
    Running other;
    other.top = of_part.x;
    other.sum = of_part.y;
    seen.add(other);
  }
  return seen.sum > 0 ? float2{seen.top, 1.0F / seen.sum} : float2{0, 0};
}

/// Fills entry q of the arrays with row n of the product, or with one that counts nothing.
__device__ void set_query(const Task& task, const Plan& plan, std::int64_t r, std::int32_t n, std::int32_t q,
                          bool apply, const QueryArrays& to) {
  const bool there = n < plan.total;
  const std::int32_t i = there ? plan.query_of(n) : 0;
  to.position[q] = there ? plan.position(i) : kFirst;
  if (!apply) return;
  float2 s{0, 0};
  if (there && plan.lse != nullptr) {
    const float lse = plan.lse[std::int64_t{n / plan.window} * task.window + i];
    s = is_number(lse) ? float2{lse, 1.0F} : s;
  } else if (there) {
    s = standard_of(task, plan, r, n);
  }
  to.shift[q] = s.x;
  to.weight[q] =
      task.kind == Kind::history && i == plan.window - 1 ? s.y * static_cast<float>(task.newest_counts) : s.y;
  to.share[q] = i == plan.window - 1 ? s.y / static_cast<float>(task.e.group) : 0.0F;
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
__device__ void finish(const Task& task, const Plan& plan, std::int32_t begin, const float* columns,
                       const float* newest) {
  const std::int32_t left = plan.row->length - begin, count = left < kAttentionChunk ? left : kAttentionChunk;
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < count; j += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t t = begin + j;
    const std::int64_t at = plan.row->first + t;
    if (task.newest != nullptr) task.newest[at] = plan.total == 0 ? 0.0F : newest[j];
    if (task.column == nullptr) continue;
    float divisor = 0;
    if (plan.total == 0 || t < plan.from || t >= plan.to) {
      divisor = 0;
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
    task.column[at] = divisor == 0 ? 0.0F : columns[j] / divisor;
  }
}

// In f32: a thread has one slot, and multiplies its key with kQ queries that all threads read alike.

template <class T, int kQ>
struct PlainShared {
  static constexpr std::int32_t kStride = kAttentionSlice * static_cast<std::int32_t>(sizeof(T)) +
                                          16;  ///< of a slot: threads read rows of it without conflicts
  std::size_t keys, queries, position, shift, weight, share, running, columns, newest, bytes;
  std::int32_t padded;  ///< components of a query, in whole words of keys

  KVKEEP_HD explicit PlainShared(std::int32_t dim) : padded((dim + 15) / 16 * 16) {
    Parts parts;
    keys = parts.take(static_cast<std::size_t>(kAttentionTile) * kStride);
    queries = parts.take(sizeof(float) * kQ * static_cast<std::size_t>(padded));
    position = parts.take(sizeof(std::int32_t) * kQ);
    shift = parts.take(sizeof(float) * kQ);
    weight = parts.take(sizeof(float) * kQ);
    share = parts.take(sizeof(float) * kQ);
    running = parts.take(sizeof(Running) * kQ * (kAttentionTile / 32));
    columns = parts.take(sizeof(float) * kAttentionChunk);
    newest = parts.take(sizeof(float) * kAttentionChunk);
    bytes = parts.bytes;
  }
};

template <class T, int kQ, bool kApply, bool kMaximum>
__global__ void __launch_bounds__(kAttentionTile, 4) plain_kernel(Task task) {
  const PlainShared<T, kQ> parts(task.e.dim);
  std::byte* shared = dynamic_shared();
  std::byte* keys = shared + parts.keys;
  auto* queries = reinterpret_cast<float*>(shared + parts.queries);
  auto* running = reinterpret_cast<Running*>(shared + parts.running);
  auto* columns = reinterpret_cast<float*>(shared + parts.columns);
  auto* newest = reinterpret_cast<float*>(shared + parts.newest);
  const QueryArrays arrays{
      reinterpret_cast<std::int32_t*>(shared + parts.position), reinterpret_cast<float*>(shared + parts.shift),
      reinterpret_cast<float*>(shared + parts.weight), reinterpret_cast<float*>(shared + parts.share)};
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.e.dim, heads = kMaximum ? task.e.group : 1;

  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * pieces_of_a_row<kApply>(task);
       work += gridDim.x) {
    const Piece piece = piece_of<kApply>(task, work);
    if (piece.slots == 0) continue;
    const std::int64_t r = piece.row;
    const Plan plan = plan_of(task, r);
    const Row& row = *plan.row;
    const bool aligned = is_aligned(row.keys);
    const std::int32_t begin = piece.begin, end = plan.to - begin < piece.slots ? plan.to : begin + piece.slots;
    if constexpr (kApply)
      for (std::int32_t j = thread; j < kAttentionChunk; j += kAttentionTile) columns[j] = newest[j] = 0;

    for (std::int32_t n0 = 0; n0 < plan.total; n0 += kQ) {
      __syncthreads();
      if (thread < kQ) set_query(task, plan, r, n0 + thread, thread, kApply, arrays);
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
      Running seen[kQ];
      for (std::int32_t tile = begin; tile < end; tile += kAttentionTile) {
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
                const float a = to_float(word.x[k]), b = to_float(word.x[k + 1]), c = to_float(word.x[k + 2]),
                            e = to_float(word.x[k + 3]);
#pragma unroll
                for (int q = 0; q < kQ; ++q) {
                  const float4 f = *reinterpret_cast<const float4*>(queries + q * parts.padded + d0 + d + k);
                  sum[q] = fmaf(a, f.x, sum[q]);
                  sum[q] = fmaf(b, f.y, sum[q]);
                  sum[q] = fmaf(c, f.z, sum[q]);
                  sum[q] = fmaf(e, f.w, sum[q]);
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
          const float logit = x[q] * scale;
          if constexpr (kApply) {
            add_share(task.kind, logit, at, arrays.position[q], slot < plan.history, arrays.shift[q], arrays.weight[q],
                      arrays.share[q], column, of_newest);
          } else {
            if (at <= arrays.position[q] && is_number(logit)) seen[q].add(logit);
          }
        }
        if constexpr (kApply) {
          columns[slot - begin] += column;
          newest[slot - begin] += of_newest;
        }
      }
      if constexpr (!kApply) {
#pragma unroll
        for (int q = 0; q < kQ; ++q) {
          seen[q] = over_lanes<32>(seen[q]);
          if (thread % 32 == 0) running[thread / 32 * kQ + q] = seen[q];
        }
        __syncthreads();
        if (thread < kQ && n0 + thread < plan.total) {
          Running all = running[thread];
          for (std::int32_t warp = 1; warp < kAttentionTile / 32; ++warp) all.add(running[warp * kQ + thread]);
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

// On matrix units: a warp has 32 queries and 32 slots of a tile of 64 and 128; each query is the sum of two numbers of
// the keys' dtype, the lower one 0 if it came in that dtype.

constexpr std::int32_t kScratchStride = 20;

template <class S>
struct MatrixShared {
  static constexpr std::int32_t kStride =
      kAttentionSlice + 8;  ///< of a slot, in elements: rows of it are in different banks
  std::size_t keys, high, low, scratch, factor, position, shift, weight, share, slot_at, slot_scale, running, side,
      side_newest, columns, newest, bytes;
  std::int32_t stride;  ///< of a query, in elements

  KVKEEP_HD explicit MatrixShared(std::int32_t dim) : stride(dim + 8) {
    Parts parts;
    keys = parts.take(sizeof(S) * kAttentionTile * kStride);
    high = parts.take(sizeof(S) * kMatrixQueries * static_cast<std::size_t>(stride));
    low = parts.take(sizeof(S) * kMatrixQueries * static_cast<std::size_t>(stride));
    scratch = keys;  // products replace the keys: what 256 components need then still fits the chips with the least
    static_assert(sizeof(float) * (kMatrixThreads / 32) * 16 * kScratchStride <= sizeof(S) * kAttentionTile * kStride);
    factor = parts.take(sizeof(float) * kMatrixQueries);
    position = parts.take(sizeof(std::int32_t) * kMatrixQueries);
    shift = parts.take(sizeof(float) * kMatrixQueries);
    weight = parts.take(sizeof(float) * kMatrixQueries);
    share = parts.take(sizeof(float) * kMatrixQueries);
    slot_at = parts.take(sizeof(std::int32_t) * kAttentionTile);
    slot_scale = parts.take(sizeof(float) * kAttentionTile);
    running = parts.take(sizeof(Running) * 4 * kMatrixQueries);
    side = parts.take(sizeof(float) * 2 * kAttentionTile);
    side_newest = parts.take(sizeof(float) * 2 * kAttentionTile);
    columns = parts.take(sizeof(float) * kAttentionChunk);
    newest = parts.take(sizeof(float) * kAttentionChunk);
    bytes = parts.bytes;
  }
};

/// Splits one row of queries into high and low parts, one warp per row, times a power of two that brings its largest
/// component to [1, 2), so that neither part leaves f16. `factor` undoes it. Returns whether the lane wrote a low part
/// that is not 0.
template <class S>
__device__ bool split_query(const float* query, std::int32_t dim, S* high, S* low, float* factor) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  float largest = 0;
  for (std::int32_t d = lane; d < dim; d += 32) largest = fmaxf(largest, query == nullptr ? 0.0F : fabsf(query[d]));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, step));
  std::int32_t exponent = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
  if (exponent == -127 || exponent == 128) exponent = 0;  // zeros and subnormals; numbers that are not finite
  const float by = ldexpf(1.0F, -exponent);
  bool split = false;
  for (std::int32_t d = lane; d < dim; d += 32) {
    const float x = query == nullptr ? 0.0F : query[d] * by;
    from_float(x, high[d]);
    const float rest = x - to_float(high[d]);
    from_float(rest, low[d]);
    split = split || rest != 0;
  }
  if (lane == 0) *factor = ldexpf(1.0F, exponent);
  return split;
}

template <class T, bool kApply>
__global__ void __launch_bounds__(kMatrixThreads, 2) matrix_kernel(Task task) {
  using S = MatrixElement<T>;
  using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, S, wmma::row_major>;
  using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, S, wmma::col_major>;
  using Product = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  const MatrixShared<S> parts(task.e.dim);
  std::byte* shared = dynamic_shared();
  auto* keys = reinterpret_cast<S*>(shared + parts.keys);
  auto* high = reinterpret_cast<S*>(shared + parts.high);
  auto* low = reinterpret_cast<S*>(shared + parts.low);
  auto* factor = reinterpret_cast<float*>(shared + parts.factor);
  auto* slot_at = reinterpret_cast<std::int32_t*>(shared + parts.slot_at);
  auto* slot_scale = reinterpret_cast<float*>(shared + parts.slot_scale);
  auto* running = reinterpret_cast<Running*>(shared + parts.running);
  auto* side = reinterpret_cast<float*>(shared + parts.side);
  auto* side_newest = reinterpret_cast<float*>(shared + parts.side_newest);
  auto* columns = reinterpret_cast<float*>(shared + parts.columns);
  auto* newest = reinterpret_cast<float*>(shared + parts.newest);
  const QueryArrays arrays{
      reinterpret_cast<std::int32_t*>(shared + parts.position), reinterpret_cast<float*>(shared + parts.shift),
      reinterpret_cast<float*>(shared + parts.weight), reinterpret_cast<float*>(shared + parts.share)};
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t warp = thread / 32, lane = thread % 32, query_side = warp / 4, slot_side = warp % 4;
  float* scratch = reinterpret_cast<float*>(shared + parts.scratch) + warp * 16 * kScratchStride;
  const std::int32_t dim = task.e.dim;

  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * pieces_of_a_row<kApply>(task);
       work += gridDim.x) {
    const Piece piece = piece_of<kApply>(task, work);
    if (piece.slots == 0) continue;
    const std::int64_t r = piece.row;
    const Plan plan = plan_of(task, r);
    const Row& row = *plan.row;
    const bool aligned = is_aligned(row.keys);
    const std::int32_t begin = piece.begin, end = plan.to - begin < piece.slots ? plan.to : begin + piece.slots;
    if constexpr (kApply)
      for (std::int32_t j = thread; j < kAttentionChunk; j += kMatrixThreads) columns[j] = newest[j] = 0;

    for (std::int32_t n0 = 0; n0 < plan.total; n0 += kMatrixQueries) {
      __syncthreads();
      if (thread < kMatrixQueries) set_query(task, plan, r, n0 + thread, thread, kApply, arrays);
      bool split = false;
      for (std::int32_t q = warp; q < kMatrixQueries; q += kMatrixThreads / 32) {
        const std::int32_t n = n0 + q;
        const float* query =
            n < plan.total ? plan.queries + (n / plan.window) * head_stride(task) + std::int64_t{plan.query_of(n)} * dim
                           : nullptr;
        split = split_query(query, dim, high + q * parts.stride, low + q * parts.stride, factor + q) || split;
      }
      const int halves = __syncthreads_or(split ? 1 : 0) != 0 ? 2 : 1;
      Running seen[2];
      for (std::int32_t tile = begin; tile < end; tile += kAttentionTile) {
        const std::int32_t tile_end = tile + kAttentionTile < end ? tile + kAttentionTile : end;
        // The same for a whole warp: blocks of 16 after the last query or slot are left out. Slots after the last one
        // in its block may hold anything: no query sees them.
        const auto query_block = [&](int i) { return query_side * 32 + i * 16; };
        const auto slot_block = [&](int j) { return slot_side * 32 + j * 16; };
        const auto wanted = [&](int i, int j) {
          return n0 + query_block(i) < plan.total && tile + slot_block(j) < tile_end;
        };
        Product product[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) wmma::fill_fragment(product[i][j], 0.0F);
        for (std::int32_t d0 = 0; d0 < dim; d0 += kAttentionSlice) {
          const std::int32_t n = dim - d0 < kAttentionSlice ? dim - d0 : kAttentionSlice;
          __syncthreads();
          if (d0 == 0 && thread < kAttentionTile) {
            slot_at[thread] = slot_position(task, plan, tile + thread);
            slot_scale[thread] = (tile + thread < tile_end ? key_scale<T>(row, tile + thread) : 1.0F) * task.e.scale;
          }
          if constexpr (std::is_same_v<T, S>) {
            stage_keys_ahead<T, kAttentionSlice>(row.keys, aligned, tile, tile_end, d0, n,
                                                 reinterpret_cast<std::byte*>(keys),
                                                 parts.kStride * static_cast<std::int32_t>(sizeof(S)));
          } else {
            const std::int32_t words = n / kPerWord<T>;
            for (std::int32_t i = thread; i < (tile_end - tile) * words; i += kMatrixThreads) {
              const std::int32_t slot = i / words, d = (i - slot * words) * kPerWord<T>;
              const T* key = reinterpret_cast<const T*>(row.keys.at(tile + slot)) + d0 + d;
              Elements<T> word;
              if (aligned) {
                word = *reinterpret_cast<const Elements<T>*>(key);
              } else {
#pragma unroll
                for (int k = 0; k < kPerWord<T>; ++k) word.x[k] = key[k];
              }
              Elements<S>* to = reinterpret_cast<Elements<S>*>(keys + slot * parts.kStride + d);
#pragma unroll
              for (int k = 0; k < kPerWord<T>; ++k) to[k / kPerWord<S>].x[k % kPerWord<S>] = to_half(word.x[k]);
            }
          }
          __syncthreads();
          for (std::int32_t d = 0; d < n; d += 16) {
            Right right[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
              if (wanted(0, j))
                wmma::load_matrix_sync(right[j], keys + slot_block(j) * parts.kStride + d,
                                       static_cast<unsigned>(parts.kStride));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (!wanted(i, 0)) continue;
              Left left;
              for (int part = 0; part < halves; ++part) {
                wmma::load_matrix_sync(left, (part == 0 ? high : low) + query_block(i) * parts.stride + d0 + d,
                                       static_cast<unsigned>(parts.stride));
#pragma unroll
                for (int j = 0; j < 2; ++j)
                  if (wanted(i, j)) wmma::mma_sync(product[i][j], left, right[j], product[i][j]);
              }
            }
          }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float column = 0, of_newest = 0;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (!wanted(i, j)) continue;
            __syncwarp();
            wmma::store_matrix_sync(scratch, product[i][j], kScratchStride, wmma::mem_row_major);
            __syncwarp();
            if constexpr (kApply) {  // half a column per lane
              const std::int32_t s = slot_block(j) + lane % 16, q0 = query_block(i) + lane / 16 * 8, at = slot_at[s];
              const bool open = tile + s < plan.history;
#pragma unroll
              for (int k = 0; k < 8; ++k) {
                const std::int32_t q = q0 + k;
                const float logit =
                    scratch[(lane / 16 * 8 + k) * kScratchStride + lane % 16] * factor[q] * slot_scale[s];
                add_share(task.kind, logit, at, arrays.position[q], open, arrays.shift[q], arrays.weight[q],
                          arrays.share[q], column, of_newest);
              }
            } else {  // half a row per lane
              const std::int32_t q = query_block(i) + lane / 2, s0 = slot_block(j) + lane % 2 * 8,
                                 at = arrays.position[q];
              const float by = factor[q];
#pragma unroll
              for (int k = 0; k < 8; ++k) {
                const float logit = scratch[lane / 2 * kScratchStride + lane % 2 * 8 + k] * by * slot_scale[s0 + k];
                if (slot_at[s0 + k] <= at && is_number(logit)) seen[i].add(logit);
              }
            }
          }
          if constexpr (kApply) {
            column += __shfl_xor_sync(0xFFFFFFFFU, column, 16);
            of_newest += __shfl_xor_sync(0xFFFFFFFFU, of_newest, 16);
            if (lane < 16) {
              side[query_side * kAttentionTile + slot_block(j) + lane] = column;
              side_newest[query_side * kAttentionTile + slot_block(j) + lane] = of_newest;
            }
          }
        }
        if constexpr (kApply) {
          __syncthreads();
          if (tile + thread < tile_end && thread < kAttentionTile) {
            columns[tile + thread - begin] += side[thread] + side[kAttentionTile + thread];
            newest[tile + thread - begin] += side_newest[thread] + side_newest[kAttentionTile + thread];
          }
        }
      }
      if constexpr (!kApply) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          seen[i] = over_lanes<2>(seen[i]);
          if (lane % 2 == 0) running[slot_side * kMatrixQueries + query_side * 32 + i * 16 + lane / 2] = seen[i];
        }
        __syncthreads();
        if (thread < kMatrixQueries && n0 + thread < plan.total) {
          Running all = running[thread];
          for (std::int32_t s = 1; s < 4; ++s) all.add(running[s * kMatrixQueries + thread]);
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

template <class T, int kQ, bool kMaximum>
void launch_plain(const Task& task, Stream stream) {
  const auto pieces_of = [&](std::int32_t pieces) {
    return Grid{.blocks = blocks_for(std::int64_t{task.e.count} * pieces),
                .threads = kAttentionTile,
                .shared_bytes = PlainShared<T, kQ>(task.e.dim).bytes};
  };
  if (task.log_sum_exp == nullptr)
    launch("attention_statistics", plain_kernel<T, kQ, false, kMaximum>, pieces_of(task.parts), stream, task);
  launch("attention", plain_kernel<T, kQ, true, kMaximum>, pieces_of(task.chunks), stream, task);
}

template <class T>
void launch_matrix(const Task& task, Stream stream) {
  const auto pieces_of = [&](std::int32_t pieces) {
    return Grid{.blocks = blocks_for(std::int64_t{task.e.count} * pieces),
                .threads = kMatrixThreads,
                .shared_bytes = MatrixShared<MatrixElement<T>>(task.e.dim).bytes};
  };
  if (task.log_sum_exp == nullptr)
    launch("attention_statistics", matrix_kernel<T, false>, pieces_of(task.parts), stream, task);
  launch("attention", matrix_kernel<T, true>, pieces_of(task.chunks), stream, task);
}

std::int32_t chunks_of(const EvidenceArguments& e) { return (e.longest + kAttentionChunk - 1) / kAttentionChunk; }

std::int32_t parts_of(const EvidenceArguments& e) {
  return chunks_of(e) < kAttentionParts ? chunks_of(e) : kAttentionParts;
}

void run(Task task, void* workspace, Stream stream) {
  check_dim("window_attention", task.e.dim);
  if (task.e.count == 0 || task.e.longest == 0) return;
  task.chunks = chunks_of(task.e);
  task.most = (task.max_logit ? 1 : task.e.group) * task.window;
  task.parts = parts_of(task.e);
  task.partial = static_cast<float2*>(workspace);
  with_element(task.e.keys, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>)
      if (!task.max_logit && task.most >= 16 && task.e.dim % 16 == 0) return launch_matrix<T>(task, stream);
    if (task.max_logit)
      launch_plain<T, 8, true>(task, stream);
    else if (task.most <= 4)
      launch_plain<T, 4, false>(task, stream);
    else
      launch_plain<T, 8, false>(task, stream);
  });
}

}  // namespace

std::int64_t window_attention_workspace_bytes(const EvidenceArguments& evidence, std::int32_t window) {
  return std::int64_t{evidence.count} * evidence.group * window * parts_of(evidence) *
         static_cast<std::int64_t>(sizeof(float2));
}

void launch_window_attention(const WindowAttentionArguments& a, Stream stream) {
  KVKEEP_REQUIRE(a.usage == nullptr || a.sum == nullptr, "window_attention: usage and sum are reduced one at a time");
  Task task{};
  task.e = a.evidence;
  task.windows = a.windows;
  task.window = a.window;
  task.queries = a.queries;
  task.log_sum_exp = a.log_sum_exp;
  task.column = a.usage != nullptr ? a.usage : a.sum;
  task.newest = a.newest;
  task.kind = a.sum != nullptr ? Kind::sum : Kind::window;
  run(task, a.workspace, stream);
}

void launch_history_attention(const HistoryAttentionArguments& a, Stream stream) {
  Task task{};
  task.e = a.evidence;
  task.windows = a.windows;
  task.window = a.window;
  task.queries = a.queries;
  task.first = a.first;
  task.column = a.out;
  task.newest_counts = a.newest_counts;
  task.kind = Kind::history;
  task.max_logit = a.max_logit;
  run(task, a.workspace, stream);
}

}  // namespace kvkeep::cuda
