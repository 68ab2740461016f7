// SPDX-License-Identifier: Apache-2.0
#pragma once
/// TriAttention a second time: keys turned back to where they stood before RoPE, the series over the distance between
/// query and key, every offset by itself.

#include <functional>
#include <vector>

#include "scorer_input.h"

namespace oracle {

struct TriOptions {
  bool take_max = false;  ///< over the offsets; else their mean
  bool normalize = true;
  bool group_mean = false;  ///< over the query heads of a KV head; else their maximum
  bool sample = false;  ///< deviation with n - 1 over all slots, 1 where it vanishes; else population over the slots
                        ///< that are not guarded, at least 1e-6
  long offset_max = 65536;
};

/// Query statistics of one head, [F] each.
struct TriHead {
  std::vector<double> real, imaginary, modulus;
};

ScorerOutput triattention(const ScorerInput& in, const std::function<TriHead(int layer, int query_head)>& statistics,
                          const TriOptions& options);

}  // namespace oracle
