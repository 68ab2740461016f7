// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What an event needs before anything is scored, in one launch: positions that came since the last event, pinned
/// slots and the window of every row, and its queries as the attention kernels read them. No LibTorch in here.

#include "evidence.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/score/window.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Consecutive logical positions.
struct PositionRun {
  std::int32_t position = 0;
  std::int32_t count = 0;
};

/// Positions of the newest slots of every row of one (layer, sequence): tokens that came after the last event, which no
/// row has dropped yet.
struct NewestPositions {
  const PositionRun* runs = nullptr;  ///< ascending
  std::int32_t count = 0;             ///< runs
  std::int32_t slots = 0;             ///< sum of their counts
};

/// What is pinned in one (layer, sequence).
struct PinnedSpans {
  const PositionSpan* spans = nullptr;  ///< ascending, disjoint
  std::int32_t count = 0;
  SlotRange* ranges = nullptr;  ///< [kv_heads, count] written
};

struct PrepareArguments {
  EvidenceArguments evidence;
  const PinnedSpans* pins = nullptr;  ///< [groups]; null: nothing is pinned
  const RowLimit* given = nullptr;    ///< [count] with `pins`: limits that know nothing of them
  RowLimit* settled = nullptr;        ///< [count] with `pins`: those that do, Evidence::limits
  const NewestPositions* newest =
      nullptr;  ///< [groups] written to the end of Row::positions, which is the keeper's own; null: already there

  std::int32_t window = 0;       ///< W: at most that many newest queries
  bool official = false;         ///< of the windows
  bool fresh = false;            ///< these are fresh_window_of() the rows, due or not
  RowWindow* windows = nullptr;  ///< [count] as kvkeep::row_windows(); null: not asked for. Needs limits, if not fresh

  float* queries = nullptr;  ///< f32 [groups, Hq, W, D], turned at their own positions, newest last; zeros if a group
                             ///< holds fewer; null: not asked for
  float* normalisers = nullptr;  ///< f32 [groups, Hq, W] log-sum-exps of the same queries; null: not wanted. Every
                                 ///< query that a window may have must have its own
  bool turn = false;             ///< queries come before RoPE: EvidenceArguments::ropes turn them
};

/// Phases in double, one sine-cosine pair for every (group, query, pair). A query that is not finite stays so: the
/// device cannot tell the host. Throws InvalidArgument for a head size outside 1 to 256, queries that are turned
/// without `ropes`, and queries that cannot be read. Requires: no more pairs than half of the head size.
void launch_prepare(const PrepareArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
