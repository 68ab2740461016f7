// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/memory/router.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep {
namespace {

constexpr const char* kRouterKey = "kvkeep_router";
constexpr const char* kModelKey = "model_name";

/// Names in the file, as in the published code.
std::string gate_name(std::size_t layer, bool bias) {
  return text("g_phi.mlp.", 2 * layer, bias ? ".bias" : ".weight");
}

/// The content of a file: the parameters of all layers, each checked by itself and against its neighbours.
class Parameters {
 public:
  Parameters(std::string operation, std::string where) : operation_(std::move(operation)), where_(std::move(where)) {}

  void check(const TrainedParameters& p) const {
    usable("W", p.projections, p.projections.defined() && p.projections.dim() == 4,
           "[layers, query heads, d', head size]");
    const std::int64_t layers = p.projections.size(0), heads = p.projections.size(1), dim = p.projections.size(3);
    usable("tau", p.thresholds, p.thresholds.defined() && p.thresholds.sizes() == Shape({layers, heads}),
           text("[", layers, ", ", heads, "], one per head of W"));
    if (!has_gates(p)) return;
    for (std::size_t i = 0; i < 3; ++i) {
      const Tensor &weight = p.gate_weights[i], &bias = p.gate_biases[i];
      usable(gate_name(i, false), weight,
             weight.defined() && weight.dim() == 2 && (i == 0 || weight.size(1) == p.gate_weights[i - 1].size(0)),
             i == 0 ? std::string("[outputs, max_rank + head size]")
                    : text("[outputs, ", p.gate_weights[i - 1].size(0), "], the outputs of the previous layer"));
      usable(gate_name(i, true), bias, bias.defined() && bias.dim() == 1 && bias.size(0) == weight.size(0),
             text("[", weight.size(0), "], one per output"));
    }
    const std::int64_t max_rank = p.gate_weights[2].size(0);
    usable(gate_name(0, false), p.gate_weights[0], p.gate_weights[0].size(1) == max_rank + dim,
           text("[outputs, ", max_rank + dim, "], for max_rank ", max_rank, " and the head size of W, ", dim));
  }

  /// True if any tensor of the gates exists; then all must.
  static bool has_gates(const TrainedParameters& p) {
    const auto there = [](const Tensor& t) { return t.defined(); };
    return std::ranges::any_of(p.gate_weights, there) || std::ranges::any_of(p.gate_biases, there);
  }

 private:
  void usable(const std::string& name, const Tensor& t, bool fits, const std::string& allowed) const {
    KVKEEP_REQUIRE(t.defined(), operation_, ": tensor \"", name, "\" is missing in ", where_,
                   "; allowed f32, f16 or bf16 ", allowed);
    KVKEEP_REQUIRE(fits && t.numel() > 0 && is_scorable(t.dtype()) && t.device().is_cpu(), operation_, ": tensor \"",
                   name, "\" in ", where_, " is ", t.dtype(), " ", t.sizes(), "; allowed f32, f16 or bf16 ", allowed);
    KVKEEP_REQUIRE(all_finite(t), operation_, ": tensor \"", name, "\" in ", where_,
                   " holds NaN or infinity; allowed finite numbers");
  }

  std::string operation_, where_;
};

}  // namespace

Routing Routing::read(const std::filesystem::path& path) {
  const io::SafetensorsFile file = io::SafetensorsFile::read(path);
  const auto& metadata = file.metadata();
  if (const auto version = metadata.find(kRouterKey); version != metadata.end())
    KVKEEP_REQUIRE(version->second == "1", "read router: ", file.where(), " has format version ",
                   shortened(version->second), "; allowed 1");
  std::vector<std::string> known{"W", "tau"};
  const auto tensor = [&](const std::string& name) { return file.has(name) ? file.tensor(name) : Tensor(); };
  TrainedParameters p{tensor("W"), tensor("tau"), {}, {}};
  for (std::size_t i = 0; i < 3; ++i) {
    known.insert(known.end(), {gate_name(i, false), gate_name(i, true)});
    p.gate_weights[i] = tensor(gate_name(i, false)), p.gate_biases[i] = tensor(gate_name(i, true));
  }
  for (const std::string& name : file.names())
    KVKEEP_REQUIRE(std::ranges::find(known, name) != known.end(), "read router: tensor \"", shortened(name), "\" in ",
                   file.where(), " is not known; allowed W, tau and g_phi.mlp.{0,2,4}.{weight,bias}");
  Parameters("read router", file.where()).check(p);

  Routing routing;
  for (std::int64_t l = 0; l < p.projections.size(0); ++l)
    routing.layers.emplace_back(p.projections.select(0, l), p.thresholds.select(0, l));
  if (Parameters::has_gates(p)) routing.gates.emplace(p.gate_weights, p.gate_biases);
  if (metadata.contains(kModelKey)) routing.model_name = metadata.at(kModelKey);
  return routing;
}

void write_routing(const std::filesystem::path& file, const TrainedParameters& p,
                   const std::map<std::string, std::string>& metadata) {
  const auto stored = [](const Tensor& t) { return t.defined() ? as<float>(t) : t; };
  TrainedParameters out{stored(p.projections), stored(p.thresholds), {}, {}};
  std::ranges::transform(p.gate_weights, out.gate_weights.begin(), stored);
  std::ranges::transform(p.gate_biases, out.gate_biases.begin(), stored);
  Parameters("write router", file.string()).check(out);
  std::vector<std::pair<std::string, Tensor>> tensors{{"W", out.projections}, {"tau", out.thresholds}};
  for (std::size_t i = 0; i < 3 && Parameters::has_gates(out); ++i)
    tensors.insert(tensors.end(),
                   {{gate_name(i, false), out.gate_weights[i]}, {gate_name(i, true), out.gate_biases[i]}});
  std::map<std::string, std::string> all = metadata;
  all.insert_or_assign(kRouterKey, std::string(1, '1'));
  io::write_safetensors(file, tensors, all);
}

}  // namespace kvkeep
