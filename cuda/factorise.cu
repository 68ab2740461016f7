// SPDX-License-Identifier: Apache-2.0
#include "factorise.h"

#include <algorithm>
#include <cmath>

#include "element.cuh"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kFactorDepth;
using tuning::kFactorThreads;

constexpr std::int32_t kMostWidth = 128;
constexpr std::int32_t kTile = 4;  ///< a thread forms kTile x kTile numbers of a Gram matrix
constexpr std::int32_t kMostSweeps = 16;
constexpr float kNegligible = 3e-8F;  ///< share of the trace below which a number off the diagonal is left there

KVKEEP_HD inline std::int32_t padded(std::int32_t m) { return (m + kTile - 1) / kTile * kTile; }

/// Shared memory of a block for matrices of up to `m` on their shorter side.
struct FactorShared {
  KVKEEP_HD FactorShared(std::int32_t m, std::int32_t dim, std::int64_t gate_numbers) {
    const auto wide = static_cast<std::size_t>(padded(m)), depth = static_cast<std::size_t>(kFactorDepth);
    static_cast<void>(parts.take(sizeof(float) * static_cast<std::size_t>(gate_numbers)));  // at 0
    gram = parts.take(sizeof(float) * wide * (wide + 1));
    axes = parts.take(sizeof(float) * (wide > depth ? wide : depth) * (wide + 1));
    mean = parts.take(sizeof(float) * static_cast<std::size_t>(dim));
    squares = parts.take(sizeof(float) * wide);
    plain = parts.take(sizeof(float) * wide);
    order = parts.take(sizeof(std::int32_t) * wide);
    turns = parts.take(sizeof(float) * 2 * wide);
  }
  Parts parts;
  std::size_t gram, axes, mean, squares, plain, order, turns;
};

__device__ void put_number(float x, Element element, std::byte* to, std::int64_t i) {
  if (element == Element::f16)
    from_float(x, reinterpret_cast<__half*>(to)[i]);
  else if (element == Element::bf16)
    from_float(x, reinterpret_cast<__nv_bfloat16*>(to)[i]);
  else
    reinterpret_cast<float*>(to)[i] = x;
}

/// One matrix, and the block that works on it. kGated: by Rank::gates.
template <class T, bool kGated>
class Factorising {
 public:
  __device__ Factorising(const FactoriseArguments& a, const RowMatrix& matrix, const FactorShared& at, double* scratch)
      : a_(a),
        matrix_(matrix),
        gram_(shared<float>(at.gram)),
        axes_(shared<float>(at.axes)),
        mean_(shared<float>(at.mean)),
        squares_(shared<float>(at.squares)),
        plain_(shared<float>(at.plain)),
        turns_(shared<float>(at.turns)),
        order_(shared<std::int32_t>(at.order)),
        scratch_(scratch),
        thread_(static_cast<std::int32_t>(threadIdx.x)),
        size_(static_cast<std::int32_t>(blockDim.x)),
        length_(matrix.length),
        dim_(a.dim),
        by_rows_(matrix.length > a.dim),
        m_(by_rows_ ? a.dim : matrix.length),
        deep_(by_rows_ ? matrix.length : a.dim),
        wide_(padded(m_)),
        stride_(wide_ + 1) {}

  __device__ void run(FactorsFound& found, std::byte* coarse) {
    if (!weigh(coarse)) {
      if (thread_ == 0) found = {0, false, false, false};
      return;
    }
    const std::int32_t rank = choose();
    const bool raw = a_.options.stores_rows(rank, length_, dim_);
    if (thread_ == 0) found = {rank, raw, centred_, true};
    if (raw)
      write_rows();
    else
      write_factors(rank);
  }

 private:
  template <class U>
  [[nodiscard]] __device__ static U* shared(std::size_t at) {
    return reinterpret_cast<U*>(dynamic_shared() + at);
  }
  [[nodiscard]] __device__ float plain_number(std::int32_t t, std::int32_t d) const {
    return to_float(reinterpret_cast<const T*>(matrix_.rows.at(matrix_.slots == nullptr ? t : matrix_.slots[t]))[d]);
  }
  /// The number that is factorised: centred or not, scaled to the order of 1.
  [[nodiscard]] __device__ float number(std::int32_t t, std::int32_t d) const {
    const float x = plain_number(t, d);
    return (centred_ ? x - mean_[d] : x) * unit_;
  }

  /// Finds the mean and the size of the rows. False if they are not finite.
  __device__ bool weigh(std::byte* coarse) {
    double mine = 0;
    for (std::int32_t d = thread_; d < dim_; d += size_) {
      double mean = 0;
      for (std::int32_t t = 0; t < length_; ++t) {
        const auto x = static_cast<double>(plain_number(t, d));
        mean += (matrix_.weights == nullptr ? 1.0 / length_ : static_cast<double>(matrix_.weights[t])) * x;
        mine += x * x;
      }
      mean_[d] = static_cast<float>(mean);
      if (kGated && a_.gates.of_keys) key_mean()[d] = mean_[d];
      put_number(mean_[d], a_.store, coarse, d);
    }
    all_squares_ = sum_of_block(mine, scratch_, size_ / 32);
    if (!(all_squares_ - all_squares_ == 0)) return false;
    int exponent = 0;
    static_cast<void>(frexp(sqrt(all_squares_), &exponent));
    exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
    unit_ = all_squares_ > 0 ? ldexpf(1.0F, -exponent) : 1.0F;
    return true;
  }

  /// Chooses form and rank; axes and squares are then set.
  __device__ std::int32_t choose() {
    using Centred = FactorOptions::Centred;
    const bool automatic = a_.options.centred == Centred::automatic, both = automatic && !kGated;
    if (both) {
      centred_ = false;
      decompose();
      for (std::int32_t i = thread_; i < m_; i += size_) plain_[i] = squares_[i];
    }
    centred_ = a_.options.centred != Centred::never && !(automatic && kGated);
    decompose();
    const double noise = kRoundingNoise * all_squares_ * static_cast<double>(unit_) * static_cast<double>(unit_);
    const std::int32_t rank = squares_from(squares_, 0, m_) <= noise ? 0 : rank_of(squares_, m_, a_.options);
    if constexpr (kGated) return rank == 0 ? 0 : keep_by_gates(rank);
    if (!both || !plain_is_better(plain_, squares_, rank, m_)) return rank;
    __syncthreads();  // every thread has decided before the squares change
    centred_ = false;
    decompose();
    return rank_of(squares_, m_, a_.options);
  }

  /// [D] of the matrix's span.
  [[nodiscard]] __device__ float* key_mean() const { return a_.gates.key_means + std::int64_t{blockIdx.x} * dim_; }

  /// Of the largest components, order_ has then those that stay, and plain_ their weights. Returns how many.
  __device__ std::int32_t keep_by_gates(std::int32_t shown) {
    constexpr double kTiny = 1e-8;
    const GateLayer* layers = a_.gates.layers;
    const std::int32_t spectrum = layers[2].outputs;
    const float* keys = key_mean();
    float *x = shared<float>(0), *hidden = x + layers[0].inputs, *next = hidden + layers[0].outputs,
          *gates = next + layers[1].outputs;
    double mine = 0;
    for (std::int32_t d = thread_; d < dim_; d += size_)
      mine += static_cast<double>(keys[d]) * static_cast<double>(keys[d]);
    const double length = sqrt(sum_of_block(mine, scratch_, size_ / 32)), key = length > kTiny ? length : kTiny,
                 unit = static_cast<double>(unit_), largest = sqrt(static_cast<double>(squares_[0])) / unit + kTiny;
    for (std::int32_t i = thread_; i < spectrum; i += size_)
      x[i] = i < shown ? static_cast<float>(sqrt(static_cast<double>(squares_[i])) / unit / largest) : 0.0F;
    for (std::int32_t d = thread_; d < dim_; d += size_)
      x[spectrum + d] = static_cast<float>(static_cast<double>(keys[d]) / key);
    gate_layer(layers[0], x, hidden, false);
    gate_layer(layers[1], hidden, next, false);
    gate_layer(layers[2], next, gates, true);
    __syncthreads();
    if (thread_ == 0) {
      std::int32_t kept = 0;
      for (std::int32_t i = 0; i < shown; ++i) {
        if (!a_.options.keeps(static_cast<double>(gates[i]))) continue;
        order_[kept] = order_[i];
        plain_[kept++] = a_.options.soft_gates ? gates[i] : 1.0F;
      }
      scratch_[0] = kept;
    }
    __syncthreads();
    return static_cast<std::int32_t>(scratch_[0]);
  }

  /// One warp per output.
  __device__ void gate_layer(const GateLayer& layer, const float* in, float* out, bool last) const {
    __syncthreads();
    for (std::int32_t o = thread_ / 32; o < layer.outputs; o += size_ / 32) {
      const float* weights = layer.weights + std::int64_t{o} * layer.inputs;
      double sum = 0;
      for (std::int32_t i = thread_ % 32; i < layer.inputs; i += 32)
        sum += static_cast<double>(weights[i]) * static_cast<double>(in[i]);
      sum = sum_of_warp(sum) + static_cast<double>(layer.biases[o]);
      if (thread_ % 32 == 0) out[o] = static_cast<float>(gate_unit(sum, last));
    }
  }

  __device__ void decompose() {
    form_gram();
    diagonalise();
    sort();
  }

  /// Products of the vectors of the shorter side, kFactorDepth of their numbers at a time; zeros after m_.
  __device__ void form_gram() {
    float* stage = axes_;  // [kFactorDepth][stride_]
    const std::int32_t tiles = wide_ / kTile;
    for (std::int32_t begin = 0; begin < deep_; begin += kFactorDepth) {
      const std::int32_t depth = deep_ - begin < kFactorDepth ? deep_ - begin : kFactorDepth;
      __syncthreads();
      for (std::int32_t n = thread_; n < wide_ * kFactorDepth; n += size_) {  // neighbours read neighbours
        const std::int32_t i = by_rows_ ? n % wide_ : n / kFactorDepth, k = by_rows_ ? n / wide_ : n % kFactorDepth;
        stage[k * stride_ + i] = i < m_ && k < depth ? by_rows_ ? number(begin + k, i) : number(i, begin + k) : 0.0F;
      }
      __syncthreads();
      for (std::int32_t tile = thread_; tile < tiles * tiles; tile += size_) {
        const std::int32_t i0 = tile / tiles * kTile, j0 = tile % tiles * kTile;
        if (j0 > i0) continue;
        float sums[kTile][kTile] = {};
        for (std::int32_t k = 0; k < depth; ++k) {
          float x[kTile], y[kTile];
#pragma unroll
          for (int e = 0; e < kTile; ++e) x[e] = stage[k * stride_ + i0 + e], y[e] = stage[k * stride_ + j0 + e];
#pragma unroll
          for (int i = 0; i < kTile; ++i)
#pragma unroll
            for (int j = 0; j < kTile; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i)
#pragma unroll
          for (int j = 0; j < kTile; ++j) {
            float& to = gram_[(i0 + i) * stride_ + j0 + j];
            to = begin == 0 ? sums[i][j] : to + sums[i][j];
          }
      }
    }
    __syncthreads();
    for (std::int32_t n = thread_; n < wide_ * wide_; n += size_) {
      const std::int32_t i = n / wide_, j = n - i * wide_;
      if (j > i) gram_[i * stride_ + j] = gram_[j * stride_ + i];
      axes_[i * stride_ + j] = i == j ? 1.0F : 0.0F;
    }
    __syncthreads();
  }

  /// Two indices that are turned together; with `players` of them, round by round, each meets each other once per
  /// sweep.
  struct Pair {
    std::int32_t p, q;
    __device__ Pair(std::int32_t k, std::int32_t round, std::int32_t players) {
      const std::int32_t others = players - 1, x = k == 0 ? others : (round + k) % others,
                         y = (round - k + others) % others;
      p = x < y ? x : y;
      q = x < y ? y : x;
    }
  };

  /// Turns the Gram matrix until it is diagonal; the axes, one per row, follow.
  __device__ void diagonalise() {
    const std::int32_t players = (m_ + 1) / 2 * 2, pairs = players / 2;
    float trace = 0;
    for (std::int32_t i = 0; i < m_; ++i) trace += gram_[i * stride_ + i];
    const float negligible = kNegligible * trace;
    if (!(trace > 0)) return;  // for the whole block
    for (std::int32_t sweep = 0; sweep < kMostSweeps; ++sweep) {
      bool turned = false;
      for (std::int32_t round = 0; round < players - 1; ++round) {
        __syncthreads();
        for (std::int32_t k = thread_; k < pairs; k += size_)
          turned = find_turn(Pair(k, round, players), k, negligible) || turned;
        __syncthreads();
        for (std::int32_t n = thread_; n < pairs * pairs; n += size_) {
          const std::int32_t k = n / pairs, l = n - k * pairs;
          if (l <= k) turn_block(Pair(k, round, players), Pair(l, round, players), k, l);
        }
        for (std::int32_t n = thread_; n < pairs * m_; n += size_) {
          const std::int32_t k = n / m_, i = n - k * m_;
          if (turns_[2 * k + 1] == 0) continue;
          const Pair pair(k, round, players);
          turn(turns_[2 * k], turns_[2 * k + 1], axes_[pair.p * stride_ + i], axes_[pair.q * stride_ + i]);
        }
      }
      if (__syncthreads_or(turned ? 1 : 0) == 0) return;
    }
  }

  /// Finds the cosine and sine that bring the number of a pair to 0. True if it was not there yet.
  __device__ bool find_turn(const Pair& pair, std::int32_t k, float negligible) {
    const float beside = gram_[pair.p * stride_ + pair.q];
    turns_[2 * k] = 1;
    turns_[2 * k + 1] = 0;
    if (!(fabsf(beside) > negligible)) return false;
    const float slope = (gram_[pair.q * stride_ + pair.q] - gram_[pair.p * stride_ + pair.p]) / (2 * beside);
    const float tangent = copysignf(1.0F / (fabsf(slope) + sqrtf(fmaf(slope, slope, 1.0F))), slope);
    const float cosine = 1.0F / sqrtf(fmaf(tangent, tangent, 1.0F));
    turns_[2 * k] = cosine;
    turns_[2 * k + 1] = tangent * cosine;
    return true;
  }

  __device__ static void turn(float cosine, float sine, float& p, float& q) {
    const float x = p, y = q;
    p = fmaf(cosine, x, -(sine * y));
    q = fmaf(sine, x, cosine * y);
  }

  /// The four numbers where rows of pair k meet columns of pair l, from both sides, and their mirror.
  __device__ void turn_block(const Pair& rows, const Pair& columns, std::int32_t k, std::int32_t l) {
    const float c = turns_[2 * k], s = turns_[2 * k + 1], e = turns_[2 * l], f = turns_[2 * l + 1];
    if (s == 0 && f == 0) return;
    float* at[2][2] = {{&gram_[rows.p * stride_ + columns.p], &gram_[rows.p * stride_ + columns.q]},
                       {&gram_[rows.q * stride_ + columns.p], &gram_[rows.q * stride_ + columns.q]}};
    float x[2][2] = {{*at[0][0], *at[0][1]}, {*at[1][0], *at[1][1]}};
    if (k == l) {
      const float step = s / c * x[0][1];
      *at[0][0] = x[0][0] - step;
      *at[1][1] = x[1][1] + step;
      *at[0][1] = *at[1][0] = 0;
      return;
    }
    turn(c, s, x[0][0], x[1][0]);
    turn(c, s, x[0][1], x[1][1]);
    turn(e, f, x[0][0], x[0][1]);
    turn(e, f, x[1][0], x[1][1]);
    *at[0][0] = gram_[columns.p * stride_ + rows.p] = x[0][0];
    *at[0][1] = gram_[columns.q * stride_ + rows.p] = x[0][1];
    *at[1][0] = gram_[columns.p * stride_ + rows.q] = x[1][0];
    *at[1][1] = gram_[columns.q * stride_ + rows.q] = x[1][1];
  }

  /// squares_ and order_: the diagonal, largest first, the lower index first if equal.
  __device__ void sort() {
    __syncthreads();
    for (std::int32_t i = thread_; i < m_; i += size_) {
      const float own = gram_[i * stride_ + i];
      std::int32_t place = 0;
      for (std::int32_t j = 0; j < m_; ++j) {
        const float other = gram_[j * stride_ + j];
        place += other > own || (other == own && j < i) ? 1 : 0;
      }
      order_[place] = i;
      squares_[place] = own > 0 ? own : 0.0F;  // rounding may make it negative
    }
    __syncthreads();
  }

  __device__ void write_rows() {
    for (std::int64_t n = thread_; n < std::int64_t{length_} * dim_; n += size_) {
      const auto t = static_cast<std::int32_t>(n / dim_);
      put_number(plain_number(t, static_cast<std::int32_t>(n - std::int64_t{t} * dim_)), a_.store, a_.factors,
                 matrix_.offset + n);
    }
  }

  /// Number i of the rows' projection onto an axis.
  [[nodiscard]] __device__ float projection(const float* axis, std::int32_t i) const {
    float sum = 0;
    for (std::int32_t k = 0; k < m_; ++k) sum = fmaf(axis[k], by_rows_ ? number(i, k) : number(k, i), sum);
    return sum;
  }

  /// A = U sqrt(w s), B = sqrt(w s) V^T: one warp per component. The scale of a component is taken from the projection,
  /// so that small ones are as exact as large ones.
  __device__ void write_factors(std::int32_t rank) {
    const std::int32_t lane = thread_ % 32;
    const std::int64_t right = matrix_.offset + std::int64_t{length_} * rank;
    for (std::int32_t j = thread_ / 32; j < rank; j += size_ / 32) {
      const float* axis = axes_ + order_[j] * stride_;
      double square = 0;
      for (std::int32_t i = lane; i < deep_; i += 32) {
        const auto x = static_cast<double>(projection(axis, i));
        square += x * x;
      }
      square = sum_of_warp(square);
      const double size = sqrt(square), unit = static_cast<double>(unit_), of_axis = sqrt(size / unit),
                   of_projection = size > 0 ? 1 / sqrt(size * unit) : 0,
                   weight = kGated ? sqrt(static_cast<double>(plain_[j])) : 1.0;
      const auto put = [&](bool left, std::int32_t i, double x) {
        put_number(static_cast<float>(x), a_.store, a_.factors,
                   left ? matrix_.offset + std::int64_t{i} * rank + j : right + std::int64_t{j} * dim_ + i);
      };
      for (std::int32_t i = lane; i < m_; i += 32) put(!by_rows_, i, weight * of_axis * static_cast<double>(axis[i]));
      for (std::int32_t i = lane; i < deep_; i += 32)
        put(by_rows_, i, weight * of_projection * static_cast<double>(projection(axis, i)));
    }
  }

  const FactoriseArguments& a_;
  const RowMatrix& matrix_;
  float *gram_, *axes_, *mean_, *squares_, *plain_, *turns_;
  std::int32_t* order_;
  double* scratch_;
  std::int32_t thread_, size_;  ///< of the thread in its block
  std::int32_t length_, dim_;
  bool by_rows_;  ///< axes are directions of rows [D], else of columns [L]
  std::int32_t m_, deep_, wide_, stride_;
  double all_squares_ = 0;
  float unit_ = 1;
  bool centred_ = false;
};

/// Gates take registers; without them three blocks fit a multiprocessor.
template <class T, bool kGated>
__global__ void __launch_bounds__(kFactorThreads, kGated ? 2 : 3)
    factorise_kernel(FactoriseArguments a, std::int32_t width) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(double, scratch, kFactorThreads / 32);
  const RowMatrix& matrix = a.matrices[blockIdx.x];
  if (matrix.length == 0) return;
  const std::int64_t coarse = std::int64_t{blockIdx.x} * a.dim * (a.store == Element::f32 ? 4 : 2);
  const FactorShared at(width, a.dim, kGated ? a.gates.numbers() : 0);
  Factorising<T, kGated>(a, matrix, at, scratch).run(a.found[blockIdx.x], a.coarse + coarse);
}

std::int32_t threads_of(std::int32_t width) {
  return width <= 16 ? 32 : width <= 32 ? 64 : width <= 64 ? 128 : kFactorThreads;
}

}  // namespace

std::int64_t factor_numbers(std::int64_t length, std::int64_t dim, const FactorOptions& options) {
  const std::int64_t factors = std::min<std::int64_t>({options.max_rank, length, dim}) * (length + dim);
  return options.raw ? std::min(factors, length * dim) : factors;
}

std::size_t factorise_shared_bytes(std::int32_t longest, std::int32_t dim, std::int64_t gate_numbers) {
  return FactorShared(std::min(longest, dim), dim, gate_numbers).parts.bytes;
}

void launch_factorise(const FactoriseArguments& a, Stream stream) {
  check_dim("factorise", a.dim);
  const FactorOptions& o = a.options;
  KVKEEP_REQUIRE(a.count >= 0 && a.longest >= 0, "factorise: ", a.count, " matrices of ", a.longest,
                 " rows; allowed 0 or more");
  KVKEEP_REQUIRE(o.max_rank >= 1, "factorise: max_rank; given ", o.max_rank, "; allowed 1 or more");
  const bool gated = o.rank == FactorOptions::Rank::gates;
  KVKEEP_REQUIRE(gated ? a.gates.layers[2].outputs == o.max_rank && a.gates.layers[0].inputs == o.max_rank + a.dim &&
                             a.gates.key_means != nullptr
                       : a.gates.numbers() == 0,
                 "factorise: gates for ", a.gates.layers[2].outputs, " components and ", a.gates.layers[0].inputs,
                 " numbers; allowed ", gated ? o.max_rank : 0, " and ", gated ? o.max_rank + a.dim : 0);
  KVKEEP_REQUIRE(o.energy >= 0 && o.energy <= 1, "factorise: energy; given ", o.energy, "; allowed 0 to 1");
  check_wide("factorise", "matrices", a.element);
  check_wide("factorise", "factors", a.store);
  const std::int32_t width = std::min(a.longest, a.dim);
  KVKEEP_REQUIRE_AS(Unsupported, width <= kMostWidth, "factorise: rows of ", a.dim, " numbers in spans of ", a.longest,
                    "; allowed ", kMostWidth, " of one of them on a GPU");
  if (width == 0) return;
  with_wide_element(a.element, [&](auto element) {
    launch("factorise", gated ? factorise_kernel<decltype(element), true> : factorise_kernel<decltype(element), false>,
           {.blocks = blocks_for(a.count),
            .threads = threads_of(width),
            .shared_bytes = factorise_shared_bytes(a.longest, a.dim, a.gates.numbers())},
           stream, a, width);
  });
}

}  // namespace kvkeep::cuda
