// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How the last query of prompts scores their tokens, in one layer, on a GPU. Same contract as
/// kvkeep::last_query_scores().

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct LastQueryArguments {
  EvidenceArguments evidence;      ///< same length within a group. `limits` are not read
  const float* queries = nullptr;  ///< f32 [groups, Hq, 1, D] from launch_prepare
  std::int32_t pool = 5;           ///< tokens averaged over, odd; 1: none
  std::int64_t slots = 0;          ///< of all rows
  float* scores = nullptr;         ///< f32 flat over the groups, each [length]
  void* workspace = nullptr;       ///< last_query_workspace_bytes(), aligned to 32
};

/// 4 bytes for every token of a group.
[[nodiscard]] std::int64_t last_query_workspace_bytes(const LastQueryArguments& arguments);

/// The sum over a group's query heads of q . k is (sum of q) . k: one product per key, in f32. Agrees with the CPU to
/// about 1e-6 of |q| |k|; from equal products, averages are the CPU's bits. A score depends only on the group's rows.
/// Launches: 2. Cost: one pass over the keys. Throws InvalidArgument for an even pool, rows that are not whole groups,
/// and a head size outside 1 to 256.
void launch_last_query(const LastQueryArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
