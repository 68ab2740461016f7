// SPDX-License-Identifier: Apache-2.0
#include "last_query.h"

#include "key_lanes.cuh"
#include "kvkeep/score/pool.h"
#include "launch.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kKeyChunk;
using tuning::kKeyThreads;

/// Calls body(group, rows, begin, end) for every chunk of a group's tokens that falls to this block.
template <class Body>
__device__ void each_chunk_of_tokens(const EvidenceArguments& e, std::int32_t chunks, const Body& body) {
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} / e.kv_heads * chunks; work += gridDim.x) {
    const std::int64_t group = work / chunks;
    const Row* rows = e.rows + group * e.kv_heads;
    const std::int32_t begin = static_cast<std::int32_t>(work - group * chunks) * kKeyChunk, length = rows[0].length;
    if (begin < length) body(group, rows, begin, length - begin < kKeyChunk ? length : begin + kKeyChunk);
  }
}

/// Products of one chunk of tokens, summed over the KV heads in ascending order.
template <class T>
__global__ void __launch_bounds__(kKeyThreads) last_query_product_kernel(LastQueryArguments a, std::int32_t chunks) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(float, query, kMostDim);
  KVKEEP_SHARED(float, sums, kKeyChunk);
  const EvidenceArguments& e = a.evidence;
  auto* products = static_cast<float*>(a.workspace);
  const auto own = static_cast<std::int32_t>(threadIdx.x / kLanes),
             lane = static_cast<std::int32_t>(threadIdx.x % kLanes);
  each_chunk_of_tokens(e, chunks, [&](std::int64_t group, const Row* rows, std::int32_t begin, std::int32_t end) {
    for (std::int32_t h = 0; h < e.kv_heads; ++h) {
      const Row& row = rows[h];
      const bool aligned = is_aligned(row.keys);
      __syncthreads();
      for (auto d = static_cast<std::int32_t>(threadIdx.x); d < kMostDim; d += kKeyThreads) {
        const float* q = a.queries + ((group * e.kv_heads + h) * e.group) * e.dim + d;
        float sum = 0;
        for (std::int32_t i = 0; i < e.group && d < e.dim; ++i) sum += q[std::int64_t{i} * e.dim];
        query[d] = sum;  // 0 past the end, as a key's last word is
      }
      __syncthreads();
      for (std::int32_t tile = begin; tile < end; tile += kKeysAtOnce) {
        const std::int32_t t = tile + own;
        float product = 0;
        if (t < end)
          each_word<T>(row.keys, t, e.dim, aligned, e.keys, [&](std::int32_t d, const float* x) {
#pragma unroll
            for (int i = 0; i < kPerWord<T>; ++i) product = fmaf(x[i], query[d + i], product);
          });
        product = sum_of_lanes(product);
        if (t >= end || lane != 0) continue;
        product *= key_scale<T>(row, t);
        sums[t - begin] = h == 0 ? product : sums[t - begin] + product;
      }
    }
    __syncthreads();
    float* out = products + rows[0].first / e.kv_heads + begin;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < end - begin; i += kKeyThreads) out[i] = sums[i];
  });
}

__global__ void __launch_bounds__(kKeyThreads) last_query_average_kernel(LastQueryArguments a, std::int32_t chunks) {
  wait_for_earlier_kernels();
  const auto* products = static_cast<const float*>(a.workspace);
  each_chunk_of_tokens(a.evidence, chunks, [&](std::int64_t, const Row* rows, std::int32_t begin, std::int32_t end) {
    const std::int64_t first = rows[0].first / a.evidence.kv_heads;
    for (std::int32_t t = begin + static_cast<std::int32_t>(threadIdx.x); t < end; t += kKeyThreads)
      a.scores[first + t] = pooled_average(products + first, rows[0].length, a.pool, t);
  });
}

}  // namespace

std::int64_t last_query_workspace_bytes(const LastQueryArguments& arguments) {
  return arguments.slots / arguments.evidence.kv_heads * static_cast<std::int64_t>(sizeof(float));
}

void launch_last_query(const LastQueryArguments& a, Stream stream) {
  require_aligned("last query", a.workspace);
  const EvidenceArguments& e = a.evidence;
  check_dim("last query", e.dim);
  check_pool("last query", a.pool);
  KVKEEP_REQUIRE(e.kv_heads >= 1 && e.count % e.kv_heads == 0, "last query: rows; given ", e.count,
                 "; allowed whole groups of ", e.kv_heads, ", one row a KV head");
  const std::int32_t chunks = key_chunks(e);
  const dim3 blocks = blocks_for(std::int64_t{e.count} / e.kv_heads * chunks);
  with_element(e.keys, [&](auto type) {
    launch("last_query_product", last_query_product_kernel<decltype(type)>, {.blocks = blocks, .threads = kKeyThreads},
           stream, a, chunks);
  });
  launch("last_query_average", last_query_average_kernel, {.blocks = blocks, .threads = kKeyThreads}, stream, a,
         chunks);
}

}  // namespace kvkeep::cuda
