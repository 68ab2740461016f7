#pragma once
/// Chooses the layer of a prefill where the ranking of the prompt's tokens has settled, and the tokens that go on from
/// there. Source: ASL (adaptive layer selection), its layer-wise rank variance and threshold; fixed_layer is FastKV's
/// rule. missed_mass and select_mass are ours. Differs: ranks are kept for the observed layers alone; variances in
/// double; equal scores rank the lower index first; a first variance of 0 divides nothing.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvkeep {

struct LayerSelectorOptions {
  std::int32_t select = 2048;   ///< tokens that go on, the window's included; more than `window`
  std::int32_t window = 32;     ///< newest tokens of the prompt: they observe, are not ranked, and always go on
  std::int32_t min_layer = 10;  ///< first layer that may select
  std::int32_t observed_layers =
      8;  ///< consecutive layers whose ranks are compared; no more than min_layer + 1 of them are
  double threshold =
      0.3;  ///< selects where the variance has fallen below this share of that at min_layer; 0 or less never selects
  std::int32_t fixed_layer = -1;  ///< selects exactly here instead; -1: where ranks settle
  double missed_mass = 0;  ///< above 0: selects, from min_layer on, where in each of the observed layers less than this
                           ///< share of attention went to tokens that would not go on, whatever the ranks say (ours,
                           ///< not published); 0: where ranks settle
  double select_mass = 1;  ///< below 1: of the `select` tokens only the best that, with the window, drew this share of
                           ///< the selecting layer's attention (ours)

  /// True where see() must be told masses beside scores.
  [[nodiscard]] bool reads_mass() const { return missed_mass > 0 || select_mass < 1; }

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// Ranks of `scores`: 1 for the highest, a permutation of 1 to scores.size(). Equal scores: the lower index first; NaN
/// last. Cost: a sort.
[[nodiscard]] std::vector<std::int32_t> ranks_of(std::span<const float> scores);

/// One prompt on its way through the layers.
class LayerSelector {
 public:
  /// tokens: of the prompt. Throws InvalidArgument with all of options.problems().
  LayerSelector(LayerSelectorOptions options, std::int64_t tokens);

  /// True where see() must be told this layer's scores: not before they are of use, not after the selection, and never
  /// where the whole prompt goes on anyway.
  [[nodiscard]] bool wants(std::int32_t layer) const;

  /// scores: f32 [tokens - window] of every token that is ranked; higher is more important, any scale. Layers ascend,
  /// none that wants() names is left out. mass: where options.reads_mass(), f32 [tokens - window] share of the window's
  /// attention that each of these tokens drew (what the window's own tokens drew is missing from 1). Returns true where
  /// this layer selects. Throws StateError for a layer that is not wanted or came before, InvalidArgument for another
  /// number of scores or masses. Cost: ranks_of(), and one pass over observed_layers * tokens ranks, and where
  /// missed_mass is set as many masses.
  bool see(std::int32_t layer, std::span<const float> scores, std::span<const float> mass = {});

  /// The layer that selected; -1: none so far.
  [[nodiscard]] std::int32_t layer() const { return layer_; }
  /// Of the newest layer seen: its variance as a share of that at min_layer; NaN where none was computed.
  [[nodiscard]] double relative_variance() const { return relative_; }
  /// Largest share of attention that an observed layer gave to tokens that would not go on; NaN where
  /// options.missed_mass is 0 or min_layer was not seen.
  [[nodiscard]] double missed_mass() const { return missed_; }
  /// Tokens that go on: the best of the newest layer seen and the window, ascending, min(select, tokens) of them (fewer
  /// under select_mass); all before any layer was seen.
  [[nodiscard]] std::vector<std::int32_t> tokens() const;

  /// Bytes of ranks and masses that are held.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  [[nodiscard]] std::int32_t observed() const;
  [[nodiscard]] double variance() const;
  [[nodiscard]] double most_missed() const;
  [[nodiscard]] std::int64_t enough(std::span<const float> mass) const;

  LayerSelectorOptions options_;
  std::int64_t tokens_;
  std::vector<std::vector<std::int32_t>> ranks_;  ///< of the newest layers, oldest first; at most observed()
  std::vector<std::vector<float>> masses_;        ///< the same of masses, where options_.missed_mass is set
  std::int64_t best_;                             ///< ranks up to this are compared between layers
  std::int64_t enough_;                           ///< ranks up to this go on; fewer under select_mass
  std::int32_t seen_ = -1;
  std::int32_t layer_ = -1;
  double first_variance_ = -1;  ///< at min_layer; below 0: not there yet
  double relative_;
  double missed_;
};

}  // namespace kvkeep
