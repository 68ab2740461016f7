// SPDX-License-Identifier: Apache-2.0
// What is left of folded spans: golden numbers, what must hold for any rows, and the bytes.

#include "kvkeep/memory/span_row.h"

#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/opening.h"
#include "plain_memory.h"

namespace kvkeep::span_row_test {
namespace {

using namespace testing;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;

constexpr KvSide kSides[] = {KvSide::keys, KvSide::values};

/// A linear congruential generator: numbers that anybody can make again.
Tensor counted(std::int64_t seed, const Shape& shape) {
  Tensor t = empty(shape, Dtype::f32);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    seed = (1103515245 * seed + 12345) % 2147483648;
    t.data<float>()[i] = static_cast<float>(static_cast<double>(seed) / 2147483648.0 - 0.5);
  }
  return t;
}

/// The spans of a prompt, as its segmenter cuts it.
FoldedHeads folded(const FoldedPrompt& p, const FactorOptions& o = {}, const RankGates* gates = nullptr) {
  return {p.keys, p.values, p.surprisal, segment(p.surprisal, p.segmenter).spans, o, gates};
}

/// The rows of span `s` before they were folded: f32 [L, D].
Tensor rows_of(const FoldedPrompt& p, const FoldedHeads& spans, std::int64_t s, std::int64_t head, KvSide side) {
  const Tensor all = side == KvSide::keys ? p.keys : p.values;
  return clone(all.select(0, head).narrow(0, spans.span(s).begin, spans.span(s).length()));
}

Tensor less(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  Tensor out = clone(a);
  for (std::int64_t i = 0; i < out.numel(); ++i) out.data<float>()[i] -= b.data<float>()[i];
  return out;
}
double squares(const Tensor& t) {
  double sum = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) sum += std::pow(static_cast<double>(t.data<float>()[i]), 2);
  return sum;
}
double largest(const Tensor& t) {
  double most = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) most = std::max(most, std::abs(static_cast<double>(t.data<float>()[i])));
  return most;
}

/// Numbers as they are once stored.
Tensor stored(const Tensor& t, Dtype dtype) {
  return dtype == Dtype::f16 ? as<float>(as<Half>(t)) : dtype == Dtype::bf16 ? as<float>(as<BFloat16>(t)) : t;
}

/// Entries that opening a span takes.
double opening(const FoldedHeads& spans, std::int64_t s, std::int64_t head) {
  const SpanRow& row = spans.row(head);
  return OpeningCost{row.dim()}.entries(spans.factors(s, head, KvSide::keys), spans.factors(s, head, KvSide::values),
                                        row.span(s).length);
}

TEST(SpanRow, HasTheSingularValuesOfAFixedMatrix) {
  FactorOptions o;
  o.centred = Centred::never, o.rank = Rank::max, o.max_rank = 5, o.raw = false;
  const FoldedHeads spans(counted(1, {1, 5, 8}), counted(2, {1, 5, 8}), std::vector<float>{2, 0, 1, 1, 4}, {{0, 5}}, o);
  const std::vector<double> keys{1.038571, 0.943165, 0.714614, 0.517219, 0.240769},
      values{1.321270, 1.052226, 0.587022, 0.571544, 0.263661};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(spans.trace.singular_values[i], keys[i], 1e-6);
    EXPECT_NEAR(spans.trace.singular_values[5 + i], values[i], 1e-6);
  }
  const std::vector<double> mean{0.010085, 0.174607, -0.203316, -0.083388, -0.109486, -0.079879, 0.011924, -0.049661};
  const Tensor coarse = coarse_of(spans.row(0), KvSide::values);
  for (std::size_t d = 0; d < 8; ++d)
    EXPECT_NEAR(coarse.data<float>()[d], mean[d], 1e-6) << "weights .25, 0, .125, .125, .5";
  EXPECT_LT(largest(less(spans.row(0).rows(0, KvSide::keys), counted(1, {5, 8}))), 1e-6) << "full rank shows the rows";
}

TEST(SpanRow, LeavesOutTheSquaresOfTheComponentsItDoesNotKeep) {  // S-16 with hard components, S-9
  for (const int length : {2, 7, 16, 40}) {                       // shorter and longer than D = 16
    const FoldedPrompt p(30 + static_cast<std::uint64_t>(length), length, 2, 2, 16, 1);
    for (const Centred centred : {Centred::never, Centred::always})
      for (const KvSide side : kSides) {
        double before = HUGE_VAL;
        for (const int rank : {1, 2, 5, 16}) {
          FactorOptions o;
          o.rank = Rank::max, o.max_rank = rank, o.raw = false, o.centred = centred;
          const FoldedHeads spans(p.keys, p.values, p.surprisal, {{0, length}}, o);
          o.max_rank = 64;
          const FoldedHeads all(p.keys, p.values, p.surprisal, {{0, length}}, o);
          double left_out = 0, tail = 0;
          for (std::int64_t h = 0; h < 2; ++h) {
            left_out += squares(less(rows_of(p, spans, 0, h, side), spans.row(h).rows(0, side)));
            for (const double x :
                 all.of_span(all.trace.singular_values, 0, h, side).subspan(static_cast<std::size_t>(rank)))
              tail += x * x;
            EXPECT_EQ(spans.factors(0, h, side).rank, std::min({rank, length, 16}));
          }
          EXPECT_NEAR(left_out, tail, 1e-5 * (1 + tail)) << length << " tokens, rank " << rank;
          EXPECT_LE(left_out, before + 1e-6);
          before = left_out;
        }
      }
  }
}

TEST(SpanRow, KeepsTheFewestComponentsThatTheEnergyRuleAllows) {
  const FoldedPrompt p(31, 400, 2, 2, 24, 1);
  for (const double energy : {0.0, 0.1, 0.3, 1.0}) {
    FactorOptions o;
    o.energy = energy, o.max_rank = 16, o.raw = false, o.centred = Centred::never;
    const FoldedHeads spans = folded(p, o);
    ASSERT_GT(spans.size(), 0);
    for (std::int64_t s = 0; s < spans.size(); ++s)
      for (std::int64_t h = 0; h < 2; ++h)
        for (const KvSide side : kSides) {
          const int rank = spans.factors(s, h, side).rank;
          const double all = squares(rows_of(p, spans, s, h, side));
          const auto sv = spans.of_span(spans.trace.singular_values, s, h, side);
          double kept = 0;
          for (int i = 0; i < rank; ++i) kept += sv[static_cast<std::size_t>(i)] * sv[static_cast<std::size_t>(i)];
          if (rank < 16) EXPECT_LE(all - kept, energy * energy * all + 1e-5 * all);
          if (rank > 0)
            EXPECT_GT(all - kept + std::pow(sv[static_cast<std::size_t>(rank - 1)], 2),
                      energy * energy * all - 1e-5 * all)
                << "one fewer would leave out too much";
        }
  }
}

TEST(SpanRow, CentresWhereThatLeavesLessOut) {
  // Keys: +-1 along one axis, and a token beside it that alone surprises. Centred on it, all others lie beside their
  // axis. Values: far from the origin, close together.
  const Tensor keys = zeros({1, 8, 4}, Dtype::f32), values = full({1, 8, 4}, 3.0F);
  for (int t = 0; t < 8; ++t)
    keys.data<float>()[4 * t] = t % 2 == 0 ? 1.0F : -1.0F, values.data<float>()[4 * t + t % 4] += 0.1F;
  keys.data<float>()[4 * 2 + 1] = 0.3F;
  std::vector<float> surprisal(8);
  surprisal[2] = 1;
  FactorOptions o;
  o.energy = 0.4;
  const FoldedHeads spans(keys, values, surprisal, {{0, 8}}, o);
  EXPECT_FALSE(spans.factors(0, 0, KvSide::keys).centred);
  EXPECT_TRUE(spans.factors(0, 0, KvSide::values).centred);
  o.centred = Centred::always;
  const FoldedHeads always(keys, values, surprisal, {{0, 8}}, o);
  EXPECT_LT(squares(less(keys.select(0, 0), spans.row(0).rows(0, KvSide::keys))),
            squares(less(keys.select(0, 0), always.row(0).rows(0, KvSide::keys))));
}

TEST(SpanRow, HoldsEqualRowsAsTheirCoarseEntryAlone) {  // S-6, and the rule of rounding noise
  oracle::Random random(33);
  const Tensor one = normals(random, {1, 1, 8});
  const Tensor keys = gather(one, 1, std::vector<std::int32_t>(6, 0));
  for (const Rank rank : {Rank::energy, Rank::max})
    for (const Dtype store : {Dtype::f32, Dtype::bf16}) {
      FactorOptions o;
      o.rank = rank, o.store = store;
      const FoldedHeads spans(keys, keys, std::vector<float>(6, 0.3F), {{0, 5}, {5, 6}}, o);
      for (std::int64_t s = 0; s < 2; ++s) {
        EXPECT_EQ(spans.factors(s, 0, KvSide::keys).rank, 0);
        EXPECT_FALSE(spans.factors(s, 0, KvSide::keys).raw);
        EXPECT_EQ(opening(spans, s, 0), 0);
      }
      EXPECT_EQ(
          largest(less(spans.row(0).rows(0, KvSide::keys), stored(clone(keys.select(0, 0).narrow(0, 0, 5)), store))),
          0);
      EXPECT_EQ(spans.row(0).far_bytes(), 0);
    }
}

TEST(SpanRow, NeverStoresMoreThanTheRows) {
  const FoldedPrompt p(34, 300, 3, 3, 16, 1);
  for (const Dtype store : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = 8, o.store = store;
    const FoldedHeads spans = folded(p, o);
    const std::int64_t bytes = store == Dtype::f32 ? 4 : 2;
    std::int64_t raw = 0;
    for (std::int64_t h = 0; h < 3; ++h) {
      std::int64_t numbers = 0;
      for (std::int64_t s = 0; s < spans.size(); ++s) {
        const std::int64_t length = spans.span(s).length();
        for (const KvSide side : kSides) {
          const SpanFactors& f = spans.factors(s, h, side);
          const std::int64_t rank = std::min<std::int64_t>(8, length), factored = rank * (length + 16);
          EXPECT_EQ(f.raw, factored >= length * 16) << length;
          numbers += f.raw ? length * 16 : factored;
          raw += f.raw;
        }
        if (!spans.factors(s, h, KvSide::keys).raw) continue;
        EXPECT_EQ(
            largest(less(spans.row(h).rows(s, KvSide::keys), stored(rows_of(p, spans, s, h, KvSide::keys), store))), 0);
        EXPECT_EQ(opening(spans, s, h), static_cast<double>(length));
      }
      EXPECT_EQ(spans.row(h).far_bytes(), numbers * bytes);
      EXPECT_EQ(spans.row(h).near_bytes(), spans.size() * (2 * 16 * bytes + 4));
    }
    EXPECT_GT(raw, 0);
    EXPECT_LT(raw, 6 * spans.size());
  }
}

TEST(SpanRow, KeepsWhatGatesNameForKeysAndValuesAlike) {
  constexpr int kRank = 6, kDim = 8;
  oracle::Random random(35);
  const std::array<Tensor, 3> weights{normals(random, {16, kRank + kDim}), normals(random, {16, 16}),
                                      normals(random, {kRank, 16})};
  const std::array<Tensor, 3> biases{normals(random, {16}), normals(random, {16}), normals(random, {kRank})};
  const RankGates gates(weights, biases);
  const FoldedPrompt p(36, 200, 2, 2, kDim, 1);
  FactorOptions o;
  o.rank = Rank::gates, o.max_rank = kRank, o.raw = false;
  int gaps = 0;
  for (const bool soft : {false, true}) {
    o.soft_gates = soft;
    const FoldedHeads spans = folded(p, o, &gates);
    for (std::int64_t s = 0; s < spans.size(); ++s)
      for (std::int64_t h = 0; h < 2; ++h)
        for (const KvSide side : kSides) {
          const auto g = spans.of_span(spans.trace.gates, s, h, side),
                     sv = spans.of_span(spans.trace.singular_values, s, h, side);
          const Tensor rows = rows_of(p, spans, s, h, side);
          double expected = squares(rows);
          int kept = 0;
          bool gap = false;
          for (std::size_t i = 0; i < kRank; ++i) {
            const bool stays = soft ? g[i] >= 0.01 : g[i] > 0.5;
            const double weight = !stays ? 0 : soft ? g[i] : 1;
            expected += sv[i] * sv[i] * ((1 - weight) * (1 - weight) - 1);
            gap = gap || (!stays && i + 1 < kRank && g[i + 1] > 0.5 && sv[i + 1] > 0);
            kept += stays && static_cast<int>(i) < std::min(spans.span(s).length(), kDim);
          }
          gaps += gap && !soft;
          EXPECT_EQ(spans.factors(s, h, side).rank, kept);
          EXPECT_FALSE(spans.factors(s, h, side).centred);
          EXPECT_NEAR(squares(less(rows, spans.row(h).rows(s, side))), expected, 1e-4 * (1 + squares(rows)));  // S-16
        }
  }
  EXPECT_GT(gaps, 0) << "some kept components are not the largest";
}

TEST(SpanRow, GivesEverySpanWhatItGetsAlone) {
  const FoldedPrompt p(37, 500, 2, 2, 16, 1);
  const FoldedHeads all = folded(p);
  for (std::int64_t s = 0; s < all.size(); s += 3) {
    const FoldedHeads one(p.keys, p.values, p.surprisal, {all.span(s)});
    for (std::int64_t h = 0; h < 2; ++h)
      EXPECT_LT(largest(less(one.row(h).rows(0, KvSide::keys), all.row(h).rows(s, KvSide::keys))), 1e-6);
    EXPECT_EQ(one.factors(0, 1, KvSide::values).rank, all.factors(s, 1, KvSide::values).rank);
  }
}

std::string refusal(const FoldedPrompt& p, const FactorOptions& o) {
  try {
    static_cast<void>(FoldedHeads(p.keys, p.values, p.surprisal, {{10, 20}}, o));
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "";
}

TEST(SpanRow, RefusesRowsThatAreNotFiniteAndGatesThatDoNotFit) {
  const FoldedPrompt p(38, 40, 1, 1, 8, 1);
  FactorOptions o;
  o.rank = Rank::gates;
  EXPECT_THROW(static_cast<void>(folded(p, o)), InvalidArgument);
  o.rank = Rank::energy, o.energy = -1;
  EXPECT_THROW(static_cast<void>(folded(p, o)), InvalidArgument);
  Tensor(p.keys).data<float>()[8 * 12] = std::nanf("");
  EXPECT_NE(refusal(p, {}).find("tokens 10 to 19"), std::string::npos) << refusal(p, {});
}

TEST(SpanRow, RefusesNumbersThatItsDtypeDoesNotHold) {
  const FoldedPrompt p(38, 40, 1, 1, 8, 1);
  const Tensor keys = p.keys;
  for (std::int64_t i = 0; i < keys.numel(); ++i) keys.data<float>()[i] *= 1e5F;
  FactorOptions o;
  EXPECT_EQ(refusal(p, o), "");
  o.store = Dtype::bf16;
  EXPECT_EQ(refusal(p, o), "");
  o.store = Dtype::f16;
  EXPECT_NE(refusal(p, o).find("tokens 10 to 19"), std::string::npos) << refusal(p, o);
  EXPECT_NE(refusal(p, o).find("65504"), std::string::npos) << refusal(p, o);
}

}  // namespace
}  // namespace kvkeep::span_row_test
