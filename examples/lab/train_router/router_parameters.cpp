// SPDX-License-Identifier: Apache-2.0
#include "router_parameters.h"

#include <cmath>
#include <string>

namespace train {

RouterParameters::RouterParameters(const LlamaShape& shape, int64_t inner, int64_t max_rank, uint64_t seed) {
  constexpr double kFirstThreshold = 0.05;
  constexpr int64_t kWidth = 64;
  torch::manual_seed(seed);
  const auto uniform = [](at::IntArrayRef sizes, double bound) { return (torch::rand(sizes) * 2 - 1) * bound; };
  const double xavier = std::sqrt(6.0 / static_cast<double>(inner + shape.head_width));
  projections_ = register_parameter("W", uniform({shape.layers, shape.query_heads, inner, shape.head_width}, xavier));
  thresholds_ = register_parameter("tau", torch::full({shape.layers, shape.query_heads}, kFirstThreshold));
  const int64_t widths[] = {max_rank + shape.head_width, kWidth, kWidth, max_rank};
  for (size_t i = 0; i < 3; ++i) {
    const std::string layer = "g_phi/mlp/" + std::to_string(2 * i);
    const double bound = 1 / std::sqrt(static_cast<double>(widths[i]));
    gate_weights_[i] = register_parameter(layer + "/weight", uniform({widths[i + 1], widths[i]}, bound));
    gate_biases_[i] = register_parameter(layer + "/bias", uniform({widths[i + 1]}, bound));
  }
}

void RouterParameters::copy_from(const RouterParameters& other) {
  torch::NoGradGuard no_grad;
  const auto from = other.parameters();
  auto to = parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

}  // namespace train
