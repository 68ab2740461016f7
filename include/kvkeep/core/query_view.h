// SPDX-License-Identifier: Apache-2.0
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
  const float* normalisers = nullptr;       ///< f32 [ring, Hq] log-sum-exps of their logits, natural, a sink logit of
                                            ///< their head included; null: none held
  std::int32_t normalised = 0;              ///< newest queries with a log-sum-exp over the slots that they see now

  /// Ring index of the i-th oldest token.
  [[nodiscard]] KVKEEP_HD std::int32_t index(std::int32_t i) const { return ring == 0 ? 0 : (begin + i) % ring; }
  [[nodiscard]] KVKEEP_HD const std::byte* at(std::int32_t i, std::int32_t head) const {
    return data + index(i) * token_stride + head * head_stride;
  }
  [[nodiscard]] KVKEEP_HD std::int32_t position(std::int32_t i) const { return positions[index(i)]; }
};

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

/// Where the queries of a step go in one layer. What is copied depends on the table alone, so a graph may repeat it.
struct QueryTable {
  const QueryPlace* places = nullptr;  ///< [tokens] in the memory of the machine
  std::int32_t tokens = 0;
  LayerOffset offset;
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
