#pragma once
/// The ranks of one prompt's tokens from layer to layer, in a machine's memory: a LayerSelector, wherever it runs.

#include <cstdint>

#include "kvkeep/core/machine_memory.h"
#include "kvkeep/layers/layer_selector.h"

namespace kvkeep {

/// What one prompt is ranked by; machines update it. After Event::rank() layer() and relative_variance() say what they
/// said before, until Event::chosen() has returned.
struct PromptRanks {
  /// Throws as LayerSelector.
  PromptRanks(const LayerSelectorOptions& given, std::int32_t of) : options(given), tokens(of), selector(given, of) {}

  /// As LayerSelector::wants(), layer() and relative_variance().
  [[nodiscard]] bool wants(std::int32_t layer) const {
    return state.layer < 0 && tokens > options.select && options.wants_ranks(layer);
  }
  [[nodiscard]] std::int32_t layer() const { return state.layer; }
  [[nodiscard]] double relative_variance() const { return state.relative; }

  LayerSelectorOptions options;
  std::int32_t tokens;
  LayerSelection state;
  LayerSelector selector;  ///< on the host
  DeviceMemory ring;       ///< on a device: i32 [ranked_layers()][tokens before the window]
};

}  // namespace kvkeep
