#pragma once
/// AMS on a GPU: mass, credit, segments, quotas and selection of every row in one launch. Same contract as
/// `kvkeep::MassSegmented`, and the same slots.

#include <cstddef>
#include <cstdint>

#include "evidence.h"
#include "kvkeep/allot/divide.h"
#include "kvkeep/score/window.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Everything on the device but the struct itself.
struct MassSegmentedArguments {
  MassSegmentedOptions options;
  Variant variant = Variant::strict;
  Padding padding;                     ///< official only
  const Row* rows = nullptr;           ///< [count]; `credit` is the old credit
  const RowLimit* limits = nullptr;    ///< [count]
  const RowWindow* windows = nullptr;  ///< [count] what the usage was made from
  const QueryView* queries = nullptr;  ///< [count / heads]
  std::int32_t count = 0;
  std::int32_t heads = 1;         ///< rows of a (layer, sequence), which are next to each other
  std::int32_t longest = 0;       ///< slots of the longest row
  std::int64_t slots_in_all = 0;  ///< sum of the rows' lengths
  const float* scores = nullptr;  ///< f32 flat
  float* mass = nullptr;          ///< f32 flat, in: usage; out: mass, mixed with credit unless `used` is given
  float* used = nullptr;          ///< f32 flat, out: after mixing; null: it replaces the mass
  float* credit = nullptr;        ///< f32 flat, out: new credit of every slot; null: without credit
  const std::int64_t* indptr =
      nullptr;  ///< i64 [count + 1] where each row's kept slots go: min(budget, length) for a due row, all for others
  std::int32_t* slots = nullptr;   ///< i32 [indptr[count]] out, ascending in each row
  std::byte* workspace = nullptr;  ///< mass_segmented_workspace_bytes(), aligned to 32
};

/// 13 bytes per slot, none where no row has more than 3072 slots, and for every row 64 bytes per segment that it can
/// fall into.
[[nodiscard]] std::size_t mass_segmented_workspace_bytes(const MassSegmentedOptions& options, std::int32_t count,
                                                         std::int32_t longest, std::int64_t slots_in_all);

/// One launch, one block per row; with `SuffixFill::max_global` two, since heads then look at each other. Decisions use
/// only integer arithmetic, or double arithmetic in one order: the same slots as the CPU, given the same usage and
/// scores. For that reason it is compiled without fused multiply-adds.
void launch_mass_segmented(const MassSegmentedArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
