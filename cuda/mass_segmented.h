// SPDX-License-Identifier: Apache-2.0
#pragma once
/// AMS on a GPU: mass, credit, segments, quotas and selection of every row in one launch. Same contract as
/// `kvkeep::MassSegmented`, and the same slots.

#include <cstddef>

#include "allotted_rows.h"
#include "kvkeep/allot/divide.h"
#include "kvkeep/core/query_view.h"
#include "kvkeep/score/window.h"

namespace kvkeep::cuda {

/// Row::credit is the old credit.
struct MassSegmentedArguments : AllottedRows {
  MassSegmentedOptions options = {};
  Variant variant = Variant::strict;
  Padding padding = {};                ///< official only
  const RowWindow* windows = nullptr;  ///< [count] what the usage was made from
  const QueryView* queries = nullptr;  ///< [count / heads]
  std::int32_t heads = 1;              ///< rows of a (layer, sequence)
  std::int64_t slots_in_all = 0;       ///< sum of the rows' lengths
  float* mass = nullptr;               ///< f32 flat, in: usage; out: mass, mixed with credit unless `used` is given
  float* used = nullptr;               ///< f32 flat, out: after mixing; null: it replaces the mass
  float* credit = nullptr;             ///< f32 flat, out: new credit of every slot; null: without credit
  std::int32_t* ends = nullptr;    ///< i32 [count, most_ends] out: one past each segment's last slot, then the row's
                                   ///< length; of rows that are due. null: not wanted
  std::int64_t most_ends = 0;      ///< most_segments() of the longest row
  std::byte* workspace = nullptr;  ///< mass_segmented_workspace_bytes(), aligned to 32
};

/// 12 bytes per slot, none where no row has more than 3072 slots or 128 segments, and for every row 40 bytes per
/// segment that it can fall into.
[[nodiscard]] std::size_t mass_segmented_workspace_bytes(const MassSegmentedOptions& options, std::int32_t count,
                                                         std::int32_t longest, std::int64_t slots_in_all);

/// One launch, one block per row; with `SuffixFill::max_global` two, since heads then look at each other. Decisions use
/// only integer arithmetic, or double arithmetic in one order: the same slots as the CPU, given the same usage and
/// scores. For that reason it is compiled without fused multiply-adds.
void launch_mass_segmented(const MassSegmentedArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
