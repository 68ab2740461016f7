#pragma once
/// The newest queries of one sequence, per layer: what scorers need of the past. Queries, not hidden states: no projection is run twice.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/row.h"

namespace kvkeep {

/// The last `wanted` queries of every full layer. Kept across events: with stored positions the causal test stays right.
class QueryRing {
 public:
  /// Tokens that can be taken back (speculative decoding) with the window still whole.
  static constexpr std::int32_t kRollback = 32;

  /// layers: full layers of the model. `wanted` 0 keeps nothing.
  QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim);

  /// Adds the queries of new tokens of one layer. data: [tokens, Hq, D] with strides in bytes, the D elements of a head contiguous.
  /// Requires: takes(dtype). Cost: copies at most wanted + kRollback tokens of Hq * D elements.
  void push(std::int32_t layer, const std::byte* data, ScalarType dtype, std::int64_t token_stride, std::int64_t head_stride,
            std::span<const std::int32_t> positions);

  /// True when queries of this dtype can be pushed: any at first, then the same.
  [[nodiscard]] bool takes(ScalarType dtype) const { return data_.empty() || dtype == dtype_; }
  [[nodiscard]] ScalarType dtype() const { return dtype_; }

  /// The last `wanted` queries of one layer (fewer where fewer were seen).
  [[nodiscard]] QueryView view(std::int32_t layer) const;

  /// Tokens a layer has seen.
  [[nodiscard]] std::int64_t seen(std::int32_t layer) const { return layers_[static_cast<std::size_t>(layer)].seen; }

  /// True when the newest `tokens` can be taken back and the window before them is still there.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  [[nodiscard]] std::int64_t bytes() const { return static_cast<std::int64_t>(data_.size()); }

 private:
  struct Layer {
    std::int64_t seen = 0;
    std::int64_t oldest = 0;  ///< oldest token whose query is still here
  };
  std::int32_t wanted_, capacity_, heads_, dim_;
  ScalarType dtype_ = kFloat32;
  std::vector<Layer> layers_;
  std::vector<std::int32_t> positions_;  ///< [capacity], the same in every layer
  std::vector<std::byte> data_;          ///< [layers, capacity, Hq, D]; allocated at the first push
};

}  // namespace kvkeep
