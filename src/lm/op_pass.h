#pragma once
/// One step through the model by LibTorch's operators, wherever the weights are.

#include <span>

#include "kvkeep/lm/decoder.h"

namespace kvkeep::lm::detail {

/// What Decoder::forward returns and writes, for a step that check_step has passed. Logits lie where the weights are.
/// The host sends one tensor of numbers ahead, one more each time that tokens stay behind, and else only launches:
/// nothing is read back. Cost: matrices in f16 and bf16 are widened to f32 for each product, so a step moves 10 bytes
/// for each of their numbers where 2 are stored, and the largest needs its f32 copy for a while. Activations of all the
/// step's tokens are there at once; of attention the logits of at most 128 MB, or of one token.
Tensor run_with_operators(const LmConfig& config, const Weights& weights, const Step& step,
                          std::span<const LayerKv> cache, const Tensor& block_table, const StepOptions& options);

}  // namespace kvkeep::lm::detail
