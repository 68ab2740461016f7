#pragma once
/// Random scores on a GPU. Same contract as `kvkeep::RandomScorer`, and the same bits.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct RandomArguments {
  EvidenceArguments evidence;  ///< reads rows with their positions, limits, count and longest
  std::int64_t seed = 0;       ///< RandomOptions::seed
  float* scores = nullptr;     ///< f32 [slots] at Row::first
};

/// Cost: one pass over the positions. Workspace: none.
void launch_random(const RandomArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
