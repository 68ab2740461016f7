// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Which folded spans a query zooms into: by a learned gate, or by the attention that their coarse entries would draw.
/// Source: SeKV (AmirAbaskohi/SeKV); the rules without training are ours. Differs: read_memory.h.

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/memory/factorise.h"
#include "kvkeep/memory/span_row.h"

namespace kvkeep {

class Fields;

struct ZoomOptions {
  enum class Rule : std::uint8_t {
    automatic,  ///< learned if there is a router, else mass
    learned,    ///< relevance above each head's threshold
    mass,       ///< estimated share of attention above `mass`
    coverage,   ///< the fewest spans, best first, that hold `coverage` of the attention that all spans draw; 1: all
  };
  enum class Heads : std::uint8_t {
    own,    ///< a head reads in full the spans that it asked for itself
    group,  ///< and those that the other heads of its group asked for
  };
  Rule rule = Rule::automatic;
  Heads heads = Heads::own;
  double mass = 0.02;
  double coverage = 0.9;
  double coverage_floor = 0.001;  ///< spans below this share stay folded in any case

  /// True if a router decides.
  [[nodiscard]] bool learned(bool has_router) const {
    return rule == Rule::learned || (rule == Rule::automatic && has_router);
  }

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// The learned gate: projections W, thresholds tau. A head asks for the spans whose relevance, sigmoid((W q) . (W
/// kmean) /
/// (|W kmean| sqrt(d')) + log L), is above its tau.
class Router {
 public:
  /// projections: f32, f16 or bf16 [Hq, d', D]; thresholds: [Hq]. Throws InvalidArgument for other shapes, and for
  /// numbers that are not finite.
  Router(const Tensor& projections, const Tensor& thresholds);

  /// f32 [spans, heads]: 1 / |W kmean|, at most 1e8, of `heads` query heads from `first_head` on: all that routing
  /// needs besides the coarse keys. Spans of key_dim() numbers. Cost: heads * spans * d' * D products.
  [[nodiscard]] std::vector<float> norms(const SpanRow& spans, std::int64_t first_head, std::int64_t heads) const;

  [[nodiscard]] std::int64_t query_heads() const { return thresholds_.size(0); }
  /// D.
  [[nodiscard]] std::int64_t key_dim() const { return projections_.size(2); }
  [[nodiscard]] float threshold(std::int64_t head) const { return thresholds_.data<float>()[head]; }
  /// f32 [d', D] of one head, and d'.
  [[nodiscard]] const float* projection(std::int64_t head) const {
    return projections_.data<float>() + head * projections_.stride(0);
  }
  [[nodiscard]] std::int64_t inner() const { return projections_.size(1); }

 private:
  Tensor projections_, thresholds_;  ///< f32 [Hq, d', D], [Hq]
};

// Trained routers and rank gates of a model, in a file.
// Source: SeKV (AmirAbaskohi/SeKV), names and shapes of its parameters. Differs: a safetensors file instead of a
// pickle.

/// A trained router of every layer, and the rank gates that all layers share.
struct Routing {
  std::vector<Router> layers;      ///< [NL]
  std::optional<RankGates> gates;  ///< if the file has them
  std::string model_name;          ///< of the model it was trained on; empty: the file does not say

#if KVKEEP_FILES
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

#if KVKEEP_FILES
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

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/router-inl.h"
#endif
