// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How the newest queries of prompts score the tokens before them, in one layer, on a GPU. Same contract as
/// kvkeep::prompt_scores().

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct PromptScoresArguments {
  EvidenceArguments evidence;  ///< rows that end with the window's own slots; same length within a group, all longer
                               ///< than `window`. `limits` are not read
  const float* queries =
      nullptr;  ///< f32 [groups, Hq, window, D] from launch_prepare, which finds `window` or more of every group
  const float* log_sum_exp =
      nullptr;  ///< f32 [groups, Hq, window] as launch_window_attention takes it; null: the keys are read once more
  std::int32_t window = 32;  ///< W newest queries: their tokens are not scored
  std::int32_t pool = 7;     ///< tokens pooled over, odd; 1: none
  bool maximum = false;      ///< Pool::maximum, else Pool::average
  std::int64_t slots = 0;    ///< of all rows
  float* heads = nullptr;    ///< f32 [slots] at Row::first, as PromptScores::heads; null: not asked for
  float* tokens = nullptr;   ///< f32 [sum over the groups of length - W], as PromptScores::tokens; null: not asked for
  float* sums = nullptr;     ///< f32 [slots] at Row::first, as PromptScores::sums; null: not asked for
  const float* weights = nullptr;  ///< f32 [window] of the queries, oldest first; null: 1 each
  void* workspace = nullptr;       ///< prompt_scores_workspace_bytes(), aligned to 32
};

/// Average: 4 bytes per slot without `sums`, 8 per row, and window_attention_workspace_bytes(). Maximum: 4 bytes per
/// slot and query head of its group, sizeof(Row) + 8 for every (row, query head of its group), and
/// window_attention_workspace_bytes() of as many rows. Each part rounded up to 32.
[[nodiscard]] std::int64_t prompt_scores_workspace_bytes(const PromptScoresArguments& arguments);

/// Agrees with the CPU as launch_window_attention does: sums to about 2e-5 of themselves, 1e-4 with bf16 keys. From
/// equal sums, the scores are the CPU's bits. They depend only on the group's rows. Launches: 4, on matrix units 5; one
/// less if neither `heads` nor `tokens` are asked for, one more for `weights`, and for `sums` under `maximum`.
/// Cost: launch_window_attention for its `sum`, and one pass over the sums. The average of a sum is the sum of
/// averages: one sum per KV head is enough. A maximum is not: under `maximum` every query head is a row of its own over
/// the same keys. Throws InvalidArgument for a window below 1, no row longer than it, an even pool, rows that are not
/// whole groups, and a head size outside 1 to 256.
void launch_prompt_scores(const PromptScoresArguments& arguments, Stream stream);

struct TokenSumsArguments {
  const Row* rows = nullptr;  ///< [count], `heads` of each group next to each other, of one length
  std::int32_t count = 0;
  std::int32_t longest = 0;  ///< slots of the longest row, or more
  std::int32_t heads = 1;    ///< KV heads
  std::int32_t window = 0;   ///< newest slots that are left out
  std::int32_t sinks = 0;    ///< oldest tokens, which get infinity
  float weight = 1;
  const float* sums = nullptr;  ///< f32, each row's at Row::first
  float* tokens = nullptr;      ///< f32 flat over the groups, each [length - window]
};

/// `weight` times the sum over the KV heads, added up in ascending order, for the slots before the window: the bits of
/// kvkeep::sum_over_heads() with 1, of kvkeep::token_mass() with 1 / (heads * W). One launch. Cost: one pass over the
/// sums. Throws InvalidArgument for rows that are not whole groups.
void launch_token_sums(const TokenSumsArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
