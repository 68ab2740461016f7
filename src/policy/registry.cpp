#include "kvkeep/policy/registry.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <functional>
#include <utility>

#include "fields.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/allot/pyramid.h"
#include "kvkeep/core/problems.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/full.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/triattention.h"
#include "memory_registry.h"
#include "prefill_registry.h"
#include "read_file.h"
#include "untrusted_json.h"

namespace kvkeep {

void describe_pool(Fields& f, std::int32_t& pool, const char* what) {
  f.integer("pool", pool, 1, 4095, what);
  if (pool % 2 == 0) f.bad("pool", pool, "an odd number");
}

namespace {

using nlohmann::json;

/// Default share of the budget that AMS sends through segments. Measured (docs/ams.md), not published.
constexpr double kCoverage = 0.5;

/// A scorer by the name it has in policies, its options, and where it comes from.
struct ScorerEntry {
  const char* policy;  ///< as a policy of its own
  const char* name;    ///< after an allocator's name, such as "ams-"; null: not offered with one
  bool probability;    ///< shares of attention: not negative and comparable between heads, as AdaKV and CriticalKV need
  const char* what;
  const char* source;
  std::function<std::unique_ptr<Scorer>(Fields&)> make;
  std::function<void(const Fields&, Retention&)> defaults =
      {};  ///< other defaults of the options that every policy has
};

/// Keeps the prompt without counting it, protects only prompt and window, and adds 256 slots per further 1024 tokens.
void rpc_defaults(const Fields& f, Retention& r) {
  if (!f.says("scorer", "style", "official")) return;
  r.sink = r.recent = 0;
  r.protect_prompt = true;
  r.trigger.kind = Trigger::Kind::counter;
  r.trigger.interval = 1024;
  r.trigger.budget.growth = 256;
  r.trigger.budget.decoded_only = true;
}

const std::vector<ScorerEntry>& scorers() {
  static const std::vector<ScorerEntry> all = {
      {"streaming", nullptr, false, "the oldest `sink` slots and the newest",
       "Xiao et al., Efficient Streaming Language Models with Attention Sinks",
       [](Fields&) { return std::make_unique<Recency>(); }},
      {"tova", "tova", true, "attention of the newest query", "Oren et al., Transformers are Multi-State RNNs (TOVA)",
       [](Fields& f) {
         TovaOptions o;
         if (f.uneven_heads) o.heads = TovaOptions::Heads::group;
         f.choice("heads", o.heads, {{"all", TovaOptions::Heads::all}, {"group", TovaOptions::Heads::group}},
                  "query heads that are averaged: of the layer, or of the KV head");
         if (f.uneven_heads && o.heads == TovaOptions::Heads::all)
           f.bad("heads", "all", "group: heads that differ in length cannot be averaged slot by slot");
         return std::make_unique<Tova>(o);
       }},
      {"keydiff", "keydiff", false, "keys that point away from the mean direction",
       "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction",
       [](Fields&) { return std::make_unique<KeyDiff>(); }},
      {"knorm", "knorm", false, "keys of small norm",
       "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
       [](Fields&) { return std::make_unique<Knorm>(); }},
      {"rkv", "rkv", false, "slots that the newest queries attend to, less those that repeat other keys",
       "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
       [](Fields& f) {
         RkvOptions o;
         f.integer("window", o.window, 1, kMostQueries, "newest queries whose attention counts; their slots stay",
                   {"window_size"});
         f.integer("pool", o.pool, 1, 4095, "slots over which the largest attention is taken, odd; 1: none",
                   {"kernel_size"});
         if (o.pool % 2 == 0) f.bad("pool", o.pool, "an odd number");
         f.real("lambda", o.lambda, 0, false, 1, false, "weight of attention against redundancy", {"mix_lambda"});
         f.real("similarity", o.similarity, 0, false, 1, false, "cosine above which two keys resemble each other");
         f.choice("group", o.group, {{"max_logit", GroupReduce::max_logit}, {"mean_prob", GroupReduce::mean_prob}},
                  "query heads of a KV head: the largest logit, then one softmax; or the mean of their softmaxes");
         f.choice("redundancy", o.redundancy,
                  {{"all", RkvOptions::Redundancy::all}, {"history", RkvOptions::Redundancy::history}},
                  "among all slots, or among those older than the window");
         f.choice("no_similar", o.no_similar,
                  {{"nothing", RkvOptions::NoSimilar::nothing}, {"first", RkvOptions::NoSimilar::first}},
                  "a key that resembles no other spares none, or slot 0 (a side effect of the published code)");
         return std::make_unique<Rkv>(o);
       }},
      {"random", "random", false, "random slots: the baseline", "none",
       [](Fields& f) {
         RandomOptions o;
         f.integer("seed", o.seed, 0, INT64_MAX,
                   "a slot's draw follows from the seed, its layer, head and logical position");
         return std::make_unique<RandomScorer>(o);
       }},
      {"triattention", "triattention", false,
       "slots that future queries will attend to, by where each head's queries are before RoPE",
       "TriAttention (WeianMao/triattention)",
       [](Fields& f) -> std::unique_ptr<Scorer> {
         TriAttentionOptions o;
         const std::filesystem::path file = f.file(
             "calibration", "query statistics of the model, as kvkeep calibrate or the published tool writes them");
         f.choice("aggregate", o.aggregate,
                  {{"mean", TriAttentionOptions::Aggregate::mean}, {"max", TriAttentionOptions::Aggregate::max}},
                  "over the future offsets");
         f.flag("normalize", o.normalize, "z-score of each query head before the group is combined");
         f.choice("group", o.group,
                  {{"max", TriAttentionOptions::Group::max}, {"mean", TriAttentionOptions::Group::mean}},
                  "over the query heads of the KV head");
         f.integer("offset_max", o.offset_max, 1, 1 << 30, "future offsets are 1, 2, 4, ... up to this");
         f.choice("std", o.deviation,
                  {{"population", TriAttentionOptions::Deviation::population},
                   {"sample", TriAttentionOptions::Deviation::sample}},
                  "deviation of the z-score: over the slots that are not protected (floor 1e-6), or with n - 1 over "
                  "all slots");
         return std::make_unique<TriAttention>(f.listing() ? Calibration() : load_calibration(file), o);
       }},
      {"snapkv", "snapkv", true, "attention of the newest `window` queries, pooled over neighbours",
       "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation",
       [](Fields& f) {
         SnapKVOptions o;
         f.integer("window", o.window, 1, kMostQueries,
                   "newest queries whose attention counts; their slots always stay");
         describe_pool(f, o.pool, "slots pooled over, odd; 1: none");
         f.choice("style", o.style, {{"snapkv", SnapKVOptions::Style::snapkv}, {"rkv", SnapKVOptions::Style::rkv}},
                  "softmax over all slots, mean over the group, average pool; or largest logit of the group, softmax "
                  "over the history only, max pool");
         return std::make_unique<SnapKV>(o);
       }},
      {"rpc", "rpc", true, "sum of the attention of the newest `window` queries to the slots before them",
       "Song et al., Reasoning Path Compression",
       [](Fields& f) {
         RpcOptions o;
         f.integer("window", o.window, 1, kMostQueries,
                   "newest queries whose attention counts; their slots always stay");
         describe_pool(f, o.pool, "slots pooled over, odd; 1: none");
         f.choice("style", o.style, {{"fixed", RpcOptions::Style::fixed}, {"official", RpcOptions::Style::official}},
                  "every window query over the whole history; or as published: the newest query counted twice, the "
                  "protected prompt outside the softmax, a budget that grows");
         if (o.style == RpcOptions::Style::official) o.heads = RpcOptions::Heads::all;
         f.choice("heads", o.heads, {{"group", RpcOptions::Heads::group}, {"all", RpcOptions::Heads::all}},
                  "query heads that are averaged: of the layer, or of the KV head");
         if (f.uneven_heads && o.heads == RpcOptions::Heads::all)
           f.bad("heads", "all", "group: heads that differ in length cannot be averaged slot by slot");
         return std::make_unique<Rpc>(o);
       },
       rpc_defaults},
      {"h2o", "h2o", true, "sum of the attention of every query so far",
       "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
       [](Fields& f) {
         H2OOptions o;
         f.integer("window", o.window, 1, kMostQueries,
                   "newest queries that an event can add to the sum; older ones are not counted");
         return std::make_unique<H2O>(o);
       }},
      {"expected", "expected", true, "attention that future queries will pay, by the mean and covariance of past ones",
       "Devoto et al., Expected Attention",
       [](Fields& f) {
         ExpectedOptions o;
         f.integer("n_future", o.future, 1, 1 << 20, "future positions whose rotations are averaged");
         f.integer("sink", o.sink, 0, INT32_MAX,
                   "queries at positions below it are left out of the statistics, and that many oldest slots out of "
                   "the softmax");
         f.flag("covariance", o.covariance, "use the covariance of the queries as well as their mean");
         if (f.values_weighed) o.value_norm = false;  // the allocator does it, after W_o
         f.flag("value_norm", o.value_norm, "weigh by the length of the value");
         if (f.values_weighed && o.value_norm) f.bad("value_norm", true, "false: the allocator weighs values itself");
         f.real("epsilon", o.epsilon, 0, false, 1, false,
                "added to the expected attention before it is weighed by the value (value_norm)");
         f.integer("queries", o.queries, 1, 1 << 20,
                   "newest queries whose mean and covariance are taken (statistics window)");
         f.choice("statistics", o.statistics,
                  {{"window", ExpectedOptions::Statistics::window}, {"stream", ExpectedOptions::Statistics::stream}},
                  "mean and covariance of the newest `queries`, or of every query since the sequence began");
         return std::make_unique<Expected>(o);
       }},
  };
  return all;
}

enum class Preset : std::uint8_t { kvkeep, registry, paper };

void describe_budget(Fields& f, Budget& b) {
  std::int32_t slots = 0;
  double ratio = -1;
  std::int64_t bytes = 0;
  const bool given = f.integer(
      "budget", slots, 1, INT32_MAX, "slots that every (layer, sequence, KV head) keeps at an event, at least sink + 1",
      {"kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"}, "one of budget, ratio, bytes");
  const bool by_ratio =
      f.real("ratio", ratio, 0, false, 1, true,
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

void describe_common(Fields& f, Retention& r) {
  describe_budget(f, r.trigger.budget);
  f.integer("interval", r.trigger.interval, 1, INT32_MAX,
            "new slots between events: one is due at budget + interval slots",
            {"compression_interval", "divide_length", "prune_interval"});
  f.choice("trigger", r.trigger.kind, {{"slack", Trigger::Kind::slack}, {"counter", Trigger::Kind::counter}},
           "an event at budget + interval slots, or every `interval` decoded tokens if there are more slots than the "
           "budget");
  f.choice("prefill", r.trigger.prefill,
           {{"keep", Trigger::Prefill::keep}, {"cut", Trigger::Prefill::cut}, {"only", Trigger::Prefill::only}},
           "when the prompt ends: leave it to the first event of decoding, cut it to the budget, or cut it and never "
           "cut again");
  f.integer("growth", r.trigger.budget.growth, 0, INT32_MAX,
            "slots by which the budget grows per further `interval` of decoded tokens");
  f.integer("sink", r.sink, 0, INT32_MAX, "oldest slots that always stay", {"n_sink", "start_size", "sink_tokens"});
  f.integer("recent", r.recent, 0, INT32_MAX,
            "newest slots that always stay; they shrink first when the budget is small", {"n_last", "recent_size"});
  f.flag("protect_prompt", r.protect_prompt,
         "the prompt always stays, inside the budget; a prompt that does not fit raises the budget to prompt + recent");
  std::int32_t counts = r.trigger.budget.decoded_only ? 1 : 0;
  f.choice("budget_counts", counts, {{"all", 0}, {"decoded", 1}},
           "what the budget counts: every slot, or those after the prompt, which then stays in addition (needs "
           "protect_prompt)");
  r.trigger.budget.decoded_only = counts == 1;
  f.choice("variant", r.variant, {{"strict", Variant::strict}, {"official", Variant::official}},
           "our corrected form, or the published code slot for slot");
  f.choice("share", r.share,
           {{"per_layer_per_head", Sharing::per_layer_per_head},
            {"per_layer_perhead", Sharing::per_layer_per_head},
            {"per_head", Sharing::per_head},
            {"union", Sharing::all}},
           "which rows share one selection: none, the layers of a KV head (mean of scores), or all layers and heads "
           "(maximum)",
           {"eviction_mode"});
}

MassSegmentedOptions preset_options(Preset preset) {
  MassSegmentedOptions o;
  if (preset != Preset::paper) return o;
  o.window = 128;
  o.segment_mass = 0.1;
  o.min_segment = 16;
  o.max_segment = 256;
  o.min_quota = 1;
  o.credit_decay = 0.9;
  o.credit_mix = 0.9;
  return o;
}

void describe_segments(Fields& f, MassSegmentedOptions& o) {
  const std::string current = o.segments == Segmentation::mass   ? "mass"
                              : o.segments == Segmentation::none ? "none"
                                                                 : "fixed:" + std::to_string(o.fixed);
  const std::string word = f.word("segments", current, "mass, fixed:<slots>, none",
                                  "how a row is cut: by mass, every fixed number of slots, or not (top-k)");
  constexpr std::string_view kFixed = "fixed:";
  if (word == "mass") {
    o.segments = Segmentation::mass;
  } else if (word == "none") {
    o.segments = Segmentation::none;
  } else {
    const char* end = word.data() + word.size();
    std::int32_t slots = 0;
    if (!word.starts_with(kFixed) || std::from_chars(word.data() + kFixed.size(), end, slots).ptr != end || slots < 1)
      f.bad("segments", word, "mass, fixed:<slots> with 1 or more slots, none");
    o.segments = Segmentation::fixed;
    o.fixed = slots;
  }
}

void describe_mass_segmented(Fields& f, MassSegmentedOptions& o) {
  f.integer("window", o.window, 1, kMostQueries, "newest queries whose attention is the mass");
  f.real("segment_mass", o.segment_mass, 0, true, 1, false, "target mass of a segment");
  f.integer("min_segment", o.min_segment, 1, INT32_MAX, "slots; shorter segments merge");
  f.integer("max_segment", o.max_segment, 1, INT32_MAX,
            "slots; longer segments are cut (strict: at least 2 * min_segment)");
  f.integer("min_quota", o.min_quota, 0, INT32_MAX, "slots every segment may keep, as far as the budget goes");
  f.flag("credit", o.credit, "mix in the mass that slots drew at earlier events");
  f.real("credit_decay", o.credit_decay, 0, false, 1, true, "weight of the old credit at each event (lambda)");
  f.real("credit_mix", o.credit_mix, 0, false, 1, false, "weight of this event's mass against the credit (beta)");
  f.integer("pool", o.pool, 0, 4095, "slots averaged over, odd; 0 or 1: none");
  f.choice("suffix_fill", o.suffix_fill,
           {{"max_head", SuffixFill::max_head},
            {"max_global", SuffixFill::max_global},
            {"causal_mean", SuffixFill::causal_mean},
            {"exclude", SuffixFill::exclude}},
           "mass of the slots that part of the window cannot see (variant official: max_global)");
  describe_segments(f, o);
  f.choice("quotas", o.quotas,
           {{"mass", QuotaWeight::mass},
            {"equal", QuotaWeight::equal},
            {"length", QuotaWeight::length},
            {"raw_mass", QuotaWeight::raw_mass}},
           "what a segment's quota is proportional to");
  f.real_or(
      "coverage", o.coverage, 0, false, 1, false, "auto", o.coverage_auto,
      "share of the budget above the protected slots that goes through segments; 0 is top-k; auto: only as much as "
      "every segment's `min_quota` takes");
}

void check(const std::string& policy, const Retention& r) {
  const Budget& b = r.trigger.budget;
  if (b.unit == Budget::Unit::slots)
    KVKEEP_REQUIRE(std::int64_t{r.sink} + 1 <= b.slots, "policy: budget of ", policy, " is ", b.slots,
                   "; allowed at least sink + 1 = ", std::int64_t{r.sink} + 1);
  KVKEEP_REQUIRE(!b.decoded_only || r.protect_prompt, "policy: budget_counts of ", policy,
                 " is \"decoded\" without protect_prompt; allowed with protect_prompt, or \"all\"");
  KVKEEP_REQUIRE(std::int64_t{b.slots} + r.trigger.interval <= INT32_MAX, "policy: budget + interval of ", policy,
                 " is above ", INT32_MAX);
}

void check(const MassSegmentedOptions& o, const Retention& r) {
  KVKEEP_REQUIRE(
      r.share == Sharing::per_layer_per_head,
      "policy: share is not per_layer_per_head with allocator ams; allowed per_layer_per_head (rows that share a "
      "selection would have to share quotas too)");
  KVKEEP_REQUIRE(o.pool <= 1 || o.pool % 2 == 1, "policy: allocator.pool is ", o.pool,
                 "; allowed an odd number, or 0 for none");
  if (r.variant == Variant::official) {
    KVKEEP_REQUIRE(o.max_segment >= o.min_segment, "policy: allocator.max_segment is ", o.max_segment,
                   "; allowed at least min_segment = ", o.min_segment);
    KVKEEP_REQUIRE(!o.coverage_auto && o.coverage == 1.0, "policy: allocator.coverage is ",
                   o.coverage_auto ? std::string("auto") : text(o.coverage),
                   " with variant official; allowed 1 (the published code has no such option)");
  } else {
    KVKEEP_REQUIRE(o.max_segment >= 2 * std::int64_t{o.min_segment}, "policy: allocator.max_segment is ", o.max_segment,
                   "; allowed at least 2 * min_segment = ", 2 * std::int64_t{o.min_segment}, " (variant strict)");
  }
}

/// The parts of an evicting policy while its options are read.
struct EvictParts {
  Retention retention;
  std::unique_ptr<Scorer> scorer;
  std::unique_ptr<Allocator> allocator;
};

/// Requirements of allocators in our own form on the rest of a policy. `alike`: rows with equal scores keep equal
/// slots.
void check_own_form(const char* allocator, const Retention& r, bool alike) {
  KVKEEP_REQUIRE(r.variant == Variant::strict, "policy: variant is official with allocator ", allocator,
                 "; allowed strict (docs/allocators.md describes how that differs from the published form)");
  KVKEEP_REQUIRE(alike || r.share == Sharing::per_layer_per_head,
                 "policy: share is not per_layer_per_head with allocator ", allocator,
                 "; allowed per_layer_per_head (its rows keep different slots)");
}

/// An allocator by the name it has in policies ("ams-tova" is allocator "ams" with scorer "tova").
struct AllocatorEntry {
  const char* name;    ///< null: plain top-k, whose policies are named by their scorer
  const char* scorer;  ///< scorer that the bare name ("adakv") stands for; null: the bare name is not a policy
  bool probability;    ///< takes only scores that are shares of attention
  const char* what;
  const char* source;
  /// Reads the options (top level, then those of the scorer with `make_scorer`, then `enter("allocator")`) and makes
  /// the allocator. Tells scorers about itself through Fields before it makes the scorer.
  std::function<void(Fields&, EvictParts&, const std::function<void()>& make_scorer)> make;
};

const std::vector<AllocatorEntry>& allocators() {
  static const std::vector<AllocatorEntry> all = {
      {nullptr, nullptr, false, "", "",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         make_scorer();
         f.enter("allocator");
         f.leave();
         if (!parts.scorer->needs().keys)
           parts.retention.variant =
               Variant::strict;  // by age alone there is only one interpretation: sinks, then the newest
         parts.allocator = std::make_unique<Flat>();
       }},
      {"ams", nullptr, false, "budget spread over segments of equal attention mass, and within each",
       "Adaptive Mass-Segmented KV compression (AMS)",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         const bool official = parts.retention.variant == Variant::official;
         Preset preset = official ? Preset::registry : Preset::kvkeep;
         f.choice("preset", preset,
                  {{"kvkeep", Preset::kvkeep}, {"registry", Preset::registry}, {"paper", Preset::paper}},
                  "defaults of `allocator`: ours (registry, with coverage 0.5), of the released scripts, or of the "
                  "paper's Table 15 (window 128, "
                  "segment_mass 0.1, segments 16 to 256, min_quota 1, decay and mix 0.9)");
         MassSegmentedOptions o = preset_options(preset);
         if (official) {
           o.suffix_fill = SuffixFill::max_global;  // as published
         } else if (preset == Preset::kvkeep) {
           // Naming a fill selects AMS as published, in which everything goes through segments.
           o.coverage = f.gives("allocator", "suffix_fill") ? 1.0 : kCoverage;
         }
         make_scorer();
         f.enter("allocator");
         describe_mass_segmented(f, o);
         f.leave();
         if (!f.listing()) check(o, parts.retention);
         parts.allocator = std::make_unique<MassSegmented>(o);
       }},
      {"pyramidkv", "snapkv", false, "early layers keep more than late ones, each the best of its rows",
       "PyramidKV (Cai et al.)",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         PyramidOptions o;
         make_scorer();
         f.enter("allocator");
         f.real("beta", o.beta, 1, false, 1000, false,
                "the last layer keeps 1 / beta of the budget, the first 2 - 1 / beta of it, before small budgets are "
                "raised to sinks + window");
         f.leave();
         parts.allocator = std::make_unique<Pyramid>(o);
         if (f.listing()) return;
         check_own_form("pyramidkv", parts.retention, false);
         Budget& b = parts.retention.trigger.budget;
         const std::int64_t keeps = std::int64_t{parts.retention.sink} + parts.scorer->keeps_newest();
         KVKEEP_REQUIRE(keeps <= INT32_MAX, "policy: sink + the scorer's window is ", keeps,
                        " with allocator pyramidkv; allowed at most ", INT32_MAX);
         const auto least = static_cast<std::int32_t>(keeps);
         KVKEEP_REQUIRE(b.unit != Budget::Unit::slots || b.slots >= least, "policy: budget is ", b.slots,
                        " with allocator pyramidkv; allowed at least ", least,
                        ", which every layer keeps: sink + the scorer's window");
         b.least = std::max(b.least, least);
       }},
      {"adakv", "snapkv", true, "the heads of a layer share one budget, spent on the best of all their slots",
       "Ada-KV (Feng et al.)",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         AdaptiveHeadsOptions o;
         f.uneven_heads = true;
         make_scorer();
         f.enter("allocator");
         f.real("safeguard", o.safeguard, 0, false, 1, false,
                "share of the budget that every head keeps by its own ranking, protected slots included");
         f.leave();
         parts.allocator = std::make_unique<AdaptiveHeads>(o);
         if (!f.listing()) check_own_form("adakv", parts.retention, false);
       }},
      {"chunkkv", "snapkv", false, "runs of adjacent slots stay or go together", "ChunkKV (Liu et al.)",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         ChunksOptions o;
         make_scorer();
         f.enter("allocator");
         f.integer("chunk", o.chunk, 1, INT32_MAX, "slots per chunk");
         f.choice("heads", o.heads, {{"shared", ChunksOptions::Heads::shared}, {"own", ChunksOptions::Heads::own}},
                  "chunks rank by the sum over the KV heads of a layer, or per KV head");
         f.leave();
         parts.allocator = std::make_unique<Chunks>(o);
         if (!f.listing()) check_own_form("chunkkv", parts.retention, true);
       }},
      {"criticalkv", "snapkv", true,
       "half of the budget by score, the rest by score times the size of the value after the output projection",
       "CriticalKV (Feng et al.)",
       [](Fields& f, EvictParts& parts, const std::function<void()>& make_scorer) {
         CriticalOptions o;
         f.enter("allocator");  // first, because scorers depend on whether heads stay equal
         f.real("first_stage", o.first_stage, 0, false, 1, false,
                "share of the budget that the score alone decides, protected slots included");
         f.choice("heads", o.heads,
                  {{"equal", CriticalOptions::Heads::equal}, {"adaptive", CriticalOptions::Heads::adaptive}},
                  "every head keeps the budget, or as much of the layer's as `adakv` would give it");
         f.real("safeguard", o.safeguard, 0, false, 1, false,
                "with heads=adaptive: share of the budget that every head keeps by its own ranking");
         f.leave();
         f.uneven_heads = f.uneven_heads || o.heads == CriticalOptions::Heads::adaptive;
         f.values_weighed = true;
         make_scorer();
         parts.allocator = std::make_unique<Critical>(o);
         if (!f.listing()) check_own_form("criticalkv", parts.retention, false);
       }},
  };
  return all;
}

/// True if a policy of these two exists.
bool fit(const AllocatorEntry& allocator, const ScorerEntry& scorer) {
  if (allocator.name == nullptr) return true;
  return scorer.name != nullptr && (scorer.probability || !allocator.probability);
}

/// What happens to the other slots, and how they fold.
void describe_rest(Fields& f, Retention& r) {
  bool folds = false;
  f.choice("rest", folds, {{"drop", false}, {"fold", true}},
           "slots that do not stay: dropped, or folded into spans that open again when a query asks for them "
           "(docs/memory.md)");
  if (!folds && !f.listing()) {
    KVKEEP_REQUIRE(!f.has("memory"),
                   "policy: options of folded spans (memory) are given, but rest is drop; allowed only with rest=fold");
    return;
  }
  RestOptions rest;
  f.enter("memory");
  f.integer(
      "min_span", rest.min_span, 1, INT32_MAX,
      "with rest=fold: slots dropped by neighbouring segments merge until the span has at least this many tokens");
  f.integer("max_span", rest.max_span, 1, INT32_MAX, "with rest=fold: longer spans are cut into equal pieces");
  f.choice("weights", rest.weights, {{"equal", RestOptions::Weights::equal}, {"mass", RestOptions::Weights::mass}},
           "with rest=fold: weight of a token in its span's coarse entry: equal, or by attention mass");
  describe_memory(f, rest.memory);
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
}

void describe_evict(Fields& f, const AllocatorEntry& allocator, const ScorerEntry& scorer, EvictParts& parts) {
  parts.retention.trigger.interval = 512;
  if (scorer.defaults) scorer.defaults(f, parts.retention);
  describe_common(f, parts.retention);
  allocator.make(f, parts, [&] {
    f.enter("scorer");
    parts.scorer = scorer.make(f);
    f.leave();
  });
  describe_rest(f, parts.retention);
}

/// Calls body(name, allocator, scorer) for every policy, those without an allocator first.
template <class Body>
void each_policy(Body&& body) {
  for (const AllocatorEntry& a : allocators())
    for (const ScorerEntry& s : scorers()) {
      if (!fit(a, s)) continue;
      if (a.scorer != nullptr && std::string_view(a.scorer) == s.policy) body(std::string(a.name), a, s);
      body(a.name == nullptr ? std::string(s.policy) : std::string(a.name) + "-" + s.name, a, s);
    }
}

std::string in_words(const Needs& needs) {
  std::string words;
  const auto add = [&](bool is, const std::string& what) {
    if (is) words += (words.empty() ? "" : ", ") + what;
  };
  add(needs.queries > 0,
      needs.queries == 1 ? "the newest query" : "the newest " + std::to_string(needs.queries) + " queries");
  add(needs.calibration, "calibration");
  add(needs.output_projection, "W_o");
  return words.empty() ? "nothing" : words;
}

std::string known_policies() {
  std::string names;
  for (const PolicyInfo& p : policies()) names += (names.empty() ? "" : ", ") + p.name;
  return names;
}

/// `uneven_heads`: rows of a layer differ in length before the policy first decides.
std::unique_ptr<KVPolicy> from_object(const json& object, const std::filesystem::path& folder = {},
                                      bool uneven_heads = false);

/// `rest` without its name. The policy that decides after the prompt is a separate object.
std::unique_ptr<KVPolicy> make_prefill(const PrefillEntry& entry, json rest, const std::filesystem::path& folder) {
  std::unique_ptr<KVPolicy> decoding;
  if (rest.contains("decode")) {
    try {
      const Fields given = Fields::reader(rest);
      decoding =
          from_object(rest["decode"], folder, given.gives("layers", "cache_mass") || given.gives("layers", "cache_p"));
    } catch (const InvalidArgument& e) {
      refuse("decode of ", entry.name, ": ", e.what());
    }
    KVKEEP_REQUIRE(!decoding->narrows(), "policy: decode of ", entry.name, " is ", decoding->name(),
                   ", which acts on prompts itself; allowed a policy that decides after them");
    rest.erase("decode");
  } else {
    decoding = std::make_unique<Full>();
  }
  Fields reader = Fields::reader(rest, folder);
  const MakePrefill make = entry.describe(reader);
  reader.finish(entry.name);
  nlohmann::ordered_json resolved = {{"policy", entry.name}};
  resolved.update(reader.resolved());
  if (decoding->name() != "full") resolved["decode"] = nlohmann::ordered_json::parse(decoding->to_json());
  return make(std::move(decoding), io::written(resolved));
}

std::unique_ptr<KVPolicy> make_sekv(const json& rest, const std::filesystem::path& folder) {
  Fields reader = Fields::reader(rest, folder);
  SekvOptions options = describe_sekv(reader);
  reader.finish(kSekv);
  nlohmann::ordered_json resolved = {{"policy", kSekv}};
  resolved.update(reader.resolved());
  return std::make_unique<Sekv>(std::move(options), io::written(resolved));
}

std::unique_ptr<KVPolicy> from_object(const json& object, const std::filesystem::path& folder, bool uneven_heads) {
  KVKEEP_REQUIRE(object.is_object(), "policy: the file holds ", object.type_name(), "; allowed a JSON object");
  KVKEEP_REQUIRE(object.contains("policy") && object["policy"].is_string(),
                 "policy: \"policy\" is missing or not a string; allowed one of ", known_policies());
  const auto name = object["policy"].get<std::string>();
  json rest = object;
  rest.erase("policy");
  if (name == "full") {
    Fields none = Fields::reader(rest, folder);
    none.finish(name);
    return std::make_unique<Full>();
  }
  if (name == kSekv) return make_sekv(rest, folder);
  for (const PrefillEntry& entry : prefill_policies())
    if (name == entry.name) return make_prefill(entry, std::move(rest), folder);
  std::unique_ptr<KVPolicy> made;
  each_policy([&](const std::string& policy, const AllocatorEntry& allocator, const ScorerEntry& scorer) {
    if (policy != name) return;
    EvictParts parts;
    Fields reader = Fields::reader(rest, folder);
    reader.uneven_heads = uneven_heads;
    describe_evict(reader, allocator, scorer, parts);
    reader.finish(name);
    check(name, parts.retention);
    nlohmann::ordered_json resolved = {{"policy", name}};
    resolved.update(reader.resolved());
    made = std::make_unique<Evict>(name, std::move(parts.scorer), std::move(parts.allocator), parts.retention,
                                   io::written(resolved));
  });
  KVKEEP_REQUIRE(made != nullptr, "policy: there is no policy \"", io::shortened(name), "\"; allowed ",
                 known_policies());
  return made;
}

/// A JSON value from the text of "key=value": a number or a boolean if it reads as one, else a string.
json value_of(const std::string& text) {
  json parsed = io::parse_json(text).value;
  return parsed.is_number() || parsed.is_boolean() ? parsed : json(text);
}

/// The canonical name of an option that was written without its sub-object.
std::string full_key(const PolicyInfo& policy, const std::string& key) {
  if (key.find('.') != std::string::npos) return key;
  std::vector<std::string> matches;
  for (const OptionInfo& o : policy.options) {
    if (o.name == key) return key;
    if (o.name.ends_with("." + key)) matches.push_back(o.name);
  }
  // Every evicting policy has the options of folded spans: a name that the policy itself uses means its own.
  if (matches.size() > 1)
    std::erase_if(matches,
                  [&](const std::string& match) { return !policy.scorer.empty() && match.starts_with("memory."); });
  KVKEEP_REQUIRE(matches.size() < 2, "policy: option \"", io::shortened(key), "\" of ", policy.name, " could be ",
                 matches.empty() ? "" : matches.front() + " or " + matches.back(), "; write one of them");
  return matches.empty() ? key : matches.front();
}

}  // namespace

std::vector<PolicyInfo> policies() {
  std::vector<PolicyInfo> all{{"full", "keeps everything", "the engine without kvkeep", {}}};
  each_policy([&](const std::string& name, const AllocatorEntry& allocator, const ScorerEntry& scorer) {
    Fields lister = Fields::lister();
    EvictParts parts;
    describe_evict(lister, allocator, scorer, parts);
    PolicyInfo info{
        name, scorer.what, scorer.source, lister.listed(), scorer.name == nullptr ? scorer.policy : scorer.name,
        {},   {}};
    if (allocator.name != nullptr) {
      info.what = std::string(allocator.what) + ": " + scorer.what;
      info.source = std::string(allocator.source) + ", over " + scorer.source;
      info.allocator = allocator.name;
    }
    info.needs = in_words(needs_of(parts.retention, *parts.scorer, *parts.allocator));
    all.push_back(std::move(info));
  });
  for (const PrefillEntry& entry : prefill_policies()) {
    Fields lister = Fields::lister();
    static_cast<void>(entry.describe(lister));
    PolicyInfo info{entry.name, entry.what, entry.source, lister.listed(), {}, {}, entry.needs, true};
    info.options.push_back({"decode", "full", "a policy object",
                            "the policy that decides once the prompt has ended; in text, the part after a +"});
    all.push_back(std::move(info));
  }
  Fields lister = Fields::lister();
  static_cast<void>(describe_sekv(lister));
  all.push_back({kSekv, kSekvWhat, kSekvSource, lister.listed(), {}, {}, kSekvNeeds});
  return all;
}

std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view text, const std::filesystem::path& folder) {
  const io::ParsedJson parsed = io::parse_json(text, io::RepeatedNames::refused);
  KVKEEP_REQUIRE(parsed.problem.empty(), "policy: this ", parsed.problem,
                 ", an object such as {\"policy\": \"ams-tova\", \"budget\": 1024}");
  return from_object(parsed.value, folder);
}

namespace {

json object_of(std::string_view text) {
  if (const std::string_view first = prefill_part(text); first.size() < text.size()) {
    json object = object_of(first);
    KVKEEP_REQUIRE(!object.contains("decode"),
                   "policy: decode is given twice, as an option and after a +; allowed once");
    object["decode"] = object_of(text.substr(first.size() + 1));
    return object;
  }
  const std::size_t comma = text.find(',');
  const std::string name(text.substr(0, comma));
  json object = {{"policy", name}};
  const std::vector<PolicyInfo> all = policies();
  const auto info = std::find_if(all.begin(), all.end(), [&](const PolicyInfo& p) { return p.name == name; });
  KVKEEP_REQUIRE(info != all.end(), "policy: there is no policy \"", io::shortened(name), "\"; allowed ",
                 known_policies());
  while (text.find(',') != std::string_view::npos) {
    text.remove_prefix(text.find(',') + 1);
    const std::string item(text.substr(0, text.find(',')));
    const std::size_t equals = item.find('=');
    KVKEEP_REQUIRE(equals != std::string::npos && equals > 0, "policy: \"", io::shortened(item),
                   "\" is not key=value; given \"", io::shortened(text), "\"; allowed name,key=value,...");
    const std::string key = full_key(*info, item.substr(0, equals));
    const std::size_t dot = key.find('.');
    json& scope = dot == std::string::npos ? object : object[key.substr(0, dot)];
    KVKEEP_REQUIRE(scope.is_null() || scope.is_object(), "policy: ", io::shortened(key.substr(0, dot)),
                   " is given as a value, and ", io::shortened(key), " as an option in it; allowed one of them");
    json& slot = scope[dot == std::string::npos ? key : key.substr(dot + 1)];
    KVKEEP_REQUIRE(slot.is_null(), "policy: ", io::shortened(key), " is given twice; allowed once");
    slot = value_of(item.substr(equals + 1));
  }
  return object;
}

}  // namespace

std::string_view prefill_part(std::string_view text) {
  const std::string_view name = text.substr(0, text.find_first_of(",+"));
  if (std::ranges::none_of(prefill_policies(), [name](const PrefillEntry& entry) { return name == entry.name; }))
    return text;  // the others may name files with a + in their names
  for (std::size_t at = text.find('+'); at != std::string_view::npos; at = text.find('+', at + 1))
    if (at + 1 < text.size() && std::isalpha(static_cast<unsigned char>(text[at + 1])) != 0)
      return text.substr(0, at);  // 1e+5 is a number
  return text;
}

std::unique_ptr<KVPolicy> make_policy(std::string_view text) { return from_object(object_of(text)); }

std::unique_ptr<KVPolicy> load_policy(const std::filesystem::path& file) {
  const std::string text = io::read_file(file, "policy");
  try {
    return make_policy_from_json(text, file.parent_path());
  } catch (const InvalidArgument& e) {
    refuse(file.string(), ": ", e.what());
  }
}

}  // namespace kvkeep
