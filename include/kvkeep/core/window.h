#pragma once
/// What the newest queries made of each row: the outcome of window attention, read by scorers and allocators.

#include <vector>

#include "kvkeep/core/row_window.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Reductions of softmax(scale * q.k + causal mask) over the newest `queries` queries of each row, over all slots of
/// the row. fp32.
struct WindowAttention {
  std::vector<RowWindow> windows;  ///< [rows]
  Tensor usage;  ///< f32 [slots] mean over window queries and the heads of the group; on the suffix the mean over the
                 ///< strictly later queries, 0 where there is none. Absent unless asked for.
  Tensor newest;  ///< f32 [slots] the newest query's probabilities, mean over the heads of the group. Absent unless
                  ///< asked for.
};

struct WindowNeeds {
  bool usage = false;
  bool newest = false;
};

}  // namespace kvkeep
