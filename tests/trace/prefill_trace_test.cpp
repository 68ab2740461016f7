// SPDX-License-Identifier: Apache-2.0
// Prefill traces: what is replayed is what a pass over the same prompt does, and what does not fit is refused with the
// name of tensor or metadata.

#include "arrays.h"
#include "kvkeep/trace/trace.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kvkeep/kvkeep.h"
#include "layered_prompt.h"
#include "replayed_trace.h"
#include "told.h"

namespace kvkeep::prefill_trace_test {
namespace {

using namespace testing;

/// A prefill trace in memory, to be changed at will.
struct Trace : testing::ReplayedTrace {
  explicit Trace(const LayeredPrompt& prompt, std::int32_t recorded = -1)
      : ReplayedTrace{
            trace::replay_prefill,
            {},
            {{"kvkeep_trace", "1"}, {"kind", "prefill"}, {"num_layers", std::to_string(prompt.shape.layers)}}} {
    if (recorded < 0) recorded = prompt.shape.tokens;
    for (std::size_t l = 0; l < prompt.keys.size(); ++l) {
      tensors[text("layer.", l, ".keys")] = prompt.keys[l];
      tensors[text("layer.", l, ".queries")] = prompt.queries[l].narrow(1, prompt.shape.tokens - recorded, recorded);
    }
  }
};

const Tensor* find(const trace::Result& result, const std::string& name) {
  const auto found =
      std::find_if(result.tensors.begin(), result.tensors.end(), [&](const auto& t) { return t.first == name; });
  return found == result.tensors.end() ? nullptr : &found->second;
}

Ints ints(const Tensor& t) { return {t.data<std::int32_t>(), t.data<std::int32_t>() + t.numel()}; }
Ints named(const trace::Result& result, const std::string& name) {
  const Tensor* t = find(result, name);
  if (t == nullptr) ADD_FAILURE() << "the result has no " << name;
  return t == nullptr ? Ints{} : ints(*t);
}

/// One row of `layer.<l>.slots` without what pads it.
Ints row_of(const trace::Result& result, std::int32_t layer, std::int32_t head) {
  const Tensor* t = find(result, text("layer.", layer, ".slots"));
  if (t == nullptr) return {};
  Ints row = ints(contiguous(t->select(0, head)));
  while (!row.empty() && row.back() == -1) row.pop_back();
  return row;
}

constexpr const char* kAsl = "asl,budget=24,window=6,pool=5,min_layer=2,observed_layers=3";

TEST(PrefillTrace, ReplaysWhatThePassDecides) {
  const char* const policies[] = {"asl,budget=24,window=6,pool=5,min_layer=2,observed_layers=3,threshold=0.8,cache=20",
                                  "asl,budget=24,window=6,min_layer=2,threshold=2,cache_mass=0.8",
                                  "asl,budget=24,window=6,threshold=0",
                                  "fastkv,budget=24,window=6,layer=8",
                                  "pyramidinfer,keep=0.6,min_context=8",
                                  "asl-2pass,budget=24,window=6,threshold=0",
                                  "asl-2pass,budget=24,window=6,threshold=2",
                                  "gemfilter,budget=24,layer=4"};
  std::uint64_t seed = 0;
  for (const char* name : policies)
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
      for (const std::int32_t recorded :
           {60, 13}) {  // all queries, or the newest: 13 is what PyramidInfer observes with
        SCOPED_TRACE(text(name, ", ", dtype, ", ", recorded, " queries recorded"));
        const LayeredPrompt prompt({.dtype = dtype}, ++seed);
        const trace::Result result = Trace(prompt, recorded).replay(name);
        const auto policy = make_policy(name);
        const auto pass = policy->begin_prompt(host(), prompt.spec, 60);
        Ints present = prompt.all();
        std::int32_t selected = -1;
        bool restart = false;
        const double* ratio = find(result, "relative_variance")->data<double>();
        for (std::int32_t l = 0; l < 9; ++l) {
          const std::int32_t wanted = restart ? 0 : pass->wants(l, static_cast<std::int32_t>(present.size()));
          Decision decision;
          if (wanted > 0) decision = policy->decide(*pass, PromptLayer(prompt, l, present, wanted).evidence());
          if (decision.relative_variance)
            EXPECT_EQ(ratio[l], *decision.relative_variance);
          else
            EXPECT_TRUE(std::isnan(ratio[l]));
          if (decision.reason == Reason::select_layer) selected = l;
          for (std::int32_t h = 0; h < 2 && find(result, text("layer.", l, ".slots")) != nullptr; ++h) {
            Ints want = present;
            if (decision.keep) {
              want.clear();
              for (const std::int32_t slot : decision.keep->row(static_cast<std::size_t>(h)))
                want.push_back(present[static_cast<std::size_t>(slot)]);
            }
            EXPECT_EQ(row_of(result, l, h), want) << "layer " << l << ", head " << h;
          }
          if (!decision.narrow) continue;
          Ints left;
          for (const std::int32_t place : ints(decision.narrow->tokens))
            left.push_back(present[static_cast<std::size_t>(place)]);
          present = left;
          restart = decision.narrow->restart;
        }
        EXPECT_EQ(named(result, "tokens"), present);
        EXPECT_EQ(named(result, "selection_layer"), Ints{selected});
        EXPECT_EQ(result.metadata.at("selection_layer"), std::to_string(selected));
        EXPECT_EQ(result.metadata.at("tokens_going_on"), std::to_string(present.size()));
        EXPECT_EQ(result.metadata.at("policy"), policy->to_json());
        for (std::int32_t l = 0; l < 9; ++l)
          EXPECT_EQ(find(result, text("layer.", l, ".slots")) == nullptr, restart)
              << "the first of two passes keeps no cache";
      }
}

TEST(PrefillTrace, PadsRowsThatKeepFewerSlotsThanTheLongest) {
  const LayeredPrompt prompt({.kv_heads = 3, .tokens = 90}, 3);
  const trace::Result result = Trace(prompt, 6).replay("asl,budget=24,window=6,threshold=0,cache_mass=0.6");
  std::int64_t dropped = 0;
  bool uneven = false;
  for (std::int32_t l = 0; l < 9; ++l) {
    const Array slots = *find(result, text("layer.", l, ".slots"));
    std::size_t longest = 0;
    for (std::int32_t h = 0; h < 3; ++h) {
      const Ints row = row_of(result, l, h), whole = ints(slots[h].contiguous());
      EXPECT_TRUE(std::is_sorted(row.begin(), row.end()));
      EXPECT_EQ(std::count(whole.begin(), whole.end(), -1), static_cast<std::ptrdiff_t>(whole.size() - row.size()))
          << "-1 stands behind the row only";
      uneven = uneven || row.size() != whole.size();
      longest = std::max(longest, row.size());
      dropped += 90 - static_cast<std::int64_t>(row.size());
    }
    EXPECT_EQ(slots.size(1), static_cast<std::int64_t>(longest));
  }
  EXPECT_TRUE(uneven);
  EXPECT_EQ(result.metadata.at("slots_dropped"), std::to_string(dropped));
}

TEST(PrefillTrace, ReplaysPoliciesThatDecideAtTheEndOfThePrompt) {
  const LayeredPrompt prompt({}, 4);
  const trace::Result full = Trace(prompt).replay("full");
  EXPECT_EQ(named(full, "tokens"), prompt.all());
  EXPECT_EQ(named(full, "selection_layer"), Ints{-1});
  for (std::int32_t l = 0; l < 9; ++l) EXPECT_EQ(row_of(full, l, 1), prompt.all());

  for (const char* name : {"snapkv,budget=24,sink=0,recent=6,window=6",
                           "ams-tova,budget=24,sink=2,recent=4,window=8,min_segment=2,max_segment=8,min_quota=1",
                           "tova,budget=24", "knorm,budget=24", "streaming,budget=24", "keydiff,budget=70"}) {
    SCOPED_TRACE(name);
    const trace::Result result = Trace(prompt, 40).replay(name);
    const auto policy = make_policy(name);
    EXPECT_EQ(named(result, "tokens"), prompt.all());
    EXPECT_EQ(named(result, "selection_layer"), Ints{-1});
    for (std::int32_t l = 0; l < 9; ++l) {
      EXPECT_TRUE(std::isnan(find(result, "relative_variance")->data<double>()[l]));
      const PromptLayer layer(prompt, l, prompt.all(), 40);
      Evidence evidence = layer.evidence();
      evidence.moment = Moment::prefill_end;
      const Decision decision = policy->decide(evidence);
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto want = decision.keep->row(static_cast<std::size_t>(h));
        EXPECT_EQ(row_of(result, l, h), Ints(want.begin(), want.end())) << "layer " << l;
        EXPECT_EQ(want.size(), std::string(name).ends_with("=70") ? 60U : 24U);
      }
    }
  }
}

TEST(PrefillTrace, DoesNotAskWhatDecidesBehindThePrompt) {
  const LayeredPrompt prompt({}, 4);
  const Trace trace(prompt, 6);
  const trace::Result alone = trace.replay(text(kAsl, ",threshold=2,cache=24")),
                      with = trace.replay(text(kAsl, ",threshold=2,cache=24+ams-tova,budget=10,window=32"));
  for (std::int32_t l = 0; l < 9; ++l) EXPECT_EQ(row_of(alone, l, 0), row_of(with, l, 0));
  EXPECT_EQ(nlohmann::json::parse(with.metadata.at("policy"))["decode"]["policy"], "ams-tova");
}

TEST(PrefillTrace, RefusesTracesThatDoNotFitTheFormat) {
  const LayeredPrompt prompt({}, 5);
  const Trace good(prompt, 20);
  EXPECT_EQ(good.replay(kAsl).metadata.at("kvkeep_result"), "1");
  const auto with = [&](const std::function<void(Trace&)>& change) {
    Trace trace = good;
    change(trace);
    return trace;
  };
  const auto f32 = [](std::vector<std::int64_t> shape) { return Array::full(shape, 0.5F); };
  with([](Trace& t) { t.metadata.erase("num_layers"); }).expect_refused(kAsl, "metadata \"num_layers\" is missing");
  for (const char* bad : {"", "0", "-1", "nine", "9.0", "9 ", "4097", "99999999999"})
    with([&](Trace& t) {
      t.metadata["num_layers"] = bad;
    }).expect_refused(kAsl, text("metadata \"num_layers\" is \"", bad, "\"; allowed 1 to 4096"));
  with([](Trace& t) { t.metadata["num_layers"] = "10"; }).expect_refused(kAsl, "tensor \"layer.9.keys\" is missing");
  with([](Trace& t) { t.metadata["kind"] = "event"; }).expect_refused(kAsl, "kind \"event\"");
  with([](Trace& t) { t.metadata["softmax_scale"] = "wide"; }).expect_refused(kAsl, "softmax_scale");
  for (const char* name : {"layer.4.keys", "layer.0.keys", "layer.8.queries"}) {
    with([&](Trace& t) { t.tensors.erase(name); }).expect_refused(kAsl, text("tensor \"", name, "\" is missing"));
    with([&](Trace& t) {
      t.tensors[name] = t.tensors[name].to(Dtype::i32);
    }).expect_refused(kAsl, text("tensor \"", name, "\" has shape"));
    with([&](Trace& t) {
      t.tensors[name] = t.tensors[name][0].contiguous();
    }).expect_refused(kAsl, text("tensor \"", name, "\" has shape"));
    with([&](Trace& t) {
      t.tensors[name] = t.tensors[name].narrow(1, 0, 0).contiguous();
    }).expect_refused(kAsl, text("tensor \"", name, "\" has shape"));
  }
  with([&](Trace& t) {
    t.tensors["layer.3.keys"] = f32({2, 59, 8});
  }).expect_refused(kAsl, "tensor \"layer.3.keys\" has shape [2, 59, 8]");
  with([&](Trace& t) {
    t.tensors["layer.3.keys"] = f32({4, 60, 8});
  }).expect_refused(kAsl, "tensor \"layer.3.keys\" has shape [4, 60, 8]");
  with([&](Trace& t) {
    t.tensors["layer.3.keys"] = t.tensors["layer.3.keys"].to(Dtype::bf16);
  }).expect_refused(kAsl, "tensor \"layer.3.keys\" has shape [2, 60, 8] and dtype bf16");
  with([&](Trace& t) {
    t.tensors["layer.3.queries"] = f32({4, 19, 8});
  }).expect_refused(kAsl, "tensor \"layer.3.queries\" has shape [4, 19, 8]");
  with([&](Trace& t) {
    t.tensors["layer.3.queries"] = f32({2, 20, 8});
  }).expect_refused(kAsl, "tensor \"layer.3.queries\" has shape [2, 20, 8]");
  with([&](Trace& t) {
    t.tensors["layer.0.queries"] = f32({3, 20, 8});
  }).expect_refused(kAsl, "tensor \"layer.0.queries\" has shape [3, 20, 8]");
  with([&](Trace& t) {
    t.tensors["layer.0.queries"] = f32({4, 20, 7});
  }).expect_refused(kAsl, "tensor \"layer.0.queries\" has shape [4, 20, 7]");
  with([&](Trace& t) {
    t.tensors["layer.0.queries"] = f32({4, 61, 8});
  }).expect_refused(kAsl, "tensor \"layer.0.queries\" has shape [4, 61, 8]");
  Array broken = prompt.queries[2].narrow(1, 40, 20).clone();
  broken[1][19][0].fill_(std::nanf(""));
  with([&](Trace& t) { t.tensors["layer.2.queries"] = broken; }).expect_refused(kAsl, "query of head 1 at position 59");
}

TEST(PrefillTrace, RefusesPoliciesThatTheTraceCannotFeed) {
  const LayeredPrompt prompt({}, 6);
  const Trace trace(prompt, 5);
  trace.expect_refused(kAsl, "layer 0 holds the newest 5 queries of the tokens that reach it; asl reads 6");
  trace.expect_refused("pyramidinfer,keep=0.5,min_context=8", "pyramidinfer reads 13");
  trace.expect_refused("snapkv,budget=24,window=6", "snapkv reads 6");
  trace.expect_refused("expected,budget=24", "does not state the RoPE of layer 0");
  trace.expect_refused("vnorm,budget=24", "values");
  trace.expect_refused("fastkv,budget=24,window=5,layer=9", "layer: 9; allowed 0 to 8");
  EXPECT_EQ(named(trace.replay("fastkv,budget=24,window=5,layer=3"), "tokens").size(), 24U);
  EXPECT_EQ(named(trace.replay("gemfilter,budget=24,layer=3"), "tokens").size(), 24U);
  const LayeredPrompt few({.tokens = 5}, 6);
  EXPECT_EQ(named(Trace(few).replay("snapkv,budget=24,window=6"), "tokens").size(), 5U)
      << "a prompt has no more queries than tokens";
}

TEST(PrefillTrace, RefusesWhatAPolicyOfOnesOwnDecidesForOtherPrompts) {
  const Trace trace(LayeredPrompt({}, 6));
  const auto told = [](auto change) {
    return ToldPrompts([change](const Evidence&, LayerDecision& layer) { change(layer); });
  };
  EXPECT_EQ(named(trace.replay(told([](auto&) {})), "tokens").size(), 30U);
  trace.expect_refused(told([](LayerDecision& d) { d.prompts.clear(); }), "told decides for 0 prompts");
  trace.expect_refused(told([](LayerDecision& d) { d.prompts[0].narrow->tokens = {}; }),
                       "tokens of told are an absent");
  trace.expect_refused(
      told([](LayerDecision& d) { d.prompts[0].narrow->tokens.template data<std::int32_t>()[29] = 60; }),
      "that are beyond it; allowed ascending ones from 0 to 59");
  trace.expect_refused(ToldPrompts(ToldPrompts::Tell()), "replay: begin_prompt() of told gives none");
  trace.expect_refused(ToldPrompts([](auto&, auto&) {}, -1), "replay: told wants the newest -1 queries of layer 0");
  const auto whole = [](auto change) {
    return ToldPolicy({.budget = {.slots = 8}, .interval = 8}, [change](const Evidence& evidence) {
      Decision decision;
      decision.keep = keep_everything(evidence.table);
      change(decision);
      return decision;
    });
  };
  trace.expect_refused(whole([](Decision& d) { d.keep->indptr.pop_back(); }), "offsets of kept slots");
  trace.expect_refused(whole([](Decision& d) { d.guarded = {-1}; }), "Decision::guarded of told has 1 rows");
  EXPECT_EQ(named(trace.replay(whole([](Decision& d) { d.narrow = TokenSet{}; })), "tokens").size(), 60U)
      << "it narrows no prompt";
}

}  // namespace
}  // namespace kvkeep::prefill_trace_test
