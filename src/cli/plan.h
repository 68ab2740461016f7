// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kvkeep plan was asked, and what its answers have in common: the exact one, and the one where the text decides.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "bounds.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::cli {

// On which GPU requests are served, on paper. Nothing that is not given has a value, so that it can be refused.
struct ServingOptions {
  std::optional<std::string> gpu;
  std::optional<double> memory, bandwidth, flops;                 // GB, TB/s, TFLOP/s
  std::optional<double> parameters, utilisation, event_us, rate;  // 1e9, of `flops`, us, a second
  std::optional<std::int64_t> requests;
  std::optional<std::uint32_t> seed;
  [[nodiscard]] bool asked() const { return gpu || memory || bandwidth || flops; }
};

struct PlanOptions {
  std::string model, shape, policy, dtype = "bf16";
  std::int32_t batch = 1, length = 32768, prompt = 0, piece = 0, page_size = 16;
  ServingOptions serving;
  OutputOptions output;
};

// One sequence. `Sequence`: Forecast or BoundedForecast.
template <class Sequence>
struct Planned {
  const ModelSpec& spec;
  const KVPolicy& policy;
  Sequence sequence;
  OwnBytes own;
  bool ragged;        // the policy that decides after the prompt spreads its budget by the data
  std::int64_t fits;  // sequences, each at its peak, in the memory of the batch's full caches
};

const char* kind_text(LayerKind kind);

// "4", or "4-9", of something from `least` to `most`.
template <class Range>
std::string slots_text(const Range& range) {
  return range.least == range.most ? text(range.most) : text(range.least, "-", range.most);
}

// Consecutive layers that are alike, together: `add("4-9", kind, layer)`.
template <class Sequence, class Add>
void each_run(const Planned<Sequence>& out, const Add& add) {
  const auto& layers = out.sequence.layers;
  for (std::size_t l = 0; l < layers.size();) {
    std::size_t last = l;
    while (last + 1 < layers.size() && out.spec.layers[last + 1].kind == out.spec.layers[l].kind &&
           layers[last + 1] == layers[l])
      ++last;
    add(l == last ? text(l) : text(l, "-", last), kind_text(out.spec.layers[l].kind), layers[l]);
    l = last + 1;
  }
}

// Adds kvkeep's own bytes of a sequence, a row for each part that is not 0. `add(what, bytes)`.
void each_own(const OwnBytes& own, const std::function<void(const char* what, std::int64_t bytes)>& add);

// The beginnings of two sentences.
std::string token_text(const PlanOptions& o, std::int64_t slot_bytes);
std::string room_text(const PlanOptions& o, std::int64_t fits);

// A document; `more`: of this answer alone, `of_layer(layer)` and `of_sequences(n)`: objects.
template <class Sequence, class OfLayer, class OfSequences>
std::string json_text(const PlanOptions& o, const Planned<Sequence>& out, const nlohmann::ordered_json& more,
                      const OfLayer& of_layer, const OfSequences& of_sequences) {
  using Json = nlohmann::ordered_json;
  Json all{{"model", o.model.empty() ? o.shape : o.model},
           {"policy", Json::parse(out.policy.to_json())},
           {"dtype", o.dtype},
           {"batch", o.batch},
           {"length", o.length},
           {"prompt", o.prompt},
           {"page_size", o.page_size},
           {"token_bytes", out.sequence.slot_bytes},
           {"ragged", out.ragged}};
  all.update(more);
  all["layers"] = Json::array();
  for (std::size_t l = 0; l < out.sequence.layers.size(); ++l) {
    Json layer{{"layer", l}, {"kind", kind_text(out.spec.layers[l].kind)}};
    layer.update(of_layer(out.sequence.layers[l]));
    all["layers"].push_back(std::move(layer));
  }
  const OwnBytes& own = out.own;
  all["own"] = {{"positions", own.positions}, {"credit", own.credit},   {"tally", own.tally}, {"given", own.given},
                {"surprisal", own.surprisal}, {"queries", own.queries}, {"event", own.event}, {"sum", own.sum()}};
  for (const auto& [name, n] : {std::pair("sequence", 1), std::pair("total", o.batch)}) {
    all[name] = of_sequences(std::int64_t{n});
    all[name]["own_bytes"] = own.sum() * n;
  }
  all["sequences_that_fit"] = out.fits;
  return io::written(all, 2) + "\n";
}

// How a GPU serves requests of this plan, with the policy and without. Throws InvalidArgument for options that do not
// go together.
void add_serving(CLI::App& plan, ServingOptions& options);
std::string serving_text(const PlanOptions& options, const ModelSpec& spec, const KVPolicy& policy,
                         const SequencePlan& plan);
// Of options of a GPU without one.
void refuse_without_gpu(const ServingOptions& options);

// The answer where the text decides.
std::string bounds_text(const PlanOptions& options, const Planned<BoundedForecast>& planned);

}  // namespace kvkeep::cli
