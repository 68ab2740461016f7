// Policies by name and from JSON: strict, with sentences; aliases and presets.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kvkeep/kvkeep.h"

namespace kvkeep {
namespace {

nlohmann::json resolved(const std::string& text) { return nlohmann::json::parse(make_policy(text)->to_json()); }

void expect_refused(const std::string& json, const std::vector<std::string>& words) {
  try {
    static_cast<void>(make_policy_from_json(json));
    ADD_FAILURE() << "was accepted: " << json;
  } catch (const InvalidArgument& e) {
    for (const std::string& word : words) EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << json << " -> " << e.what();
  }
}

TEST(Registry, FillsDefaultsAndDescribesItself) {
  const auto policy = make_policy_from_json(R"({"policy": "ams-tova", "budget": 1024})");
  const auto json = nlohmann::json::parse(policy->to_json());
  EXPECT_EQ(json["interval"], 512);
  EXPECT_EQ(json["sink"], 4);
  EXPECT_EQ(json["recent"], 32);
  EXPECT_EQ(json["variant"], "strict");
  EXPECT_EQ(json["allocator"]["window"], 32);
  EXPECT_EQ(json["preset"], "kvkeep");
  EXPECT_EQ(json["allocator"]["suffix_fill"], "exclude");
  EXPECT_EQ(json["allocator"]["coverage"], 1.0);
  EXPECT_EQ(make_policy_from_json(policy->to_json())->to_json(), policy->to_json());
}

TEST(Registry, KnowsBothPresetsOfThePaper) {
  const auto paper = resolved("ams-tova,budget=512,preset=paper")["allocator"];
  EXPECT_EQ(paper["window"], 128);
  EXPECT_EQ(paper["segment_mass"], 0.1);
  EXPECT_EQ(paper["min_segment"], 16);
  EXPECT_EQ(paper["max_segment"], 256);
  EXPECT_EQ(paper["min_quota"], 1);
  EXPECT_EQ(paper["credit_decay"], 0.9);
  EXPECT_EQ(paper["credit_mix"], 0.9);
  EXPECT_EQ(resolved("ams-tova,budget=512,preset=paper,window=64")["allocator"]["window"], 64) << "what is given beats the preset";
  EXPECT_EQ(resolved("ams-tova,budget=512")["allocator"]["min_quota"], 8);
}

TEST(Registry, AmsDefaultsAreOursUnlessAPresetOrAFillIsNamed) {
  const auto ours = resolved("ams-keydiff,budget=512")["allocator"];
  EXPECT_EQ(ours["suffix_fill"], "exclude");
  EXPECT_EQ(ours["coverage"], 0.5);
  for (const char* published : {"ams-keydiff,budget=512,preset=registry", "ams-keydiff,budget=512,preset=paper", "ams-keydiff,budget=512,suffix_fill=max_head"}) {
    EXPECT_EQ(resolved(published)["allocator"]["suffix_fill"], "max_head") << published;
    EXPECT_EQ(resolved(published)["allocator"]["coverage"], 1.0) << published;
  }
  EXPECT_EQ(resolved("ams-keydiff,budget=512,suffix_fill=exclude")["allocator"]["coverage"], 1.0) << "a named fill describes AMS as published, coverage included";
  EXPECT_EQ(resolved("ams-keydiff,budget=512,coverage=0.25")["allocator"]["suffix_fill"], "exclude");
  EXPECT_EQ(resolved("ams-keydiff,budget=512,variant=official")["allocator"]["coverage"], 1.0);
  EXPECT_EQ(resolved("ams-keydiff,budget=512,variant=official")["preset"], "registry");
}

TEST(Registry, OfficialFillsTheSuffixAsPublished) {
  EXPECT_EQ(resolved("ams-tova,budget=512,variant=official")["allocator"]["suffix_fill"], "max_global");
  EXPECT_EQ(resolved("ams-tova,budget=512,variant=official,suffix_fill=exclude")["allocator"]["suffix_fill"], "exclude");
}

TEST(Registry, TakesTheNamesOfOtherProjects) {
  for (const char* budget : {"budget", "kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"}) EXPECT_EQ(resolved(text("tova,", budget, "=99"))["budget"], 99);
  for (const char* interval : {"interval", "compression_interval", "divide_length", "prune_interval"}) EXPECT_EQ(resolved(text("tova,budget=99,", interval, "=7"))["interval"], 7);
  EXPECT_EQ(resolved("streaming,budget=99,n_sink=2,recent_size=5")["sink"], 2);
  EXPECT_EQ(resolved("tova,budget=99,eviction_mode=per_layer_perhead")["share"], "per_layer_per_head");
  expect_refused(R"({"policy": "tova", "budget": 9, "sink": 1, "kv_budget": 9})", {"budget", "twice", "kv_budget"});
}

TEST(Registry, RefusesWithTheFieldTheValueAndWhatIsAllowed) {
  expect_refused(R"({"policy": "ams-tova"})", {"budget is missing", "exactly one of budget, ratio, bytes"});
  expect_refused(R"({"policy": "nonsense", "budget": 9})", {"nonsense", "allowed", "ams-tova"});
  expect_refused(R"({"budget": 9})", {"\"policy\" is missing"});
  expect_refused(R"({"policy": "tova", "budget": 64, "budgte": 9})", {"budgte", "allowed", "interval"});
  expect_refused(R"({"policy": "tova", "budget": 64, "scorer": {"temperature": 1}})", {"scorer.temperature"});
  expect_refused(R"({"policy": "tova", "budget": 64, "allocator": {"window": 8}})", {"allocator.window"});
  expect_refused(R"({"policy": "tova", "budget": 64, "scorer": 3})", {"scorer", "allowed an object"});
  expect_refused(R"({"policy": "tova", "budget": 4, "sink": 4})", {"budget", "is 4", "sink + 1 = 5"});
  expect_refused(R"({"policy": "tova", "budget": 0})", {"budget", "given 0", "1 or more"});
  expect_refused(R"({"policy": "tova", "budget": "64"})", {"budget", "\"64\"", "an integer"});
  expect_refused(R"({"policy": "tova", "budget": 64.5})", {"budget", "64.5"});
  expect_refused(R"({"policy": "tova", "budget": 99999999999})", {"budget", "99999999999"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"segment_mass": 0}})", {"allocator.segment_mass", "given 0", "(0"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"credit_decay": 1}})", {"allocator.credit_decay", "given 1"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"pool": 4}})", {"allocator.pool", "4", "odd"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"min_segment": 600}})", {"max_segment", "2 * min_segment = 1200"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "variant": "official", "allocator": {"coverage": 0.5}})", {"coverage", "official"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "variant": "official", "allocator": {"coverage": "auto"}})", {"coverage", "auto", "official"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"coverage": "most"}})", {"allocator.coverage", "most", "[0.0, 1.0] or auto"});
  expect_refused(R"({"policy": "pyramidkv-tova", "budget": 32, "sink": 31, "recent": 0, "allocator": {"beta": 0.5}})", {"allocator.beta", "0.5"});
  expect_refused(R"({"policy": "pyramidkv-tova", "budget": 64, "variant": "official"})", {"variant", "official", "pyramidkv", "strict"});
  expect_refused(R"({"policy": "adakv-tova", "budget": 64, "share": "union"})", {"share", "adakv", "per_layer_per_head"});
  expect_refused(R"({"policy": "adakv-tova", "budget": 64, "scorer": {"heads": "all"}})", {"scorer.heads", "all", "group"});
  expect_refused(R"({"policy": "criticalkv-tova", "budget": 64, "allocator": {"heads": "adaptive"}, "scorer": {"heads": "all"}})", {"scorer.heads", "all", "group"});
  expect_refused(R"({"policy": "adakv-rpc", "budget": 512, "scorer": {"style": "official"}})", {"scorer.heads", "all", "group"});
  expect_refused(R"({"policy": "criticalkv-expected", "budget": 512, "scorer": {"value_norm": true}})", {"scorer.value_norm", "true", "false"});
  expect_refused(R"({"policy": "pyramidkv", "budget": 67})", {"budget is 67", "pyramidkv", "68", "window"});
  expect_refused(R"({"policy": "chunkkv-tova", "budget": 64, "allocator": {"chunk": 0}})", {"allocator.chunk", "0", "1 or more"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"segments": "fixed:0"}})", {"segments", "fixed:0"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"suffix_fill": "max"}})", {"suffix_fill", "max_head, max_global"});
  expect_refused(R"({"policy": "tova", "budget": 64, "share": "everybody"})", {"share", "everybody", "per_layer_per_head", "union"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "share": "union"})", {"share", "ams-tova", "per_layer_per_head"});
  expect_refused(R"({"policy": "tova", "budget": 64, "ratio": 0.5})", {"budget, ratio", "exactly one", "bytes"});
  expect_refused(R"({"policy": "tova", "ratio": 1})", {"ratio", "given 1", "[0.0, 1.0)"});
  expect_refused(R"({"policy": "tova", "bytes": 0})", {"bytes", "given 0"});
  expect_refused(R"({"policy": "tova", "budget": 64, "budget": 65})", {"budget", "twice"});
  expect_refused(R"({"policy": "full", "budget": 64})", {"full", "budget"});
  expect_refused("", {"not JSON"});
  expect_refused("[1]", {"array"});
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=5,budget=6")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(load_policy("/no/such/policy.json")), InvalidArgument);
}

TEST(Registry, BareNamesOfAllocatorsStandForSnapKVScores) {
  for (const char* name : {"pyramidkv", "adakv", "chunkkv", "criticalkv"}) {
    const auto bare = resolved(text(name, ",budget=512")), full = resolved(text(name, "-snapkv,budget=512"));
    EXPECT_EQ(bare["scorer"], full["scorer"]) << name;
    EXPECT_EQ(bare["allocator"], full["allocator"]) << name;
    EXPECT_EQ(bare["scorer"]["window"], 64) << name;
  }
}

TEST(Registry, ListsEveryOptionOfEveryPolicy) {
  for (const PolicyInfo& p : policies()) {
    EXPECT_FALSE(p.what.empty());
    EXPECT_FALSE(p.source.empty()) << p.name;
    if (p.name == "full") continue;
    EXPECT_EQ(p.options.front().name, "budget") << p.name;
    if (std::any_of(p.options.begin(), p.options.end(), [](const OptionInfo& o) { return o.fallback == "required"; })) continue;
    const auto json = resolved(p.name + ",budget=512");
    for (const OptionInfo& o : p.options) {
      if (o.fallback == "-") continue;  // resolved only where it is given
      const auto dot = o.name.find('.');
      const bool there = dot == std::string::npos ? json.contains(o.name) : json[o.name.substr(0, dot)].contains(o.name.substr(dot + 1));
      EXPECT_TRUE(there) << p.name << " lists " << o.name << " and does not resolve it";
    }
  }
}

TEST(Registry, SaysWhatAPolicyNeeds) {
  EXPECT_EQ(make_policy("full")->needs().queries, 0);
  EXPECT_EQ(make_policy("streaming,budget=9")->needs().queries, 0);
  EXPECT_EQ(make_policy("tova,budget=9")->needs().queries, 1);
  EXPECT_EQ(make_policy("ams-tova,budget=9")->needs().queries, 32);
  EXPECT_EQ(make_policy("ams-tova,budget=9,variant=official")->needs().queries, 33) << "the published window leaves out the oldest query it has";
}

}  // namespace
}  // namespace kvkeep
