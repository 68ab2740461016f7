#pragma once
/// What the newest queries made of each row: the outcome of window attention, read by scorers and allocators.

#include <cstdint>
#include <vector>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// How many of a row's queries take part, and where the slots begin that some of them cannot see.
struct RowWindow {
  std::int32_t queries = 0;  ///< W of this row; 0: no query was seen
  std::int32_t history = 0;  ///< slots [0, history) are visible to every window query; the rest is the suffix
};

/// Reductions of softmax(scale * q.k + causal mask) over the newest `queries` queries of each row, over all slots of the row. fp32.
struct WindowAttention {
  std::vector<RowWindow> windows;  ///< [rows]
  Tensor usage;                    ///< f32 [slots] mean over window queries and the heads of the group; on the suffix the mean over the strictly
                                   ///< later queries, 0 where there is none. Absent unless asked for.
  Tensor newest;                   ///< f32 [slots] the newest query's probabilities, mean over the heads of the group. Absent unless asked for.
};

struct WindowNeeds {
  bool usage = false;
  bool newest = false;
};

}  // namespace kvkeep
