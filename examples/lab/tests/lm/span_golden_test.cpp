// SPDX-License-Identifier: Apache-2.0
// Folded spans, and the losses of their router, replayed against the reference and the published code.

#include "golden_case.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/router_training.h"
#include "kvlab/span_trace.h"

namespace kvkeep::span_golden_test {
namespace {

TEST(SpanGolden, FoldedSpansMatchTheReferenceAndThePublishedCode) {
  int run = 0;
  for (const testing::GoldenCase& c : testing::golden_cases("sekv")) {
    SCOPED_TRACE(c.folder.string());
    const auto replay = [&] {
      return trace::replay_span(io::SafetensorsFile::open(c.file("trace.safetensors")),
                                *load_policy(c.file("policy.json")));
    };
    if (c.must_fail())
      EXPECT_THROW(static_cast<void>(replay()), Error);
    else
      testing::expect_as_golden(c, replay());
    ++run;
  }
  EXPECT_GE(run, 17) << "golden cases are missing from the folder";
}

TEST(SpanGolden, LossesOfRouterAndGatesHaveTheGradientsOfTheReference) {
  int run = 0;
  for (const testing::GoldenCase& c : testing::golden_cases("sekv_train")) {
    SCOPED_TRACE(c.folder.string());
    testing::expect_as_golden(c, trace::replay_span_train(io::SafetensorsFile::open(c.file("trace.safetensors")),
                                                          *load_policy(c.file("policy.json"))));
    ++run;
  }
  EXPECT_GE(run, 2) << "golden cases are missing from the folder";
}

}  // namespace
}  // namespace kvkeep::span_golden_test
