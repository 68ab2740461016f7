// SPDX-License-Identifier: Apache-2.0
#pragma once
/// ASL and FastKV: in every layer the newest queries of a prompt rank its tokens. From the layer where the ranking has
/// settled, or from a given layer, only the best continue. Source: ASL (adaptive layer selection), paper and code;
/// FastKV (Jo et al.) through `selector.fixed_layer`. Differs: see LayerSelector; the cache may follow SnapKV or top-p
/// as in ASL's code; kept slots stay in order of position. FastKV's own release observes with 8 queries and does not
/// touch prompts that fit the cache.
#include <algorithm>
#include <memory>
#include <utility>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/prefill.h"

namespace kvkeep {

struct AslOptions {
  enum class Indices : std::uint8_t {
    ranks,       ///< the best-ranked tokens and the window
    last_query,  ///< the tokens that GemFilter would choose in the selecting layer
  };
  LayerSelectorOptions selector = {.select = 2048,
                                   .window = 32,
                                   .min_layer = -1,
                                   .observed_layers = 8,
                                   .threshold = 0.3,
                                   .fixed_layer = -1,
                                   .missed_mass = 0,
                                   .select_mass = 1};  ///< min_layer -1: a third of the model's layers
  std::int32_t pool = 7;                               ///< tokens pooled over, odd
  PromptScoreOptions::Pool pooling = PromptScoreOptions::Pool::average;
  std::int32_t cache = 0;  ///< slots that each row of a layer keeps for decoding, including the window (SnapKV); 0: all
  double cache_mass = 0;   ///< instead of `cache`: as many slots as hold this share of the window's attention; 0: all
  bool two_pass = false;   ///< the chosen tokens run again as a new prompt
  Indices indices = Indices::ranks;   ///< two_pass only
  Variant variant = Variant::strict;  ///< official: counts of cache_mass are rounded down

  /// Every problem with these options, one sentence each that names the field; empty: none.
  [[nodiscard]] std::vector<std::string> problems() const;
  /// True if a layer that `present` tokens have reached keeps fewer of them.
  [[nodiscard]] bool cuts(std::int32_t present) const {
    if (present <= selector.window) return false;
    return cache > 0 ? present > cache : cache_mass > 0 && present > selector.select;
  }
  /// The options of asl; of asl-2pass with `two_pass`; of fastkv with a `selector.fixed_layer` of 0 or more. `policy`
  /// is the name in messages.
  void describe(Fields& f, std::string_view policy);
};

class Asl final : public Prefill {
 public:
  /// Throws InvalidArgument with all of options.problems().
  Asl(std::string name, AslOptions options, std::unique_ptr<KVPolicy> decoding, std::string json = {});
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine& machine, const ModelSpec& spec,
                                                         std::int32_t tokens) const override;
  [[nodiscard]] LayerDecision decide_layer(Machine& machine, const Evidence& evidence,
                                           std::span<PromptPass* const> passes) const override;
  [[nodiscard]] std::vector<PromptCourse> courses(const ModelSpec& spec, std::int32_t tokens) const override;
  [[nodiscard]] bool courses_vary() const override {
    return options_.selector.select_mass < 1 || options_.cache_mass > 0;
  }
  [[nodiscard]] const AslOptions& options() const { return options_; }

 protected:
  [[nodiscard]] std::vector<std::string> misfits(const ModelSpec& spec) const override;
  [[nodiscard]] LayerDemand layer_demand() const override;

 private:
  [[nodiscard]] LayerSelectorOptions selector(const ModelSpec& spec) const;

  AslOptions options_;
  std::unique_ptr<Allocator> cut_;  ///< of the slots that a layer keeps for decoding; null: all stay
};

namespace asl_detail {

inline constexpr std::int32_t kLastQueryPool = 5;  ///< GemFilter's

/// Rows that keep as many slots as hold a mass differ in length.
inline void describe_cache(Fields& f, AslOptions& o) {
  const bool slots =
      f.integer("cache", o.cache, 1, INT32_MAX,
                "slots of the prompt that each row keeps, including the window, chosen as in SnapKV; left out: all",
                {"cache_k"}, "-");
  const bool mass =
      f.real("cache_mass", o.cache_mass, Range::above(0, 1),
             "instead of `cache`: each row keeps as many slots as hold this share of the window's attention",
             {"cache_p"}, "-");
  if (slots && mass) f.bad("cache_mass", o.cache_mass, "only without `cache`");
  f.uneven_heads = mass;
}

class AslPass final : public PromptPass {
 public:
  AslPass(const AslOptions& options, std::unique_ptr<PromptRanks> ranks)
      : ranks_(std::move(ranks)), options_(options) {}

  [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t present) const override {
    return ranks_->wants(layer) || options_.cuts(present) ? options_.selector.window : 0;
  }
  [[nodiscard]] PromptRanks* ranked(std::int32_t layer) { return ranks_->wants(layer) ? ranks_.get() : nullptr; }

 private:
  std::unique_ptr<PromptRanks> ranks_;
  AslOptions options_;
};

}  // namespace asl_detail

inline void AslOptions::describe(Fields& f, std::string_view policy) {
  using Pool = PromptScoreOptions::Pool;
  const bool fixed = selector.fixed_layer >= 0;
  f.exactly_one({{"budget", f.integer("budget", selector.select, 1, INT32_MAX,
                                      two_pass ? "tokens of the second pass, including the window"
                                      : fixed  ? "tokens that continue after `layer`, including the window"
                                               : "tokens that continue after the selecting layer, including the window",
                                      {"select_k"}, "required")}});
  if (!two_pass)
    f.choice(
        "variant", variant, {{"strict", Variant::strict}, {"official", Variant::official}},
        "slot counts of cache_mass are multiples of 8: rounded up, so that the mass is held, or down, as published");
  f.enter("scorer");
  f.integer("window", selector.window, 1, kMostQueries,
            "newest tokens of a prompt: they observe, are not ranked, and always continue", {"window_size"});
  f.pool(pool, "tokens pooled over, odd; 1: none");
  f.choice("pooling", pooling, {{"avg", Pool::average}, {"max", Pool::maximum}}, "average or maximum");
  f.leave();
  f.enter("layers");
  if (fixed)
    f.exactly_one({{"layer", f.integer("layer", selector.fixed_layer, 0, INT32_MAX, "the layer that selects",
                                       {"tsp_layer"}, "required")}});
  else
    selector.describe(f);
  if (two_pass)
    f.choice("indices", indices, {{"ranks", Indices::ranks}, {"last_query", Indices::last_query}},
             "the best ranked tokens and the window, or those that GemFilter would choose in that layer");
  else
    asl_detail::describe_cache(f, *this);
  f.leave();
  if (f.listing()) return;
  KVKEEP_REQUIRE(selector.select > selector.window, "policy: budget of ", policy, " is ", selector.select,
                 "; allowed more than scorer.window = ", selector.window, ", which is part of it");
  KVKEEP_REQUIRE(cache == 0 || cache > selector.window, "policy: layers.cache of ", policy, " is ", cache,
                 "; allowed more than scorer.window = ", selector.window, ", which is part of it");
}

inline std::vector<std::string> AslOptions::problems() const {
  LayerSelectorOptions resolved = selector;
  if (resolved.min_layer == -1) resolved.min_layer = 0;
  std::vector<std::string> found = resolved.problems();
  if (pool < 1 || pool % 2 == 0) found.push_back(text("pool: ", pool, "; allowed odd numbers from 1 on"));
  if (cache != 0 && cache <= selector.window)
    found.push_back(text("cache: ", cache, " slots, including the window of ", selector.window,
                         "; allowed more than the window, or 0 for all"));
  if (!(cache_mass >= 0 && cache_mass <= 1))
    found.push_back(text("cache_mass: ", cache_mass, "; allowed a share above 0, up to 1, or 0 for all"));
  if (cache > 0 && cache_mass > 0) found.push_back("cache and cache_mass: both are set; allowed only one of them");
  if (two_pass && (cache > 0 || cache_mass > 0))
    found.push_back("cache: the first of two passes keeps no cache; allowed 0");
  if (!two_pass && indices != Indices::ranks)
    found.push_back("indices: the last query's need a second pass; allowed ranks");
  return found;
}

inline Asl::Asl(std::string name, AslOptions options, std::unique_ptr<KVPolicy> decoding, std::string json)
    : Prefill(std::move(name), std::move(decoding), std::move(json)), options_(options) {
  require_no_problems("asl", options_.problems());
  if (options_.cache > 0) cut_ = std::make_unique<Flat>();
  if (options_.cache_mass > 0)
    cut_ = std::make_unique<HeldMass>(
        TopMassOptions{.mass = options_.cache_mass, .window = options_.selector.window, .variant = options_.variant});
}

inline std::vector<std::string> Asl::misfits(const ModelSpec& spec) const {
  std::vector<std::string> found;
  const LayerSelectorOptions& o = options_.selector;
  if (o.fixed_layer >= spec.num_layers())
    found.push_back(text("layer: ", o.fixed_layer, "; allowed 0 to ", spec.num_layers() - 1, ", a layer of the model"));
  if (o.fixed_layer < 0 && o.min_layer >= spec.num_layers())
    found.push_back(
        text("min_layer: ", o.min_layer, "; allowed 0 to ", spec.num_layers() - 1, ", a layer of the model"));
  return found;
}

inline LayerSelectorOptions Asl::selector(const ModelSpec& spec) const {
  LayerSelectorOptions selector = options_.selector;
  if (selector.min_layer < 0) selector.min_layer = spec.num_layers() / 3;
  return selector;
}

inline std::vector<PromptCourse> Asl::courses(const ModelSpec& spec, std::int32_t tokens) const {
  const LayerSelectorOptions o = selector(spec);
  const std::int32_t deepest = spec.num_layers() - 1;
  std::int32_t first = deepest, last = deepest;  // layers that may select; the deepest: nothing continues from it
  if (tokens > o.select && o.fixed_layer >= 0)
    first = last = o.fixed_layer;
  else if (tokens > o.select && (o.missed_mass > 0 || o.threshold > 0))  // the variance of min_layer is 1 of itself
    first = std::min(deepest, o.min_layer + (o.missed_mass > 0 || o.threshold > 1 ? 0 : 1));
  std::vector<PromptCourse> courses;
  for (std::int32_t selecting = first; selecting <= last; ++selecting)
    for (const bool fewest : {false, true}) {
      if (fewest && !courses_vary()) continue;
      const std::int32_t best = fewest && o.select_mass < 1 ? o.window : o.select, going_on = std::min(best, tokens);
      PromptCourse course;
      for (std::int32_t layer = 0; layer <= deepest; ++layer) {
        const std::int32_t present = layer <= selecting ? tokens : going_on;
        course.entered.push_back(present);
        course.held.push_back(!options_.cuts(present) ? present
                              : options_.cache > 0    ? options_.cache
                              : fewest                ? o.window
                                                      : present);
      }
      if (options_.two_pass && tokens > o.select) {
        course.entered.resize(static_cast<std::size_t>(selecting) + 1);
        course.held.assign(course.held.size(), going_on);
        course.restart = going_on;
      }
      courses.push_back(std::move(course));
    }
  return courses;
}

inline std::unique_ptr<PromptPass> Asl::begin_prompt(Machine&, const ModelSpec& spec, std::int32_t tokens) const {
  return std::make_unique<asl_detail::AslPass>(options_, std::make_unique<PromptRanks>(selector(spec), tokens));
}

inline LayerDemand Asl::layer_demand() const {
  return {.policy = name(), .cut = cut_.get(), .masses = options_.selector.reads_mass()};
}

inline LayerDecision Asl::decide_layer(Machine& machine, const Evidence& evidence,
                                       std::span<PromptPass* const> passes) const {
  const RowTable& table = evidence.table;
  const LayerSelectorOptions selector = this->selector(evidence.spec);
  const std::int32_t layer = table.groups.front().layer;
  LayerDecision decision;
  decision.prompts.resize(passes.size());
  std::vector<PromptRanks*> ranked(passes.size());
  Limits limits;
  limits.rows.resize(table.rows.size());
  for (std::size_t g = 0; g < passes.size(); ++g) {
    auto& pass = static_cast<asl_detail::AslPass&>(*passes[g]);
    const auto first = static_cast<std::size_t>(table.groups[g].first_row);
    const std::int32_t present = table.rows[first].length;
    KVKEEP_REQUIRE_AS(StateError, pass.wants(layer, present) > 0, "prompt pass: layer ", layer, " with ", present,
                      " tokens is not due; allowed layers that wants() names");
    ranked[g] = pass.ranked(layer);
    decision.prompts[g].cut = options_.cuts(present);
    std::fill_n(limits.rows.begin() + static_cast<std::ptrdiff_t>(first), evidence.spec.kv_heads,
                RowLimit{options_.cache, decision.prompts[g].cut, {.sinks = 0, .recents = selector.window}});
  }

  const std::unique_ptr<Event> event = machine.begin(evidence, limits, layer_demand());
  const PromptScores scores =
      event->prompt_scores({.window = selector.window, .pool = options_.pool, .kind = options_.pooling});
  ChosenTokens ranks = event->rank(scores, ranked, options_.two_pass && layer == evidence.spec.num_layers() - 1);
  if (std::ranges::any_of(decision.prompts, &LayerDecision::Prompt::cut)) {
    event->allot(*cut_, {options_.cache > 0 ? scores.heads : scores.sums}, {}, decision.rows);
    decision.rows.scores.data = scores.heads;
  }
  ChosenTokens::Places chosen = std::move(ranks).read(machine.memory());
  if (options_.indices == AslOptions::Indices::last_query) {
    std::vector<bool> again;
    for (const auto& tokens : chosen) again.push_back(tokens.has_value());
    if (std::ranges::count(again, true) > 0) {
      const PromptScores by_last =
          event->prompt_scores({.pool = asl_detail::kLastQueryPool, .by = PromptScoreOptions::By::last_query});
      chosen = event->choose(by_last.tokens, selector.select, 0, again).read(machine.memory());
    }
  }
  for (std::size_t g = 0; g < passes.size(); ++g) {
    LayerDecision::Prompt& prompt = decision.prompts[g];
    if (prompt.cut) prompt.reason = Reason::over_budget;
    if (ranked[g] == nullptr) continue;
    if (selector.fixed_layer < 0 && layer >= selector.min_layer)
      prompt.relative_variance = ranked[g]->relative_variance();
    if (!chosen[g]) continue;
    prompt.reason = ranked[g]->layer() == layer ? Reason::select_layer : Reason::last_layer;
    prompt.narrow = tokens_of(*chosen[g]);
    prompt.narrow->restart = options_.two_pass;
  }
  return decision;
}

}  // namespace kvkeep
