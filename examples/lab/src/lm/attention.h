// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Causal attention of a step's tokens over the slots of their own sequence.

#include <cstdint>
#include <span>

#include "kernels.h"
#include "kvkeep/core/row.h"
#include "kvkeep/simd/stored_side.h"
#include "kvlab/tensor.h"

namespace kvkeep::lm::detail {

/// One (sequence, KV head) of a step in one layer.
struct AttentionRow {
  std::int64_t first_token = 0;  ///< of the sequence, in the step
  std::int64_t new_tokens = 0;
  std::int64_t slots_before = 0;  ///< in use before the step; token i sits at slot slots_before + i
  std::int32_t begin =
      0;  ///< position where the step begins for the sequence; old slots of a sliding layer hold those just before it
  std::int64_t kv_head = 0;
  cpu::StoredSide keys, values;           ///< the row's slots, side by side or by page
  const std::uint8_t* visible = nullptr;  ///< [slots_before], 0 hides the slot; null: all visible
};

/// What the rows of a layer share.
struct AttentionShape {
  std::int64_t query_heads = 0, group = 0, key_dim = 0, value_dim = 0;
  float scale = 1.0F;
  std::int64_t window = 0;                  ///< positions a sliding layer sees, itself included; 0: all
  const std::int32_t* positions = nullptr;  ///< [n_tokens] logical, of the step's tokens
};

/// out [n_tokens, Hq, Dv] from queries [n_tokens, Hq, D] after RoPE; log_sum_exp [n_tokens, Hq] of the scaled logits,
/// unless it is null. Rows run in parallel; per thread at most a few MB of logits, whatever the length (one query's
/// group of heads always fits). Every query's result is the same for any split of its prompt into steps.
void attend(std::span<const AttentionRow> rows, const AttentionShape& shape, const float* queries, float* out,
            float* log_sum_exp = nullptr);

}  // namespace kvkeep::lm::detail
