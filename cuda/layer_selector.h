// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Where the ranking of prompts has settled, decided on the GPU. Same contract as kvkeep::LayerSelector. No LibTorch in
/// here.

#include <cstdint>
#include <limits>
#include <span>

#include "kvkeep/layers/layer_selector.h"
#include "ranks.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Which of LayerSelectorOptions::ranked_layers() places a layer's ranks go to, over the oldest ones.
[[nodiscard]] constexpr std::int32_t rank_place(const LayerSelectorOptions& options, std::int32_t layer) {
  return layer % options.ranked_layers();
}

struct LayerSelectorArguments {
  LayerSelectorOptions options = {};
  std::int32_t layer = 0;
  std::span<const RankedPrompt> prompts = {};  ///< on the host
  const std::int32_t* ranks = nullptr;  ///< i32, each prompt's at RankedPrompt::ranks: [ranked_layers()][stride], a
                                        ///< layer's at rank_place()
  LayerSelection* states = nullptr;     ///< each prompt's at RankedPrompt::state
  void* workspace = nullptr;            ///< layer_selector_workspace_bytes(), aligned to 32
};

/// 24 bytes for every 4096 tokens of the longest prompt, for each prompt of a launch.
[[nodiscard]] std::int64_t layer_selector_workspace_bytes(std::span<const RankedPrompt> prompts);

/// LayerSelector::see() after launch_ranks: takes in the ranks of `layer`. A prompt that has selected before, or that
/// continues whole, is left as it is. Requires: ranks of every layer that wants_ranks(), up to this one. Variances are
/// sums of integers, exact and the same for any grid, and rounded only when they are divided, as on the CPU: the same
/// bits, the same layer. Launches for up to 64 prompts: 2 from min_layer on, 1 at a fixed layer, none before. Cost: one
/// pass over the ranks that are held. Throws InvalidArgument for options that kvkeep::LayerSelector refuses, and if
/// layers times tokens is 2^32 or more; Unsupported for missed_mass and select_mass, which have no kernel; StateError
/// for a layer whose ranks are not wanted.
void launch_layer_selector(const LayerSelectorArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
