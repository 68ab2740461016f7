#pragma once
// Bodies of pyramidinfer.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/pyramidinfer.h"

namespace kvkeep {

KVKEEP_INLINE void ShrinkingContextOptions::describe(Fields& f) {
  f.integer("sink", sink, 0, INT32_MAX, "oldest tokens that always continue");
  f.enter("layers");
  f.real("recent_ratio", recent_ratio, Range::below(0, 1),
         "newest share of the prompt: it observes, and always continues");
  f.real("keep", keep, Range::above(0, 1), "share of the others that continues after the deepest layer");
  f.choice("schedule", schedule, {{"cosine", Schedule::cosine}, {"constant", Schedule::constant}},
           "from all at the first layer down to `keep`, or `keep` at every layer");
  f.integer("min_context", min_context, 1, INT32_MAX, "no layer leaves fewer of the others");
  f.real("distance_weight", distance_weight, Range::above(0, 1000), "weight of the newest observer; the oldest has 1");
  f.leave();
}

KVKEEP_INLINE std::vector<std::string> ShrinkingContextOptions::problems() const {
  std::vector<std::string> found;
  if (!(recent_ratio >= 0 && recent_ratio < 1))
    found.push_back(text("recent_ratio: ", recent_ratio, "; allowed 0 up to, not including, 1"));
  if (!(keep > 0 && keep <= 1)) found.push_back(text("keep: ", keep, "; allowed above 0, up to 1"));
  if (min_context < 1) found.push_back(text("min_context: ", min_context, "; allowed 1 or more"));
  if (!(distance_weight > 0) || !std::isfinite(distance_weight))
    found.push_back(text("distance_weight: ", distance_weight, "; allowed above 0"));
  if (sink < 0) found.push_back(text("sink: ", sink, "; allowed 0 or more"));
  return found;
}

KVKEEP_INLINE ShrinkingContext::ShrinkingContext(ShrinkingContextOptions options, std::int32_t layers,
                                                 std::int32_t tokens)
    : options_(options), layers_(layers) {
  std::string all;
  for (const std::string& one : options_.problems()) all += (all.empty() ? "" : "; ") + one;
  KVKEEP_REQUIRE(all.empty(), "shrinking context: ", all);
  const auto recent = static_cast<std::int32_t>(options_.recent_ratio * tokens);
  observers_ = recent + 1;
  floor_ = std::min(options_.min_context, tokens - 1 - recent);
}

KVKEEP_INLINE double ShrinkingContext::share(std::int32_t layer) const {
  if (options_.schedule == ShrinkingContextOptions::Schedule::constant) return options_.keep;
  return product(1 - options_.keep, (std::cos(std::numbers::pi * layer / layers_) + 1) / 2) + options_.keep;
}

KVKEEP_INLINE std::int32_t ShrinkingContext::going_on(std::int32_t layer, std::int32_t present) const {
  const std::int32_t others = present - observers_;
  const double share = this->share(layer);
  if (others <= floor_ || share >= 1) return std::max(others, 0);
  const auto kept = static_cast<std::int32_t>(others * share);
  return kept > floor_ ? kept : others;
}

KVKEEP_INLINE std::vector<float> ShrinkingContext::weights() const {
  std::vector<float> weights(static_cast<std::size_t>(observers_), 1.0F);
  for (std::int32_t i = 1; i < observers_; ++i)
    weights[static_cast<std::size_t>(i)] =
        static_cast<float>(1 + (options_.distance_weight - 1) * i / (observers_ - 1));
  return weights;
}

KVKEEP_INLINE std::vector<std::int32_t> ShrinkingContext::tokens(std::int32_t layer,
                                                                 std::span<const float> sums) const {
  const auto others = static_cast<std::int32_t>(sums.size());
  const std::int32_t kept = going_on(layer, others + observers_);
  std::vector<float> scores(sums.begin(), sums.end());
  std::fill_n(scores.begin(), std::min(options_.sink, others), HUGE_VALF);
  std::vector<std::int32_t> chosen = best_tokens(scores, kept);
  for (std::int32_t i = 0; i < observers_; ++i) chosen.push_back(others + i);
  return chosen;
}

}  // namespace kvkeep
