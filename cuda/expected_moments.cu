// SPDX-License-Identifier: Apache-2.0
#include "expected_task.cuh"
#include "gram.h"
#include "kvkeep/score/window.h"
#include "launch.cuh"
#include "panel.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda::expected {
namespace {

using tuning::kCholeskyThreads;
using tuning::kGramItems;
using tuning::kGramTokens;
using tuning::kMomentQueries;
using tuning::kMomentThreads;

constexpr std::size_t kMomentShared =
    std::size_t{92} << 10;  ///< what a block can have on the chips with the least, besides what is declared

/// Tokens of a group's window that count.
struct Counted {
  std::int32_t first = 0, count = 0;
};

__device__ std::int32_t oldest_of(const ExpectedTask& task, const QueryView& view) {
  return view.count > task.a.queries ? view.count - task.a.queries : 0;
}

__device__ Counted counted_of(const ExpectedTask& task, std::int64_t group) {
  const QueryView& view = task.a.evidence.queries[group];
  const std::int32_t first = partition_point(oldest_of(task, view), view.count,
                                             [&](std::int32_t i) { return view.position(i) < task.a.sink; });
  return {first, view.count - first};
}

/// The turns that take queries back before RoPE, one block per token, and the mean turn of the coming positions.
__global__ void __launch_bounds__(tuning::kTurnThreads) expected_turns_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  const std::int32_t each = task.backs() + 1;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} / e.kv_heads * each; n += gridDim.x) {
    const std::int64_t group = n / each;
    const auto i = static_cast<std::int32_t>(n - group * each);
    const RopeView& rope = e.ropes[group];  // a copy spills registers on sm_80
    if (i == task.backs()) {
      for (auto f = static_cast<std::int32_t>(threadIdx.x); f < rope.pairs; f += tuning::kTurnThreads) {
        const RopeMeanTurn turn =
            rope_mean_turn(task.a.next_positions[group], task.a.future, rope.inv_freq[f], rope.attention_scaling);
        task.future[group * task.most_pairs() + f] = {turn.cosine, turn.sine};
      }
      continue;
    }
    const QueryView& view = e.queries[group];
    const std::int32_t token = oldest_of(task, view) + i;
    if (token >= view.count) continue;
    const auto shrink = static_cast<float>(1.0 / (rope.attention_scaling * rope.attention_scaling));
    for (auto f = static_cast<std::int32_t>(threadIdx.x); f < rope.pairs; f += tuning::kTurnThreads) {
      const RopeTurn turn = rope_turn(view.position(token), rope.inv_freq[f], rope.attention_scaling);
      task.back[(group * task.backs() + i) * task.most_pairs() + f] = {turn.cosine * shrink, turn.sine * -shrink};
    }
  }
}

/// Writes component d of a row that is multiplied on matrix units, as `count` parts that are `padded` apart.
template <class S>
__device__ void split(float x, std::int32_t count, std::int32_t padded, std::int32_t d, std::byte* row) {
  auto* to = reinterpret_cast<S*>(row) + d;
  for (std::int32_t part = 0; part < count; ++part, to += padded) {
    from_float(x, *to);
    x -= to_float(*to);
  }
}
__device__ void store(const ExpectedTask& task, float x, std::int32_t parts, std::int32_t d, std::byte* row) {
  if (!task.unit)
    reinterpret_cast<float*>(row)[d] = x;
  else if (task.a.evidence.keys == Element::bf16)
    split<__nv_bfloat16>(x, parts, task.padded, d, row);
  else
    split<__half>(x, parts, task.padded, d, row);
}

constexpr std::int32_t kLeastExponent = -100;

/// Exponent of the power of two that scales numbers of up to `largest` to less than 2, such that neither it nor its
/// inverse leaves f32.
__device__ std::int32_t exponent_of(float largest) {
  const std::int32_t exponent = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
  if (largest == 0 || exponent == 128) return 0;
  return exponent < kLeastExponent ? kLeastExponent : exponent;
}

/// Writes `count` zeros, by the whole block.
__device__ void clear(std::uint32_t* words, std::int64_t count) {
  for (std::int64_t at = threadIdx.x; at < count; at += blockDim.x) words[at] = 0;
}

/// An upper triangle of `dim` rows in shared memory, row after row, or, if it does not fit, a square in global memory.
struct Triangle {
  float* base;
  std::int32_t dim, stride;  ///< stride 0: a triangle

  [[nodiscard]] __device__ std::int32_t row(std::int32_t i) const {
    return stride > 0 ? i * stride : i * (2 * dim - i - 1) / 2;
  }
  [[nodiscard]] __device__ float& at(std::int32_t i, std::int32_t j) const { return base[row(i) + j]; }
};

constexpr std::int32_t kCholeskyRows = 16;

/// Shared memory of a block that factorises: rows at work, and the triangle if it fits.
struct CholeskyShared {
  std::size_t inverse;   ///< f32 [kCholeskyRows] of the pivots of the rows at work, 0: the row is 0
  std::size_t rows;      ///< f32 [kCholeskyRows, width] these rows, zeros behind them
  std::size_t noise;     ///< f32 [dim] pivots that are no larger are rounding noise
  std::size_t triangle;  ///< f32 [dim (dim + 1) / 2]
  std::size_t bytes;
  std::int32_t width;
  bool fits;

  KVKEEP_HD explicit CholeskyShared(std::int32_t dim) : width(round_up(dim, 32)) {
    const auto n = static_cast<std::size_t>(dim);
    Parts parts;
    inverse = parts.take(sizeof(float) * kCholeskyRows);
    rows = parts.take(sizeof(float) * kCholeskyRows * static_cast<std::size_t>(width));
    noise = parts.take(sizeof(float) * n);
    triangle = parts.bytes;
    fits = triangle + sizeof(float) * n * (n + 1) / 2 <= kMomentShared;
    if (fits) parts.take(sizeof(float) * n * (n + 1) / 2);
    bytes = parts.bytes;
  }
};

/// Its parts.
struct CholeskyRoom {
  float *inverse, *rows, *noise;
  std::int32_t width;

  __device__ explicit CholeskyRoom(const CholeskyShared& shared)
      : inverse(reinterpret_cast<float*>(dynamic_shared() + shared.inverse)),
        rows(reinterpret_cast<float*>(dynamic_shared() + shared.rows)),
        noise(reinterpret_cast<float*>(dynamic_shared() + shared.noise)),
        width(shared.width) {}
};

/// The square on the diagonal from row `first` on, by one warp: a lane has a column of it.
__device__ void factorise_square(const Triangle& u, std::int32_t first, const CholeskyRoom& room) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t j = first + lane;
  const bool there = lane < kCholeskyRows && j < u.dim;
  float x[kCholeskyRows], inverse = 0;
  const float noise = there ? room.noise[j] : 0.0F;
#pragma unroll
  for (int i = 0; i < kCholeskyRows; ++i) x[i] = there && i <= lane ? u.at(first + i, j) : 0.0F;
#pragma unroll
  for (int i = 0; i < kCholeskyRows; ++i) {
    const float pivot = x[i], root = rsqrtf(pivot);  // of lane i
    const float own = pivot > noise ? fmaf(root * 0.5F, fmaf(-pivot * root, root, 1.0F), root) : 0.0F;
    inverse = i == lane ? own : inverse;
    const float by = __shfl_sync(kWholeWarp, own, i);
    x[i] = by > 0 ? x[i] * by : 0.0F;
#pragma unroll
    for (int k = i + 1; k < kCholeskyRows; ++k) x[k] = fmaf(-__shfl_sync(kWholeWarp, x[i], k), x[i], x[k]);
  }
  if (!there) return;
  room.inverse[lane] = inverse;
#pragma unroll
  for (int i = 0; i < kCholeskyRows; ++i) room.rows[i * room.width + j] = i <= lane ? x[i] : 0.0F;
}

/// The rows of the square in all columns behind it, a thread for each column, and zeros behind them.
__device__ void factorise_columns(const Triangle& u, std::int32_t first, const CholeskyRoom& room) {
  static_assert(kCholeskyRows % 4 == 0);
  const auto four = [](const float* at, float(&to)[4]) {
    const float4 of = *reinterpret_cast<const float4*>(at);
    to[0] = of.x, to[1] = of.y, to[2] = of.z, to[3] = of.w;
  };
  for (std::int32_t j = first + kCholeskyRows + static_cast<std::int32_t>(threadIdx.x); j < room.width;
       j += kCholeskyThreads) {
    float x[kCholeskyRows];
#pragma unroll
    for (int i = 0; i < kCholeskyRows; ++i) x[i] = j < u.dim ? u.at(first + i, j) : 0.0F;
#pragma unroll
    for (int k = 0; k < kCholeskyRows; ++k) {
      const float by = room.inverse[k];
      x[k] = by > 0 ? x[k] * by : 0.0F;
#pragma unroll
      for (int i = k / 4 * 4; i < kCholeskyRows; i += 4) {
        float of[4];
        four(room.rows + k * room.width + first + i, of);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (i + n > k) x[i + n] = fmaf(-of[n], x[k], x[i + n]);
      }
    }
#pragma unroll
    for (int i = 0; i < kCholeskyRows; ++i) room.rows[i * room.width + j] = x[i];
  }
}

/// Subtracts what the rows from `first` on give the elements below them: a warp has kRows rows, in 32 kColumns columns
/// at a time, and a lane every 32nd of those.
__device__ void subtract_rows(const Triangle& u, std::int32_t first, const CholeskyRoom& room) {
  constexpr std::int32_t kRows = 4, kColumns = 4, kWarps = kCholeskyThreads / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % 32, warp = static_cast<std::int32_t>(threadIdx.x) / 32;
  for (std::int32_t i0 = first + kCholeskyRows + warp * kRows; i0 < u.dim; i0 += kWarps * kRows)
    for (std::int32_t j0 = i0 / 32 * 32; j0 < u.dim; j0 += 32 * kColumns) {
      const std::int32_t blocks = (u.dim - j0 + 31) / 32;
      float x[kRows][kColumns] = {};
      const auto each = [&](const auto& body) {
#pragma unroll
        for (int b = 0; b < kColumns; ++b)
#pragma unroll
          for (int a = 0; a < kRows; ++a)
            if (const std::int32_t i = i0 + a, j = j0 + 32 * b + lane; i <= j && j < u.dim) body(u.at(i, j), x[a][b]);
      };
      each([](const float& from, float& to) { to = from; });
      const float *left = room.rows + i0, *right = room.rows + j0 + lane;
#pragma unroll 2
      for (int k = 0; k < kCholeskyRows; ++k, left += room.width, right += room.width) {
        const float4 of = *reinterpret_cast<const float4*>(left);
        const float lefts[kRows] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int b = 0; b < kColumns; ++b)
#pragma unroll
          for (int a = 0; a < kRows; ++a)
            if (b < blocks) x[a][b] = fmaf(-lefts[a], right[32 * b], x[a][b]);
      }
      each([](float& to, const float& from) { to = from; });
    }
}

__device__ std::byte* row_of_factor(const ExpectedTask& task, std::int64_t n, std::int32_t i) {
  return task.factors + n * task.factor_bytes() + std::int64_t{i} * task.padded * 4;
}

/// Writes zeros in the rows of a factor from row `count` up to a whole panel.
__device__ void fill_panel(const ExpectedTask& task, std::int64_t n, std::int32_t count) {
  clear(reinterpret_cast<std::uint32_t*>(row_of_factor(task, n, count)),
        std::int64_t{round_up(count, kPanelRows) - count} * task.padded);
}

/// Makes the Cholesky factor of one query head, kCholeskyRows rows at a time, out of the sums where it will be, row i
/// from i * padded on. What a row subtracts is subtracted in f32 before the next one's, as those are sums in f32. A
/// pivot that is no more than rounding noise makes its row 0. kNear: in shared memory.
template <bool kNear>
__device__ void make_factor(const ExpectedTask& task, std::int64_t n) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t dim = task.a.evidence.dim, padded = task.padded;
  const CholeskyShared shared(dim);
  const CholeskyRoom room(shared);
  auto* const sums = reinterpret_cast<float*>(row_of_factor(task, n, 0));
  const Triangle u{kNear ? reinterpret_cast<float*>(dynamic_shared() + shared.triangle) : sums, dim,
                   kNear ? 0 : padded};
  if constexpr (kNear)
    for (std::int32_t at = thread; at < dim * dim; at += kCholeskyThreads) {
      const std::int32_t i = at / dim, j = at - i * dim;
      if (i <= j) u.at(i, j) = sums[i * padded + j];
    }
  for (std::int32_t i = thread; i < dim; i += kCholeskyThreads)
    room.noise[i] = sums[i * (padded + 1)] * static_cast<float>(dim) * 0x1p-23F;
  __syncthreads();
  for (std::int32_t first = 0; first < dim; first += kCholeskyRows) {
    if (thread < 32) factorise_square(u, first, room);
    __syncthreads();
    factorise_columns(u, first, room);
    __syncthreads();
    subtract_rows(u, first, room);
    const std::int32_t rows = dim - first < kCholeskyRows ? dim - first : kCholeskyRows;
    for (std::int32_t at = thread; at < rows * padded; at += kCholeskyThreads) {
      const std::int32_t i = at / padded, d = at - i * padded;
      store(task, d >= first + i && d < dim ? room.rows[i * room.width + d] : 0.0F, 2, d,
            row_of_factor(task, n, first + i));
    }
    __syncthreads();
  }
  fill_panel(task, n, dim);
}

/// Mean of one query head, and what its factor is made of, one block each. Work on queries goes by unit: a rotary pair,
/// or a component that does not turn.
template <class Q>
class Moments {
 public:
  __device__ Moments(const ExpectedTask& task, std::int64_t n, double* mean, std::byte* shared,
                     unsigned long long* scratch, double* sums)
      : task_(task),
        e_(task.a.evidence),
        team_(scratch),
        z_(reinterpret_cast<float*>(shared)),
        mean_(mean),
        sums_(sums),
        n_(n),
        group_(n / e_.query_heads()),
        head_(e_.rows[n / e_.group].head * e_.group + static_cast<std::int32_t>(n % e_.group)),
        style_(task.rope(group_).style),
        pairs_(task.rope(group_).pairs),
        most_pairs_(task.most_pairs()),
        thread_(static_cast<std::int32_t>(threadIdx.x)),
        dim_(e_.dim),
        units_(dim_ - pairs_),
        stride_(round_up(dim_, 4)) {}

  /// True if its queries were left to cuBLAS.
  __device__ bool run() {
    HeadFactor out{0, 1, 0, false, false};
    const Counted counted = counted_of(task_, group_);
    first_ = counted.first;
    average(counted.count);
    if (task_.a.covariance && counted.count > 1) {
      const std::int32_t exponent = exponent_of(spread(counted.count));
      by_ = ldexpf(1.0F, -exponent);
      out.factor = narrow(ldexp(1.0, exponent) * static_cast<double>(e_.scale) / sqrt(2.0 * counted.count));
      out.triangular = counted.count > dim_;
      out.rows = out.triangular ? dim_ : counted.count;
      out.product = task_.grams(counted.count) && exponent > kLeastExponent;
      if (out.product)
        give_rows(counted.count);
      else if (out.triangular)
        multiply(counted.count);
      else
        copy(counted.count);
    }
    __syncthreads();
    out.mean_factor = write_mean();
    if (thread_ == 0) task_.heads[n_] = out;
    __syncthreads();
    return out.product;
  }

 private:
  __device__ static float narrow(double x) { return x < 1e38 ? static_cast<float>(x) : 1e38F; }
  [[nodiscard]] __device__ RopePair components(std::int32_t unit) const {
    return unit < pairs_ ? rope_pair(style_, unit, pairs_) : RopePair{unit + pairs_, unit + pairs_};
  }

  /// A unit of the i-th query that counts, before RoPE; for a single component the second number has no meaning.
  [[nodiscard]] __device__ float2 query(std::int32_t i, std::int32_t unit) const {
    const QueryView& view = e_.queries[group_];
    const auto* q = reinterpret_cast<const Q*>(view.at(first_ + i, head_));
    const auto [p, s] = components(unit);
    const float2 x{to_float(q[p]), to_float(q[s])};
    if (unit >= pairs_ || !task_.a.post_rope) return x;
    const float2 turn = task_.back[(group_ * task_.backs() + first_ + i - oldest_of(task_, view)) * most_pairs_ + unit];
    return {x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y};
  }
  [[nodiscard]] __device__ float2 centred(std::int32_t i, std::int32_t unit) const {
    const float2 x = query(i, unit);
    const auto [p, s] = components(unit);
    return {x.x - static_cast<float>(mean_[p]), x.y - static_cast<float>(mean_[s])};
  }
  /// Centred, scaled to about 1, and turned to the coming positions.
  [[nodiscard]] __device__ float2 turned(std::int32_t i, std::int32_t unit) const {
    float2 z = centred(i, unit);
    z = {z.x * by_, z.y * by_};
    if (unit >= pairs_) return z;
    const double2 turn = task_.future[group_ * most_pairs_ + unit];
    const auto c = static_cast<float>(turn.x), s = static_cast<float>(turn.y);
    return {z.x * c - z.y * s, z.y * c + z.x * s};
  }

  __device__ void average(std::int32_t count) {
    const std::int32_t slices = kMomentThreads / units_, unit = thread_ % units_, slice = thread_ / units_;
    double a = 0, b = 0;
    if (slice < slices)
      for (std::int32_t i = slice; i < count; i += slices) {
        const float2 x = query(i, unit);
        a += static_cast<double>(x.x);
        b += static_cast<double>(x.y);
      }
    sums_[2 * thread_] = a;
    sums_[2 * thread_ + 1] = b;
    __syncthreads();
    if (slice == 0) {
      for (std::int32_t s = 1; s < slices; ++s) {
        a += sums_[2 * (s * units_ + unit)];
        b += sums_[2 * (s * units_ + unit) + 1];
      }
      const auto [p, s] = components(unit);
      mean_[p] = a / static_cast<double>(count);
      if (unit < pairs_) mean_[s] = b / static_cast<double>(count);
    }
    __syncthreads();
  }

  /// The largest distance of a component from its mean.
  [[nodiscard]] __device__ float spread(std::int32_t count) const {
    float top = 0;
    for (std::int32_t at = thread_; at < count * units_; at += kMomentThreads) {
      const float2 z = centred(at / units_, at % units_);
      const float a = fabsf(z.x), b = fabsf(z.y);
      top = a > top ? a : top;
      top = at % units_ < pairs_ && b > top ? b : top;
    }
    return team_.largest(top);
  }

  /// The queries themselves as the factor.
  __device__ void copy(std::int32_t count) {
    for (std::int32_t at = thread_; at < count * units_; at += kMomentThreads) {
      const std::int32_t i = at / units_, unit = at - i * units_;
      const float2 z = turned(i, unit);
      const auto [p, s] = components(unit);
      store(task_, z.x, 2, static_cast<std::int32_t>(p), row_of_factor(task_, n_, i));
      if (unit < pairs_) store(task_, z.y, 2, static_cast<std::int32_t>(s), row_of_factor(task_, n_, i));
    }
    const std::int32_t past = task_.padded - dim_;
    for (std::int32_t at = thread_; at < count * past; at += kMomentThreads)
      store(task_, 0, 2, dim_ + at % past, row_of_factor(task_, n_, at / past));
    fill_panel(task_, n_, count);
  }

  /// The queries for cuBLAS, zeros after the last one.
  __device__ void give_rows(std::int32_t count) {
    const std::int32_t width = 2 * task_.padded, all = task_.gram.pieces * kGramTokens, past = task_.padded - dim_;
    __half* rows = task_.gram.rows + (n_ - task_.gram.first) * all * width;
    const auto put = [&](std::int32_t i, std::int64_t d, float z) {
      __half* to = rows + std::int64_t{i} * width + d;
      from_float(z, to[0]);
      from_float((z - to_float(to[0])) * GramTask::kLow, to[task_.padded]);
    };
    for (std::int32_t at = thread_; at < count * units_; at += kMomentThreads) {
      const std::int32_t i = at / units_, unit = at - i * units_;
      const float2 z = turned(i, unit);
      const auto [p, s] = components(unit);
      put(i, p, z.x);
      if (unit < pairs_) put(i, s, z.y);
    }
    for (std::int32_t at = thread_; at < count * past; at += kMomentThreads) put(at / past, dim_ + at % past, 0);
    clear(reinterpret_cast<std::uint32_t*>(rows + std::int64_t{count} * width), (all - count) * task_.padded);
  }

  /// Sums of the products of all pairs of components, where the factor will be: a thread has up to kTiles tiles of
  /// 4 x 4.
  __device__ void multiply(std::int32_t count) {
    constexpr std::int32_t kTiles = 3;
    auto* const to = reinterpret_cast<float*>(row_of_factor(task_, n_, 0));
    const std::int32_t side = stride_ / 4, tiles = side * (side + 1) / 2;
    for (std::int32_t base = 0; base < tiles; base += kTiles * kMomentThreads) {
      float sums[kTiles][16] = {};
      std::int32_t places[kTiles];  // row * 64 + column, in tiles
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        std::int32_t left = base + t * kMomentThreads + thread_, row = 0;
        places[t] = -1;
        if (left >= tiles) continue;
        for (; left >= side - row; ++row) left -= side - row;
        places[t] = row * 64 + row + left;
      }
      for (std::int32_t from = 0; from < count; from += kMomentQueries) {
        const std::int32_t n = count - from < kMomentQueries ? count - from : kMomentQueries;
        __syncthreads();
#pragma unroll 1
        for (std::int32_t at = thread_; at < n * units_; at += kMomentThreads) {
          const std::int32_t i = at / units_, unit = at - i * units_;
          const float2 z = turned(from + i, unit);
          const auto [p, s] = components(unit);
          z_[i * stride_ + p] = z.x;
          if (unit < pairs_) z_[i * stride_ + s] = z.y;
        }
#pragma unroll 1
        for (std::int32_t at = thread_; at < n * (stride_ - dim_); at += kMomentThreads)
          z_[at / (stride_ - dim_) * stride_ + dim_ + at % (stride_ - dim_)] = 0;
        __syncthreads();
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (places[t] < 0) continue;
#pragma unroll 2
          for (std::int32_t i = 0; i < n; ++i) {
            const float4 x = *reinterpret_cast<const float4*>(z_ + i * stride_ + places[t] / 64 * 4),
                         y = *reinterpret_cast<const float4*>(z_ + i * stride_ + places[t] % 64 * 4);
            const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
              for (int b = 0; b < 4; ++b) sums[t][4 * a + b] = fmaf(left[a], right[b], sums[t][4 * a + b]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (places[t] < 0) continue;
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          const std::int32_t i = places[t] / 64 * 4 + k / 4, j = places[t] % 64 * 4 + k % 4;
          if (i <= j && j < dim_) to[i * task_.padded + j] = sums[t][k];
        }
      }
    }
  }

  /// Writes the turned mean times the softmax scale. Returns the factor of its products.
  [[nodiscard]] __device__ float write_mean() {
    for (std::int32_t f = thread_; f < pairs_; f += kMomentThreads) {
      const auto [p, s] = components(f);
      const double2 turn = task_.future[group_ * most_pairs_ + f];
      const double a = mean_[p], b = mean_[s];
      mean_[p] = a * turn.x - b * turn.y;
      mean_[s] = b * turn.x + a * turn.y;
    }
    __syncthreads();
    const std::int64_t row = n_ / e_.group;
    const auto of_group = static_cast<std::int32_t>(n_ - row * e_.group);
    std::byte* means = task_.means + row * task_.mean_bytes();
    const std::int64_t each = std::int64_t{task_.padded} * (task_.unit ? kMeanParts * 2 : 4);
    float top = 0;
    for (std::int32_t d = thread_; d < dim_; d += kMomentThreads) {
      const float x = fabsf(static_cast<float>(mean_[d] * static_cast<double>(e_.scale)));
      top = x > top ? x : top;
    }
    const std::int32_t exponent = task_.unit ? exponent_of(team_.largest(top)) : 0;
    const double by = ldexp(1.0, -exponent);
    for (std::int32_t d = thread_; d < task_.padded; d += kMomentThreads)
      store(task_,
            d < dim_ ? static_cast<float>(static_cast<float>(mean_[d] * static_cast<double>(e_.scale)) * by) : 0.0F,
            kMeanParts, d, means + of_group * each);
    if (task_.unit && of_group == e_.group - 1) {
      const std::int64_t words = (round_up(e_.group, kMeanHeads) - e_.group) * each / 4;
      for (std::int64_t at = thread_; at < words; at += kMomentThreads)
        reinterpret_cast<float*>(means + e_.group * each)[at] = 0;
    }
    return ldexpf(1.0F, exponent);
  }

  const ExpectedTask& task_;
  const EvidenceArguments& e_;
  BlockTeam team_;
  float* z_;  ///< [kMomentQueries, stride_]
  double *mean_, *sums_;
  std::int64_t n_, group_;
  std::int32_t head_;
  RopeStyle style_;
  std::int32_t pairs_, most_pairs_, thread_, dim_, units_, stride_, first_ = 0;
  float by_ = 1;
};

template <class Q>
__global__ void __launch_bounds__(kMomentThreads, 2) expected_moments_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(double, mean, 256);
  KVKEEP_SHARED(double, sums, 2 * kMomentThreads);
  const EvidenceArguments& e = task.a.evidence;
  const GramTask& gram = task.gram;
  const std::int64_t all = std::int64_t{e.count} * e.group;
  // With cuBLAS a turn's heads, and what is left over of its call.
  const std::int64_t slots = gram.at_once > 0 ? (kGramItems + gram.pieces - 1) / gram.pieces : all;
  for (std::int64_t slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    const std::int64_t n = gram.first + slot, r = n / e.group, group = r / e.kv_heads;
    const bool mine = n < all && (gram.at_once == 0 || slot < gram.at_once);
    bool given = false;
    if (mine && e.due(r) && e.rows[r].length > task.a.sink) {
      if (counted_of(task, group).count > 0)
        given = Moments<Q>(task, n, mean, dynamic_shared(), scratch, sums).run();
      else if (threadIdx.x == 0)
        task.heads[n].rows = kUnseen;
    }
    if (gram.at_once == 0 || given) continue;
    const std::int64_t first = slot * gram.pieces, left = kGramItems - first;
    const std::int64_t words = std::int64_t{kGramTokens} * task.padded;  // of an item: two numbers each
    clear(reinterpret_cast<std::uint32_t*>(gram.rows) + first * words,
          (left < gram.pieces ? left : gram.pieces) * words);
  }
}

/// Joins the products of a head's pieces, in f64, where its factor will be: one block per head of the turn.
__global__ void __launch_bounds__(kMomentThreads) expected_products_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  const GramTask& gram = task.gram;
  const std::int32_t padded = task.padded, width = 2 * padded;
  for (std::int64_t slot = blockIdx.x; slot < gram.at_once; slot += gridDim.x) {
    const std::int64_t n = gram.first + slot, r = n / e.group;
    if (n >= std::int64_t{e.count} * e.group || !is_scored(task, r) || !task.heads[n].product) continue;
    const float* products = gram.products + slot * gram.pieces * padded * width;
    auto* to = reinterpret_cast<float*>(task.factors + n * task.factor_bytes());
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < e.dim * e.dim; at += kMomentThreads) {
      const std::int32_t i = at / e.dim, j = at - i * e.dim;
      if (i > j) continue;
      double sum = 0;
      for (std::int32_t piece = 0; piece < gram.pieces; ++piece) {
        const float* of = products + std::int64_t{piece} * padded * width;
        const double low =
            static_cast<double>(of[i * width + padded + j]) + static_cast<double>(of[j * width + padded + i]);
        sum += static_cast<double>(of[i * width + j]) + low / static_cast<double>(GramTask::kLow);
      }
      to[i * padded + j] = static_cast<float>(sum);
    }
  }
}

/// The factors of heads with more queries than components, one block per head.
template <bool kNear>
__global__ void __launch_bounds__(kCholeskyThreads, 2) expected_factors_kernel(ExpectedTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} * e.group; n += gridDim.x) {
    if (is_scored(task, n / e.group) && task.heads[n].triangular) make_factor<kNear>(task, n);
    __syncthreads();
  }
}

}  // namespace

void launch_moments(const ExpectedTask& task, Stream stream) {
  const EvidenceArguments& e = task.a.evidence;
  if (task.turns())
    launch("expected_turns", expected_turns_kernel,
           {.blocks = blocks_for(std::int64_t{e.count} / e.kv_heads * (task.backs() + 1)),
            .threads = tuning::kTurnThreads},
           stream, task);
  const std::int64_t heads = std::int64_t{e.count} * e.group;
  const std::size_t queries = sizeof(float) * kMomentQueries * static_cast<std::size_t>(round_up(e.dim, 4));
  const auto moments = [&](const ExpectedTask& turn, std::int64_t blocks) {
    with_wide_element(e.query, [&](auto type) {
      launch("expected_moments", expected_moments_kernel<decltype(type)>,
             {.blocks = blocks_for(blocks), .threads = kMomentThreads, .shared_bytes = queries}, stream, turn);
    });
  };
  if (task.gram.at_once == 0) moments(task, heads);
  for (ExpectedTask turn = task; task.gram.at_once > 0 && turn.gram.first < heads;
       turn.gram.first += turn.gram.at_once) {
    moments(turn, kGramItems);
    launch_gram({.blas = task.a.blas,
                 .rows = turn.gram.rows,
                 .element = Element::f16,
                 .count = kGramItems,
                 .tokens = kGramTokens,
                 .width = 2 * task.padded,
                 .dim = task.padded,
                 .products = turn.gram.products},
                stream);
    launch("expected_products", expected_products_kernel,
           {.blocks = blocks_for(turn.gram.at_once), .threads = kMomentThreads}, stream, turn);
  }
  if (!task.a.covariance || task.a.queries <= e.dim) return;
  const CholeskyShared shared(e.dim);
  launch("expected_factors", shared.fits ? expected_factors_kernel<true> : expected_factors_kernel<false>,
         {.blocks = blocks_for(heads), .threads = kCholeskyThreads, .shared_bytes = shared.bytes}, stream, task);
}

}  // namespace kvkeep::cuda::expected
