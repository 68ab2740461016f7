#pragma once
/// New given scores on their way to a column. Plain structs that kernels take; no LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/dtype.h"

namespace kvkeep {

/// Scores of consecutive tokens of one row.
struct GivenArrival {
  const std::byte* from = nullptr;  ///< of the first token
  float* to = nullptr;              ///< f32 [tokens]
  std::int32_t tokens = 0;
};

/// Memory layout of the scores that an engine gives.
struct GivenLayout {
  Dtype dtype = Dtype::f32;       ///< f32, f16 or bf16
  std::int64_t token_stride = 0;  ///< bytes
};

}  // namespace kvkeep
