#pragma once
/// Trained routers and rank gates of a model, in a file.
/// Source: SeKV (AmirAbaskohi/SeKV), names and shapes of its parameters. Differs: a safetensors file instead of a
/// pickle.

#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/text.h"
#include "kvkeep/memory/rank_gates.h"
#include "kvkeep/memory/router.h"

namespace kvkeep {

/// A trained router of every layer, and the rank gates that all layers share.
struct Routing {
  std::vector<Router> layers;      ///< [NL]
  std::optional<RankGates> gates;  ///< if the file has them
  std::string model_name;          ///< of the model it was trained on; empty: the file does not say

#ifndef KVKEEP_HEADER_ONLY
  /// Reads a safetensors file: `W` [NL, Hq, d', D], `tau` [NL, Hq]; with gates `g_phi.mlp.0.weight` [width, max_rank +
  /// D], `g_phi.mlp.2.weight` [width', width], `g_phi.mlp.4.weight` [max_rank, width'] and a `.bias` for each; all f32,
  /// f16 or bf16. Metadata may be absent. Throws InvalidArgument with one sentence that names the file and the tensor,
  /// for a file that is damaged or newer, and for a tensor that is missing, unknown, of another dtype or shape, or not
  /// finite. Cost: the size of the file.
  [[nodiscard]] static Routing read(const std::filesystem::path& file);
#endif

  /// Why it does not fit the model, one sentence each: layers, query heads, head size, head size of the gates; with the
  /// model it was trained on, if the file says.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const;
};

inline std::vector<std::string> Routing::problems(const ModelSpec& spec) const {
  std::vector<std::string> found;
  const std::string trained = model_name.empty() ? "" : text(" (it was trained on ", shortened(model_name), ")");
  const auto differ = [&](const char* what, std::int64_t given, std::int64_t wanted) {
    if (given != wanted)
      found.push_back(text("router: it has ", given, " ", what, "; allowed the model's ", wanted, trained));
  };
  if (spec.whole_heads() != spec.kv_heads)
    found.push_back(text("router: it is of all heads of a model; given ", spec.kv_heads, " of ", spec.whole_heads(),
                         " KV heads on this rank; allowed where a rank holds all", trained));
  differ("layers", static_cast<std::int64_t>(layers.size()), spec.num_layers());
  if (!layers.empty()) {
    if (spec.query_heads > 0)
      differ("query heads", layers.front().query_heads(), spec.query_heads);
    else if (layers.front().query_heads() % spec.kv_heads != 0)
      found.push_back(text("router: it has ", layers.front().query_heads(),
                           " query heads; allowed a multiple of the model's ", spec.kv_heads, " KV heads", trained));
    differ("numbers per key", layers.front().key_dim(), spec.key_dim);
  }
  if (gates && gates->key_dim() != spec.key_dim)
    found.push_back(text("router: its gates read keys of ", gates->key_dim(), " numbers; allowed the model's ",
                         spec.key_dim, trained));
  return found;
}

#ifndef KVKEEP_HEADER_ONLY
/// What is trained for all layers of a model: f32, f16 or bf16.
struct TrainedParameters {
  Tensor projections;                  ///< [NL, Hq, d', D] W
  Tensor thresholds;                   ///< [NL, Hq] tau
  std::array<Tensor, 3> gate_weights;  ///< as RankGates
  std::array<Tensor, 3> gate_biases;
};

/// Writes a file for Routing::read(), in f32, completely or not at all. Gates are whole or undefined. `metadata`:
/// `model_name`, and anything else that says where it comes from. Throws InvalidArgument if reading would, before
/// anything is written, and for a folder that cannot be written to.
void write_routing(const std::filesystem::path& file, const TrainedParameters& parameters,
                   const std::map<std::string, std::string>& metadata = {});
#endif

}  // namespace kvkeep
