// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised inner loops of Expected Attention and of query statistics: products of a tile
/// of keys with panels of columns, sums of squares, Gram matrix, Cholesky factor. Every number of a key is one chain of
/// multiply-adds in ascending order of components, whatever tile the key is in: equal keys get equal bits.

#include <atomic>
#include <cstdint>

#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Columns that are multiplied together: two machine vectors.
std::int64_t column_width();

/// Keys in a tile. A packed tile is [dim, tile_keys()] f32.
std::int64_t tile_keys();

/// Widens keys [from, to) and transposes them into tiles: [(to - from) / tile_keys() rounded up, dim, tile_keys()] f32,
/// the last one padded with zeros. `widened`: scratch of `dim` floats.
void pack_tiles(const Keys& keys, std::int64_t from, std::int64_t to, float* tiles, float* widened);

/// sums[key][lane] += (column . key)^2 over the columns of one panel [dim - start, column_width()] f32: the columns are
/// zero before component `start`. `triangular`: the second vector of columns is zero for as many more components as a
/// vector has lanes. sums: [tiles * tile_keys(), column_width() / 2].
void add_squares(const float* tiles, std::int64_t count, std::int64_t dim, const float* panel, std::int64_t start,
                 bool triangular, float* sums);

/// out[key][column] = column . key for one panel that starts at 0. out: [tiles * tile_keys(), column_width()].
void tile_products(const float* tiles, std::int64_t count, std::int64_t dim, const float* panel, float* out);

/// sums[key][lane] += the squares of `columns` products, a multiple of column_width() / 2. sums: [keys, column_width()
/// / 2].
void add_product_squares(const float* products, std::int64_t keys, std::int64_t columns, float* sums);

/// sums[key][lane] += products[key][column] * keys[key][column], keys bf16, `key_stride` apart. columns and sums as in
/// add_product_squares().
void add_key_products(const float* products, const std::uint16_t* keys, std::int64_t key_stride, std::int64_t count,
                      std::int64_t columns, float* sums);

/// logits[key] = factor * (sum over lanes of sums[key]) + linear[key * stride], the first term at least 0, both clamped
/// to +-FLT_MAX / 2. NaN in `linear` stays NaN; NaN in the sums alone is a square that overflowed fp32. Reads and
/// writes up to the next multiple of four keys.
void expected_logits(const float* sums, std::int64_t keys, float factor, const float* linear, std::int64_t stride,
                     float* logits);

/// Floats from row to row of a matrix of `dim` columns that gram() reads or writes.
std::int64_t gram_stride(std::int64_t dim);

/// Rows of a matrix that gram() writes.
std::int64_t gram_rows(std::int64_t dim);

/// mean[d] = mean over rows of x[row][d], in double. x: [rows, stride]. False if some number is not finite.
bool column_means(const float* x, std::int64_t rows, std::int64_t dim, std::int64_t stride, double* mean);

/// x -= mean, in place; returns the largest absolute difference. The columns from `dim` to the stride become 0. A mean
/// rounded to fp32 is near enough: it changes the second moment by the square of its rounding error.
float centre_rows(float* x, std::int64_t rows, std::int64_t dim, std::int64_t stride, const float* mean);

/// x *= factor over [rows, stride].
void scale_rows(float* x, std::int64_t rows, std::int64_t stride, float factor);

/// Turns every row by the same cos and sin of each of `pairs` pairs (f, f + pairs), in place.
void turn_rows(float* x, std::int64_t rows, std::int64_t stride, std::int64_t pairs, const float* cosines,
               const float* sines);

/// out[i][j] = sum over rows of x[row][i] * x[row][j] for j >= i; undefined below that. x: [rows, gram_stride(dim)], 0
/// from column `dim` on, followed by gram_rows(dim) floats of any content; out: [gram_rows(dim), gram_stride(dim)] f32.
/// Cost: rows * dim * (dim + 1) flop.
void gram(const float* x, std::int64_t rows, std::int64_t dim, float* out);

/// Floats from row to row of the matrix that cholesky() works on.
std::int64_t cholesky_stride(std::int64_t dim);

/// Replaces the upper triangle of a covariance C by the factor U with U^T U = C, in place, in double. A pivot within
/// rounding noise (at most dim * 2^-23 of its diagonal element) makes its row 0: semidefinite matrices are fine. a:
/// [gram_rows(dim), cholesky_stride(dim)]. Cost: dim^3 / 3 flop.
void cholesky(double* a, std::int64_t dim);

/// Panels [rows, width] f32, rows `stride` apart, times `factor`, to pairs of bf16 as matrix units read them: [rows /
/// 2, width, 2], `high` nearest to the number and `low` nearest to the remainder. rows even, width a multiple of 16.
void split_pairs(const float* panel, std::int64_t stride, std::int64_t rows, std::int64_t width, float factor,
                 std::uint16_t* high, std::uint16_t* low);

/// Pairs [rows / 2, width, 2] to [width, rows], output rows `stride` apart. rows a multiple of 8, width of 4.
void transpose_pairs(const std::uint16_t* pairs, std::int64_t rows, std::int64_t width, std::uint16_t* out,
                     std::int64_t stride);

/// Largest of x[0, n) that is not NaN; -inf for none.
float row_top(const float* x, std::int64_t n);

/// x = exp(x - top), in place; returns the sum of all but NaNs, which stay. n is a multiple of 64.
float row_exp(float* x, std::int64_t n, float top);

/// out[i] = |v_i|_2 in fp32; rows whose squares overflow fp32 are summed in double. `widened`: scratch of `values.dim`
/// floats.
void vector_norms(const Keys& values, std::int64_t from, std::int64_t to, float* out, float* widened);

// Not part of the interface. The machine's unit for products of bf16 matrices (AMX). A backend supplies it:
// use_torch() takes LibTorch's.

struct MatrixUnit {
  /// c = a b, plus the old c with `add`. a: bf16 [rows, depth], `a_stride` apart; b: bf16 pairs [depth / 2, columns,
  /// 2], 2 * b_stride apart; c: f32 [rows, columns]. depth a multiple of 32, columns of 16. Pass the same `rows` in
  /// every call: a row's result then depends on that row alone.
  void (*multiply_pairs)(std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a,
                         std::int64_t a_stride, const std::uint16_t* b, std::int64_t b_stride, bool add, float* c);
  /// Each thread that multiplied calls this once it is done.
  void (*release)();
};

namespace detail {
// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<const MatrixUnit*> used_matrix_unit{nullptr};
}  // namespace detail

/// Null if this machine has none, this process may not use it, or no backend supplied it.
[[nodiscard]] inline const MatrixUnit* matrix_unit() {
  return detail::used_matrix_unit.load(std::memory_order_acquire);
}
inline void use_matrix_unit(const MatrixUnit* unit) { detail::used_matrix_unit.store(unit, std::memory_order_release); }

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/expected_lanes-inl.h"
#endif
