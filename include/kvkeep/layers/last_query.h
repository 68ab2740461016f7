#pragma once
/// Scores of a prompt's tokens from its last query, before any softmax. GemFilter chooses by them.
/// Source: GemFilter (Shi et al., Discovering the Gems in Early Layers), as in its code. Differs: fp32; among equal
/// scores the lower index is chosen first (the code leaves this open).

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/evidence.h"

namespace kvkeep {

/// Products of the newest query and every key, not scaled, summed over the query heads, averaged over `pool` neighbours
/// (always divided by `pool`): f32 flat over the groups, each [length]. Requires: scorable keys; a group's rows have
/// one length. Throws InvalidArgument for a group without a query, an even pool, a query that is not finite, and keys
/// that cannot be read. Cost: one read of the keys. Rows run in parallel.
[[nodiscard]] Tensor last_query_scores(const Evidence& evidence, std::int32_t pool = 5);

/// Its two halves: the products per KV head, f32 [slots] summed over the head's group, and what becomes of those of all
/// heads, which the second overwrites.
[[nodiscard]] Tensor last_query_products(const Evidence& evidence);
[[nodiscard]] Tensor pooled_over_heads(const Evidence& evidence, Tensor products, std::int32_t pool);

/// Indices of the `count` best of `scores`, ascending; all if there are no more. Ranked by ranks_of(). Cost:
/// ranks_of().
[[nodiscard]] std::vector<std::int32_t> best_tokens(std::span<const float> scores, std::int64_t count);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/last_query-inl.h"
#endif
