// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Expected Attention once more, in plain loops over doubles: nothing shared with the library.

#include "scorer_input.h"

namespace oracle {

struct ExpectedSettings {
  int future = 512;
  int sink = 4;
  bool covariance = true;
  bool value_norm = true;
  double epsilon = 0.01;
  int queries = 256;  ///< newest queries that are read
};

/// [Hkv][T]; slots below the sink hold the largest score of the others.
ScorerOutput expected(const ScorerInput& input, const ExpectedSettings& settings);

/// Expected logits of one KV head, [G][T - sink]; empty where no query counts.
std::vector<std::vector<double>> expected_logits(const ScorerInput& input, const ExpectedSettings& settings,
                                                 int kv_head);

}  // namespace oracle
