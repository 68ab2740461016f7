#include "expected.h"

#include <limits>

#include "element.cuh"
#include "key_lanes.cuh"
#include "launch.cuh"
#include "panel.cuh"
#include "parts.cuh"
#include "softmax.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kExpectedChunk;
using tuning::kExpectedThreads;
using tuning::kKeyThreads;
using tuning::kMomentQueries;
using tuning::kMomentThreads;

constexpr float kMost = std::numeric_limits<float>::max() / 2, kLeast = -std::numeric_limits<float>::infinity();
constexpr std::int32_t kMeanHeads = 16;  ///< heads whose means are multiplied together on matrix units
constexpr std::int32_t kMeanParts = 3;
constexpr std::size_t kMomentShared =
    std::size_t{92} << 10;  ///< what a block of the chips with the least can have, besides what is declared

KVKEEP_HD inline std::int32_t round_up(std::int32_t n, std::int32_t to) { return (n + to - 1) / to * to; }

constexpr std::int32_t kUnseen = -1;

/// How the factor of one query head is read.
struct Head {
  float factor;       ///< of its products
  float mean_factor;  ///< of those of its mean
  std::int32_t rows;  ///< 0: no covariance; kUnseen: no query either
  bool triangular;    ///< row i is 0 before component i
};

struct Task {
  ExpectedArguments a;
  double2* future;     ///< [groups, F] mean turn of the coming positions
  float2* back;        ///< [groups, queries, F] what takes RoPE off the newest queries
  Head* heads;         ///< [groups * Hq]
  std::byte* means;    ///< f32 [rows of the table, G, Dp], or [rows, G rounded up to 16, parts, Dp] of 16 bits
  std::byte* factors;  ///< [groups * Hq, rows, Dp] f32, or as many high parts and then low parts of 16 bits in each row
  float2* partial;     ///< [count, chunks, G] maximum and sum of one chunk
  float* tops;         ///< [count, chunks] largest score
  float* logits;       ///< [slots * G]: of a row [G, length]
  std::int32_t padded, rows, chunks;
  bool unit;

  [[nodiscard]] __device__ float* logits_of(std::int64_t r) const {
    return logits + a.evidence.rows[r].first * a.evidence.group;
  }
  [[nodiscard]] KVKEEP_HD std::int32_t backs() const { return a.post_rope && a.pairs > 0 ? a.queries : 0; }
  [[nodiscard]] __device__ bool given(std::int64_t group) const {
    return a.moments != nullptr && a.moments[group].mean != nullptr;
  }
  [[nodiscard]] KVKEEP_HD std::int64_t mean_bytes() const {  ///< of one row
    return std::int64_t{padded} *
           (unit ? round_up(a.evidence.group, kMeanHeads) * kMeanParts * 2 : a.evidence.group * 4);
  }
  [[nodiscard]] KVKEEP_HD std::int64_t factor_bytes() const { return std::int64_t{rows} * padded * 4; }
};

/// Tokens of a group's window that count.
struct Counted {
  std::int32_t first = 0, count = 0;
};

__device__ std::int32_t oldest_of(const Task& task, const QueryWindow& view) {
  return view.count > task.a.queries ? view.count - task.a.queries : 0;
}

__device__ Counted counted_of(const Task& task, std::int64_t group) {
  const QueryWindow& view = task.a.evidence.queries[group];
  std::int32_t low = oldest_of(task, view), high = view.count;
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (view.position(middle) < task.a.sink)
      low = middle + 1;
    else
      high = middle;
  }
  return {low, view.count - low};
}

/// True for a row that is scored by queries, after the moments were made.
__device__ bool is_scored(const Task& task, std::int64_t r) {
  const EvidenceArguments& e = task.a.evidence;
  return e.due(r) && e.rows[r].length > task.a.sink && task.heads[r * e.group].rows != kUnseen;
}

/// What turns queries back, a block a token, and the mean turn of the coming positions.
__global__ void __launch_bounds__(tuning::kTurnThreads) turns_kernel(Task task) {
  const EvidenceArguments& e = task.a.evidence;
  const std::int32_t each = task.backs() + 1;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} / e.kv_heads * each; n += gridDim.x) {
    const std::int64_t group = n / each;
    const auto i = static_cast<std::int32_t>(n - group * each);
    if (i == task.backs()) {
      for (auto f = static_cast<std::int32_t>(threadIdx.x); f < task.a.pairs; f += tuning::kTurnThreads) {
        const RopeMeanTurn turn =
            rope_mean_turn(task.a.next_positions[group], task.a.future, task.a.inv_freq[f], task.a.attention_scaling);
        task.future[group * task.a.pairs + f] = {turn.cosine, turn.sine};
      }
      continue;
    }
    if (task.given(group)) continue;
    const QueryWindow& view = e.queries[group];
    const std::int32_t token = oldest_of(task, view) + i;
    if (token >= view.count) continue;
    const auto shrink = static_cast<float>(1.0 / (task.a.attention_scaling * task.a.attention_scaling));
    for (auto f = static_cast<std::int32_t>(threadIdx.x); f < task.a.pairs; f += tuning::kTurnThreads) {
      const RopeTurn turn = rope_turn(view.position(token), task.a.inv_freq[f], task.a.attention_scaling);
      task.back[(group * task.backs() + i) * task.a.pairs + f] = {turn.cosine * shrink, turn.sine * -shrink};
    }
  }
}

/// Writes component d of a row that is multiplied on matrix units, as `count` parts that lie `padded` apart.
template <class S>
__device__ void split(float x, std::int32_t count, std::int32_t padded, std::int32_t d, std::byte* row) {
  auto* to = reinterpret_cast<S*>(row) + d;
  for (std::int32_t part = 0; part < count; ++part, to += padded) {
    from_float(x, *to);
    x -= to_float(*to);
  }
}
__device__ void store(const Task& task, float x, std::int32_t parts, std::int32_t d, std::byte* row) {
  if (!task.unit)
    reinterpret_cast<float*>(row)[d] = x;
  else if (task.a.evidence.keys == Element::bf16)
    split<__nv_bfloat16>(x, parts, task.padded, d, row);
  else
    split<__half>(x, parts, task.padded, d, row);
}

/// Power of two that brings numbers up to `largest` to less than 2, as its exponent; such that neither it nor its
/// inverse leaves f32.
__device__ std::int32_t exponent_of(float largest) {
  const std::int32_t exponent = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
  if (largest == 0 || exponent == 128) return 0;
  return exponent < -100 ? -100 : exponent;
}

/// An upper triangle of `dim` rows in shared memory, row after row, or where it does not fit a square in global memory.
struct Triangle {
  float* base;
  std::int32_t dim, stride;  ///< stride 0: a triangle

  [[nodiscard]] __device__ std::int32_t row(std::int32_t i) const {
    return stride > 0 ? i * stride : i * (2 * dim - i - 1) / 2;
  }
  [[nodiscard]] __device__ std::int32_t step(std::int32_t i) const {
    return stride > 0 ? stride : dim - i - 1;
  }  ///< from row i to the next
  [[nodiscard]] __device__ float& at(std::int32_t i, std::int32_t j) const { return base[row(i) + j]; }
};

/// Shared memory of the moments: queries, and the triangle where both fit.
struct MomentShared {
  std::size_t queries, triangle, bytes;
  bool fits;

  KVKEEP_HD explicit MomentShared(std::int32_t dim) {
    Parts parts;
    queries = parts.take(sizeof(float) * kMomentQueries * static_cast<std::size_t>(round_up(dim, 4)));
    triangle = parts.bytes;
    const std::size_t wanted = sizeof(float) * static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim + 1) / 2;
    fits = triangle + wanted <= kMomentShared;
    if (fits) parts.take(wanted);
    bytes = parts.bytes;
  }
};

/// Cholesky factor in place, a thread a column, row after row: what the rows above take is summed in double. A pivot
/// that is no more than rounding noise makes its row 0.
__device__ void factorise(const Triangle& u, double* pivot) {
  const auto j = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t i = 0; i < u.dim; ++i) {
    double rest = 0, noise = 0;
    if (j >= i && j < u.dim) {
      rest = static_cast<double>(u.at(i, j));
      if (j == i) noise = rest * static_cast<double>(u.dim) * 0x1p-23;
      const float* row = u.base;
#pragma unroll 4
      for (std::int32_t k = 0; k < i; ++k) {
        rest = fma(-static_cast<double>(row[i]), static_cast<double>(row[j]), rest);
        row += u.step(k);
      }
      if (j == i) *pivot = rest > noise ? 1.0 / sqrt(rest) : 0.0;
    }
    __syncthreads();
    if (j >= i && j < u.dim) u.at(i, j) = *pivot > 0 ? static_cast<float>(rest * *pivot) : 0.0F;
    __syncthreads();
  }
}

/// Mean and factor of one query head, a block each. Work on queries goes by unit: a rotary pair, or a component that
/// does not turn.
template <class Q>
class Moments {
 public:
  __device__ Moments(const Task& task, std::int64_t n, double* mean, std::byte* shared, unsigned long long* scratch,
                     double* sums)
      : task_(task),
        e_(task.a.evidence),
        team_(scratch),
        mean_(mean),
        sums_(sums),
        n_(n),
        group_(n / e_.query_heads()),
        head_(e_.rows[n / e_.group].head * e_.group + static_cast<std::int32_t>(n % e_.group)),
        thread_(static_cast<std::int32_t>(threadIdx.x)),
        dim_(e_.dim),
        pairs_(task.a.pairs),
        units_(dim_ - pairs_),
        stride_(round_up(dim_, 4)) {
    const MomentShared parts(dim_);
    z_ = reinterpret_cast<float*>(shared + parts.queries);
    factor_ = task.factors + n * task.factor_bytes();
    u_ = {parts.fits ? reinterpret_cast<float*>(shared + parts.triangle) : reinterpret_cast<float*>(factor_), dim_,
          parts.fits ? 0 : task.padded};
  }

  __device__ void run() {
    Head out{0, 1, 0, false};
    if (task_.given(group_)) {
      const GivenMoments& given = task_.a.moments[group_];
      for (std::int32_t d = thread_; d < dim_; d += kMomentThreads)
        mean_[d] = given.mean[std::int64_t{head_} * dim_ + d];
      if (task_.a.covariance && given.count > 1) {
        out.factor = narrow(turn_given(given) * static_cast<double>(e_.scale) / sqrt(2.0));
        out.rows = dim_;
        out.triangular = true;
      }
      __syncthreads();
    } else {
      const Counted counted = counted_of(task_, group_);
      first_ = counted.first;
      average(counted.count);
      if (task_.a.covariance && counted.count > 1) {
        const std::int32_t exponent = exponent_of(spread(counted.count));
        by_ = ldexpf(1.0F, -exponent);
        out.factor = narrow(ldexp(1.0, exponent) * static_cast<double>(e_.scale) / sqrt(2.0 * counted.count));
        out.triangular = counted.count > dim_;
        out.rows = out.triangular ? dim_ : counted.count;
        if (out.triangular)
          multiply(counted.count);
        else
          copy(counted.count);
      }
    }
    __syncthreads();
    if (out.triangular) {
      factorise(u_, sums_);
      write_factor();
    }
    out.mean_factor = write_mean();
    if (thread_ == 0) task_.heads[n_] = out;
    __syncthreads();
  }

 private:
  __device__ static float narrow(double x) { return x < 1e38 ? static_cast<float>(x) : 1e38F; }
  [[nodiscard]] __device__ RopePair components(std::int32_t unit) const {
    return unit < pairs_ ? rope_pair(task_.a.style, unit, pairs_) : RopePair{unit + pairs_, unit + pairs_};
  }

  /// A unit of the i-th query that counts, before RoPE; a single component gives its second number no meaning.
  [[nodiscard]] __device__ float2 query(std::int32_t i, std::int32_t unit) const {
    const QueryWindow& view = e_.queries[group_];
    const auto* q = reinterpret_cast<const Q*>(view.at(first_ + i, head_));
    const auto [p, s] = components(unit);
    const float2 x{to_float(q[p]), to_float(q[s])};
    if (unit >= pairs_ || !task_.a.post_rope) return x;
    const float2 turn = task_.back[(group_ * task_.backs() + first_ + i - oldest_of(task_, view)) * pairs_ + unit];
    return {x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y};
  }
  [[nodiscard]] __device__ float2 centred(std::int32_t i, std::int32_t unit) const {
    const float2 x = query(i, unit);
    const auto [p, s] = components(unit);
    return {x.x - static_cast<float>(mean_[p]), x.y - static_cast<float>(mean_[s])};
  }
  /// Centred, brought to about 1, and turned to the coming positions.
  [[nodiscard]] __device__ float2 turned(std::int32_t i, std::int32_t unit) const {
    float2 z = centred(i, unit);
    z = {z.x * by_, z.y * by_};
    if (unit >= pairs_) return z;
    const double2 turn = task_.future[group_ * pairs_ + unit];
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
      store(task_, z.x, 2, static_cast<std::int32_t>(p), row_of(i));
      if (unit < pairs_) store(task_, z.y, 2, static_cast<std::int32_t>(s), row_of(i));
    }
    fill(count, true);
  }

  /// Sum of the products of all pairs of components: a thread has up to kTiles tiles of 4 x 4.
  __device__ void multiply(std::int32_t count) {
    constexpr std::int32_t kTiles = 3;
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
          if (i <= j && j < dim_) u_.at(i, j) = sums[t][k];
        }
      }
    }
  }

  /// R C R^T of given moments to the upper triangle, divided by the square of a power of two, which is returned.
  [[nodiscard]] __device__ double turn_given(const GivenMoments& given) {
    const double* second = given.second + std::int64_t{head_} * dim_ * (dim_ + 1) / 2;
    const auto entry = [&](std::int64_t i, std::int64_t j) {
      return i >= j ? second[i * (i + 1) / 2 + j] : second[j * (j + 1) / 2 + i];
    };
    constexpr float kNone = -2000;
    float top = kNone;  // exponents fit a float, the numbers may not
    for (std::int32_t d = thread_; d < dim_; d += kMomentThreads) {
      const double variance = entry(d, d) / static_cast<double>(given.count);
      if (!(variance > 0)) continue;
      int exponent = 0;
      static_cast<void>(frexp(variance, &exponent));
      top = static_cast<float>(exponent) > top ? static_cast<float>(exponent) : top;
    }
    top = team_.largest(top);
    const double scale = top == kNone ? 1.0 : ldexp(1.0, static_cast<int>(ceilf(top / 2))),
                 share = 1.0 / (static_cast<double>(given.count) * scale * scale);
    for (std::int32_t at = thread_; at < units_ * units_; at += kMomentThreads) {
      const std::int32_t p = at / units_, q = at - p * units_;
      if (p > q) continue;
      const bool p_turns = p < pairs_, q_turns = q < pairs_;
      const auto [p0, p1] = components(p);
      const auto [q0, q1] = components(q);
      const double2 one{1, 0}, a = p_turns ? task_.future[group_ * pairs_ + p] : one,
                               b = q_turns ? task_.future[group_ * pairs_ + q] : one;
      double m[2][2] = {{entry(p0, q0) * share, q_turns ? entry(p0, q1) * share : 0},
                        {p_turns ? entry(p1, q0) * share : 0, p_turns && q_turns ? entry(p1, q1) * share : 0}};
#pragma unroll
      for (auto& row : m) {
        const double x = row[0], y = row[1];
        row[0] = x * b.x - y * b.y;
        row[1] = y * b.x + x * b.y;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const double x = m[0][k], y = m[1][k];
        m[0][k] = x * a.x - y * a.y;
        m[1][k] = y * a.x + x * a.y;
      }
      const auto put = [&](std::int64_t i, std::int64_t j, double x) {
        u_.at(static_cast<std::int32_t>(i < j ? i : j), static_cast<std::int32_t>(i < j ? j : i)) =
            static_cast<float>(x);
      };
      put(p0, q0, m[0][0]);
      if (q_turns) put(p0, q1, m[0][1]);
      if (p_turns && p != q) put(p1, q0, m[1][0]);
      if (p_turns && q_turns) put(p1, q1, m[1][1]);
    }
    return scale;
  }

  [[nodiscard]] __device__ std::byte* row_of(std::int32_t i) const {
    return factor_ + std::int64_t{i} * task_.padded * 4;
  }

  /// The triangle as rows; where it lies in their place, each is read before it is written.
  __device__ void write_factor() {
    for (std::int32_t i = 0; i < dim_; ++i) {
      const std::int32_t d = thread_;
      const float x = d >= i && d < dim_ ? u_.at(i, d) : 0.0F;
      if (u_.stride > 0) __syncthreads();
      if (d < task_.padded) store(task_, x, 2, d, row_of(i));
    }
    fill(dim_, false);
  }

  /// Zeros behind the components of `count` rows, unless they are there, and in the rows up to a whole panel.
  __device__ void fill(std::int32_t count, bool behind) {
    const std::int32_t past = task_.padded - dim_;
    if (behind)
      for (std::int32_t at = thread_; at < count * past; at += kMomentThreads)
        store(task_, 0, 2, dim_ + at % past, row_of(at / past));
    const std::int32_t all = round_up(count, kPanelRows) - count;
    for (std::int32_t at = thread_; at < all * task_.padded; at += kMomentThreads)
      reinterpret_cast<float*>(row_of(count))[at] = 0;
  }

  /// The turned mean times the softmax scale. Gives what its products are multiplied with.
  [[nodiscard]] __device__ float write_mean() {
    for (std::int32_t f = thread_; f < pairs_; f += kMomentThreads) {
      const auto [p, s] = components(f);
      const double2 turn = task_.future[group_ * pairs_ + f];
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

  const Task& task_;
  const EvidenceArguments& e_;
  BlockTeam team_;
  double *mean_, *sums_;
  std::int64_t n_, group_;
  std::int32_t head_, thread_, dim_, pairs_, units_, stride_, first_ = 0;
  float by_ = 1;
  float* z_;
  std::byte* factor_;
  Triangle u_;
};

template <class Q>
__global__ void __launch_bounds__(kMomentThreads, 2) moments_kernel(Task task) {
  __shared__ unsigned long long scratch[kBlockScratch];
  __shared__ double mean[256], sums[2 * kMomentThreads];
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} * e.group; n += gridDim.x) {
    const std::int64_t r = n / e.group;
    if (!e.due(r) || e.rows[r].length <= task.a.sink) continue;
    const std::int64_t group = r / e.kv_heads;
    if (task.given(group) ? task.a.moments[group].count > 0 : counted_of(task, group).count > 0)
      Moments<Q>(task, n, mean, dynamic_shared(), scratch, sums).run();
    else if (threadIdx.x == 0)
      task.heads[n].rows = kUnseen;
  }
}

/// x of a slot from the two products of its key, both held inside f32. A NaN of `square` alone is one that left f32.
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
__device__ void each_expected_chunk(const Task& task, Body&& body) {
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const Row& row = e.rows[r];
    const std::int32_t begin = static_cast<std::int32_t>(work - r * task.chunks) * kExpectedChunk;
    if (begin >= row.length || !is_scored(task, r)) continue;
    body(row, r, begin, row.length - begin < kExpectedChunk ? row.length : begin + kExpectedChunk);
  }
}

/// Maximum and sum of exponentials of the chunk's logits, which this block wrote: a warp a head.
__device__ void summarise(const Task& task, const Row& row, std::int64_t r, std::int32_t begin, std::int32_t end) {
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

struct PlainShared {
  std::size_t keys, panel, lines, bytes;
  std::int32_t stride;  ///< of a key, in floats

  KVKEEP_HD explicit PlainShared(std::int32_t padded) : stride(padded + 4) {
    Parts parts;
    keys = parts.take(sizeof(float) * kPanelSlots * static_cast<std::size_t>(stride));
    panel = parts.take(sizeof(float) * kPanelRows * kPanelStride);
    lines = parts.take(sizeof(float) * kPanelSlots * (kPanelRows + 1));
    bytes = parts.bytes;
  }
};

template <class T>
__global__ void __launch_bounds__(kExpectedThreads, 4) plain_kernel(Task task) {
  const PlainShared parts(task.padded);
  auto* keys = reinterpret_cast<float*>(dynamic_shared() + parts.keys);
  auto* panel = reinterpret_cast<float*>(dynamic_shared() + parts.panel);
  auto* lines = reinterpret_cast<float*>(dynamic_shared() + parts.lines);
  const EvidenceArguments& e = task.a.evidence;
  const PanelPlace place;

  each_expected_chunk(task, [&](const Row& row, std::int64_t r, std::int32_t begin, std::int32_t end) {
    const bool aligned = is_aligned(row.keys);
    for (std::int32_t tile = begin; tile < end; tile += kPanelSlots) {
      __syncthreads();
      stage_as<T, float>(row.keys, aligned, tile, end, kPanelSlots, e.dim, task.padded, keys, parts.stride,
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
          const Head head = task.heads[r * e.group + h];
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
          __syncthreads();  // the lines are there
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

// On matrix units: a warp has 32 slots, and multiplies them with 32 rows of the factor, in two parts, at a time.

constexpr std::int32_t kUnitSlots = kExpectedThreads, kScratchStride = 20;

template <class S>
struct UnitShared {
  std::size_t keys, lines, scratch, scales, bytes;
  std::int32_t stride;  ///< of a key, in elements

  KVKEEP_HD explicit UnitShared(std::int32_t padded) : stride(padded + 8) {
    Parts parts;
    keys = parts.take(sizeof(S) * kUnitSlots * static_cast<std::size_t>(stride));
    lines = parts.take(sizeof(float) * kUnitSlots * kScratchStride);
    scratch = parts.take(sizeof(float) * kExpectedThreads / 32 * 16 * kScratchStride);
    scales = parts.take(sizeof(float) * kUnitSlots);
    bytes = parts.bytes;
  }
};

template <class T>
__global__ void __launch_bounds__(kExpectedThreads, 3) unit_kernel(Task task) {
  using S = MatrixElement<T>;
  using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, S, wmma::row_major>;
  using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, S, wmma::col_major>;
  using Product = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  const UnitShared<S> parts(task.padded);
  auto* keys = reinterpret_cast<S*>(dynamic_shared() + parts.keys);
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
      stage_as<T, S>(row.keys, aligned, tile, end, kUnitSlots, e.dim, task.padded, keys, parts.stride,
                     [](std::int32_t) { return 1.0F; });
      scales[thread] = tile + thread < end ? key_scale<T>(row, tile + thread) : 1.0F;
      __syncthreads();
      if (tile + first >= end) continue;  // for a whole warp
      const S* own = keys + first * parts.stride;
      const auto load_keys = [&](Left* left, std::int32_t d) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wmma::load_matrix_sync(left[i], own + i * 16 * parts.stride + d, static_cast<unsigned>(parts.stride));
      };
      for (std::int32_t h0 = 0; h0 < e.group; h0 += kMeanHeads) {
        {
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
          const Head head = task.heads[r * e.group + h];
          const S* factor = reinterpret_cast<const S*>(task.factors + (r * e.group + h) * task.factor_bytes());
          const std::int32_t stride = 2 * task.padded;
          Product squares[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) wmma::fill_fragment(squares[i], 0.0F);
          for (std::int32_t from = 0; from < head.rows; from += kPanelRows) {
            Product product[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int j = 0; j < 2; ++j) wmma::fill_fragment(product[i][j], 0.0F);
            for (std::int32_t d = head.triangular ? from : 0; d < task.padded; d += 16) {
              Left left[2];
              load_keys(left, d);
#pragma unroll
              for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                  Right right;
                  wmma::load_matrix_sync(right, factor + std::int64_t{from + 16 * j} * stride + part * task.padded + d,
                                         static_cast<unsigned>(stride));
#pragma unroll
                  for (int i = 0; i < 2; ++i) wmma::mma_sync(product[i][j], left[i], right, product[i][j]);
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
#pragma unroll
          for (int i = 0; i < 2; ++i) {  // half a row a lane
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

/// Shares of the heads to scores, eight lanes a slot, and the largest score of the chunk.
template <class V>
__global__ void __launch_bounds__(kKeyThreads, 4) finish_kernel(Task task) {
  __shared__ unsigned long long scratch[kBlockScratch];
  const BlockTeam team(scratch);
  auto* standard = reinterpret_cast<float2*>(
      dynamic_shared());  // [G] what is subtracted from a logit, and the factor of its exponential
  const EvidenceArguments& e = task.a.evidence;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes;
  const auto epsilon = static_cast<float>(task.a.epsilon);
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const Row& row = e.rows[r];
    const std::int32_t begin = static_cast<std::int32_t>(work - r * task.chunks) * kExpectedChunk, length = row.length;
    if (!e.due(r) || begin >= length) continue;
    const std::int32_t end = length - begin < kExpectedChunk ? length : begin + kExpectedChunk;
    float* g = task.a.scores + row.first;
    if (!is_scored(task, r)) {
      for (std::int32_t t = begin + thread; t < end; t += kKeyThreads) g[t] = static_cast<float>(t);
      continue;
    }
    const std::int32_t chunks = (length + kExpectedChunk - 1) / kExpectedChunk;
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
      if (thread % 32 == 0)
        standard[h] = seen.sum > 0 ? float2{seen.top, 1.0F / (seen.sum * static_cast<float>(e.group))} : float2{0, 0};
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
          each_word<V>(row.values, t, task.a.value_dim, aligned, [&](std::int32_t, const float* x) {
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
          for (std::int32_t d = 0; d < task.a.value_dim; ++d)
            wide += static_cast<double>(to_float(value[d])) * static_cast<double>(to_float(value[d]));
          norm = static_cast<float>(sqrt(wide));
        }
        if constexpr (std::is_same_v<V, Fp8>) norm *= fabsf(*reinterpret_cast<const float*>(row.value_scales.at(t)));
        score = (share + epsilon) * norm;
      }
      g[t] = score;
      top = score > top ? score : top;
    }
    top = team.largest(top);
    if (thread == 0) task.tops[r * task.chunks + begin / kExpectedChunk] = top;
    __syncthreads();
  }
}

/// The sinks get the largest score of the others: a warp a row.
__global__ void __launch_bounds__(tuning::kTurnThreads) sinks_kernel(Task task) {
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

/// Where the parts of the workspace lie. Gives its size.
std::int64_t divide(const ExpectedArguments& a, Task& task) {
  const EvidenceArguments& e = a.evidence;
  task.a = a;
  task.padded = round_up(e.dim, 16);
  task.unit = a.matrix_unit && e.keys != Element::f32;
  task.rows = round_up(a.moments != nullptr || a.queries > e.dim ? e.dim : a.queries, kPanelRows);
  task.chunks = (e.longest + kExpectedChunk - 1) / kExpectedChunk;
  const std::int64_t groups = e.count / e.kv_heads, heads = std::int64_t{e.count} * e.group;
  WorkspaceParts parts(a.workspace);
  task.future = parts.take<double2>(groups * a.pairs);
  task.back = parts.take<float2>(groups * task.backs() * a.pairs);
  task.heads = parts.take<Head>(heads);
  task.means = parts.take<std::byte>(e.count * task.mean_bytes());
  task.factors = parts.take<std::byte>(a.covariance ? heads * task.factor_bytes() : 0);
  task.partial = parts.take<float2>(heads * task.chunks);
  task.tops = parts.take<float>(std::int64_t{e.count} * task.chunks);
  task.logits = parts.take<float>(a.slots * e.group);
  return parts.bytes();
}

}  // namespace

std::int64_t expected_workspace_bytes(const ExpectedArguments& arguments) {
  Task task{};
  return divide(arguments, task);
}

void launch_expected(const ExpectedArguments& a, Stream stream) {
  const EvidenceArguments& e = a.evidence;
  check_dim("expected", e.dim);
  if (a.value_norm) check_dim("expected: values", a.value_dim);
  KVKEEP_REQUIRE(a.pairs >= 0 && 2 * a.pairs <= e.dim, "expected: rotary pairs; given ", a.pairs,
                 "; allowed 0 to half of ", e.dim);
  KVKEEP_REQUIRE(a.future >= 1 && a.sink >= 0 && a.queries >= 1, "expected: future ", a.future, ", sink ", a.sink,
                 ", queries ", a.queries, "; allowed from 1, 0 and 1 on");
  KVKEEP_REQUIRE(e.query != Element::fp8_e4m3, "expected: queries can be read as f32, f16 or bf16; given fp8");
  if (e.count == 0 || e.longest == 0) return;
  Task task{};
  divide(a, task);
  const dim3 blocks = blocks_for(std::int64_t{e.count} * task.chunks);
  if (a.pairs > 0)
    launch("expected_turns", turns_kernel,
           {.blocks = blocks_for(std::int64_t{e.count} / e.kv_heads * (task.backs() + 1)),
            .threads = tuning::kTurnThreads},
           stream, task);
  with_element(e.query, [&](auto type) {
    using Q = decltype(type);
    if constexpr (!std::is_same_v<Q, Fp8>)
      launch("expected_moments", moments_kernel<Q>,
             {.blocks = blocks_for(std::int64_t{e.count} * e.group),
              .threads = kMomentThreads,
              .shared_bytes = MomentShared(e.dim).bytes},
             stream, task);
  });
  with_element(e.keys, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>)
      if (task.unit) {
        launch("expected_logits", unit_kernel<T>,
               {.blocks = blocks,
                .threads = kExpectedThreads,
                .shared_bytes = UnitShared<MatrixElement<T>>(task.padded).bytes},
               stream, task);
        return;
      }
    launch("expected_logits", plain_kernel<T>,
           {.blocks = blocks, .threads = kExpectedThreads, .shared_bytes = PlainShared(task.padded).bytes}, stream,
           task);
  });
  with_element(a.value_norm ? a.values : Element::f32, [&](auto type) {
    launch(
        "expected_scores", finish_kernel<decltype(type)>,
        {.blocks = blocks, .threads = kKeyThreads, .shared_bytes = sizeof(float2) * static_cast<std::size_t>(e.group)},
        stream, task);
  });
  if (a.sink > 0)
    launch("expected_sinks", sinks_kernel,
           {.blocks = blocks_for((std::int64_t{e.count} + 3) / 4), .threads = tuning::kTurnThreads}, stream, task);
}

}  // namespace kvkeep::cuda
