// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A second implementation of what the newest queries make of a sequence, for tests only: plain loops in double,
/// nothing shared with the library.

#include <vector>

#include "event_oracle.h"
#include "scorer_input.h"

namespace oracle {

/// One KV head of a sequence under its newest `window` queries.
struct HistoryQuestion {
  int window = 1;
  int first = 0;  ///< slots [first, history) take part
  int history = 0;
  bool max_logit = false;  ///< largest logit of the group, then softmax; else softmax per query head, then mean
  int newest_counts = 1;   ///< how often the newest query counts
};

/// Softmax over [first, history) only, mean over the group and the queries; [T], 0 elsewhere.
std::vector<double> history_attention(const Sequence& sequence, int kv_head, const HistoryQuestion& question);

/// Slots of a KV head older than the oldest of the newest `window` queries.
int history_of(const Sequence& sequence, int kv_head, int window);

/// Sum over the newest `window` queries of their attention to all slots they see, mean over the group; [T].
std::vector<double> attention_sum(const Sequence& sequence, int kv_head, int window);

/// Pooling over adjacent slots: zeros outside and always divided by `kernel`, or the maximum of what is inside.
std::vector<double> average_pooled(const std::vector<double>& values, int kernel);
std::vector<double> max_pooled(const std::vector<double>& values, int kernel);

struct SnapKVQuestion {
  int window = 64, pool = 5;
  bool rkv = false;  ///< largest logit of the group, softmax over the history alone, max pool
};
ScorerOutput snapkv(const ScorerInput& input, const SnapKVQuestion& question);

struct RpcQuestion {
  int window = 32, pool = 7;
  bool official = false;  ///< one query fewer, the newest twice, the guarded oldest slots outside
  bool all_heads = false;
};
ScorerOutput rpc(const ScorerInput& input, const RpcQuestion& question);

/// DefensiveKV: the largest share over queries and heads, each pooled and summing to 1, at least the mean of the row.
ScorerOutput defensive(const ScorerInput& input, int window, int pool);

/// The tally, and the attention of all queries since, `window` at most.
ScorerOutput h2o(const ScorerInput& input, int window);

}  // namespace oracle
