// SPDX-License-Identifier: Apache-2.0
#include "kvlab/record.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "i32_tensor.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/parts/pins.h"

namespace kvkeep::lm {
namespace {

using Json = nlohmann::json;
using trace::Result;

std::map<std::string, std::string> about_model(const ModelSpec& spec) {
  std::map<std::string, std::string> about{{"kvkeep_trace", "1"},
                                           {"rope_style", name_of(spec.rope.style)},
                                           {"inv_freq", Json(spec.rope.inv_freq).dump()},
                                           {"attention_scaling", Json(spec.rope.attention_scaling).dump()},
                                           {"softmax_scale", Json(spec.scale()).dump()},
                                           {"num_layers", std::to_string(spec.num_layers())}};
  Json ropes;
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    if (const auto& rope = spec.layers[static_cast<std::size_t>(l)].rope)
      ropes[std::to_string(l)] = {{"rope_style", name_of(rope->style)},
                                  {"inv_freq", rope->inv_freq},
                                  {"attention_scaling", rope->attention_scaling}};
  if (!ropes.empty()) about["layer_ropes"] = ropes.dump();
  return about;
}

/// The queries of one layer, oldest first: [1, Hq, W, D] before RoPE.
Tensor queries_of(const QueryView& view, std::int32_t heads, std::int32_t dim) {
  Tensor queries = at::empty({1, heads, view.count, dim}, at::TensorOptions(at::kFloat));
  float* to = queries.mutable_data_ptr<float>();
  for (std::int32_t h = 0; h < heads; ++h)
    for (std::int32_t i = 0; i < view.count; ++i, to += dim)
      std::memcpy(to, view.at(i, h), static_cast<std::size_t>(dim) * sizeof(float));
  return queries;
}

// Follows one sequence and captures it before the decision that was asked for.
class EventRecorder {
 public:
  /// `projections`: W_o of every layer if the trace should hold it, else empty.
  EventRecorder(const ModelSpec& spec, std::int32_t queries, std::optional<std::int32_t> step,
                std::vector<kvkeep::Tensor> projections)
      : spec_(spec),
        projections_(std::move(projections)),
        full_layers_(spec.full_layers()),
        ring_(static_cast<std::int32_t>(full_layers_.size()), queries, spec.query_heads, spec.key_dim),
        step_(step) {}

  void see(const LayerSight& sight) {
    const auto found = std::find(full_layers_.begin(), full_layers_.end(), sight.layer);
    if (found == full_layers_.end()) return;
    const Tensor& q = sight.queries;
    std::vector<std::int32_t> positions(static_cast<std::size_t>(q.size(0)));
    const auto index = static_cast<std::int32_t>(found - full_layers_.begin());
    std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(ring_.seen(index)));
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(float));
    ring_.push(index, static_cast<const std::byte*>(q.const_data_ptr()), Dtype::f32, q.stride(0) * kBytes,
               q.stride(1) * kBytes, positions);
  }

  void before(const DecisionSight& sight) {
    if (taken() || (step_ ? sight.steps[0] != *step_ : sight.keeper.plan(sight.view).cuts.empty())) return;
    const SequenceId id = sight.view.sequences[0];
    for (const std::int32_t layer : full_layers_) take(layer, sight, id);
    const QueryView view = ring_.view(0);
    std::vector<std::int32_t> positions;
    for (std::int32_t i = 0; i < view.count; ++i) positions.push_back(view.position(i));
    add("query_positions", i32_tensor(positions, {1, view.count}));
    std::vector<std::int32_t> pinned;
    for (const PositionSpan& span : sight.keeper.part<parts::Pins>().pinned(id))
      pinned.insert(pinned.end(), {0, span.begin, span.end});
    if (!pinned.empty()) add("pinned", i32_tensor(pinned, {std::ssize(pinned) / 3, 3}));
    result_.metadata = about_model(spec_);
    result_.metadata["kind"] = "event";
    result_.metadata["query_basis"] = "pre_rope";
    result_.metadata["layers"] = Json(full_layers_).dump();
    result_.metadata["next_position"] = Json{sight.keeper.logical_length(id)}.dump();
    result_.metadata["step"] = std::to_string(sight.steps[0]);
    result_.metadata["recorded_under"] = sight.keeper.policy().to_json();
  }

  [[nodiscard]] bool taken() const { return !result_.tensors.empty(); }
  [[nodiscard]] Result result() { return std::move(result_); }

 private:
  void add(std::string name, Tensor t) { result_.tensors.emplace_back(std::move(name), std::move(t)); }

  void take(std::int32_t layer, const DecisionSight& sight, SequenceId id) {
    const std::string prefix = text("layer.", layer, ".");
    const auto length = static_cast<std::int64_t>(sight.keeper.positions(id, full_layers_.front(), 0).size());
    std::vector<std::int32_t> positions;
    std::vector<float> credit;
    for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
      const auto row = sight.keeper.positions(id, layer, h);
      const auto paid = sight.keeper.credit(id, layer, h);
      KVKEEP_REQUIRE(static_cast<std::int64_t>(row.size()) == length, "record: layer ", layer, " holds ", row.size(),
                     " slots in head ", h, ", the first row ", length, "; an event trace holds rows of one length");
      positions.insert(positions.end(), row.begin(), row.end());
      credit.insert(credit.end(), paid.begin(), paid.end());
    }
    const auto& rows = std::get<DenseKv>(sight.keeper.layers()[static_cast<std::size_t>(layer)]);
    const std::int64_t place = sight.view.places[0];
    add(prefix + "keys", clone(rows.keys.narrow(0, place, 1).narrow(2, 0, length)));
    add(prefix + "values", clone(rows.values.narrow(0, place, 1).narrow(2, 0, length)));
    add(prefix + "positions", i32_tensor(positions, {1, spec_.kv_heads, length}));
    if (!projections_.empty()) add(prefix + "o_proj", projections_[static_cast<std::size_t>(layer)]);
    const auto index =
        static_cast<std::int32_t>(std::find(full_layers_.begin(), full_layers_.end(), layer) - full_layers_.begin());
    add(prefix + "queries", queries_of(ring_.view(index), spec_.query_heads, spec_.key_dim));
    if (credit.empty()) return;
    Tensor paid = at::empty({1, spec_.kv_heads, static_cast<std::int64_t>(credit.size()) / spec_.kv_heads},
                            at::TensorOptions(at::kFloat));
    std::copy(credit.begin(), credit.end(), paid.mutable_data_ptr<float>());
    add(prefix + "credit", paid);
  }

  const ModelSpec& spec_;
  std::vector<kvkeep::Tensor> projections_;
  std::vector<std::int32_t> full_layers_;
  QueryRing ring_;
  std::optional<std::int32_t> step_;
  Result result_;
};

/// [T, H, D] before RoPE at positions 0..T-1 -> the last W of them, [H, W, D] after RoPE.
Tensor rotated_tail(const RopeSpec& rope, const Tensor& vectors, std::int64_t window) {
  const std::int64_t first = vectors.size(0) - window, heads = vectors.size(1), dim = vectors.size(2),
                     pairs = rope.rotary_dim() / 2;
  Tensor tail = vectors.narrow(0, first, window).permute({1, 0, 2}).contiguous().clone();
  std::vector<float> cosines(static_cast<std::size_t>(pairs)), sines(static_cast<std::size_t>(pairs));
  for (std::int64_t i = 0; i < window; ++i) {
    rope_at(rope, first + i, cosines.data(), sines.data());
    for (std::int64_t h = 0; h < heads; ++h)
      rope_rotate(rope.style, pairs, cosines.data(), sines.data(),
                  tail.mutable_data_ptr<float>() + (h * window + i) * dim);
  }
  return tail;
}

Result name_the_model(const char* kind, const char* ids_name, const std::filesystem::path& model,
                      const std::vector<std::int32_t>& ids, std::int32_t new_tokens) {
  Result result;
  result.tensors.emplace_back(ids_name, i32_tensor(ids, {static_cast<std::int64_t>(ids.size())}));
  result.metadata = {{"kvkeep_trace", "1"},
                     {"kind", kind},
                     {"model", model.generic_string()},
                     {"new_tokens", std::to_string(new_tokens)},
                     {"compute_dtype", "f32"}};
  return result;
}

}  // namespace

Result record_event(Decoder& decoder, std::unique_ptr<KVPolicy> policy, Request request,
                    const EventRecording& options) {
  KVKEEP_REQUIRE(policy != nullptr, "record: policy must not be null; allowed one from make_policy()");
  KVKEEP_REQUIRE(!options.step || *options.step >= 1, "record: event step is ", options.step.value_or(0),
                 "; allowed 1 or more (the prefill is step 0 and is never cut)");
  KVKEEP_REQUIRE(options.queries >= 1, "record: given ", options.queries, " queries to keep; allowed 1 or more");
  KVKEEP_REQUIRE_AS(Unsupported, is_scorable(options.cache_dtype), "record: the cache is ", options.cache_dtype,
                    "; traces hold f32, f16 or bf16");
  if (options.step) request.new_tokens = std::max(request.new_tokens, *options.step + 1);
  const Trigger trigger = policy->trigger();
  const Needs needs = policy->needs();
  EventRecorder recorder(decoder.spec(), std::max(options.queries, needs.queries), options.step,
                         needs.output_projection ? decoder.output_projections() : std::vector<kvkeep::Tensor>{});
  GeneratorOptions generator_options{.capacity = slots_needed(decoder.spec(), trigger, request),
                                     .cache_dtype = options.cache_dtype};
  generator_options.hooks.on_layer = [&](const LayerSight& sight) { recorder.see(sight); };
  generator_options.hooks.on_step = options.progress;
  generator_options.hooks.before_decision = [&](const DecisionSight& sight) { recorder.before(sight); };
  const std::int32_t steps = request.new_tokens - 1;
  Generator generator(decoder, std::move(policy), std::move(generator_options));
  generator.join(std::move(request));
  while (!recorder.taken() && generator.step()) {
  }
  KVKEEP_REQUIRE(recorder.taken(), "record: the run of ", steps, " decode steps has no event",
                 options.step
                     ? text(" step ", *options.step)
                     : std::string(trigger.never ? " (the policy never cuts)" : " (the policy was not due in it)"),
                 "; allowed an --event STEP within the run, or more new tokens");
  return recorder.result();
}

Result record_prefill(Decoder& decoder, const std::vector<std::int32_t>& prompt, std::int32_t window,
                      const std::function<void(std::int64_t)>& progress) {
  const auto n = static_cast<std::int32_t>(prompt.size());
  KVKEEP_REQUIRE(n >= 1, "record: the prompt is empty; allowed one token or more");
  KVKEEP_REQUIRE(window >= 0 && window <= n, "record: the last ", window, " queries of a prompt of ", n,
                 " tokens; allowed 0 (all) to ", n);
  const std::vector<LayerCache> cache = decoder.make_cache(1, n);
  std::vector<std::int32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  Result result;
  StepOptions options{.logits = Logits::none};
  options.on_layer = [&](const LayerSight& sight) {
    result.tensors.emplace_back(
        text("layer.", sight.layer, ".queries"),
        rotated_tail(decoder.spec().rope_of(sight.layer), sight.queries.cpu(), window == 0 ? n : window));
    result.tensors.emplace_back(
        text("layer.", sight.layer, ".keys"),
        torch_tensor(cache[static_cast<std::size_t>(sight.layer)].keys).select(0, 0).cpu().contiguous());
    if (progress) progress(1);
  };
  const std::vector<std::int32_t> whole{0, n}, row{0}, none{0};
  decoder.forward({prompt, whole, positions, row, none}, cache, options);
  result.metadata = about_model(decoder.spec());
  result.metadata["kind"] = "prefill";
  return result;
}

Result record_decoder(const std::filesystem::path& model, const std::vector<std::int32_t>& ids, std::int32_t new_tokens,
                      std::int32_t query_tail) {
  Result result = name_the_model("decoder", "input_ids", model, ids, new_tokens);
  result.metadata["query_tail"] = std::to_string(query_tail);
  return result;
}

Result record_generate(const std::filesystem::path& model, const std::vector<std::int32_t>& prompt,
                       std::int32_t new_tokens) {
  return name_the_model("generate", "prompt", model, prompt, new_tokens);
}

}  // namespace kvkeep::lm
