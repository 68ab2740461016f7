// DefensiveKV's scores against plain loops.

#include <gtest/gtest.h>

#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::testing {
namespace {

ScorerOracle plain(const DefensiveOptions& o) {
  return [o](const oracle::ScorerInput& in) { return oracle::defensive(in, o.window, o.pool); };
}

TEST(Defensive, AgreesWithPlainLoopsOnRandomEvents) {
  for (const int window : {1, 2, 8, 32})
    for (const int pool : {1, 5})
      expect_scores_agree(Defensive({window, pool}), plain({window, pool}), 40, {1e-6, 1e-4});
}

TEST(Defensive, ObeysTheLawsOfScorersOnEveryInstructionSet) {
  expect_scorer_laws(Defensive({8, 5}), 25);
  for_every_instruction_set([] { expect_scores_agree(Defensive({8, 5}), plain({8, 5}), 10, {1e-6, 1e-4}); });
}

TEST(Defensive, IsThePublishedMethodWithCriticalKV) {
  const auto policy = make_policy("criticalkv-defensive,budget=8,allocator.heads=adaptive");
  EXPECT_EQ(policy->name(), "criticalkv-defensive");
  EXPECT_EQ(policy->needs().queries, 32);
}

}  // namespace
}  // namespace kvkeep::testing
