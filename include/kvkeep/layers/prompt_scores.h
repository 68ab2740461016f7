#pragma once
/// Scores that the newest queries of a prompt give the tokens before them, in one layer. ASL ranks tokens by them, and
/// SnapKV keeps slots by them. Source: ASL, its observation window; SnapKV (eq. 3). Differs: stores nothing of size
/// [Hq, W, T]; each query is at its own position; fp32 throughout.

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
  Tensor heads;   ///< f32 [slots] flat over the rows: per KV head, sum over its query heads of the pooled sums over the
                  ///< window; 0 for the window's own slots
  Tensor tokens;  ///< f32 flat over the groups, each [length - W]: the same, summed over the KV heads
  Tensor sums;    ///< f32 [slots] attention_sum() of the window over all slots, not pooled: mean over the group's heads
};

/// Softmax of every window query over all slots that it sees, summed over the queries, pooled over only the slots
/// before the window, summed over query heads. Requires: rows end with the window's own slots; a group's rows have one
/// length. Throws InvalidArgument for a group with fewer than W queries or no slot before them, rows of unequal length,
/// an even pool, and what attention_sum() refuses. Cost: attention_sum(), with Pool::maximum once per query head. Rows
/// run in parallel; a row's result depends only on the row.
[[nodiscard]] PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options = {});

/// attention_sum() of the newest `window` queries of every row, which must end with their slots. Throws InvalidArgument
/// for a group with fewer queries, and as attention_sum() does.
[[nodiscard]] Tensor window_sums(const Evidence& evidence, std::int32_t window, std::span<const float> weights = {});

/// Sums over the KV heads of `heads`, f32 [slots], for the slots before the window: f32 flat over the groups, each
/// [length - window], whose rows have one length. PromptScores::tokens from PromptScores::heads.
[[nodiscard]] Tensor sum_over_heads(const Evidence& evidence, const Tensor& heads, std::int32_t window);

/// Share of the window's attention that each token before it drew: f32 flat over the groups, each [length - window];
/// mean over queries and heads. sums: PromptScores::sums of the same table. Cost: one pass over them.
[[nodiscard]] Tensor token_mass(const Evidence& evidence, const Tensor& sums, std::int32_t window);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/prompt_scores-inl.h"
#endif
