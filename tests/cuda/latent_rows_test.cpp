// SPDX-License-Identifier: Apache-2.0
// Latent rows (MLA) on a GPU against the CPU: values within keys, and what else a slot has.

#include "latent_engine.h"

#include "device.h"
#include "fresh_accelerator.h"

namespace kvkeep::cuda::latent_rows_test {
namespace {

using testing::LatentEngine;

using LatentRowsKernel = OnDevice;

TEST_F(LatentRowsKernel, KeepTheSlotsThatTheCpuKeepsUnderEveryPolicy) {
  for (const char* policy : testing::kLatentPolicies)
    for (const std::int32_t page_size : {0, 8}) {
      SCOPED_TRACE(text(policy, ", page size ", page_size));
      const bool leading = page_size == 0;
      LatentEngine cpu(policy, {.leading = leading, .page_size = page_size}),
          device(policy, {.leading = leading, .page_size = page_size}, fresh_accelerator());
      ASSERT_NO_FATAL_FAILURE(testing::expect_same_slots(cpu, device, 12));
    }
}

}  // namespace
}  // namespace kvkeep::cuda::latent_rows_test
