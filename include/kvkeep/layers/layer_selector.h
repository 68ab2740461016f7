// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Chooses the layer of a prefill in which the ranking of the prompt's tokens has settled, and the tokens that continue
/// from there. Source: ASL (adaptive layer selection), its layer-wise rank variance and threshold; fixed_layer is
/// FastKV's rule. missed_mass and select_mass are ours. Differs: ranks are kept for the observed layers only; variances
/// are in double; among equal scores the lower index ranks first; never divides by a first variance of 0.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/machine_memory.h"

namespace kvkeep {

class Fields;

struct LayerSelectorOptions {
  std::int32_t select = 2048;        ///< tokens that continue, including the window; more than `window`
  std::int32_t window = 32;          ///< newest tokens of the prompt: they observe, are not ranked, and always continue
  std::int32_t min_layer = 10;       ///< first layer that may select
  std::int32_t observed_layers = 8;  ///< consecutive layers whose ranks are compared; at most min_layer + 1 of them
  double threshold =
      0.3;  ///< selects when the variance has fallen below this share of that at min_layer; 0 or less never selects
  std::int32_t fixed_layer = -1;  ///< selects exactly in this layer instead; -1: when ranks settle
  double missed_mass =
      0;  ///< above 0: selects, from min_layer on, when in each observed layer less than this share of attention went
          ///< to tokens that would not continue, whatever the ranks say (ours, not published); 0: when ranks settle
  double select_mass = 1;  ///< below 1: only as many of the best `select` tokens as, with the window, drew this share
                           ///< of the selecting layer's attention (ours)

  /// Layers whose ranks are held at a time.
  [[nodiscard]] constexpr std::int32_t ranked_layers() const {
    if (fixed_layer >= 0) return 1;
    return observed_layers <= min_layer ? observed_layers : min_layer + 1;
  }
  /// True if a layer's scores must be ranked, as long as the prompt has not selected.
  [[nodiscard]] constexpr bool wants_ranks(std::int32_t layer) const {
    return fixed_layer >= 0 ? layer == fixed_layer : layer > min_layer - ranked_layers();
  }
  /// True if see() needs masses besides scores.
  [[nodiscard]] bool reads_mass() const { return missed_mass > 0 || select_mass < 1; }
  /// True if the masses of layers are compared, as many as ranks are held of.
  [[nodiscard]] bool holds_masses() const { return missed_mass > 0 && fixed_layer < 0; }

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
  /// Options of sub-object `layers` for a layer where ranks settle.
  void describe(Fields& f);
};

/// The state of one prompt, on the device. A prompt begins with LayerSelection{}.
struct LayerSelection {
  double first = -1;                                           ///< variance at min_layer; below 0: not known yet
  double relative = std::numeric_limits<double>::quiet_NaN();  ///< of the newest layer seen, as a share of `first`; NaN
                                                               ///< if none was computed
  std::int32_t layer = -1;                                     ///< that selected; -1: none so far
  std::int32_t enough = -1;  ///< ranks up to this continue, under select_mass; -1: as many as `select` leaves beside
                             ///< the window
};

/// Ranks of `scores`: 1 for the highest, a permutation of 1 to scores.size(). Among equal scores the lower index is
/// first; NaN last. Cost: a sort.
[[nodiscard]] std::vector<std::int32_t> ranks_of(std::span<const float> scores);

/// A share of attention as a whole number of 2^-44: a sum of them does not depend on its order. Exact from 2^-20 on,
/// below that rounded down. NaN and less than 0 count nothing, more than 65536 as much as that.
[[nodiscard]] KVKEEP_HD inline std::uint64_t mass_units(float share) {
  constexpr float kMost = 65536;
  return share > 0 ? static_cast<std::uint64_t>(static_cast<double>(share < kMost ? share : kMost) * 0x1p44) : 0;
}
/// The share that a sum of such numbers is.
[[nodiscard]] KVKEEP_HD inline double mass_of_units(std::int64_t units) { return static_cast<double>(units) * 0x1p-44; }

/// One prompt on its way through the layers.
class LayerSelector {
 public:
  /// `tokens`: length of the prompt. Throws InvalidArgument with all of options.problems().
  LayerSelector(LayerSelectorOptions options, std::int64_t tokens);

  /// True if see() needs this layer's scores: not before they are useful, not after the selection, and never if the
  /// whole prompt continues anyway.
  [[nodiscard]] bool wants(std::int32_t layer) const;

  /// Call it in ascending order for every layer that wants() names. `scores`: f32 [tokens - window] of every ranked
  /// token; higher is more important, any scale. `mass`, if options.reads_mass(): f32 [tokens - window] share of the
  /// window's attention that each of these tokens drew (the window's own tokens drew the remaining share). Returns true
  /// if this layer selects. Throws StateError for a layer that is not wanted or came before, InvalidArgument for a
  /// wrong number of scores or masses. Cost: ranks_of(), one pass over observed_layers * tokens ranks and, if
  /// missed_mass is set, as many masses.
  bool see(std::int32_t layer, std::span<const float> scores, std::span<const float> mass = {});

  /// The layer that selected; -1: none so far.
  [[nodiscard]] std::int32_t layer() const { return layer_; }
  /// Variance of the newest layer seen, as a share of that at min_layer; NaN if none was computed.
  [[nodiscard]] double relative_variance() const { return relative_; }
  /// Largest share of attention that an observed layer gave to tokens that would not continue; NaN if
  /// options.missed_mass is 0 or min_layer has not been seen.
  [[nodiscard]] double missed_mass() const { return missed_; }
  /// Tokens that continue: the best of the newest layer seen, and the window. Ascending; min(select, tokens) of them
  /// (fewer with select_mass). All tokens before any layer was seen.
  [[nodiscard]] std::vector<std::int32_t> tokens() const;

  /// Mean over `counted` tokens of the variance of their ranks in `layers` layers: `high` * 2^32 + `low` is the sum of
  /// layers^2 times each variance.
  [[nodiscard]] KVKEEP_HD static double mean_variance(double high, double low, std::int32_t layers, double counted) {
    const auto wide = static_cast<double>(layers);
    return (product(high, 4294967296.0) + low) / (wide * wide) / counted;
  }
  /// A layer's variance as a share of `first`, that at min_layer; `is_first`: it is that.
  [[nodiscard]] KVKEEP_HD static double share_of_first(double variance, double first, bool is_first) {
    if (is_first) return 1;
    if (first > 0) return variance / first;
    return variance == 0 ? 0 : static_cast<double>(INFINITY);
  }

  /// Bytes of the ranks and masses held.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  [[nodiscard]] double variance() const;
  [[nodiscard]] double most_missed() const;
  [[nodiscard]] std::int64_t enough(std::span<const float> mass) const;

  LayerSelectorOptions options_;
  std::int64_t tokens_;
  std::vector<std::vector<std::int32_t>> ranks_;  ///< of the newest layers, oldest first; at most observed()
  std::vector<std::vector<float>> masses_;        ///< the same for masses, if options_.missed_mass is set
  std::int64_t best_;                             ///< ranks up to this are compared between layers
  std::int64_t enough_;                           ///< ranks up to this continue; fewer with select_mass
  std::int32_t seen_ = -1;
  std::int32_t layer_ = -1;
  double first_variance_ = -1;  ///< at min_layer; below 0: not computed yet
  double relative_;
  double missed_;
};

// The ranks of one prompt's tokens from layer to layer, in a machine's memory: a LayerSelector, wherever it runs.

/// What one prompt is ranked by; machines update it. After Event::rank() layer() and relative_variance() say what they
/// said before, until ChosenTokens::read() has returned.
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
  DeviceMemory ring;       ///< on a device: i32 [ranked_layers()][tokens before the window], and behind it as many f32
                           ///< masses if options.holds_masses()
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/layer_selector-inl.h"
#endif
