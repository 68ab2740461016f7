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
  std::int32_t* ranks = nullptr;  ///< i32, each prompt's at RankedPrompt::ranks: [ranked_layers()][stride], a layer's
                                  ///< at rank_place(); if options.holds_masses(), behind it f32 [ranked_layers()]
                                  ///< [stride] masses of the same layers, written
  const float* masses = nullptr;  ///< f32, each prompt's at RankedPrompt::scores, as kvkeep::LayerSelector::see()
                                  ///< takes them, if options.reads_mass()
  LayerSelection* states = nullptr;  ///< each prompt's at RankedPrompt::state; null before the layers that may select
  void* workspace = nullptr;         ///< layer_selector_workspace_bytes(), aligned to 32
};

/// For each prompt of a launch 24 bytes for every 4096 tokens of the longest; under missed_mass 8 for each layer that
/// is compared, under select_mass 4 for each token that may continue. Each part rounded up to 32.
[[nodiscard]] std::int64_t layer_selector_workspace_bytes(std::span<const RankedPrompt> prompts,
                                                          const LayerSelectorOptions& options = {});

/// LayerSelector::see() after launch_ranks: takes in the ranks of `layer`. A prompt that has selected before, or that
/// continues whole, is left as it is. Requires: ranks of every layer that wants_ranks(), up to this one, and its
/// masses. Variances and masses are sums of integers, exact and the same for any grid, and rounded only at the end, as
/// on the CPU: the same bits, the same layer, from equal masses. Launches for up to 64 prompts: 2 from min_layer on, 1
/// at a fixed layer, none before; one more with masses, before min_layer only under missed_mass, and one more from
/// min_layer on under missed_mass. Cost: one pass over the ranks and masses that are held; one block per prompt files
/// the newest layer's masses. Throws InvalidArgument for options that kvkeep::LayerSelector refuses, if layers times
/// tokens is 2^32 or more, and for masses that are not given; StateError for a layer whose ranks are not wanted.
void launch_layer_selector(const LayerSelectorArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
