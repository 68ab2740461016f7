#pragma once
/// Matrices of rows cut down to few components: what a SpanStore stores of the keys or values of a span and KV head.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvkeep/memory/span_store.h"

namespace kvkeep::cpu {

/// Matrices of one shape [L, D] (keys or values of spans of one length) on their way into factors. First rows() and weigh() of every matrix, then run(), then the results.
class Factorisation {
 public:
  Factorisation(std::int64_t count, std::int64_t length, std::int64_t dim, const FactorOptions& options);
  Factorisation(const Factorisation&) = delete;
  Factorisation& operator=(const Factorisation&) = delete;
  ~Factorisation();

  /// f64 [L, D] of matrix n, to be filled.
  [[nodiscard]] double* rows(std::int64_t n);
  /// Takes the mean of the rows by `weights` [L] (span_weights), and the sum of their squares. False where a number is not finite.
  bool weigh(std::int64_t n, std::span<const double> weights);
  /// gates: null unless options.rank is gates. key_of[n]: the matrix whose mean is the coarse key that the gates of matrix n read (of the keys of the same span and head); empty without gates.
  void run(const RankGates* gates, std::span<const std::int64_t> key_of);

  [[nodiscard]] const double* mean(std::int64_t n) const;                       ///< [D]
  [[nodiscard]] SpanFactors factors(std::int64_t n) const;                      ///< rank, raw, centred; offset 0
  [[nodiscard]] std::span<const double> singular_values(std::int64_t n) const;  ///< [max_rank], padded with 0
  [[nodiscard]] std::span<const double> gates(std::int64_t n) const;            ///< [max_rank], padded with 0; empty without gates
  /// factors(n).numbers(L, D) numbers: A then B, or the rows where raw.
  void write(std::int64_t n, float* out) const;

 private:
  class Choice;
  /// A component that is kept, and how much of it.
  struct Kept {
    std::int64_t component;
    double weight;
  };
  [[nodiscard]] std::vector<Kept> kept_components(std::int64_t n) const;

  FactorOptions options_;
  std::int64_t count_, length_, dim_;
  Tensor rows_, means_;           ///< f64 [count, L, D], [count, D]
  std::vector<double> squares_;   ///< [count] sum over a matrix
  std::unique_ptr<Choice> choice_;
  std::vector<double> spectra_, gates_;  ///< [count, max_rank]
  std::vector<std::vector<Kept>> kept_;
};

}  // namespace kvkeep::cpu
