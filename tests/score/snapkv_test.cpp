// SPDX-License-Identifier: Apache-2.0
// SnapKV and its form in R-KV's repository, against plain loops.

#include <gtest/gtest.h>

#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/window_attention.h"
#include "library_event.h"
#include "oracle/random_case.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing::snapkv_test {
namespace {

using testing::Array;

constexpr SnapKVOptions::Style kStyles[] = {SnapKVOptions::Style::snapkv, SnapKVOptions::Style::rkv};

ScorerOracle plain(const SnapKVOptions& o) {
  return [o](const oracle::ScorerInput& in) {
    return oracle::snapkv(in, {o.window, o.pool, o.style == SnapKVOptions::Style::rkv});
  };
}

TEST(SnapKV, AgreesWithPlainLoopsOnRandomEvents) {
  for (const auto style : kStyles)
    for (const SnapKVOptions& o : {SnapKVOptions{64, 5, style}, SnapKVOptions{8, 7, style}, SnapKVOptions{1, 1, style}})
      expect_scores_agree(SnapKV(o), plain(o), 60, {1e-7, 1e-4});
}

TEST(SnapKV, ObeysTheLawsOfScorersOnEveryInstructionSet) {
  for (const auto style : kStyles) {
    const SnapKVOptions o{8, 5, style};
    expect_scorer_laws(SnapKV(o), 25);
    for_every_instruction_set([&] { expect_scores_agree(SnapKV(o), plain(o), 12, {1e-7, 1e-4}); });
  }
}

TEST(SnapKV, OfTheWorkedExample) {  // one query that sees 1 : 2 : 5 : 8 of 16 parts, pooled over three
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = spec.key_dim = spec.value_dim = 1;
  spec.softmax_scale = 1;
  oracle::Sequence s;
  s.T = 4;
  for (const double parts : {1, 2, 5, 8}) s.keys.push_back(static_cast<float>(std::log(parts)));
  s.queries = {1};
  s.positions = {0, 1, 2, 3};
  s.query_positions = {3};
  const OracleCache cache({s});
  const Limits limits = even_limits(cache.table(), 2);
  WindowAttention none;
  const Array published = SnapKV({.window = 4, .pool = 3}).score(cache.evidence(), limits, none).data;
  const Array rkv =
      SnapKV({.window = 4, .pool = 3, .style = SnapKVOptions::Style::rkv}).score(cache.evidence(), limits, none).data;
  const double want[] = {3.0 / 48, 8.0 / 48, 7.0 / 48, 0}, want_rkv[] = {0.25, 0.625, 0.625, 0};
  for (int t = 0; t < 4; ++t) {
    EXPECT_NEAR(published.data<float>()[t], want[t], 1e-6) << t;
    EXPECT_NEAR(rkv.data<float>()[t], want_rkv[t], 1e-6) << t;
  }
}

TEST(SnapKV, TakesTheWindowAttentionThatIsThereAndLeavesItAsItWas) {
  const oracle::RandomCase c = oracle::random_case(12, {.policy = "tova", .budget = 9, .window = 6}, 120);
  const OracleCache cache({c.sequence});
  const Limits limits = even_limits(cache.table(), 9);
  const SnapKV snapkv({.window = 6, .pool = 5});
  WindowAttention none,
      own = window_attention(cache.evidence(), row_windows(cache.evidence(), limits, 6, false), {.usage = true});
  ASSERT_GT(own.windows[0].queries, 0) << c.description;
  const Array want = snapkv.score(cache.evidence(), limits, none).data;
  const Array before = Array(own.usage).clone();
  EXPECT_TRUE(Array(snapkv.score(cache.evidence(), limits, own).data).equal(want));
  EXPECT_TRUE(Array(own.usage).equal(before));
  Array(own.usage).fill_(2);  // it is that which is read
  EXPECT_FALSE(Array(snapkv.score(cache.evidence(), limits, own).data).equal(want));
  for (RowWindow& w : own.windows) --w.queries;  // and only where the windows are the same
  EXPECT_TRUE(Array(snapkv.score(cache.evidence(), limits, own).data).equal(want));
}

TEST(SnapKV, ProtectsItsWindow) {
  EXPECT_EQ(SnapKV({.window = 48}).keeps_newest(), 48);
  const auto policy = make_policy("snapkv,budget=60,window=48,recent=4,sink=2");
  EXPECT_EQ(dynamic_cast<const Evict&>(*policy).guarded(60).recents, 48);
  EXPECT_EQ(policy->needs().queries, 48);
  EXPECT_THROW(static_cast<void>(make_policy("snapkv,budget=60,pool=4")), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::testing::snapkv_test
