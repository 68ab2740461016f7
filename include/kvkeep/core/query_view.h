#pragma once
/// The queries that decisions read, as the CPU and kernels address them.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/hd.h"

namespace kvkeep {

/// The newest queries of one (layer, sequence), oldest first, in a ring of `ring` tokens whose oldest is at `begin`.
struct QueryView {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;                 ///< f32, f16 or bf16
  std::int64_t token_stride = 0;            ///< bytes
  std::int64_t head_stride = 0;             ///< bytes
  const std::int32_t* positions = nullptr;  ///< i32 [ring] logical, ascending from `begin` on
  std::int32_t ring = 0;                    ///< tokens the ring can hold
  std::int32_t begin = 0;                   ///< ring index of the oldest token
  std::int32_t count = 0;                   ///< tokens held
  const float* normalisers = nullptr;       ///< f32 [ring, Hq] log-sum-exps of their logits, natural; null: none held
  std::int32_t normalised = 0;              ///< newest queries with a log-sum-exp over the slots that they see now

  /// Ring index of the i-th oldest token.
  [[nodiscard]] KVKEEP_HD std::int32_t index(std::int32_t i) const { return ring == 0 ? 0 : (begin + i) % ring; }
  [[nodiscard]] KVKEEP_HD const std::byte* at(std::int32_t i, std::int32_t head) const {
    return data + index(i) * token_stride + head * head_stride;
  }
  [[nodiscard]] KVKEEP_HD std::int32_t position(std::int32_t i) const { return positions[index(i)]; }
};

}  // namespace kvkeep
