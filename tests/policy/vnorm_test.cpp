// SPDX-License-Identifier: Apache-2.0
// The scorer of CONTRIBUTING.md, which the library does not have: added from outside.

#include "vnorm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kvkeep/kvkeep.h"
#include "scorer_case.h"

namespace kvkeep::vnorm_test {
namespace {

[[maybe_unused]] const bool added = (register_scorer<Vnorm>(), true);

TEST(Vnorm, KeepsTheLargestValuesBesideTheProtectedOnes) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  const DenseKv rows{zeros({1, 1, 8, 4}, Dtype::f32), zeros({1, 1, 8, 4}, Dtype::f32)};
  const float norms[] = {5, 1, 4, 2, 3, 9, 6, 7};
  for (int t = 0; t < 8; ++t) rows.values.data<float>()[4 * t] = norms[t];

  Keeper keeper(spec, make_policy("vnorm,budget=4,prefill=cut,sink=1,recent=1"));
  const SequenceId id = 1;
  std::int32_t length = 8;
  keeper.bind({rows});
  keeper.join(id, length);
  keeper.step({{&id, 1}, {{&length, 1}}});

  const auto kept = keeper.positions(id, 0, 0);
  EXPECT_EQ(std::vector<std::int32_t>(kept.begin(), kept.end()), (std::vector<std::int32_t>{0, 5, 6, 7}));
}

/// The second implementation: plain loops.
oracle::ScorerOutput plain_vnorm(const oracle::ScorerInput& in) {
  oracle::ScorerOutput out;
  for (const oracle::ScorerHead& head : in.heads) {
    std::vector<double>& g = out.emplace_back();
    for (int t = 0; t < head.T; ++t) {
      double sum = 0;
      for (int d = 0; d < in.Dv; ++d) sum += static_cast<double>(head.value(t, in.Dv)[d]) * head.value(t, in.Dv)[d];
      g.push_back(std::sqrt(sum));
    }
  }
  return out;
}

TEST(Vnorm, AgreesWithPlainLoopsOnRandomEvents) {
  testing::expect_scores_agree(Vnorm(), plain_vnorm, 100, {1e-6, 1e-5});
}
TEST(Vnorm, ObeysTheLawsOfScorers) { testing::expect_scorer_laws(Vnorm(), 15); }

}  // namespace
}  // namespace kvkeep::vnorm_test
