// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An evicting policy from options by name: those that every one has, its scorer's and its allocator's.

#include <memory>
#include <string>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/entries.h"
#include "kvkeep/policy/evict.h"
#if KVKEEP_FOLDING
#include "kvkeep/policy/rest_options.h"
#endif

namespace kvkeep {
namespace evict_options_detail {

inline Retention defaults() {
  Retention r;
  r.trigger.interval = 512;
  return r;
}

inline void describe_budget(Fields& f, Budget& b) {
  std::int32_t slots = 0;
  double ratio = -1;
  std::int64_t bytes = 0;
  const bool given = f.integer(
      "budget", slots, 1, INT32_MAX, "slots that every (layer, sequence, KV head) keeps at an event, at least sink + 1",
      {"kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"}, "one of budget, ratio, bytes");
  const bool by_ratio =
      f.real("ratio", ratio, Range::below(0, 1),
             "instead of `budget`: share of the tokens seen that is dropped, rounded so that fewer stay",
             {"compression_ratio"}, "-");
  const bool by_bytes =
      f.integer("bytes", bytes, 1, INT64_MAX,
                "instead of `budget`: K and V bytes a sequence may hold over all layers and heads", {}, "-");
  f.exactly_one({{"budget", given}, {"ratio", by_ratio}, {"bytes", by_bytes}});
  b.unit = by_ratio ? Budget::Unit::ratio : by_bytes ? Budget::Unit::bytes : Budget::Unit::slots;
  b.slots = slots;
  b.dropped = by_ratio ? ratio : 0;
  b.bytes = bytes;
}

inline void describe_common(Fields& f, Retention& r) {
  describe_budget(f, r.trigger.budget);
  f.integer("interval", r.trigger.interval, 1, INT32_MAX,
            "new slots between events: one is due at budget + interval slots",
            {"compression_interval", "divide_length", "prune_interval"});
  f.choice("trigger", r.trigger.kind,
           {{"slack", Trigger::Kind::slack}, {"counter", Trigger::Kind::counter}, {"named", Trigger::Kind::named}},
           "an event at budget + interval slots, or every `interval` decoded tokens if there are more slots than the "
           "budget, or only when the program names it, such as at the end of a turn");
  f.choice("prefill", r.trigger.prefill,
           {{"keep", Trigger::Prefill::keep},
            {"cut", Trigger::Prefill::cut},
            {"only", Trigger::Prefill::only},
            {"pieces", Trigger::Prefill::pieces}},
           "when the prompt ends: leave it to the first event of decoding, cut it to the budget, or cut it and never "
           "cut again; pieces: also cut each step of it that leaves more slots than the budget, for prompts that are "
           "longer than the cache");
  f.integer("growth", r.trigger.budget.growth, 0, INT32_MAX,
            "slots by which the budget grows per further `interval` of decoded tokens");
  f.integer("sink", r.sink, 0, INT32_MAX, "oldest slots that always stay", {"n_sink", "start_size", "sink_tokens"});
  std::int32_t recent = r.recent.value_or(0);
  const bool stated = f.integer("recent", recent, 0, INT32_MAX,
                                "newest slots that always stay; they shrink first when the budget is small",
                                {"n_last", "recent_size"}, r.recent ? nullptr : "a quarter of the budget, 1 to 32");
  if (stated) r.recent = recent;
  f.flag("protect_prompt", r.protect_prompt,
         "the prompt always stays, inside the budget; a prompt that does not fit raises the budget to prompt + recent");
  f.choice("budget_counts", r.trigger.budget.decoded_only, {{"all", false}, {"decoded", true}},
           "what the budget counts: every slot, or those after the prompt, which then stays in addition (needs "
           "protect_prompt)");
  f.choice("variant", r.variant, {{"strict", Variant::strict}, {"official", Variant::official}},
           "our corrected form, or the published code slot for slot");
  f.choice("share", r.share,
           {{"per_layer_per_head", Sharing::per_layer_per_head},
            {"per_layer_perhead", Sharing::per_layer_per_head},
            {"per_head", Sharing::per_head},
            {"union", Sharing::all},
            {"union_mean", Sharing::all_mean}},
           "which rows share one selection: none, the layers of a KV head (mean of scores), or all layers and heads "
           "(maximum or mean)",
           {"eviction_mode"});
}

/// What happens to the other slots, and how they fold.
inline void describe_rest(Fields& f, [[maybe_unused]] Retention& r) {
  bool folds = false;
  f.choice("rest", folds, {{"drop", false}, {"fold", true}},
           "slots that do not stay: dropped, or folded into spans that open again when a query asks for them "
           "(docs/method/memory.md)");
  if (!folds && !f.listing()) {
    KVKEEP_REQUIRE(!f.has("memory"),
                   "policy: options of folded spans (memory) are given, but rest is drop; allowed only with rest=fold");
    return;
  }
#if KVKEEP_FOLDING
  RestOptions rest;
  f.enter("memory");
  f.integer(
      "min_span", rest.min_span, 1, INT32_MAX,
      "with rest=fold: slots dropped by neighbouring segments merge until the span has at least this many tokens");
  f.integer("max_span", rest.max_span, 1, INT32_MAX, "with rest=fold: longer spans are cut into equal pieces");
  f.choice("weights", rest.weights, {{"equal", RestOptions::Weights::equal}, {"mass", RestOptions::Weights::mass}},
           "with rest=fold: weight of a token in its span's coarse entry: equal, or by attention mass");
  rest.memory.describe(f);
  std::int32_t reach = 0;
  if (f.integer("reach", reach, 1, INT32_MAX,
                "with rest=fold: entries of one KV head that may be in reach at once: slots, coarse entries, opened "
                "factors by size; left out: no limit",
                {}, "-"))
    rest.memory.entries = reach;
  f.leave();
  if (f.listing()) return;
  require_no_problems("policy: memory", rest.problems());
  r.rest = std::make_shared<const RestOptions>(std::move(rest));
#else
  KVKEEP_REQUIRE_AS(Unsupported, !folds,
                    "policy: rest=fold folds spans, which this build leaves out; allowed rest=drop, or "
                    "a build with KVKEEP_FOLDING=ON");
#endif
}

inline void check(const std::string& policy, const Retention& r) {
  const Budget& b = r.trigger.budget;
  if (b.unit == Budget::Unit::slots)
    KVKEEP_REQUIRE(std::int64_t{r.sink} + 1 <= b.slots, "policy: budget of ", policy, " is ", b.slots,
                   "; allowed at least sink + 1 = ", std::int64_t{r.sink} + 1);
  KVKEEP_REQUIRE(!b.decoded_only || r.protect_prompt, "policy: budget_counts of ", policy,
                 " is \"decoded\" without protect_prompt; allowed with protect_prompt, or \"all\"");
  KVKEEP_REQUIRE(std::int64_t{b.slots} + r.trigger.interval <= INT32_MAX, "policy: budget + interval of ", policy,
                 " is above ", INT32_MAX);
}

}  // namespace evict_options_detail

/// The options that every evicting policy has besides those of its parts, with their defaults.
inline void describe_common_options(Fields& f) {
  Retention r = evict_options_detail::defaults();
  evict_options_detail::describe_common(f, r);
  evict_options_detail::describe_rest(f, r);
}

/// The parts of an evicting policy while its options are read.
struct EvictParts {
  Retention retention;
  std::unique_ptr<Scorer> scorer = {};
  std::unique_ptr<Allocator> allocator = {};
};

/// Order: what every policy has, the scorer's options, the allocator's, and what becomes of the rest. Throws
/// InvalidArgument, by name, for a `make` that returns null.
[[nodiscard]] inline EvictParts read_parts(Fields& f, const ScorerEntry& scorer, const AllocatorEntry& allocator) {
  EvictParts parts{.retention = evict_options_detail::defaults()};
  Retention& r = parts.retention;
  if (scorer.defaults) scorer.defaults(f, r);
  evict_options_detail::describe_common(f, r);
  if (allocator.context) allocator.context(f);
  f.enter("scorer");
  parts.scorer = scorer.make(f);
  KVKEEP_REQUIRE(parts.scorer != nullptr, "policy: make of scorer ", scorer.traits.name,
                 " returned null; allowed a scorer");
  f.leave();
  AllocatorContext policy{.variant = r.variant,
                          .share = r.share,
                          .sink = r.sink,
                          .newest = parts.scorer->keeps_newest(),
                          .reads_keys = parts.scorer->needs().keys,
                          .ams_coverage = scorer.traits.ams_coverage,
                          .budget = r.trigger.budget};
  parts.allocator = allocator.make(f, policy);
  KVKEEP_REQUIRE(parts.allocator != nullptr, "policy: make of allocator ", allocator.traits.name,
                 " returned null; allowed an allocator");
  if (!f.listing()) parts.allocator->check(policy);
  r.variant = policy.variant;
  r.trigger.budget = policy.budget;
  evict_options_detail::describe_rest(f, r);
  return parts;
}

/// The policy of these parts. Throws InvalidArgument for options that contradict each other.
[[nodiscard]] inline std::unique_ptr<Evict> evict(const std::string& name, EvictParts parts, std::string json) {
  evict_options_detail::check(name, parts.retention);
  return std::make_unique<Evict>(name, std::move(parts.scorer), std::move(parts.allocator), parts.retention,
                                 std::move(json));
}

}  // namespace kvkeep
