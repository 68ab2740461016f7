// SPDX-License-Identifier: Apache-2.0
// Scores that the engine gives, against what it gave.

#include "kvkeep/score/given.h"
#include "kvkeep/parts/given.h"

#include <gtest/gtest.h>

#include <limits>

#include "message_of.h"
#include "scorer_case.h"

namespace kvkeep::testing::given_test {
namespace {

oracle::ScorerOutput as_given(const oracle::ScorerInput& in) {
  oracle::ScorerOutput out;
  for (const oracle::ScorerHead& head : in.heads) out.emplace_back(head.given.begin(), head.given.end());
  return out;
}

/// One row of five slots, to be cut to three.
struct FiveSlots {
  FiveSlots() {
    spec.query_heads = spec.kv_heads = 1;
    spec.key_dim = spec.value_dim = 1;
    spec.layers.resize(1);
    table.rows.resize(1);
    table.rows[0].length = table.rows[0].given_length = 5;
    table.rows[0].given = given;
    table.groups.resize(1);
    table.slots = 5;
  }
  [[nodiscard]] Scores score(std::int32_t budget) const {
    return Given().score({.spec = spec, .table = table}, even_limits(table, budget), {});
  }

  float given[5] = {-4.5F, std::numeric_limits<float>::infinity(), 0, -std::numeric_limits<float>::infinity(), 3};
  ModelSpec spec;
  RowTable table;
};

TEST(Given, IsWhatTheEngineGave) {
  const FiveSlots five;
  const Scores g = five.score(3);
  for (int t = 0; t < 5; ++t) EXPECT_EQ(g.data.data<float>()[t], five.given[t]) << t;
}

TEST(Given, AgreesWithPlainLoopsOnRandomEvents) { expect_scores_agree(Given(), as_given, 200, {0, 0}); }

TEST(Given, ObeysTheLawsOfScorers) { expect_scorer_laws(Given(), 25); }

TEST(Given, RefusesRowsWithoutAScoreForEverySlotIfTheyAreDue) {
  FiveSlots five;
  five.table.rows[0].given_length = 4;
  EXPECT_EQ(
      message_of<InvalidArgument>([&] { static_cast<void>(five.score(3)); }),
      "given: 4 of the 5 slots of layer 0, head 0 have a given score; allowed all (parts::Given::give, or the tensor "
      "\"given\" of a trace)");
  EXPECT_NO_THROW(static_cast<void>(five.score(5)));
}

TEST(Given, SaysWhatItNeeds) {
  for (const char* policy : {"given,budget=9", "adakv-given,budget=9"}) {
    const Needs needs = make_policy(policy)->needs();
    EXPECT_TRUE(needs.given_scores) << policy;
    EXPECT_EQ(needs.queries, 0) << policy;
    EXPECT_FALSE(needs.keys || needs.values) << policy;
  }
  const Needs ams = make_policy("ams-given,budget=9")->needs();
  EXPECT_TRUE(ams.given_scores);
  EXPECT_EQ(ams.queries, 32);
  EXPECT_FALSE(make_policy("tova,budget=9")->needs().given_scores);
  const std::vector<PolicyInfo> all = policies();
  const auto info = std::ranges::find(all, "given", &PolicyInfo::name);
  ASSERT_NE(info, all.end());
  EXPECT_EQ(info->needs, "scores that the engine gives");
  EXPECT_EQ(std::ranges::find(all, "criticalkv-given", &PolicyInfo::name), all.end()) << "they may be negative";
}

}  // namespace
}  // namespace kvkeep::testing::given_test
