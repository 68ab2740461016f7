#pragma once
// Bodies of asl.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <utility>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/problems.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/layers/last_query.h"
#include "kvkeep/layers/top_mass.h"
#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/tokens_of.h"

namespace kvkeep {
namespace asl_detail {

inline constexpr std::int32_t kLastQueryPool = 5;  ///< GemFilter's

/// SnapKV: the best `slots - window` of every row, and the window.
inline KeepSet keep_best(const RowTable& table, const Tensor& scores, std::int32_t slots, std::int32_t window) {
  KeepSet keep;
  for (std::size_t r = 0; r <= table.rows.size(); ++r) keep.indptr.push_back(static_cast<std::int64_t>(r) * slots);
  keep.slots = empty({keep.indptr.back()}, Dtype::i32);
  const auto make = [] { return std::vector<std::uint64_t>(); };
  each_row(table, make, [&](std::size_t r, const Row& row, std::vector<std::uint64_t>& keys) {
    select({scores.data<float>() + row.first, static_cast<std::size_t>(row.length)}, {.sinks = 0, .recents = window},
           keys, keep.room(r));
  });
  return keep;
}

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
  AslPass(const AslOptions& options, const LayerSelectorOptions& selector, std::int32_t layers, std::int32_t tokens)
      : options_(options), window_(selector.window), last_layer_(layers - 1), selector_(selector, tokens) {}

  [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t present) const override {
    return selector_.wants(layer) || cuts(present) ? window_ : 0;
  }

  [[nodiscard]] Decision decide(const Evidence& evidence) override {
    const std::int32_t layer = evidence.table.rows.front().layer, present = evidence.table.rows.front().length;
    KVKEEP_REQUIRE_AS(StateError, wants(layer, present) > 0, "prompt pass: layer ", layer, " with ", present,
                      " tokens is not due; allowed layers that wants() names");
    const bool ranked = selector_.wants(layer);
    const PromptScores scores =
        prompt_scores(evidence, {.window = window_, .pool = options_.pool, .kind = options_.pooling});
    Decision decision;
    if (ranked) rank(evidence, layer, scores, decision);
    if (!cuts(present)) return decision;
    decision.keep = options_.cache > 0
                        ? keep_best(evidence.table, scores.heads, options_.cache, window_)
                        : keep_top_mass(evidence.table, scores.sums,
                                        {.mass = options_.cache_mass, .window = window_, .variant = options_.variant});
    decision.scores.data = scores.heads;
    if (decision.reason == Reason::nothing_due) decision.reason = Reason::over_budget;
    return decision;
  }

 private:
  /// True if a layer that `present` tokens have reached keeps fewer of them.
  [[nodiscard]] bool cuts(std::int32_t present) const {
    if (present <= window_) return false;
    return options_.cache > 0 ? present > options_.cache
                              : options_.cache_mass > 0 && present > options_.selector.select;
  }

  void rank(const Evidence& evidence, std::int32_t layer, const PromptScores& scores, Decision& decision) {
    const Tensor mass = options_.selector.reads_mass() ? token_mass(evidence, scores.sums, window_) : Tensor();
    const auto floats = [](const Tensor& t) {
      return std::span<const float>(t.data<float>(), static_cast<std::size_t>(t.numel()));
    };
    const bool selects =
        selector_.see(layer, floats(scores.tokens), mass.defined() ? floats(mass) : std::span<const float>());
    if (options_.selector.fixed_layer < 0 && layer >= min_layer(evidence.spec))
      decision.relative_variance = selector_.relative_variance();
    if (selects)
      decision.reason = Reason::select_layer;
    else if (options_.two_pass && layer == last_layer_)
      decision.reason = Reason::last_layer;
    else
      return;
    if (options_.indices == AslOptions::Indices::last_query) {
      const Tensor last = last_query_scores(evidence, kLastQueryPool);
      decision.narrow = tokens_of(best_tokens(floats(last), options_.selector.select));
    } else {
      decision.narrow = tokens_of(selector_.tokens());
    }
    decision.narrow->afresh = options_.two_pass;
  }

  [[nodiscard]] std::int32_t min_layer(const ModelSpec& spec) const {
    return options_.selector.min_layer < 0 ? spec.num_layers() / 3 : options_.selector.min_layer;
  }

  AslOptions options_;
  std::int32_t window_, last_layer_;
  LayerSelector selector_;
};

}  // namespace asl_detail

KVKEEP_INLINE void AslOptions::describe(Fields& f, std::string_view policy) {
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

KVKEEP_INLINE std::vector<std::string> AslOptions::problems() const {
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

KVKEEP_INLINE Asl::Asl(std::string name, AslOptions options, std::unique_ptr<KVPolicy> decoding, std::string json)
    : Prefill(std::move(name), std::move(decoding), std::move(json)), options_(options) {
  require_no_problems("asl", options_.problems());
}

KVKEEP_INLINE std::vector<std::string> Asl::misfits(const ModelSpec& spec) const {
  std::vector<std::string> found;
  const LayerSelectorOptions& o = options_.selector;
  if (o.fixed_layer >= spec.num_layers())
    found.push_back(text("layer: ", o.fixed_layer, "; allowed 0 to ", spec.num_layers() - 1, ", a layer of the model"));
  if (o.fixed_layer < 0 && o.min_layer >= spec.num_layers())
    found.push_back(
        text("min_layer: ", o.min_layer, "; allowed 0 to ", spec.num_layers() - 1, ", a layer of the model"));
  return found;
}

KVKEEP_INLINE std::unique_ptr<PromptPass> Asl::begin_prompt(const ModelSpec& spec, std::int32_t tokens) const {
  LayerSelectorOptions selector = options_.selector;
  if (selector.min_layer < 0) selector.min_layer = spec.num_layers() / 3;
  return std::make_unique<asl_detail::AslPass>(options_, selector, spec.num_layers(), tokens);
}

}  // namespace kvkeep
