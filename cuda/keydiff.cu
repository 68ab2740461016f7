// SPDX-License-Identifier: Apache-2.0
#include "keydiff.h"

#include "key_lanes.cuh"
#include "kvkeep/score/keydiff.h"
#include "launch.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

struct KeyDiffTask {
  EvidenceArguments e;
  float* scores;
  double* partial;  ///< [count, chunks, D] sums of directions
  float* anchors;   ///< [count, D + 1] the mean direction and its norm
  std::int32_t chunks;
};

/// Norms, and the sum of the directions of a chunk.
template <class T>
__global__ void __launch_bounds__(tuning::kKeyThreads) keydiff_direction_kernel(KeyDiffTask task) {
  wait_for_earlier_kernels();
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.e.dim;
  each_chunk(task.e, task.chunks, tuning::kKeyChunk, [&](const Chunk& chunk) {
    const Row& row = task.e.rows[chunk.row];
    const double sum = weighted_sum<T>(row, chunk.begin, chunk.end, dim, task.e.keys, [&](std::int32_t t, float norm) {
      task.scores[row.first + t] = norm;
      return KeyDiff::direction_weight(norm);
    });
    if (thread < dim) task.partial[(chunk.row * task.chunks + chunk.begin / tuning::kKeyChunk) * dim + thread] = sum;
  });
}

/// The mean direction of a row.
__global__ void __launch_bounds__(tuning::kKeyThreads) keydiff_anchor_kernel(KeyDiffTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(float, anchor, 256);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.e.dim;
  for (std::int64_t r = blockIdx.x; r < task.e.count; r += gridDim.x) {
    const std::int32_t length = task.e.rows[r].length, chunks = (length + tuning::kKeyChunk - 1) / tuning::kKeyChunk;
    if (!task.e.due(r) || length == 0) continue;
    if (thread < dim) {
      double sum = 0;
      for (std::int32_t c = 0; c < chunks; ++c) sum += task.partial[(r * task.chunks + c) * dim + thread];
      anchor[thread] = static_cast<float>(sum / static_cast<double>(length));
      task.anchors[r * (dim + 1) + thread] = anchor[thread];
    }
    __syncthreads();
    if (thread == 0) {
      double square = 0;
      for (std::int32_t d = 0; d < dim; ++d) square += static_cast<double>(anchor[d]) * static_cast<double>(anchor[d]);
      task.anchors[r * (dim + 1) + dim] = KeyDiff::anchor_norm(square);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(tuning::kKeyThreads) keydiff_cosine_kernel(KeyDiffTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(float, anchor, 256 + 16);
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes;
  const std::int32_t dim = task.e.dim;
  each_chunk(task.e, task.chunks, tuning::kKeyChunk, [&](const Chunk& chunk) {
    const Row& row = task.e.rows[chunk.row];
    const bool aligned = is_aligned(row.keys);
    const float* of_row = task.anchors + chunk.row * (dim + 1);
    __syncthreads();
    for (std::int32_t d = thread; d < 256 + 16; d += tuning::kKeyThreads) anchor[d] = d < dim ? of_row[d] : 0.0F;
    __syncthreads();
    const float anchor_norm = of_row[dim];
    for (std::int32_t tile = chunk.begin; tile < chunk.end; tile += kKeysAtOnce) {
      const std::int32_t t = tile + own;
      float dot = 0;
      if (t < chunk.end) {
        const float scale = key_scale<T>(row, t);
        each_word<T>(row.keys, t, dim, aligned, task.e.keys, [&](std::int32_t d, const float* x) {
#pragma unroll
          for (int i = 0; i < kPerWord<T>; ++i) dot = fmaf(x[i] * scale, anchor[d + i], dot);
        });
      }
      dot = sum_of_lanes(dot);
      if (t < chunk.end && lane == 0) {
        float& g = task.scores[row.first + t];
        g = KeyDiff::score_of(dot, g, anchor_norm);
      }
    }
  });
}

}  // namespace

std::int64_t keydiff_workspace_bytes(const EvidenceArguments& e) {
  return std::int64_t{e.count} * key_chunks(e) * e.dim * static_cast<std::int64_t>(sizeof(double)) +
         std::int64_t{e.count} * (e.dim + 1) * static_cast<std::int64_t>(sizeof(float));
}

void launch_keydiff(const KeyDiffArguments& a, Stream stream) {
  require_aligned("keydiff", a.workspace);
  check_dim("keydiff", a.evidence.dim);
  KeyDiffTask task{a.evidence, a.scores, static_cast<double*>(a.workspace), nullptr, key_chunks(a.evidence)};
  task.anchors = reinterpret_cast<float*>(task.partial + std::int64_t{task.e.count} * task.chunks * task.e.dim);
  const dim3 blocks = blocks_for(std::int64_t{task.e.count} * task.chunks);
  with_element(task.e.keys, [&](auto type) {
    using T = decltype(type);
    launch("keydiff_direction", keydiff_direction_kernel<T>,
           {.blocks = blocks, .threads = tuning::kKeyThreads, .shared_bytes = weighted_sum_bytes(task.e.dim)}, stream,
           task);
    launch("keydiff_anchor", keydiff_anchor_kernel,
           {.blocks = blocks_for(task.e.count), .threads = tuning::kKeyThreads}, stream, task);
    launch("keydiff_cosine", keydiff_cosine_kernel<T>, {.blocks = blocks, .threads = tuning::kKeyThreads}, stream,
           task);
  });
}

}  // namespace kvkeep::cuda
