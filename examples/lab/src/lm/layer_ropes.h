// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The different RoPEs of a model's layers, so that a step computes each once.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvkeep/core/model_spec.h"

namespace kvkeep::lm::detail {

class LayerRopes {
 public:
  static constexpr std::int32_t kNone = -1;

  /// `spec` must live as long as this.
  explicit LayerRopes(const ModelSpec& spec) {
    for (std::int32_t l = 0; l < spec.num_layers(); ++l) {
      const RopeSpec& own = spec.rope_of(l);
      const auto same = [&own](const RopeSpec* one) { return one == &own || *one == own; };
      const auto found = std::find_if(all_.begin(), all_.end(), same);
      of_.push_back(own.style == RopeStyle::none ? kNone : static_cast<std::int32_t>(found - all_.begin()));
      if (own.style != RopeStyle::none && found == all_.end()) all_.push_back(&own);
    }
  }

  [[nodiscard]] const std::vector<const RopeSpec*>& all() const { return all_; }
  /// Index in all(); kNone: the layer turns nothing.
  [[nodiscard]] std::int32_t of(std::int32_t layer) const { return of_[static_cast<std::size_t>(layer)]; }

 private:
  std::vector<const RopeSpec*> all_;
  std::vector<std::int32_t> of_;
};

}  // namespace kvkeep::lm::detail
