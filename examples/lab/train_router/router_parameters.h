// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What is trained: a router for every layer, and rank gates that all layers share.

#include <torch/torch.h>

#include <array>
#include <cstdint>

#include "kvkeep/memory/router.h"
#include "kvlab/router_training.h"
#include "llama.h"

namespace train {

class RouterParameters : public torch::nn::Module {
 public:
  /// Random from `seed`: Xavier for projections, 0.05 for thresholds, gates as linear layers usually begin.
  RouterParameters(const LlamaShape& shape, int64_t inner, int64_t max_rank, uint64_t seed);

  /// f32 [layers, query_heads, inner, head_width], [layers, query_heads], and the gates.
  kvkeep::lm::TrainedParameters arrays() const { return {projections_, thresholds_, gate_weights_, gate_biases_}; }
  /// The same, as a file takes them.
  kvkeep::TrainedParameters stored() const {
    return {projections_,
            thresholds_,
            {gate_weights_[0], gate_weights_[1], gate_weights_[2]},
            {gate_biases_[0], gate_biases_[1], gate_biases_[2]}};
  }

  void copy_from(const RouterParameters& other);

 private:
  torch::Tensor projections_, thresholds_;
  std::array<torch::Tensor, 3> gate_weights_, gate_biases_;
};

}  // namespace train
