// SPDX-License-Identifier: Apache-2.0
// LibTorch's products of bf16 matrices, where the machine has them.

#include <gtest/gtest.h>

#include "expected_case.h"
#include "kvkeep/torch.h"

namespace kvkeep::expected_test {
namespace {

TEST(Expected, TheMatrixUnitComesAsNearAsItSays) {
  for (const std::int32_t dim : {32, 64, 96, 128}) {
    const Small s = random_small(7, dim, 300, 200, Dtype::bf16, 2);
    const Array unit = s.score({.value_norm = false, .epsilon = 0}),
                plain = s.score({.value_norm = false, .epsilon = 0, .matrix_unit = false});
    EXPECT_TRUE(close(unit, plain, 2e-3, 1e-9)) << dim;
  }
}

}  // namespace
}  // namespace kvkeep::expected_test
