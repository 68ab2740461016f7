#pragma once
/// Not part of the interface. Scratch that one thread needs for softmaxes over panels of queries: first the sizes, so
/// that they can be reported, then one allocation of that size.

#include <cstdint>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/simd/aligned.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

inline constexpr std::int64_t kPanels = 2;  ///< panels that share one read of a key

/// Buffers kept besides the logits.
struct PanelExtras {
  bool usage = true;    ///< sums over queries
  bool maxima = false;  ///< the largest logits of a group
};

/// In floats.
struct PanelSizes {
  /// `slots`: longest stretch of a row; `window`: most queries. Rows with fewer of either fit as well.
  PanelSizes(const ModelSpec& spec, std::int64_t slots, std::int64_t window, PanelExtras extras) {
    const std::int64_t dim = spec.key_dim, rows = spec.group() * window, width = panel_width(rows),
                       held = rows > width ? kPanels : 1;
    queries = rows * dim;
    panels = held * dim * width;
    widened = kPanelKeys * dim;
    lanes = held * width;
    peak = width;
    logits = held * slots * width + width;  // panel_group_max reads past the last slot
    usage = extras.usage ? slots * panel_vector(width) : 0;
    largest = extras.maxima ? slots * width : 0;
  }
  std::int64_t queries, panels, widened, lanes, peak, logits, usage, largest;
  [[nodiscard]] std::int64_t total() const {
    return queries + panels + widened + 3 * lanes + peak + logits + usage + largest;
  }
};

struct PanelScratch {
  explicit PanelScratch(const PanelSizes& sizes) : arena(aligned_floats(sizes.total())) {
    float* at = arena.get();
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

  AlignedFloats arena;
  float *queries, *panels, *widened;  ///< [G * W, D], [panels, D, width], [kPanelKeys, D]
  float *top, *sum, *weight;          ///< [panels, width]
  float* peak;                        ///< [width] top of `largest`
  float *logits, *usage, *largest;    ///< [panels, slots, width], [slots, panel_vector(width)], [slots, width]
};

}  // namespace kvkeep::cpu
