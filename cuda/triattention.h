// SPDX-License-Identifier: Apache-2.0
#pragma once
/// TriAttention on a GPU. Same contract as `kvkeep::TriAttention`.

#include "evidence.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/score/triattention.h"
#include "stream.h"

namespace kvkeep::cuda {

struct TriAttentionArguments {
  EvidenceArguments evidence;  ///< `group`: query heads of the calibration for each KV head; `ropes` of F = D / 2
                               ///< pairs; `queries` and `scale` are not read
  const std::int32_t* next_positions = nullptr;  ///< i32 [count / kv_heads] RowGroup::next_position
  const float* q_mean =
      nullptr;  ///< f32 [layers, Hq, F, 2] real and imaginary part; Row::layer counts its layers, Hq = kv_heads * group
  const float* q_abs_mean = nullptr;  ///< f32 [layers, Hq, F]
  TriAttentionOptions options = {};
  std::int64_t slots = 0;     ///< sum of all lengths
  float* scores = nullptr;    ///< f32 [slots] at Row::first
  void* workspace = nullptr;  ///< triattention_workspace_bytes(), aligned to 32
};

/// 4 G bytes per slot, and for every (row, query head) 8 bytes and its columns: 4 Fp (2 offsets + 1) bytes, Fp = F
/// rounded up to a multiple of 4, offsets 1 for the mean; 16 F offsets bytes for the turns of every group.
[[nodiscard]] std::int64_t triattention_workspace_bytes(const TriAttentionArguments& arguments);

/// Columns are made in double; keys are read once, whatever the aggregate. Throws InvalidArgument for a head size that
/// is odd or beyond 256, missing `ropes`, and offset_max below 1.
void launch_triattention(const TriAttentionArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
