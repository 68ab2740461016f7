// SPDX-License-Identifier: Apache-2.0
// Folded spans by hand: golden numbers, agreement with plain loops and with read_memory(), what attention becomes at
// both ends, and budgets that are never exceeded.

#include "kvlab/span_memory.h"
#include "kvkeep/torch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "plain_memory.h"

namespace kvkeep::lm::span_memory_test {
namespace {

using namespace kvkeep::testing;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;
using Rule = ZoomOptions::Rule;
using Heads = ZoomOptions::Heads;

SpanMemory folded(const FoldedPrompt& p, const FactorOptions& factors = {}, const RankGates* gates = nullptr) {
  return fold_prompt(p.keys, p.values, p.surprisal, segment(p.surprisal, p.segmenter), factors, gates);
}

/// One softmax in fp64 over dense rows, coarse entries and rows of zoomed spans: the answer of query `query`, head
/// `head`.
std::vector<double> plain_answer(const SpanMemory& memory, const at::Tensor& queries, const at::Tensor& zoomed,
                                 double scale, std::int64_t query, std::int64_t head) {
  const SpanStore& spans = memory.spans;
  const std::int64_t heads = queries.size(1), kv = head / (heads / spans.kv_heads()), dim = spans.dim();
  PlainSoftmax softmax(queries.const_data_ptr<float>() + (query * heads + head) * dim, dim, scale);
  softmax.add_rows(as<float>(memory.dense_keys.select(0, kv)), as<float>(memory.dense_values.select(0, kv)));
  const kvkeep::Tensor keys = coarse_of(spans.row(kv), KvSide::keys), values = coarse_of(spans.row(kv), KvSide::values);
  for (std::int64_t s = 0; s < spans.size(); ++s)
    if (zoomed.const_data_ptr<std::uint8_t>()[(query * heads + head) * spans.size() + s] != 0)
      softmax.add_rows(spans.row(kv).rows(s, KvSide::keys), spans.row(kv).rows(s, KvSide::values));
    else
      softmax.add(keys.data<float>() + s * dim, values.data<float>() + s * dim,
                  std::log(static_cast<double>(spans.spans()[static_cast<std::size_t>(s)].length())));
  return softmax.answer();
}

/// The memory's answers with these spans zoomed: f32 [n, Hq, D].
at::Tensor answers(const SpanMemory& memory, const at::Tensor& queries, const at::Tensor& zoomed, double scale) {
  OpenAttention open = attend_rows(memory.dense_keys, memory.dense_values, queries, scale);
  merge_spans(open, memory.spans, queries, scale, coarse_logits(memory.spans, queries, scale), zoomed);
  return closed(open);
}

at::Tensor marks(std::vector<std::int64_t> shape, int mark) {
  return at::full(shape, mark, at::TensorOptions().dtype(c10::ScalarType::Byte));
}

at::Tensor random_marks(oracle::Random& random, std::vector<std::int64_t> shape) {
  at::Tensor m = marks(shape, 0);
  for (std::int64_t i = 0; i < m.numel(); ++i) m.data_ptr<std::uint8_t>()[i] = random.chance(0.4) ? 1 : 0;
  return m;
}

struct Sizes {
  int kv_heads, query_heads, dim;
};
const std::vector<Sizes> kShapes{{1, 1, 8}, {2, 2, 7}, {1, 3, 33}, {2, 8, 64}};

TEST(MemoryAttention, IsOneSoftmaxOverTokensCoarseEntriesAndZoomedSpans) {  // S-7, S-8
  int seed = 40;
  for (const Sizes& shape : kShapes)
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const Centred centred : {Centred::automatic, Centred::never}) {
        FoldedPrompt p(static_cast<std::uint64_t>(++seed), 170, shape.kv_heads, shape.query_heads, shape.dim, 3);
        SCOPED_TRACE(seed);
        p.keys = p.keys.to(dtype), p.values = p.values.to(dtype);
        FactorOptions o;
        o.energy = 0.4, o.centred = centred;
        const SpanMemory memory = folded(p, o);
        oracle::Random random(static_cast<std::uint64_t>(seed));
        const at::Tensor zoomed = random_marks(random, {3, shape.query_heads, memory.spans.size()});
        const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
        const at::Tensor out = answers(memory, p.queries, zoomed, scale);
        for (std::int64_t n = 0; n < 3; ++n)
          for (std::int64_t h = 0; h < shape.query_heads; ++h) {
            const std::vector<double> plain = plain_answer(memory, p.queries, zoomed, scale, n, h);
            for (std::int64_t d = 0; d < shape.dim; ++d)
              EXPECT_NEAR(out.const_data_ptr<float>()[(n * shape.query_heads + h) * shape.dim + d],
                          plain[static_cast<std::size_t>(d)], 2e-5);
          }
      }
}

TEST(MemoryAttention, IsExactWhereEverySpanIsZoomedAtFullRank) {  // S-3
  for (const bool raw : {false, true})
    for (const Centred centred : {Centred::always, Centred::never}) {
      FoldedPrompt p(60, 200, 2, 4, 16, 2);
      FactorOptions o;
      o.rank = Rank::max, o.max_rank = 64, o.raw = raw, o.centred = centred;
      const SpanMemory memory = folded(p, o);
      const at::Tensor out = answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 1), 0.25);
      EXPECT_LT(apart(out, closed(attend_rows(p.keys, p.values, p.queries, 0.25))), 1e-5);
    }
}

TEST(MemoryAttention, IsExactWithoutSpansAndZeroWithoutTokens) {  // S-4
  FoldedPrompt p(61, 9, 2, 4, 16, 2);
  const SpanMemory memory = folded(p);  // no longer than the window
  ASSERT_EQ(memory.spans.size(), 0);
  EXPECT_EQ(apart(answers(memory, p.queries, marks({2, 4, 0}, 1), 0.25),
                  closed(attend_rows(p.keys, p.values, p.queries, 0.25))),
            0);
  const SpanMemory nothing = fold_prompt(p.keys.narrow(1, 0, 0), p.values.narrow(1, 0, 0), {}, segment({}, {}));
  EXPECT_EQ(apart(answers(nothing, p.queries, marks({2, 4, 0}, 1), 0.25), at::zeros({2, 4, 16})), 0);
}

TEST(MemoryAttention, DoesNotChangeWhereRankZeroIsZoomed) {  // S-5: a zoom refines without a jump
  FoldedPrompt p(62, 150, 2, 4, 16, 2);
  FactorOptions o;
  o.energy = 1, o.centred = Centred::always;
  for (const Dtype store : {Dtype::f32, Dtype::bf16}) {
    o.store = store;
    const SpanMemory memory = folded(p, o);
    EXPECT_LT(apart(answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 1), 0.25),
                    answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 0), 0.25)),
              2e-6);
  }
}

TEST(MemoryAttention, GivesTheNumbersOfASmallExample) {  // G-S4, rows put together by hand
  const at::Tensor query = at::zeros({1, 1, 4}), keys = at::zeros({1, 4, 4}), values = at::zeros({1, 4, 4});
  query.data_ptr<float>()[0] = 2;
  const float k0[] = {1.0F, 0.5F, 0.2F, -0.3F};
  for (int i = 0; i < 4; ++i) keys.data_ptr<float>()[4 * i] = k0[i], values.data_ptr<float>()[5 * i] = 1;
  // The second row stands for five equal tokens, as a coarse entry does.
  const at::Tensor span_keys = keys.narrow(1, 1, 1).expand({1, 5, 4}),
                   span_values = values.narrow(1, 1, 1).expand({1, 5, 4});
  const SpanStore coarse(span_keys, span_values, std::vector<float>(5, 1.0F), {{0, 5}}, {});
  OpenAttention open = attend_rows(keys.narrow(1, 0, 1), values.narrow(1, 0, 1), query, 0.5);
  merge_spans(open, coarse, query, 0.5, coarse_logits(coarse, query, 0.5), marks({1, 1, 1}, 0));
  const SpanStore zoomed(keys.narrow(1, 2, 2), values.narrow(1, 2, 2), std::vector<float>(2, 1.0F), {{0, 2}}, {});
  merge_spans(open, zoomed, query, 0.5, coarse_logits(zoomed, query, 0.5), marks({1, 1, 1}, 1));
  const double expected[] = {0.210326, 0.637847, 0.094506, 0.057321};
  const at::Tensor out = closed(open);
  for (int d = 0; d < 4; ++d) EXPECT_NEAR(out.const_data_ptr<float>()[d], expected[d], 1e-6);
  EXPECT_NEAR(torch_tensor(log_mass(open)).item<float>(), 2.559094, 1e-6);
}

TEST(MemoryAttention, StaysWithinTheErrorBoundOfWhatFactorsLeaveOut) {  // S-9
  for (std::uint64_t seed = 70; seed < 90; ++seed) {
    SCOPED_TRACE(seed);
    FoldedPrompt p(seed, 120, 1, 2, 16, 2);
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = 5, o.raw = false, o.centred = Centred::always;
    const SpanMemory memory = folded(p, o);
    o.max_rank = 16;
    const at::Tensor all = folded(p, o).spans.singular_values();
    const at::Tensor out = answers(memory, p.queries, marks({2, 2, memory.spans.size()}, 1), 0.25),
                     exact = closed(attend_rows(p.keys, p.values, p.queries, 0.25));
    const double next_key = all.select(2, 0).select(2, 5).max().item<float>(),
                 next_value = all.select(2, 1).select(2, 5).max().item<float>();
    const double longest_query = torch_tensor(p.queries).norm(2, {2}).max().item<float>(),
                 longest_value = torch_tensor(p.values).norm(2, {2}).max().item<float>();
    const double bound = (std::exp(2 * longest_query * next_key * 0.25) - 1) * longest_value + next_value;
    EXPECT_LE((out - exact).norm(2, {2}).max().item<float>(), bound);
  }
}

TEST(MemoryAttention, CountsBytesOfDenseRowsInTheirOwnDtype) {
  FoldedPrompt p(63, 150, 2, 4, 16, 1);
  p.keys = p.keys.to(Dtype::bf16), p.values = p.values.to(Dtype::bf16);
  const SpanMemory memory = folded(p);
  EXPECT_EQ(memory.near_bytes(), static_cast<std::int64_t>(memory.segments.dense().size()) * 2 * 2 * 16 * 2 +
                                     memory.spans.size() * (2 * 2 * 16 * 4 + 4));
}

TEST(MemoryAttention, IsWhatReadMemoryReads) {  // bit for bit
  int seed = 100;
  std::int64_t zooms = 0;
  for (const Sizes& shape : kShapes)
    for (const Rule rule : {Rule::mass, Rule::coverage, Rule::learned})
      for (const Heads heads : {Heads::own, Heads::group})
        for (const bool per_head : {false, true}) {
          const FoldedPrompt p(static_cast<std::uint64_t>(++seed), 170, shape.kv_heads, shape.query_heads, shape.dim,
                               3);
          SCOPED_TRACE(seed);
          const SpanMemory memory = folded(p);
          const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
          const std::int64_t dense = memory.dense_keys.size(1), group = shape.query_heads / shape.kv_heads;
          oracle::Random random(static_cast<std::uint64_t>(seed));
          const Router router(normals(random, {shape.query_heads, 5, shape.dim}),
                              torch_tensor(normals(random, {shape.query_heads}, 0.02)) + 0.97);
          const Reading reading{.zoom = {.rule = rule, .heads = heads, .mass = 0.03, .coverage = 0.5},
                                .router = rule == Rule::learned ? &router : nullptr,
                                .entries = static_cast<double>(dense + memory.spans.size()) + 40,
                                .per_head = per_head};

          OpenAttention by_hand = attend_rows(memory.dense_keys, memory.dense_values, p.queries, scale);
          const at::Tensor coarse = coarse_logits(memory.spans, p.queries, scale);
          const at::Tensor shares =
              rule == Rule::learned ? lm::relevance(router, memory.spans, router_norms(router, memory.spans), p.queries)
                                    : estimated_mass(coarse, by_hand);
          const at::Tensor asked =
              rule == Rule::learned ? wanted(router, shares) : wanted_by_mass(shares, reading.zoom);
          merge_spans(by_hand, memory.spans, p.queries, scale, coarse,
                      within_budget(shares, asked, memory.spans,
                                    {.entries = reading.entries,
                                     .resident = static_cast<double>(dense + memory.spans.size()),
                                     .per_head = per_head},
                                    heads));

          std::vector<SpanRow> rows(memory.spans.rows().begin(), memory.spans.rows().end());
          std::vector<MemoryRow> read;
          for (std::int64_t kv = 0; kv < shape.kv_heads; ++kv) {
            SpanRow& row = rows[static_cast<std::size_t>(kv)];
            if (rule == Rule::learned) row.set_norms(router.norms(row, kv * group, group));
            read.push_back({&row, dense});
          }
          OpenAttention at_once = attend_rows(memory.dense_keys, memory.dense_values, p.queries, scale);
          zooms += read_memory(at_once, read, p.queries, scale, reading).zooms;
          EXPECT_EQ(apart(closed(at_once), closed(by_hand)), 0);
          EXPECT_EQ(apart(log_mass(at_once), log_mass(by_hand)), 0);
        }
  EXPECT_GT(zooms, 500);
}

TEST(SpanStore, RefusesRowsAndSpansThatDoNotFit) {
  const FoldedPrompt p(38, 40, 1, 1, 8, 1);
  EXPECT_THROW(SpanStore(p.keys, p.values, p.surprisal, {{30, 41}}, {}), InvalidArgument);
  EXPECT_THROW(SpanStore(p.keys, p.values, p.surprisal, {{0, 5}, {4, 9}}, {}), InvalidArgument);
  EXPECT_THROW(SpanStore(p.keys, p.values.narrow(1, 0, 39), p.surprisal, {{0, 5}}, {}), InvalidArgument);
  EXPECT_THROW(SpanStore(p.keys, p.values, {}, {{0, 5}}, {}), InvalidArgument);
}

TEST(MemoryAttention, RefusesQueriesAndMarksThatDoNotFit) {
  FoldedPrompt p(64, 100, 2, 4, 16, 2);
  const SpanMemory memory = folded(p);
  EXPECT_THROW(static_cast<void>(attend_rows(p.keys, p.values, p.queries.narrow(1, 0, 3), 0.25)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(coarse_logits(memory.spans, p.queries.narrow(2, 0, 15), 0.25)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(answers(memory, p.queries, marks({2, 4, memory.spans.size() + 1}, 1), 0.25)),
               InvalidArgument);
}

// ---- Which spans are zoomed -----------------------------------------------------------------------------------------

at::Tensor row(std::vector<float> x) {
  at::Tensor t = at::zeros({1, 1, static_cast<std::int64_t>(x.size())});
  std::ranges::copy(x, t.data_ptr<float>());
  return t;
}

std::vector<int> marks_of(const at::Tensor& t) {
  return {t.const_data_ptr<std::uint8_t>(), t.const_data_ptr<std::uint8_t>() + t.numel()};
}

TEST(Router, IsASigmoidOfTheDirectionOfTheCoarseKeyAndTheLogarithmOfTheLength) {  // G-S3, and the form with stored
                                                                                  // projections (S-15)
  // One head, d' = 4: W q = (1.2, 0, 0, 0) along the direction of W kmean, a span of five.
  at::Tensor w = at::zeros({1, 4, 4});
  for (int i = 0; i < 4; ++i) w.data_ptr<float>()[5 * i] = 1;
  at::Tensor key = at::zeros({1, 5, 4});
  for (int t = 0; t < 5; ++t) key.data_ptr<float>()[4 * t] = 7;
  const SpanStore five(key, key, std::vector<float>(5, 1.0F), {{0, 5}}, {});
  const Router router(w, at::full({1}, 0.9F));
  const at::Tensor a = relevance(router, five, router_norms(router, five), row({1.2F, 0, 0, 0}));
  EXPECT_NEAR(a.item<float>(), 0.901094, 1e-6);
  EXPECT_EQ(marks_of(wanted(router, a)), std::vector<int>{1});

  FoldedPrompt p(80, 200, 2, 6, 16, 3);
  const SpanStore spans = folded(p).spans;
  oracle::Random random(81);
  const at::Tensor projections = normals(random, {6, 8, 16});
  const Router random_router(projections, normals(random, {6}));
  const at::Tensor relevance = lm::relevance(random_router, spans, router_norms(random_router, spans), p.queries);
  for (std::int64_t n = 0; n < 3; ++n)
    for (std::int64_t h = 0; h < 6; ++h)
      for (std::int64_t s = 0; s < spans.size(); ++s) {
        double dot = 0, norm = 0;
        for (int i = 0; i < 8; ++i) {
          double query = 0, summary = 0;
          for (int d = 0; d < 16; ++d) {
            const double weight = projections.const_data_ptr<float>()[(h * 8 + i) * 16 + d];
            query += weight * p.queries.data<float>()[(n * 6 + h) * 16 + d];
            summary += weight * spans.coarse(KvSide::keys).data<float>()[(h / 3 * spans.size() + s) * 16 + d];
          }
          dot += query * summary, norm += summary * summary;
        }
        const double expected =
            1 / (1 + std::exp(-(dot / std::sqrt(norm) / std::sqrt(8.0)) -
                              std::log(static_cast<double>(spans.spans()[static_cast<std::size_t>(s)].length()))));
        EXPECT_NEAR(relevance.const_data_ptr<float>()[(n * 6 + h) * spans.size() + s], expected, 1e-5);
      }
}

TEST(Router, TakesACoarseKeyOfZeroForNoDirectionAtAll) {
  const at::Tensor zero = at::zeros({1, 3, 4});
  const SpanStore spans(zero, zero, std::vector<float>(3, 1.0F), {{0, 3}}, {});
  oracle::Random random(82);
  const Router router(normals(random, {1, 2, 4}), at::zeros({1}));
  EXPECT_NEAR(*relevance(router, spans, router_norms(router, spans), normals(random, {1, 1, 4})).data<float>(), 0.75,
              1e-6)
      << "sigmoid(log 3)";
}

TEST(Router, ZoomsNothingAboveAThresholdOfOneAndEverythingBelowZero) {  // S-10
  FoldedPrompt p(83, 200, 1, 2, 16, 2);
  const SpanStore spans = folded(p).spans;
  oracle::Random random(84);
  const at::Tensor w = normals(random, {2, 4, 16}, 30);
  const auto zoomed = [&](float tau) {
    const Router router(w, at::full({2}, tau));
    const std::vector<int> m =
        marks_of(wanted(router, relevance(router, spans, router_norms(router, spans), p.queries)));
    return std::accumulate(m.begin(), m.end(), 0);
  };
  EXPECT_EQ(zoomed(1), 0);
  EXPECT_EQ(zoomed(-0.1F), 4 * static_cast<int>(spans.size()));
}

TEST(EstimatedMass, IsTheShareOfEachCoarseEntryInTheWholeSoftmax) {
  FoldedPrompt p(85, 150, 2, 4, 16, 2);
  const SpanMemory memory = folded(p);
  const OpenAttention open = attend_rows(memory.dense_keys, memory.dense_values, p.queries, 0.25);
  const at::Tensor coarse = coarse_logits(memory.spans, p.queries, 0.25), mass = estimated_mass(coarse, open);
  const at::Tensor dense = log_mass(open);
  for (std::int64_t i = 0; i < dense.numel(); ++i) {
    double all = std::exp(static_cast<double>(dense.const_data_ptr<float>()[i]));
    for (std::int64_t s = 0; s < memory.spans.size(); ++s)
      all += std::exp(static_cast<double>(coarse.const_data_ptr<float>()[i * memory.spans.size() + s]));
    for (std::int64_t s = 0; s < memory.spans.size(); ++s)
      EXPECT_NEAR(mass.const_data_ptr<float>()[i * memory.spans.size() + s],
                  std::exp(static_cast<double>(coarse.const_data_ptr<float>()[i * memory.spans.size() + s])) / all,
                  1e-6);
  }
}

TEST(WantedByMass, TakesWhatIsAboveAThresholdOrTheFewestThatCover) {
  const at::Tensor mass = row({0.10F, 0.30F, 0.0005F, 0.10F, 0.05F});
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
  const at::Tensor keys = normals(random, {kv_heads, begin, 64}), values = normals(random, {kv_heads, begin, 64});
  return {keys, values, std::vector<float>(static_cast<std::size_t>(begin), 1.0F), spans, o};
}

TEST(ZoomBudget, PassesOverWhatDoesNotFitAndWalksOn) {  // G-S6
  const SpanStore spans = raw_spans({6, 7, 3, 1});
  const at::Tensor relevance = row({0.9F, 0.8F, 0.7F, 0.6F}),
                   wanted = at::full({1, 1, 4}, 1, at::TensorOptions().dtype(c10::ScalarType::Byte));
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
    at::Tensor relevance = at::zeros({2, 2 * group, count}),
               wanted = at::zeros({2, 2 * group, count}, at::TensorOptions().dtype(c10::ScalarType::Byte));
    for (std::int64_t i = 0; i < relevance.numel(); ++i)
      relevance.data_ptr<float>()[i] = static_cast<float>(random.between(0, 5)) / 5,
      wanted.data_ptr<std::uint8_t>()[i] = random.chance(0.6) ? 1 : 0;
    const cpu::ZoomBudget budget{.entries = static_cast<double>(random.between(10, 80)), .resident = 10};
    for (const Heads heads : {Heads::own, Heads::group}) {
      const at::Tensor zoomed = within_budget(relevance, wanted, spans, budget, heads);
      for (std::int64_t q = 0; q < 2; ++q)
        for (std::int64_t kv = 0; kv < 2; ++kv) {
          double used = budget.resident;
          for (std::int64_t s = 0; s < count; ++s) {
            int marked = 0, asked = 0;
            for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
              const std::int64_t at = (q * 2 * group + h) * count + s;
              const int mark = zoomed.const_data_ptr<std::uint8_t>()[at],
                        want = wanted.const_data_ptr<std::uint8_t>()[at];
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
  const SpanStore spans = folded(p).spans;
  oracle::Random random(89);
  EXPECT_THROW(Router(normals(random, {4, 8, 16}), at::zeros({3})), InvalidArgument);
  EXPECT_THROW(Router(normals(random, {4, 8, 16}), at::full({4}, std::nanf(""))), InvalidArgument);
  EXPECT_THROW(static_cast<void>(router_norms(Router(normals(random, {4, 8, 15}), at::zeros({4})), spans)),
               InvalidArgument);
  EXPECT_THROW(static_cast<void>(router_norms(Router(normals(random, {3, 8, 16}), at::zeros({3})), spans)),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::span_memory_test
