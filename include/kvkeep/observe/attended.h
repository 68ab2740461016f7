#pragma once
/// The result of attention over the rows of a layer, before anything else is merged into it.

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// For the tokens of a step in one layer, as any flash attention returns it.
struct Attended {
  Tensor out;  ///< f32 [n_tokens, Hq, Dv] contiguous; any value for a query that saw no slot
  Tensor
      log_sum_exp;  ///< f32 [n_tokens, Hq] contiguous, natural, of the scaled logits; -inf for a query that saw no slot
};

}  // namespace kvkeep
