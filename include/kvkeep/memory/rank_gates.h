#pragma once
/// A small learned net that decides which components of a span are worth keeping.
/// Source: SeKV (AmirAbaskohi/SeKV), its `g_phi`. Differs: keys and values have gates of their own when decoding, too.

#include <array>
#include <cstdint>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

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

 private:
  std::array<Tensor, 3> weights_, biases_;  ///< f64
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/rank_gates-inl.h"
#endif
