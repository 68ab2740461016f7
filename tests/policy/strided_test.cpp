// SPDX-License-Identifier: Apache-2.0
// The allocator of CONTRIBUTING.md, which the library does not have: added from outside.

#include "strided.h"

#include <gtest/gtest.h>

#include "engines.h"
#include "kvkeep/kvkeep.h"
#include "vnorm.h"

namespace kvkeep::strided_test {
namespace {

[[maybe_unused]] const bool added = (register_allocator<Strided>(), true);

TEST(Strided, KeepsEveryThirdSlotAndTheBestOfTheOthers) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  const DenseKv rows{zeros({1, 1, 8, 4}, Dtype::f32), zeros({1, 1, 8, 4}, Dtype::f32)};
  const float norms[] = {5, 1, 4, 2, 3, 9, 6, 7};
  for (int t = 0; t < 8; ++t) rows.keys.data<float>()[4 * t] = norms[t];

  Keeper keeper(spec, make_policy("strided-knorm,stride=3,budget=5,prefill=cut,sink=1,recent=1"));
  const SequenceId id = 1;
  std::int32_t length = 8;
  keeper.join(id, length);
  keeper.bind({rows});
  keeper.step({{&id, 1}, {{&length, 1}}});

  const auto kept = keeper.positions(id, 0, 0);  // 0, 3 and 6 by the stride, 7 is recent, and 1 has the smallest key
  EXPECT_EQ(std::vector<std::int32_t>(kept.begin(), kept.end()), (std::vector<std::int32_t>{0, 1, 3, 6, 7}));
}

TEST(Strided, KeepsExactlyTheBudgetInEveryRow) {
  for (const char* policy : {"strided-tova,budget=24,interval=8,recent=4,stride=2",
                             "strided-h2o,budget=24,interval=8,recent=4", "strided-vnorm,budget=24,interval=8"}) {
    SCOPED_TRACE(policy);
    engines::DenseEngine engine(policy, false, Dtype::f32);
    oracle::Random random(3);
    engine.join(0);
    static_cast<void>(engine.step(engines::numbers_of(random, {{0, 30}})));
    for (int n = 0; n < 24; ++n)
      for (const Cut& cut : engine.step(engines::numbers_of(random, {{0, 1}})).cuts) EXPECT_EQ(cut.length_after, 24);
    EXPECT_GT(engine.keeper.totals().events, 2);
  }
}

TEST(Strided, IsRefusedAsPublished) {
  EXPECT_THROW(static_cast<void>(make_policy("strided-tova,budget=64,variant=official")), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::strided_test
