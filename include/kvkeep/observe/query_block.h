#pragma once
/// Not part of the interface. Queries of one head, on the way to a mean and a covariance.

#include <cstdint>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/row.h"
#include "kvkeep/observe/query_statistics.h"
#include "kvkeep/simd/aligned.h"

namespace kvkeep::cpu {

/// cos and sin that undo RoPE on a query, attention scaling included; empty if there is none.
struct TurnBack {
  std::vector<float> cosines, sines;  ///< [tokens, F]

  /// `tokens` positions, given by position(i).
  template <class Position>
  void fill(const RopeSpec& rope, std::int64_t tokens, Position&& position) {
    const std::size_t pairs = rope.inv_freq.size();
    cosines.resize(static_cast<std::size_t>(tokens) * pairs);
    sines.resize(cosines.size());
    const auto shrink = static_cast<float>(1.0 / (rope.attention_scaling * rope.attention_scaling));
    for (std::int64_t i = 0; i < tokens; ++i) {
      float *c = cosines.data() + static_cast<std::size_t>(i) * pairs,
            *s = sines.data() + static_cast<std::size_t>(i) * pairs;
      rope_at(rope, position(i), c, s);
      for (std::size_t f = 0; f < pairs; ++f) {
        c[f] *= shrink;
        s[f] *= -shrink;
      }
    }
  }
  void apply(const RopeSpec& rope, std::int64_t i, float* x) const {
    const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
    if (!cosines.empty()) rope_rotate(rope.style, pairs, cosines.data() + i * pairs, sines.data() + i * pairs, x);
  }
};

/// Queries minus their mean, divided by `scale`.
struct QueryBlock {
  Aligned<float> x;          ///< [rows, gram_stride(D)], followed by as much as gram() reads
  std::vector<double> mean;  ///< [D]
  std::vector<float> mean32;
  Aligned<float> products;  ///< [gram_rows(D), gram_stride(D)] upper triangle of the sum of x x^T
  double scale = 1;         ///< a power of two that keeps the squares inside fp32

  /// Room for `rows` queries of `dim` numbers.
  void reserve(std::int64_t rows, std::int64_t dim);
  /// Subtracts the mean from `rows` rows of x. Throws InvalidArgument for numbers that are not finite, or too large for
  /// fp32 when centred.
  void centre(std::int64_t rows, std::int64_t dim, std::int32_t head);
  /// Computes products from x.
  void multiply(std::int64_t rows, std::int64_t dim);

  [[nodiscard]] static std::int64_t bytes(std::int64_t rows, std::int64_t dim);
};

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/observe/query_statistics-inl.h"
#endif
