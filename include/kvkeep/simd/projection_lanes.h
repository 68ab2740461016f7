#pragma once
/// Not part of the interface. Vectorised inner loop of value norms under the output projection; panels as in
/// attention_lanes.h.

#include <cstdint>

namespace kvkeep::cpu {

/// sums[t][half] += |x[t]|, folded to one vector per slot. x: [slots, width]; sums: [slots, width / 2].
void panel_sizes(const float* x, std::int64_t slots, float* sums);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/projection_lanes-inl.h"
#endif
