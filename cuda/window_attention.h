// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Attention of the newest queries over the cache, reduced while it is computed: nothing of size [Hq, W, T] is written.
/// Same contract as the CPU functions of the same names, except for keys that make a logit NaN or infinite: such a slot
/// gets nothing from that query, as if it were not there.
///
/// A row is cut into chunks of 512 slots, so that few long rows fill the machine; a block has one, or several where
/// rows are many. Statistics of whole chunks are combined in a fixed order. A row's bits depend only on the row, not on
/// the batch, the pages, or the machine's size. Slots with equal keys that the same queries see get equal bits.
///
/// A sink logit adds to the sum of a softmax where its parts are combined. Logits are capped in f32.
///
/// Products: f32 keys, a cap on logits, windows of fewer than 16 queries in a group, head sizes that are not a multiple
/// of 16 and max_logit run in f32, one chain of multiply-adds over the head dimension as on the CPU. Else on matrix
/// units, in the keys' own dtype (8 bits: f16), each query as the sum of two such numbers times a power of two, or as
/// one if 16 queries next to each other come in that dtype (after RoPE): for f16 and 8-bit keys as exact as f32, but
/// that matrix units may cut sums off, about 1e-6 of the partial sums, and that a share is a power of two of one
/// rounded exponent, which is off by 1e-7 of the logit; for bf16 keys a query that needs two keeps 16 bits, a logit is
/// off by about 4e-6 |q| |k| scale / sqrt(D), and a share by as much of itself. Shares below 1e-38 are 0.

#include "evidence.h"
#include "kvkeep/score/window.h"
#include "kvkeep/score/window_attention.h"
#include "stream.h"

namespace kvkeep::cuda {

struct WindowAttentionArguments {
  EvidenceArguments evidence;
  const RowWindow* windows = nullptr;  ///< [count], each of at most `window` queries
  std::int32_t window = 0;
  const float* queries = nullptr;      ///< f32 [groups, Hq, window, D] from launch_prepare; null: those of `evidence`
                                       ///< as they are, after RoPE, where window_attention_reads_views()
  const float* log_sum_exp = nullptr;  ///< f32 [groups, Hq, window] of the logits of every slot that the query sees,
                                       ///< and of the sink of its head, natural; null: the keys are read once more
  const float* weights = nullptr;      ///< f32 [window] of the queries, oldest first; a narrower window has the newest.
                                       ///< Only for `sum`; null: 1 each
  float* usage = nullptr;              ///< f32 [slots] at Row::first, as WindowAttention::usage; null: not asked for
  float* newest = nullptr;             ///< f32 [slots], as WindowAttention::newest
  float* sum = nullptr;                ///< f32 [slots], as attention_sum(); not together with usage
  void* workspace = nullptr;           ///< window_attention_workspace_bytes(), aligned to 32
};

/// 8 bytes for every (row, query head of its group, query) and part of the longest row: chunks of 512 slots, no more
/// than 32 of them. On matrix units besides, for every 16 queries of a row, 64 bytes for each component of the head
/// size, rounded up to 64, 128 or 256, and 272; and about 100 for every row. weighted: with `weights`, which take 4 for
/// every (row, query head of its group, query) where products run in f32.
[[nodiscard]] std::int64_t window_attention_workspace_bytes(const EvidenceArguments& evidence, std::int32_t window,
                                                            bool weighted = false);

/// True where attention multiplies on matrix units, which take 16-bit numbers: queries that come after RoPE need no
/// copy in f32 then.
[[nodiscard]] bool window_attention_reads_views(const EvidenceArguments& evidence, std::int32_t window);

/// Rows without a window get zeros. Cost: two passes over the keys, one if log_sum_exp is given. A pass reads every key
/// once on matrix units, where more queries than shared memory holds are brought again for every 256 slots (128 of
/// heads above 128 components) to sum up, and the keys for every part of them to take statistics; in f32 once for every
/// eight queries. Launches: one a pass, one for the queries on matrix units, and one for `weights`: a query's weight is
/// a shift of its log-sum-exp, so no other launch knows of it.
/// Throws InvalidArgument for a head size outside 1 to 256, for usage together with sum, for weights of anything else,
/// and for no `queries` where it cannot read those of `evidence`.
void launch_window_attention(const WindowAttentionArguments& arguments, Stream stream);

struct HistoryAttentionArguments {
  EvidenceArguments evidence;  ///< with limits under WindowReading::after_sinks
  const RowWindow* windows = nullptr;
  const float* queries = nullptr;  ///< as above, of reading.window queries
  WindowReading reading = {WindowReading::Kind::history};
  float* out = nullptr;       ///< f32 [slots] at Row::first
  void* workspace = nullptr;  ///< history_attention_workspace_bytes(), aligned to 32
};

/// window_attention_workspace_bytes(); under WindowReduce::worst twice those that it takes in f32.
[[nodiscard]] std::int64_t history_attention_workspace_bytes(const EvidenceArguments& evidence,
                                                             const WindowReading& reading);

/// kvkeep::history_attention() of what read_window() asks. Cost and launches: as launch_window_attention; under
/// max_logit the keys of more than 64 components are staged once for every query head. WindowReduce::worst runs in f32,
/// and brings `pool` / 2 slots on both sides of every 512; beyond a pool of 511 it reads the keys once for every query.
void launch_history_attention(const HistoryAttentionArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
