// SPDX-License-Identifier: Apache-2.0
// The learned gate: what it stores of spans, and what it refuses.

#include "kvkeep/memory/router.h"

#include <gtest/gtest.h>

#include <limits>

#include "arrays.h"
#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "plain_memory.h"

namespace kvkeep::router_test {
namespace {

using namespace testing;

TEST(Router, StoresTheInverseLengthOfEveryProjectedCoarseKey) {
  const FoldedPrompt p(80, 200, 1, 6, 16, 1);
  const FoldedHeads folded(p.keys, p.values, p.surprisal, segment(p.surprisal, p.segmenter).spans);
  const Tensor keys = coarse_of(folded.row(0), KvSide::keys);
  oracle::Random random(81);
  const Router router(normals(random, {6, 8, 16}), zeros({6}, Dtype::f32));
  const std::vector<float> norms = router.norms(folded.row(0), 2, 3);
  ASSERT_EQ(norms.size(), static_cast<std::size_t>(folded.size() * 3));
  for (std::int64_t s = 0; s < folded.size(); ++s)
    for (std::int64_t h = 0; h < 3; ++h) {
      double squares = 0;
      for (int i = 0; i < 8; ++i) {
        double sum = 0;
        for (int d = 0; d < 16; ++d)
          sum += static_cast<double>(router.projection(2 + h)[i * 16 + d]) * keys.data<float>()[s * 16 + d];
        squares += sum * sum;
      }
      EXPECT_NEAR(norms[static_cast<std::size_t>(s * 3 + h)] * std::sqrt(squares), 1, 1e-5);
    }
}

TEST(Router, StoresAtMostAHundredMillion) {
  const Tensor zero = zeros({1, 3, 4}, Dtype::f32);
  const FoldedHeads folded(zero, zero, std::vector<float>(3, 1.0F), {{0, 3}});
  oracle::Random random(82);
  EXPECT_EQ(Router(normals(random, {1, 2, 4}), zeros({1}, Dtype::f32)).norms(folded.row(0), 0, 1),
            std::vector<float>{1e8F});
}

TEST(Router, RefusesShapesThatDoNotFitAndNumbersThatAreNotFinite) {
  oracle::Random random(89);
  const Tensor w = normals(random, {4, 8, 16});
  EXPECT_THROW(Router(w, zeros({3}, Dtype::f32)), InvalidArgument);
  EXPECT_THROW(Router(w.select(0, 0), zeros({8}, Dtype::f32)), InvalidArgument);
  EXPECT_THROW(Router(w, full({4}, std::numeric_limits<float>::quiet_NaN())), InvalidArgument);
  w.data<float>()[7] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(Router(w, zeros({4}, Dtype::f32)), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::router_test
