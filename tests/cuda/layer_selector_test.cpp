// SPDX-License-Identifier: Apache-2.0
// The layer where ranks settle, decided on a GPU: what the CPU decides, layer by layer, for prompts side by side.

#include "layer_selector.h"

#include <cmath>

#include "device.h"
#include "kvkeep/core/error.h"
#include "narrow.h"
#include "ranked_prompts.h"
#include "ranks.h"

namespace kvkeep::cuda::layer_selector_test {
namespace {

using LayerSelectorKernel = OnDevice;
using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

/// Scores that have these ranks.
Floats with_ranks(const Ints& ranks) {
  Floats scores;
  for (const std::int32_t r : ranks) scores.push_back(-static_cast<float>(r));
  return scores;
}

/// Prompts on their way through the layers of the device.
class Selecting {
 public:
  Selecting(const LayerSelectorOptions& options, const Ints& ranked, std::int64_t gap = 0)
      : options_(options),
        c_(ranked, gap),
        ring_(static_cast<std::size_t>((options.holds_masses() ? 2 : 1) * options.ranked_layers() * c_.elements)),
        states_(std::vector<LayerSelection>(ranked.size())),
        ranking_(static_cast<std::size_t>(ranks_workspace_bytes(c_.prompts))),
        comparing_(static_cast<std::size_t>(layer_selector_workspace_bytes(c_.prompts, options))) {}

  /// scores, masses: of every prompt. Those of prompts that have selected are looked at no more.
  void see(std::int32_t layer, const std::vector<Floats>& scores, const std::vector<Floats>& masses = {}) {
    const DeviceArray<float> there(flat(scores)), drawn(flat(masses));
    newest_ = ring_.data() + rank_place(options_, layer) * c_.elements;
    launch_ranks({.prompts = c_.prompts, .scores = there.data(), .ranks = newest_, .workspace = ranking_.data()},
                 nullptr);
    const bool may_select = options_.fixed_layer >= 0 || layer >= options_.min_layer;
    launch_layer_selector({.options = options_,
                           .layer = layer,
                           .prompts = c_.prompts,
                           .ranks = ring_.data(),
                           .masses = masses.empty() ? nullptr : drawn.data(),
                           .states = may_select ? states_.data() : nullptr,
                           .workspace = comparing_.data()},
                          nullptr);
  }
  [[nodiscard]] std::vector<LayerSelection> states() const { return states_.download(); }

  /// Of prompts that `layer` selected, their lists; others' are empty.
  [[nodiscard]] std::vector<Ints> tokens(std::int32_t layer) {
    std::vector<RankedPrompt> prompts = c_.prompts;
    std::int64_t places = 0;
    for (RankedPrompt& prompt : prompts) {
      prompt.kept = places;
      places += std::min(options_.select, prompt.ranked + options_.window);
    }
    const DeviceArray<std::int32_t> tokens(Ints(static_cast<std::size_t>(places), -1));
    launch_narrow({.prompts = prompts,
                   .select = options_.select,
                   .window = options_.window,
                   .ranks = newest_,
                   .states = states_.data(),
                   .layer = layer,
                   .tokens = tokens.data()},
                  nullptr);
    const Ints all = tokens.download();
    std::vector<Ints> lists;
    for (const RankedPrompt& prompt : prompts) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(prompt.kept),
                 end = begin + std::min(options_.select, prompt.ranked + options_.window);
      lists.emplace_back(begin, std::find(begin, end, -1));
    }
    return lists;
  }

 private:
  [[nodiscard]] Floats flat(const std::vector<Floats>& of_prompts) const {
    Floats all(static_cast<std::size_t>(c_.elements));
    for (std::size_t p = 0; p < of_prompts.size(); ++p)
      std::ranges::copy(of_prompts[p], all.begin() + static_cast<std::ptrdiff_t>(c_.prompts[p].scores));
    return all;
  }

  LayerSelectorOptions options_;
  RankedPrompts c_;
  DeviceArray<std::int32_t> ring_;
  DeviceArray<LayerSelection> states_;
  DeviceArray<std::byte> ranking_, comparing_;
  std::int32_t* newest_ = nullptr;
};

/// The same prompts on both machines: layers[l][p] are prompt p's scores in layer l, masses[l][p] its masses.
void expect_as_on_cpu(const LayerSelectorOptions& options, const std::vector<std::vector<Floats>>& layers,
                      const std::string& what, const std::vector<std::vector<Floats>>& masses = {}) {
  in_every_order([&] {
    Ints ranked;
    std::vector<LayerSelector> want;
    for (const Floats& scores : layers.front()) {
      ranked.push_back(static_cast<std::int32_t>(scores.size()));
      want.emplace_back(options, std::int64_t{ranked.back()} + options.window);
    }
    Selecting got(options, ranked, 1);
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(layers.size()); ++l) {
      if (!options.wants_ranks(l)) {
        for (const LayerSelector& w : want) ASSERT_FALSE(w.wants(l)) << what;
        continue;
      }
      const auto at = static_cast<std::size_t>(l);
      got.see(l, layers[at], masses.empty() ? std::vector<Floats>() : masses[at]);
      const std::vector<LayerSelection> states = got.states();
      const std::vector<Ints> lists = got.tokens(l);
      for (std::size_t p = 0; p < want.size(); ++p) {
        const bool selects =
            want[p].wants(l) && want[p].see(l, layers[at][p], masses.empty() ? Floats() : masses[at][p]);
        const double relative = want[p].relative_variance();
        ASSERT_EQ(states[p].layer, want[p].layer()) << what << ", layer " << l << ", prompt " << p;
        if (std::isnan(relative))
          ASSERT_TRUE(std::isnan(states[p].relative)) << what << ", layer " << l << ", prompt " << p;
        else
          ASSERT_EQ(states[p].relative, relative)
              << what << ", layer " << l << ", prompt " << p;  // whole numbers, divided alike
        ASSERT_EQ(lists[p], selects ? want[p].tokens() : Ints{}) << what << ", layer " << l << ", prompt " << p;
      }
    }
  });
}

TEST_F(LayerSelectorKernel, ComparesRanksOfTheTokensThatAnyLayerHasAmongItsBest) {  // G-A1
  Selecting selecting({.select = 3, .window = 1, .min_layer = 2, .observed_layers = 3, .threshold = -1}, {6});
  const Ints ranks[] = {{1, 2, 3, 4, 5, 6}, {2, 1, 3, 4, 6, 5}, {1, 3, 2, 4, 5, 6}};
  for (std::int32_t l = 0; l < 3; ++l) {
    EXPECT_EQ(selecting.states()[0].first, -1);
    selecting.see(l, {with_ranks(ranks[l])});
  }
  const LayerSelection state = selecting.states()[0];
  EXPECT_NEAR(state.first, 10.0 / 27, 1e-15);
  EXPECT_EQ(state.relative, 1.0);
  EXPECT_EQ(state.layer, -1);
}

TEST_F(LayerSelectorKernel, SelectsWhereTheVarianceFallsBelowItsShare) {  // G-A3
  const Ints layers[] = {{3, 1, 6, 2, 8, 5, 4, 7}, {8, 5, 1, 7, 2, 3, 6, 4}, {1, 7, 4, 8, 3, 6, 5, 2},
                         {6, 2, 1, 5, 4, 8, 3, 7}, {5, 2, 1, 6, 3, 8, 4, 7}, {6, 2, 1, 5, 3, 8, 4, 7}};
  const std::pair<double, std::int32_t> selected[] = {{0.01, -1}, {0.3, 5}, {0.9, 4}, {2.0, 3}};
  for (const auto& [threshold, layer] : selected) {
    Selecting selecting({.select = 5, .window = 2, .min_layer = 3, .observed_layers = 3, .threshold = threshold}, {8});
    for (std::int32_t l = 1; l < 6; ++l) {
      selecting.see(l, {with_ranks(layers[l])});
      const LayerSelection state = selecting.states()[0];
      EXPECT_EQ(state.layer, layer >= 0 && l >= layer ? layer : -1);
      if (threshold > 0.3) continue;
      if (l == 3) EXPECT_NEAR(state.first, 3.650794, 1e-6);
      if (l == 4) EXPECT_NEAR(state.relative, 0.852174, 1e-6);
      if (l == 5) EXPECT_NEAR(state.relative, 0.030435, 1e-6);
      EXPECT_EQ(selecting.tokens(l)[0], l == layer ? (Ints{1, 2, 4, 8, 9}) : Ints{});
    }
  }
}

TEST_F(LayerSelectorKernel, DecidesAsTheCpuForPromptsSideBySide) {
  oracle::Random random(31);
  for (int n = 0; n < oracle::random_case_count(30); ++n) {
    const std::int32_t window = random.between(1, 8), select = window + random.between(1, 20),
                       count = random.between(1, 8);
    LayerSelectorOptions options{.select = select,
                                 .window = window,
                                 .min_layer = random.between(0, 7),
                                 .observed_layers = random.between(1, 9),
                                 .threshold = random.one_of({-1.0, 0.0, 0.05, 0.3, 0.8, 1.5})};
    if (random.chance(0.15)) options.fixed_layer = random.between(0, count);
    std::vector<Floats> drift;
    for (int p = random.between(1, 4); p > 0; --p)
      drift.emplace_back(
          static_cast<std::size_t>(random.one_of({1, 2, 13, 31, 32, 33, 61, select - window, select - window + 1})));
    std::vector<std::vector<Floats>> layers;
    for (std::int32_t l = 0; l < options.min_layer + count; ++l) {
      for (Floats& scores : drift)
        for (float& x : scores) x += static_cast<float>(random.normal()) / static_cast<float>(1 + l * l);
      layers.push_back(drift);
    }
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(options, layers, "case " + std::to_string(n)));
  }
}

TEST_F(LayerSelectorKernel, TakesEqualAndTroubledScoresAsTheCpuDoes) {
  oracle::Random random(32);
  for (int n = 0; n < oracle::random_case_count(12); ++n) {
    std::vector<std::vector<Floats>> layers;
    for (int l = 0; l < 5; ++l)
      layers.push_back({troubled_scores(random, 40), Floats(23, 0.5F), troubled_scores(random, 17)});
    expect_as_on_cpu({.select = 12, .window = 3, .min_layer = 2, .observed_layers = 3, .threshold = 0.9}, layers,
                     "case " + std::to_string(n));
  }
}

TEST_F(LayerSelectorKernel, DividesByNoFirstVarianceOfZero) {
  const Floats same = with_ranks({1, 2, 3, 4}), other = with_ranks({4, 3, 2, 1});
  const LayerSelectorOptions options{.select = 3, .window = 1, .min_layer = 1, .observed_layers = 2, .threshold = 0.3};
  expect_as_on_cpu(options, {{same, same, other}, {same, same, same}, {same, other, other}, {same, other, same}},
                   "zero");
  Selecting settled(options, {4, 4});
  for (std::int32_t l = 0; l < 2; ++l) settled.see(l, {same, same});
  settled.see(2, {same, other});
  EXPECT_EQ(settled.states()[0].layer, 2) << "no variance at all is below any share";
  EXPECT_EQ(settled.states()[1].layer, -1);
  EXPECT_TRUE(std::isinf(settled.states()[1].relative));
}

/// Ranks of long prompts are given, not made: sums over several blocks, of which one token's can exceed 32 bits, are
/// those of one loop in exact integers.
TEST_F(LayerSelectorKernel, AddsUpExactlyOverManyBlocks) {
  constexpr std::int32_t kLayers = 40;
  oracle::Random random(33);
  const LayerSelectorOptions options{
      .select = 204, .window = 4, .min_layer = kLayers - 1, .observed_layers = kLayers, .threshold = 0.3};
  const RankedPrompts c({9001, 4097, 4096, 201, 200});
  std::vector<Ints> ring;
  for (int l = 0; l < kLayers; ++l) {
    Ints& ranks = ring.emplace_back();
    for (const RankedPrompt& prompt : c.prompts) {
      Ints own(static_cast<std::size_t>(prompt.ranked));
      for (std::size_t t = 0; t < own.size(); ++t) own[t] = static_cast<std::int32_t>(t) + 1;
      for (std::size_t t = own.size(); t > 1; --t)
        std::swap(own[t - 1], own[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(t) - 1))]);
      ranks.insert(ranks.end(), own.begin(), own.end());
    }
  }
  const auto variance = [&](const RankedPrompt& prompt) {
    std::uint64_t spread = 0, counted = 0;
    for (std::int64_t t = prompt.ranks; t < prompt.ranks + prompt.ranked; ++t) {
      std::uint64_t sum = 0, squares = 0;
      std::int32_t least = prompt.ranked;
      for (const Ints& ranks : ring) {
        const std::int32_t rank = ranks[static_cast<std::size_t>(t)];
        least = std::min(least, rank);
        sum += static_cast<std::uint64_t>(rank),
            squares += static_cast<std::uint64_t>(rank) * static_cast<std::uint64_t>(rank);
      }
      if (least > options.select - options.window) continue;
      spread += kLayers * squares - sum * sum;
      ++counted;
    }
    return static_cast<double>(spread) / (kLayers * kLayers) / static_cast<double>(counted);
  };
  Ints flat;
  for (const Ints& ranks : ring) flat.insert(flat.end(), ranks.begin(), ranks.end());
  in_every_order([&] {
    const DeviceArray<std::int32_t> ranks(flat);
    const DeviceArray<LayerSelection> states(std::vector<LayerSelection>(c.prompts.size()));
    const DeviceArray<std::byte> workspace(static_cast<std::size_t>(layer_selector_workspace_bytes(c.prompts)));
    launch_layer_selector({.options = options,
                           .layer = kLayers - 1,
                           .prompts = c.prompts,
                           .ranks = ranks.data(),
                           .states = states.data(),
                           .workspace = workspace.data()},
                          nullptr);
    const std::vector<LayerSelection> got = states.download();
    for (std::size_t p = 0; p < 4; ++p) EXPECT_EQ(got[p].first, variance(c.prompts[p])) << "prompt " << p;
    EXPECT_EQ(got[4].first, -1) << "all of its tokens go on anyway";
  });
}

/// Shares of attention that sum to less than 1, most of it on few tokens; troubled: some are equal, 0 or no number.
Floats random_masses(oracle::Random& random, std::size_t tokens, bool troubled) {
  Floats masses(tokens);
  double sum = 0;
  for (float& m : masses) {
    m = std::pow(static_cast<float>(random.unit()), 8.0F);
    if (troubled && random.chance(0.5)) m = random.one_of({0.25F, 0.25F, 0.0F, std::nanf(""), 1e-30F});
    sum += std::isnan(m) ? 0 : static_cast<double>(m);
  }
  const double left = random.one_of({0.999, 0.9, 0.5, 0.02});  // by the window
  for (float& m : masses) m = sum > 0 ? static_cast<float>(static_cast<double>(m) * left / sum) : m;
  return masses;
}

TEST_F(LayerSelectorKernel, SelectsByWhatTokensMissAndHoldAsTheCpuDoes) {
  oracle::Random random(34);
  int selected = 0, fewer = 0;
  for (int n = 0; n < oracle::random_case_count(40); ++n) {
    const std::int32_t window = random.between(1, 8), select = window + random.one_of({1, 2, 7, 20, 300}),
                       count = random.between(1, 6);
    LayerSelectorOptions options{.select = select,
                                 .window = window,
                                 .min_layer = random.between(0, 4),
                                 .observed_layers = random.between(1, 6),
                                 .threshold = 0.5,
                                 .missed_mass = random.one_of({0.0, 0.001, 0.05, 0.2, 0.6, 0.99}),
                                 .select_mass = random.one_of({1.0, 0.999, 0.9, 0.5, 0.1})};
    if (!options.reads_mass()) options.select_mass = 0.7;
    if (random.chance(0.15)) options.fixed_layer = random.between(0, count);
    std::vector<Floats> drift;
    for (int p = random.between(1, 4); p > 0; --p)
      drift.emplace_back(
          static_cast<std::size_t>(random.one_of({1, 2, 13, 31, 33, 61, 700, select - window, select - window + 1})));
    std::vector<std::vector<Floats>> layers, masses;
    for (std::int32_t l = 0; l < options.min_layer + count; ++l) {
      masses.emplace_back();
      for (Floats& scores : drift) {
        for (float& x : scores) x += static_cast<float>(random.normal()) / static_cast<float>(1 + l * l);
        masses.back().push_back(random_masses(random, scores.size(), n % 3 == 0));
        if (random.chance(0.5)) {  // tokens that rank high draw much
          Floats sorted = masses.back().back();
          std::ranges::sort(sorted, [](float a, float b) { return b != b ? a == a : a > b; });
          const Ints ranks = ranks_of(scores);
          for (std::size_t t = 0; t < ranks.size(); ++t)
            masses.back().back()[t] = sorted[static_cast<std::size_t>(ranks[t]) - 1];
        }
      }
      layers.push_back(drift);
    }
    ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(options, layers, "case " + std::to_string(n), masses));
    for (std::size_t p = 0; p < drift.size(); ++p) {
      LayerSelector one(options, std::int64_t{window} + std::ssize(drift[p]));
      for (std::int32_t l = 0; l < std::ssize(layers); ++l)
        if (const auto at = static_cast<std::size_t>(l); one.wants(l) && one.see(l, layers[at][p], masses[at][p]))
          ++selected, fewer += std::ssize(one.tokens()) < select;
    }
  }
  EXPECT_GE(selected, 3);
  EXPECT_GE(fewer, 3);
}

/// Over several blocks, against whole numbers of its own.
TEST_F(LayerSelectorKernel, AddsUpMassesExactlyOverManyBlocks) {
  constexpr std::int32_t kLayers = 3, kTokens = 9001, kWindow = 4;
  oracle::Random random(35);
  std::vector<Floats> masses;
  Floats scores(kTokens);
  for (float& x : scores) x = static_cast<float>(random.normal());
  const Ints ranks = ranks_of(scores);
  for (int l = 0; l < kLayers; ++l) masses.push_back(random_masses(random, kTokens, false));
  const auto whole = [](float m) { return static_cast<std::int64_t>(std::ldexp(static_cast<long double>(m), 44)); };
  std::vector<std::int64_t> by_rank(kTokens);
  std::int64_t held = std::int64_t{1} << 44;
  for (std::size_t t = 0; t < kTokens; ++t) {
    by_rank[static_cast<std::size_t>(ranks[t]) - 1] = whole(masses.back()[t]);
    held -= whole(masses.back()[t]);
  }
  std::int64_t wanted = held;  // what the window and 1234 tokens draw, to the last unit
  for (std::size_t k = 0; k < 1234; ++k) wanted += by_rank[k];
  const double share = std::ldexp(static_cast<double>(wanted), -44);
  std::int64_t most = 0;
  for (const Floats& of_layer : masses) {
    std::int64_t missed = 0;
    for (std::size_t t = 0; t < kTokens; ++t) missed += ranks[t] > 1234 ? whole(of_layer[t]) : 0;
    most = std::max(most, missed);
  }
  for (const bool one_more : {false, true})
    for (const bool selects : {false, true}) {
      LayerSelectorOptions options{.select = kWindow + 3000,
                                   .window = kWindow,
                                   .min_layer = kLayers - 1,
                                   .observed_layers = kLayers,
                                   .missed_mass = std::ldexp(static_cast<double>(most), -44),
                                   .select_mass = one_more ? std::nextafter(share, 1.0) : share};
      if (selects) options.missed_mass = std::nextafter(options.missed_mass, 1.0);
      in_every_order([&] {
        Selecting selecting(options, {kTokens});
        for (int l = 0; l < kLayers; ++l) selecting.see(l, {scores}, {masses[static_cast<std::size_t>(l)]});
        const LayerSelection state = selecting.states()[0];
        if (by_rank[1234] > 0) EXPECT_EQ(state.enough, one_more ? 1235 : 1234);
        if (!one_more) EXPECT_EQ(state.layer, selects ? kLayers - 1 : -1);
      });
    }
}

TEST_F(LayerSelectorKernel, KeepsPlacesWherePromptsAreLeftOut) {
  const LayerSelectorOptions options{.select = 3, .window = 1, .min_layer = 0, .observed_layers = 1, .threshold = 2};
  const RankedPrompts c({4, 5, 6});
  const DeviceArray<std::int32_t> ranks(Ints{1, 2, 3, 4, 5, 4, 3, 2, 1, 1, 2, 3, 4, 5, 6});
  const DeviceArray<LayerSelection> states(std::vector<LayerSelection>(3));
  const std::vector<RankedPrompt> left{c.prompts[0], c.prompts[2]};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(layer_selector_workspace_bytes(left)));
  launch_layer_selector({.options = options,
                         .layer = 0,
                         .prompts = left,
                         .ranks = ranks.data(),
                         .states = states.data(),
                         .workspace = workspace.data()},
                        nullptr);
  const std::vector<LayerSelection> got = states.download();
  EXPECT_EQ(got[0].layer, 0);
  EXPECT_EQ(got[1].layer, -1);
  EXPECT_EQ(got[2].layer, 0);
}

TEST_F(LayerSelectorKernel, RefusesOptionsByTheFieldsNameAndLayersThatAreNotWanted) {
  const auto message = [](const LayerSelectorOptions& options, std::int32_t layer, std::int32_t ranked = 1) {
    const RankedPrompt prompt{.ranked = ranked};
    try {
      launch_layer_selector({.options = options, .layer = layer, .prompts = {&prompt, 1}}, nullptr);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({.select = 32, .window = 32}, 4).find("select; given 32"), std::string::npos);
  EXPECT_NE(message({.window = 0}, 4).find("window; given 0"), std::string::npos);
  EXPECT_NE(message({.min_layer = -1}, 4).find("min_layer; given -1"), std::string::npos);
  EXPECT_NE(message({.observed_layers = 0}, 4).find("observed_layers; given 0"), std::string::npos);
  EXPECT_NE(message({.threshold = std::nan("")}, 4).find("threshold; given NaN"), std::string::npos);
  EXPECT_NE(message({.fixed_layer = -2}, 4).find("fixed_layer; given -2"), std::string::npos);
  EXPECT_NE(message({}, 4, -1).find("a prompt of -1 ranked tokens"), std::string::npos);
  EXPECT_NE(message({.min_layer = 1000, .observed_layers = 512}, 600, 1 << 23).find("fewer than 2^32"),
            std::string::npos);
  EXPECT_EQ(message({}, 2), "layer selector: the ranks of layer 2; allowed layers from 3 on");
  EXPECT_EQ(message({.fixed_layer = 5}, 6), "layer selector: the ranks of layer 6; allowed layer 5 alone");
  EXPECT_NE(message({.missed_mass = 1}, 4).find("missed_mass; given 1"), std::string::npos);
  EXPECT_NE(message({.select_mass = 0}, 4).find("select_mass; given 0"), std::string::npos);
  EXPECT_NE(message({.select_mass = 0.5}, 4).find("no masses"), std::string::npos);
  EXPECT_EQ(message({}, 3), "");
  EXPECT_THROW(launch_layer_selector({.layer = 2}, nullptr), StateError);
}

}  // namespace
}  // namespace kvkeep::cuda::layer_selector_test
