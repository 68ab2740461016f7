// SPDX-License-Identifier: Apache-2.0
// Anchors, spans and window of a prompt: hand examples, what must hold for any surprisal, and surprisal itself from
// logits.

#include "kvkeep/memory/segmenter.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kvkeep/core/error.h"
#include "oracle/random_case.h"

namespace kvkeep::segmenter_test {
namespace {

using testing::Array;
using Ints = std::vector<std::int32_t>;
using Spans = std::vector<Span>;

const std::vector<float> kTwelve{0, 1, 1, 1, 9, 1, 1, 1, 1, 1, 8, 1};

/// Sinks, window and longest span off: the published rule.
SegmenterOptions plain() {
  SegmenterOptions o;
  o.sink = o.recent = o.max_span = 0;
  return o;
}

std::vector<float> random_surprisal(oracle::Random& random, int tokens) {
  std::vector<float> h;
  for (int t = 0; t < tokens; ++t)
    h.push_back(static_cast<float>(-std::log(1 - random.unit()) * (random.chance(0.2) ? 4 : 1)));
  return h;
}

/// How often each token stands in a piece; pieces ascend.
Ints times_held(const Segments& s) {
  Ints held(static_cast<std::size_t>(s.tokens));
  for (const std::int32_t t : s.dense()) ++held[static_cast<std::size_t>(t)];
  for (const Span& span : s.spans)
    for (std::int32_t t = span.begin; t < span.end; ++t) ++held[static_cast<std::size_t>(t)];
  return held;
}

TEST(Segmenter, CutsTwelveTokensAsWithAPencil) {
  const Segments s = segment(kTwelve, plain());
  EXPECT_NEAR(s.threshold, 5.019540, 1e-6) << "the deviation is that of the population";
  EXPECT_EQ(s.anchors, (Ints{4, 10}));
  EXPECT_EQ(s.spans, (Spans{{0, 4}, {5, 10}}));
  EXPECT_EQ(s.short_spans, (Spans{{11, 12}}));
  EXPECT_EQ(s.window, 12);
  const std::vector<double> weights = span_weights(std::span(kTwelve).first(4));
  for (std::size_t t = 0; t < 4; ++t) EXPECT_DOUBLE_EQ(weights[t], t == 0 ? 0 : 1.0 / 3);
}

TEST(Segmenter, KeepsSinksAndWindowAndCutsLongRunsIntoEqualPieces) {
  SegmenterOptions o;
  o.sink = 2, o.recent = 3, o.min_span = 2, o.max_span = 4;
  const Segments s = segment(kTwelve, o);
  EXPECT_EQ(s.anchors, (Ints{0, 1, 4}));
  EXPECT_EQ(s.window, 9);
  EXPECT_EQ(s.spans, (Spans{{2, 4}, {5, 9}}));
  EXPECT_TRUE(s.short_spans.empty());
  o.sink = 0, o.recent = 0, o.alpha = 100, o.max_span = 5;
  EXPECT_EQ(segment(kTwelve, o).spans, (Spans{{0, 4}, {4, 8}, {8, 12}}))
      << "12 tokens in ceil(12 / 5) pieces from i * 12 / 3 on";
}

TEST(Segmenter, LosesNothingOfPromptsWithoutAnchors) {
  const std::vector<float> constant(9, 1.7F);
  EXPECT_EQ(segment(constant, plain()).spans, (Spans{{0, 9}})) << "no surprisal is above their mean";
  EXPECT_TRUE(segment({}, {}).dense().empty());
  EXPECT_EQ(segment(std::vector<float>(3, 1.0F), plain()).short_spans, (Spans{{0, 3}}));
  EXPECT_EQ(segment(constant, {}).window, 0) << "shorter than the window: nothing else is there";
  SegmenterOptions everywhere = plain();
  everywhere.alpha = -100;
  const std::vector<float> rising{0, 1, 2, 3};
  EXPECT_EQ(segment(rising, everywhere).anchors, (Ints{0, 1, 2, 3}));
}

TEST(Segmenter, TakesNaNForNothingAndInfinityForFiftyNats) {
  const float inf = HUGE_VALF, nan = std::nanf("");
  const std::vector<float> wild{0, 1, inf, 1, nan, 1, -3, 1}, tame{0, 1, 50, 1, 0, 1, 0, 1};
  const Segments a = segment(wild, plain()), b = segment(tame, plain());
  EXPECT_EQ(a.threshold, b.threshold);
  EXPECT_EQ(a.anchors, b.anchors);
  EXPECT_EQ(span_weights(wild), span_weights(tame));
  const std::vector<float> nothing(5, 0.0F);
  for (const double w : span_weights(nothing)) EXPECT_DOUBLE_EQ(w, 0.2);
}

TEST(Segmenter, HoldsEveryTokenOnceForAnyOptions) {  // S-1
  oracle::Random random(20);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    const std::vector<float> h = random_surprisal(random, random.between(0, 200));
    SegmenterOptions o;
    o.alpha = 3 * random.unit() - 0.5;
    o.sink = random.between(0, 9), o.recent = random.between(0, 60), o.min_span = random.between(1, 9),
    o.max_span = random.between(0, 40);
    if (random.chance(0.5)) o.most_entries = random.between(1, 150);
    const Segments s = segment(h, o);
    EXPECT_EQ(times_held(s), Ints(h.size(), 1));
    EXPECT_TRUE(std::ranges::is_sorted(s.anchors));
    for (const Span& span : s.spans)
      EXPECT_TRUE(span.length() >= o.min_span && (o.max_span == 0 || span.length() <= o.max_span)) << span.begin;
    for (const Span& span : s.short_spans) EXPECT_LT(span.length(), o.min_span);
  }
}

TEST(Segmenter, KeepsTheMostSurprisingAnchorsThatABudgetAllows) {
  oracle::Random random(21);
  int fewer = 0;
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    const std::vector<float> h = random_surprisal(random, 150);
    SegmenterOptions o;
    o.sink = 4, o.recent = 20, o.entries_per_span = 1.25;
    const Segments free = segment(h, o);
    o.most_entries = random.between(30, 110);
    const Segments s = segment(h, o);
    if (free.entries(1.25) <= o.most_entries) {
      EXPECT_EQ(s.anchors, free.anchors);
      continue;
    }
    ++fewer;
    SegmenterOptions none = o;
    none.alpha = 1e6;
    if (segment(h, none).entries(1.25) <= o.most_entries) EXPECT_LE(s.entries(1.25), o.most_entries);
    float least = HUGE_VALF;
    for (std::size_t i = 4; i < s.anchors.size(); ++i)
      least = std::min(least, h[static_cast<std::size_t>(s.anchors[i])]);
    for (const std::int32_t t : free.anchors)
      if (t >= 4 && !std::ranges::binary_search(s.anchors, t)) EXPECT_LE(h[static_cast<std::size_t>(t)], least) << t;
  }
  EXPECT_GT(fewer, 20);
}

TEST(Segmenter, RefusesOptionsThatMakeNoSense) {
  SegmenterOptions o;
  o.min_span = 0, o.alpha = std::nan("");
  try {
    static_cast<void>(segment(kTwelve, o));
    ADD_FAILURE();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("min_span: 0"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("alpha"), std::string::npos) << e.what();
  }
}

TEST(PromptSurprisal, IsTheLogSumExpLessTheTokensLogitWhateverTheBlocks) {
  oracle::Random random(22);
  constexpr int kTokens = 11, kVocabulary = 9001;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    Array logits = Array::empty({kTokens, kVocabulary}, Dtype::f32);
    for (std::int64_t i = 0; i < logits.numel(); ++i) logits.data<float>()[i] = static_cast<float>(5 * random.normal());
    logits = logits.to(dtype);
    const Array stored = logits.to(Dtype::f64);
    Ints ids;
    for (int t = 0; t < kTokens; ++t) ids.push_back(random.between(0, kVocabulary - 1));
    PromptSurprisal surprisal(ids);
    for (int first = 0; first < kTokens;) {
      const int rows = std::min(random.between(0, 4), kTokens - first);
      surprisal.see(logits.narrow(0, first, rows));
      first += rows;
    }
    EXPECT_EQ(surprisal.values()[0], 0);
    for (int t = 1; t < kTokens; ++t) {
      const double* row = stored.data<double>() + std::int64_t{t - 1} * kVocabulary;
      double sum = 0;
      for (int v = 0; v < kVocabulary; ++v) sum += std::exp(row[v]);
      EXPECT_NEAR(surprisal.values()[static_cast<std::size_t>(t)],
                  std::log(sum) - row[ids[static_cast<std::size_t>(t)]], 2e-5)
          << t << " " << dtype;
    }
  }
}

TEST(PromptSurprisal, StaysBetweenZeroAndFiftyForAnyLogits) {
  const float inf = HUGE_VALF;
  Array logits = Array::full({5, 3}, 0.0F);
  float* row = logits.data<float>();
  row[0] = -inf;  // token 1 has no probability at all
  row[3] = std::nanf("");
  row[6] = inf;
  row[9] = row[10] = row[11] = -inf;
  PromptSurprisal surprisal({0, 0, 0, 0, 0});
  surprisal.see(logits);
  EXPECT_EQ(std::vector<float>(surprisal.values().begin(), surprisal.values().end()),
            (std::vector<float>{0, 50, 0, 0, 0}));
  EXPECT_EQ(surprisal.seen(), 5);
}

TEST(PromptSurprisal, RefusesMoreRowsThanTokensAndIdsThatAreNotThere) {
  PromptSurprisal surprisal({0, 7});
  EXPECT_THROW(surprisal.see(Array::full({3, 8}, 0.0F)), InvalidArgument);
  EXPECT_THROW(surprisal.see(Array::full({1, 7}, 0.0F)), InvalidArgument);
  EXPECT_THROW(surprisal.see(Array::full({8}, 0.0F)), InvalidArgument);
  EXPECT_EQ(surprisal.seen(), 0);
  surprisal.see(Array::full({2, 8}, 0.0F));
  EXPECT_NEAR(surprisal.values()[1], std::log(8.0), 1e-6);
}

}  // namespace
}  // namespace kvkeep::segmenter_test
