// SPDX-License-Identifier: Apache-2.0
// Event traces as an enemy would write them: numbers of layers, positions and lengths that other numbers could become
// of.

#include "arrays.h"
#include "kvkeep/trace/trace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "replayed_trace.h"
#include "told.h"

namespace kvkeep::event_trace_test {
namespace {

using testing::Array;

constexpr const char* kPolicy = "tova,budget=8,sink=1,recent=1";

/// i64 [1, count], ascending.
Array wide(std::int64_t first, std::int64_t count) {
  return Array::range(first, first + count, Dtype::i64).unsqueeze(0);
}

/// One layer of 24 slots, the newest 4 of them with queries.
testing::ReplayedTrace event() {
  const auto i32 = Dtype::i32;
  return {trace::replay_event,
          {{"keys", Array::full({1, 1, 24, 4}, 0.5F)},
           {"values", Array::full({1, 1, 24, 4}, 0.5F)},
           {"positions", Array::range(0, 24, i32).unsqueeze(0)},
           {"queries", Array::full({1, 2, 4, 4}, 0.5F)},
           {"query_positions", Array::range(20, 24, i32).unsqueeze(0)}},
          {{"kvkeep_trace", "1"},
           {"kind", "event"},
           {"query_basis", "post_rope"},
           {"rope_style", "half"},
           {"inv_freq", "[1.0,0.1]"},
           {"next_position", "[24]"}}};
}

TEST(EventTrace, ReplaysTheTraceThatTheOthersAreMadeOf) {
  EXPECT_EQ(event().replay(kPolicy).metadata.at("slots_kept"), "8");
}

// An earlier version wrote what the memory of the scores had held before.
TEST(EventTrace, GivesZerosAsScoresOfRowsThatNoEventCuts) {
  for (const char* policy :
       {"tova,budget=24", "keydiff,budget=24,sink=1", "rkv,budget=24", "adakv-expected,budget=24"}) {
    const trace::Result result = event().replay(policy);
    const std::map<std::string, Tensor> tensors(result.tensors.begin(), result.tensors.end());
    EXPECT_EQ(result.metadata.at("slots_kept"), "24") << policy;
    EXPECT_TRUE(Array(tensors.at("scores")).equal(Array::zeros({1, 1, 24}, Dtype::f32))) << policy;
  }
}

// An earlier version compared them as signed numbers: 2^64 - 1 was written to as layer -1, 2^63 + 5 was taken for
// layer 5.
TEST(EventTrace, RefusesLayersThatAreNoLayers) {
  for (const char* number : {"18446744073709551615", "9223372036854775808", "9223372036854775813",
                             "9223372039002259461", "65536", "-1", "0.0", "null"}) {
    testing::ReplayedTrace listed = event(), named = event(), counted = event();
    listed.metadata["layers"] = text("[", number, "]");
    listed.expect_refused(kPolicy, "allowed 0 to 65535");
    named.metadata["layer"] = number;
    named.expect_refused(kPolicy, "allowed 0 to 65535");
    counted.metadata["num_layers"] = number;
    counted.expect_refused(kPolicy, "allowed 0 to 65535");
  }
}

TEST(EventTrace, RefusesRopeThatIsLeftOpenOrWrong) {
  testing::ReplayedTrace open = event();
  open.metadata["inv_freq"] = "[]";
  open.expect_refused("expected,budget=8,sink=2,recent=2", "does not state the RoPE of layer 0");
  EXPECT_EQ(open.replay(kPolicy).metadata.at("slots_kept"), "8") << "queries after RoPE are not turned";
  open.metadata["query_basis"] = "pre_rope";
  open.expect_refused(kPolicy, "taken before RoPE, which the model spec does not state");
  open.metadata["rope_style"] = "none";
  EXPECT_EQ(open.replay(kPolicy).metadata.at("slots_kept"), "8");
  for (const auto& [ropes, says] :
       {std::pair{"[]", "not an object of layers"},
        {R"({"1": {"rope_style": "none"}})", R"(names layer "1"; allowed 0 to 0)"},
        {R"({"0x": {"rope_style": "none"}})", R"(names layer "0x")"},
        {R"({"0": {}})", "has no rope_style"},
        {R"({"0": {"rope_style": "round"}})", R"(is "round"; allowed half)"},
        {R"({"0": {"rope_style": "half", "inv_freq": 1}})", "is not an array of numbers"},
        {R"({"0": {"rope_style": "half", "inv_freq": [1, 1, 1]}})", "3 numbers for layer 0"},
        {R"({"0": {"rope_style": "none", "inv_freq": [1]}})", "has 1 frequencies"},
        {R"({"0": {"rope_style": "half", "attention_scaling": "x"}})", "is no number"}}) {
    testing::ReplayedTrace wrong = event();
    wrong.metadata["layer_ropes"] = ropes;
    wrong.expect_refused(kPolicy, says);
  }
}

TEST(EventTrace, CapsLogitsAndLetsSinksJoinTheSoftmax) {
  testing::ReplayedTrace trace = event();
  const auto scores = [&] {
    const trace::Result result = trace.replay(kPolicy);
    const std::map<std::string, Tensor> tensors(result.tensors.begin(), result.tensors.end());
    return tensors.at("scores").data<float>()[3];
  };
  // Every key is alike: a product of 1, a logit of 1 / 2.
  EXPECT_NEAR(scores(), 1.0 / 24, 1e-7);
  trace.tensors.insert_or_assign("sinks", Array(Array::full({2}, 0.5F)));
  EXPECT_NEAR(scores(), 1.0 / 25, 1e-7);
  trace.metadata["logit_cap"] = "0.5";
  const double capped = std::exp(0.5 * std::tanh(1.0));
  EXPECT_NEAR(scores(), capped / (24 * capped + std::exp(0.5)), 1e-7);
  trace.expect_refused("expected,budget=8,sink=2,recent=2", "not capped; given 0.5");
  trace.metadata["logit_cap"] = "-1";
  trace.expect_refused(kPolicy, "\"logit_cap\" is -1; allowed a positive number");
  trace.metadata["logit_cap"] = "high";
  trace.expect_refused(kPolicy, "logit_cap");
  trace = event();
  trace.tensors.insert_or_assign("sinks", Array(Array::full({3}, 0.5F)));
  trace.expect_refused(kPolicy, "\"sinks\" has shape [3]");
}

TEST(EventTrace, RefusesMetadataThatNestsDeep) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  for (const char* key :
       {"layers", "layer", "num_layers", "next_position", "attention_scaling", "softmax_scale", "inv_freq"}) {
    testing::ReplayedTrace forged = event();
    forged.metadata[key] = deep;
    forged.expect_refused(kPolicy, "nests deeper");
  }
}

// An earlier version read the low 32 bits: a length of 2^32 + 12 as 12.
TEST(EventTrace, RefusesNumbersOf64BitsThatDoNotFit32) {
  constexpr std::int64_t kWraps = std::int64_t{1} << 32;
  testing::ReplayedTrace good = event(), shifted = event(), queries = event(), lengths = event();
  good.tensors["positions"] = wide(0, 24);
  EXPECT_EQ(good.replay(kPolicy).metadata.at("slots_kept"), "8");
  shifted.tensors["positions"] = wide(kWraps, 24);
  shifted.expect_refused(kPolicy, "positions holds 4294967296");
  queries.tensors["query_positions"] = wide(kWraps + 20, 4);
  queries.expect_refused(kPolicy, "query_positions holds 4294967316");
  lengths.tensors["lengths"] = Array::full({1}, kWraps + 12, Dtype::i64);
  lengths.expect_refused(kPolicy, "lengths holds 4294967308");
  testing::ReplayedTrace padded = event();
  padded.tensors["positions"] = Array::cat({wide(0, 20), wide(kWraps, 4)}, 1);
  padded.tensors["lengths"] = Array::full({1}, 20, Dtype::i32);
  EXPECT_EQ(padded.replay(kPolicy).metadata.at("slots_kept"), "8") << "padding may hold anything";
}

TEST(EventTrace, KeepsWhatIsPinned) {
  testing::ReplayedTrace pinned = event();
  pinned.tensors["pinned"] = Array::of(std::vector<std::int32_t>{3, 6}).unsqueeze(0);
  pinned.expect_refused(kPolicy, "[spans, 3]");
  const auto spans = [](std::initializer_list<std::int64_t> numbers) {
    Array t = Array::full({static_cast<std::int64_t>(numbers.size()) / 3, 3}, 0, Dtype::i64);
    std::copy(numbers.begin(), numbers.end(), t.data<std::int64_t>());
    return t;
  };
  pinned.tensors["pinned"] = spans({0, 3, 5, 0, 9, 10});
  for (const auto& [name, tensor] : pinned.replay(kPolicy).tensors) {
    if (name != "positions") continue;
    // Scores are equal, so the newest fill the budget.
    const std::vector<std::int32_t> kept(tensor.data<std::int32_t>(), tensor.data<std::int32_t>() + 8);
    EXPECT_EQ(kept, (std::vector<std::int32_t>{0, 3, 4, 9, 20, 21, 22, 23}));
  }
  for (const auto& [numbers, words] :
       std::vector<std::pair<Array, std::string>>{{spans({1, 3, 5}), "allowed a sequence from 0 to 0"},
                                                  {spans({0, 5, 5}), "a begin below the end"},
                                                  {spans({0, -1, 5}), "from 0 to 2147483647"},
                                                  {spans({0, 1, std::int64_t{1} << 32}), "from 0 to 2147483647"},
                                                  {spans({0, 3, 5, 0, 5, 6}), "spans that ascend"},
                                                  {spans({0, 2, 20}), "holds 18 pinned slots"}}) {
    pinned.tensors["pinned"] = numbers;
    pinned.expect_refused(kPolicy, words);
  }
}

// A result has what a keeper would refuse at the event: an earlier version wrote what lay behind it, or crashed.
TEST(EventTrace, RefusesWhatAPolicyOfOnesOwnDecidesForOtherRows) {
  const auto told = [](auto change) {
    return testing::ToldPolicy({.budget = {.slots = 8}, .interval = 8}, [change](const Evidence& evidence) {
      Decision decision;
      decision.keep = keep_everything(evidence.table);
      change(evidence.table, decision);
      return decision;
    });
  };
  const auto few = [] { return Tensor(Array::zeros({3}, Dtype::f32)); };
  EXPECT_EQ(event().replay(told([](auto&, auto&) {})).metadata.at("slots_kept"), "24");
  event().expect_refused(told([&](auto&, Decision& d) { d.credit = few(); }), "credit of told are f32 [3]");
  event().expect_refused(told([&](auto&, Decision& d) { d.scores.data = few(); }), "scores of told are f32 [3]");
  event().expect_refused(told([&](auto&, Decision& d) { d.guarded = {25}; }), "says that 25 slots of layer 0, head 0");
  event().expect_refused(told([&](auto&, Decision& d) { d.allotment.emplace(); }), "told says how it divides 0 rows");
  const trace::Result divided = event().replay(told([](auto& table, Decision& d) {
    d.allotment.emplace();
    d.allotment->ends.assign(table.rows.size(), {24});
    d.allotment->quotas.assign(table.rows.size(), {8});
  }));
  EXPECT_EQ(std::ranges::count(divided.tensors, std::string("mass"), &std::pair<std::string, Tensor>::first), 0)
      << "it gave none";
}

}  // namespace
}  // namespace kvkeep::event_trace_test
