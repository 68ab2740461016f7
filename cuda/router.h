// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A learned router's numbers on a GPU: kvkeep::Router. Of the spans that fold, and of the queries that read them. No
/// LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "fold.h"
#include "memory_attention.h"
#include "stream.h"

namespace kvkeep::cuda {

/// The routers of all layers, on the device.
struct RouterWeights {
  const float* projections = nullptr;  ///< f32 [layers, Hq, d', D]
  std::int32_t query_heads = 1;        ///< Hq
  std::int32_t inner = 1;              ///< d'

  /// f32 [d', D] of one query head.
  [[nodiscard]] KVKEEP_HD const float* projection(std::int32_t layer, std::int32_t head, std::int32_t dim) const {
    return projections + (std::int64_t{layer} * query_heads + head) * inner * dim;
  }
};

/// Shared memory of a block of launch_router_queries(), in bytes: grows with d'.
[[nodiscard]] std::size_t router_shared_bytes(std::int32_t inner, std::int32_t dim);

/// Writes FoldingRow::norms of the spans `first` to `first + spans - 1`, as Router::norms() gives them, to 1e-6 of
/// each: one over the length of their coarse keys' projections, for `group` query heads. After launch_fold_spans() with
/// the same arguments. 1 launch, one block per span. Cost: group d' D products a span. Throws InvalidArgument as that
/// does, and for fewer than 1 query head or number of a projection.
void launch_router_norms(const FoldArguments& fold, const RouterWeights& router, std::int32_t group, Stream stream);

/// Writes to `to`, f32 [tokens, Hq, D], what relevance multiplies with coarse keys: W^T W q of every query and head of
/// a layer. 1 launch. Cost: 2 d' D products a query and head; the weights of a head once for four tokens. Throws
/// InvalidArgument as launch_memory_route(), and for fewer than 1 number of a projection.
void launch_router_queries(const MemoryAttentionArguments& memory, const RouterWeights& router, std::int32_t layer,
                           float* to, Stream stream);

}  // namespace kvkeep::cuda
