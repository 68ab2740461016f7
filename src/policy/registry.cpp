#include "kvkeep/policy/registry.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <functional>
#include <iterator>
#include <utility>

#include "fields.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/full.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/tova.h"

namespace kvkeep {
namespace {

using nlohmann::json;

/// A scorer by the name it has in policies, its options, and where it comes from.
struct ScorerEntry {
  const char* policy;  ///< as a policy of its own
  const char* name;    ///< behind "ams-"; null: not offered with AMS
  const char* what;
  const char* source;
  std::function<std::unique_ptr<Scorer>(Fields&)> make;
};

const std::vector<ScorerEntry>& scorers() {
  static const std::vector<ScorerEntry> all = {
      {"streaming", nullptr, "the oldest `sink` slots and the newest", "Xiao et al., Efficient Streaming Language Models with Attention Sinks",
       [](Fields&) { return std::make_unique<Recency>(); }},
      {"tova", "tova", "attention of the newest query", "Oren et al., Transformers are Multi-State RNNs (TOVA)",
       [](Fields& f) {
         TovaOptions o;
         f.choice("heads", o.heads, {{"all", TovaOptions::Heads::all}, {"group", TovaOptions::Heads::group}}, "query heads that are averaged: of the layer, or of the KV head");
         return std::make_unique<Tova>(o);
       }},
  };
  return all;
}

struct Common {
  Retention retention;
  std::int32_t interval = 512;
};

enum class Share : std::uint8_t { per_layer_per_head };
enum class Preset : std::uint8_t { registry, paper };

void describe_common(Fields& f, Common& c) {
  Share share = Share::per_layer_per_head;
  f.integer("budget", c.retention.budget, 1, INT32_MAX, "slots every (layer, sequence, KV head) keeps at an event, at least sink + 1",
            {"kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"}, true);
  f.integer("interval", c.interval, 1, INT32_MAX, "new slots between events: one is due at budget + interval slots",
            {"compression_interval", "divide_length", "prune_interval"});
  f.integer("sink", c.retention.sink, 0, INT32_MAX, "oldest slots that always stay", {"n_sink", "start_size", "sink_tokens"});
  f.integer("recent", c.retention.recent, 0, INT32_MAX, "newest slots that always stay; they shrink first when the budget is small", {"n_last", "recent_size"});
  f.choice("variant", c.retention.variant, {{"strict", Variant::strict}, {"official", Variant::official}}, "our corrected form, or the published code slot for slot");
  f.choice("share", share, {{"per_layer_per_head", Share::per_layer_per_head}, {"per_layer_perhead", Share::per_layer_per_head}}, "who shares one selection",
           {"eviction_mode"});
}

MassSegmentedOptions preset_options(Preset preset) {
  MassSegmentedOptions o;
  if (preset == Preset::registry) return o;
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
  const std::string current = o.segments == Segmentation::mass ? "mass" : o.segments == Segmentation::none ? "none" : "fixed:" + std::to_string(o.fixed);
  const std::string word = f.word("segments", current, "mass, fixed:<slots>, none", "how a row is cut: by mass, every so many slots, or not (top-k)");
  constexpr std::string_view kFixed = "fixed:";
  if (word == "mass") {
    o.segments = Segmentation::mass;
  } else if (word == "none") {
    o.segments = Segmentation::none;
  } else {
    const char* end = word.data() + word.size();
    std::int32_t slots = 0;
    if (!word.starts_with(kFixed) || std::from_chars(word.data() + kFixed.size(), end, slots).ptr != end || slots < 1)
      f.bad("segments", word, "mass, fixed:<slots> with 1 slot or more, none");
    o.segments = Segmentation::fixed;
    o.fixed = slots;
  }
}

void describe_mass_segmented(Fields& f, MassSegmentedOptions& o) {
  f.integer("window", o.window, 1, INT32_MAX, "newest queries whose attention makes the mass");
  f.real("segment_mass", o.segment_mass, 0, true, 1, false, "mass a segment aims at");
  f.integer("min_segment", o.min_segment, 1, INT32_MAX, "slots; shorter segments merge");
  f.integer("max_segment", o.max_segment, 1, INT32_MAX, "slots; longer segments are cut (strict: at least 2 * min_segment)");
  f.integer("min_quota", o.min_quota, 0, INT32_MAX, "slots every segment may keep, as far as the budget goes");
  f.flag("credit", o.credit, "mix in what slots drew at earlier events");
  f.real("credit_decay", o.credit_decay, 0, false, 1, true, "weight of the old credit at each event (lambda)");
  f.real("credit_mix", o.credit_mix, 0, false, 1, false, "weight of this event's mass against the credit (beta)");
  f.integer("pool", o.pool, 0, 4095, "slots averaged over, odd; 0 or 1: none");
  f.choice("suffix_fill", o.suffix_fill,
           {{"max_head", SuffixFill::max_head}, {"max_global", SuffixFill::max_global}, {"causal_mean", SuffixFill::causal_mean}, {"exclude", SuffixFill::exclude}},
           "mass of the slots that part of the window cannot see (variant official: max_global)");
  describe_segments(f, o);
  f.choice("quotas", o.quotas,
           {{"mass", QuotaWeight::mass}, {"equal", QuotaWeight::equal}, {"length", QuotaWeight::length}, {"raw_mass", QuotaWeight::raw_mass}},
           "what a segment's quota is proportional to");
  f.real("coverage", o.coverage, 0, false, 1, false, "share of the budget above the protected slots that goes through segments; 0 is top-k");
}

void check(const std::string& policy, const Common& c) {
  require(std::int64_t{c.retention.sink} + 1 <= c.retention.budget, "policy: budget of ", policy, " is ", c.retention.budget,
          "; allowed at least sink + 1 = ", std::int64_t{c.retention.sink} + 1);
  require(std::int64_t{c.retention.budget} + c.interval <= INT32_MAX, "policy: budget + interval of ", policy, " is above ", INT32_MAX);
}

void check(const MassSegmentedOptions& o, Variant variant) {
  require(o.pool <= 1 || o.pool % 2 == 1, "policy: allocator.pool is ", o.pool, "; allowed an odd number, or 0 for none");
  if (variant == Variant::official) {
    require(o.max_segment >= o.min_segment, "policy: allocator.max_segment is ", o.max_segment, "; allowed at least min_segment = ", o.min_segment);
    require(o.coverage == 1.0, "policy: allocator.coverage is ", o.coverage, " with variant official; allowed 1 (the published code has no such share)");
  } else {
    require(o.max_segment >= 2 * std::int64_t{o.min_segment}, "policy: allocator.max_segment is ", o.max_segment,
            "; allowed at least 2 * min_segment = ", 2 * std::int64_t{o.min_segment}, " (variant strict)");
  }
}

/// The options of an evicting policy.
struct EvictParts {
  Common common;
  MassSegmentedOptions mass;
  std::unique_ptr<Scorer> scorer;
};

void describe_evict(Fields& f, const ScorerEntry& entry, bool ams, EvictParts& parts) {
  describe_common(f, parts.common);
  if (ams) {
    Preset preset = Preset::registry;
    f.choice("preset", preset, {{"registry", Preset::registry}, {"paper", Preset::paper}},
             "defaults of `allocator`: of the released scripts, or of the paper's Table 15 (window 128, segment_mass 0.1, segments 16 to 256, min_quota 1, decay and mix 0.9)");
    if (preset == Preset::paper) parts.mass = preset_options(preset);
  }
  f.enter("scorer");
  parts.scorer = entry.make(f);
  f.leave();
  f.enter("allocator");
  if (ams && parts.common.retention.variant == Variant::official) parts.mass.suffix_fill = SuffixFill::max_global;  // as published
  if (ams) describe_mass_segmented(f, parts.mass);
  f.leave();
}

const ScorerEntry* scorer_of(const std::string& policy, bool& ams) {
  for (const ScorerEntry& entry : scorers()) {
    ams = false;
    if (policy == entry.policy) return &entry;
    ams = true;
    if (entry.name != nullptr && policy == std::string("ams-") + entry.name) return &entry;
  }
  return nullptr;
}

std::string known_policies() {
  std::string names;
  for (const PolicyInfo& p : policies()) names += (names.empty() ? "" : ", ") + p.name;
  return names;
}

std::unique_ptr<KVPolicy> from_object(const json& object) {
  require(object.is_object(), "policy: the file holds ", object.type_name(), "; allowed a JSON object");
  require(object.contains("policy") && object["policy"].is_string(), "policy: \"policy\" is missing or not a string; allowed one of ", known_policies());
  const auto name = object["policy"].get<std::string>();
  json rest = object;
  rest.erase("policy");
  if (name == "full") {
    Fields none = Fields::reader(rest);
    none.finish(name);
    return std::make_unique<Full>();
  }
  bool ams = false;
  const ScorerEntry* entry = scorer_of(name, ams);
  require(entry != nullptr, "policy: there is no policy \"", name, "\"; allowed ", known_policies());

  EvictParts parts;
  Fields reader = Fields::reader(rest);
  describe_evict(reader, *entry, ams, parts);
  reader.finish(name);
  check(name, parts.common);
  if (!parts.scorer->needs().keys) parts.common.retention.variant = Variant::strict;  // by age alone there is one reading: sinks, then the newest
  if (ams) check(parts.mass, parts.common.retention.variant);

  nlohmann::ordered_json resolved = {{"policy", name}};
  resolved.update(reader.resolved());
  std::unique_ptr<Allocator> allocator;
  if (ams) allocator = std::make_unique<MassSegmented>(parts.mass);
  else allocator = std::make_unique<Flat>();
  return std::make_unique<Evict>(name, std::move(parts.scorer), std::move(allocator), parts.common.retention, parts.common.interval, resolved.dump());
}

/// A JSON value from the text of "key=value": a number or a boolean where it reads as one, else a string.
json value_of(const std::string& text) {
  json parsed = json::parse(text, nullptr, false);
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
  require(matches.size() < 2, "policy: option \"", key, "\" of ", policy.name, " could be ", matches.empty() ? "" : matches.front() + " or " + matches.back(),
          "; write one of them");
  return matches.empty() ? key : matches.front();
}

}  // namespace

std::vector<PolicyInfo> policies() {
  std::vector<PolicyInfo> all{{"full", "keeps everything", "the engine without kvkeep", {}}};
  const auto add = [&](const ScorerEntry& entry, bool ams) {
    Fields lister = Fields::lister();
    EvictParts parts;
    describe_evict(lister, entry, ams, parts);
    const std::string name = ams ? std::string("ams-") + entry.name : entry.policy;
    const std::string source = ams ? std::string("Adaptive Mass-Segmented KV compression (AMS), over ") + entry.source : entry.source;
    all.push_back({name, ams ? std::string("budget spread over segments of equal attention mass, inside them: ") + entry.what : entry.what, source, lister.listed()});
  };
  for (const ScorerEntry& entry : scorers()) add(entry, false);
  for (const ScorerEntry& entry : scorers())
    if (entry.name != nullptr) add(entry, true);
  return all;
}

std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view text) {
  json object;
  std::string twice;
  std::vector<std::vector<std::string>> open;
  const auto once = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      if (std::find(open.back().begin(), open.back().end(), key) != open.back().end()) twice = key;
      open.back().push_back(key);
    }
    return true;
  };
  try {
    object = json::parse(text, once);
  } catch (const json::exception& e) {
    refuse("policy: this is not JSON (", e.what(), "); allowed an object such as {\"policy\": \"ams-tova\", \"budget\": 1024}");
  }
  require(twice.empty(), "policy: the key \"", twice, "\" stands twice in one object; allowed once");
  return from_object(object);
}

std::unique_ptr<KVPolicy> make_policy(std::string_view text) {
  const std::size_t comma = text.find(',');
  const std::string name(text.substr(0, comma));
  json object = {{"policy", name}};
  const std::vector<PolicyInfo> all = policies();
  const auto info = std::find_if(all.begin(), all.end(), [&](const PolicyInfo& p) { return p.name == name; });
  require(info != all.end(), "policy: there is no policy \"", name, "\"; allowed ", known_policies());
  while (text.find(',') != std::string_view::npos) {
    text.remove_prefix(text.find(',') + 1);
    const std::string item(text.substr(0, text.find(',')));
    const std::size_t equals = item.find('=');
    require(equals != std::string::npos && equals > 0, "policy: \"", item, "\" is not key=value; given \"", text, "\"; allowed name,key=value,...");
    const std::string key = full_key(*info, item.substr(0, equals));
    const std::size_t dot = key.find('.');
    json& slot = dot == std::string::npos ? object[key] : object[key.substr(0, dot)][key.substr(dot + 1)];
    require(slot.is_null(), "policy: ", key, " is given twice; allowed once");
    slot = value_of(item.substr(equals + 1));
  }
  return from_object(object);
}

std::unique_ptr<KVPolicy> load_policy(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  require(in.good() && !std::filesystem::is_directory(file), "policy: cannot read ", file.string());
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  try {
    return make_policy_from_json(text);
  } catch (const InvalidArgument& e) {
    refuse(file.string(), ": ", e.what());
  }
}

}  // namespace kvkeep
