// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A second implementation of one eviction event, for tests only. It is slow and plain on purpose: loops over
/// std::vector<double>, no tensors, nothing shared with the library. Where both agree on thousands of random events, a
/// mistake has to be made twice to stay.
///
/// One event = one layer and one sequence; every KV head is decided alone (except where `max_global` says otherwise).

#include <limits>
#include <string>
#include <vector>

namespace oracle {

/// Usage of zero still gets this much before it is normalised.
inline constexpr double kUsageFloor = 1e-12;

struct Options {
  std::string policy = "ams-tova";       ///< streaming, tova, ams-tova; another ams-<scorer> only with its scores given
  std::string variant = "strict";        ///< strict, official
  std::string segments = "mass";         ///< mass, fixed:<n>, none
  std::string quotas = "mass";           ///< mass, equal, length, raw_mass
  std::string suffix_fill = "max_head";  ///< max_head, max_global, causal_mean, exclude
  int budget = 1;
  int sink = 0;
  int recent = 0;  ///< below 0: not stated
  int window = 32;
  int min_segment = 32;
  int max_segment = 1024;
  int min_quota = 8;
  int pool = 5;  ///< odd; 1 or less: no pooling
  double segment_mass = 0.02;
  double credit_decay = 0.8;
  double credit_mix = 0.7;
  double coverage = 1;  ///< strict only
  bool coverage_auto =
      false;  ///< strict only: floors of all segments, and the best of the row beside them; `coverage` is not read then
  bool protected_mass = true;  ///< strict only; false: only slots that may be dropped have mass for segments and quotas
  bool credit = true;
  bool tova_heads_all = true;  ///< TOVA averages over all query heads, or over the heads of the group
};

/// A quarter of the budget where nobody states it, but 1 to 32.
inline int newest(const Options& options) {
  if (options.recent >= 0) return options.recent;
  return options.budget >= 128 ? 32 : options.budget < 4 ? 1 : options.budget / 4;
}

struct Sequence {
  int T = 0;    ///< slots
  int Hq = 1;   ///< query heads
  int Hkv = 1;  ///< KV heads; query head h reads KV head h / (Hq / Hkv)
  int D = 1;    ///< head dimension
  double scale = 1;
  std::vector<float> keys;                  ///< [Hkv][T][D]
  std::vector<float> queries;               ///< [Hq][N][D] after RoPE, oldest first
  std::vector<int> positions;               ///< [Hkv][T] logical, ascending
  std::vector<int> query_positions;         ///< [N]
  std::vector<std::vector<double>> credit;  ///< per KV head, for the first slots; empty: none yet
  double cap = 0;                           ///< as in ScorerInput
  std::vector<double> sinks = {};           ///< [Hq] the same
  std::vector<int> pinned = {};             ///< positions that stay, in no order; strict only

  int queries_seen() const { return static_cast<int>(query_positions.size()); }
};

/// The smallest difference a decision hung on, so that a test knows when float arithmetic may decide otherwise.
struct Margin {
  double smallest = std::numeric_limits<double>::infinity();
  void note(double gap);
};

/// What one KV head keeps. A row that keeps everything has only `slots`, and its credit as it came.
struct Row {
  std::vector<int> slots;
  std::vector<double> scores;
  std::vector<double> mass, mass_used;      ///< AMS only
  std::vector<double> credit, credit_kept;  ///< after the update, before and after compaction; with `credit` only
  std::vector<int> segment_ends, quotas;    ///< AMS only
  double margin = std::numeric_limits<double>::infinity();  ///< see near_tie
};

/// Slots [0, sinks), [T - recents, T) and pinned ones stay whatever they score.
struct MustKeep {
  int sinks = 0;
  int recents = 0;
  std::vector<bool> pinned;  ///< [T], or empty: none
  int count() const {
    int held = sinks + recents;
    const int T = static_cast<int>(pinned.size());
    for (int t = sinks; t < T - recents; ++t) held += pinned[static_cast<size_t>(t)];
    return held;
  }
  bool holds(int slot, int T) const {
    return slot < sinks || slot >= T - recents || (!pinned.empty() && pinned[static_cast<size_t>(slot)]);
  }
};

/// The whole event, one row per KV head.
std::vector<Row> event(const Options& options, const Sequence& sequence);

/// The same with scores from elsewhere, [Hkv][T].
std::vector<Row> event_with_scores(const Options& options, const Sequence& sequence,
                                   const std::vector<std::vector<double>>& scores);

/// True where float arithmetic may rightly decide otherwise: some comparison that mattered was decided by less than
/// `tolerance`, taken relative to the size of the dot products. Ties between equal numbers do not count, for they are
/// equal in any arithmetic.
bool near_tie(const std::vector<Row>& rows, double tolerance = 2e-6);

// The stages, in order.

/// TOVA, [Hkv][T]; without queries the slot number (recency).
std::vector<std::vector<double>> tova_scores(const Options& options, const Sequence& sequence);

/// Window attention, pooling, group mean and suffix fill, [Hkv][T]; zeros without queries.
std::vector<std::vector<double>> usage(const Options& options, const Sequence& sequence);

/// max(x, 0) + 1e-12, divided by its sum.
std::vector<double> normalised(const std::vector<double>& values);

/// Mass that segments and quotas follow: all of it, or only that of slots that may be dropped.
std::vector<double> competing(const Options& options, std::vector<double> used, const MustKeep& must);

struct Masses {
  std::vector<double> mass;    ///< normalised usage
  std::vector<double> used;    ///< mixed with credit: what segments and quotas follow
  std::vector<double> credit;  ///< after the update; empty when credit is off
};

/// EMA credit of one head.
Masses masses(const Options& options, const std::vector<double>& usage, const std::vector<double>& given_credit);

/// `pinned`: [T], or empty. Recents shrink to what sinks and pinned slots leave of the budget.
MustKeep must_keep(const Options& options, int T, const std::vector<bool>& pinned = {});

/// One past the last slot of each segment, ascending; the last is T.
std::vector<int> segment_ends(const Options& options, const std::vector<double>& mass_used, Margin* margin = nullptr);

/// How many of the budget go through segments: all of it, unless `coverage` says less. Not for `coverage_auto`, where
/// it follows from the segments.
int segment_budget(const Options& options, const MustKeep& must);

/// Slots each segment may keep; they add up to `budget`, which is below T. With `coverage_auto` these are the floors,
/// as far as all of the budget goes.
std::vector<int> quotas(const Options& options, const std::vector<double>& mass_used, const std::vector<int>& ends,
                        int budget, const MustKeep& must, Margin* margin = nullptr);

/// The slots that stay, ascending; exactly `options.budget`, which is below T.
std::vector<int> select(const Options& options, const std::vector<double>& scores, const std::vector<int>& ends,
                        const std::vector<int>& quotas, const MustKeep& must, Margin* margin = nullptr);

/// The order of every selection: higher score first, then the larger slot; NaN is -infinity.
bool ranks_before(const std::vector<double>& scores, int a, int b);

}  // namespace oracle
