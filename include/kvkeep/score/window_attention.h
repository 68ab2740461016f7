#pragma once
/// Attention of the newest queries over the cache, reduced while it is computed: nothing of size [Hq, W, T] is kept.

#include <cstdint>
#include <vector>

#include "kvkeep/core/evidence.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/window.h"

namespace kvkeep {

/// Window of every row: W = min(window, seen, length - 1, budget) and the suffix from the oldest window query's position on (strict), or the published
/// W = max(1, min(window, seen - 1, length - 1, budget)) with a suffix of the last W slots (official). Rows that are not due get W = 0.
[[nodiscard]] std::vector<RowWindow> row_windows(const Evidence& evidence, const Limits& limits, std::int32_t window, bool official);

/// Order: a query sees the slots whose position is at most its own. Queries handed over before RoPE are turned at their own positions.
/// Requires: evidence.spec.check() passed; every row's positions set, each group's queries set where its windows are not 0.
/// Throws: InvalidArgument for a query that is not finite or of a dtype that cannot be read; Unsupported for a device without kernels.
/// Cost: 2 * Hq * W * T * D flop and one exponential per (query head, query, slot) a layer. Workspace per thread: 9 vectors of the machine (36 floats with SSE4,
/// 72 with AVX2, 144 with AVX-512) for each slot of the longest row. Rows run in parallel; a row's result depends on nothing but the row: not on the batch, the
/// number of threads, or where equal keys lie.
/// Source: the observation window of SnapKV (eq. 3) and AMS. Differs: each query at its own logical position, fp32 throughout.
[[nodiscard]] WindowAttention window_attention(const Evidence& evidence, std::vector<RowWindow> windows, WindowNeeds needs);

}  // namespace kvkeep
