// What is left of folded spans: golden numbers, what must hold for any rows, and the bytes.

#include "kvkeep/memory/span_store.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include <numeric>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"

namespace kvkeep::span_store_test {
namespace {

using namespace testing;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;

/// A linear congruential generator: numbers that anybody can make again.
Array counted(std::int64_t seed, std::vector<std::int64_t> shape) {
  Array t = Array::zeros(shape, Dtype::f32);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    seed = (1103515245 * seed + 12345) % 2147483648;
    t.data<float>()[i] = static_cast<float>(static_cast<double>(seed) / 2147483648.0 - 0.5);
  }
  return t;
}

const std::vector<float> kFive{2, 0, 1, 1, 4};

SpanStore five(const FactorOptions& o) { return {counted(1, {1, 5, 8}), counted(2, {1, 5, 8}), kFive, {{0, 5}}, o}; }

double squares(const Array& t) {
  const Array wide = t.to(Dtype::f64).contiguous();
  return std::inner_product(wide.data<double>(), wide.data<double>() + wide.numel(), wide.data<double>(), 0.0);
}
/// Of a - b.
double squares(const Array& a, const Array& b) {
  const Array rest = a.to(Dtype::f64).clone(), less = b.to(Dtype::f64).contiguous();
  for (std::int64_t i = 0; i < rest.numel(); ++i) rest.data<double>()[i] -= less.data<double>()[i];
  return squares(rest);
}

/// Sum of squares of what a zoom does not show.
double left_out(const FoldedPrompt& p, const SpanStore& spans, std::int64_t s, KvSide side) {
  const Span at = spans.spans()[static_cast<std::size_t>(s)];
  return squares((side == KvSide::keys ? p.keys : p.values).narrow(1, at.begin, at.length()), spans.rows(s, side));
}

TEST(SpanStore, HasTheSingularValuesOfAFixedMatrix) {
  FactorOptions o;
  o.centred = Centred::never, o.rank = Rank::max, o.max_rank = 5, o.raw = false;
  const SpanStore spans = five(o);
  const std::vector<double> keys{1.038571, 0.943165, 0.714614, 0.517219, 0.240769},
      values{1.321270, 1.052226, 0.587022, 0.571544, 0.263661};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(spans.singular_values().data<float>()[i], keys[i], 1e-6);
    EXPECT_NEAR(spans.singular_values().data<float>()[5 + i], values[i], 1e-6);
  }
  const std::vector<double> mean{0.010085, 0.174607, -0.203316, -0.083388, -0.109486, -0.079879, 0.011924, -0.049661};
  for (std::size_t d = 0; d < 8; ++d)
    EXPECT_NEAR(spans.coarse(KvSide::values).data<float>()[d], mean[d], 1e-6) << "weights .25, 0, .125, .125, .5";
  EXPECT_LT(apart(spans.rows(0, KvSide::keys), counted(1, {1, 5, 8})), 1e-6) << "full rank shows the rows";
}

TEST(SpanStore, LeavesOutTheSquaresOfTheComponentsItDoesNotKeep) {  // S-16 with hard components, S-9
  for (const int length : {2, 7, 16, 40}) {                         // shorter and longer than D = 16
    FoldedPrompt p(30 + static_cast<std::uint64_t>(length), length, 2, 2, 16, 1);
    for (const Centred centred : {Centred::never, Centred::always}) {
      double before = HUGE_VAL;
      for (const int rank : {1, 2, 5, 16}) {
        FactorOptions o;
        o.rank = Rank::max, o.max_rank = rank, o.raw = false, o.centred = centred;
        const SpanStore spans(p.keys, p.values, p.surprisal, {{0, length}}, o);
        o.max_rank = 64;
        const Array all = SpanStore(p.keys, p.values, p.surprisal, {{0, length}}, o).singular_values();
        for (const KvSide side : {KvSide::keys, KvSide::values}) {
          const double tail = squares(all.select(2, static_cast<int>(side)).narrow(2, rank, 64 - rank));
          EXPECT_NEAR(left_out(p, spans, 0, side), tail, 1e-5 * (1 + tail)) << length << " tokens, rank " << rank;
        }
        const double now = left_out(p, spans, 0, KvSide::keys);
        EXPECT_LE(now, before + 1e-6);
        before = now;
        EXPECT_EQ(spans.factors(0, 1, KvSide::keys).rank, std::min({rank, length, 16}));
      }
    }
  }
}

TEST(SpanStore, KeepsTheFewestComponentsThatTheEnergyRuleAllows) {
  FoldedPrompt p(31, 400, 2, 2, 24, 1);
  for (const double energy : {0.0, 0.1, 0.3, 1.0}) {
    FactorOptions o;
    o.energy = energy, o.max_rank = 16, o.raw = false, o.centred = Centred::never;
    const SpanStore spans = p.fold(o).spans;
    for (std::int64_t s = 0; s < spans.size(); ++s)
      for (std::int64_t h = 0; h < 2; ++h)
        for (const KvSide side : {KvSide::keys, KvSide::values}) {
          const SpanFactors& f = spans.factors(s, h, side);
          const Span at = spans.spans()[static_cast<std::size_t>(s)];
          const double all =
              squares((side == KvSide::keys ? p.keys : p.values).select(0, h).narrow(0, at.begin, at.length()));
          double kept = 0;
          const float* sv = spans.singular_values().data<float>() + ((s * 2 + h) * 2 + static_cast<int>(side)) * 16;
          for (int i = 0; i < f.rank; ++i) kept += static_cast<double>(sv[i]) * sv[i];
          if (f.rank < 16) EXPECT_LE(all - kept, energy * energy * all + 1e-5 * all);
          if (f.rank > 0)
            EXPECT_GT(all - kept + static_cast<double>(sv[f.rank - 1]) * sv[f.rank - 1],
                      energy * energy * all - 1e-5 * all)
                << "one fewer would leave out too much";
        }
  }
}

TEST(SpanStore, CentresWhereThatLeavesLessOut) {
  // Keys: +-1 along one axis, and a token beside it that alone surprises. Centred on it, all others lie beside their
  // axis. Values: far from the origin, close together.
  Array keys = Array::zeros({1, 8, 4}), values = Array::full({1, 8, 4}, 3.0F);
  for (int t = 0; t < 8; ++t)
    keys.data<float>()[4 * t] = t % 2 == 0 ? 1.0F : -1.0F, values.data<float>()[4 * t + t % 4] += 0.1F;
  keys.data<float>()[4 * 2 + 1] = 0.3F;
  std::vector<float> surprisal(8);
  surprisal[2] = 1;
  FactorOptions o;
  o.energy = 0.4;
  const SpanStore spans(keys, values, surprisal, {{0, 8}}, o);
  EXPECT_FALSE(spans.factors(0, 0, KvSide::keys).centred);
  EXPECT_TRUE(spans.factors(0, 0, KvSide::values).centred);
  o.centred = Centred::always;
  EXPECT_LT(squares(keys, Array(spans.rows(0, KvSide::keys))),
            squares(keys, Array(SpanStore(keys, values, surprisal, {{0, 8}}, o).rows(0, KvSide::keys))));
}

TEST(SpanStore, HoldsEqualRowsAsTheirCoarseEntryAlone) {  // S-6, and the rule of rounding noise
  const Array keys = Array::cat(std::vector<Array>(6, normals(33, {1, 1, 8})), 1);
  for (const Rank rank : {Rank::energy, Rank::max})
    for (const Dtype store : {Dtype::f32, Dtype::bf16}) {
      FactorOptions o;
      o.rank = rank, o.store = store;
      const SpanStore spans(keys, keys, std::vector<float>(6, 0.3F), {{0, 5}, {5, 6}}, o);
      for (std::int64_t s = 0; s < 2; ++s) {
        EXPECT_EQ(spans.factors(s, 0, KvSide::keys).rank, 0);
        EXPECT_FALSE(spans.factors(s, 0, KvSide::keys).raw);
        EXPECT_EQ(spans.row(0).zoom_entries(s), 0);
      }
      EXPECT_EQ(apart(spans.rows(0, KvSide::keys), keys.narrow(1, 0, 5).to(store)), 0);
      EXPECT_EQ(spans.far_bytes(), 0);
    }
}

TEST(SpanStore, NeverStoresMoreThanTheRows) {
  FoldedPrompt p(34, 300, 3, 3, 16, 1);
  for (const Dtype store : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = 8, o.store = store;
    const SpanStore spans = p.fold(o).spans;
    std::int64_t numbers = 0, raw = 0;
    for (std::int64_t s = 0; s < spans.size(); ++s) {
      const std::int64_t length = spans.spans()[static_cast<std::size_t>(s)].length();
      for (std::int64_t h = 0; h < 3; ++h)
        for (const KvSide side : {KvSide::keys, KvSide::values}) {
          const SpanFactors& f = spans.factors(s, h, side);
          const std::int64_t rank = std::min<std::int64_t>(8, length), factored = rank * (length + 16);
          EXPECT_EQ(f.raw, factored >= length * 16) << length;
          numbers += f.raw ? length * 16 : factored;
          raw += f.raw;
        }
      if (spans.factors(s, 0, KvSide::keys).raw) {
        EXPECT_EQ(apart(spans.rows(s, KvSide::keys),
                        p.keys.narrow(1, spans.spans()[static_cast<std::size_t>(s)].begin, length).to(store)),
                  0);
        EXPECT_EQ(spans.row(0).zoom_entries(s), static_cast<double>(length));
      }
    }
    const std::int64_t bytes = store == Dtype::f32 ? 4 : 2;
    EXPECT_GT(raw, 0);
    EXPECT_LT(raw, 6 * spans.size());
    EXPECT_EQ(spans.far_bytes(), numbers * bytes);
    EXPECT_EQ(spans.near_bytes(), spans.size() * (2 * 3 * 16 * bytes + 4));
  }
}

TEST(SpanStore, KeepsWhatGatesNameForKeysAndValuesAlike) {
  constexpr int kRank = 6, kDim = 8;
  oracle::Random random(35);
  const std::array<Tensor, 3> weights{normals(random, {16, kRank + kDim}), normals(random, {16, 16}),
                                      normals(random, {kRank, 16})};
  const std::array<Tensor, 3> biases{normals(random, {16}), normals(random, {16}), normals(random, {kRank})};
  const RankGates gates(weights, biases);
  FoldedPrompt p(36, 200, 2, 2, kDim, 1);
  FactorOptions o;
  o.rank = Rank::gates, o.max_rank = kRank, o.raw = false;
  int gaps = 0;
  for (const bool soft : {false, true}) {
    o.soft_gates = soft;
    const SpanStore spans = p.fold(o, &gates).spans;
    const float *g = spans.gates().data<float>(), *sv = spans.singular_values().data<float>();
    for (std::int64_t s = 0; s < spans.size(); ++s)
      for (std::int64_t h = 0; h < 2; ++h)
        for (const KvSide side : {KvSide::keys, KvSide::values}) {
          const std::int64_t at = ((s * 2 + h) * 2 + static_cast<int>(side)) * kRank;
          const Span span = spans.spans()[static_cast<std::size_t>(s)];
          const Array rows =
              (side == KvSide::keys ? p.keys : p.values).select(0, h).narrow(0, span.begin, span.length());
          double expected = squares(rows);
          int kept = 0;
          bool gap = false;
          for (int i = 0; i < kRank; ++i) {
            const bool stays = soft ? g[at + i] >= 0.01F : g[at + i] > 0.5F;
            const double weight = !stays ? 0
                                  : soft ? g[at + i]
                                         : 1,
                         square = static_cast<double>(sv[at + i]) * sv[at + i];
            expected += square * ((1 - weight) * (1 - weight) - 1);
            gap = gap || (!stays && i + 1 < kRank && g[at + i + 1] > 0.5F && sv[at + i + 1] > 0);
            kept += stays && i < std::min(span.length(), kDim);
          }
          gaps += gap && !soft;
          EXPECT_EQ(spans.factors(s, h, side).rank, kept);
          EXPECT_FALSE(spans.factors(s, h, side).centred);
          EXPECT_NEAR(squares(rows, spans.rows(s, side).select(0, h)), expected, 1e-4 * (1 + squares(rows)));  // S-16
        }
  }
  EXPECT_GT(gaps, 0) << "some kept components are not the largest";
}

TEST(SpanStore, GivesEverySpanWhatItGetsAlone) {
  FoldedPrompt p(37, 500, 2, 2, 16, 1);
  const SpanStore all = p.fold().spans;
  for (std::int64_t s = 0; s < all.size(); s += 3) {
    const SpanStore one(p.keys, p.values, p.surprisal, {all.spans()[static_cast<std::size_t>(s)]}, {});
    EXPECT_LT(apart(one.rows(0, KvSide::keys), all.rows(s, KvSide::keys)), 1e-6);
    EXPECT_EQ(one.factors(0, 1, KvSide::values).rank, all.factors(s, 1, KvSide::values).rank);
  }
}

TEST(SpanStore, RefusesRowsThatAreNotFiniteAndGatesThatDoNotFit) {
  FoldedPrompt p(38, 40, 1, 1, 8, 1);
  FactorOptions o;
  o.rank = Rank::gates;
  EXPECT_THROW(static_cast<void>(p.fold(o)), InvalidArgument);
  o.rank = Rank::energy, o.energy = -1;
  EXPECT_THROW(static_cast<void>(p.fold(o)), InvalidArgument);
  EXPECT_THROW(SpanStore(p.keys, p.values, p.surprisal, {{30, 41}}, {}), InvalidArgument);
  EXPECT_THROW(SpanStore(p.keys, p.values.narrow(1, 0, 39), p.surprisal, {{0, 5}}, {}), InvalidArgument);
  p.keys.data<float>()[8 * 12] = std::nanf("");
  try {
    SpanStore(p.keys, p.values, p.surprisal, {{10, 20}}, {});
    ADD_FAILURE();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("tokens 10 to 19"), std::string::npos) << e.what();
  }
}

TEST(SpanStore, RefusesNumbersThatItsDtypeDoesNotHold) {
  FoldedPrompt p(38, 40, 1, 1, 8, 1);
  p.keys.mul_(1e5);
  FactorOptions o;
  EXPECT_NO_THROW(SpanStore(p.keys, p.values, p.surprisal, {{10, 20}}, o));
  o.store = Dtype::bf16;
  EXPECT_NO_THROW(SpanStore(p.keys, p.values, p.surprisal, {{10, 20}}, o));
  o.store = Dtype::f16;
  try {
    SpanStore(p.keys, p.values, p.surprisal, {{10, 20}}, o);
    ADD_FAILURE();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("tokens 10 to 19"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("65504"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace kvkeep::span_store_test
