// SPDX-License-Identifier: Apache-2.0
#include "thresholds.h"

#include <algorithm>
#include <utility>

namespace train {
namespace {

using torch::Tensor;

/// Relevance of a span to a query of one head, and the attention it really draws.
using Worth = std::pair<double, double>;

double best_threshold(std::vector<Worth>& spans, double price) {
  std::ranges::sort(spans, std::greater<>());
  double gain = 0, most = 0, threshold = 1;
  for (size_t i = 0; i < spans.size(); ++i) {
    gain += spans[i].second - price;
    const double next = i + 1 < spans.size() ? spans[i + 1].first : 0;
    if (gain > most && next < spans[i].first) most = gain, threshold = (spans[i].first + next) / 2;
  }
  return threshold;
}

}  // namespace

void set_thresholds(const std::vector<Lesson>& lessons, double price, RouterParameters& parameters) {
  torch::NoGradGuard no_grad;
  const kvkeep::lm::TrainedParameters arrays = parameters.arrays();
  const Tensor projections = arrays.projections.to(torch::kFloat64);
  for (int64_t l = 0; l < projections.size(0); ++l) {
    std::vector<std::vector<Worth>> heads(static_cast<size_t>(projections.size(1)));
    for (const Lesson& lesson : lessons) {
      const auto at = static_cast<size_t>(l);
      const Tensor
          relevance =
              lesson.memories[at].routing_logits(lesson.queries[at], projections.select(0, l)).sigmoid().contiguous(),
          mass = lesson.mass[at].contiguous();
      const Tensor& admitted = lesson.memories[at].admitted();
      const int64_t spans = admitted.size(1), rows = mass.numel() / std::max<int64_t>(1, spans);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t s = 0; s < spans; ++s)
          if (admitted.const_data_ptr<uint8_t>()[row / mass.size(1) * spans + s] != 0)
            heads[static_cast<size_t>(row % mass.size(1))].emplace_back(
                relevance.const_data_ptr<double>()[row * spans + s], mass.const_data_ptr<double>()[row * spans + s]);
    }
    for (size_t h = 0; h < heads.size(); ++h)
      arrays.thresholds.select(0, l).select(0, static_cast<int64_t>(h)).fill_(best_threshold(heads[h], price));
  }
}

}  // namespace train
