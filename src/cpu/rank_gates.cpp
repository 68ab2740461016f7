#include "kvkeep/memory/rank_gates.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linear.h>

#include "kvkeep/core/error.h"

namespace kvkeep {

RankGates::RankGates(const std::array<Tensor, 3>& weights, const std::array<Tensor, 3>& biases) {
  for (std::size_t i = 0; i < 3; ++i) {
    const auto usable = [&](const Tensor& t, const char* what, std::int64_t dims) {
      KVKEEP_REQUIRE(t.defined() && t.device().is_cpu() &&
                         (is_scorable(t.scalar_type()) || t.scalar_type() == c10::ScalarType::Double) &&
                         t.dim() == dims && t.numel() > 0,
                     "rank gates: ", what, " of layer ", 2 * i, " is missing, empty, of another dtype or not of ", dims,
                     " dimensions; allowed f32, f16, bf16 or f64 on the CPU");
      KVKEEP_REQUIRE(at::isfinite(t).all().item<bool>(), "rank gates: ", what, " of layer ", 2 * i,
                     " holds NaN or infinity; allowed finite numbers");
    };
    usable(weights[i], "weight", 2);
    usable(biases[i], "bias", 1);
    KVKEEP_REQUIRE(biases[i].size(0) == weights[i].size(0), "rank gates: layer ", 2 * i, " has ", weights[i].size(0),
                   " outputs and ", biases[i].size(0), " biases; allowed as many");
    KVKEEP_REQUIRE(i == 0 || weights[i].size(1) == weights[i - 1].size(0), "rank gates: layer ", 2 * i, " reads ",
                   weights[i].size(1), " numbers; allowed those that the layer before makes");
    weights_[i] = weights[i].to(c10::ScalarType::Double).contiguous();
    biases_[i] = biases[i].to(c10::ScalarType::Double).contiguous();
  }
  KVKEEP_REQUIRE(weights_[0].size(1) > max_rank(), "rank gates: layer 0 reads ", weights_[0].size(1),
                 " numbers; allowed the ", max_rank(), " singular values and a key");
}

Tensor RankGates::gates(const Tensor& singular_values, const Tensor& coarse_keys) const {
  KVKEEP_REQUIRE(singular_values.dim() == 2 && coarse_keys.dim() == 2 &&
                     singular_values.size(0) == coarse_keys.size(0) && singular_values.size(1) == max_rank() &&
                     coarse_keys.size(1) == key_dim(),
                 "rank gates: they were trained for ", max_rank(), " singular values and keys of ", key_dim(),
                 " numbers; allowed those");
  constexpr double kTiny = 1e-8;
  const Tensor shares = singular_values / (singular_values.narrow(1, 0, 1) + kTiny);
  const Tensor directions = coarse_keys / coarse_keys.norm(2, {1}, true).clamp_min(kTiny);
  Tensor x = at::cat({shares, directions}, 1);
  for (std::size_t i = 0; i < 3; ++i) {
    x = at::linear(x, weights_[i], biases_[i]);
    x = i < 2 ? at::gelu(x) : x.sigmoid();
  }
  return x;
}

}  // namespace kvkeep
