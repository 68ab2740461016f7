#include "kvkeep/memory/router_parameters.h"

#include <cmath>

#include "kvkeep/core/text.h"

namespace kvkeep {

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
