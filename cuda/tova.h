#pragma once
/// TOVA on a GPU. Same contract as `kvkeep::Tova`.

#include "evidence.h"
#include "kvkeep/core/row_window.h"
#include "stream.h"

namespace kvkeep::cuda {

struct TovaArguments {
  EvidenceArguments evidence;
  const RowWindow* windows = nullptr;  ///< [count]
  bool all_heads = true;               ///< TovaOptions::Heads::all, else group
  const float* newest = nullptr;       ///< f32 [slots] of launch_window_attention
  float* scores = nullptr;             ///< f32 [slots], not the memory of `newest`
};

/// Requires, with all_heads: a (layer, sequence) is due as a whole, and its rows have one length; the CPU throws
/// Unsupported if they do not, and the host knows both. Cost: one pass over the scores. Workspace: none.
void launch_tova(const TovaArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
