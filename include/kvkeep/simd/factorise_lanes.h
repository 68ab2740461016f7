// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Eigenvalues and eigenvectors of small symmetric matrices, one matrix per lane, and the
/// dense products around them. All numbers are f64. A lane's result depends on its own matrix alone: lanes that are
/// done wait unchanged. If a size is followed by `lanes`, number i of lane l is at [i * matrix_lanes() + l].

#include <cstdint>
#include <span>

namespace kvkeep::cpu {

/// Matrices that are worked on together; the row length of padded matrices is a multiple of it.
[[nodiscard]] std::int64_t matrix_lanes();

/// mean[d] = sum over t of weights[t] * rows[t, d].
void weighted_mean(const double* rows, std::int64_t length, std::int64_t dim, const double* weights, double* mean);
/// out[t, d] = rows[t, d] - mean[d]. rows: [count, dim], out: [count, stride], stride a multiple of matrix_lanes();
/// nothing is written past the first dim numbers of a row.
void centred_rows(const double* rows, std::int64_t count, std::int64_t dim, const double* mean, double* out,
                  std::int64_t stride);
[[nodiscard]] double sum_of_squares(const double* x, std::int64_t n);

/// out[i, j] = dot of rows i and j, lower triangle by rows. rows: [n, stride], stride a multiple of matrix_lanes().
void row_gram(const double* rows, std::int64_t n, std::int64_t stride, double* out);

/// One side of a product; element (k, i) is at [k * step + i * stride].
struct Factor {
  const double* at;
  std::int64_t step, stride;
};
/// out[i, j] (+)= sum over k < depth of x(k, i) * y[k, j], for i < rows and j < columns. y: [depth, y_stride], out:
/// [rows, out_stride]; columns a multiple of matrix_lanes().
void outer_product(const Factor& x, const double* y, std::int64_t y_stride, std::int64_t depth, std::int64_t rows,
                   std::int64_t columns, double* out, std::int64_t out_stride, bool add);

/// Symmetric matrices of n rows, on the way to tridiagonal form.
struct LaneMatrices {
  double* triangle;  ///< [n (n + 1) / 2, lanes] lower triangle by rows; then row i holds the first i numbers of a
                     ///< reflector I - inverse[i] u u^T
  double* diagonal;  ///< [n, lanes]
  double* beside;    ///< [n, lanes] number i is between diagonal i and i + 1
  double* inverse;   ///< [n, lanes]
};

/// By Householder reflections. Matrices have a trace of order 1, or are 0. scratch: [3 n, lanes].
void tridiagonalise(std::int64_t n, const LaneMatrices& a, double* scratch);

/// values: [n, lanes] in no order; one or two sets of matrices are worked on together. squares: [n, lanes] scratch for
/// each set. By root-free QL iterations. Error: rounding of the largest.
void tridiagonal_eigenvalues(std::int64_t n, std::span<const LaneMatrices> sets, double* const* values,
                             double* const* squares);

/// vectors: [count, n, lanes], orthonormal, of the matrix whose reflectors `a` holds, one for each of values [count,
/// lanes], largest first. scratch: [4 n, lanes]. By inverse iteration; vectors of close eigenvalues are then
/// orthogonalised. to each other.
void eigenvectors(std::int64_t n, const LaneMatrices& a, const double* values, std::int64_t count, double* vectors,
                  double* scratch);

/// to = from in the lanes that are marked (mask [lanes]: not 0).
void blend_lanes(const double* mask, const double* from, std::int64_t n, double* to);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/factorise_lanes-inl.h"
#endif
