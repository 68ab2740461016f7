// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One step through the model by LibTorch's operators, wherever the weights are.

#include <span>

#include "kvlab/decoder.h"

namespace kvkeep::lm::detail {

/// Returns and writes what Decoder::forward does, for a step that passed check_step. Logits are on the weights' device.
/// The host sends one tensor of numbers ahead, one more each time that tokens leave, and otherwise only launches:
/// nothing is read back. Cost: matrices in f16 and bf16 are widened to f32 for each product, so a step moves 10 bytes
/// for each number that is stored in 2, and the largest matrix needs its f32 copy for a while. Activations of all the
/// step's tokens are held at once; attention logits take at most 128 MB, or those of one token.
Tensor run_with_operators(const io::ModelConfig& config, const Weights& weights, const Step& step,
                          std::span<const LayerKv> cache, const Tensor& block_table, const StepOptions& options);

}  // namespace kvkeep::lm::detail
