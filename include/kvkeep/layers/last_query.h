#pragma once
/// What the last query of a prompt makes of its tokens, before any softmax: what GemFilter chooses by.
/// Source: GemFilter (Shi et al., Discovering the Gems in Early Layers), as its code does it. Differs: fp32; equal
/// scores choose the lower index first (the code leaves them open).

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/evidence.h"

namespace kvkeep {

/// Products of the newest query and every key, not scaled, sum over the query heads, averaged over `pool` neighbours
/// (always divided by `pool`): f32 flat over the groups, each [length]. Requires: keys that are scorable; a group's
/// rows of one length. Throws InvalidArgument for a group without a query, an even pool, a query that is not finite,
/// and keys that cannot be read. Cost: one reading of the keys. Rows run in parallel.
[[nodiscard]] Tensor last_query_scores(const Evidence& evidence, std::int32_t pool = 5);

/// The `count` best of `scores`, ascending; all where there are no more. Ordered as ranks_of(). Cost: ranks_of().
[[nodiscard]] std::vector<std::int32_t> best_tokens(std::span<const float> scores, std::int64_t count);

}  // namespace kvkeep
