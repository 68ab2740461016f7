// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What an engine passes in at each layer of each step.

#include <cstdint>
#include <span>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/row.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Logical positions are below it, and sequences are no longer than it: whatever comes after them still fits 32 bits.
inline constexpr std::int32_t kMostPositions = (1 << 30) - 1;

/// The prompt of a sequence that ends when Keeper::end_prompt() says so.
inline constexpr std::int32_t kOpenPrompt = kMostPositions;

/// New tokens of one layer and step: any subset of the sequences, any number of tokens each.
/// Offsets and counts are host integers, like every length: an event must not wait for the device.
struct Observation {
  std::int32_t layer = 0;
  std::span<const SequenceId> sequences;  ///< [n]
  std::span<const std::int32_t> indptr;   ///< host [n + 1]: tokens of sequence i are [indptr[i], indptr[i + 1])
  Tensor queries =
      {};  ///< f32, f16 or bf16 [n_tokens, Hq, D] after bias and query norm; absent if the policy needs none
  QueryBasis basis = QueryBasis::pre_rope;
  bool unread =
      false;  ///< no event will read the queries of these tokens (Keeper::tokens_to_event), and none are given
  Tensor log_sum_exp =
      {};  ///< f32 [n_tokens, Hq] of each query's scaled (and capped) logits over all cached keys that
           ///< it sees, its own included, and the sink logit of its head if the layer has them
           ///< (LayerSpec::sinks): what its softmax is over. Natural, as attention kernels return it
           ///< (FlashAttention: softmax_lse); add a sink that a kernel leaves out. Optional: on a device an event whose
           ///< window has them reads the keys once instead of twice; the CPU reads them once anyway
  std::span<const std::int32_t> positions = {};  ///< host [n_tokens] logical, from 0 to below kMostPositions, ascending
                                                 ///< per sequence; empty: the next ones of each sequence
};

/// New tokens of a step, in all layers at once (Keeper::begin_step).
struct StepTokens {
  std::span<const SequenceId> sequences;         ///< [n]
  std::span<const std::int32_t> indptr;          ///< host [n + 1]
  Dtype query_dtype = Dtype::f32;                ///< f32, f16 or bf16
  QueryBasis basis = QueryBasis::pre_rope;       ///< of the queries
  bool log_sum_exp = false;                      ///< record() brings them
  std::span<const std::int32_t> positions = {};  ///< as in Observation
};

/// For the tokens of a step in one layer, as any flash attention returns it.
struct Attended {
  Tensor out;          ///< f32 [n_tokens, Hq, Dv] contiguous; any value for a query that saw no slot
  Tensor log_sum_exp;  ///< f32 [n_tokens, Hq] contiguous, natural, of the scaled logits, sink logits included as in
                       ///< `out`; -inf for a query that saw no slot
};

/// Scores of tokens of one layer: any subset of the sequences, for each its oldest tokens that have none yet.
struct GivenScores {
  std::int32_t layer = 0;
  std::span<const SequenceId> sequences;  ///< [n]
  std::span<const std::int32_t> indptr;   ///< host [n + 1]: tokens of sequence i are [indptr[i], indptr[i + 1])
  Tensor scores = {};  ///< f32, f16 or bf16 [n_tokens, Hkv], any strides; any number or infinity, higher stays
};

}  // namespace kvkeep
