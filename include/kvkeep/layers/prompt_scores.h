// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scores that the newest queries of a prompt give the tokens before them, in one layer. ASL ranks tokens by them, and
/// SnapKV keeps slots by them. Source: ASL, its observation window; SnapKV (eq. 3). Differs: stores nothing of size
/// [Hq, W, T]; each query is at its own position; fp32 throughout.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/score/evidence.h"

namespace kvkeep {

struct PromptScoreOptions {
  enum class Pool : std::uint8_t {
    average,  ///< divided by `pool` at the borders too (published)
    maximum,
  };
  enum class By : std::uint8_t {
    window,      ///< attention of the window's queries, pooled
    weighted,    ///< the same, each query with a weight, not pooled: window_sums() over all heads; `sinks` come first
    last_query,  ///< last_query_scores() with `pool`
  };
  std::int32_t window = 32;  ///< W newest queries: their tokens are not scored
  std::int32_t pool = 7;     ///< tokens pooled over, odd; 1: none
  Pool kind = Pool::average;
  By by = By::window;
  std::span<const float> weights = {};  ///< [W] of By::weighted, oldest first
  std::int32_t sinks = 0;               ///< By::weighted: oldest tokens, whose scores are infinite
};

struct PromptScores {
  Tensor heads = {};  ///< f32 [slots] flat over the rows: per KV head, sum over its query heads of the pooled sums over
                      ///< the window; 0 for the window's own slots
  Tensor tokens = {};  ///< f32 flat over the groups, each [length - W]: the same, summed over the KV heads
  Tensor sums = {};    ///< f32 [slots] attention_sum() of the window over all slots, not pooled: mean over the group's
                       ///< heads
};

/// Softmax of every window query over all slots that it sees, summed over the queries, pooled over only the slots
/// before the window, summed over query heads. Requires: rows end with the window's own slots; a group's rows have one
/// length. Throws InvalidArgument for a group with fewer than W queries or no slot before them, rows of unequal length,
/// an even pool, and what attention_sum() refuses. Cost: attention_sum(), with Pool::maximum once per query head. Rows
/// run in parallel; a row's result depends only on the row. Under By::weighted and By::last_query only `tokens` are
/// there, under the latter each [length]; it throws as window_sums() and last_query_scores() do.
[[nodiscard]] PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options = {});

/// attention_sum() of the newest `window` queries of every row, which must end with their slots. Throws InvalidArgument
/// for a group with fewer queries, and as attention_sum() does.
[[nodiscard]] Tensor window_sums(const Evidence& evidence, std::int32_t window, std::span<const float> weights = {});

/// Sums over the KV heads of `heads`, f32 [slots], for the slots before the window: f32 flat over the groups, each
/// [length - window], whose rows have one length; infinity for the oldest `sinks`. PromptScores::tokens from
/// PromptScores::heads.
[[nodiscard]] Tensor sum_over_heads(const Evidence& evidence, const Tensor& heads, std::int32_t window,
                                    std::int32_t sinks = 0);

/// Share of the window's attention that each token before it drew: f32 flat over the groups, each [length - window];
/// mean over queries and heads. sums: PromptScores::sums of the same table. Cost: one pass over them.
[[nodiscard]] Tensor token_mass(const Evidence& evidence, const Tensor& sums, std::int32_t window);

// Scores of a prompt's tokens from its last query, before any softmax. GemFilter chooses by them.
// Source: GemFilter (Shi et al., Discovering the Gems in Early Layers), as in its code. Differs: fp32; among equal
// scores the lower index is chosen first (the code leaves this open).

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

// Per-head top-p caches: each KV head keeps as many slots of a prompt as hold a share of its attention.
// Source: ASL's code (`cache_p`), not in its paper. Differs (`strict`): counts are rounded up to a multiple of 8, so
// that the requested mass is always held; among equal masses the larger slot is first. NaN ranks last and counts as no
// mass, so a row that holds less than the requested mass stays whole.

struct TopMassOptions {
  double mass = 0.9;                  ///< share of the window's attention that the slots that stay must hold, (0, 1]
  std::int32_t window = 32;           ///< W newest queries; their slots and slot 0 always stay
  Variant variant = Variant::strict;  ///< official: counts are rounded down, which can hold less than `mass`

  /// True if sums over the window that add up to so many mass_units() are enough.
  [[nodiscard]] KVKEEP_HD bool holds(std::uint64_t units) const {
    return mass_of_units(static_cast<std::int64_t>(units)) >= mass * window;
  }
  /// `count` of a row's slots as a multiple of 8, or all.
  [[nodiscard]] KVKEEP_HD std::int32_t rounded(std::int32_t count, std::int32_t length) const {
    constexpr std::int32_t kRounding = 8;
    if (variant == Variant::official) return count / kRounding * kRounding;
    const std::int32_t up = (count + kRounding - 1) / kRounding * kRounding;
    return up < length ? up : length;
  }
};

/// Slots of every row, ascending: slot 0, the window, and the fewest others that reach `mass`, by their mean share of
/// attention over the window's queries and the group's heads. Rows may end up unequal. Throws InvalidArgument for a
/// mass outside (0, 1], a window below 1 or with fewer queries, and what attention_sum() refuses. Cost:
/// attention_sum(), and a sort of each row. Rows run in parallel.
[[nodiscard]] KeepSet keep_top_mass(const Evidence& evidence, TopMassOptions options = {});

/// The same if attention_sum() of the window is already known: `sums`, f32 [slots]. `limits`: rows that are not due
/// keep every slot; null: all are.
[[nodiscard]] KeepSet keep_top_mass(const RowTable& table, const Tensor& sums, TopMassOptions options = {},
                                    const Limits* limits = nullptr);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/prompt_scores-inl.h"
#endif
