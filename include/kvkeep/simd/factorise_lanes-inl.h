// SPDX-License-Identifier: Apache-2.0
// Bodies of factorise_lanes.h, once per instruction set.

#if defined(KVKEEP_FACTORISE_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_FACTORISE_LANES_INL_H
#undef KVKEEP_FACTORISE_LANES_INL_H
#else
#define KVKEEP_FACTORISE_LANES_INL_H
#endif

#include <algorithm>
#include <utility>

#include "kvkeep/core/hd.h"
#include "kvkeep/simd/factorise_lanes.h"
#include "kvkeep/simd/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::factorise_lanes {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<double>;
using V = hn::Vec<D>;
using M = hn::Mask<D>;
inline constexpr std::int64_t kLanes = hn::MaxLanes(D());

inline constexpr double kNothing = 1e-280;  ///< squares at or below this count as 0 in matrices with a trace of order 1
inline constexpr double kRounding = 0x1p-52;
inline constexpr double kClose =
    0x1p-20;  ///< vectors of eigenvalues closer than this share of the trace are not orthogonal by themselves
inline constexpr double kApart = 4 * kRounding;  ///< equal eigenvalues are solved for with shifts this far apart
inline constexpr int kSweeps = 60;               ///< maximum per eigenvalue; two or three are usual
inline constexpr int kSolves =
    3;  ///< of inverse iteration: the second one reaches full precision, the third one is for clusters
inline constexpr int kBlock = 4;  ///< rows, or vectors, that share what they read

HWY_INLINE V At(const double* x, std::int64_t i) { return hn::Load(D(), x + i * kLanes); }
HWY_INLINE void Put(V v, double* x, std::int64_t i) { hn::Store(v, D(), x + i * kLanes); }
HWY_INLINE double* Row(double* triangle, std::int64_t i) { return triangle + i * (i + 1) / 2 * kLanes; }
HWY_INLINE V InverseOrZero(V v) {
  return hn::IfThenElseZero(hn::Gt(v, hn::Set(D(), kNothing)), hn::Div(hn::Set(D(), 1.0), v));
}

KVKEEP_INLINE std::int64_t MatrixLanes() { return kLanes; }

KVKEEP_INLINE void WeightedMean(const double* HWY_RESTRICT rows, std::int64_t length, std::int64_t dim,
                                const double* HWY_RESTRICT weights, double* HWY_RESTRICT mean) {
  const D d;
  std::int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    V sum = hn::Zero(d);
    for (std::int64_t t = 0; t < length; ++t)
      sum = hn::MulAdd(hn::Set(d, weights[t]), hn::LoadU(d, rows + t * dim + j), sum);
    hn::StoreU(sum, d, mean + j);
  }
  for (; j < dim; ++j) {
    double sum = 0;
    for (std::int64_t t = 0; t < length; ++t) sum += product(weights[t], rows[t * dim + j]);
    mean[j] = sum;
  }
}

KVKEEP_INLINE void CentredRows(const double* HWY_RESTRICT rows, std::int64_t count, std::int64_t dim,
                               const double* HWY_RESTRICT mean, double* HWY_RESTRICT out, std::int64_t stride) {
  const D d;
  for (std::int64_t t = 0; t < count; ++t, rows += dim, out += stride) {
    std::int64_t j = 0;
    for (; j + kLanes <= dim; j += kLanes)
      hn::Store(hn::Sub(hn::LoadU(d, rows + j), hn::LoadU(d, mean + j)), d, out + j);
    for (; j < dim; ++j) out[j] = rows[j] - mean[j];
  }
}

KVKEEP_INLINE double SumOfSquares(const double* HWY_RESTRICT x, std::int64_t n) {
  const D d;
  V sums[kBlock];
  for (V& s : sums) s = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kBlock * kLanes <= n; i += kBlock * kLanes)
    for (int b = 0; b < kBlock; ++b) {
      const V v = hn::LoadU(d, x + i + b * kLanes);
      sums[b] = hn::MulAdd(v, v, sums[b]);
    }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
  for (; i < n; ++i) sum += product(x[i], x[i]);
  return sum;
}

KVKEEP_INLINE void RowGram(const double* HWY_RESTRICT rows, std::int64_t n, std::int64_t stride,
                           double* HWY_RESTRICT out) {
  const D d;
  for (std::int64_t i = 0; i < n; i += kBlock)
    for (std::int64_t j = 0; j <= i; j += kBlock) {
      const double *left[kBlock], *right[kBlock];
      for (int b = 0; b < kBlock; ++b)
        left[b] = rows + std::min(i + b, n - 1) * stride, right[b] = rows + std::min(j + b, n - 1) * stride;
      V sums[kBlock][kBlock];
      for (auto& row : sums)
        for (V& s : row) s = hn::Zero(d);
      for (std::int64_t k = 0; k < stride; k += kLanes) {
        V y[kBlock];
        for (int c = 0; c < kBlock; ++c) y[c] = hn::Load(d, right[c] + k);
        for (int b = 0; b < kBlock; ++b) {
          const V x = hn::Load(d, left[b] + k);
          for (int c = 0; c < kBlock; ++c) sums[b][c] = hn::MulAdd(x, y[c], sums[b][c]);
        }
      }
      for (std::int64_t b = 0; b < kBlock && i + b < n; ++b)
        for (std::int64_t c = 0; c < kBlock && j + c <= i + b; ++c)
          out[(i + b) * (i + b + 1) / 2 + j + c] = hn::GetLane(hn::SumOfLanes(d, sums[b][c]));
    }
}

/// kBlock rows and kVectors of columns.
template <int kVectors>
HWY_INLINE void OuterBlock(const Factor& x, std::int64_t i, std::int64_t rows, const double* HWY_RESTRICT y,
                           std::int64_t y_stride, std::int64_t depth, double* HWY_RESTRICT out, std::int64_t out_stride,
                           bool add) {
  const D d;
  const double* left[kBlock];
  for (int b = 0; b < kBlock; ++b) left[b] = x.at + std::min(i + b, rows - 1) * x.stride;
  V sums[kBlock][kVectors];
  for (auto& row : sums)
    for (V& s : row) s = hn::Zero(d);
  for (std::int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int c = 0; c < kVectors; ++c) right[c] = hn::Load(d, y + k * y_stride + c * kLanes);
    for (int b = 0; b < kBlock; ++b) {
      const V of = hn::Set(d, left[b][k * x.step]);
      for (int c = 0; c < kVectors; ++c) sums[b][c] = hn::MulAdd(of, right[c], sums[b][c]);
    }
  }
  for (int b = 0; b < kBlock && i + b < rows; ++b)
    for (int c = 0; c < kVectors; ++c) {
      double* to = out + (i + b) * out_stride + c * kLanes;
      hn::Store(add ? hn::Add(hn::Load(d, to), sums[b][c]) : sums[b][c], d, to);
    }
}

KVKEEP_INLINE void OuterProduct(const Factor& x, const double* y, std::int64_t y_stride, std::int64_t depth,
                                std::int64_t rows, std::int64_t columns, double* out, std::int64_t out_stride,
                                bool add) {
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= columns; j += 4 * kLanes)
    for (std::int64_t i = 0; i < rows; i += kBlock)
      OuterBlock<4>(x, i, rows, y + j, y_stride, depth, out + j, out_stride, add);
  for (; j < columns; j += kLanes)
    for (std::int64_t i = 0; i < rows; i += kBlock)
      OuterBlock<1>(x, i, rows, y + j, y_stride, depth, out + j, out_stride, add);
}

/// Rows `first` to first + kRows of the leading block: A -= u q^T + q u^T, then p = A x restricted to these rows and
/// those before them.
template <int kRows>
HWY_INLINE void UpdateAndMultiply(double* triangle, std::int64_t first, const double* u, const double* q,
                                  const double* x, double* p) {
  double* a[kRows];
  V u_row[kRows], q_row[kRows], x_row[kRows], sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    a[r] = Row(triangle, first + r);
    u_row[r] = At(u, first + r), q_row[r] = At(q, first + r), x_row[r] = At(x, first + r);
    sum[r] = hn::Zero(D());
  }
  for (std::int64_t j = 0; j < first; ++j) {
    const V u_j = At(u, j), q_j = At(q, j), x_j = At(x, j);
    V p_j = At(p, j);
    for (int r = 0; r < kRows; ++r) {
      const V t = hn::NegMulAdd(q_row[r], u_j, hn::NegMulAdd(u_row[r], q_j, At(a[r], j)));
      Put(t, a[r], j);
      sum[r] = hn::MulAdd(t, x_j, sum[r]);
      p_j = hn::MulAdd(t, x_row[r], p_j);
    }
    Put(p_j, p, j);
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c <= r; ++c) {
      const V t = hn::NegMulAdd(q_row[r], u_row[c], hn::NegMulAdd(u_row[r], q_row[c], At(a[r], first + c)));
      Put(t, a[r], first + c);
      sum[r] = hn::MulAdd(t, x_row[c], sum[r]);
      if (c < r) sum[c] = hn::MulAdd(t, x_row[r], sum[c]);
    }
  for (int r = 0; r < kRows; ++r) Put(sum[r], p, first + r);
}

KVKEEP_INLINE void Tridiagonalise(std::int64_t n, const LaneMatrices& a, double* scratch) {
  const D d;
  double *p = scratch, *q = p + n * kLanes, *q_before = q + n * kLanes;
  std::fill_n(q_before, n * kLanes, 0.0);
  const double* u_before = q_before;
  for (std::int64_t i = n - 1; i >= 0; --i) {
    // The update by the previous reflector is not done at once: each row gets it when it is read for this reflector.
    double* u = Row(a.triangle, i);
    const V u_i = At(u_before, i), q_i = At(q_before, i);
    V square = hn::Zero(d);
    for (std::int64_t j = 0; j < i; ++j) {
      const V t = hn::NegMulAdd(q_i, At(u_before, j), hn::NegMulAdd(u_i, At(q_before, j), At(u, j)));
      Put(t, u, j);
      square = hn::MulAdd(t, t, square);
    }
    Put(hn::NegMulAdd(q_i, u_i, hn::NegMulAdd(u_i, q_i, At(u, i))), a.diagonal, i);
    if (i == 0) break;
    const V last = At(u, i - 1), beta = hn::CopySign(hn::Sqrt(square), hn::Neg(last)),
            inverse = InverseOrZero(hn::NegMulAdd(last, beta, square));
    Put(beta, a.beside, i - 1);
    Put(inverse, a.inverse, i);
    Put(hn::Sub(last, beta), u, i - 1);
    std::int64_t row = 0;
    for (; row + kBlock <= i; row += kBlock) UpdateAndMultiply<kBlock>(a.triangle, row, u_before, q_before, u, p);
    for (; row < i; ++row) UpdateAndMultiply<1>(a.triangle, row, u_before, q_before, u, p);
    V dot = hn::Zero(d);
    for (std::int64_t j = 0; j < i; ++j) dot = hn::MulAdd(At(u, j), At(p, j), dot);
    const V share = hn::Mul(hn::Mul(hn::Set(d, 0.5), inverse), hn::Mul(inverse, dot));
    for (std::int64_t j = 0; j < i; ++j) Put(hn::NegMulAdd(share, At(u, j), hn::Mul(inverse, At(p, j))), q, j);
    std::swap(q, q_before);
    u_before = u;
  }
}

/// Sets of matrices that step together, so that the divisions of one overlap with those of the other.
template <int kSets>
HWY_INLINE void Eigenvalues(std::int64_t n, double* const* values, double* const* squares) {
  const D d;
  const V one = hn::Set(d, 1.0), enough = hn::Set(d, kRounding * kRounding), nothing = hn::Set(d, kNothing);
  for (std::int64_t l = 0; l + 1 < n; ++l)
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      M active[kSets];
      bool any = false;
      for (int k = 0; k < kSets; ++k) {
        active[k] = hn::Gt(At(squares[k], l), enough);
        any = any || !hn::AllFalse(d, active[k]);
      }
      if (!any) break;
      V shift[kSets], c[kSets], s[kSets], gamma[kSets], p[kSets];
      for (int k = 0; k < kSets; ++k) {
        const V root = hn::Sqrt(hn::IfThenElse(active[k], At(squares[k], l), one)), top = At(values[k], l);
        const V g = hn::Div(hn::Sub(At(values[k], l + 1), top), hn::Add(root, root));
        shift[k] = hn::Sub(top, hn::Div(root, hn::Add(g, hn::CopySign(hn::Sqrt(hn::MulAdd(g, g, one)), g))));
        c[k] = one;
        s[k] = hn::Zero(d);
        gamma[k] = hn::Sub(At(values[k], n - 1), shift[k]);
        p[k] = hn::Mul(gamma[k], gamma[k]);
      }
      for (std::int64_t i = n - 2; i >= l; --i)
        for (int k = 0; k < kSets; ++k) {
          const V b = At(squares[k], i), before = At(values[k], i);
          const M has_p = hn::Gt(p[k], nothing);
          p[k] = hn::IfThenElseZero(has_p, p[k]);
          const V r = hn::Add(p[k], b);
          if (i != n - 2) Put(hn::IfThenElse(active[k], hn::Mul(s[k], r), At(squares[k], i + 1)), squares[k], i + 1);
          const M has_r = hn::Gt(r, nothing);
          const V inverse = hn::Div(one, hn::IfThenElse(has_r, r, one)),
                  scale = hn::Div(r, hn::IfThenElse(has_p, p[k], one)), c_before = c[k], gamma_before = gamma[k];
          s[k] = hn::Mul(b, inverse);
          c[k] = hn::IfThenElse(has_r, hn::Mul(p[k], inverse), one);
          gamma[k] = hn::NegMulAdd(s[k], gamma_before, hn::Mul(c[k], hn::Sub(before, shift[k])));
          Put(hn::IfThenElse(active[k], hn::Add(gamma_before, hn::Sub(before, gamma[k])), At(values[k], i + 1)),
              values[k], i + 1);
          // gamma^2 / c, and its limit where c is 0
          const V square = hn::Mul(gamma[k], gamma[k]);
          p[k] = hn::IfThenElse(has_p, hn::Mul(square, scale), hn::IfThenElse(has_r, hn::Mul(c_before, b), square));
        }
      for (int k = 0; k < kSets; ++k) {
        Put(hn::IfThenElse(active[k], hn::Mul(s[k], p[k]), At(squares[k], l)), squares[k], l);
        Put(hn::IfThenElse(active[k], hn::Add(shift[k], gamma[k]), At(values[k], l)), values[k], l);
      }
    }
}

KVKEEP_INLINE void TridiagonalEigenvalues(std::int64_t n, std::span<const LaneMatrices> sets, double* const* values,
                                          double* const* squares) {
  for (std::size_t k = 0; k < sets.size(); ++k) {
    std::copy_n(sets[k].diagonal, n * kLanes, values[k]);
    for (std::int64_t i = 0; i + 1 < n; ++i) Put(hn::Mul(At(sets[k].beside, i), At(sets[k].beside, i)), squares[k], i);
  }
  if (sets.size() == 2)
    Eigenvalues<2>(n, values, squares);
  else
    Eigenvalues<1>(n, values, squares);
}

/// T - value I = L D L^T, without row exchanges: where a pivot almost vanishes, the next number of the wanted vector
/// almost vanishes too, and with it the lost accuracy.
struct Elimination {
  double *inverse, *share;  ///< [n, lanes] 1 / D, and L below its diagonal
};

/// kCount of them side by side, so that the divisions of one overlap with those of the other; the same for solutions.
template <int kCount>
HWY_INLINE void Eliminate(std::int64_t n, const LaneMatrices& a, const V* values, const Elimination* lu) {
  const D d;
  const V one = hn::Set(d, 1.0), least = hn::Set(d, kRounding);
  V taken[kCount];
  for (V& t : taken) t = hn::Zero(d);
  for (std::int64_t i = 0; i < n; ++i) {
    const V beside = i + 1 < n ? At(a.beside, i) : hn::Zero(d);
    for (int b = 0; b < kCount; ++b) {
      const V pivot = hn::Sub(hn::Sub(At(a.diagonal, i), values[b]), taken[b]);
      const V inverse = hn::Div(one, hn::CopySign(hn::Max(hn::Abs(pivot), least), pivot)),
              share = hn::Mul(beside, inverse);
      Put(inverse, lu[b].inverse, i);
      Put(share, lu[b].share, i);
      taken[b] = hn::Mul(beside, share);
    }
  }
}

template <int kCount>
HWY_INLINE void Solve(std::int64_t n, const Elimination* lu, double* const* x) {
  V carried[kCount];
  for (int b = 0; b < kCount; ++b) carried[b] = At(x[b], 0);
  for (std::int64_t i = 1; i < n; ++i)
    for (int b = 0; b < kCount; ++b) {
      carried[b] = hn::NegMulAdd(At(lu[b].share, i - 1), carried[b], At(x[b], i));
      Put(carried[b], x[b], i);
    }
  for (V& c : carried) c = hn::Zero(D());
  for (std::int64_t i = n - 1; i >= 0; --i)
    for (int b = 0; b < kCount; ++b) {
      carried[b] = hn::NegMulAdd(At(lu[b].share, i), carried[b], hn::Mul(At(x[b], i), At(lu[b].inverse, i)));
      Put(carried[b], x[b], i);
    }
}

HWY_INLINE V Dot(std::int64_t n, const double* x, const double* y) {
  V sums[2] = {hn::Zero(D()), hn::Zero(D())};
  std::int64_t i = 0;
  for (; i + 2 <= n; i += 2)
    for (int b = 0; b < 2; ++b) sums[b] = hn::MulAdd(At(x, i + b), At(y, i + b), sums[b]);
  if (i < n) sums[0] = hn::MulAdd(At(x, i), At(y, i), sums[0]);
  return hn::Add(sums[0], sums[1]);
}

HWY_INLINE void Normalise(std::int64_t n, double* x) {
  const V scale = hn::Div(hn::Set(D(), 1.0), hn::Sqrt(hn::Max(Dot(n, x, x), hn::Set(D(), kNothing))));
  for (std::int64_t i = 0; i < n; ++i) Put(hn::Mul(At(x, i), scale), x, i);
}

/// Removes from x its part along earlier vectors if their eigenvalues are close.
HWY_INLINE void MakeOrthogonal(std::int64_t n, const double* values, std::int64_t index, double* vectors) {
  const D d;
  double* x = vectors + index * n * kLanes;
  for (std::int64_t j = 0; j < index; ++j) {
    const M close = hn::Lt(hn::Abs(hn::Sub(At(values, j), At(values, index))), hn::Set(d, kClose));
    if (hn::AllFalse(d, close)) continue;
    const double* y = vectors + j * n * kLanes;
    const V share = hn::IfThenElseZero(close, Dot(n, x, y));
    for (std::int64_t i = 0; i < n; ++i) Put(hn::NegMulAdd(share, At(y, i), At(x, i)), x, i);
  }
}

/// Numbers in (-1, 1) without a pattern.
HWY_INLINE void Scatter(std::int64_t n, std::uint32_t seed, double* x) {
  for (std::int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525U + 1013904223U;
    Put(hn::Set(D(), product(static_cast<double>(seed) + 0.5, 0x1p-31) - 1.0), x, i);
  }
}

/// Turns vectors of the tridiagonal matrix into those of the whole matrix: kCount of them go through every reflector,
/// the last one first.
template <int kCount>
HWY_INLINE void Reflect(std::int64_t n, const LaneMatrices& a, double* vectors) {
  double* x[kCount];
  for (int b = 0; b < kCount; ++b) x[b] = vectors + b * n * kLanes;
  for (std::int64_t i = 1; i < n; ++i) {
    const double* u = Row(a.triangle, i);
    V sums[kCount];
    for (V& s : sums) s = hn::Zero(D());
    for (std::int64_t j = 0; j < i; ++j)
      for (int b = 0; b < kCount; ++b) sums[b] = hn::MulAdd(At(u, j), At(x[b], j), sums[b]);
    for (V& s : sums) s = hn::Mul(s, At(a.inverse, i));
    for (std::int64_t j = 0; j < i; ++j)
      for (int b = 0; b < kCount; ++b) Put(hn::NegMulAdd(sums[b], At(u, j), At(x[b], j)), x[b], j);
  }
}

/// Vectors `first` to first + kCount of the tridiagonal matrix. `shift`: that of the previous vector.
template <int kCount>
HWY_INLINE void Iterate(std::int64_t n, const LaneMatrices& a, const double* values, std::int64_t first, V& shift,
                        double* vectors, double* scratch) {
  const std::int64_t size = n * kLanes;
  Elimination lu[kCount];
  double* x[kCount];
  V shifts[kCount];
  for (int b = 0; b < kCount; ++b) {
    lu[b] = {scratch + 2 * b * size, scratch + (2 * b + 1) * size};
    x[b] = vectors + (first + b) * size;
    Scatter(n, static_cast<std::uint32_t>(first + b), x[b]);
    // Never closer to the previous value than to its own: the previous vector would drown the new one.
    shifts[b] = shift = hn::Min(At(values, first + b), hn::Sub(shift, hn::Set(D(), kApart)));
  }
  Eliminate<kCount>(n, a, shifts, lu);
  for (int k = 0; k < kSolves; ++k) {
    Solve<kCount>(n, lu, x);
    for (int b = 0; b < kCount; ++b) {
      Normalise(n, x[b]);
      MakeOrthogonal(n, values, first + b, vectors);
      Normalise(n, x[b]);
    }
  }
  for (int b = 0; b < kCount; ++b) {
    MakeOrthogonal(n, values, first + b, vectors);
    Normalise(n, x[b]);
  }
}

KVKEEP_INLINE void Eigenvectors(std::int64_t n, const LaneMatrices& a, const double* values, std::int64_t count,
                                double* vectors, double* scratch) {
  V shift = hn::Set(D(), 4.0);  // above every eigenvalue of a matrix with a trace of order 1
  std::int64_t j = 0;
  for (; j + 2 <= count; j += 2) Iterate<2>(n, a, values, j, shift, vectors, scratch);
  if (j < count) Iterate<1>(n, a, values, j, shift, vectors, scratch);
  j = 0;
  for (; j + kBlock <= count; j += kBlock) Reflect<kBlock>(n, a, vectors + j * n * kLanes);
  for (; j < count; ++j) Reflect<1>(n, a, vectors + j * n * kLanes);
}

KVKEEP_INLINE void BlendLanes(const double* mask, const double* from, std::int64_t n, double* to) {
  const M marked = hn::Ne(At(mask, 0), hn::Zero(D()));
  for (std::int64_t i = 0; i < n; ++i) Put(hn::IfThenElse(marked, At(from, i), At(to, i)), to, i);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::factorise_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using factorise_lanes::BlendLanes;
using factorise_lanes::CentredRows;
using factorise_lanes::Eigenvectors;
using factorise_lanes::MatrixLanes;
using factorise_lanes::OuterProduct;
using factorise_lanes::RowGram;
using factorise_lanes::SumOfSquares;
using factorise_lanes::TridiagonalEigenvalues;
using factorise_lanes::Tridiagonalise;
using factorise_lanes::WeightedMean;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(MatrixLanes);
HWY_EXPORT(WeightedMean);
HWY_EXPORT(CentredRows);
HWY_EXPORT(SumOfSquares);
HWY_EXPORT(RowGram);
HWY_EXPORT(OuterProduct);
HWY_EXPORT(Tridiagonalise);
HWY_EXPORT(TridiagonalEigenvalues);
HWY_EXPORT(Eigenvectors);
HWY_EXPORT(BlendLanes);
#endif

KVKEEP_INLINE std::int64_t matrix_lanes() { return KVKEEP_DISPATCH(MatrixLanes)(); }
KVKEEP_INLINE void weighted_mean(const double* rows, std::int64_t length, std::int64_t dim, const double* weights,
                                 double* mean) {
  KVKEEP_DISPATCH(WeightedMean)(rows, length, dim, weights, mean);
}
KVKEEP_INLINE void centred_rows(const double* rows, std::int64_t count, std::int64_t dim, const double* mean,
                                double* out, std::int64_t stride) {
  KVKEEP_DISPATCH(CentredRows)(rows, count, dim, mean, out, stride);
}
KVKEEP_INLINE double sum_of_squares(const double* x, std::int64_t n) { return KVKEEP_DISPATCH(SumOfSquares)(x, n); }
KVKEEP_INLINE void row_gram(const double* rows, std::int64_t n, std::int64_t stride, double* out) {
  KVKEEP_DISPATCH(RowGram)(rows, n, stride, out);
}
KVKEEP_INLINE void outer_product(const Factor& x, const double* y, std::int64_t y_stride, std::int64_t depth,
                                 std::int64_t rows, std::int64_t columns, double* out, std::int64_t out_stride,
                                 bool add) {
  KVKEEP_DISPATCH(OuterProduct)(x, y, y_stride, depth, rows, columns, out, out_stride, add);
}
KVKEEP_INLINE void tridiagonalise(std::int64_t n, const LaneMatrices& a, double* scratch) {
  KVKEEP_DISPATCH(Tridiagonalise)(n, a, scratch);
}
KVKEEP_INLINE void tridiagonal_eigenvalues(std::int64_t n, std::span<const LaneMatrices> sets, double* const* values,
                                           double* const* squares) {
  KVKEEP_DISPATCH(TridiagonalEigenvalues)(n, sets, values, squares);
}
KVKEEP_INLINE void eigenvectors(std::int64_t n, const LaneMatrices& a, const double* values, std::int64_t count,
                                double* vectors, double* scratch) {
  KVKEEP_DISPATCH(Eigenvectors)(n, a, values, count, vectors, scratch);
}
KVKEEP_INLINE void blend_lanes(const double* mask, const double* from, std::int64_t n, double* to) {
  KVKEEP_DISPATCH(BlendLanes)(mask, from, n, to);
}

}  // namespace kvkeep::cpu
#endif

#endif
