// SPDX-License-Identifier: Apache-2.0
// Policies that narrow prompts, layer by layer, against plain loops in double over random prompts.

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <set>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/gemfilter.h"
#include "kvkeep/policy/pyramidinfer.h"
#include "kvkeep/score/window_attention.h"
#include "layered_prompt.h"

namespace kvkeep::prefill_policies_test {
namespace {

using namespace testing;

constexpr double kNear = 1e-4;  ///< what single precision makes of sums over a window and all heads

/// What a policy did to one prompt.
struct Outcome {
  std::vector<Ints> present;               ///< [layers that ran] places of the tokens that entered
  std::vector<std::vector<Ints>> kept;     ///< [layers that ran][heads] places whose slots stay
  std::vector<std::optional<Ints>> going;  ///< [layers that ran] places of those that went on, where the layer narrowed
  Doubles ratio;                           ///< NaN where there is none
  std::int32_t selected = -1;
  std::optional<Reason> ended;  ///< why the pass ended, where it did
  Ints tokens;
  bool restart = false;

  [[nodiscard]] bool same_tokens(const Outcome& o) const {
    return present == o.present && kept == o.kept && going == o.going && selected == o.selected && tokens == o.tokens &&
           restart == o.restart;
  }
};

Ints at(const Ints& present, std::span<const std::int32_t> places) {
  Ints out;
  for (const std::int32_t place : places) out.push_back(present[static_cast<std::size_t>(place)]);
  return out;
}

Outcome run(const KVPolicy& policy, const LayeredPrompt& prompt) {
  Outcome out;
  out.tokens = prompt.all();
  const std::unique_ptr<PromptPass> pass = policy.begin_prompt(host(), prompt.spec, prompt.shape.tokens);
  for (std::int32_t l = 0; l < prompt.shape.layers && !out.restart; ++l) {
    const Ints present = out.tokens;
    const auto n = static_cast<std::int32_t>(present.size()), wanted = pass->wants(l, n);
    EXPECT_LE(wanted, n);
    Decision decision;
    if (wanted > 0) decision = policy.decide(*pass, PromptLayer(prompt, l, present, wanted).evidence());
    out.present.push_back(present);
    out.kept.emplace_back(static_cast<std::size_t>(prompt.shape.kv_heads), present);
    if (decision.keep)
      for (std::size_t h = 0; h < out.kept.back().size(); ++h) out.kept.back()[h] = at(present, decision.keep->row(h));
    out.ratio.push_back(decision.relative_variance.value_or(std::nan("")));
    if (decision.reason == Reason::select_layer) out.selected = l;
    out.going.emplace_back();
    if (!decision.narrow) continue;
    EXPECT_EQ(decision.narrow->indptr, (std::vector<std::int64_t>{0, decision.narrow->tokens.numel()}));
    out.tokens = at(present, {decision.narrow->tokens.data<std::int32_t>(),
                              static_cast<std::size_t>(decision.narrow->tokens.numel())});
    out.going.back() = out.tokens;
    out.restart = decision.narrow->restart;
    if (out.restart) out.ended = decision.reason;
  }
  return out;
}

Outcome run(const std::string& policy, const LayeredPrompt& prompt) { return run(*make_policy(policy), prompt); }

/// Prompts of every dtype and group, several seeds.
template <class Body>
void each_prompt(PromptShape shape, std::uint64_t seeds, Body&& body) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
    for (const std::int32_t group : {1, 2, 4})
      for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        shape.dtype = dtype;
        shape.group = group;
        const std::uint64_t number = seed * 100 + static_cast<std::uint64_t>(group);
        SCOPED_TRACE(text(dtype, ", ", group, " query heads a KV head, seed ", number));
        body(LayeredPrompt(shape, number));
        if (::testing::Test::HasFatalFailure()) return;
      }
}

bool holds_window(const Ints& kept, std::int32_t tokens, std::int32_t window) {
  for (std::int32_t t = tokens - window; t < tokens; ++t)
    if (!std::binary_search(kept.begin(), kept.end(), t)) return false;
  return std::is_sorted(kept.begin(), kept.end()) &&
         std::set<std::int32_t>(kept.begin(), kept.end()).size() == kept.size();
}

/// No layer narrowed, and every slot stays but where `cache` says otherwise.
void expect_whole(const Outcome& out, const LayeredPrompt& prompt, std::int32_t cache = 0) {
  const Ints all = prompt.all();
  EXPECT_EQ(out.selected, -1);
  EXPECT_EQ(out.tokens, all);
  EXPECT_FALSE(out.restart);
  ASSERT_EQ(out.present.size(), static_cast<std::size_t>(prompt.shape.layers));
  for (std::size_t l = 0; l < out.present.size(); ++l) {
    EXPECT_EQ(out.present[l], all);
    EXPECT_FALSE(out.going[l].has_value());
    for (const Ints& row : out.kept[l]) {
      if (cache == 0 || static_cast<std::size_t>(cache) >= all.size())
        EXPECT_EQ(row, all);
      else
        EXPECT_EQ(row.size(), static_cast<std::size_t>(cache));
    }
  }
}

constexpr const char* kAsl = "asl,budget=24,window=6,pool=5,min_layer=3,observed_layers=3";

TEST(Asl, WithoutAThresholdNarrowsNothingAndCutsOnlyWhereACacheIsAskedFor) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    for (const char* threshold : {",threshold=0", ",threshold=-3"}) {
      const Outcome plain = run(text(kAsl, threshold), prompt), small = run(text(kAsl, threshold, ",cache=20"), prompt);
      expect_whole(plain, prompt);
      expect_whole(small, prompt, 20);
      EXPECT_EQ(plain.ratio[3], 1.0);
      EXPECT_EQ(plain.ratio[8], small.ratio[8]) << "what is stored does not change what is observed";
    }
  });
}

TEST(Asl, AboveOneIsFastKvAtTheFirstLayer) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    for (const char* cache : {"", ",cache=16", ",cache=40", ",cache_mass=0.9"})
      for (const std::int32_t layer : {0, 3, 8}) {
        const Outcome asl =
            run(text("asl,budget=24,window=6,pool=5,min_layer=", layer, ",observed_layers=3,threshold=1.01", cache),
                prompt);
        const Outcome fast = run(text("fastkv,budget=24,window=6,pool=5,layer=", layer, cache), prompt);
        EXPECT_EQ(asl.selected, layer);
        EXPECT_EQ(asl.ratio[static_cast<std::size_t>(layer)], 1.0);
        EXPECT_TRUE(asl.same_tokens(fast)) << cache << " at layer " << layer;
        for (const double ratio : fast.ratio) EXPECT_TRUE(std::isnan(ratio));
      }
  });
}

TEST(Asl, NeverSelectsLaterUnderALargerThreshold) {
  std::set<std::int32_t> seen;
  each_prompt({.layers = 12}, 3, [&](const LayeredPrompt& prompt) {
    std::int32_t latest = prompt.shape.layers;
    for (const double threshold : {-1.0, 0.0, 0.02, 0.1, 0.3, 0.6, 0.9, 1.0, 1.1}) {
      const Outcome out = run(text(kAsl, ",threshold=", threshold), prompt);
      const std::int32_t layer = out.selected < 0 ? prompt.shape.layers : out.selected;
      EXPECT_LE(layer, latest);
      seen.insert(latest = layer);
    }
    EXPECT_EQ(latest, 3);
  });
  EXPECT_GE(seen.size(), 6U) << "the prompts settle in different layers";
}

TEST(Asl, LeavesAPromptThatFitsAlone) {  // A-6, 1.12
  for (const std::int32_t tokens : {1, 2, 5, 6, 7, 23, 24}) {
    const LayeredPrompt prompt({.tokens = tokens}, static_cast<std::uint64_t>(tokens));
    SCOPED_TRACE(text(tokens, " tokens"));
    for (const char* policy :
         {"asl,budget=24,window=6,min_layer=3,threshold=2", "asl,budget=24,window=6,min_layer=3,threshold=2,cache=24",
          "asl,budget=24,window=6,min_layer=3,threshold=2,cache_mass=0.5",
          "asl-2pass,budget=24,window=6,min_layer=3,threshold=2", "asl-2pass,budget=24,window=6,indices=last_query",
          "fastkv,budget=24,window=6,layer=4", "gemfilter,budget=24,layer=2",
          "asl,budget=24,window=6,min_layer=3,missed_mass=0.9,select_mass=0.1"}) {
      expect_whole(run(policy, prompt), prompt);
      const auto made = make_policy(policy);
      const auto pass = made->begin_prompt(host(), prompt.spec, tokens);
      for (std::int32_t l = 0; l < 9; ++l) EXPECT_EQ(pass->wants(l, tokens), 0) << policy;
    }
  }
}

TEST(Asl, KeepsAllSlotsOfALayerThatTheCacheHolds) {  // 1.12: more than the budget, no more than the cache
  const LayeredPrompt prompt({.tokens = 30}, 5);
  const Outcome out = run("asl,budget=20,window=6,min_layer=4,threshold=2,cache=30", prompt);
  EXPECT_EQ(out.selected, 4);
  for (std::size_t l = 0; l < 9; ++l)
    for (const Ints& row : out.kept[l]) EXPECT_EQ(row, out.present[l]);
  const Outcome smaller = run("asl,budget=20,window=6,min_layer=4,threshold=2,cache=29", prompt);
  EXPECT_EQ(smaller.kept[4][0].size(), 29U);
  EXPECT_EQ(smaller.kept[5][0].size(), 20U);
}

TEST(Asl, MaySelectAtTheLastLayerWhereNoneIsLeftToNarrow) {  // 1.12
  const LayeredPrompt prompt({}, 6);
  const Outcome out = run("asl,budget=24,window=6,min_layer=8,threshold=2,cache=24", prompt),
                fast = run("fastkv,budget=24,window=6,layer=8,cache=24", prompt);
  EXPECT_EQ(out.selected, 8);
  EXPECT_EQ(out.tokens.size(), 24U);
  EXPECT_EQ(out.tokens, fast.tokens);
  for (const auto& layer : out.present) EXPECT_EQ(layer.size(), 60U);
}

TEST(PrefillPolicies, RefuseLayersThatTheModelDoesNotHave) {
  const LayeredPrompt prompt({}, 1);
  for (const char* policy : {"asl,budget=64,min_layer=9", "asl-2pass,budget=64,min_layer=9", "fastkv,budget=64,layer=9",
                             "gemfilter,budget=64,layer=9"}) {
    const std::vector<std::string> found = make_policy(policy)->problems(prompt.spec);
    ASSERT_EQ(found.size(), 1U) << policy;
    EXPECT_NE(found[0].find("layer: 9; allowed 0 to 8"), std::string::npos) << found[0];
  }
  for (const char* policy : {"asl,budget=64,min_layer=8", "asl,budget=64", "fastkv,budget=64,layer=8",
                             "gemfilter,budget=64,layer=8", "pyramidinfer"})
    EXPECT_TRUE(make_policy(policy)->problems(prompt.spec).empty()) << policy;

  ModelSpec sliding = prompt.spec;
  sliding.layers[4] = {LayerKind::sliding, 16, -1};
  for (const char* policy : {"asl,budget=64", "asl-2pass,budget=64", "fastkv,budget=64,layer=8",
                             "gemfilter,budget=64,layer=8", "pyramidinfer"}) {
    const std::vector<std::string> found = make_policy(policy)->problems(sliding);
    ASSERT_EQ(found.size(), 1U) << policy;
    EXPECT_NE(found[0].find("1 of 9 layers"), std::string::npos) << found[0];
  }
}

/// Mean over the tokens that any layer has among its best `best` of the variance of their ranks.
double variance(const std::vector<Ints>& ranks, std::int32_t best) {
  double sum = 0;
  std::int64_t counted = 0;
  for (std::size_t t = 0; t < ranks.front().size(); ++t) {
    double mean = 0, squares = 0;
    bool any = false;
    for (const Ints& r : ranks)
      any = any || r[t] <= best, mean += static_cast<double>(r[t]) / static_cast<double>(ranks.size());
    if (!any) continue;
    for (const Ints& r : ranks) squares += (r[t] - mean) * (r[t] - mean) / static_cast<double>(ranks.size());
    sum += squares, ++counted;
  }
  return sum / static_cast<double>(counted);
}

struct AslCase {
  std::int32_t budget, window, pool, min_layer, observed;
  double threshold;
  std::int32_t cache;
  bool maximum;
};

TEST(Asl, DoesWhatPlainLoopsDo) {  // and the published steps 1 to 6
  int selections = 0, none = 0;
  const AslCase cases[] = {{24, 6, 5, 3, 3, 0.5, 0, false},
                           {30, 4, 7, 2, 8, 0.7, 30, false},
                           {20, 8, 3, 4, 4, 0.6, 14, true},
                           {40, 2, 1, 1, 2, 0.8, 12, false},
                           {9, 8, 5, 0, 8, 0.9, 50, true}};
  each_prompt({.layers = 10}, 1, [&](const LayeredPrompt& prompt) {
    const std::int32_t tokens = prompt.shape.tokens;
    for (const AslCase& c : cases) {
      SCOPED_TRACE(text("budget ", c.budget, ", window ", c.window, ", pool ", c.pool, ", min_layer ", c.min_layer));
      const Outcome out =
          run(text("asl,budget=", c.budget, ",window=", c.window, ",pool=", c.pool,
                   ",pooling=", c.maximum ? "max" : "avg", ",min_layer=", c.min_layer, ",observed_layers=", c.observed,
                   ",threshold=", c.threshold, c.cache > 0 ? text(",cache=", c.cache) : ""),
              prompt);
      std::vector<Ints> ranks;
      double first = -1;
      for (std::int32_t l = 0; l < prompt.shape.layers; ++l) {
        const auto i = static_cast<std::size_t>(l);
        const Ints& present = out.present[i];
        const auto n = static_cast<std::int32_t>(present.size());
        ASSERT_EQ(n, out.selected >= 0 && l > out.selected ? std::min(c.budget, tokens) : tokens);
        for (std::int32_t h = 0; h < prompt.shape.kv_heads; ++h) {
          const Ints& row = out.kept[i][static_cast<std::size_t>(h)];
          ASSERT_TRUE(holds_window(row, tokens, c.window)) << "layer " << l;
          if (c.cache == 0 || n <= c.cache) {
            ASSERT_EQ(row, present);
            continue;
          }
          ASSERT_EQ(row.size(), static_cast<std::size_t>(c.cache)) << "layer " << l;
          Ints places;
          for (std::int32_t j = 0; j < n - c.window; ++j)
            if (std::binary_search(row.begin(), row.end(), present[static_cast<std::size_t>(j)])) places.push_back(j);
          ASSERT_TRUE(none_better(prompt.head_scores(l, present, h, c.window, c.pool, c.maximum), places, kNear))
              << "layer " << l << ", head " << h;
        }
        if (out.selected >= 0 && l > out.selected) {
          ASSERT_TRUE(std::isnan(out.ratio[i]) && !out.going[i]);
          continue;
        }
        const Doubles scores = prompt.token_scores(l, present, c.window, c.pool, c.maximum);
        ranks.push_back(ranks_in(scores));
        if (static_cast<std::int32_t>(ranks.size()) > std::min(c.observed, c.min_layer + 1)) ranks.erase(ranks.begin());
        if (l < c.min_layer) {
          ASSERT_TRUE(std::isnan(out.ratio[i]) && !out.going[i]);
          continue;
        }
        const double now = variance(ranks, c.budget - c.window);
        if (first < 0) first = now;
        if (l == c.min_layer)
          ASSERT_EQ(out.ratio[i], 1.0);
        else if (first > 0)
          ASSERT_NEAR(out.ratio[i], now / first, 1e-3 * (1 + now / first)) << "layer " << l;
        ASSERT_EQ(out.going[i].has_value(), out.ratio[i] < c.threshold);
        if (!out.going[i]) continue;
        ASSERT_EQ(out.selected, l);
        ASSERT_EQ(out.tokens.size(), static_cast<std::size_t>(c.budget));
        ASSERT_TRUE(holds_window(out.tokens, tokens, c.window));
        Ints best = out.tokens;
        best.resize(best.size() - static_cast<std::size_t>(c.window));
        ASSERT_TRUE(none_better(scores, best, kNear));
      }
      (out.selected < 0 ? none : selections) += 1;
    }
  });
  EXPECT_GE(selections, 15) << "the rule was used";
  EXPECT_GE(none, 1);
}

TEST(Asl, DoesNotDependOnTheScaleOfTheScores) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    std::vector<LayerSelector> selectors;
    for (int i = 0; i < 3; ++i)
      selectors.emplace_back(
          LayerSelectorOptions{.select = 24, .window = 6, .min_layer = 2, .observed_layers = 3, .threshold = 0.6},
          prompt.shape.tokens);
    for (std::int32_t l = 0; l < prompt.shape.layers && selectors[0].layer() < 0; ++l) {
      if (!selectors[0].wants(l)) continue;
      const PromptLayer layer(prompt, l, prompt.all(), 6);
      const Array scores = prompt_scores(layer.evidence(), {.window = 6, .pool = 5}).tokens;
      for (std::size_t i = 0; i < 3; ++i) {
        std::vector<float> scaled(scores.data<float>(), scores.data<float>() + scores.numel());
        for (float& x : scaled) x *= i == 0 ? 1.0F : i == 1 ? 0.125F : 1024.0F;
        static_cast<void>(selectors[i].see(l, scaled));
      }
    }
    for (std::size_t i = 1; i < 3; ++i) {
      EXPECT_EQ(selectors[i].layer(), selectors[0].layer());
      EXPECT_EQ(selectors[i].relative_variance(), selectors[0].relative_variance());
      EXPECT_EQ(selectors[i].tokens(), selectors[0].tokens());
    }
  });
}

TEST(Asl, OfEqualScoresNarrowsToTheLowerIndexAndStoresTheLargerSlot) {
  LayeredPrompt prompt({.tokens = 20}, 1);
  for (Array& keys : prompt.keys) keys.fill_(0);
  const Outcome out = run("fastkv,budget=8,window=3,pool=1,layer=2,cache=7", prompt);
  EXPECT_EQ(out.tokens, (Ints{0, 1, 2, 3, 4, 17, 18, 19}));
  EXPECT_EQ(out.kept[0][0], (Ints{13, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(out.kept[3][1], (Ints{1, 2, 3, 4, 17, 18, 19}));
}

TEST(Asl, TakesAThirdOfTheModelsLayersUnlessItIsTold) {
  for (const std::int32_t layers : {9, 11, 12}) {
    const LayeredPrompt prompt({.layers = layers}, 3);
    EXPECT_EQ(run("asl,budget=24,window=6,threshold=2", prompt).selected, layers / 3);
  }
  const LayeredPrompt two({.layers = 2}, 3);
  EXPECT_EQ(run("asl,budget=24,window=6,threshold=2", two).selected, 0);
}

TEST(Asl, StoresPerHeadTheSlotsThatHoldTheAskedShare) {  // 1.11.5
  each_prompt({.layers = 9, .tokens = 70}, 1, [](const LayeredPrompt& prompt) {
    constexpr std::int32_t kWindow = 6;
    for (const double mass : {0.3, 0.8, 0.97})
      for (const bool official : {false, true}) {
        const Outcome out = run(text("asl,budget=24,window=", kWindow, ",min_layer=4,threshold=2,cache_mass=", mass,
                                     official ? ",variant=official" : ""),
                                prompt);
        ASSERT_EQ(out.selected, 4);
        for (std::int32_t l = 0; l < 9; ++l)
          for (std::int32_t h = 0; h < prompt.shape.kv_heads; ++h) {
            const Ints& row = out.kept[static_cast<std::size_t>(l)][static_cast<std::size_t>(h)];
            if (l > 4) {
              ASSERT_EQ(row, out.tokens) << "what the budget holds is not cut";
              continue;
            }
            Doubles share = prompt.group_sums(l, prompt.all(), h, kWindow);
            for (double& x : share) x /= kWindow;
            Doubles order = share;
            std::sort(order.rbegin(), order.rend());
            std::size_t count = 0;
            for (double held = 0; count < order.size() && held < mass; ++count) held += order[count];
            count = official ? count / 8 * 8 : std::min(order.size(), (count + 7) / 8 * 8);
            Ints want = best_of(share, static_cast<std::int64_t>(count));
            want.push_back(0);
            for (std::int32_t t = 64; t < 70; ++t) want.push_back(t);
            std::sort(want.begin(), want.end());
            want.erase(std::unique(want.begin(), want.end()), want.end());
            ASSERT_EQ(row, want) << "layer " << l << ", head " << h << ", mass " << mass;
          }
      }
  });
}

/// Share of attention of one layer's window that tokens before the window drew which are not in `kept`.
double missed_by(const Doubles& mass, const Ints& kept) {
  double missed = 0;
  for (std::size_t j = 0; j < mass.size(); ++j)
    if (!std::binary_search(kept.begin(), kept.end(), static_cast<std::int32_t>(j))) missed += mass[j];
  return missed;
}

TEST(Asl, UnderMissedMassSelectsWhereEveryObservedLayerLosesLess) {  // ours
  int selections = 0, late = 0;
  each_prompt({.layers = 10}, 2, [&](const LayeredPrompt& prompt) {
    constexpr std::int32_t kWindow = 6, kMin = 2, kObserved = 3;
    for (const double bound : {0.05, 0.2, 0.35, 0.6})
      for (const double select_mass : {1.0, 0.9}) {
        SCOPED_TRACE(text("missed_mass ", bound, ", select_mass ", select_mass));
        const Outcome out =
            run(text("asl,budget=36,window=", kWindow, ",pool=3,min_layer=", kMin, ",observed_layers=", kObserved,
                     ",missed_mass=", bound, ",select_mass=", select_mass),
                prompt);
        std::vector<Doubles> masses;
        for (std::int32_t l = 0; l <= (out.selected < 0 ? prompt.shape.layers - 1 : out.selected); ++l) {
          masses.push_back(prompt.masses(l, prompt.all(), kWindow));
          if (masses.size() > kObserved) masses.erase(masses.begin());
          if (l < kMin) {
            ASSERT_NE(out.selected, l);
            continue;
          }
          const Doubles scores = prompt.token_scores(l, prompt.all(), kWindow, 3, false);
          Ints kept;
          if (out.selected == l) {
            kept = out.tokens;
          } else {  // what would have gone on
            std::int64_t count = 30;
            double window_share = 1 - std::accumulate(masses.back().begin(), masses.back().end(), 0.0);
            for (std::int64_t k = 1; select_mass < 1 && k <= 30; ++k)
              if (1 - missed_by(masses.back(), best_of(scores, k)) >= select_mass) count = std::min(count, k);
            ASSERT_GT(window_share, 0);
            kept = best_of(scores, count);
          }
          double most = 0;
          for (const Doubles& mass : masses) most = std::max(most, missed_by(mass, kept));
          if (out.selected == l)
            ASSERT_LT(most, bound + 1e-5) << "layer " << l;
          else
            ASSERT_GE(most, bound - 1e-5) << "layer " << l;
        }
        selections += out.selected >= 0;
        late += out.selected > kMin;
      }
  });
  EXPECT_GE(selections, 30);
  EXPECT_GE(late, 5) << "not only the first layer selects";
}

TEST(Asl, UnderSelectMassNarrowsToTheFewestBestThatHoldTheShare) {  // ours
  std::set<std::size_t> sizes;
  each_prompt({}, 1, [&](const LayeredPrompt& prompt) {
    constexpr std::int32_t kWindow = 6, kBudget = 40;
    for (const double share : {0.05, 0.5, 0.7, 0.9, 0.999}) {
      const Outcome out =
          run(text("asl,budget=", kBudget, ",window=", kWindow, ",pool=3,min_layer=3,threshold=2,select_mass=", share),
              prompt);
      ASSERT_EQ(out.selected, 3);
      ASSERT_TRUE(holds_window(out.tokens, 60, kWindow));
      const Doubles scores = prompt.token_scores(3, prompt.all(), kWindow, 3, false),
                    mass = prompt.masses(3, prompt.all(), kWindow);
      Ints best = out.tokens;
      best.resize(best.size() - kWindow);
      ASSERT_TRUE(none_better(scores, best, kNear));
      ASSERT_LE(out.tokens.size(), static_cast<std::size_t>(kBudget));
      ASSERT_GE(best.size(), 1U);
      if (out.tokens.size() < kBudget) ASSERT_GE(1 - missed_by(mass, best), share - 1e-5);
      if (best.size() > 1)
        ASSERT_LT(1 - missed_by(mass, best_of(scores, static_cast<std::int64_t>(best.size()) - 1)), share + 1e-5)
            << "one fewer would not do";
      sizes.insert(out.tokens.size());
    }
  });
  EXPECT_GE(sizes.size(), 5U);
  EXPECT_TRUE(sizes.contains(7)) << "one token beside the window at least";
  EXPECT_TRUE(sizes.contains(40)) << "never more than the budget";
}

TEST(AslTwoPass, BeginsAfreshWithWhatTheSelectingLayerRanksBest) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    const Outcome one = run("asl,budget=24,window=6,pool=5,min_layer=2,threshold=0.8", prompt),
                  two = run("asl-2pass,budget=24,window=6,pool=5,min_layer=2,threshold=0.8", prompt);
    if (one.selected >= 0) {
      EXPECT_TRUE(two.restart);
      EXPECT_EQ(two.selected, one.selected);
      EXPECT_EQ(two.tokens, one.tokens);
      EXPECT_EQ(two.present.size(), static_cast<std::size_t>(one.selected) + 1) << "nothing behind it runs";
      EXPECT_EQ(two.ended, Reason::select_layer);
    }
  });
}

TEST(AslTwoPass, LeavesTheChoiceToTheLastLayerWhereNoneSelects) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    const Outcome out = run("asl-2pass,budget=24,window=6,pool=5,min_layer=2,threshold=0", prompt),
                  last = run("fastkv,budget=24,window=6,pool=5,layer=8", prompt);
    EXPECT_EQ(out.selected, -1);
    EXPECT_EQ(out.ended, Reason::last_layer);
    EXPECT_TRUE(out.restart);
    EXPECT_EQ(out.tokens, last.tokens);
    EXPECT_EQ(run("asl-2pass,budget=24,window=6,min_layer=2,threshold=0,indices=last_query", prompt).tokens,
              run("gemfilter,budget=24,layer=8", prompt).tokens);
  });
}

TEST(AslTwoPass, WithTheIndicesOfTheLastQueryTakesWhatGemFilterTakesThere) {
  each_prompt({}, 1, [](const LayeredPrompt& prompt) {
    for (const std::int32_t layer : {0, 4, 8}) {
      const Outcome asl = run(text("asl-2pass,budget=24,window=6,min_layer=", layer, ",threshold=2,indices=last_query"),
                              prompt),
                    gem = run(text("gemfilter,budget=24,layer=", layer), prompt);
      EXPECT_EQ(asl.selected, layer);
      EXPECT_EQ(asl.tokens, gem.tokens);
      EXPECT_TRUE(asl.restart && gem.restart);
    }
  });
}

TEST(GemFilter, DoesWhatPlainLoopsDo) {
  each_prompt({}, 2, [](const LayeredPrompt& prompt) {
    for (const auto& [budget, layer, pool] : {std::tuple{24, 3, 5}, {1, 0, 5}, {59, 8, 1}, {10, 2, 9}}) {
      const Outcome out = run(text("gemfilter,budget=", budget, ",layer=", layer, ",pool=", pool), prompt);
      ASSERT_EQ(out.selected, layer);
      ASSERT_TRUE(out.restart);
      ASSERT_EQ(out.present.size(), static_cast<std::size_t>(layer) + 1);
      ASSERT_EQ(out.tokens.size(), static_cast<std::size_t>(budget));
      ASSERT_TRUE(std::is_sorted(out.tokens.begin(), out.tokens.end()));
      const Doubles scores = prompt.last_query(layer, prompt.all(), pool);
      ASSERT_TRUE(none_better(scores, out.tokens, 1e-3));
      const PromptLayer evidence(prompt, layer, prompt.all(), 1);
      const Array got = last_query_scores(evidence.evidence(), pool);
      for (std::size_t j = 0; j < scores.size(); ++j)
        ASSERT_NEAR(got.data<float>()[j], scores[j], 1e-4 * (1 + std::abs(scores[j])));
    }
  });
}

TEST(GemFilter, OfEqualScoresTakesTheLowerIndex) {
  LayeredPrompt prompt({.tokens = 20}, 1);
  for (Array& keys : prompt.keys) keys.fill_(0);
  EXPECT_EQ(run("gemfilter,budget=4,layer=1,pool=1", prompt).tokens, (Ints{0, 1, 2, 3})) << "no window is forced";
  EXPECT_EQ(best_tokens(std::vector<float>{1, 3, 3, 2, 3}, 2), (Ints{1, 2}));
  EXPECT_EQ(best_tokens(std::vector<float>{1, std::nanf(""), -5, 2, 3}, 4), (Ints{0, 2, 3, 4})) << "NaN last";
  EXPECT_EQ(best_tokens(std::vector<float>{1, 2}, 3), (Ints{0, 1}));
}

TEST(GemFilter, RefusesQueriesThatAreNotFinite) {
  LayeredPrompt prompt({}, 1);
  prompt.queries[2][1][59][3].fill_(std::numeric_limits<float>::infinity());
  EXPECT_THROW(static_cast<void>(run("gemfilter,budget=4,layer=2", prompt)), InvalidArgument);
  EXPECT_EQ(run("gemfilter,budget=4,layer=1", prompt).tokens.size(), 4U);
}

struct PyramidCase {
  double recent, keep, weight;
  bool cosine;
  std::int32_t least, sink;
};

TEST(PyramidInfer, DoesWhatPlainLoopsDo) {  // 1.11.6
  int narrowed = 0;
  each_prompt({.layers = 9, .tokens = 61}, 1, [&](const LayeredPrompt& prompt) {
    const std::int32_t tokens = prompt.shape.tokens;
    for (const PyramidCase& c : {PyramidCase{0.2, 0.5, 1.2, true, 8, 4},
                                 {0.2, 0.8, 1.2, false, 8, 4},
                                 {0, 0.3, 2, true, 5, 0},
                                 {0.5, 0.6, 0.5, false, 1, 40},
                                 {0.2, 0.9, 1.2, true, 64, 4},
                                 {0.1, 1, 1.2, false, 8, 4}}) {
      SCOPED_TRACE(text("recent ", c.recent, ", keep ", c.keep, c.cosine ? ", cosine" : ", constant"));
      const Outcome out = run(
          text("pyramidinfer,sink=", c.sink, ",recent_ratio=", c.recent, ",keep=", c.keep,
               ",schedule=", c.cosine ? "cosine" : "constant", ",min_context=", c.least, ",distance_weight=", c.weight),
          prompt);
      ASSERT_EQ(out.selected, -1);
      ASSERT_FALSE(out.restart);
      const std::int32_t observers = static_cast<std::int32_t>(c.recent * tokens) + 1,
                         floor = std::min(c.least, tokens - observers);
      for (std::int32_t l = 0; l < 9; ++l) {
        const auto i = static_cast<std::size_t>(l);
        const Ints& present = out.present[i];
        for (const Ints& row : out.kept[i]) ASSERT_EQ(row, present) << "a layer holds what entered it";
        const std::int32_t others = static_cast<std::int32_t>(present.size()) - observers;
        const double share = c.cosine ? (1 - c.keep) * (std::cos(std::acos(-1.0) * l / 9) + 1) / 2 + c.keep : c.keep;
        std::int32_t kept = others;
        if (others > floor && share < 1 && static_cast<std::int32_t>(others * share) > floor)
          kept = static_cast<std::int32_t>(others * share);
        if (kept == others) {
          ASSERT_FALSE(out.going[i].has_value()) << "layer " << l;
          continue;
        }
        ++narrowed;
        ASSERT_TRUE(out.going[i].has_value()) << "layer " << l;
        ASSERT_EQ(static_cast<std::int32_t>(out.going[i]->size()), kept + observers) << "layer " << l;
        Doubles weights, scores(static_cast<std::size_t>(others));
        for (std::int32_t w = 0; w < observers; ++w)
          weights.push_back(observers == 1 ? 1 : 1 + (c.weight - 1) * w / (observers - 1));
        for (std::int32_t h = 0; h < prompt.spec.query_heads; ++h) {
          const Doubles u = prompt.sums(l, present, h, observers, weights);
          for (std::size_t j = 0; j < scores.size(); ++j) scores[j] += u[j] / prompt.shape.group;
        }
        for (std::int32_t j = 0; j < std::min(c.sink, others); ++j) scores[static_cast<std::size_t>(j)] = 1e6 - j;
        Ints places;
        for (std::int32_t j = 0; j < others; ++j)
          if (std::binary_search(out.going[i]->begin(), out.going[i]->end(), present[static_cast<std::size_t>(j)]))
            places.push_back(j);
        ASSERT_EQ(static_cast<std::int32_t>(places.size()), kept);
        ASSERT_TRUE(none_better(scores, places, kNear)) << "layer " << l;
        ASSERT_TRUE(std::equal(present.end() - observers, present.end(), out.going[i]->end() - observers))
            << "the newest go on";
      }
    }
  });
  EXPECT_GE(narrowed, 100);
}

TEST(PyramidInfer, LeavesShortPromptsAlone) {
  for (const std::int32_t tokens : {1, 2, 3, 5, 64}) {
    const LayeredPrompt prompt({.tokens = tokens}, 2);
    expect_whole(run("pyramidinfer", prompt), prompt);
  }
}

TEST(PrefillPolicies, RefuseLayersThatAreNotWanted) {
  const LayeredPrompt prompt({}, 1);
  const auto refused = [&](const char* policy, std::int32_t layer) {
    const PromptLayer of(prompt, layer, prompt.all(), 13);
    const auto made = make_policy(policy);
    const auto pass = made->begin_prompt(host(), prompt.spec, 60);
    ASSERT_EQ(pass->wants(layer, 60), 0) << policy;
    EXPECT_THROW(static_cast<void>(made->decide(*pass, of.evidence())), StateError) << policy;
  };
  refused("asl,budget=24,window=6,min_layer=5,observed_layers=3", 1);
  refused("fastkv,budget=24,window=6,layer=3", 2);
  refused("gemfilter,budget=24,layer=3", 4);
  refused("pyramidinfer", 0);
}

TEST(PromptScores, SumsAndMassesAreThoseOfPlainLoops) {
  each_prompt({.layers = 1, .tokens = 41}, 1, [](const LayeredPrompt& prompt) {
    for (const std::int32_t window : {1, 5, 40})
      for (const PromptScoreOptions::Pool kind :
           {PromptScoreOptions::Pool::average, PromptScoreOptions::Pool::maximum}) {
        const PromptLayer layer(prompt, 0, prompt.all(), window);
        const PromptScores scores = prompt_scores(layer.evidence(), {.window = window, .pool = 3, .kind = kind});
        for (std::int32_t h = 0; h < prompt.shape.kv_heads; ++h) {
          const Doubles want = prompt.group_sums(0, prompt.all(), h, window);
          for (std::size_t t = 0; t < want.size(); ++t)
            ASSERT_NEAR(scores.sums.data<float>()[static_cast<std::size_t>(h * 41) + t], want[t], 1e-5 * window);
        }
        const Array mass = token_mass(layer.evidence(), scores.sums, window);
        const Doubles want = prompt.masses(0, prompt.all(), window);
        ASSERT_EQ(mass.numel(), 41 - window);
        for (std::size_t t = 0; t < want.size(); ++t) ASSERT_NEAR(mass.data<float>()[t], want[t], 1e-5);

        const KeepSet own = keep_top_mass(layer.evidence(), {.mass = 0.7, .window = window}),
                      same = keep_top_mass(layer.table, scores.sums, {.mass = 0.7, .window = window});
        if (kind == PromptScoreOptions::Pool::average) {
          EXPECT_EQ(own.indptr, same.indptr);
          EXPECT_TRUE(Array(own.slots).equal(same.slots));
        }
      }
    EXPECT_THROW(static_cast<void>(keep_top_mass(PromptLayer(prompt, 0, prompt.all(), 1).table, Array::empty({3}),
                                                 {.mass = 0.5, .window = 1})),
                 InvalidArgument);
  });
}

TEST(AttentionSum, WeighsEachQueryAsPlainLoopsDo) {
  each_prompt({.layers = 1, .kv_heads = 3, .tokens = 45}, 1, [](const LayeredPrompt& prompt) {
    const PromptLayer layer(prompt, 0, prompt.all(), 20);
    const std::vector<RowWindow> windows{
        {20, 25},
        {7, 38},
        {0, 0}};  // rows of one table may have windows of their own: those of a narrow one are the newest weights
    std::vector<float> weights;
    for (int i = 0; i < 20; ++i) weights.push_back(0.25F * static_cast<float>(1 + i % 7));
    const Array got = attention_sum(layer.evidence(), windows, weights),
                ones = attention_sum(layer.evidence(), windows, std::vector<float>(20, 1.0F)),
                none = attention_sum(layer.evidence(), windows);
    EXPECT_TRUE(ones.equal(none)) << "weights of 1 change nothing";
    for (std::int32_t h = 0; h < 3; ++h) {
      const std::int32_t window = windows[static_cast<std::size_t>(h)].queries;
      const Doubles want = prompt.group_sums(0, prompt.all(), h, window, {weights.end() - window, weights.end()});
      for (std::size_t t = 0; t < want.size(); ++t)
        ASSERT_NEAR(got.data<float>()[static_cast<std::size_t>(h * 45) + t], want[t], 1e-4)
            << "head " << h << ", slot " << t;
    }
    EXPECT_THROW(static_cast<void>(attention_sum(layer.evidence(), windows, std::vector<float>(19, 1.0F))),
                 InvalidArgument)
        << "fewer than the widest window has";
  });
}

}  // namespace
}  // namespace kvkeep::prefill_policies_test
