// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Everything that can be wrong with a step, found before anything is written.

#include <span>

#include "kvlab/decoder.h"

namespace kvkeep::lm::detail {

/// Throws InvalidArgument with the first thing that is wrong, and Unsupported for a cache that `path` has no code for.
/// `device`: where the weights are. `block_table` is undefined for a dense cache.
void check_step(const io::ModelConfig& config, Device device, Path path, const Step& step,
                std::span<const LayerKv> cache, const Tensor& block_table, const StepOptions& options);

/// The same for a hook's answer as to which tokens continue after the layer that it saw.
void check_onward(const ModelSpec& spec, Logits logits, const LayerSight& sight, const Onward& onward);

}  // namespace kvkeep::lm::detail
