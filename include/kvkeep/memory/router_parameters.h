#pragma once
/// What a router and rank gates learn, and the options of their losses. kvkeep/lm/router_training.h trains them.

#include <array>
#include <string>
#include <vector>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

class Fields;

struct TrainingOptions {
  double zoom_weight = 1;
  double recon_weight = 0.5;
  double budget_weight = 0.1;   ///< as annealed at this step
  double rank_weight = 0.1;     ///< of a kept component relative to a zoomed span, in the budget loss
  double positive_weight = 10;  ///< of spans that should be zoomed
  double coverage = 0.9;        ///< share of the teacher's attention to spans that those should hold
  double temperature = 0.1;     ///< of the sigmoid that gives a zoom its gradient
  bool published = false;       ///< reconstruction as a plain sum, zoomed spans counted without a gradient

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// What is trained: f32, f16, bf16 or f64 as input, f64 as gradients.
template <class T>
struct TrainedParametersOf {
  T projections;                  ///< [Hq, d', D] W
  T thresholds;                   ///< [Hq] tau
  std::array<T, 3> gate_weights;  ///< as RankGates
  std::array<T, 3> gate_biases;
};
using TrainedParameters = TrainedParametersOf<Tensor>;

}  // namespace kvkeep
