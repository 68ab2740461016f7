// Attention over folded spans: golden numbers, agreement with one plain softmax, and what it becomes at both ends.

#include "kvkeep/memory/memory_attention.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"

namespace kvkeep::memory_attention_test {
namespace {

using namespace testing;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;

Array marks(std::vector<std::int64_t> shape, int mark) { return Array::full(shape, mark, Dtype::u8); }

Array random_marks(oracle::Random& random, std::vector<std::int64_t> shape) {
  Array m = marks(shape, 0);
  for (std::int64_t i = 0; i < m.numel(); ++i) m.data<std::uint8_t>()[i] = random.chance(0.4) ? 1 : 0;
  return m;
}

/// Largest length of a row of a - b.
double longest(const Array& a, const Array& b = {}) {
  double most = 0;
  const Array x = a.contiguous();
  for (std::int64_t i = 0; i < x.numel(); i += x.size(-1)) {
    double sum = 0;
    for (std::int64_t d = i; d < i + x.size(-1); ++d) {
      const double rest = x.data<float>()[d] - (b.defined() ? b.data<float>()[d] : 0.0F);
      sum += rest * rest;
    }
    most = std::max(most, std::sqrt(sum));
  }
  return most;
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
        const SpanMemory memory = p.fold(o);
        oracle::Random random(static_cast<std::uint64_t>(seed));
        const Array zoomed = random_marks(random, {3, shape.query_heads, memory.spans.size()});
        const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
        const Array out = answers(memory, p.queries, zoomed, scale);
        for (std::int64_t n = 0; n < 3; ++n)
          for (std::int64_t h = 0; h < shape.query_heads; ++h) {
            const std::vector<double> plain = plain_answer(memory, p.queries, zoomed, scale, n, h);
            for (std::int64_t d = 0; d < shape.dim; ++d)
              EXPECT_NEAR(out.data<float>()[(n * shape.query_heads + h) * shape.dim + d],
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
      const SpanMemory memory = p.fold(o);
      const Array out = answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 1), 0.25);
      EXPECT_LT(apart(out, attend_rows(p.keys, p.values, p.queries, 0.25).close()), 1e-5);
    }
}

TEST(MemoryAttention, IsExactWithoutSpansAndZeroWithoutTokens) {  // S-4
  FoldedPrompt p(61, 9, 2, 4, 16, 2);
  const SpanMemory memory = p.fold();  // no longer than the window
  ASSERT_EQ(memory.spans.size(), 0);
  EXPECT_EQ(apart(answers(memory, p.queries, marks({2, 4, 0}, 1), 0.25),
                  attend_rows(p.keys, p.values, p.queries, 0.25).close()),
            0);
  const SpanMemory nothing = fold_prompt(p.keys.narrow(1, 0, 0), p.values.narrow(1, 0, 0), {}, segment({}, {}));
  EXPECT_EQ(apart(answers(nothing, p.queries, marks({2, 4, 0}, 1), 0.25), Array::zeros({2, 4, 16})), 0);
}

TEST(MemoryAttention, DoesNotChangeWhereRankZeroIsZoomed) {  // S-5: a zoom refines without a jump
  FoldedPrompt p(62, 150, 2, 4, 16, 2);
  FactorOptions o;
  o.energy = 1, o.centred = Centred::always;
  for (const Dtype store : {Dtype::f32, Dtype::bf16}) {
    o.store = store;
    const SpanMemory memory = p.fold(o);
    EXPECT_LT(apart(answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 1), 0.25),
                    answers(memory, p.queries, marks({2, 4, memory.spans.size()}, 0), 0.25)),
              2e-6);
  }
}

TEST(MemoryAttention, GivesTheNumbersOfASmallExample) {  // G-S4, rows put together by hand
  const Array query = Array::zeros({1, 1, 4}), keys = Array::zeros({1, 4, 4}), values = Array::zeros({1, 4, 4});
  query.data<float>()[0] = 2;
  const float k0[] = {1.0F, 0.5F, 0.2F, -0.3F};
  for (int i = 0; i < 4; ++i) keys.data<float>()[4 * i] = k0[i], values.data<float>()[5 * i] = 1;
  // The second row stands for five equal tokens, as a coarse entry does.
  const auto five = [](const Array& row) { return Array::cat(std::vector<Array>(5, row), 1); };
  const Array span_keys = five(keys.narrow(1, 1, 1)), span_values = five(values.narrow(1, 1, 1));
  const SpanStore coarse(span_keys, span_values, std::vector<float>(5, 1.0F), {{0, 5}}, {});
  OpenAttention open = attend_rows(keys.narrow(1, 0, 1), values.narrow(1, 0, 1), query, 0.5);
  merge_spans(open, coarse, query, 0.5, coarse_logits(coarse, query, 0.5), marks({1, 1, 1}, 0));
  const SpanStore zoomed(keys.narrow(1, 2, 2), values.narrow(1, 2, 2), std::vector<float>(2, 1.0F), {{0, 2}}, {});
  merge_spans(open, zoomed, query, 0.5, coarse_logits(zoomed, query, 0.5), marks({1, 1, 1}, 1));
  const double expected[] = {0.210326, 0.637847, 0.094506, 0.057321};
  const Array out = open.close();
  for (int d = 0; d < 4; ++d) EXPECT_NEAR(out.data<float>()[d], expected[d], 1e-6);
  EXPECT_NEAR(Array(open.log_mass()).item<float>(), 2.559094, 1e-6);
}

TEST(MemoryAttention, StaysWithinTheErrorBoundOfWhatFactorsLeaveOut) {  // S-9
  for (std::uint64_t seed = 70; seed < 90; ++seed) {
    SCOPED_TRACE(seed);
    FoldedPrompt p(seed, 120, 1, 2, 16, 2);
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = 5, o.raw = false, o.centred = Centred::always;
    const SpanMemory memory = p.fold(o);
    o.max_rank = 16;
    const Array all = p.fold(o).spans.singular_values();
    const Array out = answers(memory, p.queries, marks({2, 2, memory.spans.size()}, 1), 0.25),
                exact = attend_rows(p.keys, p.values, p.queries, 0.25).close();
    const double next_key = longest(all.select(2, 0).narrow(2, 5, 1)),
                 next_value = longest(all.select(2, 1).narrow(2, 5, 1));
    const double longest_query = longest(p.queries), longest_value = longest(p.values);
    const double bound = (std::exp(2 * longest_query * next_key * 0.25) - 1) * longest_value + next_value;
    EXPECT_LE(longest(out, exact), bound);
  }
}

TEST(MemoryAttention, CountsBytesOfDenseRowsInTheirOwnDtype) {
  FoldedPrompt p(63, 150, 2, 4, 16, 1);
  p.keys = p.keys.to(Dtype::bf16), p.values = p.values.to(Dtype::bf16);
  const SpanMemory memory = p.fold();
  EXPECT_EQ(memory.near_bytes(), static_cast<std::int64_t>(memory.segments.dense().size()) * 2 * 2 * 16 * 2 +
                                     memory.spans.size() * (2 * 2 * 16 * 4 + 4));
}

TEST(MemoryAttention, RefusesQueriesAndMarksThatDoNotFit) {
  FoldedPrompt p(64, 100, 2, 4, 16, 2);
  const SpanMemory memory = p.fold();
  EXPECT_THROW(static_cast<void>(attend_rows(p.keys, p.values, p.queries.narrow(1, 0, 3), 0.25)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(coarse_logits(memory.spans, p.queries.narrow(2, 0, 15), 0.25)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(answers(memory, p.queries, marks({2, 4, memory.spans.size() + 1}, 1), 0.25)),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::memory_attention_test
