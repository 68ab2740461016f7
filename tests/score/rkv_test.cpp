// SPDX-License-Identifier: Apache-2.0
// R-KV: redundancy without a T x T matrix against the matrix, the attention half, the laws, the room it takes.

#include "kvkeep/score/rkv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "oracle/rkv_oracle.h"
#include "scorer_case.h"

namespace kvkeep::rkv_test {
namespace {

using testing::expect_scorer_laws;
using testing::expect_scores_agree;

constexpr testing::Tolerance kClose{2e-7, 2e-5};

RkvOptions options_of(const oracle::RkvQuestion& q) {
  return {.window = q.window,
          .pool = q.pool,
          .lambda = q.lambda,
          .similarity = q.similarity,
          .group = q.max_logit ? GroupReduce::max_logit : GroupReduce::mean_prob,
          .redundancy = q.all ? RkvOptions::Redundancy::all : RkvOptions::Redundancy::history,
          .no_similar = q.first ? RkvOptions::NoSimilar::first : RkvOptions::NoSimilar::nothing};
}

void expect_agreement(const oracle::RkvQuestion& q, int cases, const testing::ScorerCaseOptions& options = {}) {
  expect_scores_agree(
      Rkv(options_of(q)), [&](const oracle::ScorerInput& in) { return oracle::rkv(in, q); }, cases, kClose, options);
}

TEST(RkvOracle, FindsTheRedundancyOfFourKeysByPencil) {
  oracle::ScorerHead head;
  head.T = 4;
  head.keys = {1, 0, 0.9F, 0.1F, 0, 1, 0.8F, 0.3F};
  const std::vector<double> means = oracle::redundancy(head, 2, 4, 0.5, true);
  EXPECT_NEAR(means[0], 0.48255, 2e-5);
  EXPECT_NEAR(means[1], 0.27608, 2e-5);
  EXPECT_NEAR(means[2], 0.11539, 2e-5);
  EXPECT_NEAR(means[3], 0.08778, 2e-5);
}

TEST(Rkv, AgreesWithTheWholeMatrixOnRandomEvents) { expect_agreement({}, 200); }

TEST(Rkv, AgreesOnEveryInstructionSetOfThisMachine) {
  testing::for_every_instruction_set([] { expect_agreement({}, 40); });
}

TEST(Rkv, AgreesUnderEveryOption) {
  expect_agreement({.first = true}, 60);
  expect_agreement({.all = false}, 60);
  expect_agreement({.max_logit = false, .all = false, .first = true}, 60);
  expect_agreement({.window = 1, .pool = 1, .lambda = 0.9}, 60);
  expect_agreement({.window = 33, .pool = 31, .lambda = 0.1}, 60);
  expect_agreement({.lambda = 0}, 60);
}

TEST(Rkv, AgreesWhereNoKeyAndWhereNearlyEveryKeyHasAPartner) {
  expect_agreement({.lambda = 0, .similarity = 0.999}, 60);
  expect_agreement({.lambda = 0, .similarity = 0.9}, 60);
  expect_agreement({.lambda = 0, .similarity = 0.2}, 60);
  expect_agreement({.lambda = 0, .similarity = 0.05, .first = true}, 60);
}

TEST(Rkv, AgreesOnRowsOfManyPanels) {
  testing::ScorerCaseOptions options;
  options.longest = 900;
  expect_agreement({.lambda = 0}, 30, options);
  expect_agreement({.lambda = 0, .similarity = 0.9, .first = true}, 30, options);
}

TEST(Rkv, ObeysTheLawsOfScorers) {
  expect_scorer_laws(Rkv(), 25);
  expect_scorer_laws(Rkv({.window = 3,
                          .group = GroupReduce::mean_prob,
                          .redundancy = RkvOptions::Redundancy::history,
                          .no_similar = RkvOptions::NoSimilar::first}),
                     25);
}

TEST(Rkv, NeedsRoomThatGrowsWithTheRowNotItsSquare) {
  const std::int64_t of_one = Rkv::workspace_bytes(1024, 128), of_two = Rkv::workspace_bytes(2048, 128),
                     of_many = Rkv::workspace_bytes(131072, 128);
  EXPECT_EQ(of_two - of_one, (33 + 128) * 1024);
  EXPECT_EQ(of_many - of_one, (33 + 128) * (131072 - 1024));
  EXPECT_LE(of_one, (33 + 128) * 1024 + (8 + 4 * 7 + 5 * 32) * 128);
  EXPECT_GE(of_one, (33 + 128) * 1024 + (8 + 4 * 7) * 128);
}

}  // namespace
}  // namespace kvkeep::rkv_test
