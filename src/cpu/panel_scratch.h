#pragma once
/// What one thread needs to take softmaxes over panels of queries: sizes first, so that they can be told, then one allocation of that size.

#include <cstdint>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "attention_lanes.h"

namespace kvkeep::cpu {

inline constexpr std::int64_t kPanels = 2;  ///< panels that share one reading of a key

/// In floats.
struct PanelSizes {
  /// `slots`: longest stretch of a row; `window`: most queries; `maxima`: also the largest logits of a group.
  PanelSizes(const ModelSpec& spec, std::int64_t slots, std::int64_t window, bool maxima) {
    const std::int64_t width = panel_width(), dim = spec.key_dim;
    queries = spec.group() * window * dim;
    panels = kPanels * dim * width;
    widened = 6 * dim;
    lanes = kPanels * width;
    peak = width;
    logits = kPanels * slots * width + width;  // panel_group_max reads past the last slot
    usage = slots * width / 2;
    largest = maxima ? slots * width : 0;
  }
  std::int64_t queries, panels, widened, lanes, peak, logits, usage, largest;
  [[nodiscard]] std::int64_t total() const { return queries + panels + widened + 3 * lanes + peak + logits + usage + largest; }
};

struct PanelScratch {
  explicit PanelScratch(const PanelSizes& sizes) : arena(static_cast<std::size_t>(sizes.total())) {
    float* at = arena.data();
    const auto take = [&at](std::int64_t floats) {
      float* taken = at;
      at += floats;
      return taken;
    };
    queries = take(sizes.queries);
    panels = take(sizes.panels);
    widened = take(sizes.widened);
    top = take(sizes.lanes);
    sum = take(sizes.lanes);
    weight = take(sizes.lanes);
    peak = take(sizes.peak);
    logits = take(sizes.logits);
    usage = take(sizes.usage);
    largest = take(sizes.largest);
  }
  PanelScratch(const PanelScratch&) = delete;
  PanelScratch& operator=(const PanelScratch&) = delete;

  std::vector<float> arena;
  float *queries, *panels, *widened;  ///< [G * W, D], [kPanels, D, width], [6, D]
  float *top, *sum, *weight;          ///< [kPanels, width]
  float* peak;                        ///< [width] top of `largest`
  float *logits, *usage, *largest;    ///< [kPanels, slots, width], [slots, width / 2], [slots, width]
};

}  // namespace kvkeep::cpu
