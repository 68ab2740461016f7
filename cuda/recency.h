#pragma once
/// Recency on a GPU. Same contract as `kvkeep::Recency`.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct RecencyArguments {
  EvidenceArguments evidence;  ///< reads rows, limits, count and longest
  float* scores = nullptr;     ///< f32 [slots] at Row::first
};

/// Cost: one write of the scores. Workspace: none.
void launch_recency(const RecencyArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
