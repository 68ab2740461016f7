// Which spans are zoomed: golden numbers, agreement with plain loops, and budgets that are never exceeded.

#include "kvkeep/memory/router.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"

namespace kvkeep::router_test {
namespace {

using namespace testing;
using Rule = ZoomOptions::Rule;
using Heads = ZoomOptions::Heads;

Array row(std::vector<float> x) {
  Array t = Array::zeros({1, 1, static_cast<std::int64_t>(x.size())});
  std::ranges::copy(x, t.data<float>());
  return t;
}

std::vector<int> marks_of(const Array& t) { return {t.data<std::uint8_t>(), t.data<std::uint8_t>() + t.numel()}; }

TEST(Router, IsASigmoidOfTheDirectionOfTheCoarseKeyAndTheLogarithmOfTheLength) {  // G-S3, and the form with stored
                                                                                  // projections (S-15)
  // One head, d' = 4: W q = (1.2, 0, 0, 0) along the direction of W kmean, a span of five.
  Array w = Array::zeros({1, 4, 4});
  for (int i = 0; i < 4; ++i) w.data<float>()[5 * i] = 1;
  Array key = Array::zeros({1, 5, 4});
  for (int t = 0; t < 5; ++t) key.data<float>()[4 * t] = 7;
  const SpanStore five(key, key, std::vector<float>(5, 1.0F), {{0, 5}}, {});
  const Router router(w, Array::full({1}, 0.9F));
  const Array a = router.relevance(five, router.norms(five), row({1.2F, 0, 0, 0}));
  EXPECT_NEAR(a.item<float>(), 0.901094, 1e-6);
  EXPECT_EQ(marks_of(router.wanted(a)), std::vector<int>{1});

  FoldedPrompt p(80, 200, 2, 6, 16, 3);
  const SpanStore spans = p.fold().spans;
  oracle::Random random(81);
  const Array projections = normals(random, {6, 8, 16});
  const Router random_router(projections, normals(random, {6}));
  const Array relevance = random_router.relevance(spans, random_router.norms(spans), p.queries);
  for (std::int64_t n = 0; n < 3; ++n)
    for (std::int64_t h = 0; h < 6; ++h)
      for (std::int64_t s = 0; s < spans.size(); ++s) {
        double dot = 0, norm = 0;
        for (int i = 0; i < 8; ++i) {
          double query = 0, summary = 0;
          for (int d = 0; d < 16; ++d) {
            const double weight = projections.data<float>()[(h * 8 + i) * 16 + d];
            query += weight * p.queries.data<float>()[(n * 6 + h) * 16 + d];
            summary += weight * spans.coarse(KvSide::keys).data<float>()[(h / 3 * spans.size() + s) * 16 + d];
          }
          dot += query * summary, norm += summary * summary;
        }
        const double expected =
            1 / (1 + std::exp(-(dot / std::sqrt(norm) / std::sqrt(8.0)) -
                              std::log(static_cast<double>(spans.spans()[static_cast<std::size_t>(s)].length()))));
        EXPECT_NEAR(relevance.data<float>()[(n * 6 + h) * spans.size() + s], expected, 1e-5);
      }
}

TEST(Router, TakesACoarseKeyOfZeroForNoDirectionAtAll) {
  const Array zero = Array::zeros({1, 3, 4});
  const SpanStore spans(zero, zero, std::vector<float>(3, 1.0F), {{0, 3}}, {});
  oracle::Random random(82);
  const Router router(normals(random, {1, 2, 4}), Array::zeros({1}));
  EXPECT_NEAR(*router.relevance(spans, router.norms(spans), normals(random, {1, 1, 4})).data<float>(), 0.75, 1e-6)
      << "sigmoid(log 3)";
}

TEST(Router, ZoomsNothingAboveAThresholdOfOneAndEverythingBelowZero) {  // S-10
  FoldedPrompt p(83, 200, 1, 2, 16, 2);
  const SpanStore spans = p.fold().spans;
  oracle::Random random(84);
  const Array w = normals(random, {2, 4, 16}, 30);
  const auto zoomed = [&](float tau) {
    const Router router(w, Array::full({2}, tau));
    const std::vector<int> m = marks_of(router.wanted(router.relevance(spans, router.norms(spans), p.queries)));
    return std::accumulate(m.begin(), m.end(), 0);
  };
  EXPECT_EQ(zoomed(1), 0);
  EXPECT_EQ(zoomed(-0.1F), 4 * static_cast<int>(spans.size()));
}

TEST(EstimatedMass, IsTheShareOfEachCoarseEntryInTheWholeSoftmax) {
  FoldedPrompt p(85, 150, 2, 4, 16, 2);
  const SpanMemory memory = p.fold();
  const OpenAttention open = attend_rows(memory.dense_keys, memory.dense_values, p.queries, 0.25);
  const Array coarse = coarse_logits(memory.spans, p.queries, 0.25), mass = estimated_mass(coarse, open);
  const Array dense = open.log_mass();
  for (std::int64_t i = 0; i < dense.numel(); ++i) {
    double all = std::exp(static_cast<double>(dense.data<float>()[i]));
    for (std::int64_t s = 0; s < memory.spans.size(); ++s)
      all += std::exp(static_cast<double>(coarse.data<float>()[i * memory.spans.size() + s]));
    for (std::int64_t s = 0; s < memory.spans.size(); ++s)
      EXPECT_NEAR(mass.data<float>()[i * memory.spans.size() + s],
                  std::exp(static_cast<double>(coarse.data<float>()[i * memory.spans.size() + s])) / all, 1e-6);
  }
}

TEST(WantedByMass, TakesWhatIsAboveAThresholdOrTheFewestThatCover) {
  const Array mass = row({0.10F, 0.30F, 0.0005F, 0.10F, 0.05F});
  ZoomOptions o;
  o.rule = Rule::mass, o.mass = 0.1;
  EXPECT_EQ(marks_of(wanted_by_mass(mass, o)), (std::vector<int>{1, 1, 0, 1, 0}))
      << "0.1 as fp32 is a little more than as fp64";
  o.mass = 0.2;
  EXPECT_EQ(marks_of(wanted_by_mass(mass, o)), (std::vector<int>{0, 1, 0, 0, 0}));
  o.rule = Rule::coverage, o.coverage = 0.7;  // of 0.5505: 0.3, then the first 0.1
  EXPECT_EQ(marks_of(wanted_by_mass(mass, o)), (std::vector<int>{1, 1, 0, 0, 0}));
  o.coverage = 1;
  EXPECT_EQ(marks_of(wanted_by_mass(mass, o)), (std::vector<int>{1, 1, 0, 1, 1})) << "below the floor nothing opens";
  o.coverage_floor = 0;
  EXPECT_EQ(marks_of(wanted_by_mass(row({1.0F, 1e-30F, 0.0F}), o)), (std::vector<int>{1, 1, 1}))
      << "what rounds away beside the others opens too";
  o.coverage = 0;
  EXPECT_EQ(marks_of(wanted_by_mass(mass, o)), (std::vector<int>{0, 0, 0, 0, 0}));
  o.rule = Rule::learned;
  EXPECT_THROW(static_cast<void>(wanted_by_mass(mass, o)), InvalidArgument);
}

/// Spans of these lengths, raw, so that a zoom takes as many entries as tokens.
SpanStore raw_spans(const std::vector<std::int32_t>& lengths, int kv_heads = 1) {
  std::vector<Span> spans;
  std::int32_t begin = 0;
  for (const std::int32_t l : lengths) spans.push_back({begin, begin + l}), begin += l;
  oracle::Random random(86);
  FactorOptions o;
  o.rank = FactorOptions::Rank::max, o.max_rank = 64, o.centred = FactorOptions::Centred::never;
  const Array keys = normals(random, {kv_heads, begin, 64}), values = normals(random, {kv_heads, begin, 64});
  return {keys, values, std::vector<float>(static_cast<std::size_t>(begin), 1.0F), spans, o};
}

TEST(ZoomBudget, PassesOverWhatDoesNotFitAndWalksOn) {  // G-S6
  const SpanStore spans = raw_spans({6, 7, 3, 1});
  const Array relevance = row({0.9F, 0.8F, 0.7F, 0.6F}), wanted = Array::full({1, 1, 4}, 1, Dtype::u8);
  EXPECT_EQ(marks_of(within_budget(relevance, wanted, spans, {.entries = 20, .resident = 10}, Heads::own)),
            (std::vector<int>{1, 0, 1, 1}));
  EXPECT_EQ(marks_of(within_budget(relevance, wanted, spans, {}, Heads::own)), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(marks_of(within_budget(relevance, wanted, spans, {.entries = 20, .resident = 20.5}, Heads::own)),
            (std::vector<int>{0, 0, 0, 0}))
      << "over the budget already";
  EXPECT_EQ(
      marks_of(within_budget(relevance, wanted, spans, {.entries = 20, .resident = 10, .per_head = true}, Heads::own)),
      (std::vector<int>{1, 0, 1, 1}))
      << "L - 1 each, as published";
  EXPECT_EQ(
      marks_of(within_budget(relevance, wanted, spans, {.entries = 21, .resident = 10, .per_head = true}, Heads::own)),
      (std::vector<int>{1, 1, 0, 1}));
}

TEST(ZoomBudget, IsNeverExceededByTheUnionOfAGroup) {  // S-11
  oracle::Random random(87);
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::int32_t> lengths;
    for (int i = random.between(1, 12); i > 0; --i) lengths.push_back(random.between(1, 20));
    const SpanStore spans = raw_spans(lengths, 2);
    const std::int64_t count = spans.size(), group = random.between(1, 4);
    Array relevance = Array::zeros({2, 2 * group, count}), wanted = Array::zeros({2, 2 * group, count}, Dtype::u8);
    for (std::int64_t i = 0; i < relevance.numel(); ++i)
      relevance.data<float>()[i] = static_cast<float>(random.between(0, 5)) / 5,
      wanted.data<std::uint8_t>()[i] = random.chance(0.6) ? 1 : 0;
    const ZoomBudget budget{.entries = static_cast<double>(random.between(10, 80)), .resident = 10};
    for (const Heads heads : {Heads::own, Heads::group}) {
      const Array zoomed = within_budget(relevance, wanted, spans, budget, heads);
      for (std::int64_t q = 0; q < 2; ++q)
        for (std::int64_t kv = 0; kv < 2; ++kv) {
          double used = budget.resident;
          for (std::int64_t s = 0; s < count; ++s) {
            int marked = 0, asked = 0;
            for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
              const std::int64_t at = (q * 2 * group + h) * count + s;
              const int mark = zoomed.data<std::uint8_t>()[at], want = wanted.data<std::uint8_t>()[at];
              marked += mark, asked += want;
              if (heads == Heads::own) EXPECT_LE(mark, want);
            }
            if (heads == Heads::group) EXPECT_TRUE(marked == 0 || (marked == group && asked > 0));
            if (heads == Heads::own && marked > 0) EXPECT_EQ(marked, asked) << "a span is taken for all who asked";
            if (marked > 0) used += lengths[static_cast<std::size_t>(s)];
          }
          EXPECT_LE(used, budget.entries);
        }
    }
  }
}

TEST(Router, RefusesShapesThatDoNotFitAndNumbersThatAreNotFinite) {
  FoldedPrompt p(88, 100, 2, 4, 16, 1);
  const SpanStore spans = p.fold().spans;
  oracle::Random random(89);
  EXPECT_THROW(Router(normals(random, {4, 8, 16}), Array::zeros({3})), InvalidArgument);
  EXPECT_THROW(Router(normals(random, {4, 8, 16}), Array::full({4}, std::nanf(""))), InvalidArgument);
  EXPECT_THROW(static_cast<void>(Router(normals(random, {4, 8, 15}), Array::zeros({4})).norms(spans)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(Router(normals(random, {3, 8, 16}), Array::zeros({3})).norms(spans)), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::router_test
