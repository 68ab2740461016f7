// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/version.h"

#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::trace {
namespace {

/// One prompt, with its shapes known and checked.
struct Prompt {
  ModelSpec spec;
  std::int32_t tokens = 0, queries = 0;  ///< T, and the number of newest ones whose queries were recorded
  std::vector<Tensor> layer_keys;        ///< [num_layers] [Hkv, T, D]
  std::vector<Tensor> layer_queries;     ///< [num_layers] [Hq, queries, D]
};

std::int32_t layers_of(const io::SafetensorsFile& file) {
  const std::string& given = metadata(file, "num_layers", "; a prefill trace needs it");
  std::int32_t layers = 0;
  const char* end = given.data() + given.size();
  const auto [stop, error] = std::from_chars(given.data(), end, layers);
  KVKEEP_REQUIRE(error == std::errc() && stop == end && layers >= 1 && layers <= 4096, file.where(),
                 ": metadata \"num_layers\" is \"", shortened(given), "\"; allowed 1 to 4096");
  return layers;
}

Prompt read_prompt(const io::SafetensorsFile& file) {
  KVKEEP_REQUIRE(kind_of(file) == "prefill", file.where(), ": the trace is of kind \"", shortened(kind_of(file)),
                 "\"; allowed here: prefill");
  Prompt prompt;
  prompt.spec.layers.resize(static_cast<std::size_t>(layers_of(file)));
  prompt.spec.softmax_scale = number(file, "softmax_scale", 0.0);
  prompt.spec.logit_cap = number(file, "logit_cap", 0.0);
  for (std::int32_t l = 0; l < prompt.spec.num_layers(); ++l) {
    const auto tensor = [&](const char* name) {
      const std::string full = text("layer.", l, ".", name);
      KVKEEP_REQUIRE(file.has(full), file.where(), ": tensor \"", full,
                     "\" is missing; a prefill trace needs it for each of ", prompt.spec.num_layers(), " layers");
      Tensor t = file.tensor(full);
      want(file, full, t, t.dim() == 3 && is_scorable(t.dtype()) && t.numel() > 0,
           "f32, f16 or bf16 [heads, tokens, D]");
      return contiguous(t);
    };
    const Tensor keys = tensor("keys"), queries = tensor("queries");
    if (l == 0) {
      want(file, "layer.0.keys", keys, keys.size(1) <= std::numeric_limits<std::int32_t>::max(), "fewer tokens");
      prompt.tokens = static_cast<std::int32_t>(keys.size(1));
      prompt.spec.kv_heads = static_cast<std::int32_t>(keys.size(0));
      prompt.spec.key_dim = static_cast<std::int32_t>(keys.size(2));
      prompt.spec.value_dim = prompt.spec.key_dim;
      prompt.spec.query_heads = static_cast<std::int32_t>(queries.size(0));
      prompt.queries = static_cast<std::int32_t>(queries.size(1));
    }
    const ModelSpec& s = prompt.spec;
    want(file, text("layer.", l, ".keys"), keys,
         keys.size(0) == s.kv_heads && keys.size(1) == prompt.tokens && keys.size(2) == s.key_dim &&
             keys.dtype() == (l == 0 ? keys : prompt.layer_keys.front()).dtype(),
         "the shape and dtype of the first layer");
    want(file, text("layer.", l, ".queries"), queries,
         queries.size(0) == s.query_heads && queries.size(0) % s.kv_heads == 0 && queries.size(1) == prompt.queries &&
             queries.size(1) <= prompt.tokens && queries.size(2) == s.key_dim,
         text("[Hq, the newest of ", prompt.tokens, " tokens, ", s.key_dim, "] with Hq a multiple of ", s.kv_heads,
              ", as the first layer's"));
    if (const std::string name = text("layer.", l, ".sinks"); file.has(name))
      prompt.spec.layers[static_cast<std::size_t>(l)].sinks = sink_logits(file, name, file.tensor(name), s.query_heads);
    prompt.layer_keys.push_back(keys);
    prompt.layer_queries.push_back(queries);
  }
  prompt.spec.check();
  return prompt;
}

/// One layer and the tokens that reach it. Owns the data that its table points to.
struct PromptLayer {
  PromptLayer(const Prompt& prompt, std::int32_t layer, const std::vector<std::int32_t>& present, std::int32_t wanted)
      : positions(present) {
    const auto n = static_cast<std::int64_t>(present.size());
    keys = prompt.layer_keys[static_cast<std::size_t>(layer)];
    if (n < prompt.tokens) keys = gather(keys, 1, present);
    const std::span<const std::int32_t> asking = std::span(present).last(static_cast<std::size_t>(wanted));
    std::vector<std::int32_t> places;
    for (const std::int32_t token : asking) places.push_back(token - (prompt.tokens - prompt.queries));
    queries = gather(prompt.layer_queries[static_cast<std::size_t>(layer)], 1, places);
    table.key_dtype = table.value_dtype = keys.dtype();
    const std::int64_t width = prompt.spec.key_dim * keys.element_size();
    for (std::int32_t h = 0; h < prompt.spec.kv_heads; ++h) {
      Row row;
      row.layer = layer, row.head = h, row.length = static_cast<std::int32_t>(n), row.first = table.slots;
      row.keys = {static_cast<std::byte*>(keys.bytes()) + h * n * width, width, width};
      row.positions = positions.data();
      table.slots += n;
      table.rows.push_back(row);
    }
    const auto bytes = queries.element_size();
    RowGroup group;
    group.layer = layer;
    group.queries = {.data = static_cast<const std::byte*>(queries.bytes()),
                     .dtype = queries.dtype(),
                     .token_stride = queries.stride(1) * bytes,
                     .head_stride = queries.stride(0) * bytes,
                     .positions = positions.data() + n - wanted,
                     .ring = wanted,
                     .begin = 0,
                     .count = wanted};
    group.next_position = group.prompt_end = prompt.tokens;
    group.seen = group.prompt = {prompt.tokens};
    table.groups.push_back(group);
  }
  PromptLayer(const PromptLayer&) = delete;
  PromptLayer& operator=(const PromptLayer&) = delete;

  std::vector<std::int32_t> positions;
  Tensor keys, queries;
  RowTable table;
};

/// Number of newest present tokens whose queries were recorded.
std::int32_t recorded(const Prompt& prompt, const std::vector<std::int32_t>& present) {
  return static_cast<std::int32_t>(present.end() - std::ranges::lower_bound(present, prompt.tokens - prompt.queries));
}

/// [Hkv, longest row] places in the prompt; -1 after the end of a row.
Tensor slots_of(const std::vector<std::int32_t>& present, std::int32_t heads, const std::optional<KeepSet>& keep) {
  std::int64_t width = keep ? 0 : static_cast<std::int64_t>(present.size());
  for (std::int32_t h = 0; keep && h < heads; ++h) width = std::max(width, keep->count(static_cast<std::size_t>(h)));
  Tensor slots = full<std::int32_t>({heads, width}, -1);
  for (std::int32_t h = 0; h < heads; ++h) {
    std::int32_t* out = slots.data<std::int32_t>() + h * width;
    if (!keep)
      std::ranges::copy(present, out);
    else
      std::ranges::transform(keep->row(static_cast<std::size_t>(h)), out,
                             [&](std::int32_t slot) { return present[static_cast<std::size_t>(slot)]; });
  }
  return slots;
}

}  // namespace

Result replay_prefill(const io::SafetensorsFile& file, const KVPolicy& policy) {
  const Prompt prompt = read_prompt(file);
  const std::int32_t layers = prompt.spec.num_layers();
  check(policy, prompt.spec, {.queries = true, .layer_by_layer = true});
  KVKEEP_REQUIRE(!policy.needs().values && !policy.needs().output_projection, file.where(), ": policy ", policy.name(),
                 " reads values, which prefill traces do not hold; allowed policies that read keys and queries");

  Result result;
  Tensor variance = full({layers}, std::numeric_limits<double>::quiet_NaN());
  std::int32_t selection_layer = -1;
  bool restart = false;
  std::int64_t dropped = 0;
  std::vector<std::int32_t> present(static_cast<std::size_t>(prompt.tokens));
  std::iota(present.begin(), present.end(), 0);
  const std::unique_ptr<PromptPass> pass =
      policy.narrows() ? begun_prompt("replay", policy, host(), prompt.spec, prompt.tokens) : nullptr;
  for (std::int32_t l = 0; l < layers && !restart; ++l) {
    const std::int32_t there = recorded(prompt, present);
    const std::int32_t wanted =
        pass == nullptr ? std::min(policy.needs().queries, prompt.tokens)
                        : wanted_queries("replay", policy, *pass, l, static_cast<std::int32_t>(present.size()));
    KVKEEP_REQUIRE(wanted <= there, file.where(), ": layer ", l, " holds the newest ", there,
                   " queries of the tokens that reach it; ", policy.name(), " reads ", wanted,
                   "; allowed at most those recorded");
    Decision decision;
    if (pass == nullptr || wanted > 0) {
      const PromptLayer layer(prompt, l, present, pass == nullptr ? there : wanted);
      const Evidence evidence{.spec = prompt.spec,
                              .table = layer.table,
                              .basis = QueryBasis::post_rope,
                              .moment = pass == nullptr ? Moment::prefill_end : Moment::prefill_layer};
      decision = pass == nullptr ? policy.decide(evidence) : policy.decide(*pass, evidence);  // which looks at it
      if (pass == nullptr) {
        if (decision.keep) check_keep(policy.name(), layer.table, *decision.keep);
        check_decision(policy.name(), layer.table, decision);
        decision.narrow.reset();
      }
    }
    if (decision.relative_variance) variance.data<double>()[l] = *decision.relative_variance;
    if (decision.reason == Reason::select_layer) selection_layer = l;
    result.tensors.emplace_back(text("layer.", l, ".slots"), slots_of(present, prompt.spec.kv_heads, decision.keep));
    if (decision.keep)
      dropped += static_cast<std::int64_t>(present.size()) * prompt.spec.kv_heads - decision.keep->indptr.back();
    if (!decision.narrow) continue;
    std::vector<std::int32_t> left;
    for (std::int64_t i = 0; i < decision.narrow->tokens.numel(); ++i)
      left.push_back(present[static_cast<std::size_t>(decision.narrow->tokens.data<std::int32_t>()[i])]);
    present = std::move(left);
    restart = decision.narrow->restart;
  }
  if (restart) result.tensors.clear();  // the first pass keeps no cache
  result.tensors.emplace_back("selection_layer", full<std::int32_t>({1}, selection_layer));
  result.tensors.emplace_back("relative_variance", variance);
  result.tensors.emplace_back("tokens",
                              clone(Tensor(present.data(), Dtype::i32, {static_cast<std::int64_t>(present.size())})));
  result.metadata = {{"kvkeep_result", "1"},
                     {"policy", policy.to_json()},
                     {"kvkeep_version", kVersion},
                     {"selection_layer", std::to_string(selection_layer)},
                     {"tokens_going_on", std::to_string(present.size())},
                     {"slots_dropped", std::to_string(dropped)}};
  return result;
}

std::vector<std::vector<std::int32_t>> prompt_ranks(const io::SafetensorsFile& file,
                                                    const PromptScoreOptions& options) {
  const Prompt prompt = read_prompt(file);
  KVKEEP_REQUIRE(options.window < prompt.tokens && options.window <= prompt.queries, file.where(), ": a prompt of ",
                 prompt.tokens, " tokens with the newest ", prompt.queries,
                 " queries; allowed more tokens than, and at least as many queries as, the window of ", options.window);
  std::vector<std::int32_t> all(static_cast<std::size_t>(prompt.tokens));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::vector<std::int32_t>> ranks;
  for (std::int32_t l = 0; l < prompt.spec.num_layers(); ++l) {
    const PromptLayer layer(prompt, l, all, options.window);
    const Tensor scores = prompt_scores({.spec = prompt.spec,
                                         .table = layer.table,
                                         .basis = QueryBasis::post_rope,
                                         .moment = Moment::prefill_layer},
                                        options)
                              .tokens;
    ranks.push_back(ranks_of({scores.data<float>(), static_cast<std::size_t>(scores.numel())}));
  }
  return ranks;
}

}  // namespace kvkeep::trace
