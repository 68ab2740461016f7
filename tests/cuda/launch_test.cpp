// SPDX-License-Identifier: Apache-2.0
// How kernels start: what a launch says of itself, and of nothing else.

#include "evidence_case.h"
#include "kvkeep/score/recency.h"
#include "row_body.h"

namespace kvkeep::cuda::launch_test {
namespace {

using Launch = OnDevice;

TEST_F(Launch, IsNotBlamedForAnErrorThatAnotherCallLeft) {
  const EvidenceCase c(1, {.lengths = {40}});
  const DeviceEvidence there(c);
  const DeviceArray<float> scores(static_cast<std::size_t>(c.table.slots));
  static_cast<void>(cudaGetLastError());
  // The legacy stream cannot be captured.
  const cudaError_t left = cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal);
  ASSERT_NE(left, cudaSuccess);
  EXPECT_NO_THROW(
      launch_row_body<RecencyOptions>({{.evidence = there.arguments(), .scores = scores.data()}, {}}, nullptr));
  EXPECT_EQ(cudaGetLastError(), left) << "what another call left is for its caller to see";
  expect(cudaStreamSynchronize(nullptr));
}

}  // namespace
}  // namespace kvkeep::cuda::launch_test
