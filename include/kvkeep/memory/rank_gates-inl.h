#pragma once
// Bodies of rank_gates.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <Eigen/Core>
#include <cmath>

#include "kvkeep/core/error.h"
#include "kvkeep/core/finite.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/memory/rank_gates.h"

namespace kvkeep {
namespace rank_gates_detail {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline Eigen::Map<const Matrix> matrix(const Tensor& t) {
  return {t.data<double>(), t.size(0), t.dim() == 2 ? t.size(1) : 1};
}

}  // namespace rank_gates_detail

KVKEEP_INLINE RankGates::RankGates(const std::array<Tensor, 3>& weights, const std::array<Tensor, 3>& biases) {
  for (std::size_t i = 0; i < 3; ++i) {
    const auto usable = [&](const Tensor& t, const char* what, std::int64_t dims) {
      KVKEEP_REQUIRE(t.defined() && t.device().is_cpu() && (is_scorable(t.dtype()) || t.dtype() == Dtype::f64) &&
                         t.dim() == dims && t.numel() > 0,
                     "rank gates: ", what, " of layer ", 2 * i, " is missing, empty, of the wrong dtype or not of ",
                     dims, " dimensions; allowed f32, f16, bf16 or f64 on the CPU");
      KVKEEP_REQUIRE(all_finite(t), "rank gates: ", what, " of layer ", 2 * i,
                     " holds NaN or infinity; allowed finite numbers");
    };
    usable(weights[i], "weight", 2);
    usable(biases[i], "bias", 1);
    KVKEEP_REQUIRE(biases[i].size(0) == weights[i].size(0), "rank gates: layer ", 2 * i, " has ", weights[i].size(0),
                   " outputs and ", biases[i].size(0), " biases; allowed as many biases as outputs");
    KVKEEP_REQUIRE(i == 0 || weights[i].size(1) == weights[i - 1].size(0), "rank gates: layer ", 2 * i, " reads ",
                   weights[i].size(1), " numbers; allowed the outputs of the previous layer");
    weights_[i] = as<double>(weights[i]);
    biases_[i] = as<double>(biases[i]);
  }
  KVKEEP_REQUIRE(weights_[0].size(1) > max_rank(), "rank gates: layer 0 reads ", weights_[0].size(1),
                 " numbers; allowed the ", max_rank(), " singular values and a key");
}

KVKEEP_INLINE Tensor RankGates::gates(const Tensor& singular_values, const Tensor& coarse_keys) const {
  KVKEEP_REQUIRE(singular_values.dim() == 2 && coarse_keys.dim() == 2 &&
                     singular_values.size(0) == coarse_keys.size(0) && singular_values.size(1) == max_rank() &&
                     coarse_keys.size(1) == key_dim(),
                 "rank gates: trained for ", max_rank(), " singular values and keys of ", key_dim(),
                 " numbers; allowed only inputs of these sizes");
  constexpr double kTiny = 1e-8;
  const Tensor spectra = as<double>(singular_values), keys = as<double>(coarse_keys);
  rank_gates_detail::Matrix x(spectra.size(0), max_rank() + key_dim());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    x.row(row).head(max_rank()) =
        rank_gates_detail::matrix(spectra).row(row) / (rank_gates_detail::matrix(spectra)(row, 0) + kTiny);
    x.row(row).tail(key_dim()) =
        rank_gates_detail::matrix(keys).row(row) / std::max(rank_gates_detail::matrix(keys).row(row).norm(), kTiny);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    x = ((x * rank_gates_detail::matrix(weights_[i]).transpose()).rowwise() +
         rank_gates_detail::matrix(biases_[i]).col(0).transpose())
            .eval();
    if (i < 2)
      x = x.unaryExpr([](double v) { return 0.5 * v * (1 + std::erf(v * M_SQRT1_2)); });
    else
      x = x.unaryExpr([](double v) { return 1 / (1 + std::exp(-v)); });
  }
  const Tensor out = empty({x.rows(), x.cols()}, Dtype::f64);
  Eigen::Map<rank_gates_detail::Matrix>(out.data<double>(), x.rows(), x.cols()) = x;
  return out;
}

}  // namespace kvkeep
