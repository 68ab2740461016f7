// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Factors matrices of rows into few components: what a SpanRow stores of the keys or
/// values of a span.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/span_row.h"

namespace kvkeep {

// A small learned net that decides which components of a span are worth keeping.
// Source: SeKV (AmirAbaskohi/SeKV), its `g_phi`. Differs: keys and values have gates of their own when decoding, too.

/// Three linear layers with GELU (exact) between them and a sigmoid after them. Input: the singular values as shares of
/// the largest, padded with 0, and the direction of the span's coarse key.
class RankGates {
 public:
  /// weights: f32, f16, bf16 or f64 [width, max_rank + D], [width', width], [max_rank, width']; biases to match. Throws
  /// InvalidArgument for other shapes, and for numbers that are not finite.
  RankGates(const std::array<Tensor, 3>& weights, const std::array<Tensor, 3>& biases);

  /// singular_values: f64 [rows, max_rank], descending, padded with 0; coarse_keys: f64 [rows, D], of the same span and
  /// KV head, for its values too. Returns f64 [rows, max_rank] in (0, 1). Cost: three matrix products of `rows` rows.
  /// Throws InvalidArgument for other shapes.
  [[nodiscard]] Tensor gates(const Tensor& singular_values, const Tensor& coarse_keys) const;

  [[nodiscard]] std::int64_t max_rank() const { return biases_[2].size(0); }
  /// D.
  [[nodiscard]] std::int64_t key_dim() const { return weights_[0].size(1) - max_rank(); }
  /// f64 [outputs, inputs] and [outputs] of layer 0 to 2.
  [[nodiscard]] const Tensor& weights(std::size_t layer) const { return weights_[layer]; }
  [[nodiscard]] const Tensor& biases(std::size_t layer) const { return biases_[layer]; }

 private:
  std::array<Tensor, 3> weights_, biases_;  ///< f64
};

}  // namespace kvkeep

namespace kvkeep::cpu {

/// Turns matrices of one shape [L, D] (keys or values of spans of one length) into factors. First rows() and weigh() of
/// every matrix, then run(), then the results. From the Gram matrix of the shorter side, m = min(L, D): tridiagonal
/// form, eigenvalues, and the eigenvectors of only those components that are kept; the other side of the factors, and
/// the scale of a component, is the projection of the rows. Cost per matrix: m^2 * max(L, D) / 2 products for the Gram
/// matrix; 2 m^3 / 3, and about 1.5 m^2 steps of an iteration, in lanes of 8 matrices (AVX-512; 4 or 2 elsewhere), both
/// twice if centring is a choice; r (m^2 + L D) for r components. Groups of matrices run in parallel. The result of a
/// matrix depends only on its own rows, bit for bit, except for the last bits of gates. Memory: the rows in f64, their
/// factors, and about 8 m^2 + 8 m r numbers per thread.
class Factorisation {
 public:
  Factorisation(std::int64_t count, std::int64_t length, std::int64_t dim, const FactorOptions& options);

  /// f64 [L, D] of matrix n, to be filled.
  [[nodiscard]] double* rows(std::int64_t n) { return rows_.get() + n * length_ * dim_; }
  /// Computes the mean of the rows by `weights` [L] (span_weights), and the sum of their squares. False if a number is
  /// not finite.
  bool weigh(std::int64_t n, std::span<const double> weights);
  /// gates: read if options.rank is gates. key_of[n]: the matrix whose mean is the coarse key that the gates of matrix
  /// n read (of the keys of the same span and head); empty without gates.
  void run(const RankGates* gates, std::span<const std::int64_t> key_of);

  [[nodiscard]] const double* mean(std::int64_t n) const { return means_.data() + n * dim_; }  ///< [D]
  [[nodiscard]] const SpanFactors& factors(std::int64_t n) const {
    return factors_[static_cast<std::size_t>(n)];
  }  ///< rank, raw, centred; offset 0
  [[nodiscard]] std::span<const double> singular_values(std::int64_t n) const {
    return components_of(spectra_, n);
  }  ///< [max_rank] descending, padded with 0, to 1e-8 of the largest
  [[nodiscard]] std::span<const double> gates(std::int64_t n) const {
    return components_of(gates_, n);
  }  ///< [max_rank], padded with 0; empty without gates
  /// factors(n).numbers(L, D) numbers: A then B, or the rows if raw.
  void write(std::int64_t n, float* out) const;

 private:
  struct Scratch;
  struct Choice;

  [[nodiscard]] std::span<const double> components_of(const std::vector<double>& all, std::int64_t n) const {
    return all.empty() ? std::span<const double>()
                       : std::span(all).subspan(static_cast<std::size_t>(n * options_.max_rank),
                                                static_cast<std::size_t>(options_.max_rank));
  }
  [[nodiscard]] bool may_centre() const;
  [[nodiscard]] bool by_rows() const {
    return length_ > dim_;
  }  ///< axes are directions of rows [D], else of columns [L]
  [[nodiscard]] std::int64_t width() const { return by_rows() ? dim_ : length_; }  ///< m
  [[nodiscard]] std::int64_t shown() const { return std::min<std::int64_t>(width(), options_.max_rank); }

  void run_group(std::int64_t first, std::int64_t count, const RankGates* gates, std::span<const std::int64_t> key_of,
                 Scratch& s);
  void take_rows(std::int64_t n, bool centred, std::int64_t begin, std::int64_t end, Scratch& s) const;
  void take_gram(std::int64_t n, std::int64_t lane, Scratch& s) const;
  void take_values(std::int64_t lane, Scratch& s) const;
  [[nodiscard]] Choice choose(std::int64_t n, std::int64_t lane, const Scratch& s) const;
  void ask_gates(const RankGates& gates, std::int64_t first, std::int64_t count, std::span<const std::int64_t> key_of);
  [[nodiscard]] std::vector<std::pair<std::int64_t, double>> kept_components(std::int64_t n, std::int64_t rank) const;
  void form_factors(std::int64_t n, std::int64_t lane, const Choice& choice, Scratch& s);

  FactorOptions options_;
  std::int64_t count_, length_, dim_;
  std::unique_ptr<double[]> rows_;           ///< [count, L, D]
  std::vector<double> means_, squares_;      ///< [count, D], [count] sum over a matrix
  std::vector<SpanFactors> factors_;         ///< [count]
  std::vector<std::vector<float>> written_;  ///< [count] A and B; empty if raw
  std::vector<double> spectra_, gates_;      ///< [count, max_rank]
};

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/factorise-inl.h"
#include "kvkeep/memory/span_row-inl.h"
#endif
