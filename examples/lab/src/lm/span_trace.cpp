// SPDX-License-Identifier: Apache-2.0
#include "kvlab/span_trace.h"

#include <cmath>
#include <optional>

#include "kvkeep/core/tensor.h"
#include "kvkeep/policy/sekv.h"
#include "kvkeep/trace/trace.h"
#include "kvkeep/version.h"
#include "kvlab/span_memory.h"
#include "span_layer.h"

namespace kvkeep::trace {
namespace {

Tensor floats(const io::SafetensorsFile& file, const std::string& name, std::int64_t dims, const std::string& shape) {
  KVKEEP_REQUIRE(file.has(name), file.where(), ": tensor \"", name, "\" is missing; a span trace needs it");
  Tensor t = file.tensor(name);
  want(file, name, t, t.dim() == dims && is_scorable(t.dtype()), "f32, f16 or bf16 " + shape);
  return contiguous(t);
}

}  // namespace

Tensor finite_floats(const io::SafetensorsFile& file, const std::string& name, std::int64_t dims,
                     const std::string& shape) {
  Tensor t = floats(file, name, dims, shape);
  KVKEEP_REQUIRE(all_finite(t), file.where(), ": tensor \"", name, "\" holds NaN or infinity; allowed finite numbers");
  return t;
}

TrainedParameters read_parameters(const io::SafetensorsFile& file, const Layer& layer, bool router, bool gates,
                                  std::int64_t max_rank) {
  TrainedParameters p;
  const std::int64_t heads = layer.queries.size(1);
  if (router) {
    p.projections = finite_floats(file, "router.W", 3, "[Hq, d', D] of a learned router");
    p.thresholds = finite_floats(file, "router.tau", 1, "[Hq] of a learned router");
    want(file, "router.W", p.projections,
         p.projections.size(0) == heads && p.projections.size(1) >= 1 && p.projections.size(2) == layer.dim(),
         text("[", heads, ", d', ", layer.dim(), "]"));
    want(file, "router.tau", p.thresholds, p.thresholds.size(0) == heads, text("[", heads, "]"));
  }
  for (std::size_t i = 0; gates && i < 3; ++i) {
    const std::string weight = text("gate.", 2 * i, ".weight"), bias = text("gate.", 2 * i, ".bias");
    p.gate_weights[i] = finite_floats(file, weight, 2, "[outputs, inputs] of the rank gates");
    p.gate_biases[i] = finite_floats(file, bias, 1, "[outputs] of the rank gates");
    const std::int64_t inputs = i == 0 ? max_rank + layer.dim() : p.gate_weights[i - 1].size(0),
                       outputs = p.gate_weights[i].size(0);
    want(file, weight, p.gate_weights[i],
         p.gate_weights[i].size(1) == inputs && (i < 2 ? outputs >= 1 : outputs == max_rank),
         text("[", i < 2 ? std::string("outputs") : std::to_string(max_rank), ", ", inputs,
              "], for max_rank = ", max_rank, " and D = ", layer.dim()));
    want(file, bias, p.gate_biases[i], p.gate_biases[i].size(0) == outputs, text("[", outputs, "]"));
  }
  return p;
}

Layer read_layer(const io::SafetensorsFile& file) {
  Layer layer;
  layer.keys = finite_floats(file, "keys", 3, "[Hkv, T, D]");
  layer.values = finite_floats(file, "values", 3, "[Hkv, T, D]");
  layer.queries = finite_floats(file, "queries", 3, "[n, Hq, D]");
  const std::int64_t heads = layer.keys.size(0), tokens = layer.keys.size(1), dim = layer.keys.size(2);
  want(file, "keys", layer.keys, heads >= 1 && dim >= 1 && tokens < INT32_MAX,
       "at least one head of one number, and fewer than 2^31 tokens");
  want(file, "values", layer.values, layer.values.sizes() == layer.keys.sizes(), "the shape of keys");
  want(file, "queries", layer.queries,
       layer.queries.size(1) >= heads && layer.queries.size(1) % heads == 0 && layer.queries.size(2) == dim,
       text("[n, a multiple of ", heads, ", ", dim, "]"));
  layer.surprisal = as<float>(floats(file, "surprisal", 1, "[T]"));
  want(file, "surprisal", layer.surprisal, layer.surprisal.size(0) == tokens, text("[", tokens, "], one per key"));
  layer.scale = number(file, "softmax_scale", 1 / std::sqrt(static_cast<double>(dim)));
  return layer;
}

namespace {

Tensor integers_of(std::span<const std::int32_t> from, std::vector<std::int64_t> shape) {
  Tensor out = empty(shape, Dtype::i32);
  std::ranges::copy(from, out.data<std::int32_t>());
  return out;
}

}  // namespace

Tensor table_of(std::span<const Span> spans) {
  std::vector<std::int32_t> ends;
  for (const Span& s : spans) ends.insert(ends.end(), {s.begin, s.end});
  return integers_of(ends, {static_cast<std::int64_t>(spans.size()), 2});
}

namespace {

Tensor shown_rows(const lm::SpanStore& spans, KvSide side) {
  std::int64_t tokens = 0;
  for (const Span& s : spans.spans()) tokens += s.length();
  Tensor rows = empty({spans.kv_heads(), tokens, spans.dim()}, Dtype::f32);
  for (std::int64_t s = 0, first = 0; s < spans.size(); ++s) {
    const Tensor own = spans.rows(s, side);
    copy(own, rows.narrow(1, first, own.size(1)));
    first += own.size(1);
  }
  return rows;
}

void add_folded(const lm::SpanMemory& memory, Result& result) {
  const lm::SpanStore& spans = memory.spans;
  Tensor ranks = empty({spans.size(), spans.kv_heads(), 2}, Dtype::i32), centred = empty(ranks.sizes(), Dtype::u8);
  for (std::int64_t i = 0; i < ranks.numel(); ++i) {
    const SpanFactors& f =
        spans.factors(i / 2 / spans.kv_heads(), i / 2 % spans.kv_heads(), i % 2 == 0 ? KvSide::keys : KvSide::values);
    ranks.data<std::int32_t>()[i] = f.raw ? -1 : f.rank;
    centred.data<std::uint8_t>()[i] = f.centred ? 1 : 0;
  }
  result.tensors.emplace_back(
      "anchors", integers_of(memory.segments.anchors, {static_cast<std::int64_t>(memory.segments.anchors.size())}));
  result.tensors.emplace_back("spans", table_of(memory.segments.spans));
  result.tensors.emplace_back("short_spans", table_of(memory.segments.short_spans));
  result.tensors.emplace_back("ranks", ranks);
  result.tensors.emplace_back("centred", centred);
  result.tensors.emplace_back("singular_values", spans.singular_values());
  if (spans.gates().defined()) result.tensors.emplace_back("gates", spans.gates());
  result.tensors.emplace_back("coarse_keys", spans.coarse(KvSide::keys));
  result.tensors.emplace_back("coarse_values", spans.coarse(KvSide::values));
  result.tensors.emplace_back("span_keys", shown_rows(spans, KvSide::keys));
  result.tensors.emplace_back("span_values", shown_rows(spans, KvSide::values));
}

}  // namespace

const Sekv& sekv_of(const io::SafetensorsFile& file, const KVPolicy& policy) {
  const auto* sekv = dynamic_cast<const Sekv*>(&policy);
  KVKEEP_REQUIRE(sekv != nullptr, file.where(), ": a trace of kind \"", kind_of(file),
                 "\" holds the input of span memories; given policy ", policy.name(), "; allowed sekv");
  return *sekv;
}

Result replay_span(const io::SafetensorsFile& file, const KVPolicy& policy) {
  KVKEEP_REQUIRE(kind_of(file) == "span", file.where(), ": the trace is of kind \"", kind_of(file),
                 "\"; allowed here: span");
  const Sekv& sekv = sekv_of(file, policy);
  const SekvOptions& o = sekv.options();
  const Layer layer = read_layer(file);
  const FactorOptions& factors = o.memory.factors;
  const ZoomOptions& zoom = o.memory.zoom;
  const bool learned = zoom.learned(true), gated = factors.rank == FactorOptions::Rank::gates;
  const TrainedParameters parameters = read_parameters(file, layer, learned, gated, factors.max_rank);
  const std::optional<Router> router =
      learned ? std::optional<Router>(std::in_place, parameters.projections, parameters.thresholds) : std::nullopt;
  const std::optional<RankGates> gates =
      gated ? std::optional<RankGates>(std::in_place, parameters.gate_weights, parameters.gate_biases) : std::nullopt;
  const lm::SpanMemory memory =
      lm::fold_prompt(layer.keys, layer.values, layer.nats(),
                      segment(layer.nats(), sekv.segmenter(layer.keys.size(1), layer.group(), layer.dim(), learned)),
                      factors, gates ? &*gates : nullptr);

  OpenAttention open = lm::attend_rows(memory.dense_keys, memory.dense_values, layer.queries, layer.scale);
  const Tensor coarse = lm::coarse_logits(memory.spans, layer.queries, layer.scale);
  const Tensor relevance =
      learned ? lm::relevance(*router, memory.spans, lm::router_norms(*router, memory.spans), layer.queries)
              : lm::estimated_mass(coarse, open);
  const cpu::ZoomBudget budget{
      .entries = o.memory.entries_after(memory.segments.tokens),
      .resident = memory.segments.entries(o.memory.entries_per_span(layer.group(), layer.dim(), learned)),
      .per_head = o.memory.published_budget};
  const Tensor zoomed =
      lm::within_budget(relevance, learned ? lm::wanted(*router, relevance) : lm::wanted_by_mass(relevance, zoom),
                        memory.spans, budget, zoom.heads);
  lm::merge_spans(open, memory.spans, layer.queries, layer.scale, coarse, zoomed);

  Result result;
  add_folded(memory, result);
  result.tensors.emplace_back("relevance", relevance);
  result.tensors.emplace_back("zoomed", zoomed);
  result.tensors.emplace_back("output", lm::closed(open));
  result.tensors.emplace_back("output_full",
                              lm::closed(lm::attend_rows(layer.keys, layer.values, layer.queries, layer.scale)));
  const std::int64_t near = memory.near_bytes() + (learned ? 4 * layer.queries.size(1) * memory.spans.size() : 0),
                     far = memory.spans.far_bytes();
  Tensor bytes = empty({2}, Dtype::i64);
  bytes.data<std::int64_t>()[0] = near, bytes.data<std::int64_t>()[1] = far;
  result.tensors.emplace_back("bytes", bytes);
  result.metadata = {{"kvkeep_result", "1"},
                     {"policy", policy.to_json()},
                     {"kvkeep_version", kVersion},
                     {"bytes", text("[", near, ", ", far, "]")},
                     {"spans", std::to_string(memory.spans.size())},
                     {"resident_entries", text(budget.resident)},
                     {"over_budget", budget.resident > budget.entries ? "true" : "false"}};
  return result;
}

}  // namespace kvkeep::trace
