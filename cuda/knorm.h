#pragma once
/// Knorm on a GPU. Same contract as `kvkeep::Knorm`.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct KnormArguments {
  EvidenceArguments evidence;
  float* scores = nullptr;  ///< f32 [slots] at Row::first
};

/// Cost: one pass over the keys. Workspace: none. Throws InvalidArgument for a head size outside 1 to 256.
void launch_knorm(const KnormArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
