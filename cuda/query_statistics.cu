#include "query_statistics.h"

#include "element.cuh"
#include "launch.cuh"
#include "parts.cuh"
#include "team.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kMomentThreads;

static_assert(kMomentThreads >= 256, "a thread per component");
constexpr std::int32_t kTiles = 3;  ///< of 4 x 4 products that a thread sums up at a time

__host__ __device__ std::int32_t row_stride(std::int32_t dim) { return (dim + 3) / 4 * 4; }

/// Shared memory of a block.
struct StatisticsShared {
  std::size_t queries, apart, bytes;

  KVKEEP_HD explicit StatisticsShared(std::int32_t dim) {
    const auto stride = static_cast<std::size_t>(row_stride(dim));
    Parts parts;
    queries = parts.take(sizeof(float) * kMomentBlock * stride);
    apart = parts.take(sizeof(double) * stride);
    bytes = parts.bytes;
  }
};

/// Moments of one query head, while blocks of queries join them. A thread owns a component of the queries, and tiles of
/// the lower triangle.
class JoiningMoments {
 public:
  __device__ JoiningMoments(std::int32_t dim, std::byte* shared, unsigned long long* scratch)
      : team_(scratch), dim_(dim), stride_(row_stride(dim)), thread_(static_cast<std::int32_t>(threadIdx.x)) {
    const StatisticsShared parts(dim);
    x_ = reinterpret_cast<float*>(shared + parts.queries);
    apart_ = reinterpret_cast<double*>(shared + parts.apart);
  }

  /// stage(first, rows, x): all threads write queries [first, first + rows) to x [rows, stride]. The moments may be
  /// written where they are read.
  template <class Stage>
  __device__ void run(const double* mean_in, const double* second_in, std::int64_t count, std::int64_t queries,
                      double* mean_out, double* second_out, const Stage& stage) const {
    const std::int32_t side = stride_ / 4, tiles = side * (side + 1) / 2;
    for (std::int32_t base = 0; base < tiles; base += kTiles * kMomentThreads) {
      double sums[kTiles][16];
      std::int32_t places[kTiles];  // row * 64 + column, in tiles
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        places[t] = place_of(base + t * kMomentThreads + thread_, tiles);
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          const std::int32_t at = count > 0 ? entry_of(places[t], k) : -1;
          sums[t][k] = at >= 0 ? second_in[at] : 0.0;
        }
      }
      double mean = count > 0 && thread_ < dim_ ? mean_in[thread_] : 0.0;
      for (std::int64_t first = 0; first < queries; first += kMomentBlock) {
        const auto rows = static_cast<std::int32_t>(queries - first < kMomentBlock ? queries - first : kMomentBlock);
        __syncthreads();  // the block before is done with
        stage(first, rows, x_);
        __syncthreads();
        const double squared = centre(rows, mean);
        const MomentWeights weights = moment_weights(count + first, rows);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) join(places[t], rows, squared, weights, sums[t]);
        if (thread_ < dim_) mean += apart_[thread_] * weights.shift;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int k = 0; k < 16; ++k)
          if (const std::int32_t at = entry_of(places[t], k); at >= 0) second_out[at] = sums[t][k];
      if (base + kTiles * kMomentThreads >= tiles && thread_ < dim_) mean_out[thread_] = mean;
    }
  }

 private:
  [[nodiscard]] static __device__ std::int32_t place_of(std::int32_t tile, std::int32_t tiles) {
    if (tile >= tiles) return -1;
    std::int32_t row = 0;
    for (; tile > row; ++row) tile -= row + 1;
    return row * 64 + tile;
  }
  /// Where the k-th number of a tile lies in the triangle; -1: outside it.
  [[nodiscard]] __device__ std::int32_t entry_of(std::int32_t place, int k) const {
    if (place < 0) return -1;
    const std::int32_t i = place / 64 * 4 + k / 4, j = place % 64 * 4 + k % 4;
    return j <= i && i < dim_ ? i * (i + 1) / 2 + j : -1;
  }

  /// Subtracts the queries' mean and scales them, which is returned squared; writes how far it is from `mean`.
  [[nodiscard]] __device__ double centre(std::int32_t rows, double mean) const {
    float* const x = x_ + thread_;
    double sum = 0;
    float top = 0;
    if (thread_ < dim_) {
      for (std::int32_t i = 0; i < rows; ++i) sum += static_cast<double>(x[i * stride_]);
      sum /= static_cast<double>(rows);
      const auto own = static_cast<float>(sum);
      for (std::int32_t i = 0; i < rows; ++i) {
        x[i * stride_] -= own;
        const float size = fabsf(x[i * stride_]);
        top = size > top ? size : top;
      }
    }
    const std::int32_t exponent = moment_exponent(team_.largest(top));
    for (std::int32_t left = -exponent; left != 0;) {
      const float by = moment_step(left);
      for (std::int32_t i = 0; thread_ < dim_ && i < rows; ++i) x[i * stride_] *= by;
    }
    if (thread_ < stride_) apart_[thread_] = thread_ < dim_ ? sum - mean : 0.0;
    __syncthreads();
    const double scale = ldexp(1.0, exponent);
    return scale * scale;
  }

  __device__ void join(std::int32_t place, std::int32_t rows, double squared, const MomentWeights& weights,
                       double (&sums)[16]) const {
    if (place < 0) return;
    const float *left = x_ + place / 64 * 4, *right = x_ + place % 64 * 4;
    float products[16] = {};
#pragma unroll 2
    for (std::int32_t i = 0; i < rows; ++i) {
      const float4 a = *reinterpret_cast<const float4*>(left + i * stride_),
                   b = *reinterpret_cast<const float4*>(right + i * stride_);
      const float of_row[4] = {a.x, a.y, a.z, a.w}, of_column[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 16; ++k) products[k] = fmaf(of_row[k / 4], of_column[k % 4], products[k]);
    }
#pragma unroll
    for (int k = 0; k < 16; ++k)
      sums[k] = joined_moment(sums[k], static_cast<double>(products[k]) * squared, apart_[place / 64 * 4 + k / 4],
                              apart_[place % 64 * 4 + k % 4], weights);
  }

  BlockTeam team_;
  std::int32_t dim_, stride_, thread_;
  float* x_;
  double* apart_;
};

/// Queries of one head as they are: before RoPE, in the ring; or new, before or after it.
template <class Q>
class HeadQueries {
 public:
  __device__ HeadQueries(const MomentsLayout& layout, const MomentsArrival& arrival, std::int32_t head)
      : layout_(layout),
        arrival_(arrival),
        head_(head),
        units_(layout.dim - layout.rope.pairs),
        shrink_(static_cast<float>(1.0 / (layout.rope.attention_scaling * layout.rope.attention_scaling))) {}

  /// As JoiningMoments stages them.
  __device__ void stage(std::int64_t first, std::int32_t rows, float* x) const {
    const std::int32_t dim = layout_.dim, stride = row_stride(dim), past = stride - dim;
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < rows * units_; at += kMomentThreads) {
      const std::int32_t row = at / units_, unit = at - row * units_;
      const std::int64_t i = first + row;
      float* const to = x + row * stride;
      if (i >= arrival_.before.pending)
        put(static_cast<std::int32_t>(i - arrival_.before.pending), unit, to);
      else
        each_of(unit, [&](std::int64_t d) { to[d] = newest(i)[d]; });
    }
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < rows * past; at += kMomentThreads)
      x[at / past * stride + dim + at % past] = 0;
  }

  /// Those that stay out of the moments, `taken` queries from the oldest one on, go to the ring.
  __device__ void keep(std::int64_t taken) const {
    const std::int64_t before = arrival_.before.pending;
    const auto from = static_cast<std::int32_t>(taken > before ? taken - before : 0);
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < (arrival_.tokens - from) * units_;
         at += kMomentThreads) {
      const std::int32_t token = from + at / units_;
      put(token, at % units_, newest(before + token));
    }
  }

 private:
  [[nodiscard]] __device__ float* newest(std::int64_t i) const {
    return arrival_.before.newest +
           ((arrival_.before.begin + i) % kMomentRing * layout_.queries.heads + head_) * layout_.dim;
  }
  /// Calls body with the components of a unit: a rotary pair, or one that does not turn.
  template <class Body>
  __device__ void each_of(std::int32_t unit, const Body& body) const {
    if (unit >= layout_.rope.pairs) return body(unit + layout_.rope.pairs);
    const RopePair pair = rope_pair(layout_.rope.style, unit, layout_.rope.pairs);
    body(pair.first);
    body(pair.second);
  }
  /// Writes a unit of a new query before RoPE.
  __device__ void put(std::int32_t token, std::int32_t unit, float* to) const {
    const auto* q = reinterpret_cast<const Q*>(layout_.queries.from +
                                               (arrival_.first + std::int64_t{token}) * layout_.queries.token_stride +
                                               head_ * layout_.queries.head_stride);
    if (unit >= layout_.rope.pairs) {
      to[unit + layout_.rope.pairs] = to_float(q[unit + layout_.rope.pairs]);
      return;
    }
    const RopePair pair = rope_pair(layout_.rope.style, unit, layout_.rope.pairs);
    const RopeTurn turn =
        rope_turn(arrival_.position + std::int64_t{token}, layout_.rope.inv_freq[unit], layout_.rope.attention_scaling);
    const float c = turn.cosine * shrink_, s = turn.sine * -shrink_, a = to_float(q[pair.first]),
                b = to_float(q[pair.second]);
    to[pair.first] = a * c - b * s;
    to[pair.second] = b * c + a * s;
  }

  const MomentsLayout& layout_;
  const MomentsArrival& arrival_;
  std::int32_t head_, units_;
  float shrink_;
};

/// One head of one sequence, whose arrivals follow each other.
template <class Q>
__global__ void __launch_bounds__(kMomentThreads) query_statistics_push_kernel(PushMomentsArguments a) {
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const auto of_sequence = [&](std::int32_t n) { return a.arrivals[n].before.second; };
  auto n = static_cast<std::int32_t>(blockIdx.y);
  if (n > 0 && of_sequence(n - 1) == of_sequence(n)) return;  // the block of the first one takes it
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  const std::int64_t dim = a.layout.dim, triangle = dim * (dim + 1) / 2;
  const JoiningMoments joining(a.layout.dim, dynamic_shared(), scratch);
  const std::int32_t first = n;
  for (; n < a.count && of_sequence(n) == of_sequence(first); ++n) {
    const MomentsArrival& arrival = a.arrivals[n];
    const HeadQueries<Q> queries(a.layout, arrival, head);
    const std::int64_t taken = blocks_taken_in(arrival.before.pending, arrival.tokens) * kMomentBlock;
    if (taken > 0) {
      double *mean = arrival.before.mean + head * dim, *second = arrival.before.second + head * triangle;
      joining.run(mean, second, arrival.before.count, taken, mean, second,
                  [&](std::int64_t from, std::int32_t rows, float* x) { queries.stage(from, rows, x); });
    }
    __syncthreads();  // the ring has been read
    queries.keep(taken);
    __syncthreads();
  }
}

/// One head of one group.
__global__ void __launch_bounds__(kMomentThreads) query_statistics_sum_kernel(SumMomentsArguments a) {
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const std::int64_t dim = a.dim, triangle = dim * (dim + 1) / 2;
  const JoiningMoments joining(a.dim, dynamic_shared(), scratch);
  for (std::int64_t n = blockIdx.x; n < std::int64_t{a.groups} * a.query_heads; n += gridDim.x) {
    const MomentsView& view = a.views[n / a.query_heads];
    if (view.count + view.pending == 0) continue;
    MomentsLayout layout;
    layout.queries.heads = a.query_heads;
    layout.dim = a.dim;
    const MomentsArrival none{.before = view};
    const auto head = static_cast<std::int32_t>(n % a.query_heads);
    const HeadQueries<float> queries(layout, none, head);
    joining.run(view.mean + head * dim, view.second + head * triangle, view.count, view.pending, a.mean + n * dim,
                a.second + n * triangle,
                [&](std::int64_t from, std::int32_t rows, float* x) { queries.stage(from, rows, x); });
  }
}

}  // namespace

void launch_push_moments(const PushMomentsArguments& a, Stream stream) {
  check_dim("push_moments", a.layout.dim);
  KVKEEP_REQUIRE(a.layout.rope.pairs >= 0 && 2 * a.layout.rope.pairs <= a.layout.dim,
                 "push_moments: rotary pairs; given ", a.layout.rope.pairs, "; allowed 0 to half of ", a.layout.dim);
  check_wide("push_moments", "queries", a.element);
  with_wide_element(a.element, [&](auto element) {
    launch("query_statistics_push", query_statistics_push_kernel<decltype(element)>,
           {.blocks = {static_cast<unsigned>(a.layout.queries.heads), static_cast<unsigned>(a.count)},
            .threads = kMomentThreads,
            .shared_bytes = StatisticsShared(a.layout.dim).bytes},
           stream, a);
  });
}

void launch_sum_moments(const SumMomentsArguments& a, Stream stream) {
  check_dim("sum_moments", a.dim);
  launch("query_statistics_sum", query_statistics_sum_kernel,
         {.blocks = blocks_for(std::int64_t{a.groups} * a.query_heads),
          .threads = kMomentThreads,
          .shared_bytes = StatisticsShared(a.dim).bytes},
         stream, a);
}

}  // namespace kvkeep::cuda
