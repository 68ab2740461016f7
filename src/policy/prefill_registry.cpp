#include "prefill_registry.h"

#include <limits>
#include <utility>

#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/gemfilter.h"
#include "kvkeep/policy/pyramidinfer.h"

namespace kvkeep {
namespace {

using Pool = PromptScoreOptions::Pool;

constexpr double kAnyThreshold = 1e9;

void describe_variant(Fields& f, Variant& variant) {
  f.choice("variant", variant, {{"strict", Variant::strict}, {"official", Variant::official}},
           "slot counts of cache_mass are multiples of 8: rounded up, so that the mass is held, or down, as published");
}

void describe_budget(Fields& f, std::int32_t& select, const char* what) {
  f.exactly_one({{"budget", f.integer("budget", select, 1, INT32_MAX, what, {"select_k"}, "required")}});
}

void describe_observers(Fields& f, AslOptions& o) {
  f.enter("scorer");
  f.integer("window", o.selector.window, 1, kMostQueries,
            "newest tokens of a prompt: they observe, are not ranked, and always continue", {"window_size"});
  describe_pool(f, o.pool, "tokens pooled over, odd; 1: none");
  f.choice("pooling", o.pooling, {{"avg", Pool::average}, {"max", Pool::maximum}}, "average or maximum");
  f.leave();
}

void describe_cache(Fields& f, AslOptions& o) {
  const bool slots =
      f.integer("cache", o.cache, 1, INT32_MAX,
                "slots of the prompt that each row keeps, including the window, chosen as in SnapKV; left out: all",
                {"cache_k"}, "-");
  const bool mass =
      f.real("cache_mass", o.cache_mass, 0, true, 1, false,
             "instead of `cache`: each row keeps as many slots as hold this share of the window's attention",
             {"cache_p"}, "-");
  if (slots && mass) f.bad("cache_mass", o.cache_mass, "only without `cache`");
}

/// Checks of options that depend on each other.
void check(const char* policy, const Fields& f, const AslOptions& o) {
  if (f.listing()) return;
  KVKEEP_REQUIRE(o.selector.select > o.selector.window, "policy: budget of ", policy, " is ", o.selector.select,
                 "; allowed more than scorer.window = ", o.selector.window, ", which is part of it");
  KVKEEP_REQUIRE(o.cache == 0 || o.cache > o.selector.window, "policy: layers.cache of ", policy, " is ", o.cache,
                 "; allowed more than scorer.window = ", o.selector.window, ", which is part of it");
}

MakePrefill maker(const char* name, AslOptions o) {
  return [name, o](std::unique_ptr<KVPolicy> decoding, std::string json) {
    return std::make_unique<Asl>(name, o, std::move(decoding), std::move(json));
  };
}

void describe_selection(Fields& f, AslOptions& o) {
  LayerSelectorOptions& s = o.selector;
  f.integer("min_layer", s.min_layer, 0, INT32_MAX, "first layer that may select", {"l_min"}, "layers / 3");
  f.integer("observed_layers", s.observed_layers, 1, 4096,
            "consecutive layers whose ranks are compared, at most min_layer + 1", {"l_obs"});
  const bool by_mass = f.gives("layers", "missed_mass");  // then the option that it replaces is not written too
  const bool threshold =
      f.real("threshold", s.threshold, -kAnyThreshold, false, kAnyThreshold, false,
             "selects once the variance of the ranks is below this share of its value at min_layer; 0 or less: never",
             {"tau"}, by_mass ? "-" : nullptr);
  const bool missed = f.real("missed_mass", s.missed_mass, 0, true, 1, true,
                             "instead of `threshold`: selects once, in each observed layer, less than this share of "
                             "attention went to tokens that would not continue",
                             {}, "-");
  if (threshold && missed) f.bad("missed_mass", s.missed_mass, "only without `threshold`");
  f.real("select_mass", s.select_mass, 0, true, 1, false,
         "fewer than `budget` tokens continue if they, with the window, drew this share of the selecting layer's "
         "attention");
}

MakePrefill describe_asl(Fields& f) {
  AslOptions o;
  describe_budget(f, o.selector.select, "tokens that continue after the selecting layer, including the window");
  describe_variant(f, o.variant);
  describe_observers(f, o);
  f.enter("layers");
  describe_selection(f, o);
  describe_cache(f, o);
  f.leave();
  check("asl", f, o);
  return maker("asl", o);
}

MakePrefill describe_two_pass(Fields& f) {
  AslOptions o;
  o.two_pass = true;
  describe_budget(f, o.selector.select, "tokens of the second pass, including the window");
  describe_observers(f, o);
  f.enter("layers");
  describe_selection(f, o);
  f.choice("indices", o.indices,
           {{"ranks", AslOptions::Indices::ranks}, {"last_query", AslOptions::Indices::last_query}},
           "the best ranked tokens and the window, or those that GemFilter would choose in that layer");
  f.leave();
  check("asl-2pass", f, o);
  return maker("asl-2pass", o);
}

MakePrefill describe_fastkv(Fields& f) {
  AslOptions o;
  describe_budget(f, o.selector.select, "tokens that continue after `layer`, including the window");
  describe_variant(f, o.variant);
  describe_observers(f, o);
  f.enter("layers");
  f.exactly_one({{"layer", f.integer("layer", o.selector.fixed_layer, 0, INT32_MAX, "the layer that selects",
                                     {"tsp_layer"}, "required")}});
  describe_cache(f, o);
  f.leave();
  check("fastkv", f, o);
  return maker("fastkv", o);
}

MakePrefill describe_gemfilter(Fields& f) {
  GemFilterOptions o;
  describe_budget(f, o.select, "tokens of the second pass");
  f.enter("scorer");
  describe_pool(f, o.pool, "tokens pooled over, odd; 1: none");
  f.leave();
  f.enter("layers");
  f.exactly_one({{"layer", f.integer("layer", o.layer, 0, INT32_MAX,
                                     "the layer whose last query chooses the tokens; the first pass ends there",
                                     {"select_layer_idx"}, "required")}});
  f.leave();
  return [o](std::unique_ptr<KVPolicy> decoding, std::string json) {
    return std::make_unique<GemFilter>(o, std::move(decoding), std::move(json));
  };
}

MakePrefill describe_pyramidinfer(Fields& f) {
  using Schedule = ShrinkingContextOptions::Schedule;
  ShrinkingContextOptions o;
  f.integer("sink", o.sink, 0, INT32_MAX, "oldest tokens that always continue");
  f.enter("layers");
  f.real("recent_ratio", o.recent_ratio, 0, false, 1, true,
         "newest share of the prompt: it observes, and always continues");
  f.real("keep", o.keep, 0, true, 1, false, "share of the others that continues after the deepest layer");
  f.choice("schedule", o.schedule, {{"cosine", Schedule::cosine}, {"constant", Schedule::constant}},
           "from all at the first layer down to `keep`, or `keep` at every layer");
  f.integer("min_context", o.min_context, 1, INT32_MAX, "no layer leaves fewer of the others");
  f.real("distance_weight", o.distance_weight, 0, true, 1000, false, "weight of the newest observer; the oldest has 1");
  f.leave();
  return [o](std::unique_ptr<KVPolicy> decoding, std::string json) {
    return std::make_unique<PyramidInfer>(o, std::move(decoding), std::move(json));
  };
}

}  // namespace

const std::vector<PrefillEntry>& prefill_policies() {
  static const std::vector<PrefillEntry> all = {
      {"asl", "the best tokens continue from the layer where the ranking of a prompt settles",
       "ASL: Adaptive Selection Layer (TANIGUCHIREI/ASL)", "prompts layer by layer, with queries", describe_asl},
      {"asl-2pass", "the tokens that asl selects run again as a short prompt of their own",
       "ASL: Adaptive Selection Layer (TANIGUCHIREI/ASL)", "prompts layer by layer, with queries", describe_two_pass},
      {"fastkv", "the best tokens continue from a given layer",
       "Jo et al., FastKV: KV Cache Compression for Fast Long-Context Processing with Token-Selective Propagation",
       "prompts layer by layer, with queries", describe_fastkv},
      {"gemfilter", "the tokens that the last query of an early layer chooses run again as a short prompt",
       "Shi et al., Discovering the Gems in Early Layers (GemFilter)", "prompts layer by layer, with queries",
       describe_gemfilter},
      {"pyramidinfer", "fewer tokens of a prompt continue from layer to layer",
       "Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
       "prompts layer by layer, with queries", describe_pyramidinfer},
  };
  return all;
}

}  // namespace kvkeep
