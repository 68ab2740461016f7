// SPDX-License-Identifier: Apache-2.0
// Sketches of folded keys: what they tell of a query, that they find the one token it asks for, and that they travel
// with their spans.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "arrays.h"
#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/row_zoom.h"
#include "plain_memory.h"
#include "scorer_case.h"

namespace kvkeep::key_sketch_test {
namespace {

using namespace testing;

struct Sketched {
  /// `count` spans of `length` keys that have nothing to do with each other.
  Sketched(std::uint64_t seed, int count, int length, int dim, bool sketch) {
    oracle::Random random(seed);
    keys = normals(random, {1, count * length, dim}), values = normals(random, {1, count * length, dim});
    std::vector<Span> spans;
    for (int s = 0; s < count; ++s) spans.push_back({s * length, (s + 1) * length});
    FactorOptions o;
    o.sketch = sketch;
    store = FoldedHeads(keys, values, std::vector<float>(static_cast<std::size_t>(count * length), 1.0F), spans, o);
  }

  /// Spans that a query opens by a share of attention above `mass`, beside dense rows of log-sum-exp 0.
  [[nodiscard]] std::vector<std::int32_t> opened(const Array& query, double mass) const {
    const std::int64_t dim = query.size(2);
    OpenAttention open{Array::zeros({1, 1}), Array::full({1, 1}, 1.0F), Array::zeros({1, 1, dim})};
    ZoomOptions zoom;
    zoom.rule = ZoomOptions::Rule::mass, zoom.mass = mass;
    const MemoryRow row{.spans = &store.row(0), .dense = 1};
    std::vector<std::vector<std::int32_t>> which;
    static_cast<void>(
        read_memory(open, {&row, 1}, query, 1 / std::sqrt(static_cast<double>(dim)), {.zoom = zoom}, &which));
    return which.front();
  }

  Array keys, values;
  FoldedHeads store;
};

TEST(KeySketch, HoldsTheSignsOfEveryKeyBesideItsCoarseKey) {
  for (const int dim : {1, 7, 32, 33, 128}) {
    const Sketched p(static_cast<std::uint64_t>(dim), 3, 7, dim, true);
    const SpanRow& row = p.store.row(0);
    const Array coarse = coarse_of(row, KvSide::keys);
    const std::int64_t words = KeySketch::words(dim);
    EXPECT_EQ(row.tokens(), 21);
    EXPECT_EQ(row.near_bytes(), 3 * (8 * dim + 4) + 21 * (4 * words + 2));
    for (std::int64_t t = 0; t < 21; ++t) {
      double squares = 0, sum = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        const double x = static_cast<double>(p.keys.data<float>()[t * dim + d]) - coarse.data<float>()[t / 7 * dim + d];
        squares += x * x, sum += std::abs(x);
        if (std::abs(x) > 1e-5)
          EXPECT_EQ(row.sketch().signs[KeySketch::at(t, d / 32, words)] >> (d % 32) & 1U, x > 0 ? 1U : 0U);
      }
      EXPECT_NEAR(static_cast<float>(row.sketch().sizes[static_cast<std::size_t>(t)]), squares / sum,
                  0.01 * squares / sum);
    }
  }
}

/// Shares of attention in fp64, from the sketch as it is told: [heads, spans].
std::vector<double> plain_mass(const SpanRow& row, const Array& queries, double scale,
                               const std::vector<float>& dense) {
  const std::int64_t heads = queries.size(0), dim = row.dim(), words = KeySketch::words(dim);
  const auto* coarse = reinterpret_cast<const float*>(row.coarse(KvSide::keys));
  std::vector<double> mass;
  for (std::int64_t h = 0; h < heads; ++h) {
    const float* q = queries.data<float>() + h * dim;
    std::vector<double> logits;
    for (std::int64_t s = 0; s < row.size(); ++s)
      for (std::int64_t t = row.tokens_before(s); t < row.tokens_before(s + 1); ++t) {
        double mean = 0, signs = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          mean += static_cast<double>(q[d]) * coarse[s * dim + d];
          signs += (row.sketch().signs[KeySketch::at(t, d / 32, words)] >> (d % 32) & 1U) != 0 ? q[d] : -q[d];
        }
        logits.push_back(
            scale *
            (mean + static_cast<double>(static_cast<float>(row.sketch().sizes[static_cast<std::size_t>(t)])) * signs));
      }
    const double own = dense[static_cast<std::size_t>(h)], top = std::max(own, std::ranges::max(logits));
    double all = std::exp(own - top);
    for (const double x : logits) all += std::exp(x - top);
    for (std::int64_t s = 0; s < row.size(); ++s) {
      double sum = 0;
      for (std::int64_t t = row.tokens_before(s); t < row.tokens_before(s + 1); ++t)
        sum += std::exp(logits[static_cast<std::size_t>(t)] - top);
      mass.push_back(sum / all);
    }
  }
  return mass;
}

std::vector<float> told_mass(const SpanRow& row, const Array& queries, double scale, const std::vector<float>& dense) {
  const std::int64_t heads = queries.size(0);
  std::vector<float> coarse(static_cast<std::size_t>(heads * row.size())), mass(coarse.size());
  cpu::ZoomScratch scratch;
  cpu::coarse_logits(row, queries.data<float>(), heads, static_cast<float>(scale), coarse.data(), scratch);
  cpu::sketch_mass(row, queries.data<float>(), heads, static_cast<float>(scale), coarse.data(), dense.data(),
                   mass.data(), scratch);
  return mass;
}

TEST(KeySketch, TellsTheSharesOfAttentionThatItsSignsGive) {
  for_every_instruction_set([] {
    for (const int dim : {1, 7, 32, 33, 100, 128, 256})
      for (const int length : {1, 3, 16, 37})
        for (const double size : {0.0, 1e-30, 1.0, 30.0}) {
          SCOPED_TRACE(text("dim ", dim, ", spans of ", length, ", queries times ", size));
          const Sketched p(static_cast<std::uint64_t>(dim + length), 13, length, dim, true);
          oracle::Random random(3);
          const int heads = 1 + dim % 6;
          Array queries = normals(random, {heads, dim}, size);
          queries[0][0].mul_(40);  // one number outweighs the others
          std::vector<float> dense;
          for (int h = 0; h < heads; ++h) dense.push_back(static_cast<float>(3 * random.normal()));
          const double scale = 1 / std::sqrt(static_cast<double>(dim));
          const std::vector<double> expected = plain_mass(p.store.row(0), queries, scale, dense);
          const std::vector<float> told = told_mass(p.store.row(0), queries, scale, dense);
          // A logit is off by the rounding of queries to 15 bits of their sum, which grows with them.
          const double off = 2e-4 + 2e-3 * size;
          for (std::size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(told[i], expected[i], off * expected[i] + 1e-7) << i;
        }
  });
}

TEST(KeySketch, TellsNothingOfAQueryThatIsNotFinite) {
  for_every_instruction_set([] {
    const Sketched p(1, 5, 16, 40, true);
    for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      oracle::Random random(3);
      Array queries = normals(random, {2, 40});
      const std::vector<float> dense{0, 0}, whole = told_mass(p.store.row(0), queries, 0.2, dense);
      queries[0][17].fill_(wrong);
      const std::vector<float> told = told_mass(p.store.row(0), queries, 0.2, dense);
      for (std::size_t s = 0; s < 5; ++s) {
        EXPECT_FALSE(told[s] > 0);
        EXPECT_EQ(told[5 + s], whole[5 + s]) << "the other head";
      }
    }
  });
}

TEST(KeySketch, FindsTheSpanThatHoldsTheTokenAQueryAsksFor) {
  for (const int dim : {32, 128}) {
    int told = 0, by_mean = 0, others = 0;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const Sketched with(seed, 24, 16, dim, true), without(seed, 24, 16, dim, false);
      const std::int64_t token = 5 + static_cast<std::int64_t>(seed) * 9;
      const Array query = with.keys.narrow(1, token, 1).clone().mul_(2);
      const auto span = static_cast<std::int32_t>(token / 16);
      const auto a = with.opened(query, 0.3), b = without.opened(query, 0.3);
      told += std::ranges::find(a, span) != a.end(), by_mean += std::ranges::find(b, span) != b.end();
      others += static_cast<int>(a.size());
    }
    EXPECT_GE(told, dim == 32 ? 34 : 40) << dim;
    EXPECT_LE(others, 44) << "and hardly any other";
    EXPECT_LE(by_mean, 10) << "which the coarse entries alone do not show";
  }
}

TEST(KeySketch, TravelsWithSpansThatAreAppended) {
  for (const int first : {1, 15, 16, 17, 40}) {
    const std::int64_t dim = 40;
    oracle::Random random(7);
    const Array keys = normals(random, {1, 80, dim});
    FactorOptions o;
    o.sketch = true;
    const std::vector<float> alike(80, 1.0F);
    const FoldedHeads whole(keys, keys, alike, {{0, first}, {first, 80}}, o);
    SpanRow grown = FoldedHeads(keys, keys, alike, {{0, first}}, o).row(0);
    grown.append(FoldedHeads(keys, keys, alike, {{first, 80}}, o).row(0));
    EXPECT_EQ(grown.tokens(), 80);
    EXPECT_EQ(grown.tokens_before(1), first);
    for (std::int64_t t = 0; t < 80; ++t)
      for (std::int64_t w = 0; w < KeySketch::words(dim); ++w)
        EXPECT_EQ(grown.sketch().signs[KeySketch::at(t, w, KeySketch::words(dim))],
                  whole.row(0).sketch().signs[KeySketch::at(t, w, KeySketch::words(dim))]);
    o.sketch = false;
    EXPECT_THROW(grown.append(FoldedHeads(keys, keys, alike, {{0, 80}}, o).row(0)), InvalidArgument);
  }
}

}  // namespace
}  // namespace kvkeep::key_sketch_test
