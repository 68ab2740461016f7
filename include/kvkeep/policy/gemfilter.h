// SPDX-License-Identifier: Apache-2.0
#pragma once
/// GemFilter: the last query of an early layer chooses tokens, which then run again as a new, short prompt. Source:
/// GemFilter (Shi et al., Discovering the Gems in Early Layers). Differs: see last_query_scores().

#include <memory>
#include <utility>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/policy/prefill.h"

namespace kvkeep {

struct GemFilterOptions {
  std::int32_t select = 2048;  ///< tokens of the second pass
  std::int32_t layer = 13;     ///< the layer whose last query chooses; layers after it do not run in the first pass
  std::int32_t pool = 5;       ///< tokens pooled over, odd

  void describe(Fields& f);
};

class GemFilter final : public Prefill {
 public:
  GemFilter(GemFilterOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                         std::int32_t tokens) const override;
  [[nodiscard]] LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                           std::span<PromptPass* const> passes) const override;
  [[nodiscard]] std::vector<PromptCourse> courses(const ModelSpec& spec, std::int32_t tokens) const override;

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;
  [[nodiscard]] LayerDemand layer_demand() const override { return {.policy = name()}; }

 private:
  GemFilterOptions options_;
};

namespace gemfilter_detail {

class GemFilterPass final : public PromptPass {
 public:
  GemFilterPass(const GemFilterOptions& options, std::int32_t tokens) : options_(options), tokens_(tokens) {}

  [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t) const override {
    return layer == options_.layer && tokens_ > options_.select ? 1 : 0;
  }

 private:
  GemFilterOptions options_;
  std::int32_t tokens_;
};

}  // namespace gemfilter_detail

inline void GemFilterOptions::describe(Fields& f) {
  f.exactly_one(
      {{"budget", f.integer("budget", select, 1, INT32_MAX, "tokens of the second pass", {"select_k"}, "required")}});
  f.enter("scorer");
  f.pool(pool, "tokens pooled over, odd; 1: none");
  f.leave();
  f.enter("layers");
  f.exactly_one({{"layer", f.integer("layer", layer, 0, INT32_MAX,
                                     "the layer whose last query chooses the tokens; the first pass ends there",
                                     {"select_layer_idx"}, "required")}});
  f.leave();
}

inline GemFilter::GemFilter(GemFilterOptions options, std::unique_ptr<KVPolicy> decoding, std::string json)
    : Prefill("gemfilter", std::move(decoding), std::move(json)), options_(options) {
  KVKEEP_REQUIRE(options_.select >= 1, "gemfilter: select; given ", options_.select, "; allowed 1 or more");
  KVKEEP_REQUIRE(options_.layer >= 0, "gemfilter: layer; given ", options_.layer, "; allowed 0 or more");
  KVKEEP_REQUIRE(options_.pool >= 1 && options_.pool % 2 == 1, "gemfilter: pool; given ", options_.pool,
                 "; allowed odd numbers from 1 on");
}

inline std::vector<std::string> GemFilter::misfits(const ModelSpec& spec) const {
  if (options_.layer < spec.num_layers()) return {};
  return {text("layer: ", options_.layer, "; allowed 0 to ", spec.num_layers() - 1, ", a layer of the model")};
}

inline std::vector<PromptCourse> GemFilter::courses(const ModelSpec& spec, std::int32_t tokens) const {
  const auto layers = static_cast<std::size_t>(spec.num_layers());
  const bool again = tokens > options_.select;
  const std::int32_t going_on = again ? options_.select : tokens;
  return {{.entered = std::vector(again ? static_cast<std::size_t>(options_.layer) + 1 : layers, tokens),
           .held = std::vector(layers, going_on),
           .restart = again ? going_on : 0}};
}

inline std::unique_ptr<PromptPass> GemFilter::begin_prompt(Machine&, const ModelSpec&, std::int32_t tokens) const {
  return std::make_unique<gemfilter_detail::GemFilterPass>(options_, tokens);
}

inline LayerDecision GemFilter::decide_layer(Machine& machine, const Evidence& evidence,
                                             std::span<PromptPass* const> passes) const {
  const RowTable& table = evidence.table;
  for (std::size_t g = 0; g < passes.size(); ++g) {
    const Row& row = table.rows[static_cast<std::size_t>(table.groups[g].first_row)];
    KVKEEP_REQUIRE_AS(StateError, passes[g]->wants(row.layer, row.length) > 0, "prompt pass: layer ", row.layer,
                      " is not due; allowed layer ", options_.layer);
  }
  const Limits limits{Variant::strict, {}, std::vector<RowLimit>(table.rows.size())};
  const std::unique_ptr<Event> event = machine.begin(evidence, limits, layer_demand());
  const PromptScores scores = event->prompt_scores({.pool = options_.pool, .by = PromptScoreOptions::By::last_query});
  LayerDecision decision;
  for (const auto& tokens : event->choose(scores.tokens, options_.select, 0, std::vector<bool>(passes.size(), true))
                                .read(machine.memory())) {
    decision.prompts.push_back({.reason = Reason::select_layer, .narrow = tokens_of(*tokens)});
    decision.prompts.back().narrow->restart = true;
  }
  return decision;
}

}  // namespace kvkeep
