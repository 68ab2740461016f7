#pragma once
/// The result of window attention: how the newest queries of each row attend. Read by scorers and allocators.

#include <vector>

#include "kvkeep/core/row_window.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Reductions of softmax(scale * q.k + causal mask) over the newest `queries` queries of each row, over all slots of
/// the row. fp32.
struct WindowAttention {
  std::vector<RowWindow> windows;  ///< [rows]
  Tensor usage;   ///< f32 [slots] mean over window queries and the heads of the group; for suffix slots, mean over the
                  ///< strictly later queries, 0 if there are none. Absent unless requested
  Tensor newest;  ///< f32 [slots] the newest query's probabilities, mean over the heads of the group. Absent unless
                  ///< requested
  std::vector<float> tops = {};  ///< [rows] where ranks hold a part of the heads, what an allocator that says
                                 ///< AcrossHeads::tops must know of all of them; else empty
};

struct WindowNeeds {
  bool usage = false;
  bool newest = false;
};

}  // namespace kvkeep
