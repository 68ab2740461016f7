// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of layer_selector.h: compiled by src/layers, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/layers/layer_selector.h"

namespace kvkeep {

KVKEEP_INLINE void LayerSelectorOptions::describe(Fields& f) {
  constexpr double kAnyThreshold = 1e9;
  f.integer("min_layer", min_layer, 0, INT32_MAX, "first layer that may select", {"l_min"}, "layers / 3");
  f.integer("observed_layers", observed_layers, 1, 4096,
            "consecutive layers whose ranks are compared, at most min_layer + 1", {"l_obs"});
  const bool by_mass = f.gives("layers", "missed_mass");  // then the option that it replaces is not written too
  const bool by_ranks =
      f.real("threshold", threshold, {-kAnyThreshold, kAnyThreshold},
             "selects once the variance of the ranks is below this share of its value at min_layer; 0 or less: never",
             {"tau"}, by_mass ? "-" : nullptr);
  const bool missed = f.real("missed_mass", missed_mass, Range::between(0, 1),
                             "instead of `threshold`: selects once, in each observed layer, less than this share of "
                             "attention went to tokens that would not continue",
                             {}, "-");
  if (by_ranks && missed) f.bad("missed_mass", missed_mass, "only without `threshold`");
  f.real("select_mass", select_mass, Range::above(0, 1),
         "fewer than `budget` tokens continue if they, with the window, drew this share of the selecting layer's "
         "attention");
}

KVKEEP_INLINE std::vector<std::string> LayerSelectorOptions::problems() const {
  std::vector<std::string> found;
  if (window < 1) found.push_back(text("window: ", window, "; allowed 1 or more"));
  if (select <= window)
    found.push_back(text("select: ", select, " tokens continue, including the window of ", window,
                         "; allowed more than the window"));
  if (min_layer < 0) found.push_back(text("min_layer: ", min_layer, "; allowed 0 or more"));
  if (observed_layers < 1) found.push_back(text("observed_layers: ", observed_layers, "; allowed 1 or more"));
  if (std::isnan(threshold)) found.push_back("threshold: not a number (NaN); allowed any number");
  if (!(missed_mass >= 0 && missed_mass < 1))
    found.push_back(text("missed_mass: ", missed_mass, "; allowed 0 for none, or a share below 1"));
  if (!(select_mass > 0 && select_mass <= 1))
    found.push_back(text("select_mass: ", select_mass, "; allowed a share above 0, up to 1"));
  if (fixed_layer < -1) found.push_back(text("fixed_layer: ", fixed_layer, "; allowed 0 or more, or -1 for none"));
  return found;
}

namespace layer_selector_detail {

inline constexpr std::int64_t kMostRanks =
    (std::int64_t{1} << 32) - 1;  ///< over the layers that are compared: up to this the sums stay exact

struct Ranked {
  std::uint32_t key;  ///< place_key()
  std::int32_t token;
};

inline constexpr int kDigitBits = 11, kDigits = 3;  // 33 bits: the whole key
inline constexpr std::uint32_t kBins = 1U << kDigitBits;

}  // namespace layer_selector_detail

/// Radix sort, least significant digit first: stable, so equal scores stay in the order of their indices.
KVKEEP_INLINE std::vector<std::int32_t> ranks_of(std::span<const float> scores) {
  std::vector<layer_selector_detail::Ranked> order(scores.size()), other(scores.size());
  std::array<std::array<std::uint32_t, layer_selector_detail::kBins>, layer_selector_detail::kDigits> starts{};
  for (std::size_t t = 0; t < scores.size(); ++t) {
    order[t] = {place_key(scores[t]), static_cast<std::int32_t>(t)};
    for (int d = 0; d < layer_selector_detail::kDigits; ++d)
      ++starts[static_cast<std::size_t>(d)]
              [order[t].key >> (d * layer_selector_detail::kDigitBits) & (layer_selector_detail::kBins - 1)];
  }
  for (int d = 0; d < layer_selector_detail::kDigits; ++d) {
    auto& start = starts[static_cast<std::size_t>(d)];
    std::exclusive_scan(start.begin(), start.end(), start.begin(), 0U);
    for (const layer_selector_detail::Ranked& ranked : order)
      other[start[ranked.key >> (d * layer_selector_detail::kDigitBits) & (layer_selector_detail::kBins - 1)]++] =
          ranked;
    order.swap(other);
  }
  std::vector<std::int32_t> ranks(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    ranks[static_cast<std::size_t>(order[i].token)] = static_cast<std::int32_t>(i) + 1;
  return ranks;
}

KVKEEP_INLINE LayerSelector::LayerSelector(LayerSelectorOptions options, std::int64_t tokens)
    : options_(options),
      tokens_(tokens),
      best_(std::min<std::int64_t>(options.select - options.window, tokens - options.window)),
      enough_(best_),
      relative_(std::numeric_limits<double>::quiet_NaN()),
      missed_(relative_) {
  require_no_problems("layer selector", options_.problems());
  const std::int64_t most =
      std::min<std::int64_t>(layer_selector_detail::kMostRanks / options_.ranked_layers(), INT32_MAX);
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= most, "layer selector: a prompt of ", tokens, " tokens; allowed 0 to ", most,
                 " when ", options_.ranked_layers(), " layers are compared");
}

KVKEEP_INLINE bool LayerSelector::wants(std::int32_t layer) const {
  if (layer_ >= 0 || tokens_ <= options_.select) return false;
  return options_.wants_ranks(layer);
}

/// Mean over tokens of the population variance of their ranks over the observed layers; a token counts if any of these
/// layers has it among its best. Integers up to the last division: the order of sums does not matter. A token's L *
/// sum(r^2) - sum(r)^2 is L^2 times its variance and fits 63 bits; its halves are summed separately.
KVKEEP_INLINE double LayerSelector::variance() const {
  const auto layers = static_cast<std::int64_t>(ranks_.size());
  const auto best = static_cast<std::int32_t>(best_);
  std::int64_t high = 0, low = 0, counted = 0;
  constexpr std::size_t kBlock = 512;
  std::array<std::int32_t, kBlock> least{};
  std::array<std::int64_t, kBlock> sums{}, squares{};
  const std::size_t tokens = ranks_.front().size();
  for (std::size_t first = 0; first < tokens; first += kBlock) {
    const std::size_t count = std::min(kBlock, tokens - first);
    least.fill(std::numeric_limits<std::int32_t>::max());
    sums.fill(0);
    squares.fill(0);
    for (const std::vector<std::int32_t>& ranks : ranks_)
      for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t rank = ranks[first + i];
        least[i] = std::min(least[i], rank);
        sums[i] += rank;
        squares[i] += std::int64_t{rank} * rank;
      }
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t spread = least[i] > best ? 0 : layers * squares[i] - sums[i] * sums[i];
      high += spread >> 32;
      low += spread & 0xFFFFFFFF;
      counted += least[i] <= best;
    }
  }
  return mean_variance(static_cast<double>(high), static_cast<double>(low), static_cast<std::int32_t>(layers),
                       static_cast<double>(counted));
}

/// Over the observed layers, the largest share of attention that went to tokens which the newest layer does not have
/// among its best.
KVKEEP_INLINE double LayerSelector::most_missed() const {
  std::uint64_t most = 0;
  for (const std::vector<float>& mass : masses_) {
    std::uint64_t missed = 0;
    for (std::size_t t = 0; t < mass.size(); ++t)
      if (ranks_.back()[t] > enough_) missed += mass_units(mass[t]);
    most = std::max(most, missed);
  }
  return mass_of_units(static_cast<std::int64_t>(most));
}

/// How many of the best tokens draw, with the window, options_.select_mass of the attention; best_ if too few.
KVKEEP_INLINE std::int64_t LayerSelector::enough(std::span<const float> mass) const {
  const std::vector<std::int32_t>& newest = ranks_.back();
  std::vector<std::uint64_t> by_rank(mass.size());
  std::uint64_t held = mass_units(1);  // the window's own share is what is missing from 1
  for (std::size_t t = 0; t < mass.size(); ++t)
    held -= by_rank[static_cast<std::size_t>(newest[t]) - 1] = mass_units(mass[t]);
  for (std::int64_t k = 0; k < best_; ++k) {
    if (mass_of_units(static_cast<std::int64_t>(held)) >= options_.select_mass) return std::max<std::int64_t>(k, 1);
    held += by_rank[static_cast<std::size_t>(k)];
  }
  return best_;
}

KVKEEP_INLINE bool LayerSelector::see(std::int32_t layer, std::span<const float> scores, std::span<const float> mass) {
  KVKEEP_REQUIRE_AS(StateError, wants(layer) && layer > seen_, "layer selector: the scores of layer ", layer,
                    " come after those of layer ", seen_, layer_ >= 0 ? ", after the selection was made" : "",
                    "; allowed layers that wants() names, ascending");
  KVKEEP_REQUIRE_AS(StateError, options_.fixed_layer >= 0 || seen_ < 0 || layer == seen_ + 1, "layer selector: layer ",
                    layer, " follows layer ", seen_, "; allowed every layer from there on");
  KVKEEP_REQUIRE(static_cast<std::int64_t>(scores.size()) == tokens_ - options_.window,
                 "layer selector: ", scores.size(), " scores; allowed ", tokens_ - options_.window,
                 ", one for each token before the window");
  KVKEEP_REQUIRE(!options_.reads_mass() || mass.size() == scores.size(), "layer selector: ", mass.size(),
                 " masses for ", scores.size(), " scores; allowed one each (missed_mass and select_mass read them)");
  if (static_cast<std::int32_t>(ranks_.size()) == options_.ranked_layers()) {
    ranks_.erase(ranks_.begin());
    if (!masses_.empty()) masses_.erase(masses_.begin());
  }
  ranks_.push_back(ranks_of(scores));
  if (options_.holds_masses()) masses_.emplace_back(mass.begin(), mass.end());
  if (options_.select_mass < 1) enough_ = enough(mass);
  seen_ = layer;
  bool selects = layer == options_.fixed_layer;
  if (options_.fixed_layer < 0 && layer >= options_.min_layer) {
    const double now = variance();
    if (first_variance_ < 0) first_variance_ = now;
    relative_ = share_of_first(now, first_variance_, layer == options_.min_layer);
    selects = relative_ < options_.threshold;
    if (options_.missed_mass > 0) selects = (missed_ = most_missed()) < options_.missed_mass;
  }
  if (!selects) return false;
  layer_ = layer;
  masses_.clear();
  ranks_.erase(ranks_.begin(), ranks_.end() - 1);
  return true;
}

KVKEEP_INLINE std::vector<std::int32_t> LayerSelector::tokens() const {
  std::vector<std::int32_t> kept;
  if (ranks_.empty() || tokens_ <= options_.select) {
    kept.resize(static_cast<std::size_t>(tokens_));
    std::iota(kept.begin(), kept.end(), 0);
    return kept;
  }
  const std::vector<std::int32_t>& newest = ranks_.back();
  for (std::size_t t = 0; t < newest.size(); ++t)
    if (newest[t] <= enough_) kept.push_back(static_cast<std::int32_t>(t));
  for (std::int64_t t = tokens_ - options_.window; t < tokens_; ++t) kept.push_back(static_cast<std::int32_t>(t));
  return kept;
}

KVKEEP_INLINE std::int64_t LayerSelector::bytes() const {
  std::int64_t bytes = 0;
  for (const std::vector<std::int32_t>& ranks : ranks_)
    bytes += static_cast<std::int64_t>(ranks.size() * sizeof(std::int32_t));
  for (const std::vector<float>& mass : masses_) bytes += static_cast<std::int64_t>(mass.size() * sizeof(float));
  return bytes;
}

}  // namespace kvkeep
