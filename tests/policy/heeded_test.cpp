// SPDX-License-Identifier: Apache-2.0
// The window scorer of CONTRIBUTING.md, which the library does not have: added from outside.

#include "heeded.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kvkeep/kvkeep.h"
#include "oracle/window_oracle.h"
#include "scorer_case.h"

namespace kvkeep::heeded_test {
namespace {

[[maybe_unused]] const bool added = (register_scorer<Heeded>(), true);

/// The second implementation: SnapKV's without pooling, then plain loops.
oracle::ScorerOutput plain_heeded(const oracle::ScorerInput& in) {
  oracle::ScorerOutput out = oracle::snapkv(in, {8, 1, false});
  for (std::size_t h = 0; h < out.size(); ++h)
    if (in.N() > 0)
      for (std::size_t t = 0; t + 1 < out[h].size(); ++t) out[h][t] = std::max(out[h][t], out[h][t + 1]);
  return out;
}

TEST(Heeded, AgreesWithPlainLoopsOnRandomEvents) {
  testing::expect_scores_agree(Heeded({8}), plain_heeded, 60, {1e-6, 1e-4});
}
TEST(Heeded, ObeysTheLawsOfScorers) { testing::expect_scorer_laws(Heeded({8}), 15); }

TEST(Heeded, GoesUnderAllocatorsThatTakeSharesOfAttention) {
  for (const char* policy : {"heeded,budget=64", "ams-heeded,budget=64", "adakv-heeded,budget=64,window=20"})
    EXPECT_GE(make_policy(policy)->needs().queries, 16) << policy;
}

}  // namespace
}  // namespace kvkeep::heeded_test
