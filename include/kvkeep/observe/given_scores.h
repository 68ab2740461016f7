#pragma once
/// Scores that an engine computes itself, for policies that rank by them.

#include <cstdint>
#include <span>

#include "kvkeep/core/cache_view.h"

namespace kvkeep {

/// Scores of tokens of one layer: any subset of the sequences, for each its oldest tokens that have none yet.
struct GivenScores {
  std::int32_t layer = 0;
  std::span<const SequenceId> sequences;  ///< [n]
  std::span<const std::int32_t> indptr;   ///< host [n + 1]: tokens of sequence i are [indptr[i], indptr[i + 1])
  Tensor scores = {};  ///< f32, f16 or bf16 [n_tokens, Hkv], any strides; any number or infinity, higher stays
};

}  // namespace kvkeep
