// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The queries of window attention on matrix units, 16 at a time, and the kernels that split them into numbers of the
/// keys' dtype and weigh them. window_attention_matrix.cu says what is computed from them, and in which lane each
/// number is.

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
  std::int32_t ahead;     ///< of a warp's blocks of eight slots, those whose keys have room in shared memory: 1, 2 or 4
  std::int32_t at_once;   ///< rounds of slots, or parts for their statistics, that a block looks at
  std::int32_t pieces;    ///< of the longest row that blocks look at
};

/// Calls body with the spans that heads of `dim` components take, as a constant.
template <class Body>
decltype(auto) with_spans(std::int32_t dim, const Body& body) {
  if (dim <= 2 * kSpan) return body(std::integral_constant<int, 2>{});
  if (dim <= 4 * kSpan) return body(std::integral_constant<int, 4>{});
  return body(std::integral_constant<int, 8>{});
}

static_assert(sizeof(QueryTile<4>) == sizeof(uint4) * QueryTile<4>::kAll);

/// Splits a row's queries, a warp for every 16 of them: into high and low numbers times a power of two that brings the
/// query's largest component to [1, 2), so that neither leaves f16. A lane has eight components of two queries g and g
/// + 8 at a time: what two lanes of a product have, 16 bytes each.
template <class S, int kSpans>
__global__ void __launch_bounds__(tuning::kSplitThreads) attention_split_queries_kernel(AttentionMatrixTask m) {
  wait_for_earlier_kernels();
  const AttentionTask& task = m.of;
  const SplitQueries& to = m.queries;
  constexpr std::uint32_t kAll = 0xFFFFFFFFU;
  constexpr std::int32_t kParts = kSpans * 4, kPairs = 32 / kParts, kTurns = 8 / kPairs;  // a turn: kPairs of queries
  constexpr std::int32_t kHeld = 2;                                                       // turns that are read at once
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % 32, part = lane % kParts;
  const std::int64_t all = std::int64_t{task.e.count} * to.most, step = std::int64_t{gridDim.x} * (blockDim.x / 32);
  for (std::int64_t work = blockIdx.x * std::int64_t{blockDim.x / 32} + threadIdx.x / 32; work < all; work += step) {
    const std::int64_t r = static_cast<std::uint32_t>(work) / static_cast<std::uint32_t>(to.most);
    if (!task.e.due(r)) continue;
    AttentionPlan plan = plan_of(task, r);
    const std::int32_t first = static_cast<std::int32_t>(work - r * to.most) * kTileQueries;
    if (first == 0 && lane == 0) {
      if (plan.window > 0) plan.oldest = plan.position(0);
      to.plans[r] = plan;
      to.arrived[r] = 0;
    }
    if (first >= plan.total) continue;
    // Each of the lower 16 lanes knows a query.
    const std::int32_t n = first + lane % kTileQueries, head = n < plan.total ? n / plan.window : 0;
    const bool there = n < plan.total;
    const std::int32_t i = there ? n - head * plan.window : 0;
    const std::byte* from = nullptr;
    if (there && plan.queries != nullptr)
      from = reinterpret_cast<const std::byte*>(plan.queries + head * head_stride(task) + std::int64_t{i} * task.e.dim);
    else if (there)
      from = plan.view->at(plan.view->count - plan.window + i, plan.row->head * task.e.group + head);
    std::int32_t exponent = 0;
    bool split = false;
    QueryTile<kSpans>& into = to.of<kSpans>()[work];
    uint4* const low = to.low + work * QueryTile<kSpans>::kWords;

    with_wide_element(plan.queries != nullptr ? Element::f32 : task.e.query, [&](auto type) {
      using Q = decltype(type);
      using Packed = PackedElements<Q, 8>;
      const bool aligned = __all_sync(kAll, reinterpret_cast<std::uintptr_t>(from) % sizeof(Packed) == 0) != 0;
      bool write_low = false;
#pragma unroll 1
      for (std::int32_t turn = 0; turn < kTurns;) {
        Packed held[kHeld][2] = {};
#pragma unroll
        for (int t = 0; t < kHeld; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const std::int32_t q = h * 8 + (turn + t) * kPairs + lane / kParts;
            const auto at =
                __shfl_sync(kAll, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(from)), q);
            const Q* const of = at == 0 || part * 8 >= task.e.dim ? nullptr : reinterpret_cast<const Q*>(at) + part * 8;
            if (aligned) {
              if (of != nullptr) held[t][h] = *reinterpret_cast<const Packed*>(of);
            } else if (of != nullptr) {
#pragma unroll
              for (int k = 0; k < 8; ++k) held[t][h].x[k] = of[k];
            }
          }
#pragma unroll
        for (int t = 0; t < kHeld; ++t) {
          Elements<S> numbers[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float largest = 0;
#pragma unroll
            for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(to_float(held[t][h].x[k])));
#pragma unroll
            for (std::int32_t bit = kParts / 2; bit > 0; bit /= 2)
              largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, bit));
            std::int32_t of_largest = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
            if (of_largest == -127 || of_largest == 128) of_largest = 0;  // zeros and subnormals; not finite
            const float by =
                __uint_as_float(of_largest == 127 ? 1U << 22U : static_cast<unsigned>(127 - of_largest) << 23U);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              const float x = to_float(held[t][h].x[k]) * by;
              from_float(x, numbers[h].x[k]);
              const float rest = x - to_float(numbers[h].x[k]);
              split = split || rest != 0;
              if (write_low) from_float(rest, numbers[h].x[k]);
            }
            const std::int32_t q0 = h * 8 + (turn + t) * kPairs,  // the first of the turn's
                given = __shfl_sync(kAll, of_largest, (lane - q0) * kParts & 31);
            if (lane >= q0 && lane < q0 + kPairs) exponent = given;
          }
          unsigned pairs[2][4];
          memcpy(pairs[0], &numbers[0], sizeof pairs[0]);
          memcpy(pairs[1], &numbers[1], sizeof pairs[1]);
          // Pairs of components: two for the first product of the span, two for the second.
          uint4* const word =
              (write_low ? low : into.words) + part / 4 * 64 + ((turn + t) * kPairs + lane / kParts) * 4 + part % 4;
          word[0] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
          word[32] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
        }
        turn += kHeld;
        if (turn < kTurns || write_low) continue;
        split = __any_sync(kAll, split ? 1 : 0) != 0;
        if (split) write_low = true, turn = 0;  // once more
      }
    });
    const bool newest = there && i == plan.window - 1,
               any_newest = __any_sync(kAll, newest ? 1 : 0) != 0 && task.newest != nullptr;
    if (lane < kTileQueries) {
      const float lse = there && plan.lse != nullptr ? plan.lse[head * std::int64_t{task.window} + i] : 0.0F;
      into.lines[lane] = {there ? ldexpf(task.e.scale * kLog2OfE, exponent) : 0.0F,
                          there && plan.lse != nullptr && is_number(lse) ? -lse * kLog2OfE : kNothing};
      into.marks[lane] = {there ? plan.position(i) : kFirst, newest ? 1.0F / static_cast<float>(task.e.group) : 0.0F};
    }
    if (lane == 0) into.flags = {(split ? kSplit : 0) + (any_newest ? kNewest : 0), 0, 0, 0};
  }
}

/// The weights of queries, which are the shares' too: a shift of what follows from their products. One thread for each
/// query.
template <int kSpans>
__global__ void __launch_bounds__(tuning::kSplitThreads) attention_weigh_kernel(AttentionMatrixTask m) {
  wait_for_earlier_kernels();
  const std::int32_t most = m.queries.most * kTileQueries;
  const std::int64_t all = std::int64_t{m.of.e.count} * most, step = std::int64_t{gridDim.x} * tuning::kSplitThreads;
  for (std::int64_t work = std::int64_t{blockIdx.x} * tuning::kSplitThreads + threadIdx.x; work < all; work += step) {
    const std::int64_t r = work / most;
    const auto n = static_cast<std::int32_t>(work - r * most);
    if (!m.of.e.due(r)) continue;
    const AttentionPlan& plan = m.queries.plans[r];
    if (n < plan.total)
      m.queries.of<kSpans>()[r * m.queries.most + n / kTileQueries].lines[n % kTileQueries].shift +=
          log2f(weight_of(m.of, plan, n));
  }
}

}  // namespace kvkeep::cuda::attention
