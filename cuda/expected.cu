// SPDX-License-Identifier: Apache-2.0
#include "expected.h"

#include <limits>

#include "element.cuh"
#include "expected_task.cuh"
#include "key_lanes.cuh"
#include "launch.cuh"
#include "panel.cuh"
#include "softmax.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using namespace expected;
using tuning::kExpectedChunk;
using tuning::kExpectedThreads;
using tuning::kGramItems;
using tuning::kGramTokens;
using tuning::kKeyThreads;

constexpr float kMost = std::numeric_limits<float>::max() / 2, kLeast = -std::numeric_limits<float>::infinity();

/// x of a slot from the two products of its key, both clamped to f32. If only `square` is NaN, it has left f32.
__device__ inline float logit_of(float square, float line) {
  square = square > kMost ? kMost : square;
  square = square < 0 ? 0.0F : square;
  square = square == square ? square : line == line ? kMost : line;
  line = line > kMost ? kMost : line;
  line = line < -kMost ? -kMost : line;
  return square + line;
}

/// Calls body(row of the table, its number, first slot, end) for every chunk of a due row that has slots to score and
/// queries to score them by.
template <class Body>
__device__ void each_expected_chunk(const ExpectedTask& task, Body&& body) {
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const Row& row = e.rows[r];
    const std::int32_t begin = static_cast<std::int32_t>(work - r * task.chunks) * kExpectedChunk;
    if (begin >= row.length || !is_scored(task, r)) continue;
    body(row, r, begin, row.length - begin < kExpectedChunk ? row.length : begin + kExpectedChunk);
  }
}

/// Maximum and sum of exponentials of the chunk's logits, which this block wrote: one warp per head.
__device__ void summarise(const ExpectedTask& task, const Row& row, std::int64_t r, std::int32_t begin,
                          std::int32_t end) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32), lane = static_cast<std::int32_t>(threadIdx.x % 32);
  __syncthreads();
  for (std::int32_t h = warp; h < task.a.evidence.group; h += static_cast<std::int32_t>(blockDim.x / 32)) {
    const float* x = task.logits_of(r) + std::int64_t{h} * row.length;
    Running seen;
    for (std::int32_t t = (begin < task.a.sink ? task.a.sink : begin) + lane; t < end; t += 32)
      if (x[t] == x[t]) seen.add(x[t]);
    seen = over_lanes<32>(seen);
    if (lane == 0)
      task.partial[(r * task.chunks + begin / kExpectedChunk) * task.a.evidence.group + h] = {seen.top, seen.sum};
  }
}

// In f32: see panel.cuh.

static_assert(kExpectedThreads == kPanelThreads && kExpectedChunk % kPanelSlots == 0);

struct ExpectedF32Shared {
  std::size_t keys, panel, lines, bytes;
  std::int32_t stride;  ///< of a key, in floats

  KVKEEP_HD explicit ExpectedF32Shared(std::int32_t padded) : stride(padded + 4) {
    Parts parts;
    keys = parts.take(sizeof(float) * kPanelSlots * static_cast<std::size_t>(stride));
    panel = parts.take(sizeof(float) * kPanelRows * kPanelStride);
    lines = parts.take(sizeof(float) * kPanelSlots * (kPanelRows + 1));
    bytes = parts.bytes;
  }
};

template <class T>
__global__ void __launch_bounds__(kExpectedThreads, 4) expected_f32_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  const ExpectedF32Shared parts(task.padded);
  auto* keys = reinterpret_cast<float*>(dynamic_shared() + parts.keys);
  auto* panel = reinterpret_cast<float*>(dynamic_shared() + parts.panel);
  auto* lines = reinterpret_cast<float*>(dynamic_shared() + parts.lines);
  const EvidenceArguments& e = task.a.evidence;
  const PanelPlace place;

  each_expected_chunk(task, [&](const Row& row, std::int64_t r, std::int32_t begin, std::int32_t end) {
    const bool aligned = is_aligned(row.keys);
    for (std::int32_t tile = begin; tile < end; tile += kPanelSlots) {
      __syncthreads();
      stage_as<T, float>(row.keys, aligned, tile, end, kPanelSlots, e.dim, task.padded, e.keys, keys, parts.stride,
                         [&](std::int32_t t) { return key_scale<T>(row, t); });
      for (std::int32_t h0 = 0; h0 < e.group; h0 += kPanelRows) {
        const std::int32_t heads = e.group - h0 < kPanelRows ? e.group - h0 : kPanelRows;
        float products[16];
        const auto multiply = [&](const float* from, std::int32_t rows, std::int32_t d0) {
          const auto load = [&](std::int32_t n, std::int32_t d) {
            return n < rows ? *reinterpret_cast<const float4*>(from + std::int64_t{n} * task.padded + d)
                            : float4{0, 0, 0, 0};
          };
          multiply_panel(load, d0, task.padded, keys, parts.stride, place, panel, products);
        };
        multiply(reinterpret_cast<const float*>(task.means + r * task.mean_bytes()) + std::int64_t{h0} * task.padded,
                 heads, 0);
#pragma unroll
        for (int k = 0; k < 16; ++k)
          lines[(place.slot0 + k / 4 * 4) * (kPanelRows + 1) + place.row0 + k % 4 * 8] = products[k];
        for (std::int32_t h = h0; h < h0 + heads; ++h) {
          const HeadFactor head = task.heads[r * e.group + h];
          const auto* factor = reinterpret_cast<const float*>(task.factors + (r * e.group + h) * task.factor_bytes());
          float sums[4] = {};
          for (std::int32_t from = 0; from < head.rows; from += kPanelRows) {
            multiply(factor + std::int64_t{from} * task.padded, kPanelRows,
                     head.triangular ? from / kPanelSlice * kPanelSlice : 0);
#pragma unroll
            for (int k = 0; k < 16; ++k) {
              const float y = products[k] * head.factor;
              sums[k / 4] = fmaf(y, y, sums[k / 4]);
            }
          }
          __syncthreads();  // the lines are written
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float square = sum_of_rows(sums[i]);
            const std::int32_t s = place.slot0 + 4 * i, t = tile + s;
            if (place.row0 == 0 && t < end)
              task.logits_of(r)[std::int64_t{h} * row.length + t] =
                  logit_of(square, lines[s * (kPanelRows + 1) + h - h0]);
          }
        }
        __syncthreads();
      }
    }
    summarise(task, row, r, begin, end);
  });
}

// On matrix units: a warp has 32 slots, and multiplies them with 32 rows of the factor, in two parts, at a time. The
// block brings 64 components of these rows to shared memory for all of its warps.

constexpr std::int32_t kUnitSlots = kExpectedThreads, kScratchStride = 20;
constexpr std::int32_t kUnitSlice = 64, kUnitStride = 2 * kUnitSlice + 8;  ///< of a row: high parts, then low ones

template <class S>
struct ExpectedMatrixShared {
  std::size_t keys, panel, lines, scratch, scales, bytes;
  std::int32_t stride;  ///< of a key, in elements

  KVKEEP_HD explicit ExpectedMatrixShared(std::int32_t padded) : stride(padded + 8) {
    Parts parts;
    keys = parts.take(sizeof(S) * kUnitSlots * static_cast<std::size_t>(stride));
    panel = parts.take(sizeof(S) * kPanelRows * kUnitStride);
    lines = parts.take(sizeof(float) * kUnitSlots * kScratchStride);
    scratch = parts.take(sizeof(float) * kExpectedThreads / 32 * 16 * kScratchStride);
    scales = parts.take(sizeof(float) * kUnitSlots);
    bytes = parts.bytes;
  }
};

/// Brings components [d0, d0 + n) of kPanelRows rows of a factor. n: a multiple of 16, up to kUnitSlice.
template <class S>
__device__ void stage_panel(const S* factor, std::int32_t padded, std::int32_t d0, std::int32_t n, S* panel) {
  constexpr std::int32_t kEach = 2 * kPanelRows * kUnitSlice / kPerWord<S> / kExpectedThreads;
  const std::int32_t words = n / kPerWord<S>, all = 2 * kPanelRows * words;
  Elements<S> held[kEach];
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const std::int32_t i = static_cast<std::int32_t>(threadIdx.x) + k * kExpectedThreads, side = i / words;
      if (i < all) body(k, side / 2, side % 2, (i - side * words) * kPerWord<S>);
    }
  };
  each([&](int k, std::int32_t row, std::int32_t part, std::int32_t d) {
    held[k] = *reinterpret_cast<const Elements<S>*>(factor + (2 * row + part) * padded + d0 + d);
  });
  each([&](int k, std::int32_t row, std::int32_t part, std::int32_t d) {
    *reinterpret_cast<Elements<S>*>(panel + row * kUnitStride + part * kUnitSlice + d) = held[k];
  });
}

template <class T>
__global__ void __launch_bounds__(kExpectedThreads, 3) expected_matrix_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  using S = MatrixElement<T>;
  using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, S, wmma::row_major>;
  using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, S, wmma::col_major>;
  using Product = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  const ExpectedMatrixShared<S> parts(task.padded);
  auto* keys = reinterpret_cast<S*>(dynamic_shared() + parts.keys);
  auto* panel = reinterpret_cast<S*>(dynamic_shared() + parts.panel);
  auto* scales = reinterpret_cast<float*>(dynamic_shared() + parts.scales);
  const EvidenceArguments& e = task.a.evidence;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t lane = thread % 32, first = thread / 32 * 32;  // first: of the warp's slots
  float* lines = reinterpret_cast<float*>(dynamic_shared() + parts.lines) + first * kScratchStride;
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + parts.scratch) + first / 2 * kScratchStride;

  each_expected_chunk(task, [&](const Row& row, std::int64_t r, std::int32_t begin, std::int32_t end) {
    const bool aligned = is_aligned(row.keys);
    for (std::int32_t tile = begin; tile < end; tile += kUnitSlots) {
      __syncthreads();
      stage_as<T, S>(row.keys, aligned, tile, end, kUnitSlots, e.dim, task.padded, e.keys, keys, parts.stride,
                     [](std::int32_t) { return 1.0F; });
      scales[thread] = tile + thread < end ? key_scale<T>(row, tile + thread) : 1.0F;
      __syncthreads();
      const bool live = tile + first < end;  // of a whole warp: the others bring rows for it
      const S* own = keys + first * parts.stride;
      const auto load_keys = [&](Left* left, std::int32_t d) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wmma::load_matrix_sync(left[i], own + i * 16 * parts.stride + d, static_cast<unsigned>(parts.stride));
      };
      for (std::int32_t h0 = 0; h0 < e.group; h0 += kMeanHeads) {
        if (live) {
          const S* means = reinterpret_cast<const S*>(task.means + r * task.mean_bytes()) +
                           std::int64_t{h0} * kMeanParts * task.padded;
          Product product[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) wmma::fill_fragment(product[i], 0.0F);
          for (std::int32_t d = 0; d < task.padded; d += 16) {
            Left left[2];
            load_keys(left, d);
#pragma unroll
            for (int part = 0; part < kMeanParts; ++part) {
              Right right;
              wmma::load_matrix_sync(right, means + part * task.padded + d,
                                     static_cast<unsigned>(kMeanParts * task.padded));
#pragma unroll
              for (int i = 0; i < 2; ++i) wmma::mma_sync(product[i], left[i], right, product[i]);
            }
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; ++i)
            wmma::store_matrix_sync(lines + i * 16 * kScratchStride, product[i], kScratchStride, wmma::mem_row_major);
          __syncwarp();
        }
        for (std::int32_t h = h0; h < e.group && h < h0 + kMeanHeads; ++h) {
          const HeadFactor head = task.heads[r * e.group + h];
          const S* factor = reinterpret_cast<const S*>(task.factors + (r * e.group + h) * task.factor_bytes());
          Product squares[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) wmma::fill_fragment(squares[i], 0.0F);
          for (std::int32_t from = 0; from < head.rows; from += kPanelRows) {
            Product product[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int j = 0; j < 2; ++j) wmma::fill_fragment(product[i][j], 0.0F);
            const std::int32_t d_first = head.triangular ? from : 0;
            for (std::int32_t d0 = d_first; d0 < task.padded; d0 += kUnitSlice) {
              const std::int32_t n = task.padded - d0 < kUnitSlice ? task.padded - d0 : kUnitSlice;
              __syncthreads();
              stage_panel(factor + std::int64_t{from} * 2 * task.padded, task.padded, d0, n, panel);
              __syncthreads();
              if (!live) continue;
              for (std::int32_t d = 0; d < n; d += 16) {
                Left left[2];
                load_keys(left, d0 + d);
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                  for (int part = 0; part < 2; ++part) {
                    Right right;
                    wmma::load_matrix_sync(right, panel + 16 * j * kUnitStride + part * kUnitSlice + d, kUnitStride);
#pragma unroll
                    for (int i = 0; i < 2; ++i) wmma::mma_sync(product[i][j], left[i], right, product[i][j]);
                  }
              }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int k = 0; k < Product::num_elements; ++k) {
                  const float y = product[i][j].x[k] * head.factor;
                  squares[i].x[k] = fmaf(y, y, squares[i].x[k]);
                }
          }
          if (!live) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {  // half a row per lane
            __syncwarp();
            wmma::store_matrix_sync(scratch, squares[i], kScratchStride, wmma::mem_row_major);
            __syncwarp();
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += scratch[lane / 2 * kScratchStride + lane % 2 * 8 + k];
            sum += __shfl_xor_sync(kWholeWarp, sum, 1);
            const std::int32_t s = i * 16 + lane / 2, t = tile + first + s;
            const float scale = scales[first + s], line = lines[s * kScratchStride + h - h0] * head.mean_factor;
            if (lane % 2 == 0 && t < end)
              task.logits_of(r)[std::int64_t{h} * row.length + t] = logit_of(sum * scale * scale, line * scale);
          }
        }
        __syncwarp();
      }
    }
    summarise(task, row, r, begin, end);
  });
}

/// Turns the heads' shares into scores, eight lanes per slot, and finds the largest score of the chunk.
template <class V>
__global__ void __launch_bounds__(kKeyThreads, 4) expected_scores_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  auto* standard = reinterpret_cast<float2*>(
      dynamic_shared());  // [G] what is subtracted from a logit, and the factor of its exponential
  const EvidenceArguments& e = task.a.evidence;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes;
  const auto epsilon = static_cast<float>(task.a.epsilon);
  each_chunk(e, task.chunks, kExpectedChunk, [&](const Chunk& chunk) {
    const std::int64_t r = chunk.row;
    const Row& row = e.rows[r];
    const std::int32_t begin = chunk.begin, end = chunk.end, length = row.length;
    float* g = task.a.scores + row.first;
    if (!is_scored(task, r)) {
      for (std::int32_t t = begin + thread; t < end; t += kKeyThreads) g[t] = static_cast<float>(t);
      return;
    }
    const std::int32_t chunks = (length + kExpectedChunk - 1) / kExpectedChunk;
    const float* const sinks = e.sinks_of(row);
    for (std::int32_t h = thread / 32; h < e.group; h += kKeyThreads / 32) {
      Running seen;
      for (std::int32_t c = thread % 32; c < chunks; c += 32) {
        const float2 part = task.partial[(r * task.chunks + c) * e.group + h];
        Running other;
        other.top = part.x;
        other.sum = part.y;
        seen.add(other);
      }
      seen = over_lanes<32>(seen);
      const float sum = seen.sum + (sinks == nullptr ? 0.0F : expf(sinks[h] - seen.top));
      if (thread % 32 == 0)
        standard[h] = seen.sum > 0 ? float2{seen.top, 1.0F / (sum * static_cast<float>(e.group))} : float2{0, 0};
    }
    __syncthreads();
    const float* logits = task.logits_of(r);
    const bool aligned = is_aligned(row.values);
    float top = kLeast;
    for (std::int32_t tile = begin; tile < end; tile += kKeysAtOnce) {
      const std::int32_t t = tile + own;
      const bool live = t >= task.a.sink && t < end;
      float share = 0, square = 0;
      if (live) {
        for (std::int32_t h = lane; h < e.group; h += kLanes)
          share += __expf(logits[std::int64_t{h} * length + t] - standard[h].x) * standard[h].y;
        if (task.a.value_norm)
          each_word<V>(row.values, t, task.a.value_dim, aligned, task.a.values, [&](std::int32_t, const float* x) {
#pragma unroll
            for (int i = 0; i < kPerWord<V>; ++i) square = fmaf(x[i], x[i], square);
          });
      }
      share = sum_of_lanes(share);
      square = sum_of_lanes(square);
      if (!live || lane != 0) continue;
      float score = share;
      if (task.a.value_norm) {
        float norm = sqrtf(square);
        if (!(square > 1e-30F && square < 1e38F)) {  // squares that leave f32
          double wide = 0;
          const V* value = reinterpret_cast<const V*>(row.values.at(t));
          for (std::int32_t d = 0; d < task.a.value_dim; ++d) {
            float x = 0;
            to_floats<1>(value + d, task.a.values, &x);
            wide += static_cast<double>(x) * static_cast<double>(x);
          }
          norm = static_cast<float>(sqrt(wide));
        }
        if constexpr (std::is_same_v<V, Bits8>) norm *= fabsf(*reinterpret_cast<const float*>(row.value_scales.at(t)));
        score = (share + epsilon) * norm;
      }
      g[t] = score;
      top = score > top ? score : top;
    }
    top = team.largest(top);
    if (thread == 0) task.tops[r * task.chunks + begin / kExpectedChunk] = top;
    __syncthreads();
  });
}

/// Gives the sinks the largest score of the others: one warp per row.
__global__ void __launch_bounds__(tuning::kTurnThreads) expected_sinks_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  constexpr std::int32_t kWarps = tuning::kTurnThreads / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  for (std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; r < e.count;
       r += std::int64_t{gridDim.x} * kWarps) {
    const Row& row = e.rows[r];
    if (!is_scored(task, r)) continue;
    const std::int32_t chunks = (row.length + kExpectedChunk - 1) / kExpectedChunk;
    float top = kLeast;
    for (std::int32_t c = lane; c < chunks; c += 32) {
      const float of_chunk = task.tops[r * task.chunks + c];
      top = of_chunk > top ? of_chunk : top;
    }
    top = WarpTeam{}.largest(top);
    for (std::int32_t t = lane; t < task.a.sink; t += 32) task.a.scores[row.first + t] = top;
  }
}

/// Assigns the parts of the workspace. Returns its size.
std::int64_t divide(const ExpectedArguments& a, ExpectedTask& task) {
  const EvidenceArguments& e = a.evidence;
  task.a = a;
  task.padded = round_up(e.dim, 16);
  task.unit = a.matrix_unit && e.keys != Element::f32;
  task.rows = round_up(a.queries > e.dim ? e.dim : a.queries, kPanelRows);
  task.chunks = (e.longest + kExpectedChunk - 1) / kExpectedChunk;
  task.gram = {};
  task.gram.pieces = (a.queries + kGramTokens - 1) / kGramTokens;
  if (a.blas != nullptr && expected_multiplies_many(a)) task.gram.at_once = kGramItems / task.gram.pieces;
  const std::int64_t groups = e.count / e.kv_heads, heads = std::int64_t{e.count} * e.group;
  WorkspaceParts parts(a.workspace);
  task.future = parts.take<double2>(task.turns() ? groups * task.most_pairs() : 0);
  task.back = parts.take<float2>(groups * task.backs() * task.most_pairs());
  task.heads = parts.take<HeadFactor>(heads);
  task.means = parts.take<std::byte>(e.count * task.mean_bytes());
  task.factors = parts.take<std::byte>(a.covariance ? heads * task.factor_bytes() : 0);
  if (task.gram.at_once > 0) {
    task.gram.rows = parts.take<__half>(std::int64_t{kGramItems} * kGramTokens * 2 * task.padded);
    task.gram.products = parts.take<float>(std::int64_t{kGramItems} * task.padded * 2 * task.padded);
  }
  task.partial = parts.take<float2>(heads * task.chunks);
  task.tops = parts.take<float>(std::int64_t{e.count} * task.chunks);
  task.logits = parts.take<float>(a.slots * e.group);
  return parts.bytes();
}

}  // namespace

bool expected_multiplies_many(const ExpectedArguments& a) {
  return a.covariance && a.matrix_unit && a.queries >= a.gram_queries && a.queries > a.evidence.dim &&
         a.queries <= kGramItems * kGramTokens;
}

std::int64_t expected_workspace_bytes(const ExpectedArguments& arguments) {
  ExpectedTask task{};
  return divide(arguments, task);
}

void launch_expected(const ExpectedArguments& a, Stream stream) {
  require_aligned("expected", a.workspace);
  const EvidenceArguments& e = a.evidence;
  check_dim("expected", e.dim);
  KVKEEP_REQUIRE(e.logit_cap == 0, "expected: logit_cap; given ", e.logit_cap, "; allowed 0");
  if (a.value_norm) check_dim("expected: values", a.value_dim);
  KVKEEP_REQUIRE(a.future >= 1 && a.sink >= 0 && a.queries >= 1 && a.gram_queries >= 1, "expected: future ", a.future,
                 ", sink ", a.sink, ", queries ", a.queries, ", gram_queries ", a.gram_queries,
                 "; allowed from 1, 0, 1 and 1 on");
  check_wide("expected", "queries", e.query);
  if (e.count == 0 || e.longest == 0) return;
  ExpectedTask task{};
  divide(a, task);
  const dim3 blocks = blocks_for(std::int64_t{e.count} * task.chunks);
  launch_moments(task, stream);
  with_element(e.keys, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>)
      if (task.unit) {
        launch("expected_matrix", expected_matrix_kernel<T>,
               {.blocks = blocks,
                .threads = kExpectedThreads,
                .shared_bytes = ExpectedMatrixShared<MatrixElement<T>>(task.padded).bytes},
               stream, task);
        return;
      }
    launch("expected_f32", expected_f32_kernel<T>,
           {.blocks = blocks, .threads = kExpectedThreads, .shared_bytes = ExpectedF32Shared(task.padded).bytes},
           stream, task);
  });
  with_element(a.value_norm ? a.values : Element::f32, [&](auto type) {
    launch(
        "expected_scores", expected_scores_kernel<decltype(type)>,
        {.blocks = blocks, .threads = kKeyThreads, .shared_bytes = sizeof(float2) * static_cast<std::size_t>(e.group)},
        stream, task);
  });
  if (a.sink > 0)
    launch("expected_sinks", expected_sinks_kernel,
           {.blocks = blocks_for((std::int64_t{e.count} + 3) / 4), .threads = tuning::kTurnThreads}, stream, task);
}

}  // namespace kvkeep::cuda
