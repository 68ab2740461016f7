// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The queries of window attention on matrix units, 16 at a time, and the kernel that splits them into numbers of the
/// keys' dtype. window_attention_matrix.cu says what is computed from them, and in which lane each number is.

#include "window_attention_task.cuh"

namespace kvkeep::cuda::attention {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2OfE = 1.44269504F;
constexpr std::int32_t kTileQueries = 16;  ///< queries that are multiplied at a time
constexpr std::int32_t kSpan = 32;         ///< components whose words are next to each other

/// What follows for a query from its product with a key: a share of 2^(product * factor + shift).
struct QueryLine {
  float factor;
  float shift;
};

/// What a query counts for.
struct QueryMark {
  std::int32_t position;
  float newest;  ///< factor of its shares in newest
};

/// What is true of a tile, in one number.
enum TileFlags : std::int32_t { kSplit = 1, kNewest = 2 };

/// 16 queries of a row as they are multiplied, times a power of two each. kSpans: 2, 4 or 8 spans that the head size
/// needs.
template <int kSpans>
struct alignas(16) QueryTile {
  static constexpr std::int32_t kWords = 64 * kSpans;
  /// Words of the whole.
  static constexpr std::int32_t kAll = kWords + (sizeof(QueryLine) + sizeof(QueryMark)) * kTileQueries / 16 + 1;
  uint4 words[kWords];  ///< [spans, 2, 32] what a lane has of the left side of each product
  QueryLine lines[kTileQueries];
  QueryMark marks[kTileQueries];
  int4 flags;  ///< x: TileFlags
};

/// All queries, each the sum of two numbers of the keys' dtype.
struct SplitQueries {
  std::byte* tiles;       ///< QueryTile [count, `most`] with the high numbers
  uint4* low;             ///< [count, most, kWords] the low ones, where a tile's flags say that they are not all 0
  AttentionPlan* plans;   ///< [count]
  std::int32_t* arrived;  ///< [count] parts whose statistics are there
  std::int32_t most;      ///< tiles of the largest product

  template <int kSpans>
  [[nodiscard]] __device__ QueryTile<kSpans>* of() const {
    return reinterpret_cast<QueryTile<kSpans>*>(tiles);
  }
};

/// The arguments of the kernels.
struct AttentionMatrixTask {
  AttentionTask of;
  SplitQueries queries;
  std::int32_t resident;  ///< tiles that fit shared memory, or half as many where queries need both numbers
  std::int32_t at_once;   ///< chunks, or parts for their statistics, that a block looks at
};

/// Calls body with the spans that heads of `dim` components take, as a constant.
template <class Body>
decltype(auto) with_spans(std::int32_t dim, const Body& body) {
  if (dim <= 2 * kSpan) return body(std::integral_constant<int, 2>{});
  if (dim <= 4 * kSpan) return body(std::integral_constant<int, 4>{});
  return body(std::integral_constant<int, 8>{});
}

static_assert(sizeof(QueryTile<4>) == sizeof(uint4) * QueryTile<4>::kAll);

/// Splits 16 queries of a row, a thread for every eight components: into high and low numbers times a power of two that
/// brings the query's largest component to [1, 2), so that neither leaves f16.
template <class S, int kSpans>
__global__ void __launch_bounds__(kTileQueries* kSpans * 4) attention_split_queries_kernel(AttentionMatrixTask m) {
  const AttentionTask& task = m.of;
  const SplitQueries& to = m.queries;
  constexpr std::int32_t kParts = kSpans * 4;
  const std::int32_t dim = task.e.dim;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t q = thread / kParts, word = thread % kParts;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * to.most; work += gridDim.x) {
    const std::int64_t r = work / to.most;
    const std::int32_t n = static_cast<std::int32_t>(work - r * to.most) * kTileQueries + q;
    if (!task.e.due(r)) continue;
    const AttentionPlan plan = plan_of(task, r);
    if (n == 0 && word == 0) {
      to.plans[r] = plan;
      to.arrived[r] = 0;
    }
    if (n - q >= plan.total) continue;
    const bool there = n < plan.total;
    const std::int32_t i = there ? plan.query_of(n) : 0;
    float x[8] = {};
    if (there && word * 8 < dim) {
      const std::int32_t head = n / plan.window;
      if (plan.queries != nullptr)
        load_wide<8>(plan.queries + head * head_stride(task) + std::int64_t{i} * dim + word * 8, Element::f32, x);
      else
        load_wide<8>(plan.view->at(plan.view->count - plan.window + i, plan.row->head * task.e.group + head) +
                         word * 8 * (task.e.query == Element::f32 ? 4 : 2),
                     task.e.query, x);
    }
    float largest = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(x[k]));
    for (std::int32_t step = kParts / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, step));
    std::int32_t exponent = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
    if (exponent == -127 || exponent == 128) exponent = 0;  // zeros and subnormals; numbers that are not finite
    const float by = ldexpf(1.0F, -exponent);
    Elements<S> high, low;
    bool split = false;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      from_float(x[k] * by, high.x[k]);
      const float rest = x[k] * by - to_float(high.x[k]);
      from_float(rest, low.x[k]);
      split = split || rest != 0;
    }
    const bool newest = there && i == plan.window - 1;
    const bool any_split = __syncthreads_or(split ? 1 : 0) != 0, any_newest = __syncthreads_or(newest ? 1 : 0) != 0;
    // Pairs of components: two for the first product of the span, two for the second.
    QueryTile<kSpans>& into = to.of<kSpans>()[work];
    auto* high_pairs = reinterpret_cast<PackedElements<S, 2>*>(into.words);
    auto* low_pairs = reinterpret_cast<PackedElements<S, 2>*>(to.low + work * QueryTile<kSpans>::kWords);
    const std::int32_t place = (word / 4 * 64 + q % 8 * 4 + word % 4) * 4 + q / 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const std::int32_t at = place + pair / 2 * 32 * 4 + pair % 2 * 2;
      high_pairs[at] = {high.x[2 * pair], high.x[2 * pair + 1]};
      if (any_split) low_pairs[at] = {low.x[2 * pair], low.x[2 * pair + 1]};
    }
    if (word == 0) {
      const float lse = there && plan.lse != nullptr ? plan.lse[n / plan.window * std::int64_t{task.window} + i] : 0.0F;
      into.lines[q] = {there ? ldexpf(task.e.scale * kLog2OfE, exponent) : 0.0F,
                       there && plan.lse != nullptr && is_number(lse) ? -lse * kLog2OfE : kNothing};
      into.marks[q] = {there ? plan.position(i) : kFirst, newest ? 1.0F / static_cast<float>(task.e.group) : 0.0F};
    }
    if (thread == 0)
      into.flags = {(any_split ? kSplit : 0) + (any_newest && task.newest != nullptr ? kNewest : 0), 0, 0, 0};
  }
}

}  // namespace kvkeep::cuda::attention
