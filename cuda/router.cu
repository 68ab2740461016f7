// SPDX-License-Identifier: Apache-2.0
#include "router.h"

#include <algorithm>

#include "element.cuh"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kRouterThreads;
using tuning::kRouterTokens;

constexpr double kLeastNorm = 1e-8;  ///< of a projected key, as on the CPU

/// One warp multiplies a row of `dim` numbers with a vector; the same in every lane.
__device__ float product_of_warp(const float* row, const float* vector, std::int32_t dim) {
  float sum = 0;
  for (std::int32_t d = WarpTeam{}.thread(); d < dim; d += 32) sum = fmaf(row[d], vector[d], sum);
  return sum_of_warp(sum);
}

/// One block per span.
template <class T>
__global__ void __launch_bounds__(kRouterThreads)
    router_norms_kernel(FoldArguments a, RouterWeights router, std::int32_t group) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(float, key, kMostDim);
  KVKEEP_SHARED(double, scratch, kRouterThreads / 32);
  const std::int32_t s = a.first + static_cast<std::int32_t>(blockIdx.x);
  const FoldingRow& own = a.folding[a.pieces[s].row];
  const Row& row = a.rows[own.row];
  const std::int32_t span = s - own.first_span;
  const auto* coarse = reinterpret_cast<const T*>(own.coarse_keys) + std::int64_t{span} * a.dim;
  for (auto d = static_cast<std::int32_t>(threadIdx.x); d < a.dim; d += kRouterThreads) key[d] = to_float(coarse[d]);
  __syncthreads();
  for (std::int32_t h = 0; h < group; ++h) {
    const float* projection = router.projection(row.layer, row.head * group + h, a.dim);
    double squares = 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x / 32); i < router.inner; i += kRouterThreads / 32) {
      const auto x = static_cast<double>(product_of_warp(projection + std::int64_t{i} * a.dim, key, a.dim));
      if (threadIdx.x % 32 == 0) squares += x * x;
    }
    const double length = sqrt(sum_of_block<kRouterThreads>(squares, scratch));
    if (threadIdx.x == 0)
      own.norms[std::int64_t{span} * group + h] = static_cast<float>(1 / (length > kLeastNorm ? length : kLeastNorm));
  }
}

struct RouterShared {
  KVKEEP_HD RouterShared(std::int32_t inner, std::int32_t dim) {
    queries = parts.take(sizeof(float) * static_cast<std::size_t>(kRouterTokens * dim));
    projected = parts.take(sizeof(float) * static_cast<std::size_t>(kRouterTokens * inner));
  }
  Parts parts;
  std::size_t queries, projected;
};

/// One block has one query head and some tokens.
__global__ void __launch_bounds__(kRouterThreads)
    router_queries_kernel(MemoryAttentionArguments a, RouterWeights router, std::int32_t layer, float* to) {
  wait_for_earlier_kernels();
  const RouterShared at(router.inner, a.dim);
  auto* queries = reinterpret_cast<float*>(dynamic_shared() + at.queries);      // [tokens][D]
  auto* projected = reinterpret_cast<float*>(dynamic_shared() + at.projected);  // [tokens][d']
  const auto heads = static_cast<unsigned>(a.query_heads());
  const auto head = static_cast<std::int32_t>(blockIdx.x % heads),
             first = static_cast<std::int32_t>(blockIdx.x / heads) * kRouterTokens,
             tokens = a.tokens - first < kRouterTokens ? a.tokens - first : kRouterTokens;
  const float* weights = router.projection(layer, head, a.dim);
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tokens * a.dim; i += kRouterThreads) {
    const std::int32_t t = i / a.dim;
    const std::byte* query = a.queries + (first + t) * a.token_stride + head * a.head_stride;
    with_wide_element(a.query, [&](auto type) {
      queries[i] = to_float(reinterpret_cast<const decltype(type)*>(query)[i - t * a.dim]);
    });
  }
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x / 32); i < router.inner; i += kRouterThreads / 32)
    for (std::int32_t t = 0; t < tokens; ++t) {
      const float x = product_of_warp(weights + std::int64_t{i} * a.dim, queries + t * a.dim, a.dim);
      if (threadIdx.x % 32 == 0) projected[t * router.inner + i] = x;
    }
  __syncthreads();
  for (auto d = static_cast<std::int32_t>(threadIdx.x); d < a.dim; d += kRouterThreads) {
    float sums[kRouterTokens] = {};
    for (std::int32_t i = 0; i < router.inner; ++i) {
      const float w = weights[std::int64_t{i} * a.dim + d];
#pragma unroll
      for (int t = 0; t < kRouterTokens; ++t)
        if (t < tokens) sums[t] = fmaf(w, projected[t * router.inner + i], sums[t]);
    }
#pragma unroll
    for (int t = 0; t < kRouterTokens; ++t)
      if (t < tokens) to[(std::int64_t{first + t} * a.query_heads() + head) * a.dim + d] = sums[t];
  }
}

void check(const RouterWeights& router, std::int32_t dim) {
  check_dim("router", dim);
  KVKEEP_REQUIRE(router.inner >= 1 && router.query_heads >= 1, "router: ", router.query_heads, " query heads of ",
                 router.inner, " numbers; allowed 1 or more");
}

}  // namespace

std::size_t router_shared_bytes(std::int32_t inner, std::int32_t dim) { return RouterShared(inner, dim).parts.bytes; }

void launch_router_norms(const FoldArguments& fold, const RouterWeights& router, std::int32_t group, Stream stream) {
  check(router, fold.dim);
  check_wide("router", "coarse keys", fold.store);
  KVKEEP_REQUIRE(fold.spans >= 0 && fold.first >= 0 && group >= 1, "router: ", fold.spans, " spans from ", fold.first,
                 " on, for ", group, " query heads; allowed 0 or more, and a head");
  with_wide_element(fold.store, [&](auto element) {
    launch("router_norms", router_norms_kernel<decltype(element)>,
           {.blocks = blocks_for(fold.spans), .threads = kRouterThreads}, stream, fold, router, group);
  });
}

void launch_router_queries(const MemoryAttentionArguments& memory, const RouterWeights& router, std::int32_t layer,
                           float* to, Stream stream) {
  check(router, memory.dim);
  check_wide("router", "queries", memory.query);
  KVKEEP_REQUIRE(memory.tokens >= 0 && layer >= 0 && memory.query_heads() >= 1, "router: ", memory.tokens,
                 " tokens of layer ", layer, " with ", memory.query_heads(),
                 " query heads; allowed 0 or more, and a head");
  const std::int64_t blocks = std::int64_t{(memory.tokens + kRouterTokens - 1) / kRouterTokens} * memory.query_heads();
  launch("router_queries", router_queries_kernel,
         {.blocks = blocks_for(blocks),
          .threads = kRouterThreads,
          .shared_bytes = router_shared_bytes(router.inner, memory.dim)},
         stream, memory, router, layer, to);
}

}  // namespace kvkeep::cuda
