#pragma once
/// Scorers of one row (kvkeep/score/row_scorer.h) on a GPU, with the body of the CPU.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

template <class Body>
struct RowBodyArguments {
  EvidenceArguments evidence;
  Element values = Element::f32;  ///< f32, f16 or bf16, as the keys; f32 if the body does not read them
  std::int32_t value_dim = 0;
  Body body = {};
  float* scores = nullptr;  ///< f32 [slots]
};

/// One launch, one block per row. Cost: that of the body. Workspace: none. Throws InvalidArgument for keys or values of
/// 8 bits. cuda/row_bodies.cu names every body that it exists for.
template <class Body>
void launch_row_body(const RowBodyArguments<Body>& arguments, Stream stream);

}  // namespace kvkeep::cuda
