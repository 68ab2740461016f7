// SPDX-License-Identifier: Apache-2.0
#include "fold.h"

#include <algorithm>

#include "element.cuh"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kFoldThreads;

constexpr std::int32_t kSketchBlock = 16;     ///< of kvkeep::KeySketch
constexpr std::int64_t kNumbersTogether = 8;  ///< that begin at a multiple of 16 bytes in any dtype

KVKEEP_HD inline std::int64_t together(std::int64_t numbers) {
  return (numbers + kNumbersTogether - 1) / kNumbersTogether * kNumbersTogether;
}

KVKEEP_HD inline std::int64_t bytes_of(Element element) { return element == Element::f32 ? 4 : 2; }

/// Kept slots below `slot`.
__device__ std::int64_t kept_below(const std::int32_t* kept, std::int64_t count, std::int32_t slot) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (kept[middle] < slot)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/// A slot that is not kept has as many dropped ones before it as slots less kept ones.
__global__ void __launch_bounds__(kFoldThreads) fold_slots_kernel(FoldArguments a) {
  wait_for_earlier_kernels();
  for (std::int64_t f = blockIdx.x; f < a.count; f += gridDim.x) {
    const FoldingRow& own = a.folding[f];
    const std::int64_t begin = a.indptr[own.row], count = a.indptr[own.row + 1] - begin;
    const std::int32_t* kept = a.kept + begin;
    std::int32_t* to = a.slots + own.first_slot;
    const std::int32_t length = a.rows[own.row].length, step = static_cast<std::int32_t>(gridDim.y) * kFoldThreads;
    for (auto slot = static_cast<std::int32_t>(blockIdx.y * kFoldThreads + threadIdx.x); slot < length; slot += step) {
      const std::int64_t below = kept_below(kept, count, slot);
      if (below == count || kept[below] != slot) to[slot - below] = slot;
    }
  }
}

/// Weights of a span's slots, by one warp: their shares of its mass, or equal if there is none.
__device__ void weigh_span(const FoldArguments& a, const FoldCut& cut, const FoldingRow& own, const FoldingSpan& span) {
  const WarpTeam warp;
  const std::int64_t at = own.first_slot + span.begin;
  const float* mass = cut.mass + a.rows[own.row].first;
  const auto weight = [&](std::int32_t t) {
    const auto m = static_cast<double>(mass[a.slots[at + t]]);
    return m > 0 ? m : 0.0;
  };
  double mine = 0;
  for (std::int32_t t = warp.thread(); t < span.length; t += 32) mine += weight(t);
  const double sum = sum_of_warp(mine);
  for (std::int32_t t = warp.thread(); t < span.length; t += 32)
    cut.weights[at + t] = static_cast<float>(sum > 0 ? weight(t) / sum : span.weight);
}

/// One block cuts one row: the first warp, then all of them weigh.
__global__ void __launch_bounds__(kFoldThreads) fold_cut_kernel(FoldArguments a, FoldCut cut) {
  wait_for_earlier_kernels();
  const auto f = static_cast<std::int32_t>(blockIdx.x);
  const FoldingRow& own = a.folding[f];
  FoldingSpan* pieces = cut.pieces + own.first_span;
  if (threadIdx.x < 32) {
    const WarpTeam warp;
    const std::int64_t begin = a.indptr[own.row], count = a.indptr[own.row + 1] - begin;
    const std::int32_t* kept = a.kept + begin;
    const std::int32_t length = a.rows[own.row].length;
    std::int32_t spans = 0;
    const auto put = [&](std::int64_t from, std::int64_t to) {
      const std::int64_t parts = piece_count(to - from, cut.max_span);
      for (std::int64_t i = warp.thread(); i < parts; i += 32) {
        const std::int64_t first = piece_begin(to - from, i, parts), last = piece_begin(to - from, i + 1, parts);
        pieces[spans + i] =
            FoldingSpan(f, static_cast<std::int32_t>(from + first), static_cast<std::int32_t>(last - first));
      }
      spans += static_cast<std::int32_t>(parts);
    };
    SpanJoiner joiner(cut.min_span);
    for (std::int64_t first = 0; first < cut.most; first += 32) {
      const std::int64_t s = first + warp.thread();
      const std::int32_t end = s < cut.most ? cut.ends[own.row * cut.most + s] : length;
      const std::int64_t dropped = end - kept_below(kept, count, end);
      for (int lane = 0; lane < 32; ++lane) joiner.end_at(__shfl_sync(kWholeWarp, dropped, lane), put);
    }
    joiner.finish(length - count, put);
    for (std::int32_t i = spans + warp.thread(); i < own.spans; i += 32) pieces[i] = FoldingSpan(f, 0, 0);
  }
  if (cut.mass == nullptr) return;
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x / 32); i < own.spans; i += kFoldThreads / 32)
    weigh_span(a, cut, own, pieces[i]);
}

__global__ void __launch_bounds__(kFoldThreads) fold_matrices_kernel(FoldArguments a) {
  wait_for_earlier_kernels();
  const std::int64_t step = std::int64_t{gridDim.x} * kFoldThreads;
  for (std::int64_t s = std::int64_t{blockIdx.x} * kFoldThreads + threadIdx.x; s < a.spans; s += step) {
    const FoldingSpan& span = a.pieces[a.first + s];
    const FoldingRow& own = a.folding[span.row];
    const Row& row = a.rows[own.row];
    for (std::int32_t side = 0; side < 2; ++side) {
      const std::int64_t n = side * std::int64_t{a.spans} + s;
      RowMatrix& matrix = a.matrices[n];
      matrix.rows = side == 0 ? row.keys : row.values;
      matrix.slots = a.slots + own.first_slot + span.begin;
      matrix.length = span.length;
      matrix.weights = a.weights == nullptr ? nullptr : a.weights + own.first_slot + span.begin;
      matrix.offset = n * a.numbers;
    }
  }
}

/// Copies `count` numbers of `width` bytes; both addresses are multiples of 16.
__device__ void copy_numbers(const std::byte* from, std::byte* to, std::int64_t count, std::int64_t width) {
  const std::int64_t words = count * width / 16;
  for (std::int64_t i = threadIdx.x; i < words; i += kFoldThreads)
    reinterpret_cast<Word16*>(to)[i] = reinterpret_cast<const Word16*>(from)[i];
  const std::int64_t halves = count * width / 2;
  for (std::int64_t i = words * 8 + threadIdx.x; i < halves; i += kFoldThreads)
    reinterpret_cast<std::uint16_t*>(to)[i] = reinterpret_cast<const std::uint16_t*>(from)[i];
}

/// The signs and sizes of a span's keys, one warp per key; `token`: of the row, the first; `weight`: of a key in their
/// mean, if all are equal. mean: f64 [D] of shared memory.
template <class T>
__device__ void draw_sketch(const RowMatrix& keys, double weight, std::int32_t dim, std::int64_t token,
                            const FoldingRow& row, double* mean) {
  const auto number = [&](std::int32_t t, std::int32_t d) {
    return static_cast<double>(to_float(reinterpret_cast<const T*>(keys.rows.at(keys.slots[t]))[d]));
  };
  for (auto d = static_cast<std::int32_t>(threadIdx.x); d < dim; d += kFoldThreads) {
    double sum = 0;
    for (std::int32_t t = 0; t < keys.length; ++t)  // as the CPU adds up
      sum = fma(keys.weights == nullptr ? weight : static_cast<double>(keys.weights[t]), number(t, d), sum);
    mean[d] = sum;
  }
  __syncthreads();
  const WarpTeam warp;
  const std::int32_t words = (dim + 31) / 32;
  for (auto t = static_cast<std::int32_t>(threadIdx.x / 32); t < keys.length; t += kFoldThreads / 32) {
    double squares = 0, sum = 0;
    const std::int64_t own = token + t;
    for (std::int32_t w = 0; w < words; ++w) {
      const std::int32_t d = w * 32 + warp.thread();
      const double x = d < dim ? number(t, d) - mean[d] : -1;
      const unsigned bits = __ballot_sync(kWholeWarp, x >= 0 ? 1 : 0);
      if (d < dim) squares += x * x, sum += fabs(x);
      if (warp.thread() == 0) row.signs[(own / kSketchBlock * words + w) * kSketchBlock + own % kSketchBlock] = bits;
    }
    squares = sum_of_warp(squares);
    sum = sum_of_warp(sum);
    if (warp.thread() == 0)
      from_float(sum > 0 ? __fdividef(static_cast<float>(squares), static_cast<float>(sum)) : 0.0F,
                 reinterpret_cast<__nv_bfloat16*>(row.sizes)[own]);
  }
}

/// One block stores one span.
template <class T>
__global__ void __launch_bounds__(kFoldThreads, 3) fold_spans_kernel(FoldArguments a) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(double, mean, kMostDim);
  const auto s = static_cast<std::int32_t>(blockIdx.x);
  const FoldingSpan& piece = a.pieces[a.first + s];
  const FoldingRow& row = a.folding[piece.row];
  const std::int32_t span = a.first + s - row.first_span, length = piece.length;
  const std::int64_t width = bytes_of(a.store), token = row.first_token + piece.begin;
  std::byte* const blob = row.blobs + span * row.blob_bytes;
  MemorySpan& to = row.table[span];
  if (length == 0) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < a.dim * width / 2; i += kFoldThreads)
      for (std::byte* side : {row.coarse_keys, row.coarse_values})
        reinterpret_cast<std::uint16_t*>(side + std::int64_t{span} * a.dim * width)[i] = 0;
    if (threadIdx.x == 0) {
      to = {.length = 0, .first_token = token};
      row.far[span] = nullptr;
      row.log_length[span] = piece.log_length;
    }
    return;
  }
  std::int64_t all = 0;
  for (std::int32_t side = 0; side < 2; ++side) {
    const std::int64_t n = side * std::int64_t{a.spans} + s;
    const FactorsFound& found = a.found[n];
    const SpanFactors factors{found.rank, found.raw, found.centred, together(all)};
    const std::int64_t numbers = factors.numbers(length, a.dim);
    all = factors.offset + numbers;
    copy_numbers(a.factors + n * a.numbers * width, blob + factors.offset * width, numbers, width);
    const auto* mean_of_side = reinterpret_cast<const std::uint16_t*>(a.coarse + n * a.dim * width);
    auto* coarse = reinterpret_cast<std::uint16_t*>((side == 0 ? row.coarse_keys : row.coarse_values) +
                                                    std::int64_t{span} * a.dim * width);
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < a.dim * width / 2; i += kFoldThreads)
      coarse[i] = mean_of_side[i];
    if (threadIdx.x == 0) to.factors[side] = factors;
  }
  if (threadIdx.x == 0) {
    to.length = length;
    to.first_token = token;
    to.bytes = all * width;
    row.far[span] = blob;
    row.log_length[span] = piece.log_length;
  }
  if (row.signs != nullptr) draw_sketch<T>(a.matrices[s], piece.weight, a.dim, token, row, mean);
}

void check(const FoldArguments& a) {
  check_dim("fold", a.dim);
  KVKEEP_REQUIRE(a.count >= 0 && a.longest >= 0 && a.first >= 0 && a.spans >= 0 && a.numbers >= 0, "fold: ", a.count,
                 " rows of ", a.longest, " slots, ", a.spans, " spans from ", a.first, " on with ", a.numbers,
                 " numbers; allowed 0 or more");
  check_wide("fold", "keys", a.keys);
  check_wide("fold", "factors", a.store);
}

}  // namespace

std::int64_t folded_blob_bytes(std::int64_t length, std::int64_t dim, const FactorOptions& options, Element store) {
  return 2 * together(factor_numbers(length, dim, options)) * bytes_of(store);
}

void launch_fold_slots(const FoldArguments& a, Stream stream) {
  check(a);
  constexpr std::int32_t kMostSlices = 64;
  const std::int32_t slices = std::clamp((a.longest + kFoldThreads - 1) / kFoldThreads, 1, kMostSlices);
  launch("fold_slots", fold_slots_kernel,
         {.blocks = blocks_for(a.count, static_cast<unsigned>(slices)), .threads = kFoldThreads}, stream, a);
}

void launch_fold_cut(const FoldArguments& a, const FoldCut& cut, Stream stream) {
  check(a);
  KVKEEP_REQUIRE(cut.min_span >= 1 && cut.max_span >= 1 && cut.most >= 0, "fold: spans of ", cut.min_span, " to ",
                 cut.max_span, " slots, ", cut.most, " segments; allowed 1 or more, and 0 or more");
  launch("fold_cut", fold_cut_kernel, {.blocks = blocks_for(a.count), .threads = kFoldThreads}, stream, a, cut);
}

void launch_fold_matrices(const FoldArguments& a, Stream stream) {
  check(a);
  launch("fold_matrices", fold_matrices_kernel,
         {.blocks = blocks_of_threads(a.spans, kFoldThreads), .threads = kFoldThreads}, stream, a);
}

void launch_fold_spans(const FoldArguments& a, Stream stream) {
  check(a);
  with_wide_element(a.keys, [&](auto element) {
    launch("fold_spans", fold_spans_kernel<decltype(element)>, {.blocks = blocks_for(a.spans), .threads = kFoldThreads},
           stream, a);
  });
}

}  // namespace kvkeep::cuda
