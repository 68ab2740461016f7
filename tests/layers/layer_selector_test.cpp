// SPDX-License-Identifier: Apache-2.0
// The layer where ranks settle: hand examples, what must hold for any scores, and what is refused.

#include "kvkeep/layers/layer_selector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/score/pool.h"
#include "oracle/random_case.h"

namespace kvkeep::layer_selector_test {
namespace {

using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

/// Scores that have these ranks.
Floats with_ranks(const Ints& ranks) {
  Floats scores;
  for (const std::int32_t r : ranks) scores.push_back(-static_cast<float>(r));
  return scores;
}

/// A prompt through all layers; its relative variances.
std::vector<double> run(LayerSelector& selector, const std::vector<Floats>& layers) {
  std::vector<double> ratios;
  for (std::int32_t l = 0; l < static_cast<std::int32_t>(layers.size()); ++l) {
    if (!selector.wants(l)) continue;
    static_cast<void>(selector.see(l, layers[static_cast<std::size_t>(l)]));
    ratios.push_back(selector.relative_variance());
  }
  return ratios;
}

TEST(Ranks, CountFromTheHighestScoreAndTakeTheLowerIndexOfEqualOnes) {
  EXPECT_EQ(ranks_of({}), Ints{});
  EXPECT_EQ(ranks_of(Floats{3, 1, 2}), (Ints{1, 3, 2}));
  EXPECT_EQ(ranks_of(Floats{1, 2, 2, 1}), (Ints{3, 1, 2, 4}));
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ranks_of(Floats{nan, -inf, nan, inf}), (Ints{3, 2, 4, 1}));
  // Pooled attention whose borders are divided by the whole kernel.
  const Floats u{1, 0, 0, 0, 0, 0, 0, 14};
  Floats v(8);
  pool_average(u.data(), 8, 7, v.data());
  EXPECT_EQ(ranks_of(v), (Ints{5, 6, 7, 8, 1, 2, 3, 4}));
}

TEST(Ranks, AreAPermutationForAnyScores) {
  oracle::Random random(1);
  for (const int n : {1, 2, 17, 64, 1000}) {
    Floats scores;
    for (int i = 0; i < n; ++i) scores.push_back(static_cast<float>(random.between(0, n / 3)));  // many are equal
    Ints ranks = ranks_of(scores);
    for (float& x : scores) x *= 3.5F;
    EXPECT_EQ(ranks, ranks_of(scores)) << "a scale changes nothing";
    std::sort(ranks.begin(), ranks.end());
    for (int i = 0; i < n; ++i) EXPECT_EQ(ranks[static_cast<std::size_t>(i)], i + 1);
  }
}

TEST(LayerSelector, ComparesRanksOfTheTokensThatAnyLayerHasAmongItsBest) {
  // Three layers, the best two of each: tokens 0, 1 and 2 count, with variances 2/9, 6/9 and 2/9.
  LayerSelector selector({.select = 3, .window = 1, .min_layer = 2, .observed_layers = 3, .threshold = -1}, 7);
  run(selector, {with_ranks({1, 2, 3, 4, 5, 6}), with_ranks({2, 1, 3, 4, 6, 5}), with_ranks({1, 3, 2, 4, 5, 6})});
  EXPECT_EQ(selector.relative_variance(), 1.0);
  // A fourth layer in which nothing but the order of the last two changes: 10/27 before; now {1,2,3},{2,1,3},{1,3,2} ->
  // {2,1,3},{1,3,2},{1,3,2}.
  static_cast<void>(selector.see(3, with_ranks({1, 3, 2, 4, 6, 5})));
  const double before = 10.0 / 27, now = (2.0 / 9 + 8.0 / 9 + 2.0 / 9) / 3;
  EXPECT_NEAR(selector.relative_variance(), now / before, 1e-12);
}

const std::vector<Floats>& six_layers() {
  static const std::vector<Floats> layers{with_ranks({3, 1, 6, 2, 8, 5, 4, 7}), with_ranks({8, 5, 1, 7, 2, 3, 6, 4}),
                                          with_ranks({1, 7, 4, 8, 3, 6, 5, 2}), with_ranks({6, 2, 1, 5, 4, 8, 3, 7}),
                                          with_ranks({5, 2, 1, 6, 3, 8, 4, 7}), with_ranks({6, 2, 1, 5, 3, 8, 4, 7})};
  return layers;
}

LayerSelector six(double threshold, std::int32_t fixed = -1) {
  return {
      {.select = 5, .window = 2, .min_layer = 3, .observed_layers = 3, .threshold = threshold, .fixed_layer = fixed},
      10};
}

TEST(LayerSelector, SelectsWhereTheVarianceFallsBelowItsShare) {
  LayerSelector none = six(0.01), late = six(0.3), middle = six(0.9), first = six(2);
  const std::vector<double> ratios = run(none, six_layers());
  ASSERT_EQ(ratios.size(), 5U) << "layers 1 to 5 are seen";
  EXPECT_TRUE(std::isnan(ratios[0]) && std::isnan(ratios[1]));
  EXPECT_EQ(ratios[2], 1.0);
  EXPECT_NEAR(ratios[3], 0.852174, 1e-6);
  EXPECT_NEAR(ratios[4], 0.030435, 1e-6);
  EXPECT_EQ(none.layer(), -1);
  run(late, six_layers());
  EXPECT_EQ(late.layer(), 5);
  EXPECT_EQ(late.tokens(), (Ints{1, 2, 4, 8, 9}));
  run(middle, six_layers());
  EXPECT_EQ(middle.layer(), 4);
  run(first, six_layers());
  EXPECT_EQ(first.layer(), 3);
  LayerSelector fixed = six(0.3, 3);
  run(fixed, six_layers());
  EXPECT_EQ(fixed.layer(), 3);
  EXPECT_EQ(fixed.tokens(), first.tokens());
  EXPECT_TRUE(std::isnan(fixed.relative_variance()));
  EXPECT_FALSE(first.wants(4)) << "nothing is seen after the selection";
  EXPECT_EQ(first.bytes(), 8 * 4) << "other layers' ranks are gone";
}

TEST(LayerSelector, HoldsForAnyScores) {
  oracle::Random random(2);
  for (int n = 0; n < 200; ++n) {
    const std::int32_t tokens = random.between(2, 60), window = random.between(1, 8),
                       select = window + random.between(1, 20), layers = random.between(1, 14);
    const LayerSelectorOptions options{.select = select,
                                       .window = window,
                                       .min_layer = random.between(0, 9),
                                       .observed_layers = random.between(1, 9),
                                       .threshold = 0};
    std::vector<Floats> scores;
    Floats drift(static_cast<std::size_t>(std::max(0, tokens - window)));
    for (std::int32_t l = 0; l < layers; ++l) {
      for (float& x : drift) x += static_cast<float>(random.normal()) / static_cast<float>(1 + l * l);
      scores.push_back(drift);
    }
    std::int32_t latest = layers;
    for (const double threshold : {-1.0, 0.0, 0.05, 0.3, 0.8, 1.0, 1.5, std::numeric_limits<double>::infinity()}) {
      LayerSelectorOptions with = options;
      with.threshold = threshold;
      LayerSelector selector(with, tokens);
      run(selector, scores);
      const std::int32_t at = selector.layer() < 0 ? layers : selector.layer();
      EXPECT_LE(at, latest) << "a larger threshold never selects later";
      latest = at;
      if (threshold <= 0 || tokens <= select) {
        EXPECT_EQ(selector.layer(), -1);
      }
      if (threshold > 1 && tokens > select && options.min_layer < layers) {
        EXPECT_EQ(selector.layer(), options.min_layer);
      }
      const Ints kept = selector.tokens();
      EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
      EXPECT_EQ(std::set<std::int32_t>(kept.begin(), kept.end()).size(), kept.size());
      const bool seen = selector.bytes() > 0;
      EXPECT_EQ(static_cast<std::int32_t>(kept.size()), seen ? std::min(select, tokens) : tokens);
      for (std::int32_t t = std::max(0, tokens - window); t < tokens; ++t)
        EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), t));
    }
  }
}

TEST(LayerSelector, DividesByNoFirstVarianceOfZero) {
  const Floats same = with_ranks({1, 2, 3, 4}), other = with_ranks({4, 3, 2, 1});
  LayerSelector settled({.select = 3, .window = 1, .min_layer = 1, .observed_layers = 2, .threshold = 0.3}, 5);
  run(settled, {same, same, same});
  EXPECT_EQ(settled.layer(), 2) << "no variance at all is below any share";
  LayerSelector moved({.select = 3, .window = 1, .min_layer = 1, .observed_layers = 2, .threshold = 0.3}, 5);
  run(moved, {same, same, other});
  EXPECT_EQ(moved.layer(), -1);
  EXPECT_TRUE(std::isinf(moved.relative_variance()));
}

TEST(LayerSelector, ObservesNoMoreLayersThanThereAreBeforeTheFirst) {
  LayerSelector selector({.select = 3, .window = 1, .min_layer = 1, .observed_layers = 8, .threshold = 2}, 6);
  EXPECT_TRUE(selector.wants(0));
  run(selector, {with_ranks({1, 2, 3, 4, 5}), with_ranks({2, 1, 3, 4, 5})});
  EXPECT_EQ(selector.layer(), 1);
}

TEST(LayerSelector, RefusesOptionsByTheFieldsName) {
  const auto message = [](const LayerSelectorOptions& options) {
    try {
      LayerSelector selector(options, 10);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({.select = 32, .window = 32}).find("select: 32"), std::string::npos);
  EXPECT_NE(message({.window = 0}).find("window: 0"), std::string::npos);
  EXPECT_NE(message({.min_layer = -1}).find("min_layer: -1"), std::string::npos);
  EXPECT_NE(message({.observed_layers = 0}).find("observed_layers: 0"), std::string::npos);
  EXPECT_NE(message({.threshold = std::nan("")}).find("threshold: "), std::string::npos);
  EXPECT_NE(message({.fixed_layer = -2}).find("fixed_layer: -2"), std::string::npos);
  EXPECT_EQ(message({}), "");
}

/// The window draws 1/4, with the best two tokens 3/4; what the others draw is missed, a NaN is nothing.
TEST(LayerSelector, AddsUpTheMassesOfTheBestAndOfTheRest) {
  for (const bool exactly : {true, false}) {
    LayerSelector selector({.select = 4,
                            .window = 1,
                            .min_layer = 0,
                            .observed_layers = 1,
                            .missed_mass = 0.3,
                            .select_mass = exactly ? 0.75 : 0.76},
                           6);
    EXPECT_TRUE(selector.see(0, with_ranks({3, 1, 5, 2, 4}), Floats{0.125F, 0.25F, std::nanf(""), 0.25F, 0.125F}));
    EXPECT_EQ(selector.missed_mass(), exactly ? 0.25 : 0.125);
    EXPECT_EQ(selector.tokens(), exactly ? (Ints{1, 3, 5}) : (Ints{0, 1, 3, 5}));
  }
}

TEST(LayerSelector, MissesAndHoldsTheSameMassInWhicheverOrderTokensLie) {
  oracle::Random random(61);
  constexpr std::size_t kTokens = 5000;
  Ints order(kTokens);
  Floats scores(kTokens), masses(kTokens);
  for (std::size_t t = 0; t < kTokens; ++t) {
    order[t] = static_cast<std::int32_t>(t);
    scores[t] = static_cast<float>(random.normal()) + 0.001F * static_cast<float>(t);
    masses[t] = std::ldexp(static_cast<float>(random.unit()), -random.between(9, 30)) / 2;
  }
  const LayerSelectorOptions options{
      .select = 1001, .window = 1, .min_layer = 0, .observed_layers = 1, .missed_mass = 1e-9, .select_mass = 0.99};
  std::set<double> missed;
  std::set<std::size_t> enough;
  for (int n = 0; n < 20; ++n) {
    Floats of_scores, of_masses;
    for (const std::int32_t t : order) {
      of_scores.push_back(scores[static_cast<std::size_t>(t)]);
      of_masses.push_back(masses[static_cast<std::size_t>(t)]);
    }
    LayerSelector selector(options, static_cast<std::int64_t>(kTokens) + 1);
    static_cast<void>(selector.see(0, of_scores, of_masses));
    missed.insert(selector.missed_mass());
    enough.insert(selector.tokens().size());
    for (std::size_t t = kTokens; t > 1; --t)
      std::swap(order[t - 1], order[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(t) - 1))]);
  }
  EXPECT_EQ(missed.size(), 1U);
  EXPECT_EQ(enough.size(), 1U);
}

TEST(LayerSelector, RefusesLayersOutOfOrderAndOtherNumbersOfScores) {
  LayerSelector selector = six(0.3);
  const std::vector<Floats>& layers = six_layers();
  EXPECT_THROW(selector.see(0, layers[0]), StateError) << "not wanted";
  EXPECT_THROW(selector.see(1, Floats(7)), InvalidArgument);
  EXPECT_FALSE(selector.see(1, layers[1]));
  EXPECT_THROW(selector.see(1, layers[1]), StateError);
  EXPECT_THROW(selector.see(3, layers[3]), StateError) << "layer 2 was left out";
  EXPECT_FALSE(selector.see(2, layers[2]));
}

}  // namespace
}  // namespace kvkeep::layer_selector_test
