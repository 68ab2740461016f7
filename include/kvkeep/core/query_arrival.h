#pragma once
/// New queries to be copied into rings. Plain structs that kernels take unchanged; no LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/dtype.h"

namespace kvkeep {

/// Queries of one layer of one sequence, at consecutive positions.
struct QueryArrival {
  std::int32_t first = 0;             ///< its first token among those of the step
  std::byte* ring = nullptr;          ///< [capacity, Hq, D] packed
  std::int32_t* positions = nullptr;  ///< i32 [capacity]
  std::int32_t capacity = 0;
  std::int32_t at = 0;           ///< place of the first token in the ring, below capacity
  std::int32_t tokens = 0;       ///< at most capacity
  std::int32_t position = 0;     ///< logical, of the first token
  float* normalisers = nullptr;  ///< f32 [capacity, Hq] log-sum-exps of the same tokens
};

/// Where the query of one token goes, in the first layer.
struct QueryPlace {
  std::byte* query = nullptr;        ///< [Hq, D] packed; null: it is not kept
  std::int32_t* position = nullptr;  ///< the same in every layer
  std::int32_t logical = 0;          ///< what is written there
  float* normalisers = nullptr;      ///< [Hq]
};

/// Where the queries of a step are, in one layer.
struct QueryLayout {
  const std::byte* from = nullptr;  ///< [tokens, Hq, D]
  std::int32_t heads = 0;
  std::int64_t head_bytes = 0;               ///< D elements
  std::int64_t token_stride = 0;             ///< bytes, in the source
  std::int64_t head_stride = 0;              ///< bytes, in the source
  const float* normalisers = nullptr;        ///< f32 [tokens, Hq] log-sum-exps; null: none came
  std::int64_t normaliser_token_stride = 0;  ///< floats
  std::int64_t normaliser_head_stride = 0;
};

/// From the first layer to another one.
struct LayerOffset {
  std::int64_t queries = 0;      ///< bytes
  std::int64_t normalisers = 0;  ///< floats
};

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
