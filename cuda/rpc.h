#pragma once
/// RPC on a GPU, both styles. Same contract as `kvkeep::Rpc`.

#include "evidence.h"
#include "kvkeep/core/row_window.h"
#include "kvkeep/score/rpc.h"
#include "stream.h"

namespace kvkeep::cuda {

struct RpcArguments {
  EvidenceArguments evidence;          ///< with limits
  const RowWindow* windows = nullptr;  ///< [count], of launch_prepare with `options.window`, strict
  const float* queries = nullptr;      ///< f32 [groups, Hq, options.window, D] from launch_prepare
  RpcOptions options = {};
  std::int64_t slots = 0;     ///< sum of all lengths
  float* scores = nullptr;    ///< f32 [slots] at Row::first
  void* workspace = nullptr;  ///< rpc_workspace_bytes(), aligned to 32
};

/// window_attention_workspace_bytes(), 4 bytes per slot, and 12 per row.
[[nodiscard]] std::int64_t rpc_workspace_bytes(const RpcArguments& arguments);

/// Requires, with Heads::all: a (layer, sequence) is due as a whole, and its rows have one length; the CPU throws
/// Unsupported if they do not, and the host knows both. Cost: launch_history_attention with `options.window` queries,
/// and one pass over its result. Launches: 3, with Style::official 4, one more on matrix units. Throws InvalidArgument
/// for a head size outside 1 to 256, and for a pool that is not odd, or less than 1.
void launch_rpc(const RpcArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
