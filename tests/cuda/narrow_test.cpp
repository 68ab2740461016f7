// SPDX-License-Identifier: Apache-2.0
// Tokens that go on and their rows, on a GPU: the CPU's tokens, and bytes copied one by one.

#include "narrow.h"

#include "asked_queries.h"
#include "kvkeep/core/error.h"
#include "kvkeep/layers/layer_selector.h"
#include "prompt_scores.h"
#include "ranked_prompts.h"
#include "ranks.h"

namespace kvkeep::cuda::narrow_test {
namespace {

using Narrow = OnDevice;
using GatherRows = OnDevice;
using Ints = std::vector<std::int32_t>;

TEST_F(Narrow, GivesTheTokensOfALayerThatSelectsAtOnce) {
  oracle::Random random(41);
  for (int n = 0; n < oracle::random_case_count(20); ++n) {
    const std::int32_t window = random.between(1, 40), select = window + random.one_of({1, 2, 31, 32, 100, 300});
    Ints lengths;
    for (int p = random.between(1, 4); p > 0; --p)
      lengths.push_back(
          random.one_of({0, 1, 13, 255, 256, 257, select - window - 1, select - window, select - window + 1, 600}));
    RankedPrompts c(lengths, 1);
    Ints ranks(static_cast<std::size_t>(c.elements), -5), want;
    for (RankedPrompt& prompt : c.prompts) {
      std::vector<float> scores(static_cast<std::size_t>(prompt.ranked));
      for (float& x : scores) x = static_cast<float>(random.between(0, 99));
      const Ints own = ranks_of(scores);
      std::copy(own.begin(), own.end(), ranks.begin() + static_cast<std::ptrdiff_t>(prompt.ranks));
      LayerSelector selector({.select = select, .window = window, .fixed_layer = 0},
                             std::int64_t{prompt.ranked} + window);
      if (selector.wants(0)) static_cast<void>(selector.see(0, scores));
      prompt.kept = static_cast<std::int64_t>(want.size());
      const Ints tokens = selector.tokens();
      want.insert(want.end(), tokens.begin(), tokens.end());
    }
    in_every_order([&] {
      const DeviceArray<std::int32_t> there(ranks), tokens(want.size());
      launch_narrow(
          {.prompts = c.prompts, .select = select, .window = window, .ranks = there.data(), .tokens = tokens.data()},
          nullptr);
      ASSERT_EQ(tokens.download(), want) << "case " << n << ", select " << select << ", window " << window;
    });
  }
}

TEST_F(Narrow, GivesTheTokensOfALongPrompt) {
  oracle::Random random(42);
  std::vector<float> scores;
  for (int t = 0; t < 4100; ++t) scores.push_back(static_cast<float>(random.normal()));
  LayerSelector selector({.select = 1000, .window = 32, .fixed_layer = 0}, 4132);
  static_cast<void>(selector.see(0, scores));
  const RankedPrompt prompt{.ranked = 4100};
  const DeviceArray<std::int32_t> ranks(ranks_of(scores)), tokens(1000);
  launch_narrow({.prompts = {&prompt, 1}, .select = 1000, .window = 32, .ranks = ranks.data(), .tokens = tokens.data()},
                nullptr);
  EXPECT_EQ(tokens.download(), selector.tokens());
}

TEST_F(Narrow, GivesAsManyTokensAsHoldEnough) {
  RankedPrompts c({6, 6});
  c.prompts[1].kept = 5;
  std::vector<LayerSelection> all(2);
  all[0].enough = 2;
  const DeviceArray<LayerSelection> states(all);
  const DeviceArray<std::int32_t> ranks(Ints{3, 1, 6, 4, 5, 2, 1, 2, 3, 4, 5, 6}), tokens(Ints(10, -1));
  launch_narrow({.prompts = c.prompts,
                 .select = 5,
                 .window = 1,
                 .ranks = ranks.data(),
                 .states = states.data(),
                 .tokens = tokens.data()},
                nullptr);
  EXPECT_EQ(tokens.download(), (Ints{1, 5, 6, -1, -1, 0, 1, 2, 3, 6}));
}

TEST_F(Narrow, WritesThePromptsThatTheLayerHasSelectedAndNoOther) {
  RankedPrompts c({3, 3, 3});
  c.prompts[1].kept = 3, c.prompts[2].kept = 6;
  std::swap(c.prompts[0].state, c.prompts[2].state);
  std::vector<LayerSelection> all(3);
  all[0].layer = 7, all[1].layer = 6;
  const DeviceArray<LayerSelection> states(all);
  const DeviceArray<std::int32_t> ranks(Ints{2, 1, 3, 2, 1, 3, 3, 2, 1}), tokens(Ints(9, -1));
  launch_narrow({.prompts = c.prompts,
                 .select = 3,
                 .window = 1,
                 .ranks = ranks.data(),
                 .states = states.data(),
                 .layer = 7,
                 .tokens = tokens.data()},
                nullptr);
  EXPECT_EQ(tokens.download(), (Ints{-1, -1, -1, -1, -1, -1, 1, 2, 3}));
}

/// From queries to packed rows, layer by layer; the host looks at states where it must know how long the rows are. The
/// CPU is told the device's scores: ranks, decisions and rows are its own.
TEST_F(Narrow, FollowsTheScoresOfEveryLayerToTheRowsThatGoOn) {
  constexpr std::int32_t kWindow = 3, kSelect = 9, kLayers = 7;
  const LayerSelectorOptions options{
      .select = kSelect, .window = kWindow, .min_layer = 2, .observed_layers = 3, .threshold = 0.5};
  const Ints lengths{40, 9, 29};
  RankedPrompts c({37, 6, 26});
  std::vector<GatheredPrompt> gathered;
  Ints hidden;
  std::vector<LayerSelector> want;
  for (std::size_t p = 0; p < lengths.size(); ++p) {
    c.prompts[p].kept = static_cast<std::int64_t>(p) * kSelect;
    gathered.push_back({.from = static_cast<std::int64_t>(hidden.size()),
                        .to = static_cast<std::int64_t>(p) * kSelect,
                        .kept = c.prompts[p].kept,
                        .rows = kSelect});
    for (std::int32_t t = 0; t < lengths[p]; ++t) hidden.push_back(1000 * static_cast<std::int32_t>(p) + t);
    want.emplace_back(options, lengths[p]);
  }
  const DeviceArray<std::int32_t> ring(static_cast<std::size_t>(options.ranked_layers() * c.elements)),
      tokens(3 * kSelect), rows(hidden), packed(Ints(3 * kSelect, -1));
  const DeviceArray<LayerSelection> states(std::vector<LayerSelection>(3));
  const DeviceArray<std::byte> ranking(static_cast<std::size_t>(ranks_workspace_bytes(c.prompts))),
      comparing(static_cast<std::size_t>(layer_selector_workspace_bytes(c.prompts)));
  const DeviceArray<float> scores(static_cast<std::size_t>(c.elements));
  const EvidenceShape shape{.group = 2, .kv_heads = 2, .dim = 8, .lengths = lengths, .seen = kWindow, .gaps = false};
  EvidenceCase layer(700, shape);
  std::size_t selected = 0;
  for (std::int32_t l = 0; l < kLayers; ++l) {
    const EvidenceCase noise(701 + static_cast<std::uint64_t>(l), shape);  // ever less of it: the ranking settles
    for (std::size_t r = 0; r < layer.plain.size(); ++r)
      for (std::size_t i = 0; i < layer.plain[r].size(); ++i)
        layer.set_key(r, static_cast<std::int64_t>(i) / 8, static_cast<std::int64_t>(i) % 8,
                      layer.plain[r][i] + noise.plain[r][i] / static_cast<float>(1 << 2 * l));
    const DeviceEvidence there(layer);
    const AskedQueries queries(layer, there, kWindow);
    PromptScoresArguments a{.evidence = there.arguments(),
                            .queries = queries.floats().data(),
                            .window = kWindow,
                            .pool = 3,
                            .slots = layer.table.slots,
                            .tokens = scores.data()};
    const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
    a.workspace = workspace.data();
    launch_prompt_scores(a, nullptr);
    std::int32_t* newest = ring.data() + rank_place(options, l) * c.elements;
    launch_ranks({.prompts = c.prompts, .scores = scores.data(), .ranks = newest, .workspace = ranking.data()},
                 nullptr);
    launch_layer_selector({.options = options,
                           .layer = l,
                           .prompts = c.prompts,
                           .ranks = ring.data(),
                           .states = states.data(),
                           .workspace = comparing.data()},
                          nullptr);
    launch_narrow({.prompts = c.prompts,
                   .select = kSelect,
                   .window = kWindow,
                   .ranks = newest,
                   .states = states.data(),
                   .layer = l,
                   .tokens = tokens.data()},
                  nullptr);
    const std::vector<LayerSelection> flags = states.download();
    const std::vector<float> told = scores.download();
    for (std::size_t p = 0; p < want.size(); ++p) {
      if (want[p].wants(l))
        static_cast<void>(
            want[p].see(l, {told.data() + c.prompts[p].scores, static_cast<std::size_t>(c.prompts[p].ranked)}));
      ASSERT_EQ(flags[p].layer, want[p].layer()) << "layer " << l << ", prompt " << p;
      if (flags[p].layer != l) continue;
      ++selected;
      launch_gather_rows({.prompts = {&gathered[p], 1},
                          .tokens = tokens.data(),
                          .from = reinterpret_cast<const std::byte*>(rows.data()),
                          .to = reinterpret_cast<std::byte*>(packed.data()),
                          .row_bytes = 4,
                          .from_stride = 4,
                          .to_stride = 4},
                         nullptr);
    }
  }
  EXPECT_EQ(selected, 2U) << "the short prompt goes on whole";
  const Ints got = packed.download();
  for (const std::size_t p : {std::size_t{0}, std::size_t{2}}) {
    Ints all;
    for (const std::int32_t t : want[p].tokens()) all.push_back(1000 * static_cast<std::int32_t>(p) + t);
    EXPECT_EQ(Ints(got.begin() + static_cast<std::ptrdiff_t>(p) * kSelect,
                   got.begin() + static_cast<std::ptrdiff_t>(p + 1) * kSelect),
              all);
  }
}

TEST_F(Narrow, RefusesWhatLeavesNoTokenBesideTheWindow) {
  const RankedPrompt prompt{.ranked = -2};
  EXPECT_THROW(launch_narrow({.select = 4, .window = -1}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_narrow({.select = 4, .window = 4}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_narrow({.prompts = {&prompt, 1}, .select = 4, .window = 1}, nullptr), InvalidArgument);
}

/// Some prompts, each with a list or whole; every byte is somebody's, and bytes beside the rows stay what they were.
TEST_F(GatherRows, CopyEveryRowToItsPlaceForAnyWidthAndStride) {
  oracle::Random random(43);
  for (const std::int64_t width : {1, 2, 4, 6, 8, 14, 16, 34, 48, 272}) {
    for (int n = 0; n < 4; ++n) {
      const std::int64_t from_stride = width + random.one_of({0, 2, 16}), to_stride = width + random.one_of({0, 2, 16});
      std::vector<GatheredPrompt> prompts;
      Ints tokens;
      std::int64_t from = 0, to = 0;
      for (int p = random.between(1, 4); p > 0; --p) {
        const std::int32_t length = random.one_of({0, 1, 7, 33, 65});
        const bool whole = random.chance(0.3);
        GatheredPrompt& prompt = prompts.emplace_back();
        prompt.from = from, prompt.to = to, prompt.kept = whole ? -1 : static_cast<std::int64_t>(tokens.size());
        for (std::int32_t t = 0; t < length; ++t) {
          if (!whole && random.chance(0.5)) continue;
          if (!whole) tokens.push_back(t);
          ++prompt.rows;
        }
        from += length, to += prompt.rows;
      }
      std::vector<std::byte> source(static_cast<std::size_t>(from * from_stride));
      for (std::byte& b : source) b = static_cast<std::byte>(random.between(0, 255));
      const std::vector<std::byte> before(static_cast<std::size_t>(to * to_stride), std::byte{0xEE});
      std::vector<std::byte> want = before;
      for (const GatheredPrompt& prompt : prompts)
        for (std::int32_t i = 0; i < prompt.rows; ++i) {
          const std::int64_t row =
              prompt.from + (prompt.kept < 0 ? i : tokens[static_cast<std::size_t>(prompt.kept + i)]);
          std::copy_n(source.begin() + row * from_stride, width, want.begin() + (prompt.to + i) * to_stride);
        }
      in_every_order([&] {
        const DeviceArray<std::byte> rows(source), packed(before);
        const DeviceArray<std::int32_t> lists(tokens);
        launch_gather_rows({.prompts = prompts,
                            .tokens = lists.data(),
                            .from = rows.data(),
                            .to = packed.data(),
                            .row_bytes = width,
                            .from_stride = from_stride,
                            .to_stride = to_stride},
                           nullptr);
        ASSERT_EQ(packed.download(), want) << "width " << width << ", strides " << from_stride << " and " << to_stride;
      });
    }
  }
}

TEST_F(GatherRows, TakeMorePromptsThanOneLaunchHolds) {
  std::vector<GatheredPrompt> prompts;
  Ints tokens, source(130), want;
  for (std::int32_t p = 0; p < 65; ++p) {
    prompts.push_back({.from = 2 * p, .to = p, .kept = p, .rows = 1});
    tokens.push_back(p % 2);
    source[static_cast<std::size_t>(2 * p + p % 2)] = p;
    want.push_back(p);
  }
  const DeviceArray<std::int32_t> lists(tokens), rows(source), packed(65);
  launch_gather_rows({.prompts = prompts,
                      .tokens = lists.data(),
                      .from = reinterpret_cast<const std::byte*>(rows.data()),
                      .to = reinterpret_cast<std::byte*>(packed.data()),
                      .row_bytes = 4,
                      .from_stride = 4,
                      .to_stride = 4},
                     nullptr);
  EXPECT_EQ(packed.download(), want);
}

TEST_F(GatherRows, RefuseStridesBelowARowAndListsThatAreNotThere) {
  const GatheredPrompt negative{.rows = -1}, listed{.kept = 0, .rows = 1};
  EXPECT_THROW(launch_gather_rows({.row_bytes = 0, .from_stride = 4, .to_stride = 4}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_gather_rows({.row_bytes = 8, .from_stride = 4, .to_stride = 8}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_gather_rows({.row_bytes = 8, .from_stride = 8, .to_stride = 6}, nullptr), InvalidArgument);
  EXPECT_THROW(
      launch_gather_rows({.prompts = {&negative, 1}, .row_bytes = 4, .from_stride = 4, .to_stride = 4}, nullptr),
      InvalidArgument);
  EXPECT_THROW(launch_gather_rows({.prompts = {&listed, 1}, .row_bytes = 4, .from_stride = 4, .to_stride = 4}, nullptr),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::narrow_test
