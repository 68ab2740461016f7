// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Attention of the newest queries over the cache, reduced while it is computed: nothing of size [Hq, W, T] is kept.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/limits.h"
#include "kvkeep/score/evidence.h"
#include "kvkeep/score/window.h"

namespace kvkeep {

/// Window of every row: W = min(window, seen, length - 1, budget) and the suffix from the oldest window query's
/// position on (strict), or the published W = max(1, min(window, seen - 1, length - 1, budget)) with a suffix of the
/// last W slots (official). Rows that are not due get W = 0.
[[nodiscard]] std::vector<RowWindow> row_windows(const Evidence& evidence, const Limits& limits, std::int32_t window,
                                                 bool official);

/// Order: a query sees the slots whose position is at most its own, and the sink logit of its head (LayerSpec::sinks).
/// Logits are capped as ModelSpec::logit_cap says. Queries passed before RoPE are rotated at their own
/// positions. Requires: evidence.spec.check() passed; every row's positions set, each group's queries set if its
/// windows are not 0. Throws: InvalidArgument for a query that is not finite or whose dtype cannot be read; Unsupported
/// for a device without kernels. Cost: 2 * Hq * W * T * D flop and one exponential per (query head, query, slot), per
/// layer; the G * W queries of a KV head count as whole panels. Workspace per thread: window_attention_workspace() of
/// the longest row. Rows run in parallel; a row's result depends only on the row, not on the batch, the number of
/// threads, or where equal keys are stored. Source: the observation window of SnapKV (eq. 3) and AMS. Differs: each
/// query at its own logical position, fp32 throughout.
[[nodiscard]] WindowAttention window_attention(const Evidence& evidence, std::vector<RowWindow> windows,
                                               WindowNeeds needs);

/// Attention that each slot got from its row's window queries: f32 [slots], sum over the queries (each sees what
/// window_attention lets it see, its own slot included) of the mean over the heads of the group. Rows without a window
/// get zeros; a window's `history` is ignored. Otherwise as window_attention. `weights`: one per query of the widest
/// window, oldest first; narrower windows take the newest; empty: 1 each.
[[nodiscard]] Tensor attention_sum(const Evidence& evidence, std::span<const RowWindow> windows,
                                   std::span<const float> weights = {});

/// Upper bound on the bytes of workspace per thread of window_attention and attention_sum for rows of `slots` slots and
/// windows of `queries`: 4 * (G * W * D + p * D * w + 48 * D + (3 * p + 2) * w + (p * w + v) * slots + W), in panels of
/// w queries: one machine vector, of at most 8 floats, if the G * W queries fit (v = w, p = 1), else two (v = w / 2; p
/// = 1 if they fit, else 2): 8 floats with SSE4, 16 with AVX2, 32 with AVX-512.
[[nodiscard]] std::int64_t window_attention_workspace(const ModelSpec& spec, std::int32_t slots, std::int32_t queries);

/// How the query heads of a KV head are combined.
enum class GroupReduce : std::uint8_t {
  mean_prob,  ///< a softmax for each query head, then their mean
  max_logit,  ///< the largest logit of the group, then one softmax
};

/// How the window's queries are combined.
enum class WindowReduce : std::uint8_t {
  mean,   ///< over queries and, with GroupReduce::mean_prob, query heads
  worst,  ///< each query's shares of all that it sees, in the history averaged over `pool` neighbours and brought back
          ///< to the sum they had there; the largest over queries and query heads. Source: the code of DefensiveKV,
          ///< worst-case risk estimation
};

struct HistoryOptions {
  GroupReduce group = GroupReduce::mean_prob;
  std::int32_t newest_counts = 1;  ///< WindowReduce::mean: how often the newest query counts
  WindowReduce window = WindowReduce::mean;
  std::int32_t pool = 1;  ///< WindowReduce::worst: slots averaged over, odd; 1: none
};

/// What a scorer reads of a row's newest queries: one number per slot.
struct WindowReading {
  enum class Kind : std::uint8_t {
    newest,   ///< WindowAttention::newest
    usage,    ///< WindowAttention::usage
    history,  ///< history_attention(). A query that counts n times takes the place of the n - 1 oldest, but for one
    sum,      ///< attention_sum() of the queries that came after the last event, of every row, due or not
  };
  Kind kind = Kind::usage;
  std::int32_t window = 1;  ///< newest queries, at most
  HistoryOptions history = {};
  bool after_sinks = false;  ///< Kind::history: it begins after the protected oldest slots
};

/// Slice, then softmax: every window query's softmax over the slots [first, history) of its row alone, reduced over the
/// group and over the window's queries; f32 [slots], 0 outside [first, history) and in rows whose window is empty.
/// Means therefore sum to 1 over [first, history), or less where sink logits join the softmax: under max_logit the
/// largest of the group. WindowReduce::worst takes the softmax over [first, length) instead.
/// `first`: [rows], or empty for 0 everywhere. A window's history that extends past the slots its oldest query sees
/// ends there. Requires, throws: as window_attention. Cost: 2 * Hq * W * T
/// * D flop and one exponential per (query head, query, slot), with max_logit per (query, slot) of each KV head, per
/// layer. Workspace per thread: history_attention_workspace() of the longest history. Rows run in parallel; a row's
/// result depends only on the row. Source: R-KV (max_logit), RPC (mean_prob). Differs: each query at its own logical
/// position, fp32 throughout.
[[nodiscard]] Tensor history_attention(const Evidence& evidence, std::span<const RowWindow> windows,
                                       HistoryOptions options = {}, std::span<const std::int32_t> first = {});

struct ReadWindow {
  std::vector<RowWindow> windows;  ///< [rows] with all their queries
  Tensor attention;                ///< f32 [slots] the caller's own
};

/// What `reading` says, of every row. Computes nothing if `seen` has it, of the same windows. Throws and costs as the
/// function that the kind names.
[[nodiscard]] ReadWindow read_window(const Evidence& evidence, const Limits& limits, const WindowAttention& seen,
                                     const WindowReading& reading);

/// Bytes of workspace per thread of history_attention for rows with `slots` slots between first and history
/// (WindowReduce::worst: and length) and windows of `queries`: 4 * (G * W * D + p * D * w + 48 * D + (3 * p + 2) * w +
/// (p * w + v) * slots), with max_logit 4 * w * slots more; p, w and v are as in window_attention_workspace.
[[nodiscard]] std::int64_t history_attention_workspace(const ModelSpec& spec, std::int32_t slots, std::int32_t queries,
                                                       GroupReduce group);

}  // namespace kvkeep

namespace kvkeep::cpu {

// Not part of the interface. Queries of a window as the reductions of window attention read them: f32, rotated at
// their own positions, times the softmax scale.

/// True when both hold queries at the same positions, as the layers of one sequence do.
[[nodiscard]] bool same_positions(const QueryView& a, const QueryView& b);

/// cos and sin of the positions of some tokens of one sequence, in layers of one RoPE; none if it does not turn, or the
/// queries are as they should be.
struct Turns {
  const RopeSpec* rope = nullptr;
  std::int32_t window = 0;
  std::vector<float> cosines = {}, sines = {};  ///< [window, F], newest query last

  /// For `tokens` positions, given by position(i).
  template <class Position>
  void fill(std::int32_t tokens, const Position& position) {
    const std::size_t pairs = rope->inv_freq.size();
    window = tokens;
    cosines.resize(static_cast<std::size_t>(tokens) * pairs);
    sines.resize(cosines.size());
    for (std::int32_t i = 0; i < tokens; ++i) {
      const std::size_t first = static_cast<std::size_t>(i) * pairs;
      rope_at(*rope, position(i), cosines.data() + first, sines.data() + first);
    }
  }
  /// Turns a query of the i-th token.
  void apply(std::int64_t i, float* x) const {
    if (cosines.empty()) return;
    const auto pairs = static_cast<std::int64_t>(rope->inv_freq.size());
    rope_rotate(rope->style, pairs, cosines.data() + i * pairs, sines.data() + i * pairs, x);
  }
};

/// Turns of all groups, each as wide as the widest window of its rows. Layers of a sequence that turn alike share
/// them, because its queries are at the same positions in each.
class WindowTurns {
 public:
  WindowTurns(const Evidence& evidence, std::span<const RowWindow> windows);
  [[nodiscard]] const Turns& of(std::size_t group) const { return turns_[index_[group]]; }

 private:
  std::vector<Turns> turns_;
  std::vector<std::size_t> index_;  ///< [groups] into turns_
};

/// Queries of the group of `head`, [G * window, D] f32, newest `window` of the view, query head by query head.
/// Throws InvalidArgument for a query that is not finite or of a dtype that cannot be read.
void gather_queries(const Evidence& evidence, const QueryView& view, std::int32_t head, std::int32_t window,
                    const Turns& turns, float* out);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/score/window_attention-inl.h"
#endif
