// SPDX-License-Identifier: Apache-2.0
// The harness itself, on scorers that are known: it must pass what is right and see what is wrong.

#include "scorer_case.h"
#include "arrays.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include "kvkeep/score/recency.h"
#include "kvkeep/score/tova.h"

namespace kvkeep::testing::scorer_case_test {
namespace {

using testing::Array;

/// TOVA with heads "group", in plain loops.
oracle::ScorerOutput tova_group(const oracle::ScorerInput& in) {
  oracle::ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const oracle::ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
    std::vector<double>& g = out.emplace_back(static_cast<std::size_t>(head.T), 0.0);
    if (in.N() == 0 || head.T < 2) {
      std::iota(g.begin(), g.end(), 0.0);
      continue;
    }
    for (int q = h * in.group(); q < (h + 1) * in.group(); ++q) {
      std::vector<double> e(g.size(), 0.0);
      double top = -1e300, sum = 0;
      for (int t = 0; t < head.T; ++t) {
        double dot = 0;
        for (int d = 0; d < in.D; ++d) dot += in.query(q, in.N() - 1)[d] * static_cast<double>(head.key(t, in.D)[d]);
        e[static_cast<std::size_t>(t)] = in.logit(dot);
        top = std::max(top, in.logit(dot));
      }
      sum = std::exp(in.sink(q) - top);
      for (double& x : e) sum += x = std::exp(x - top);
      for (std::size_t t = 0; t < e.size(); ++t) g[t] += e[t] / sum / in.group();
    }
  }
  return out;
}

TEST(ScorerCase, TovaAgreesWithPlainLoopsOnRandomEvents) {
  expect_scores_agree(Tova({TovaOptions::Heads::group}), tova_group, 150, {1e-7, 1e-4});
}

TEST(ScorerCase, TovaAndRecencyObeyTheLawsOfScorers) {
  expect_scorer_laws(Tova({TovaOptions::Heads::group}), 30);
  expect_scorer_laws(Tova(), 30, {.ragged = false});
  expect_scorer_laws(Recency(), 10);
  expect_equal_slots_score_equal_bits(Tova({TovaOptions::Heads::group}), 60);
}

/// Recency, or wrong on purpose: recency plus the size of the batch.
class Leaky final : public Scorer {
 public:
  explicit Leaky(bool leaks) : leaks_(leaks) {}
  [[nodiscard]] std::string_view name() const override { return "leaky"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits&, const WindowAttention&) const override {
    Scores scores{Array::empty({evidence.table.slots}, Dtype::f32)};
    float* g = scores.data.data<float>();
    for (const Row& row : evidence.table.rows)
      std::iota(g + row.first, g + row.first + row.length, leaks_ ? static_cast<float>(evidence.table.slots) : 0.0F);
    return scores;
  }

 private:
  bool leaks_;
};

TEST(ScorerCase, SeesAScorerThatLooksAtItsBatchMates) {
  expect_scorer_laws(Leaky(false), 10);
  EXPECT_FATAL_FAILURE(expect_scorer_laws(Leaky(true), 10), "alone");
}

TEST(ScorerCase, SeesAScoreThatIsWrongOrThatDiffersBetweenEqualSlots) {
  EXPECT_FATAL_FAILURE(expect_scores_agree(Recency(), tova_group, 10, {}), "slot");
  EXPECT_NONFATAL_FAILURE(
      {
        ::testing::TestPartResultArray all;
        {
          const ::testing::ScopedFakeTestPartResultReporter reporter(
              ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &all);
          expect_equal_slots_score_equal_bits(Recency(), 60);
        }
        if (all.size() > 0) ADD_FAILURE() << "seen";
      },
      "seen");
}

}  // namespace
}  // namespace kvkeep::testing::scorer_case_test
