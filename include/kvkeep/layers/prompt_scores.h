#pragma once
/// What the newest queries of a prompt made of the tokens before them, in one layer: what ASL ranks tokens by, and
/// SnapKV keeps slots by. Source: ASL, its observation window; SnapKV (eq. 3). Differs: nothing of size [Hq, W, T] is
/// kept; each query at its own position; fp32 throughout.

#include "kvkeep/core/evidence.h"

namespace kvkeep {

struct PromptScoreOptions {
  enum class Pool : std::uint8_t {
    average,  ///< divided by `pool` at the borders too (published)
    maximum,
  };
  std::int32_t window = 32;  ///< W newest queries: their tokens are not scored
  std::int32_t pool = 7;     ///< tokens pooled over, odd; 1: none
  Pool kind = Pool::average;
};

struct PromptScores {
  Tensor heads;   ///< f32 [slots] flat over the rows: of each KV head, sum over its query heads of the pooled sums over
                  ///< the window; 0 for the window's own slots
  Tensor tokens;  ///< f32 flat over the groups, each [length - W]: the same, sum over the KV heads
  Tensor sums;    ///< f32 [slots] attention_sum() of the window over all slots, not pooled: mean over the group's heads
};

/// Softmax of every window query over all slots that it sees, sum over the queries, pooled over the slots before the
/// window alone, sum over query heads. Requires: rows that end with the window's own slots; a group's rows of one
/// length. Throws InvalidArgument for a group with fewer than W queries or no slot before them, rows of unequal length,
/// an even pool, and what attention_sum() refuses. Cost: attention_sum(), under Pool::maximum for every query head by
/// itself. Rows run in parallel; a row's result depends on nothing but the row.
[[nodiscard]] PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options = {});

/// Share of the window's attention that each token before it drew: f32 flat over the groups, each [length - window];
/// mean over queries and heads. sums: PromptScores::sums of the same table. Cost: one pass over them.
[[nodiscard]] Tensor token_mass(const Evidence& evidence, const Tensor& sums, std::int32_t window);

}  // namespace kvkeep
