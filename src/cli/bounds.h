// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a policy holds of a sequence where the text decides: the least and the most, by arithmetic alone. Of policies
// that fold, and of those that narrow prompts.

#include <cstdint>
#include <vector>

#include "forecast.h"

namespace kvkeep::cli {

struct Bounds {
  std::int64_t least = 0, most = 0;

  static Bounds exactly(std::int64_t n) { return {n, n}; }
  Bounds& operator+=(const Bounds& other) {
    least += other.least, most += other.most;
    return *this;
  }
  friend Bounds operator+(Bounds a, const Bounds& b) { return a += b; }
  friend Bounds operator*(Bounds a, std::int64_t n) { return {a.least * n, a.most * n}; }
  // Both bounds of the larger of two.
  [[nodiscard]] Bounds larger(const Bounds& other) const;
  // What holds of one or the other.
  [[nodiscard]] Bounds either(const Bounds& other) const;
  bool operator==(const Bounds&) const = default;
};

// Bytes are those of K and V with pages rounded up in `most`, and of coarse entries with what is near beside them.
struct BoundedLayer {
  std::int64_t full_slots = 0, full_bytes = 0;  // nothing dropped, narrowed or folded
  Bounds peak_slots, peak_bytes;                // at the layer's own peak
  Bounds kept_slots, kept_bytes;                // right after the last event; at the end if there is none
  Bounds far_bytes;                             // of factors, at the end
  bool operator==(const BoundedLayer&) const = default;
};

struct BoundedForecast {
  std::vector<BoundedLayer> layers;
  std::int64_t full_bytes = 0, slot_bytes = 0;
  Bounds peak, kept, far;  // over all layers
  Bounds spans, folded;    // at the end, over all rows; tokens in the spans
  Bounds events;
  std::int64_t peak_slots = 0;  // most at once, over all rows
};

// Throws as forecast(); Unsupported, by name, for a policy that does not say how its prompts go on or what it folds,
// for one whose rows keep what passes a threshold, and for shares of attention that decide how many tokens stay before
// a policy that cuts; InvalidArgument for a policy that narrows without a prompt.
BoundedForecast bounded_forecast(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan);

}  // namespace kvkeep::cli
