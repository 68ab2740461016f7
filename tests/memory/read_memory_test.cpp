// SPDX-License-Identifier: Apache-2.0
// Reading folded spans: golden numbers, agreement with one plain softmax, what it becomes at both ends, and budgets
// that are never exceeded.

#include "kvkeep/memory/read_memory.h"

#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "plain_memory.h"

namespace kvkeep::read_memory_test {
namespace {

using namespace testing;
using Rank = FactorOptions::Rank;
using Centred = FactorOptions::Centred;
using Rule = ZoomOptions::Rule;
using Heads = ZoomOptions::Heads;
using Spans = std::vector<std::int32_t>;

const ZoomOptions kAll{.rule = Rule::coverage, .coverage = 1, .coverage_floor = 0};
const ZoomOptions kNone{.rule = Rule::mass, .mass = 1};

/// A prompt that is cut and folded, beside what stays of it.
struct Memory {
  explicit Memory(const FoldedPrompt& p, const FactorOptions& options = {}, Dtype dtype = Dtype::f32)
      : Memory(dtype == Dtype::bf16 ? as<BFloat16>(p.keys) : Tensor(p.keys),
               dtype == Dtype::bf16 ? as<BFloat16>(p.values) : Tensor(p.values), p, options) {}
  Memory(const Tensor& all_keys, const Tensor& all_values, const FoldedPrompt& p, const FactorOptions& options)
      : queries(p.queries), scale(1 / std::sqrt(static_cast<double>(queries.size(2)))) {
    const Segments segments = segment(p.surprisal, p.segmenter);
    folded = FoldedHeads(all_keys, all_values, p.surprisal, segments.spans, options);
    keys = as<float>(gather(all_keys, 1, segments.dense())),
    values = as<float>(gather(all_values, 1, segments.dense()));
  }
  /// Spans of these lengths and no other tokens, raw where their rows differ.
  Memory(const Tensor& all_keys, const Tensor& all_values, const Spans& lengths, Tensor asked, double of_logits)
      : queries(std::move(asked)), scale(of_logits) {
    std::vector<Span> spans;
    for (const std::int32_t l : lengths)
      spans.push_back({spans.empty() ? 0 : spans.back().end, 0}), spans.back().end = spans.back().begin + l;
    folded = FoldedHeads(all_keys, all_values, std::vector<float>(static_cast<std::size_t>(all_keys.size(1)), 1.0F),
                         spans, {.rank = Rank::max, .centred = Centred::never, .max_rank = 64});
    keys = values = empty({all_keys.size(0), 0, all_keys.size(2)}, Dtype::f32);
  }

  struct Read {
    Tensor out, log_mass;
    std::vector<Spans> opened;  ///< [Hkv] by the last query
    ReadCounts counts;
  };
  /// `dense`: rows that are said to have stayed; -1: those that have.
  [[nodiscard]] Read read(const Reading& reading, std::int64_t dense = -1) const {
    std::vector<MemoryRow> rows;
    for (const SpanRow& row : folded.rows) rows.push_back({&row, dense < 0 ? keys.size(1) : dense});
    OpenAttention open = plain_attention(keys, values, queries, scale);
    Read out;
    out.counts = read_memory(open, rows, queries, scale, reading, &out.opened);
    out.out = closed(open), out.log_mass = testing::log_mass(open);
    return out;
  }
  [[nodiscard]] PlainReading plain(const Reading& reading, std::int64_t query, std::int64_t kv) const {
    const std::int64_t group = queries.size(1) / keys.size(0);
    return {folded.row(kv),
            keys.select(0, kv),
            values.select(0, kv),
            queries.data<float>() + (query * queries.size(1) + kv * group) * queries.size(2),
            group,
            kv * group,
            scale,
            reading};
  }

  /// Reads, and expects what the plain form gives; returns how many spans were opened.
  std::int64_t expect_plain(const Reading& reading) const {
    const Read read = this->read(reading);
    const std::int64_t n = queries.size(0), heads = queries.size(1), group = heads / keys.size(0),
                       dim = queries.size(2);
    ReadCounts counts;
    for (std::int64_t i = 0; i < n * keys.size(0); ++i) {
      const std::int64_t query = i / keys.size(0), kv = i % keys.size(0);
      const PlainReading expected = plain(reading, query, kv);
      if (query == n - 1) EXPECT_EQ(read.opened[static_cast<std::size_t>(kv)], expected.opened);
      counts.queries += folded.size() > 0 ? 1 : 0, counts.zooms += std::ssize(expected.opened);
      counts.unmet += expected.unmet;
      for (const std::int32_t s : expected.opened) counts.tokens += folded.span(s).length();
      for (std::int64_t g = 0; g < group; ++g) {
        const std::int64_t at = query * heads + kv * group + g;
        EXPECT_NEAR(read.log_mass.data<float>()[at], expected.log_masses[static_cast<std::size_t>(g)], 2e-5);
        for (std::int64_t d = 0; d < dim; ++d)
          EXPECT_NEAR(read.out.data<float>()[at * dim + d],
                      expected.answers[static_cast<std::size_t>(g)][static_cast<std::size_t>(d)], 2e-5);
      }
    }
    EXPECT_EQ(read.counts.queries, counts.queries);
    EXPECT_EQ(read.counts.zooms, counts.zooms);
    EXPECT_EQ(read.counts.tokens, counts.tokens);
    EXPECT_EQ(read.counts.unmet, counts.unmet);
    return read.counts.zooms;
  }

  FoldedHeads folded;
  Tensor keys, values, queries;  ///< f32 of the rows that stayed
  double scale;
};

/// Largest difference of two tensors of one shape.
double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  double most = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a.data<float>()[i]) - b.data<float>()[i]));
  return most;
}

struct Sizes {
  int kv_heads, query_heads, dim;
};

TEST(ReadMemory, IsOneSoftmaxOverTokensCoarseEntriesAndOpenedSpans) {  // S-7, S-8
  int seed = 40;
  std::int64_t opened = 0, all = 0;
  for (const Sizes& shape : std::vector<Sizes>{{1, 1, 8}, {2, 2, 7}, {1, 3, 33}, {2, 8, 64}})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const Centred centred : {Centred::automatic, Centred::never})
        for (const Heads heads : {Heads::own, Heads::group}) {
          const FoldedPrompt p(static_cast<std::uint64_t>(++seed), 170, shape.kv_heads, shape.query_heads, shape.dim,
                               3);
          SCOPED_TRACE(seed);
          FactorOptions o;
          o.energy = 0.4, o.centred = centred;
          const Memory memory(p, o, dtype);
          opened += memory.expect_plain({.zoom = {.rule = Rule::mass, .heads = heads, .mass = 0.03}});
          all += 3 * shape.kv_heads * memory.folded.size();
        }
  EXPECT_GT(opened, all / 10);
  EXPECT_LT(opened, all * 9 / 10);
}

TEST(ReadMemory, IsExactWhereEverySpanOpensAtFullRank) {  // S-3
  for (const bool raw : {false, true})
    for (const Centred centred : {Centred::always, Centred::never}) {
      const FoldedPrompt p(60, 200, 2, 4, 16, 2);
      FactorOptions o;
      o.rank = Rank::max, o.max_rank = 64, o.raw = raw, o.centred = centred;
      EXPECT_LT(
          difference(Memory(p, o).read({.zoom = kAll}).out, closed(plain_attention(p.keys, p.values, p.queries, 0.25))),
          1e-5);
    }
}

TEST(ReadMemory, LeavesSoftmaxesAsTheyAreWithoutSpans) {  // S-4
  const FoldedPrompt p(61, 9, 2, 4, 16, 2);
  const Memory memory(p);  // no longer than the window
  ASSERT_EQ(memory.folded.size(), 0);
  const Memory::Read read = memory.read({.zoom = kAll});
  EXPECT_EQ(difference(read.out, closed(plain_attention(p.keys, p.values, p.queries, 0.25))), 0);
  EXPECT_EQ(read.counts.queries, 0);
  const FoldedPrompt none(61, 0, 2, 4, 16, 2);
  EXPECT_EQ(difference(Memory(none).read({.zoom = kAll}).out, zeros({2, 4, 16}, Dtype::f32)), 0);
}

TEST(ReadMemory, DoesNotChangeWhereRankZeroOpens) {  // S-5: a zoom refines without a jump
  const FoldedPrompt p(62, 150, 2, 4, 16, 2);
  FactorOptions o;
  o.energy = 1, o.centred = Centred::always;
  for (const Dtype store : {Dtype::f32, Dtype::bf16}) {
    o.store = store;
    const Memory memory(p, o);
    const Memory::Read all = memory.read({.zoom = kAll});
    EXPECT_EQ(all.counts.zooms, 2 * 2 * memory.folded.size());
    EXPECT_LT(difference(all.out, memory.read({.zoom = kNone}).out), 2e-6);
  }
}

TEST(ReadMemory, GivesTheNumbersOfASmallExample) {  // G-S4, rows put together by hand
  const Tensor query = zeros({1, 1, 4}, Dtype::f32);
  query.data<float>()[0] = 2;
  const auto rows = [](std::initializer_list<int> of) {  // keys and values of rows 0 to 3
    const float k0[] = {1.0F, 0.5F, 0.2F, -0.3F};
    std::pair<Tensor, Tensor> sides{zeros({1, std::ssize(of), 4}, Dtype::f32),
                                    zeros({1, std::ssize(of), 4}, Dtype::f32)};
    std::int64_t at = 0;
    for (const int i : of) {
      sides.first.data<float>()[4 * at] = k0[i], sides.second.data<float>()[4 * at + i] = 1;
      ++at;
    }
    return sides;
  };
  const auto [dense_keys, dense_values] = rows({0});
  OpenAttention open = plain_attention(dense_keys, dense_values, query, 0.5);
  const auto merge = [&](const std::pair<Tensor, Tensor>& sides, const ZoomOptions& zoom) {
    const std::int64_t length = sides.first.size(1);
    const FoldedHeads folded(sides.first, sides.second, std::vector<float>(static_cast<std::size_t>(length), 1.0F),
                             {{0, static_cast<std::int32_t>(length)}});
    const MemoryRow row{folded.rows.data(), 1};
    return read_memory(open, {&row, 1}, query, 0.5, {.zoom = zoom}).zooms;
  };
  EXPECT_EQ(merge(rows({1, 1, 1, 1, 1}), kNone), 0) << "the second row stands for five equal tokens";
  EXPECT_EQ(merge(rows({2, 3}), kAll), 1);
  const double expected[] = {0.210326, 0.637847, 0.094506, 0.057321};
  const Tensor out = closed(open);
  for (int d = 0; d < 4; ++d) EXPECT_NEAR(out.data<float>()[d], expected[d], 1e-6);
  EXPECT_NEAR(*testing::log_mass(open).data<float>(), 2.559094, 1e-6);
}

TEST(ReadMemory, StaysWithinTheErrorBoundOfWhatFactorsLeaveOut) {  // S-9
  for (std::uint64_t seed = 70; seed < 90; ++seed) {
    SCOPED_TRACE(seed);
    const FoldedPrompt p(seed, 120, 1, 2, 16, 2);
    FactorOptions o;
    o.rank = Rank::max, o.max_rank = 5, o.raw = false, o.centred = Centred::always;
    const Tensor out = Memory(p, o).read({.zoom = kAll}).out,
                 exact = closed(plain_attention(p.keys, p.values, p.queries, 0.25));
    o.max_rank = 16;
    const FoldedHeads all = Memory(p, o).folded;
    double next[2] = {0, 0};
    for (std::int64_t s = 0; s < all.size(); ++s)
      for (const KvSide side : {KvSide::keys, KvSide::values})
        next[static_cast<int>(side)] =
            std::max(next[static_cast<int>(side)], all.of_span(all.trace.singular_values, s, 0, side)[5]);
    const auto longest = [](const Tensor& rows) {
      double most = 0;
      for (std::int64_t i = 0; i < rows.numel(); i += 16) {
        double squares = 0;
        for (std::int64_t d = 0; d < 16; ++d) squares += std::pow(static_cast<double>(rows.data<float>()[i + d]), 2);
        most = std::max(most, std::sqrt(squares));
      }
      return most;
    };
    const double bound = (std::exp(2 * longest(p.queries) * next[0] * 0.25) - 1) * longest(p.values) + next[1];
    const Tensor apart = clone(out);
    for (std::int64_t i = 0; i < out.numel(); ++i) apart.data<float>()[i] -= exact.data<float>()[i];
    EXPECT_LE(longest(apart), bound);
  }
}

// ---- Which spans open -----------------------------------------------------------------------------------------------

/// One span of five equal keys that attention sees as (7, 0, 0, 0), and a query along it.
Memory one_span(std::int32_t length, float key) {
  const Tensor keys = zeros({1, length, 4}, Dtype::f32), query = zeros({1, 1, 4}, Dtype::f32);
  for (int t = 0; t < length; ++t) keys.data<float>()[4 * t] = key;
  query.data<float>()[0] = 1.2F;
  return {keys, keys, {length}, query, 0.5};
}

/// True if a router whose W is 1 opens the only span of a memory with this threshold.
bool opens_above(const Memory& memory, float threshold) {
  const Tensor w = zeros({1, 4, 4}, Dtype::f32);
  for (int i = 0; i < 4; ++i) w.data<float>()[5 * i] = 1;
  const Router router(w, full({1}, threshold));
  Memory routed = memory;
  routed.folded.rows.front().set_norms(router.norms(memory.folded.row(0), 0, 1));
  return routed.read({.router = &router}).counts.zooms == 1;
}

TEST(ReadMemory, OpensWhereTheRoutersSigmoidIsAboveItsThreshold) {  // G-S3: sigmoid(1.2 / 2 + log 5)
  EXPECT_TRUE(opens_above(one_span(5, 7), 0.901093F));
  EXPECT_FALSE(opens_above(one_span(5, 7), 0.901095F));
}

TEST(ReadMemory, TakesACoarseKeyOfZeroForNoDirectionAtAll) {  // sigmoid(log 3)
  EXPECT_TRUE(opens_above(one_span(3, 0), 0.749999F));
  EXPECT_FALSE(opens_above(one_span(3, 0), 0.750001F));
}

TEST(ReadMemory, FollowsALearnedRouterOfEveryHead) {  // S-10, S-15: with stored norms
  const FoldedPrompt p(80, 200, 2, 6, 16, 3);
  oracle::Random random(81);
  const Tensor projections = normals(random, {6, 8, 16});
  const auto zooms = [&](const Tensor& thresholds) {
    Memory memory(p);
    const Router router(projections, thresholds);
    for (std::int64_t kv = 0; kv < 2; ++kv)
      memory.folded.rows[static_cast<std::size_t>(kv)].set_norms(router.norms(memory.folded.row(kv), kv * 3, 3));
    memory.expect_plain({.zoom = {.rule = Rule::learned, .heads = Heads::group}, .router = &router});
    return memory.expect_plain({.router = &router});
  };
  const std::int64_t all = 3 * 2 * Memory(p).folded.size();
  Tensor thresholds = clone(normals(random, {6}, 0.05));
  for (int h = 0; h < 6; ++h) thresholds.data<float>()[h] += 0.95F;
  const std::int64_t some = zooms(thresholds);
  EXPECT_TRUE(some > all / 10 && some < all) << some << " of " << all;
  EXPECT_EQ(zooms(full({6}, 1.0F)), 0);
  EXPECT_EQ(zooms(full({6}, -0.1F)), all);
}

/// Spans that draw these shares of attention, beside dense rows that draw the rest.
struct Shares {
  explicit Shares(const std::vector<double>& shares) {
    const auto n = static_cast<std::int64_t>(shares.size());
    Tensor keys = zeros({1, n, 2}, Dtype::f32);
    double rest = 1;
    for (std::int64_t s = 0; s < n; ++s) {
      const double share = shares[static_cast<std::size_t>(s)];
      keys.data<float>()[2 * s] = static_cast<float>(share > 0 ? std::log(share) : -200.0);
      rest -= share;
    }
    std::vector<Span> spans;
    for (std::int32_t s = 0; s < n; ++s) spans.push_back({s, s + 1});
    folded = FoldedHeads(keys, keys, std::vector<float>(shares.size(), 1.0F), spans);
    dense = static_cast<float>(std::log(rest));
  }

  [[nodiscard]] Spans opened(const ZoomOptions& zoom) const {
    const Tensor query = zeros({1, 1, 2}, Dtype::f32);
    query.data<float>()[0] = 1;
    OpenAttention open{full({1, 1}, dense), full({1, 1}, 1.0F), zeros({1, 1, 2}, Dtype::f32)};
    const MemoryRow row{folded.rows.data(), 1};
    std::vector<Spans> which;
    static_cast<void>(read_memory(open, {&row, 1}, query, 1, {.zoom = zoom}, &which));
    return which.front();
  }

  FoldedHeads folded;
  float dense = 0;
};

TEST(ReadMemory, OpensWhatDrawsMoreThanAShareOrTheFewestThatCover) {
  const Shares shares({0.10, 0.30, 0.0005, 0.10, 0.05});
  ZoomOptions o;
  EXPECT_EQ(shares.opened(o), (Spans{0, 1, 3, 4})) << "without a router";
  o.rule = Rule::mass, o.mass = 0.0999;
  EXPECT_EQ(shares.opened(o), (Spans{0, 1, 3}));
  o.mass = 0.1001;
  EXPECT_EQ(shares.opened(o), (Spans{1}));
  o.rule = Rule::coverage, o.coverage = 0.7;  // of 0.5505: 0.3, then the first 0.1
  EXPECT_EQ(shares.opened(o), (Spans{0, 1}));
  o.coverage = 1;
  EXPECT_EQ(shares.opened(o), (Spans{0, 1, 3, 4})) << "below the floor nothing opens";
  o.coverage_floor = 0;
  EXPECT_EQ(shares.opened(o), (Spans{0, 1, 2, 3, 4}));
  EXPECT_EQ(Shares({0.9, 1e-30, 0}).opened(o), (Spans{0, 1, 2})) << "what rounds away beside the others opens too";
  o.coverage = 0;
  EXPECT_EQ(shares.opened(o), (Spans{}));
}

TEST(ReadMemory, PassesOverWhatDoesNotFitAndWalksOn) {  // G-S6
  const Spans lengths{6, 7, 3, 1};
  oracle::Random random(86);
  Tensor keys = clone(normals(random, {1, 17, 64}));
  const Tensor query = zeros({1, 1, 64}, Dtype::f32);
  query.data<float>()[0] = 1;
  for (std::int32_t s = 0, t = 0; s < 4; ++s)  // the first draws most, then the second, ...
    for (const std::int32_t end = t + lengths[static_cast<std::size_t>(s)]; t < end; ++t)
      keys.data<float>()[64 * t] =
          static_cast<float>(4 - s) - std::log(static_cast<float>(lengths[static_cast<std::size_t>(s)]));
  const Memory memory(keys, normals(random, {1, 17, 64}), lengths, query, 1);
  const auto opened = [&](double entries, double per_span, bool per_head, std::int64_t unmet) {
    const Memory::Read read = memory.read({.zoom = {.rule = Rule::mass, .mass = 0},
                                           .entries = entries,
                                           .entries_per_span = per_span,
                                           .per_head = per_head},
                                          10);
    EXPECT_EQ(read.counts.unmet, unmet);
    EXPECT_EQ(read.counts.resident, static_cast<std::int64_t>(std::ceil(10 + 4 * per_span)));
    return read.opened.front();
  };
  EXPECT_EQ(opened(20, 0, false, 1), (Spans{0, 2, 3}));
  EXPECT_EQ(opened(HUGE_VAL, 0, false, 0), (Spans{0, 1, 2, 3}));
  EXPECT_EQ(opened(20, 2.625, false, 4), (Spans{})) << "over the budget already";
  EXPECT_EQ(opened(20, 0, true, 1), (Spans{0, 2, 3})) << "L - 1 each, as published";
  EXPECT_EQ(opened(21, 0, true, 1), (Spans{0, 1, 3}));
}

TEST(ReadMemory, NeverExceedsABudgetByTheUnionOfAGroup) {  // S-11
  oracle::Random random(87);
  std::int64_t unmet = 0;
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    Spans lengths;
    for (int i = random.between(1, 12); i > 0; --i) lengths.push_back(random.between(1, 20));
    const int tokens = std::accumulate(lengths.begin(), lengths.end(), 0), group = random.between(1, 4);
    const Tensor keys = normals(random, {2, tokens, 64}), values = normals(random, {2, tokens, 64});
    const Memory memory(keys, values, lengths, normals(random, {2, 2 * group, 64}), 0.25);
    for (const bool per_head : {false, true})
      for (const Heads heads : {Heads::own, Heads::group}) {
        const Reading reading{.zoom = {.rule = Rule::mass, .heads = heads, .mass = 0.05},
                              .entries = static_cast<double>(random.between(10, 80)),
                              .entries_per_span = 1.25,
                              .entries_per_token = 0.5,
                              .per_head = per_head};
        memory.expect_plain(reading);
        const Memory::Read read = memory.read(reading);
        unmet += read.counts.unmet;
        for (const Spans& opened : read.opened) {
          double used = 1.25 * static_cast<double>(lengths.size()) + 0.5 * tokens;
          for (const std::int32_t s : opened) used += lengths[static_cast<std::size_t>(s)];
          if (!per_head && !opened.empty()) EXPECT_LE(used, reading.entries);
        }
      }
  }
  EXPECT_GT(unmet, 100);
}

TEST(ReadMemory, RefusesWhatDoesNotFit) {
  const FoldedPrompt p(64, 100, 2, 4, 16, 2);
  const Memory memory(p);
  const std::vector<MemoryRow> rows{{&memory.folded.row(0), 9}, {&memory.folded.row(1), 9}};
  const auto refused = [&](const std::vector<MemoryRow>& of, const Tensor& queries, const Reading& reading) {
    OpenAttention open = plain_attention(memory.keys, memory.values, memory.queries, 0.25);
    EXPECT_THROW(static_cast<void>(read_memory(open, of, queries, 0.25, reading)), InvalidArgument);
  };
  refused({}, p.queries, {});
  refused(rows, Tensor(p.queries).narrow(1, 0, 3), {});
  refused(rows, Tensor(p.queries).narrow(2, 0, 15), {});
  refused(rows, Tensor(p.queries).narrow(0, 0, 1), {});
  oracle::Random random(89);
  const Router fewer(normals(random, {3, 8, 16}), zeros({3}, Dtype::f32)),
      narrower(normals(random, {4, 8, 15}), zeros({4}, Dtype::f32));
  refused(rows, p.queries, {.router = &fewer});
  refused(rows, p.queries, {.router = &narrower});
}

}  // namespace
}  // namespace kvkeep::read_memory_test
