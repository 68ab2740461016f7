// SPDX-License-Identifier: Apache-2.0
// Slice-then-softmax over the history against plain loops in double: both group reductions, every instruction set,
// gaps, offsets, small and large windows.

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/window_attention.h"
#include "library_event.h"
#include "oracle/random_case.h"
#include "oracle/window_oracle.h"

namespace kvkeep::history_attention_test {
namespace {

using testing::Array;
using testing::OracleCache;

/// Windows and first slots of every row, and what the oracle makes of them.
struct Asked {
  std::vector<RowWindow> windows;
  std::vector<std::int32_t> first;
  std::vector<std::vector<double>> want;
};

Asked ask(const oracle::Sequence& s, int window, int first, HistoryOptions options) {
  Asked asked;
  for (int h = 0; h < s.Hkv; ++h) {
    const int history = oracle::history_of(s, h, window);
    asked.windows.push_back({window, history});
    asked.first.push_back(std::min(first, history));
    asked.want.push_back(oracle::history_attention(
        s, h, {window, asked.first.back(), history, options.group == GroupReduce::max_logit, options.newest_counts}));
  }
  return asked;
}

void expect_as_in_plain_loops(const oracle::Sequence& s, int window, int first, HistoryOptions options) {
  const OracleCache cache({s});
  const Asked asked = ask(s, window, first, options);
  const Array got = history_attention(cache.evidence(), asked.windows, options, asked.first);
  for (std::size_t h = 0; h < asked.want.size(); ++h)
    for (std::size_t t = 0; t < asked.want[h].size(); ++t)
      ASSERT_NEAR(got.data<float>()[cache.table().rows[h].first + static_cast<std::int64_t>(t)], asked.want[h][t],
                  1e-6 + 1e-4 * asked.want[h][t])
          << "head " << h << ", slot " << t;
}

oracle::RandomCase sequence_of(std::uint64_t seed, int window) {
  oracle::Options o;
  o.policy = "tova";
  o.window = window;
  return oracle::random_case(seed, o, 200);
}

void random_sequences(int cases) {
  for (int seed = 0; seed < cases; ++seed) {
    const int windows[] = {1, 2, 5, 8, 16, 32, 33, 70};
    const oracle::RandomCase c = sequence_of(static_cast<std::uint64_t>(seed), windows[seed % 8]);
    SCOPED_TRACE(c.description);
    const int window = std::min({windows[seed % 8], c.sequence.queries_seen(), c.sequence.T - 1});
    if (window < 1) continue;
    for (const GroupReduce group : {GroupReduce::mean_prob, GroupReduce::max_logit})
      expect_as_in_plain_loops(c.sequence, window, seed % 3 == 0 ? 0 : seed % 11, {group, seed % 5 == 0 ? 2 : 1});
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(HistoryAttention, AgreesWithPlainLoopsOnRandomSequences) { random_sequences(oracle::random_case_count(600)); }

TEST(HistoryAttention, AgreesOnEveryInstructionSetOfThisMachine) {
  int sets = 0;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(left & -left));
    random_sequences(60);
    ++sets;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_GE(sets, 1);
}

/// One KV head, one slot a value of the key, queries at the newest positions.
oracle::Sequence hand_made(std::vector<float> keys, std::vector<float> queries, int group) {
  oracle::Sequence s;
  s.T = static_cast<int>(keys.size());
  s.Hq = group;
  s.keys = std::move(keys);
  s.queries = std::move(queries);
  for (int t = 0; t < s.T; ++t) s.positions.push_back(t);
  const int seen = static_cast<int>(s.queries.size()) / group;
  for (int i = 0; i < seen; ++i) s.query_positions.push_back(s.T - seen + i);
  return s;
}

TEST(HistoryAttention, OfTwoHeadsIsAMeanOfSharesOrASoftmaxOfTheLargestLogits) {
  const float ln2 = std::log(2.0F);
  const oracle::Sequence s =
      hand_made({ln2, -ln2, 0, 9}, {1, -1}, 2);  // logits of the history: ln2 -ln2 0 and -ln2 ln2 0
  const OracleCache cache({s});
  const std::vector<RowWindow> windows = {{1, 3}};
  const Array mean = history_attention(cache.evidence(), windows, {.group = GroupReduce::mean_prob});
  const Array largest = history_attention(cache.evidence(), windows, {.group = GroupReduce::max_logit});
  const float want_mean[] = {2.5F / 7, 2.5F / 7, 2.0F / 7, 0},
              want_largest[] = {0.4F, 0.4F, 0.2F, 0};  // (4/7 + 1/7) / 2; 2 : 2 : 1
  for (int t = 0; t < 4; ++t) {
    EXPECT_NEAR(mean.data<float>()[t], want_mean[t], 1e-6) << t;
    EXPECT_NEAR(largest.data<float>()[t], want_largest[t], 1e-6) << t;
  }
}

TEST(HistoryAttention, CountsTheNewestQueryTwiceWhereAsked) {
  const float ln3 = std::log(3.0F);
  const oracle::Sequence s = hand_made({ln3, 0, 0, 0}, {0, 1}, 1);  // the older query sees 1/2 1/2, the newest 3/4 1/4
  const OracleCache cache({s});
  const std::vector<RowWindow> windows = {{2, 2}};
  const Array got = history_attention(cache.evidence(), windows, {.newest_counts = 2});
  EXPECT_NEAR(got.data<float>()[0], (0.5 + 2 * 0.75) / 3, 1e-6);
  EXPECT_NEAR(got.data<float>()[1], (0.5 + 2 * 0.25) / 3, 1e-6);
}

TEST(HistoryAttention, SumsToOneOverTheSliceAndIsZeroOutside) {
  const oracle::RandomCase c = sequence_of(9, 8);
  const OracleCache cache({c.sequence});
  for (const GroupReduce group : {GroupReduce::mean_prob, GroupReduce::max_logit}) {
    std::vector<RowWindow> windows;
    for (int h = 0; h < c.sequence.Hkv; ++h) windows.push_back({1, oracle::history_of(c.sequence, h, 1)});
    ASSERT_GT(windows[0].history, 3);
    const std::vector<std::int32_t> first(windows.size(), 2);
    const Array got = history_attention(cache.evidence(), windows, {group}, first);
    for (std::size_t r = 0; r < windows.size(); ++r) {
      const Row& row = cache.table().rows[r];
      double sum = 0;
      for (std::int32_t t = 0; t < row.length; ++t) {
        const float share = got.data<float>()[row.first + t];
        if (t < 2 || t >= windows[r].history) EXPECT_EQ(share, 0) << t;
        sum += share;
      }
      EXPECT_NEAR(sum, 1, 1e-5);
    }
  }
}

TEST(HistoryAttention, GivesEqualKeysEqualBitsWhereverTheyLie) {
  oracle::RandomCase c = sequence_of(21, 8);
  oracle::Sequence& s = c.sequence;
  const int history = oracle::history_of(s, 0, 1);
  ASSERT_GT(history, 20) << c.description;
  for (const int t : {1, 5, 7, 13, history - 1}) std::copy_n(s.keys.begin() + 3 * s.D, s.D, s.keys.begin() + t * s.D);
  const OracleCache cache({s});
  std::vector<RowWindow> windows(static_cast<std::size_t>(s.Hkv), {1, history});
  for (const GroupReduce group : {GroupReduce::mean_prob, GroupReduce::max_logit}) {
    const Array got = history_attention(cache.evidence(), windows, {group});
    for (const int t : {1, 5, 7, 13, history - 1}) EXPECT_EQ(got.data<float>()[t], got.data<float>()[3]) << t;
  }
}

TEST(HistoryAttention, OfARowDependsOnNothingButTheRow) {
  for (const GroupReduce group : {GroupReduce::mean_prob, GroupReduce::max_logit})
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const oracle::Sequence s = sequence_of(seed, 8).sequence;
      const int window = std::min({8, s.queries_seen(), s.T - 1});
      if (window < 1) continue;
      oracle::Sequence other = s;  // the same shape, and full of NaN
      std::fill(other.keys.begin(), other.keys.end(), std::numeric_limits<float>::quiet_NaN());
      const OracleCache alone({s}), together({other, s, other});
      const Asked asked = ask(s, window, 0, {group});
      std::vector<RowWindow> windows;
      for (int n = 0; n < 3; ++n) windows.insert(windows.end(), asked.windows.begin(), asked.windows.end());
      const Array one = history_attention(alone.evidence(), asked.windows, {group}),
                  three = history_attention(together.evidence(), windows, {group});
      const std::int64_t begin = together.table().rows[static_cast<std::size_t>(s.Hkv)].first;
      ASSERT_TRUE(three.narrow(0, begin, one.numel()).equal(one)) << seed;
    }
}

TEST(HistoryAttention, TakesWorkspaceThatGrowsWithTheSlotsNotTheirSquare) {
  ModelSpec spec;
  spec.query_heads = 28;
  spec.kv_heads = 4;
  spec.key_dim = spec.value_dim = 128;
  spec.layers.resize(1);
  for (const GroupReduce group : {GroupReduce::mean_prob, GroupReduce::max_logit}) {
    const std::int64_t none = history_attention_workspace(spec, 0, 8, group),
                       thousand = history_attention_workspace(spec, 1000, 8, group);
    const std::int64_t per_slot = (thousand - none) / 1000,
                       floats = group == GroupReduce::max_logit ? 14 : 10;  // 3.5 or 2.5 panels of 4 bytes a lane
    EXPECT_EQ(per_slot % floats, 0);
    EXPECT_LE(per_slot / floats, 32) << "a panel is two vectors of the machine";
    EXPECT_EQ(history_attention_workspace(spec, 32768, 8, group), none + 32768 * per_slot);
    const std::int64_t width = per_slot / floats;
    EXPECT_EQ(none, 4 * (7 * 8 * 128 + 2 * 128 * width + 48 * 128 + 8 * width));
  }
}

TEST(Pool, AveragesWithDampedEdgesAndTakesMaximaWithoutDamping) {
  const float x[] = {3, -1, 4, 1, -5};
  float out[5];
  pool_average(x, 5, 3, out);
  const float averages[] = {2.0F / 3, 2, 4.0F / 3, 0, -4.0F / 3};
  for (int t = 0; t < 5; ++t) EXPECT_FLOAT_EQ(out[t], averages[t]) << t;
  pool_max(x, 5, 3, out);
  const float maxima[] = {3, 4, 4, 4, 1};
  for (int t = 0; t < 5; ++t) EXPECT_EQ(out[t], maxima[t]) << t;
  pool_max(x, 5, 1, out);
  for (int t = 0; t < 5; ++t) EXPECT_EQ(out[t], x[t]) << t;
  const float holes[] = {std::numeric_limits<float>::quiet_NaN(), -2, std::numeric_limits<float>::quiet_NaN()};
  pool_max(holes, 3, 3, out);
  for (int t = 0; t < 3; ++t) EXPECT_EQ(out[t], -2) << t;
  pool_max(x, 5, 99, out);
  for (int t = 0; t < 5; ++t) EXPECT_EQ(out[t], 4) << t;
}

}  // namespace
}  // namespace kvkeep::history_attention_test
