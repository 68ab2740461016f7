#pragma once
/// H2O on a GPU. Same contract as `kvkeep::H2O`.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct H2OArguments {
  EvidenceArguments
      evidence;  ///< Row::tally on the device. `limits` are not read: rows that are not due are updated too
  const float* queries = nullptr;  ///< f32 [groups, Hq, window, D] from launch_prepare
  std::int32_t window = 512;       ///< H2OOptions::window
  float* scores = nullptr;         ///< f32 [slots] at Row::first
  void* workspace = nullptr;       ///< h2o_workspace_bytes(), aligned to 32
};

/// window_attention_workspace_bytes(), and 8 bytes per row. It grows with `window` times the query heads: a caller
/// whose longest run of new tokens is shorter passes that.
[[nodiscard]] std::int64_t h2o_workspace_bytes(const H2OArguments& arguments);

/// A row's window is the queries that came after the last event, as the slots after its tally show.
/// Cost: launch_window_attention over those queries, for its `sum`, and one pass over the tallies. Launches: 4, on
/// matrix units 5. Throws InvalidArgument for a head size outside 1 to 256.
void launch_h2o(const H2OArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
