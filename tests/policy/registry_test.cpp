// SPDX-License-Identifier: Apache-2.0
// Policies by name and from JSON: strict, with sentences; aliases and presets.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kvkeep/kvkeep.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/router.h"
#include "message_of.h"

namespace kvkeep::registry_test {
namespace {

nlohmann::json resolved(const std::string& text) { return nlohmann::json::parse(make_policy(text)->to_json()); }

void expect_refused(const std::string& json, const std::vector<std::string>& words) {
  try {
    static_cast<void>(make_policy_from_json(json));
    ADD_FAILURE() << "was accepted: " << json;
  } catch (const InvalidArgument& e) {
    for (const std::string& word : words)
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << json << " -> " << e.what();
  }
}

TEST(Registry, FillsDefaultsAndDescribesItself) {
  const auto policy = make_policy_from_json(R"({"policy": "ams-tova", "budget": 1024})");
  const auto json = nlohmann::json::parse(policy->to_json());
  EXPECT_EQ(json["interval"], 512);
  EXPECT_EQ(json["sink"], 4);
  EXPECT_FALSE(json.contains("recent")) << "a quarter of the budget, 1 to 32";
  EXPECT_EQ(json["variant"], "strict");
  EXPECT_EQ(json["allocator"]["window"], 32);
  EXPECT_EQ(json["preset"], "kvkeep");
  EXPECT_EQ(json["allocator"]["suffix_fill"], "max_head");
  EXPECT_EQ(json["allocator"]["coverage"], 0.75);
  EXPECT_EQ(json["allocator"]["protected_mass"], false);
  EXPECT_EQ(json["allocator"]["min_quota"], 1);
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
  EXPECT_EQ(resolved("ams-tova,budget=512,preset=paper,window=64")["allocator"]["window"], 64)
      << "what is given beats the preset";
  EXPECT_EQ(resolved("ams-tova,budget=512,preset=registry")["allocator"]["min_quota"], 8);
}

TEST(Registry, AmsDefaultsAreOursUnlessAPresetOrAFillIsNamed) {
  const auto ours = resolved("ams-keydiff,budget=512")["allocator"];
  EXPECT_EQ(ours["suffix_fill"], "max_head");
  EXPECT_EQ(ours["coverage"], 0.75);
  const auto question = resolved("ams-keydiff,budget=512,preset=question")["allocator"];
  EXPECT_EQ(question["coverage"], 1.0);
  EXPECT_EQ(question["protected_mass"], false);
  EXPECT_EQ(question["min_quota"], 1);
  for (const char* published : {"ams-keydiff,budget=512,preset=registry", "ams-keydiff,budget=512,preset=paper",
                                "ams-keydiff,budget=512,suffix_fill=max_head"}) {
    EXPECT_EQ(resolved(published)["allocator"]["suffix_fill"], "max_head") << published;
    EXPECT_EQ(resolved(published)["allocator"]["coverage"], 1.0) << published;
    EXPECT_EQ(resolved(published)["allocator"]["protected_mass"], true) << published;
  }
  EXPECT_EQ(resolved("ams-keydiff,budget=512,suffix_fill=exclude")["allocator"]["coverage"], 1.0)
      << "a named fill describes AMS as published, coverage included";
  for (const auto& [policy, coverage] : {std::pair{"ams-snapkv,budget=512", 1.0},
                                         {"ams-rpc,budget=512", 1.0},
                                         {"ams-h2o,budget=512", 1.0},
                                         {"ams-rkv,budget=512", 0.75},
                                         {"ams-expected,budget=512", 0.75},
                                         {"ams-rkv,budget=512,coverage=0", 0.0},
                                         {"ams-rkv,budget=512,variant=official", 1.0}})
    EXPECT_EQ(resolved(policy)["allocator"]["coverage"], coverage) << policy << ": each scorer has its default";
  EXPECT_EQ(resolved("ams-keydiff,budget=512,coverage=0.25")["allocator"]["suffix_fill"], "max_head");
  EXPECT_EQ(resolved("ams-keydiff,budget=512,variant=official")["allocator"]["coverage"], 1.0);
  EXPECT_EQ(resolved("ams-keydiff,budget=512,variant=official")["preset"], "registry");
  expect_refused(R"({"policy": "ams-keydiff", "budget": 64, "variant": "official", "preset": "question"})",
                 {"preset", "variant official", "registry, paper"});
  expect_refused(
      R"({"policy": "ams-keydiff", "budget": 64, "variant": "official", "allocator": {"protected_mass": false}})",
      {"protected_mass", "variant official"});
}

TEST(Registry, OfficialFillsTheSuffixAsPublished) {
  EXPECT_EQ(resolved("ams-tova,budget=512,variant=official")["allocator"]["suffix_fill"], "max_global");
  EXPECT_EQ(resolved("ams-tova,budget=512,variant=official,suffix_fill=exclude")["allocator"]["suffix_fill"],
            "exclude");
}

TEST(Registry, TakesTheNamesOfOtherProjects) {
  for (const char* budget : {"budget", "kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"})
    EXPECT_EQ(resolved(text("tova,", budget, "=99"))["budget"], 99);
  for (const char* interval : {"interval", "compression_interval", "divide_length", "prune_interval"})
    EXPECT_EQ(resolved(text("tova,budget=99,", interval, "=7"))["interval"], 7);
  EXPECT_EQ(resolved("streaming,budget=99,n_sink=2,recent_size=5")["sink"], 2);
  EXPECT_EQ(resolved("tova,budget=99,eviction_mode=per_layer_perhead")["share"], "per_layer_per_head");
  expect_refused(R"({"policy": "tova", "budget": 9, "sink": 1, "kv_budget": 9})", {"budget", "twice", "kv_budget"});
}

TEST(Registry, TakesBlanksBehindCommas) {
  EXPECT_EQ(resolved("tova, budget=99,  interval=7"), resolved("tova,budget=99,interval=7"));
  EXPECT_EQ(resolved("asl,budget=512, window=16+tova, budget=99"), resolved("asl,budget=512,window=16+tova,budget=99"));
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=99, ")), InvalidArgument);
}

TEST(Registry, ListsNoSecondSpellingOfAValue) {
  for (const PolicyInfo& policy : policies())
    for (const OptionInfo& option : policy.options)
      if (option.name == "share") EXPECT_EQ(option.allowed, "per_layer_per_head, per_head, union, union_mean");
  expect_refused(R"({"policy": "tova", "budget": 9, "sink": 1, "share": "none"})",
                 {"allowed one of per_layer_per_head, per_head, union, union_mean"});
}

TEST(Registry, OffersTheNearestNameInPlaceOfAllNames) {
  try {
    static_cast<void>(make_policy("AMS-Tva,budget=64"));
    ADD_FAILURE();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(),
                 "policy: there is no policy \"AMS-Tva\" (did you mean \"ams-tova\"?); kvkeep policies lists all");
  }
}

TEST(Registry, RefusesWithTheFieldTheValueAndWhatIsAllowed) {
  expect_refused(R"({"policy": "ams-tova"})", {"budget is missing", "exactly one of budget, ratio, bytes"});
  expect_refused(R"({"policy": "nonsense", "budget": 9})",
                 {"\"nonsense\"; kvkeep policies lists all, and --plugin FILE adds"});
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
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"segment_mass": 0}})",
                 {"allocator.segment_mass", "given 0", "(0"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"credit_decay": 1}})",
                 {"allocator.credit_decay", "given 1"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"pool": 4}})", {"allocator.pool", "4", "odd"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"min_segment": 600}})",
                 {"max_segment", "2 * min_segment = 1200"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "variant": "official", "allocator": {"coverage": 0.5}})",
                 {"coverage", "official"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "variant": "official", "allocator": {"coverage": "auto"}})",
                 {"coverage", "auto", "official"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"coverage": "most"}})",
                 {"allocator.coverage", "most", "[0.0, 1.0] or auto"});
  expect_refused(R"({"policy": "pyramidkv-tova", "budget": 32, "sink": 31, "recent": 0, "allocator": {"beta": 0.5}})",
                 {"allocator.beta", "0.5"});
  expect_refused(R"({"policy": "pyramidkv-tova", "budget": 64, "variant": "official"})",
                 {"variant", "official", "pyramidkv", "strict"});
  expect_refused(R"({"policy": "adakv-tova", "budget": 64, "share": "union"})",
                 {"share", "adakv", "per_layer_per_head"});
  expect_refused(R"({"policy": "adakv-tova", "budget": 64, "scorer": {"heads": "all"}})",
                 {"scorer.heads", "all", "group"});
  expect_refused(
      R"({"policy": "criticalkv-tova", "budget": 64, "allocator": {"heads": "adaptive"}, "scorer": {"heads": "all"}})",
      {"scorer.heads", "all", "group"});
  expect_refused(R"({"policy": "adakv-rpc", "budget": 512, "scorer": {"style": "official"}})",
                 {"scorer.heads", "all", "group"});
  expect_refused(R"({"policy": "criticalkv-expected", "budget": 512, "scorer": {"value_norm": true}})",
                 {"scorer.value_norm", "true", "false"});
  expect_refused(R"({"policy": "pyramidkv", "ratio": 0.5, "sink": 2147483647})", {"sink", "2147483711", "2147483647"});
  expect_refused(R"({"policy": "snapkv", "ratio": 0.5, "sink": 2147483600})", {"sink", "2147483664", "2147483647"});
  expect_refused(R"({"policy": "streaming", "ratio": 0.5, "sink": 2147483647})", {"sink", "2147483648", "2147483647"});
  expect_refused(R"({"policy": "pyramidkv", "budget": 67})", {"budget is 67", "pyramidkv", "68", "window"});
  expect_refused(R"({"policy": "chunkkv-tova", "budget": 64, "allocator": {"chunk": 0}})",
                 {"allocator.chunk", "0", "1 or more"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"segments": "fixed:0"}})",
                 {"segments", "fixed:0"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "allocator": {"suffix_fill": "max"}})",
                 {"suffix_fill", "max_head, max_global"});
  expect_refused(R"({"policy": "tova", "budget": 64, "share": "everybody"})",
                 {"share", "everybody", "per_layer_per_head", "union"});
  expect_refused(R"({"policy": "ams-tova", "budget": 64, "share": "union"})",
                 {"share", "allocator ams", "per_layer_per_head"});
  expect_refused(R"({"policy": "tova", "budget": 64, "ratio": 0.5})", {"budget, ratio", "exactly one", "bytes"});
  expect_refused(R"({"policy": "tova", "ratio": 1})", {"ratio", "given 1", "[0.0, 1.0)"});
  expect_refused(R"({"policy": "tova", "bytes": 0})", {"bytes", "given 0"});
  expect_refused(R"({"policy": "tova", "budget": 64, "budget": 65})", {"budget", "twice"});
  expect_refused(R"({"policy": "full", "budget": 64})", {"full", "budget"});
  expect_refused("", {"not JSON"});
  expect_refused("[1]", {"[1]", "JSON object"});
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=5,budget=6")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(load_policy("/no/such/policy.json")), InvalidArgument);
}

TEST(Registry, SaysWhereThereAreNoOptionsAndWhereJsonGoes) {
  EXPECT_EQ(testing::message_of<InvalidArgument>([] { (void)make_policy("full,budget=3"); }),
            "policy: full has no option \"budget\"; allowed none");
  EXPECT_EQ(testing::message_of<InvalidArgument>([] { (void)make_policy(R"( {"policy": "tova", "budget": 24})"); }),
            "policy: this is JSON; given  {\"policy\": \"tova\", \"budget\": 24}; allowed name,key=value,... "
            "(JSON: make_policy_from_json(), or a file for the command)");
}

// In an earlier version these came out as errors of the JSON library, which are not kvkeep's.
TEST(Registry, RefusesAnOptionThatIsBothAValueAndAnObject) {
  for (const char* both : {"tova,budget=16,scorer=3,heads=group", "tova,scorer=3,scorer.heads=group,budget=16",
                           "tova,budget=16,budget.x=3", "tova,budget=16,sink.y=1,sink=2", "tova,policy.x=1,budget=16",
                           "tova,budget=16,.=1"})
    EXPECT_THROW(static_cast<void>(make_policy(both)), InvalidArgument) << both;
}

TEST(Registry, TakesFileNamesThatAreNotUtf8) {
  const std::string router = std::filesystem::temp_directory_path() / text("kvkeep_router_", ::getpid(), "_bad\xff");
  write_routing(router, {.projections = full({1, 4, 3, 16}, 0.25F),
                         .thresholds = full({1, 4}, 0.5F),
                         .gate_weights = {},
                         .gate_biases = {}});
  EXPECT_NE(make_policy("tova,budget=64,rest=fold,router=" + router)->to_json().find("bad\xef\xbf\xbd"),
            std::string::npos)
      << "its description is JSON all the same";
  std::filesystem::remove(router);
  EXPECT_THROW(static_cast<void>(make_policy("triattention,budget=16,calibration=bad\xff")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=bad\xff")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("bad\xff,budget=4")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(load_policy(std::string(300, 'x'))), InvalidArgument) << "no such file can be";
}

TEST(Registry, SaysInShortWhatItWasGiven) {
  for (const std::string& long_text : {std::string(100000, 'x'), "tova,budget=16," + std::string(100000, 'x') + "=1",
                                       "tova,budget=" + std::string(100000, 'x')}) {
    try {
      static_cast<void>(make_policy(long_text));
      FAIL();
    } catch (const InvalidArgument& refused) {
      EXPECT_LT(std::string_view(refused.what()).size(), 5000U);
    }
  }
}

TEST(Registry, RefusesOptionsOfPoliciesThatNarrowPrompts) {
  expect_refused(R"({"policy": "asl"})", {"budget is missing"});
  expect_refused(R"({"policy": "asl-2pass"})", {"budget is missing"});
  expect_refused(R"({"policy": "fastkv", "layers": {"layer": 3}})", {"budget is missing"});
  expect_refused(R"({"policy": "gemfilter", "layers": {"layer": 3}})", {"budget is missing"});
  for (const char* name : {"asl", "asl-2pass"})
    expect_refused(text(R"({"policy": ")", name, R"(", "budget": 32})"), {"budget", "is 32", "scorer.window = 32"});
  expect_refused(R"({"policy": "fastkv", "budget": 8, "scorer": {"window": 8}, "layers": {"layer": 3}})",
                 {"budget", "is 8", "scorer.window = 8"});
  for (const char* name : {"asl", "asl-2pass", "fastkv", "gemfilter"})
    for (const int pool : {0, 2, 8})
      expect_refused(
          text(R"({"policy": ")", name, R"(", "budget": 64, "scorer": {"pool": )", pool, R"(}, "layers": {}})"),
          {"scorer.pool", std::to_string(pool)});
  for (const char* name : {"fastkv", "gemfilter"}) {
    expect_refused(text(R"({"policy": ")", name, R"(", "budget": 64})"), {"layers.layer is missing"});
    expect_refused(text(R"({"policy": ")", name, R"(", "budget": 64, "layers": {"layer": -1}})"),
                   {"layers.layer", "given -1", "0 or more"});
    expect_refused(text(R"({"policy": ")", name, R"(", "budget": 64, "layers": {"layer": 3, "threshold": 0.3}})"),
                   {"layers.threshold", "no option"});
  }
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"cache": 32}})",
                 {"layers.cache", "is 32", "scorer.window = 32"});
  expect_refused(R"({"policy": "fastkv", "budget": 64, "layers": {"layer": 1, "cache": 5}})", {"layers.cache", "is 5"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"cache": 64, "cache_mass": 0.5}})",
                 {"layers.cache_mass", "0.5", "only without `cache`"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"cache_mass": 0}})",
                 {"layers.cache_mass", "given 0", "(0"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"cache_mass": 1.1}})",
                 {"layers.cache_mass", "given 1.1"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"threshold": 0.3, "missed_mass": 0.1}})",
                 {"layers.missed_mass", "0.1", "only without `threshold`"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"missed_mass": 1}})", {"layers.missed_mass", "given 1"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"select_mass": 0}})", {"layers.select_mass", "given 0"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"min_layer": -1}})", {"layers.min_layer", "given -1"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"observed_layers": 0}})",
                 {"layers.observed_layers", "given 0"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"indices": "ranks"}})", {"layers.indices", "no option"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": {"layer": 3}})", {"layers.layer", "no option"});
  expect_refused(R"({"policy": "asl", "budget": 64, "layers": 3})", {"layers", "allowed an object"});
  expect_refused(R"({"policy": "asl-2pass", "budget": 64, "layers": {"cache": 64}})", {"layers.cache", "no option"});
  expect_refused(R"({"policy": "asl-2pass", "budget": 64, "layers": {"indices": "both"}})",
                 {"layers.indices", "both", "ranks, last_query"});
  expect_refused(R"({"policy": "asl", "budget": 64, "scorer": {"pooling": "min"}})",
                 {"scorer.pooling", "min", "avg, max"});
  for (const char* key : {"sink", "recent", "interval", "share", "allocator", "ratio"})
    expect_refused(text(R"({"policy": "asl", "budget": 64, ")", key, R"(": 4})"), {key, "no option"});
  expect_refused(R"({"policy": "pyramidinfer", "budget": 64})", {"budget", "no option"});
  expect_refused(R"({"policy": "pyramidinfer", "layers": {"recent_ratio": 1}})", {"layers.recent_ratio", "given 1"});
  expect_refused(R"({"policy": "pyramidinfer", "layers": {"keep": 0}})", {"layers.keep", "given 0"});
  expect_refused(R"({"policy": "pyramidinfer", "layers": {"schedule": "linear"}})",
                 {"layers.schedule", "linear", "cosine, constant"});
  expect_refused(R"({"policy": "pyramidinfer", "layers": {"min_context": 0}})", {"layers.min_context", "given 0"});
}

TEST(Registry, TakesAPolicyThatDecidesBehindThePrompt) {
  const auto both = resolved("asl,budget=64+ams-tova,budget=32,window=16");
  EXPECT_EQ(both["budget"], 64);
  EXPECT_EQ(both["scorer"]["window"], 32);
  EXPECT_EQ(both["decode"]["policy"], "ams-tova");
  EXPECT_EQ(both["decode"]["budget"], 32);
  EXPECT_EQ(both["decode"]["allocator"]["window"], 16);
  EXPECT_EQ(resolved(R"(pyramidinfer+tova,budget=32)")["decode"]["policy"], "tova");
  EXPECT_EQ(make_policy("asl,budget=64+tova,budget=32")->to_json(),
            make_policy_from_json(R"({"policy": "asl", "budget": 64, "decode": {"policy": "tova", "budget": 32}})")
                ->to_json());
  EXPECT_FALSE(resolved("asl,budget=64+full").contains("decode"));
  EXPECT_EQ(make_policy("asl,budget=64+ams-tova,budget=32")->needs().queries, 32);
  EXPECT_EQ(make_policy("asl,budget=64+ams-tova,budget=32")->trigger().budget.slots, 32);
  EXPECT_TRUE(make_policy("asl,budget=64")->trigger().never);
  EXPECT_TRUE(make_policy("asl,budget=64")->narrows());
  EXPECT_FALSE(make_policy("tova,budget=64")->narrows());

  expect_refused(R"({"policy": "asl", "budget": 64, "decode": {"policy": "nonsense"}})", {"decode of asl", "nonsense"});
  expect_refused(R"({"policy": "asl", "budget": 64, "decode": {"policy": "tova"}})",
                 {"decode of asl", "budget is missing"});
  expect_refused(
      R"({"policy": "asl", "budget": 64, "decode": {"policy": "gemfilter", "budget": 9, "layers": {"layer": 1}}})",
      {"decode of asl", "gemfilter", "acts on prompts itself"});
  expect_refused(
      R"({"policy": "asl", "budget": 64, "decode": {"policy": "asl", "budget": 64, "decode": {"policy": "full"}}})",
      {"decode of asl", "acts on prompts itself"});
  for (const char* decode : {"3", "null", "\"tova\"", "[]"})
    expect_refused(text(R"({"policy": "asl", "budget": 64, "decode": )", decode, "}"),
                   {"decode of asl", "allowed a JSON object"});
  // Heads of a layer that keep different counts cannot be averaged slot by slot.
  EXPECT_EQ(resolved("asl,budget=64,cache_mass=0.5+ams-tova,budget=32")["decode"]["scorer"]["heads"], "group");
  EXPECT_NE(
      make_policy_from_json(
          R"({"policy": "asl", "budget": 64, "layers": {"cache_p": 0.5}, "decode": {"policy": "tova", "budget": 9}})")
          ->to_json()
          .find(R"("heads":"group")"),
      std::string::npos);
  EXPECT_EQ(resolved("asl,budget=64,cache=40+ams-tova,budget=32")["decode"]["scorer"]["heads"],
            resolved("ams-tova,budget=32")["scorer"]["heads"]);
  expect_refused(
      R"({"policy": "asl", "budget": 64, "layers": {"cache_mass": 0.5},
          "decode": {"policy": "tova", "budget": 9, "scorer": {"heads": "all"}}})",
      {"decode of asl", "scorer.heads", "group"});
  expect_refused(R"({"policy": "tova", "budget": 64, "decode": {"policy": "full"}})", {"decode", "no option"});
  const auto refused = [](const std::string& policy, const std::string& word) {
    try {
      static_cast<void>(make_policy(policy));
      ADD_FAILURE() << "was accepted: " << policy;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << policy << " -> " << e.what();
    }
  };
  refused("asl,budget=64+nonsense,budget=3", "nonsense");
  refused("asl,budget=64+tova,budget=32+tova,budget=16", "budget");
  refused("asl,budget=64+gemfilter,budget=3,layer=1", "acts on prompts itself");
  refused("tova,budget=64+tova,budget=32", "budget");
  refused("asl,budget=64,decode=full+tova,budget=32", "twice");
  refused("asl,budget=64+", "budget");
}

TEST(Registry, ReadsAPlusThatIsNoSecondPolicy) {
  EXPECT_EQ(resolved("asl,budget=64,threshold=1e+5")["layers"]["threshold"], 1e5);
  EXPECT_EQ(resolved("asl,budget=64,threshold=1e+5+tova,budget=9")["decode"]["budget"], 9);
  try {  // a + in a file's name
    static_cast<void>(make_policy("triattention,budget=64,calibration=/no/such/c++files+more/of.safetensors"));
    ADD_FAILURE() << "was accepted";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("/no/such/c++files+more/of.safetensors"), std::string::npos) << e.what();
  }
  try {
    static_cast<void>(
        make_policy("asl,budget=64+triattention,budget=64,calibration=/no/such/c++files+more/of.safetensors"));
    ADD_FAILURE() << "was accepted";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("/no/such/c++files+more/of.safetensors"), std::string::npos) << e.what();
  }
}

TEST(Registry, WritesWhatItReadsOfPoliciesThatNarrowPrompts) {
  for (const char* policy :
       {"asl,budget=64",
        "asl,budget=64,min_layer=3,observed_layers=2,threshold=-1,cache=40,window=16,pool=5,pooling=max,variant="
        "official+ams-tova,budget=32",
        "asl,budget=64,missed_mass=0.1,select_mass=0.9,cache_mass=0.5",
        "asl-2pass,budget=64,indices=last_query,min_layer=0", "asl-2pass,budget=64+tova,budget=9",
        "fastkv,budget=64,layer=0,cache_mass=0.7", "gemfilter,budget=1,layer=2,pool=1", "pyramidinfer",
        "pyramidinfer,sink=0,recent_ratio=0,keep=1,schedule=constant,min_context=1,distance_weight=0.5+streaming,"
        "budget=9"}) {
    const std::string json = make_policy(policy)->to_json();
    EXPECT_EQ(make_policy_from_json(json)->to_json(), json) << policy;
  }
  EXPECT_EQ(resolved("asl,budget=64")["layers"]["threshold"], 0.3);
  EXPECT_EQ(resolved("asl,budget=64")["layers"]["observed_layers"], 8);
  EXPECT_EQ(resolved("pyramidinfer")["layers"]["keep"], 0.9);
  const std::string published =
      R"({"policy": "asl", "select_k": 99, "scorer": {"window_size": 8},
          "layers": {"l_min": 3, "l_obs": 2, "tau": 0.5, "cache_k": 50}})";
  EXPECT_EQ(make_policy_from_json(published)->to_json(),
            make_policy("asl,budget=99,window=8,min_layer=3,observed_layers=2,threshold=0.5,cache=50")->to_json());
}

TEST(Registry, BareNamesOfAllocatorsStandForSnapKVScores) {
  for (const char* name : {"pyramidkv", "adakv", "chunkkv", "criticalkv"}) {
    const auto bare = resolved(text(name, ",budget=512")), full = resolved(text(name, "-snapkv,budget=512"));
    EXPECT_EQ(bare["scorer"], full["scorer"]) << name;
    EXPECT_EQ(bare["allocator"], full["allocator"]) << name;
    EXPECT_EQ(bare["scorer"]["window"], 64) << name;
  }
}

TEST(Registry, RandomAttentionIsRandomWithDefaultsOfItsOwn) {
  const auto json = resolved("random-attention,budget=512");
  EXPECT_EQ(json["protect_prompt"], true);
  EXPECT_EQ(json["recent"], 64);
  EXPECT_EQ(json["interval"], 64);
  EXPECT_EQ(json["sink"], 0);
  EXPECT_EQ(json["scorer"], resolved("random,budget=512")["scorer"]);
  EXPECT_EQ(resolved("random-attention,budget=512,recent=8")["recent"], 8);
  expect_refused(R"({"policy": "ams-random-attention", "budget": 512})", {"no policy", "ams-random-attention"});

  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  constexpr std::int32_t kPrompt = 20, kTokens = 100;
  const DenseKv rows{zeros({1, 2, kTokens, 4}, Dtype::f32), zeros({1, 2, kTokens, 4}, Dtype::f32)};
  Keeper keeper(spec, make_policy("random-attention,budget=40,recent=8,interval=60"));
  const SequenceId id = 1;
  keeper.join(id, kPrompt, kPrompt);
  const std::int32_t indptr[] = {0, kTokens - kPrompt};
  keeper.observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr});
  std::int32_t length = kTokens;
  keeper.bind({rows});
  keeper.step({{&id, 1}, {{&length, 1}}});
  for (std::int32_t head = 0; head < 2; ++head) {
    const auto kept = keeper.positions(id, 0, head);
    ASSERT_EQ(kept.size(), 40U);
    EXPECT_EQ(kept[kPrompt - 1], kPrompt - 1) << "the prompt stays";
    EXPECT_EQ(kept[40 - 8], kTokens - 8) << "and the newest";
    EXPECT_LT(kept[kPrompt], kTokens - 8 - 12) << "and not just the next 12";
  }
  EXPECT_FALSE(std::ranges::equal(keeper.positions(id, 0, 0), keeper.positions(id, 0, 1))) << "each head its own";
}

TEST(Registry, ListsEveryOptionOfEveryPolicy) {
  for (const PolicyInfo& p : policies()) {
    EXPECT_FALSE(p.what.empty());
    EXPECT_FALSE(p.source.empty()) << p.name;
    if (p.name == "full") continue;
    if (p.name != "pyramidinfer") EXPECT_EQ(p.options.front().name, "budget") << p.name;
    if (std::any_of(p.options.begin(), p.options.end(), [](const OptionInfo& o) { return o.fallback == "required"; }))
      continue;
    const bool may_fold =
        std::any_of(p.options.begin(), p.options.end(), [](const OptionInfo& o) { return o.name == "rest"; });
    const auto json =
        resolved(p.name == "pyramidinfer" ? p.name : p.name + ",budget=512" + (may_fold ? ",rest=fold" : ""));
    for (const OptionInfo& o : p.options) {
      if (o.fallback == "-" || o.fallback.starts_with("a quarter") || o.name == "decode" ||
          o.fallback.find(", or less") != std::string::npos)
        continue;  // resolved only where it is given
      const auto dot = o.name.find('.');
      const bool there = dot == std::string::npos ? json.contains(o.name)
                                                  : json[o.name.substr(0, dot)].contains(o.name.substr(dot + 1));
      EXPECT_TRUE(there) << p.name << " lists " << o.name << " and does not resolve it";
    }
  }
}

TEST(Registry, TakesOptionsOfFoldedSpansWhereTheRestFolds) {
  EXPECT_EQ(make_policy("tova,budget=9")->memory(), nullptr);
  EXPECT_NE(make_policy("tova,budget=9,rest=fold")->memory(), nullptr);
  EXPECT_EQ(make_policy("ams-tova,budget=9,rest=fold,mass=0.5,memory.coverage=0.25")->memory()->zoom.coverage, 0.25);
  EXPECT_EQ(resolved("ams-tova,budget=9,rest=fold,coverage=0.5")["allocator"]["coverage"], 0.5)
      << "a name that the policy itself uses means its own";
  EXPECT_THROW(static_cast<void>(make_policy("tova,budget=9,memory.mass=0.5")), InvalidArgument) << "nothing folds";
  for (const char* wrong : {"max_rank=0", "energy=2", "mass=-1", "min_span=0", "store=f64", "host_bytes=-1",
                            "router=nowhere.safetensors", "reach=0", "near_bytes=0", "file=far", "damage=coarse"})
    EXPECT_THROW(static_cast<void>(make_policy(text("tova,budget=9,rest=fold,memory.", wrong))), InvalidArgument)
        << wrong;
  for (const char* wrong : {"memory.alpha=x", "budget=0", "budget_share=0", "budget_share=1.5", "interval=0",
                            "budget=5,budget_share=0.5", "memory.host_bytes=10,memory.file_bytes=10"})
    EXPECT_THROW(static_cast<void>(make_policy(text("sekv,", wrong))), InvalidArgument) << wrong;
}

TEST(Registry, SaysWhatAPolicyNeeds) {
  EXPECT_EQ(make_policy("full")->needs().queries, 0);
  EXPECT_EQ(make_policy("streaming,budget=9")->needs().queries, 0);
  EXPECT_EQ(make_policy("tova,budget=9")->needs().queries, 1);
  EXPECT_EQ(make_policy("ams-tova,budget=9")->needs().queries, 32);
  EXPECT_EQ(make_policy("ams-tova,budget=9,variant=official")->needs().queries, 33)
      << "the published window leaves out the oldest query it has";
}

}  // namespace
}  // namespace kvkeep::registry_test
