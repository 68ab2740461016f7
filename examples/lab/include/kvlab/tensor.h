// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tensors of the reference decoder are LibTorch's.

#include "kvkeep/torch.h"

namespace kvkeep::lm {

using Tensor = at::Tensor;

}  // namespace kvkeep::lm
