#include "kvkeep/trace/span_trace.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <optional>

#include "check_tensor.h"
#include "kvkeep/policy/sekv.h"
#include "kvkeep/version.h"

namespace kvkeep::trace {
namespace {

/// One layer's prompt and the queries behind it, shapes known and checked.
struct Layer {
  Tensor keys, values;  ///< [Hkv, T, D]
  Tensor queries;       ///< [n, Hq, D]
  Tensor surprisal;     ///< f32 [T]
  std::optional<Router> router;
  std::optional<RankGates> gates;
  double scale = 0;

  [[nodiscard]] std::int64_t group() const { return queries.size(1) / keys.size(0); }
  [[nodiscard]] std::int64_t dim() const { return keys.size(2); }
  [[nodiscard]] std::span<const float> nats() const { return {surprisal.const_data_ptr<float>(), static_cast<std::size_t>(surprisal.numel())}; }
};

Tensor floats(const io::SafetensorsFile& file, const std::string& name, std::int64_t dims, const std::string& shape) {
  require(file.has(name), file.where(), ": tensor \"", name, "\" is missing; a span trace needs it");
  Tensor t = file.tensor(name);
  want(file, name, t, t.dim() == dims && is_scorable(t.scalar_type()), "f32, f16 or bf16 " + shape);
  return t.contiguous();
}

Tensor finite(const io::SafetensorsFile& file, const std::string& name, std::int64_t dims, const std::string& shape) {
  Tensor t = floats(file, name, dims, shape);
  require(at::isfinite(t).all().item<bool>(), file.where(), ": tensor \"", name, "\" holds NaN or infinity; allowed finite numbers");
  return t;
}

std::optional<Router> read_router(const io::SafetensorsFile& file, const Layer& layer, bool needed) {
  if (!needed && !file.has("router.W") && !file.has("router.tau")) return {};
  const std::int64_t heads = layer.queries.size(1);
  const Tensor w = finite(file, "router.W", 3, "[Hq, d', D] of a learned router"), tau = finite(file, "router.tau", 1, "[Hq] of a learned router");
  want(file, "router.W", w, w.size(0) == heads && w.size(1) >= 1 && w.size(2) == layer.dim(), text("[", heads, ", d', ", layer.dim(), "]"));
  want(file, "router.tau", tau, tau.size(0) == heads, text("[", heads, "]"));
  return Router(w, tau);
}

std::optional<RankGates> read_gates(const io::SafetensorsFile& file, const Layer& layer, std::int64_t max_rank, bool needed) {
  if (!needed) return {};
  std::array<Tensor, 3> weights, biases;
  for (std::size_t i = 0; i < 3; ++i) {
    weights[i] = finite(file, text("gate.", 2 * i, ".weight"), 2, "[outputs, inputs] of the rank gates");
    biases[i] = finite(file, text("gate.", 2 * i, ".bias"), 1, "[outputs] of the rank gates");
    const std::int64_t inputs = i == 0 ? max_rank + layer.dim() : weights[i - 1].size(0);
    want(file, text("gate.", 2 * i, ".weight"), weights[i], weights[i].size(1) == inputs && weights[i].size(0) >= 1 && (i < 2 || weights[i].size(0) == max_rank),
         text("[", i < 2 ? std::string("outputs") : std::to_string(max_rank), ", ", inputs, "], for max_rank = ", max_rank, " and D = ", layer.dim()));
    want(file, text("gate.", 2 * i, ".bias"), biases[i], biases[i].size(0) == weights[i].size(0), text("[", weights[i].size(0), "]"));
  }
  return RankGates(weights, biases);
}

Layer read(const io::SafetensorsFile& file, const SekvOptions& options) {
  Layer layer;
  layer.keys = finite(file, "keys", 3, "[Hkv, T, D]");
  layer.values = finite(file, "values", 3, "[Hkv, T, D]");
  layer.queries = finite(file, "queries", 3, "[n, Hq, D]");
  const std::int64_t heads = layer.keys.size(0), tokens = layer.keys.size(1), dim = layer.keys.size(2);
  want(file, "keys", layer.keys, heads >= 1 && dim >= 1 && tokens < INT32_MAX, "at least one head of one number, and fewer than 2^31 tokens");
  want(file, "values", layer.values, layer.values.sizes() == layer.keys.sizes(), "the shape of keys");
  want(file, "queries", layer.queries, layer.queries.size(1) >= heads && layer.queries.size(1) % heads == 0 && layer.queries.size(2) == dim, text("[n, a multiple of ", heads, ", ", dim, "]"));
  layer.surprisal = floats(file, "surprisal", 1, "[T]").to(kFloat32);
  want(file, "surprisal", layer.surprisal, layer.surprisal.size(0) == tokens, text("[", tokens, "], one for each key"));
  layer.scale = number(file, "softmax_scale", 1 / std::sqrt(static_cast<double>(dim)));
  layer.router = read_router(file, layer, options.zoom.rule == ZoomOptions::Rule::learned);
  layer.gates = read_gates(file, layer, options.factors.max_rank, options.factors.rank == FactorOptions::Rank::gates);
  return layer;
}

Tensor integers_of(std::span<const std::int32_t> from, std::vector<std::int64_t> shape) {
  Tensor out = at::empty(shape, at::TensorOptions().dtype(kInt32));
  std::ranges::copy(from, out.data_ptr<std::int32_t>());
  return out;
}

Tensor table_of(std::span<const Span> spans) {
  std::vector<std::int32_t> ends;
  for (const Span& s : spans) ends.insert(ends.end(), {s.begin, s.end});
  return integers_of(ends, {static_cast<std::int64_t>(spans.size()), 2});
}

Tensor shown_rows(const SpanStore& spans, SpanStore::Side side) {
  std::vector<Tensor> rows{at::zeros({spans.kv_heads(), 0, spans.dim()}, at::TensorOptions().dtype(kFloat32))};
  for (std::int64_t s = 0; s < spans.size(); ++s) rows.push_back(spans.rows(s, side));
  return at::cat(rows, 1);
}

void add_folded(const SpanMemory& memory, Result& result) {
  const SpanStore& spans = memory.spans;
  Tensor ranks = at::empty({spans.size(), spans.kv_heads(), 2}, at::TensorOptions().dtype(kInt32)), centred = at::empty(ranks.sizes(), at::TensorOptions().dtype(c10::ScalarType::Byte));
  for (std::int64_t i = 0; i < ranks.numel(); ++i) {
    const SpanFactors& f = spans.factors(i / 2 / spans.kv_heads(), i / 2 % spans.kv_heads(), i % 2 == 0 ? SpanStore::kKeys : SpanStore::kValues);
    ranks.data_ptr<std::int32_t>()[i] = f.raw ? -1 : f.rank;
    centred.data_ptr<std::uint8_t>()[i] = f.centred ? 1 : 0;
  }
  result.tensors.emplace_back("anchors", integers_of(memory.segments.anchors, {static_cast<std::int64_t>(memory.segments.anchors.size())}));
  result.tensors.emplace_back("spans", table_of(memory.segments.spans));
  result.tensors.emplace_back("short_spans", table_of(memory.segments.short_spans));
  result.tensors.emplace_back("ranks", ranks);
  result.tensors.emplace_back("centred", centred);
  result.tensors.emplace_back("singular_values", spans.singular_values());
  if (spans.gates().defined()) result.tensors.emplace_back("gates", spans.gates());
  result.tensors.emplace_back("coarse_keys", spans.coarse(SpanStore::kKeys));
  result.tensors.emplace_back("coarse_values", spans.coarse(SpanStore::kValues));
  result.tensors.emplace_back("span_keys", shown_rows(spans, SpanStore::kKeys));
  result.tensors.emplace_back("span_values", shown_rows(spans, SpanStore::kValues));
}

const Sekv& sekv_of(const io::SafetensorsFile& file, const KVPolicy& policy) {
  const auto* sekv = dynamic_cast<const Sekv*>(&policy);
  require(sekv != nullptr, file.where(), ": a trace of kind \"", kind_of(file), "\" holds what span memories are made of; given policy ", policy.name(), ", allowed sekv");
  return *sekv;
}

}  // namespace

Result replay_span(const io::SafetensorsFile& file, const KVPolicy& policy) {
  require(kind_of(file) == "span", file.where(), ": the trace is of kind \"", kind_of(file), "\"; allowed here: span");
  const Sekv& sekv = sekv_of(file, policy);
  const SekvOptions& o = sekv.options();
  const Layer layer = read(file, o);
  const bool learned = o.zoom.rule == ZoomOptions::Rule::learned;
  const SpanMemory memory =
      fold_prompt(layer.keys, layer.values, layer.nats(), segment(layer.nats(), sekv.segmenter(layer.group(), layer.dim())), o.factors, layer.gates ? &*layer.gates : nullptr);

  OpenAttention open = attend_rows(memory.dense_keys, memory.dense_values, layer.queries, layer.scale);
  const Tensor coarse = coarse_logits(memory.spans, layer.queries, layer.scale);
  const Tensor relevance = learned ? layer.router->relevance(memory.spans, layer.router->norms(memory.spans), layer.queries) : estimated_mass(coarse, open);
  const ZoomBudget budget = sekv.zoom_budget(memory.segments, layer.group(), layer.dim());
  const Tensor zoomed = within_budget(relevance, learned ? layer.router->wanted(relevance) : wanted_by_mass(relevance, o.zoom), memory.spans, budget, o.zoom.heads);
  merge_spans(open, memory.spans, layer.queries, layer.scale, coarse, zoomed);

  Result result;
  add_folded(memory, result);
  result.tensors.emplace_back("relevance", relevance);
  result.tensors.emplace_back("zoomed", zoomed);
  result.tensors.emplace_back("output", open.close());
  result.tensors.emplace_back("output_full", attend_rows(layer.keys, layer.values, layer.queries, layer.scale).close());
  const std::int64_t near = memory.near_bytes() + (learned ? 4 * layer.queries.size(1) * memory.spans.size() : 0), far = memory.spans.far_bytes();
  Tensor bytes = at::empty({2}, at::TensorOptions().dtype(c10::ScalarType::Long));
  bytes.data_ptr<std::int64_t>()[0] = near, bytes.data_ptr<std::int64_t>()[1] = far;
  result.tensors.emplace_back("bytes", bytes);
  result.metadata = {{"kvkeep_result", "1"}, {"policy", policy.to_json()}, {"kvkeep_version", kVersion}, {"bytes", text("[", near, ", ", far, "]")}, {"spans", std::to_string(memory.spans.size())},
                     {"resident_entries", text(budget.resident)}, {"over_budget", budget.resident > budget.entries ? "true" : "false"}};
  return result;
}

}  // namespace kvkeep::trace
