#pragma once
/// SnapKV on a GPU, both styles. Same contract as `kvkeep::SnapKV`.

#include "evidence.h"
#include "kvkeep/core/row_window.h"
#include "stream.h"

namespace kvkeep::cuda {

struct SnapKVArguments {
  EvidenceArguments evidence;
  const RowWindow* windows = nullptr;  ///< [count], of launch_prepare with the scorer's own window, strict
  const float* attention = nullptr;    ///< f32 [slots]: usage of launch_window_attention (style snapkv),
                                       ///< launch_history_attention with max_logit (style rkv)
  std::int32_t pool = 5;               ///< slots pooled over, odd
  bool average = true;                 ///< style snapkv; style rkv pools the maximum
  float* scores = nullptr;             ///< f32 [slots], not the memory of `attention`
};

/// Cost: one pass over the attention. Workspace: none. Throws InvalidArgument for a pool that is not odd, or less
/// than 1.
void launch_snapkv(const SnapKVArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
