// SPDX-License-Identifier: Apache-2.0
#include "rkv.h"

#include <limits>

#include "key_lanes.cuh"
#include "kvkeep/score/pool.h"
#include "launch.cuh"
#include "team.cuh"
#include "window_attention.h"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kSimilarColumns;
using tuning::kSimilarOwned;
using tuning::kSimilarRows;
using tuning::kSimilarThreads;
using tuning::kStandardThreads;

constexpr float kOne = 4294967296.0F;  ///< a cosine of 1 as an integer
constexpr float kLeast = -std::numeric_limits<float>::infinity();

struct RkvTask {
  EvidenceArguments e;
  const RowWindow* windows;
  float* attention;            ///< [slots]
  float* factors;              ///< [slots] a key's share in a cosine: 1 / (norm + floor), times its scale
  unsigned long long* spared;  ///< [slots] sum of the cosines with the keys whose partner this one is, in units of
                               ///< 2^-32, two's complement
  double* partial;             ///< [count, chunks, D] sums of unit keys
  void* rest;                  ///< window_attention_workspace_bytes()
  float* scores;
  float threshold, lambda;
  std::int32_t pool, chunks;
  bool history_alone, spares_first;

  /// Slots [0, n) whose redundancy is asked for.
  [[nodiscard]] __device__ std::int32_t domain(std::int64_t r) const {
    const RowWindow window = windows[r];
    if (window.queries == 0 || window.history == 0) return 0;
    return history_alone ? window.history : e.rows[r].length;
  }
};

/// Divides the workspace. Returns its size.
std::int64_t divide(const RkvArguments& a, RkvTask& task) {
  WorkspaceParts parts(a.workspace);
  task.chunks = key_chunks(a.evidence);
  task.attention = parts.take<float>(a.slots);
  task.factors = parts.take<float>(a.slots);
  task.spared = parts.take<unsigned long long>(a.slots);
  task.partial = parts.take<double>(std::int64_t{a.evidence.count} * task.chunks * a.evidence.dim);
  task.rest = parts.take<std::byte>(window_attention_workspace_bytes(a.evidence, a.options.window));
  return parts.bytes();
}

/// Factors, and the sum of the unit keys of a chunk. Leaves a key's product with itself in the scores.
template <class T>
__global__ void __launch_bounds__(tuning::kKeyThreads) rkv_unit_sums_kernel(RkvTask task) {
  wait_for_earlier_kernels();
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.e.dim;
  each_chunk(task.e, task.chunks, tuning::kKeyChunk, [&](const Chunk& chunk) {
    const std::int32_t n = task.domain(chunk.row), end = chunk.end < n ? chunk.end : n;
    if (chunk.begin >= end) return;
    const Row& row = task.e.rows[chunk.row];
    const double sum = weighted_sum<T>(row, chunk.begin, end, dim, task.e.keys, [&](std::int32_t t, float norm) {
      const float inverse = 1.0F / (norm + Rkv::kFloor), own = norm * inverse;
      task.factors[row.first + t] = inverse * key_scale<T>(row, t);
      task.spared[row.first + t] = 0;
      task.scores[row.first + t] = own * own;
      return inverse;
    });
    if (thread < dim) task.partial[(chunk.row * task.chunks + chunk.begin / tuning::kKeyChunk) * dim + thread] = sum;
  });
}

template <class T>
inline constexpr bool kOnMatrixUnits = !std::is_same_v<T, float>;

/// Components of a key in shared memory at a time, and the stride from key to key there, such that threads read rows
/// without conflicts.
template <class T>
inline constexpr std::int32_t kSlice = tuning::kSimilarSlice / static_cast<std::int32_t>(sizeof(MatrixElement<T>));
template <class T>
inline constexpr std::int32_t kStride = kSlice<T> + 16 / static_cast<std::int32_t>(sizeof(MatrixElement<T>));

/// Copies components [d0, d0 + n) of `count` keys, with zeros after them up to a multiple of 16. slot_of(i): the slot
/// of the i-th.
template <class T, class SlotOf>
__device__ inline void stage(const SlotAddress& keys, Element element, bool aligned, std::int32_t count,
                             std::int32_t d0, std::int32_t n, MatrixElement<T>* to, SlotOf&& slot_of) {
  using S = MatrixElement<T>;
  const std::int32_t words = (n + 15) / 16 * 16 / kPerWord<T>;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count * words; i += kSimilarThreads) {
    const std::int32_t which = i / words, d = (i - which * words) * kPerWord<T>;
    const T* key = reinterpret_cast<const T*>(keys.at(slot_of(which))) + d0;
    Elements<T> word;
    if (aligned && d + kPerWord<T> <= n) {
      word = *reinterpret_cast<const Elements<T>*>(key + d);
    } else {
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) word.x[k] = d + k < n ? key[d + k] : T{};
    }
    S x[kPerWord<T>];
    to_elements<kPerWord<T>>(word.x, element, x);
    Elements<S> words_of[sizeof x / 16];
    memcpy(static_cast<void*>(words_of), x, sizeof x);
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof x / 16); ++k)
      reinterpret_cast<Elements<S>*>(to + which * kStride<T> + d)[k] = words_of[k];
  }
}

/// What the cosine of key i with key j means for i: 0 if it takes no partner, else the partner and the cosine, such
/// that the newest partner is the largest number.
__device__ inline unsigned long long verdict(const RkvTask& task, std::int32_t i, std::int32_t j, float cosine) {
  const bool hit = cosine > task.threshold || (task.spares_first && j == 0);  // slot 0: if a key finds no other
  return hit && i != j ? static_cast<unsigned long long>(j + 1) << 32 | __float_as_uint(cosine) : 0;
}

/// The keys that a block searches for and that have no partner yet.
struct OpenKeys {
  std::int32_t slot[kSimilarOwned];
  float factor[kSimilarOwned];
  unsigned long long partner[kSimilarOwned];  ///< verdict
};

/// Adds `value` to spared[column], for each lane whose column is not negative. Lanes of one column add up first: most
/// keys often have the same partner.
__device__ inline void add_to_columns(unsigned long long* spared, std::int32_t column, std::int64_t value) {
  unsigned left = __ballot_sync(kWholeWarp, column >= 0);
  while (left != 0) {
    const std::int32_t one = __shfl_sync(kWholeWarp, column, __ffs(static_cast<int>(left)) - 1);
    const bool mine = column == one;
    const std::uint64_t sum = WarpTeam{}.sum(mine ? static_cast<std::uint64_t>(value) : 0);
    if (threadIdx.x % 32 == 0) atomicAdd(spared + one, static_cast<unsigned long long>(sum));
    left &= ~__ballot_sync(kWholeWarp, mine);
  }
}

/// Removes the keys that found a partner from the list, and adds what they spare to the partner's column. Returns how
/// many are left. Ends without a barrier: hold() begins with one.
__device__ inline std::int32_t settle(OpenKeys& open, std::int32_t count, unsigned long long* spared,
                                      const BlockTeam& team) {
  constexpr std::int32_t kEach = kSimilarOwned / kSimilarThreads;
  std::int32_t slot[kEach] = {}, left = 0;
  float factor[kEach] = {};
  bool stays[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int32_t at = team.thread() * kEach + k;
    const unsigned long long found = at < count ? open.partner[at] : 0;
    const float cosine = __uint_as_float(static_cast<unsigned>(found));
    add_to_columns(spared, static_cast<std::int32_t>(found >> 32) - 1,
                   is_number(cosine) ? static_cast<std::int64_t>(cosine * kOne) : 0);
    stays[k] = at < count && found == 0;
    if (!stays[k]) continue;
    slot[k] = open.slot[at];
    factor[k] = open.factor[at];
    ++left;
  }
  auto to = static_cast<std::int32_t>(team.sum_before(static_cast<std::uint64_t>(left)));
  const auto all = static_cast<std::int32_t>(team.sum(static_cast<std::uint64_t>(left)));
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (!stays[k]) continue;
    open.slot[to] = slot[k];
    open.factor[to] = factor[k];
    open.partner[to++] = 0;
  }
  return all;
}

/// Largest over a warp.
__device__ inline float largest_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}

/// The current step of the search: keys [first, first + rows) of the list against slots [low, low + columns).
struct SearchTile {
  std::int32_t first, rows, low, columns;
};

/// Compares the tile's keys with its slots. Column keys that fit whole in shared memory are staged with the first rows
/// and left there.
template <class T>
__device__ inline void hold(const RkvTask& task, const Row& row, bool aligned, const SearchTile& tile, OpenKeys& open,
                            const float* column_factors, MatrixElement<T>* row_keys, MatrixElement<T>* column_keys) {
  using S = MatrixElement<T>;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int32_t dim = task.e.dim;
  const auto each_slice = [&](auto&& multiply) {
    for (std::int32_t d0 = 0; d0 < dim; d0 += kSlice<T>) {
      const std::int32_t n = dim - d0 < kSlice<T> ? dim - d0 : kSlice<T>;
      __syncthreads();
      if (tile.first == 0 || dim > kSlice<T>)
        stage<T>(row.keys, task.e.keys, aligned, tile.columns, d0, n, column_keys,
                 [&](std::int32_t i) { return tile.low + i; });
      stage<T>(row.keys, task.e.keys, aligned, tile.rows, d0, n, row_keys,
               [&](std::int32_t i) { return open.slot[tile.first + i]; });
      __syncthreads();
      multiply(n);
    }
  };
  const auto judge = [&](std::int32_t r, std::int32_t c, float product) {
    return verdict(task, open.slot[tile.first + r], tile.low + c,
                   product * (open.factor[tile.first + r] * column_factors[c]));
  };

  if constexpr (kOnMatrixUnits<T>) {  // a warp has all rows and 16 columns: even with few rows, all have work
    constexpr int kBlocks = kSimilarRows / 16;
    constexpr std::int32_t kScratch = 20;
    static_assert(kSimilarThreads / 32 * 16 == kSimilarColumns);
    static_assert(sizeof(float) * kScratch * kSimilarColumns <= sizeof(S) * kStride<T> * kSimilarRows);
    const std::int32_t c0 = warp * 16;
    const auto wanted = [&](int b) { return c0 < tile.columns && b * 16 < tile.rows; };  // the same for a whole warp
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> product[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) wmma::fill_fragment(product[b], 0.0F);
    each_slice([&](std::int32_t n) {
      if (!wanted(0)) return;
      for (std::int32_t d = 0; d < n; d += 16) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, S, wmma::col_major> right;
        wmma::load_matrix_sync(right, column_keys + c0 * kStride<T> + d, static_cast<unsigned>(kStride<T>));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (!wanted(b)) continue;
          wmma::fragment<wmma::matrix_a, 16, 16, 16, S, wmma::row_major> left;
          wmma::load_matrix_sync(left, row_keys + b * 16 * kStride<T> + d, static_cast<unsigned>(kStride<T>));
          wmma::mma_sync(product[b], left, right, product[b]);
        }
      }
    });
    // The layout of a fragment is unknown, but no element is above the threshold unless the largest would be with the
    // largest factors: rounding keeps order.
    float of_rows = 0, of_columns = 0;
    for (std::int32_t r = lane; r < tile.rows; r += 32) of_rows = fmaxf(of_rows, fabsf(open.factor[tile.first + r]));
    if (c0 + lane % 16 < tile.columns) of_columns = fabsf(column_factors[c0 + lane % 16]);
    const float factor = largest_of_warp(of_rows) * largest_of_warp(of_columns);
    bool hopeful[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < product[b].num_elements; ++i) most = fmaxf(most, fabsf(product[b].x[i]));
      hopeful[b] =
          __any_sync(kWholeWarp, !(most * factor <= task.threshold) || (task.spares_first && tile.low == 0)) != 0;
    }
    __syncthreads();  // the products replace the rows' keys
    float* scratch = reinterpret_cast<float*>(row_keys) + warp * 16 * kScratch;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (!wanted(b) || !hopeful[b]) continue;
      __syncwarp();
      wmma::store_matrix_sync(scratch, product[b], kScratch, wmma::mem_row_major);
      __syncwarp();
      const std::int32_t r = b * 16 + lane / 2;
      unsigned long long best = 0;
      for (std::int32_t k = lane % 2 * 8; k < lane % 2 * 8 + 8; ++k) {
        if (r >= tile.rows || c0 + k >= tile.columns) break;
        const unsigned long long found = judge(r, c0 + k, scratch[lane / 2 * kScratch + k]);
        best = found > best ? found : best;
      }
      if (best != 0) atomicMax(&open.partner[tile.first + r], best);
    }
  } else {  // a thread has four rows next to each other and every 16th column
    constexpr int kDown = 4, kAcross = kSimilarColumns / 16;
    const std::int32_t r0 = thread / 16 * kDown, c0 = thread % 16;
    float sum[kDown][kAcross] = {};
    each_slice([&](std::int32_t n) {
      if (r0 >= tile.rows) return;
      for (std::int32_t d = 0; d < n; d += 4) {
        float4 b[kAcross];
#pragma unroll
        for (int c = 0; c < kAcross; ++c)
          b[c] = *reinterpret_cast<const float4*>(column_keys + (c0 + 16 * c) * kStride<T> + d);
#pragma unroll
        for (int r = 0; r < kDown; ++r) {
          const float4 a = *reinterpret_cast<const float4*>(row_keys + (r0 + r) * kStride<T> + d);
#pragma unroll
          for (int c = 0; c < kAcross; ++c)
            sum[r][c] = fmaf(a.w, b[c].w, fmaf(a.z, b[c].z, fmaf(a.y, b[c].y, fmaf(a.x, b[c].x, sum[r][c]))));
        }
      }
    });
#pragma unroll
    for (int r = 0; r < kDown; ++r) {
      unsigned long long best = 0;
#pragma unroll
      for (int c = 0; c < kAcross; ++c) {
        if (r0 + r >= tile.rows || c0 + 16 * c >= tile.columns) break;
        const unsigned long long found = judge(r0 + r, c0 + 16 * c, sum[r][c]);
        best = found > best ? found : best;
      }
      if (best != 0) atomicMax(&open.partner[tile.first + r0 + r], best);
    }
  }
}

/// Column sums without what is spared, and the search for what each key spares. A block owns kSimilarOwned keys of a
/// row.
template <class T>
__global__ void __launch_bounds__(kSimilarThreads, 2) rkv_search_kernel(RkvTask task, std::int32_t owners) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(OpenKeys, of_block, 1);
  OpenKeys& open = of_block[0];
  KVKEEP_SHARED(float, direction, 256 + 16);
  KVKEEP_SHARED(float, column_factors, kSimilarColumns);
  KVKEEP_SHARED(unsigned long long, words, kBlockScratch);
  auto* row_keys = reinterpret_cast<MatrixElement<T>*>(dynamic_shared());
  auto* column_keys = row_keys + kSimilarRows * kStride<T>;
  const BlockTeam team(words);
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes;
  const std::int32_t dim = task.e.dim;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * owners; work += gridDim.x) {
    const std::int64_t r = work / owners;
    const std::int32_t begin = static_cast<std::int32_t>(work - r * owners) * kSimilarOwned,
                       n = task.e.due(r) ? task.domain(r) : 0;
    if (begin >= n) continue;
    const Row& row = task.e.rows[r];
    const bool aligned = is_aligned(row.keys);
    const float* factors = task.factors + row.first;
    std::int32_t count = n - begin < kSimilarOwned ? n - begin : kSimilarOwned;

    __syncthreads();
    for (std::int32_t d = thread; d < 256 + 16; d += kSimilarThreads) {
      double sum = 0;
      for (std::int32_t c = 0; d < dim && c * tuning::kKeyChunk < n; ++c)
        sum += task.partial[(r * task.chunks + c) * dim + d];
      direction[d] = static_cast<float>(sum);
    }
    for (std::int32_t i = thread; i < count; i += kSimilarThreads) {
      open.slot[i] = begin + i;
      open.factor[i] = factors[begin + i];
      open.partner[i] = 0;
    }
    __syncthreads();
    for (std::int32_t i = own; i < (count + kKeysAtOnce - 1) / kKeysAtOnce * kKeysAtOnce; i += kKeysAtOnce) {
      float dot = 0;
      if (i < count)
        each_word<T>(row.keys, begin + i, dim, aligned, task.e.keys, [&](std::int32_t d, const float* x) {
#pragma unroll
          for (int k = 0; k < kPerWord<T>; ++k) dot = fmaf(x[k], direction[d + k], dot);
        });
      dot = sum_of_lanes(dot);
      if (i < count && lane == 0) {
        float& g = task.scores[row.first + begin + i];
        g = dot * open.factor[i] - g;
      }
    }

    for (std::int32_t high = n; high > 0 && count > 0;) {
      const std::int32_t low = high > kSimilarColumns ? high - kSimilarColumns : 0;
      if (thread < kSimilarColumns) column_factors[thread] = low + thread < high ? factors[low + thread] : 0.0F;
      for (std::int32_t first = 0; first < count; first += kSimilarRows)
        hold<T>(task, row, aligned,
                {first, count - first < kSimilarRows ? count - first : kSimilarRows, low, high - low}, open,
                column_factors, row_keys, column_keys);
      __syncthreads();
      count = settle(open, count, task.spared + row.first, team);
      high = low;
    }
  }
}

/// Softmax of the column means of a row, and the score. One block per row.
__global__ void __launch_bounds__(kStandardThreads) rkv_kernel(RkvTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(double, sums, kStandardThreads / 32);
  KVKEEP_SHARED(unsigned long long, words, kBlockScratch);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t r = blockIdx.x; r < task.e.count; r += gridDim.x) {
    const Row& row = task.e.rows[r];
    if (!task.e.due(r) || row.length == 0) continue;
    float* g = task.scores + row.first;
    const RowWindow window = task.windows[r];
    if (window.queries == 0) {  // no query was seen: the oldest leave first
      for (std::int32_t t = thread; t < row.length; t += kStandardThreads) g[t] = static_cast<float>(t);
      continue;
    }
    const std::int32_t n = task.domain(r);
    const auto* spared = reinterpret_cast<const long long*>(task.spared + row.first);
    float top = kLeast;
    for (std::int32_t t = thread; t < n; t += kStandardThreads) {
      g[t] =
          static_cast<float>((static_cast<double>(g[t]) - static_cast<double>(spared[t]) / static_cast<double>(kOne)) /
                             static_cast<double>(n));
      top = g[t] > top ? g[t] : top;
    }
    top = BlockTeam(words).largest(top);
    double sum = 0;
    for (std::int32_t t = thread; t < n; t += kStandardThreads) {
      g[t] = expf(g[t] - top);
      sum += static_cast<double>(g[t]);
    }
    const auto share = static_cast<float>(1 / sum_of_block<kStandardThreads>(sum, sums));
    const float* attention = task.attention + row.first;
    for (std::int32_t t = thread; t < row.length; t += kStandardThreads)
      g[t] = t < window.history
                 ? Rkv::mix(task.lambda, pooled_max(attention, window.history, task.pool, t), g[t] * share)
                 : 0.0F;
  }
}

}  // namespace

std::int64_t rkv_workspace_bytes(const RkvArguments& arguments) {
  RkvTask task{};
  return divide(arguments, task);
}

void launch_rkv(const RkvArguments& a, Stream stream) {
  require_aligned("rkv", a.workspace);
  check_dim("rkv", a.evidence.dim);
  check_pool("rkv", a.options.pool);
  const RkvOptions& o = a.options;
  KVKEEP_REQUIRE(o.similarity >= 0 && o.similarity <= 1, "rkv: similarity; given ", o.similarity, "; allowed 0 to 1");
  RkvTask task{};
  divide(a, task);
  task.e = a.evidence;
  task.windows = a.windows;
  task.scores = a.scores;
  task.threshold = static_cast<float>(o.similarity);
  task.lambda = static_cast<float>(o.lambda);
  task.pool = o.pool;
  task.history_alone = o.redundancy == RkvOptions::Redundancy::history;
  task.spares_first = o.no_similar == RkvOptions::NoSimilar::first;
  launch_history_attention({.evidence = a.evidence,
                            .windows = a.windows,
                            .queries = a.queries,
                            .reading = {WindowReading::Kind::history, o.window, {.group = o.group}},
                            .out = task.attention,
                            .workspace = task.rest},
                           stream);
  const std::int32_t owners = (a.evidence.longest + kSimilarOwned - 1) / kSimilarOwned;
  with_element(a.evidence.keys, [&](auto type) {
    using T = decltype(type);
    const Grid of_chunks{.blocks = blocks_for(std::int64_t{a.evidence.count} * task.chunks),
                         .threads = tuning::kKeyThreads,
                         .shared_bytes = weighted_sum_bytes(a.evidence.dim)};
    launch("rkv_unit_sums", rkv_unit_sums_kernel<T>, of_chunks, stream, task);
    const std::size_t tiles =
        sizeof(MatrixElement<T>) * static_cast<std::size_t>(kStride<T>) * (kSimilarRows + kSimilarColumns);
    launch("rkv_search", rkv_search_kernel<T>,
           {.blocks = blocks_for(std::int64_t{a.evidence.count} * owners),
            .threads = kSimilarThreads,
            .shared_bytes = tiles},
           stream, task, owners);
  });
  launch("rkv", rkv_kernel, {.blocks = blocks_for(a.evidence.count), .threads = kStandardThreads}, stream, task);
}

}  // namespace kvkeep::cuda
