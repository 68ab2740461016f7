#pragma once
/// Scorers of one row from outside the library, on a GPU.

#include <typeindex>

#include "kvkeep/score/row_scorer.h"
#include "row_body.h"

namespace kvkeep::cuda {

/// One launch of a scorer's body over an event.
struct RowScorerCall {
  const Scorer& scorer;
  EvidenceArguments evidence;
  Element values = Element::f32;
  std::int32_t value_dim = 0;
  float* scores = nullptr;  ///< f32 [slots]
  Stream stream = nullptr;
};

/// Any thread may call it at any time. The last launch for a class counts.
void register_row_scorer(std::type_index scorer, void (*launch)(const RowScorerCall&));

/// From now on keepers on a GPU run `S`, a RowScorer. A .cu file of the program must have the kernel:
///
///     #include <kvkeep/cuda/row_body.cuh>
///     template void kvkeep::cuda::launch_row_body(const kvkeep::cuda::RowBodyArguments<S::Options>&,
///                                                 kvkeep::cuda::Stream);
template <class S>
void register_scorer() {
  register_row_scorer(typeid(S), [](const RowScorerCall& call) {
    RowBodyArguments<typename S::Options> arguments;
    arguments.evidence = call.evidence;
    arguments.values = call.values;
    arguments.value_dim = call.value_dim;
    arguments.body = static_cast<const S&>(call.scorer).options();
    arguments.scores = call.scores;
    launch_row_body(arguments, call.stream);
  });
}

}  // namespace kvkeep::cuda
