#include "kvkeep/memory/router_parameters.h"

#include <cmath>

#include "kvkeep/core/fields.h"
#include "kvkeep/core/text.h"

namespace kvkeep {

void TrainingOptions::describe(Fields& f) {
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

std::vector<std::string> TrainingOptions::problems() const {
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
