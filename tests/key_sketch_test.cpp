// Sketches of folded keys: what they tell of a query, that they find the one token it asks for, and that they travel with their spans.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/zoom.h"

namespace kvkeep {
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
    store = SpanStore(keys, values, std::vector<float>(static_cast<std::size_t>(count * length), 1.0F), spans, o);
  }

  /// Spans that a query opens by a share of attention above `mass`, beside dense rows of log-sum-exp 0.
  [[nodiscard]] std::vector<std::int32_t> opened(const Tensor& query, double mass) const {
    const std::int64_t dim = query.size(2);
    OpenAttention open{at::zeros({1, 1}), at::full({1, 1}, 1.0F), at::zeros({1, 1, dim})};
    FactorCache cache;
    ZoomOptions zoom;
    zoom.rule = ZoomOptions::Rule::mass, zoom.mass = mass;
    const MemoryRow row{.spans = &store.row(0), .dense = 1};
    std::vector<std::vector<std::int32_t>> which;
    static_cast<void>(read_memory(open, {&row, 1}, query, 1 / std::sqrt(static_cast<double>(dim)), {.zoom = zoom, .cache = &cache}, &which));
    return which.front();
  }

  Tensor keys, values;
  SpanStore store;
};

TEST(KeySketch, HoldsTheSignsOfEveryKeyBesideItsCoarseKey) {
  for (const int dim : {1, 7, 32, 33, 128}) {
    const Sketched p(static_cast<std::uint64_t>(dim), 3, 7, dim, true);
    const SpanRow& row = p.store.row(0);
    const Tensor coarse = p.store.coarse(KvSide::keys);
    const std::int64_t words = KeySketch::words(dim);
    EXPECT_EQ(row.tokens(), 21);
    EXPECT_EQ(row.near_bytes(), 3 * (8 * dim + 4) + 21 * (4 * words + 2));
    for (std::int64_t t = 0; t < 21; ++t) {
      double squares = 0, sum = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        const double x = static_cast<double>(p.keys.const_data_ptr<float>()[t * dim + d]) - coarse.const_data_ptr<float>()[t / 7 * dim + d];
        squares += x * x, sum += std::abs(x);
        if (std::abs(x) > 1e-5) EXPECT_EQ(row.sketch().signs[KeySketch::at(t, d / 32, words)] >> (d % 32) & 1U, x > 0 ? 1U : 0U);
      }
      EXPECT_NEAR(static_cast<float>(row.sketch().sizes[static_cast<std::size_t>(t)]), squares / sum, 0.01 * squares / sum);
    }
  }
}

TEST(KeySketch, FindsTheSpanThatHoldsTheTokenAQueryAsksFor) {
  for (const int dim : {32, 128}) {
    int told = 0, by_mean = 0, others = 0;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const Sketched with(seed, 24, 16, dim, true), without(seed, 24, 16, dim, false);
      const std::int64_t token = 5 + static_cast<std::int64_t>(seed) * 9;
      const Tensor query = with.keys.narrow(1, token, 1).clone().mul_(2);
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
    const Tensor keys = normals(random, {1, 80, dim});
    FactorOptions o;
    o.sketch = true;
    const std::vector<float> alike(80, 1.0F);
    const SpanStore whole(keys, keys, alike, {{0, first}, {first, 80}}, o);
    SpanRow grown = SpanStore(keys, keys, alike, {{0, first}}, o).row(0);
    grown.append(SpanStore(keys, keys, alike, {{first, 80}}, o).row(0));
    EXPECT_EQ(grown.tokens(), 80);
    EXPECT_EQ(grown.tokens_before(1), first);
    for (std::int64_t t = 0; t < 80; ++t)
      for (std::int64_t w = 0; w < KeySketch::words(dim); ++w)
        EXPECT_EQ(grown.sketch().signs[KeySketch::at(t, w, KeySketch::words(dim))], whole.row(0).sketch().signs[KeySketch::at(t, w, KeySketch::words(dim))]);
    o.sketch = false;
    EXPECT_THROW(grown.append(SpanStore(keys, keys, alike, {{0, 80}}, o).row(0)), InvalidArgument);
  }
}

}  // namespace
}  // namespace kvkeep
