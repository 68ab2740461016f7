// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a scorer may read of one layer of one sequence, as plain numbers: the input of the second implementations,
/// which share nothing with the library.

#include <cmath>
#include <limits>
#include <vector>

namespace oracle {

/// One KV head.
struct ScorerHead {
  int T = 0;                   ///< slots; heads of a sequence may hold different numbers
  std::vector<float> keys;     ///< [T][D] after RoPE, exactly the numbers in the cache
  std::vector<float> values;   ///< [T][Dv]
  std::vector<int> positions;  ///< [T] logical, ascending
  std::vector<float>
      tally;  ///< what an accumulating scorer gave the oldest slots at the last event; the other slots hold 0
  std::vector<float> given;  ///< [T] what the engine gave
  int budget = 1;            ///< slots that may stay
  bool due = false;          ///< T > budget; scores of other heads are not looked at
  int sinks = 0;             ///< oldest slots that stay whatever they score
  int recents = 0;           ///< newest slots that stay whatever they score

  bool guarded(int slot) const { return slot < sinks || slot >= T - recents; }
  const float* key(int slot, int D) const { return keys.data() + static_cast<long>(slot) * D; }
  const float* value(int slot, int Dv) const { return values.data() + static_cast<long>(slot) * Dv; }
};

struct ScorerInput {
  int layer = 0;                       ///< index in the model, counting layers without a cache
  int Hq = 1, Hkv = 1, D = 1, Dv = 1;  ///< query head h reads KV head h / (Hq / Hkv)
  double scale = 1;                    ///< factor on q.k
  double cap = 0;                      ///< c of logits c tanh(scale q.k / c); 0: none
  std::vector<double> sinks;           ///< [Hq] logits without a slot, beside those of every query head; empty: none
  std::vector<ScorerHead> heads;       ///< [Hkv]
  std::vector<int> query_positions;    ///< [N] ascending: the newest queries seen
  std::vector<double> queries;         ///< [Hq][N][D] after RoPE, oldest first
  std::vector<double> queries_pre;     ///< [Hq][N][D] before RoPE
  int P = 0;                           ///< position of the next token
  int prompt = 0;                      ///< positions [0, prompt) are the prompt's
  std::vector<double> inv_freq;        ///< [F]; components past 2 F are not rotated
  double attention_scaling = 1;        ///< factor on cos and sin
  bool interleaved = false;            ///< pair f is (x[2f], x[2f+1]); else (x[f], x[f+F])
  int hidden = 1;
  std::vector<float> output_projection;  ///< [hidden][Hq * Dv]

  /// A logit of two vectors whose product is `dot`.
  double logit(double dot) const { return cap > 0 ? cap * std::tanh(scale * dot / cap) : scale * dot; }
  /// The sink logit of a query head; minus infinity: none.
  double sink(int head) const {
    return sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[static_cast<std::size_t>(head)];
  }
  int N() const { return static_cast<int>(query_positions.size()); }
  int group() const { return Hq / Hkv; }
  const double* query(int head, int i) const { return queries.data() + (static_cast<long>(head) * N() + i) * D; }
  const double* query_pre(int head, int i) const {
    return queries_pre.data() + (static_cast<long>(head) * N() + i) * D;
  }
};

/// Scores of one layer of one sequence, [Hkv][T].
using ScorerOutput = std::vector<std::vector<double>>;

}  // namespace oracle
