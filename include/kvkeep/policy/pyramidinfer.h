// SPDX-License-Identifier: Apache-2.0
#pragma once
/// PyramidInfer: fewer tokens continue from layer to layer; every layer's cache holds the tokens that entered it.
/// Source: PyramidInfer (Yang et al., Pyramid KV Cache Compression for High-throughput LLM Inference), as ASL's
/// repository runs it. Differs: fp32; among equal scores the lower index is chosen first; its compression of decoded
/// blocks is left out: any policy may decide after the prompt.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/prefill.h"

namespace kvkeep {

class Fields;

struct ShrinkingContextOptions {
  enum class Schedule : std::uint8_t {
    cosine,    ///< from 1 at the first layer down to `keep`
    constant,  ///< `keep` at every layer
  };
  double recent_ratio = 0.2;  ///< newest share of the prompt: observes, is not scored, and always continues
  double keep = 0.9;          ///< share of the others that continues, at the deepest layer
  Schedule schedule = Schedule::cosine;
  std::int32_t min_context = 64;  ///< at least this many of the others are left
  double distance_weight = 1.2;   ///< weight of the newest observer, relative to 1 for the oldest
  std::int32_t sink = 4;          ///< oldest tokens that always continue

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// One prompt that loses tokens from layer to layer.
class ShrinkingContext {
 public:
  /// `layers`: of the model; `tokens`: of the prompt. Throws InvalidArgument with all of options.problems().
  ShrinkingContext(ShrinkingContextOptions options, std::int32_t layers, std::int32_t tokens);

  /// Newest tokens that observe and always continue: floor(recent_ratio * tokens) + 1.
  [[nodiscard]] std::int32_t observers() const { return observers_; }
  /// Share of the others that continues after this layer.
  [[nodiscard]] double share(std::int32_t layer) const;
  /// How many of the others continue if `present` tokens are present: all of them if the share would leave min_context
  /// or fewer.
  [[nodiscard]] std::int32_t going_on(std::int32_t layer, std::int32_t present) const;
  /// Weight of each observer, oldest first.
  [[nodiscard]] std::vector<float> weights() const;

 private:
  ShrinkingContextOptions options_;
  std::int32_t layers_, observers_, floor_;
};

class PyramidInfer final : public Prefill {
 public:
  PyramidInfer(ShrinkingContextOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                         std::int32_t tokens) const override;
  [[nodiscard]] LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                           std::span<PromptPass* const> passes) const override;
  [[nodiscard]] std::vector<PromptCourse> courses(const ModelSpec& spec, std::int32_t tokens) const override;

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;
  [[nodiscard]] LayerDemand layer_demand() const override { return {.policy = name()}; }

 private:
  ShrinkingContextOptions options_;
};

namespace pyramidinfer_detail {

class PyramidInferPass final : public PromptPass {
 public:
  PyramidInferPass(const ShrinkingContextOptions& options, std::int32_t layers, std::int32_t tokens)
      : context_(options, layers, tokens) {}

  [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t present) const override {
    return context_.going_on(layer, present) < present - context_.observers() ? context_.observers() : 0;
  }

  [[nodiscard]] const ShrinkingContext& context() const { return context_; }

 private:
  ShrinkingContext context_;
};

/// One group of a table, alone.
inline RowTable alone(const RowTable& table, std::size_t group, std::int32_t kv_heads) {
  RowTable one = table;
  one.groups = {table.groups[group]};
  const auto rows = table.rows_of(table.groups[group], kv_heads);
  one.rows.assign(rows.begin(), rows.end());
  one.groups.front().first_row = one.slots = 0;
  for (Row& row : one.rows) row.first = std::exchange(one.slots, one.slots + row.length);
  return one;
}

}  // namespace pyramidinfer_detail

inline PyramidInfer::PyramidInfer(ShrinkingContextOptions options, std::unique_ptr<KVPolicy> decoding, std::string json)
    : Prefill("pyramidinfer", std::move(decoding), std::move(json)), options_(options) {
  static_cast<void>(ShrinkingContext(options_, 1, 1));  // throws if the options are wrong
}

inline std::vector<std::string> PyramidInfer::misfits(const ModelSpec&) const { return {}; }

inline std::unique_ptr<PromptPass> PyramidInfer::begin_prompt(Machine&, const ModelSpec& spec,
                                                              std::int32_t tokens) const {
  return std::make_unique<pyramidinfer_detail::PyramidInferPass>(options_, spec.num_layers(), tokens);
}

inline std::vector<PromptCourse> PyramidInfer::courses(const ModelSpec& spec, std::int32_t tokens) const {
  const pyramidinfer_detail::PyramidInferPass pass(options_, spec.num_layers(), tokens);
  const ShrinkingContext& context = pass.context();
  PromptCourse course;
  for (std::int32_t layer = 0, present = tokens; layer < spec.num_layers(); ++layer) {
    course.entered.push_back(present);
    if (pass.wants(layer, present) > 0) present = context.going_on(layer, present) + context.observers();
  }
  course.held = course.entered;
  return {course};
}

/// Prompts differ in how many of their queries observe, so each is looked at by itself.
inline LayerDecision PyramidInfer::decide_layer(Machine& machine, const Evidence& evidence,
                                                std::span<PromptPass* const> passes) const {
  LayerDecision decision;
  for (std::size_t g = 0; g < passes.size(); ++g) {
    const RowTable table = pyramidinfer_detail::alone(evidence.table, g, evidence.spec.kv_heads);
    const Row& row = table.rows.front();
    KVKEEP_REQUIRE_AS(StateError, passes[g]->wants(row.layer, row.length) > 0, "prompt pass: layer ", row.layer,
                      " with ", row.length, " tokens is not due; allowed layers that wants() names");
    const auto& pass = static_cast<const pyramidinfer_detail::PyramidInferPass&>(*passes[g]);
    const Evidence own{.spec = evidence.spec,
                       .table = table,
                       .basis = evidence.basis,
                       .moment = evidence.moment,
                       .output_projections = evidence.output_projections};
    const Limits limits{Variant::strict, {}, std::vector<RowLimit>(table.rows.size())};
    const std::unique_ptr<Event> event = machine.begin(own, limits, layer_demand());
    const ShrinkingContext& context = pass.context();
    const std::vector<float> weights = context.weights();
    const PromptScores scores = event->prompt_scores({.window = context.observers(),
                                                      .by = PromptScoreOptions::By::weighted,
                                                      .weights = weights,
                                                      .sinks = options_.sink});
    const ChosenTokens::Places chosen =
        event->choose(scores.tokens, context.going_on(row.layer, row.length), context.observers(), {true})
            .read(machine.memory());
    decision.prompts.push_back({.reason = Reason::over_budget, .narrow = tokens_of(*chosen.front())});
  }
  return decision;
}

inline void ShrinkingContextOptions::describe(Fields& f) {
  f.integer("sink", sink, 0, INT32_MAX, "oldest tokens that always continue");
  f.enter("layers");
  f.real("recent_ratio", recent_ratio, Range::below(0, 1),
         "newest share of the prompt: it observes, and always continues");
  f.real("keep", keep, Range::above(0, 1), "share of the others that continues after the deepest layer");
  f.choice("schedule", schedule, {{"cosine", Schedule::cosine}, {"constant", Schedule::constant}},
           "from all at the first layer down to `keep`, or `keep` at every layer");
  f.integer("min_context", min_context, 1, INT32_MAX, "no layer leaves fewer of the others");
  f.real("distance_weight", distance_weight, Range::above(0, 1000), "weight of the newest observer; the oldest has 1");
  f.leave();
}

inline std::vector<std::string> ShrinkingContextOptions::problems() const {
  std::vector<std::string> found;
  if (!(recent_ratio >= 0 && recent_ratio < 1))
    found.push_back(text("recent_ratio: ", recent_ratio, "; allowed 0 up to, not including, 1"));
  if (!(keep > 0 && keep <= 1)) found.push_back(text("keep: ", keep, "; allowed above 0, up to 1"));
  if (min_context < 1) found.push_back(text("min_context: ", min_context, "; allowed 1 or more"));
  if (!(distance_weight > 0) || !std::isfinite(distance_weight))
    found.push_back(text("distance_weight: ", distance_weight, "; allowed above 0"));
  if (sink < 0) found.push_back(text("sink: ", sink, "; allowed 0 or more"));
  return found;
}

inline ShrinkingContext::ShrinkingContext(ShrinkingContextOptions options, std::int32_t layers, std::int32_t tokens)
    : options_(options), layers_(layers) {
  std::string all;
  for (const std::string& one : options_.problems()) all += (all.empty() ? "" : "; ") + one;
  KVKEEP_REQUIRE(all.empty(), "shrinking context: ", all);
  const auto recent = static_cast<std::int32_t>(options_.recent_ratio * tokens);
  observers_ = recent + 1;
  floor_ = std::min(options_.min_context, tokens - 1 - recent);
}

inline double ShrinkingContext::share(std::int32_t layer) const {
  if (options_.schedule == ShrinkingContextOptions::Schedule::constant) return options_.keep;
  return product(1 - options_.keep, (std::cos(std::numbers::pi * layer / layers_) + 1) / 2) + options_.keep;
}

inline std::int32_t ShrinkingContext::going_on(std::int32_t layer, std::int32_t present) const {
  const std::int32_t others = present - observers_;
  const double share = this->share(layer);
  if (others <= floor_ || share >= 1) return std::max(others, 0);
  const auto kept = static_cast<std::int32_t>(others * share);
  return kept > floor_ ? kept : others;
}

inline std::vector<float> ShrinkingContext::weights() const {
  std::vector<float> weights(static_cast<std::size_t>(observers_), 1.0F);
  for (std::int32_t i = 1; i < observers_; ++i)
    weights[static_cast<std::size_t>(i)] =
        static_cast<float>(1 + (options_.distance_weight - 1) * i / (observers_ - 1));
  return weights;
}

}  // namespace kvkeep
