#pragma once
/// What a router and rank gates learn, and the options of their losses. kvlab/router_training.h trains them.

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "kvkeep/core/fields.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/core/text.h"

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

inline void TrainingOptions::describe(Fields& f) {
  constexpr Range kWeight{0, 1e9};
  f.real("zoom_weight", zoom_weight, kWeight,
         "weight of the loss for spans that should be zoomed and are not, or the reverse");
  f.real("recon_weight", recon_weight, kWeight, "weight of the loss for what gates leave out");
  f.real("budget_weight", budget_weight, kWeight,
         "weight of the loss for zoomed spans and kept components, as annealed at this step");
  f.real("rank_weight", rank_weight, kWeight, "weight of a kept component against a zoomed span");
  f.real("positive_weight", positive_weight, kWeight, "weight of spans that should be zoomed");
  f.real("coverage", coverage, {0, 1}, "share of the teacher's span attention that spans to zoom should hold");
  f.real("temperature", temperature, Range::above(0, kWeight.high),
         "temperature of the sigmoid that replaces a zoom in gradients");
}

inline std::vector<std::string> TrainingOptions::problems() const {
  std::vector<std::string> found;
  const auto weight = [&](const char* name, double value) {
    if (!(value >= 0) || !std::isfinite(value)) found.push_back(text(name, ": ", value, "; allowed 0 or more"));
  };
  weight("zoom_weight", zoom_weight), weight("recon_weight", recon_weight), weight("budget_weight", budget_weight),
      weight("rank_weight", rank_weight), weight("positive_weight", positive_weight);
  if (!(coverage >= 0 && coverage <= 1)) found.push_back(text("coverage: ", coverage, "; allowed 0 to 1"));
  if (!(temperature > 0) || !std::isfinite(temperature))
    found.push_back(text("temperature: ", temperature, "; allowed above 0"));
  return found;
}

}  // namespace kvkeep
