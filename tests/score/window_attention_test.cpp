// SPDX-License-Identifier: Apache-2.0
// Window attention against plain loops in double: GQA groups, head sizes, dtypes, both query bases, every instruction
// set of the machine.

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <numeric>
#include <string>

#include "arrays.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/window_attention.h"
#include "library_event.h"
#include "message_of.h"
#include "oracle/random_case.h"

namespace kvkeep::window_attention_test {
namespace {

using testing::Array;
using testing::message_of;
using testing::normals;

Limits every_row_due(const RowTable& table, std::int32_t budget) {
  Limits limits = even_limits(table, budget);
  for (RowLimit& row : limits.rows) row.due = true;
  return limits;
}

/// One layer, one sequence, positions 0..T-1, window queries at the last positions.
struct Case {
  ModelSpec spec;
  Array keys;     ///< [1, Hkv, T, D]
  Array values;   ///< [1, Hkv, T, Dv]
  Array queries;  ///< f32 [W, Hq, D] before RoPE
  std::int32_t length, window;
};

Case make_case(std::int32_t group, std::int32_t kv_heads, std::int32_t dim, std::int32_t length, std::int32_t window,
               Dtype dtype) {
  Case c;
  c.spec = {.query_heads = group * kv_heads,
            .kv_heads = kv_heads,
            .key_dim = dim,
            .value_dim = dim / 2 + 1,
            .softmax_scale = 0,
            .rope = {},
            .layers = std::vector<LayerSpec>(1)};
  for (std::int32_t f = 0; f < dim / 2; ++f) c.spec.rope.inv_freq.push_back(std::pow(1e4, -2.0 * f / dim));
  oracle::Random random(static_cast<std::uint64_t>(length * 1000 + dim));
  c.keys = normals(random, {1, kv_heads, length, dim}).to(dtype);
  c.values = normals(random, {1, kv_heads, length, dim / 2 + 1}).to(dtype);
  c.queries = normals(random, {window, group * kv_heads, dim});
  c.length = length;
  c.window = window;
  return c;
}

/// Runs the primitive on a case; queries go in before or after RoPE.
WindowAttention run(const Case& c, QueryBasis basis) {
  const SequenceId id = 0;
  std::int32_t length = c.length;
  const std::int32_t zero = 0;
  const std::vector<LayerKv> cache{DenseKv{c.keys, c.values}};
  RowTable table = make_rows(c.spec, cache, {{&id, 1}, {{&length, 1}}}, {&zero, 1}, {&zero, 1});
  std::vector<std::int32_t> positions(static_cast<std::size_t>(c.length)),
      query_positions(static_cast<std::size_t>(c.window));
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(query_positions.begin(), query_positions.end(), c.length - c.window);
  Array queries = c.queries.clone();
  if (basis == QueryBasis::post_rope) {
    const auto pairs = static_cast<std::int64_t>(c.spec.rope.inv_freq.size());
    std::vector<float> cosines(c.spec.rope.inv_freq.size()), sines(cosines.size());
    for (std::int32_t i = 0; i < c.window; ++i) {
      rope_at(c.spec.rope, query_positions[static_cast<std::size_t>(i)], cosines.data(), sines.data());
      for (std::int32_t h = 0; h < c.spec.query_heads; ++h)
        rope_rotate(c.spec.rope.style, pairs, cosines.data(), sines.data(),
                    queries.data<float>() + (i * c.spec.query_heads + h) * c.spec.key_dim);
    }
  }
  for (Row& row : table.rows) row.positions = positions.data();
  table.groups[0].queries = {.data = static_cast<const std::byte*>(queries.bytes()),
                             .token_stride = queries.stride(0) * 4,
                             .head_stride = queries.stride(1) * 4,
                             .positions = query_positions.data(),
                             .ring = c.window,
                             .begin = 0,
                             .count = c.window};
  const Evidence evidence{c.spec, table, basis};
  return window_attention(evidence, row_windows(evidence, every_row_due(table, c.length), c.window, false),
                          {.usage = true, .newest = true});
}

void expect_as_in_plain_loops(const Case& c, const WindowAttention& got) {
  const auto group = c.spec.group();
  const Array k64 = c.keys.to(Dtype::f64).contiguous();
  const double* keys = k64.data<double>();
  const std::int32_t W = got.windows[0].queries, history = got.windows[0].history;
  for (std::int32_t h = 0; h < c.spec.kv_heads; ++h) {
    std::vector<double> usage(static_cast<std::size_t>(c.length), 0), newest(usage);
    for (std::int32_t g = 0; g < group; ++g)
      for (std::int32_t i = c.window - W; i < c.window; ++i) {
        const std::int32_t at = c.length - c.window + i;
        std::vector<double> q(static_cast<std::size_t>(c.spec.key_dim));
        const float* raw = c.queries.data<float>() + (i * c.spec.query_heads + h * group + g) *
                                                         c.spec.key_dim;  // query head h reads KV head h / group
        for (std::int32_t f = 0; f < c.spec.key_dim / 2; ++f) {
          const double a = at * c.spec.rope.inv_freq[static_cast<std::size_t>(f)];
          const std::int32_t second = f + c.spec.key_dim / 2;
          q[static_cast<std::size_t>(f)] = raw[f] * std::cos(a) - raw[second] * std::sin(a);
          q[static_cast<std::size_t>(second)] = raw[second] * std::cos(a) + raw[f] * std::sin(a);
        }
        std::vector<double> p(static_cast<std::size_t>(at + 1));
        double sum = 0;
        for (std::int32_t t = 0; t <= at; ++t) {
          double dot = 0;
          for (std::int32_t d = 0; d < c.spec.key_dim; ++d)
            dot += q[static_cast<std::size_t>(d)] *
                   keys[(static_cast<std::int64_t>(h) * c.length + t) * c.spec.key_dim + d];
          sum += p[static_cast<std::size_t>(t)] = std::exp(dot * c.spec.scale());
        }
        for (std::int32_t t = 0; t <= at; ++t) {
          if (t < history) usage[static_cast<std::size_t>(t)] += p[static_cast<std::size_t>(t)] / sum / group / W;
          if (t >= history && t < at)
            usage[static_cast<std::size_t>(t)] += p[static_cast<std::size_t>(t)] / sum / group / (c.length - 1 - t);
          if (i == c.window - 1) newest[static_cast<std::size_t>(t)] += p[static_cast<std::size_t>(t)] / sum / group;
        }
      }
    for (std::int32_t t = 0; t < c.length; ++t) {
      const auto s = static_cast<std::size_t>(t);
      ASSERT_NEAR(got.usage.data<float>()[h * c.length + t], usage[s], 1e-7 + 1e-5 * usage[s])
          << "head " << h << ", slot " << t << ", group " << group;
      ASSERT_NEAR(got.newest.data<float>()[h * c.length + t], newest[s], 1e-7 + 1e-5 * newest[s])
          << "head " << h << ", slot " << t << ", group " << group;
    }
  }
}

TEST(WindowAttention, MapsQueryHeadsToKvHeadsByContiguousGroups) {  // B15
  for (const std::int32_t group : {1, 2, 3, 4, 7, 8})
    for (const std::int32_t kv_heads : {1, 3}) {
      const Case c = make_case(group, kv_heads, 16, 53, 5, Dtype::f32);
      expect_as_in_plain_loops(c, run(c, QueryBasis::pre_rope));
    }
}

TEST(WindowAttention, ReadsEveryHeadSizeAndDtype) {  // B25
  for (const std::int32_t dim : {2, 64, 80, 96, 128, 192, 256})
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
      for (const std::int32_t length : {2, 13, 64, 65, 131}) {
        const Case c = make_case(2, 2, dim, length, std::min(length, 9), dtype);
        expect_as_in_plain_loops(c, run(c, QueryBasis::pre_rope));
      }
}

TEST(WindowAttention, TakesQueriesBeforeOrAfterRoPE) {  // B16: the basis is a named argument
  const Case c = make_case(3, 2, 32, 100, 12, Dtype::f32);
  const WindowAttention before = run(c, QueryBasis::pre_rope), after = run(c, QueryBasis::post_rope);
  expect_as_in_plain_loops(c, before);
  expect_as_in_plain_loops(c, after);
}

TEST(WindowAttention, RefusesAQueryThatIsNotFinite) {
  for (const float x : {NAN, INFINITY, -INFINITY}) {
    Case c = make_case(2, 2, 10, 20, 4, Dtype::f32);
    c.spec.rope.inv_freq.clear();
    c.queries.data<float>()[(1 * 4 + 3) * 10 + 9] = x;
    const std::string said = message_of<InvalidArgument>([&] { run(c, QueryBasis::post_rope); });
    EXPECT_NE(said.find(text("query of head 3 at position 17 holds ", x, " in component 9")), std::string::npos)
        << said;
  }
}

TEST(WindowAttention, OfAWindowAsLongAsTheCacheStillHasAHistoryOfOne) {
  const Case c = make_case(2, 1, 8, 20, 20, Dtype::f32);
  const WindowAttention got = run(c, QueryBasis::pre_rope);
  EXPECT_EQ(got.windows[0].queries, 19);
  EXPECT_EQ(got.windows[0].history, 1);
  expect_as_in_plain_loops(c, got);
}

TEST(WindowAttention, GivesEqualKeysEqualBitsWhereverTheyLie) {  // what the tie rule stands on
  Case c = make_case(2, 1, 80, 97, 4, Dtype::f32);
  for (const std::int64_t t : {1, 5, 7, 31, 90}) c.keys[0][0][t].copy_(c.keys[0][0][3]);
  const WindowAttention got = run(c, QueryBasis::pre_rope);
  for (const std::int64_t t : {1, 5, 7, 31, 90}) {
    EXPECT_EQ(got.usage.data<float>()[t], got.usage.data<float>()[3]) << t;
    EXPECT_EQ(got.newest.data<float>()[t], got.newest.data<float>()[3]) << t;
  }
}

TEST(WindowAttention,
     OfOneQueryGivesEqualKeysEqualBitsInPairsAndAlone) {  // 111 slots: blocks of 32, then of 12, then single ones
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Case c = make_case(7, 1, 128, 111, 1, dtype);
    for (const std::int64_t t : {4, 17, 63, 97, 108, 110}) c.keys[0][0][t].copy_(c.keys[0][0][3]);
    const WindowAttention got = run(c, QueryBasis::pre_rope);
    expect_as_in_plain_loops(c, got);
    for (const std::int64_t t : {4, 17, 63, 97, 108, 110})
      EXPECT_EQ(got.newest.data<float>()[t], got.newest.data<float>()[3]) << t;
  }
}

TEST(WindowAttention, AgreesOnEveryInstructionSetOfThisMachine) {  // the plain path too
  const std::int64_t all = hwy::SupportedTargets();
  int sets = 0;
  for (std::int64_t left = all; left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      const Case c = make_case(7, 2, 64, 77, 6, dtype);
      expect_as_in_plain_loops(c, run(c, QueryBasis::pre_rope));
      const Case one = make_case(7, 2, 64, 111, 1, dtype);
      expect_as_in_plain_loops(one, run(one, QueryBasis::pre_rope));
    }
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      const oracle::RandomCase c = oracle::random_case(seed);
      const auto want = oracle::event(c.options, c.sequence);
      if (oracle::near_tie(want)) continue;
      const auto got = testing::library_event(c.options, {c.sequence})[0];
      for (std::size_t h = 0; h < want.size(); ++h) ASSERT_EQ(got[h].slots, want[h].slots) << c.description;
    }
    ++sets;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_GE(sets, 1);
}

TEST(Allocator, LeavesTheCallersScoresAlone) {  // B18
  oracle::Options options;
  options.budget = 20;
  options.min_segment = 4;
  options.max_segment = 16;
  const oracle::RandomCase c = oracle::random_case(4, options, 200);
  const testing::OracleCache cache({c.sequence});
  const Limits limits = even_limits(cache.table(), 20, 4, 32);
  WindowAttention seen = window_attention(cache.evidence(), row_windows(cache.evidence(), limits, 32, false),
                                          {.usage = true, .newest = true});
  Decision decision;
  decision.scores = Tova().score(cache.evidence(), limits, seen);
  const Array before = Array(decision.scores.data).clone();
  MassSegmented({.min_segment = 4, .max_segment = 16}).allot(cache.evidence(), limits, decision.scores, seen, decision);
  EXPECT_TRUE(Array(decision.scores.data).equal(before));
}

}  // namespace
}  // namespace kvkeep::window_attention_test
