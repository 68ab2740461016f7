#pragma once
/// What attention gave over the rows of a layer, before anything else was merged into it.

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Of the tokens of a step in one layer, as any flash attention gives it.
struct Attended {
  Tensor out;          ///< f32 [n_tokens, Hq, D] contiguous; anything where a query saw no slot
  Tensor log_sum_exp;  ///< f32 [n_tokens, Hq] contiguous, natural, of the scaled logits; -inf where a query saw no slot
};

}  // namespace kvkeep
