// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kvkeep/trace/trace.h"
#include "kvkeep/version.h"
#include "kvlab/router_training.h"
#include "span_layer.h"

namespace kvkeep::trace {
namespace {

lm::TrainingLayer read_training(const io::SafetensorsFile& file, const Sekv& sekv) {
  const Layer layer = read_layer(file);
  lm::TrainingLayer out;
  out.keys = layer.keys, out.values = layer.values, out.queries = layer.queries, out.scale = layer.scale;
  const std::int64_t queries = layer.queries.size(0), width = layer.queries.size(1) * layer.dim();
  want(file, "queries", layer.queries, queries >= 1, "at least one query");
  KVKEEP_REQUIRE(file.has("query_positions"), file.where(),
                 ": tensor \"query_positions\" is missing; a span_train trace needs it");
  const Tensor positions = file.tensor("query_positions");
  want(file, "query_positions", positions,
       positions.dim() == 1 && positions.size(0) == queries &&
           (positions.dtype() == Dtype::i32 || positions.dtype() == Dtype::i64),
       text("i32 or i64 [", queries, "]"));
  const Tensor wide = as<std::int64_t>(positions);
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t q = wide.data<std::int64_t>()[i];
    KVKEEP_REQUIRE(q >= 0 && q < layer.keys.size(1), file.where(), ": tensor \"query_positions\" holds ", q,
                   "; allowed 0 to ", layer.keys.size(1) - 1);
    out.positions.push_back(static_cast<std::int32_t>(q));
  }
  const Tensor head = finite_floats(file, "head", 2, text("[vocab, ", width, "]"));
  want(file, "head", head, head.size(0) >= 1 && head.size(1) == width, text("[vocab, ", width, "]"));
  out.head = head;
  out.surprisal.assign(layer.nats().begin(), layer.nats().end());
  out.spans = segment(layer.nats(), sekv.segmenter(layer.keys.size(1), layer.group(), layer.dim(), true)).spans;
  out.recent = sekv.options().segmenter.recent;
  return out;
}

}  // namespace

Result replay_span_train(const io::SafetensorsFile& file, const KVPolicy& policy) {
  KVKEEP_REQUIRE(kind_of(file) == "span_train", file.where(), ": the trace is of kind \"", kind_of(file),
                 "\"; allowed here: span_train");
  const Sekv& sekv = sekv_of(file, policy);
  const lm::TrainingLayer layer = read_training(file, sekv);
  const TrainedParameters stored =
      read_parameters(file, read_layer(file), true, true, sekv.options().memory.factors.max_rank);
  lm::TrainedParameters parameters{stored.projections, stored.thresholds, {}, {}};
  for (std::size_t i = 0; i < 3; ++i)
    parameters.gate_weights[i] = stored.gate_weights[i], parameters.gate_biases[i] = stored.gate_biases[i];
  const lm::TrainingStep step = lm::training_step(layer, parameters, sekv.options().training);

  Result result;
  const auto add = [&result](std::string name, const Tensor& t) { result.tensors.emplace_back(std::move(name), t); };
  const auto number_of = [](double x) { return full<double>({1}, x); };
  add("loss", number_of(step.loss));
  add("loss.distill", number_of(step.distill)), add("loss.zoom", number_of(step.zoom)),
      add("loss.recon", number_of(step.recon)), add("loss.budget", number_of(step.budget));
  add("grad.router.W", step.gradients.projections), add("grad.router.tau", step.gradients.thresholds);
  for (std::size_t i = 0; i < 3; ++i)
    add(text("grad.gate.", 2 * i, ".weight"), step.gradients.gate_weights[i]),
        add(text("grad.gate.", 2 * i, ".bias"), step.gradients.gate_biases[i]);
  add("spans", table_of(layer.spans));
  add("admitted", step.admitted), add("targets", step.targets), add("zoomed", step.zoomed),
      add("relevance", step.relevance), add("gates", step.gates);
  add("student_logits", step.student_logits), add("teacher_logits", step.teacher_logits);
  result.metadata = {{"kvkeep_result", "1"},
                     {"policy", policy.to_json()},
                     {"kvkeep_version", kVersion},
                     {"spans", std::to_string(layer.spans.size())}};
  return result;
}

}  // namespace kvkeep::trace
