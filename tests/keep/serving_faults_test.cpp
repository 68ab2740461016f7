// SPDX-License-Identifier: Apache-2.0
// What goes wrong where an engine that serves requests compresses its cache while they run. Each test names one such
// fault, and fails if kvkeep, or what it asks of an engine, had it. Faults that other tests show already:
// - a paged cache that is not contiguous: PagedKeeper.KeepsOnAnyPagesExactlyWhatItKeepsInADenseCache
//   (tests/policy/paged_keeper_test.cpp), which takes pages in no order, three forms of tensors and two layouts;
// - an event that changes the shared prefix of another request: the same test copies on write, and
//   PagedEvents.WithSharedPagesRefusedThrowBeforeAnythingIsWritten refuses; for random events
//   Pages.HoldAfterwardsExactlyWhatStaysAndNobodyElsesPageChanges (tests/keep/pages_test.cpp);
// - a layer that is never observed: Keeper.AMissedLayerIsNamed (tests/policy/keeper_test.cpp);
// - chunks of a prompt that change what stays: Keeper.ChunkedPrefillKeepsTheSameSet (there too);
// - an option that the resolved policy does not state: Registry.ListsEveryOptionOfEveryPolicy
//   (tests/policy/registry_test.cpp).

#include <sys/mman.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "engines.h"
#include "kvkeep/score/rkv.h"
#include "layer_by_layer_engine.h"
#include "message_of.h"

namespace kvkeep::serving_faults_test {
namespace {

using testing::Array;
using namespace engines;
using testing::message_of;

using Work = std::vector<std::pair<SequenceId, std::int32_t>>;
using Layered = layer_by_layer::Engine;

constexpr std::int32_t kBudget = 24, kInterval = 8, kWindow = 6;
const std::string kRest = ",budget=24,interval=8,sink=2,recent=4";
const std::string kRkv = "rkv" + kRest + ",window=6";
const std::string kAms = "ams-tova" + kRest + ",window=6,min_segment=2,max_segment=8";

/// The numbers of every token of a sequence, in all layers.
const Numbers& text_of(SequenceId id) {
  static std::map<SequenceId, Numbers> texts;
  const auto [at, fresh] = texts.try_emplace(id);
  if (fresh) {
    oracle::Random random(static_cast<std::uint64_t>(100 + id));
    at->second = numbers_of(random, {{id, 200}});
  }
  return at->second;
}

/// The next tokens of each sequence: whatever the steps are, an engine is fed the same text.
Numbers next_of(const Engine& engine, const Work& work) {
  Numbers step;
  std::vector<Array> parts;
  const auto joined = [&](std::vector<Array> Numbers::* side, std::size_t layer) {
    parts.clear();
    for (const auto& [id, tokens] : work)
      parts.push_back((text_of(id).*side)[layer].narrow(0, engine.keeper.logical_length(id), tokens));
    return Array::cat(parts);
  };
  for (const auto& [id, tokens] : work) {
    step.ids.push_back(id);
    step.indptr.push_back(step.indptr.back() + tokens);
  }
  for (std::size_t l = 0; l < static_cast<std::size_t>(kLayers); ++l) {
    step.keys.push_back(joined(&Numbers::keys, l));
    step.values.push_back(joined(&Numbers::values, l));
    step.queries.push_back(joined(&Numbers::queries, l));
  }
  return step;
}

Report run(Engine& engine, const Work& work) { return engine.step(next_of(engine, work)); }

void join(Engine& engine, SequenceId id, std::int32_t prompt) {
  engine.keeper.join(id, 0, prompt);
  engine.lengths[id] = Ints(kRows, 0);
}

Ints kept(const Engine& engine, SequenceId id, std::int32_t row) {
  const auto positions = engine.keeper.positions(id, row / kHeads, row % kHeads);
  return {positions.begin(), positions.end()};
}

/// Every slot holds key and value of the position that the keeper says; `first`: that of the first token.
void expect_holds(const Engine& engine, SequenceId id, std::int32_t first = 0) {
  const Numbers& all = text_of(id);
  for (std::int32_t r = 0; r < kRows; ++r) {
    const Ints positions = kept(engine, id, r);
    ASSERT_EQ(std::ssize(positions), engine.lengths.at(id)[static_cast<std::size_t>(r)]);
    for (std::int32_t s = 0; s < std::ssize(positions); ++s) {
      const std::int32_t token = positions[static_cast<std::size_t>(s)] - first;
      ASSERT_TRUE(token >= 0 && token < engine.keeper.logical_length(id)) << "position " << token + first;
      ASSERT_TRUE(same_bits(engine.slot_of(id, r / kHeads, r % kHeads, s, engines::kExtraOf),
                            Array::of(engines::extra_of(token + first, r))))
          << "slot " << s << " of row " << r << ", sequence " << id << ", position " << token + first;
      for (const bool value : {false, true})
        ASSERT_TRUE(same_bits(
            engine.slot_of(id, r / kHeads, r % kHeads, s, value),
            (value ? all.values : all.keys)[static_cast<std::size_t>(r / kHeads)][token][r % kHeads].contiguous()))
            << "slot " << s << " of row " << r << ", sequence " << id << ", position " << token + first;
    }
  }
}

/// A copy of every byte of a cache.
std::vector<Array> bytes_of(std::span<const LayerKv> layers) {
  std::vector<Array> sides;
  for (const LayerKv& layer : layers)
    std::visit(
        [&](const auto& kv) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(kv)>, std::monostate>)
            for (const Array side : {kv.keys, kv.values}) sides.push_back(side.clone());
        },
        layer);
  return sides;
}

bool same_bytes(const std::vector<Array>& before, std::span<const LayerKv> layers) {
  const std::vector<Array> after = bytes_of(layers);
  return std::equal(before.begin(), before.end(), after.begin(), after.end(), same_bits);
}

/// A policy that shows what its events read.
class Watched final : public KVPolicy {
 public:
  using Watch = std::function<void(const Evidence&)>;
  Watched(const std::string& policy, Watch watch) : own_(make_policy(policy)), watch_(std::move(watch)) {}
  [[nodiscard]] std::string_view name() const override { return own_->name(); }
  [[nodiscard]] Needs needs() const override { return own_->needs(); }
  [[nodiscard]] Trigger trigger() const override { return own_->trigger(); }
  using KVPolicy::decide;
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    watch_(evidence);
    return own_->decide(machine, evidence);
  }
  [[nodiscard]] std::string to_json() const override { return own_->to_json(); }

 private:
  std::unique_ptr<KVPolicy> own_;
  Watch watch_;
};

/// In every layer a sequence shows its newest `count` queries, those of its text.
void expect_newest_queries(const Evidence& evidence, const RowGroup& group, SequenceId id, std::int32_t count) {
  const QueryView& held = group.queries;
  ASSERT_EQ(held.count, count) << "layer " << group.layer << ", sequence " << id;
  const Array& queries = text_of(id).queries[static_cast<std::size_t>(group.layer)];
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t position = group.next_position - count + i;
    ASSERT_EQ(held.position(i), position);
    for (std::int32_t h = 0; h < evidence.spec.query_heads; ++h)
      ASSERT_EQ(std::memcmp(held.at(i, h), queries[position][h].bytes(), kKeyDim * sizeof(float)), 0)
          << "query of position " << position << ", head " << h << ", layer " << group.layer << ", sequence " << id;
  }
}

// ---- Whether it runs ------------------------------------------------------------------------------------------------

// Fault: a scorer is built, and fed, although the policy is off.
TEST(ServingFaults, APolicyThatIsOffAsksForNothingAndTouchesNothing) {
  constexpr std::int64_t kTokens = 400, kBytes = kTokens * kHeads * kKeyDim * 4;
  void* const nowhere =
      mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // a read or write ends us
  ASSERT_NE(nowhere, MAP_FAILED);
  const auto side = [&](std::int64_t dim) { return Array(nowhere, Dtype::f32, {1, kHeads, kTokens, dim}); };
  Keeper keeper(model(), make_policy("full"), {.queries = false});
  EXPECT_EQ(keeper.queries_read(), 0);
  EXPECT_THROW(Keeper(model(), make_policy(kRkv), {.queries = false}), InvalidArgument) << "one that is on asks";
  const SequenceId id = 1;
  keeper.join(id);
  std::int32_t length = 0;
  keeper.bind({DenseKv{side(kKeyDim), side(kValueDim)}, DenseKv{side(kKeyDim), side(kValueDim)}});
  const CacheView view{{&id, 1}, {{&length, 1}}};
  for (std::int32_t n = 0; n < 300; ++n) {
    const Ints indptr{0, n == 0 ? 100 : 1};
    for (std::int32_t l = 0; l < kLayers; ++l) keeper.observe({.layer = l, .sequences = {&id, 1}, .indptr = indptr});
    length += indptr[1];
    ASSERT_TRUE(keeper.step(view).wait().cuts.empty());
    ASSERT_EQ(keeper.tokens_to_event(id), Trigger::kNoEvent);
  }
  EXPECT_EQ(keeper.workspace_bytes(view), 0);
  EXPECT_EQ(keeper.totals().steps, 300);
  EXPECT_EQ(keeper.totals().events, 0);
  munmap(nowhere, kBytes);
}

// Fault: a silent no-op; the run ends well and the policy never ran.
TEST(ServingFaults, ReportsAndTotalsAddUpToWhatLeftTheCache) {
  PagedEngine engine(kRkv, false, Dtype::f32, 8, PageLayout::slot_head, Form::apart);
  engine.join(1);
  std::int64_t events = 0, dropped = 0, freed = 0;
  for (std::int32_t n = 0; n < 90; ++n) {
    const Report report = run(engine, {{1, n == 0 ? 20 : 1}});
    events += report.cuts.empty() ? 0 : 1;
    dropped += report.slots_dropped;
    freed += report.pages_freed;
    EXPECT_EQ(report.bytes_before - report.bytes_after,
              report.slots_dropped * (kKeyDim + kValueDim + engines::kExtraDim) * 4);
  }
  const Totals& totals = engine.keeper.totals();
  EXPECT_EQ(dropped, kRows * (109 - engine.lengths.at(1)[0])) << "every token is in the cache or was reported";
  EXPECT_LT(engine.lengths.at(1)[0], kBudget + kInterval);
  EXPECT_EQ(events, (109 - kBudget) / kInterval);
  EXPECT_EQ(freed, events) << "from 32 slots to 24: one page of 8";
  EXPECT_EQ(totals.steps, 90);
  EXPECT_EQ(totals.events, events);
  EXPECT_EQ(totals.slots_dropped, dropped);
  EXPECT_EQ(totals.pages_freed, freed);
}

// Fault: a silent no-op; the hook that shows new tokens to the policy is never called.
TEST(ServingFaults, AStepThatNobodyObservedIsRefused) {
  for (const std::string& policy : {kRkv, std::string("full")}) {
    Layered engine(policy, 16);
    engine.join(1);
    engine.step({{1, 20}});
    engine.begin({{1, 1}});
    for (std::int32_t l = 0; l < layer_by_layer::kLayers; ++l) static_cast<void>(engine.run(l));
    const auto before = bytes_of(engine.layers);
    const Ints lengths = engine.flat;
    EXPECT_NE(message_of<StateError>([&] {
                engine.keeper.step(engine.view());
              }).find("holds 21 slots in layer 0, head 0; kvkeep has seen 20"),
              std::string::npos);
    EXPECT_TRUE(same_bytes(before, engine.layers));
    EXPECT_EQ(engine.flat, lengths);
    for (std::int32_t l = 0; l < layer_by_layer::kLayers; ++l) engine.observe(l);
    EXPECT_NO_THROW(engine.end()) << "once it was observed, the step goes on";
  }
}

// ---- Positions, prompts and windows ---------------------------------------------------------------------------------

// Fault: positions index a buffer that is as long as the tokens of one step.
TEST(ServingFaults, PositionsMayBeFarBeyondTheTokensOfAStep) {
  constexpr std::int32_t kFirst = 1 << 20;
  for (const std::string& policy : {"keydiff" + kRest, kRkv, kAms})
    for (const bool recorded : {false, true}) {
      SCOPED_TRACE(text(policy, recorded ? ", begin_step() and record()" : ", observe()"));
      DenseEngine far(policy, false, Dtype::f32), near(policy, false, Dtype::f32);
      for (Engine* const engine : std::initializer_list<Engine*>{&far, &near}) {
        if (recorded)
          engine->record = [engine](std::int32_t layer, const Array& queries, const Array&) {
            engine->keeper.record(layer, queries);
          };
        engine->join(1);
      }
      for (std::int32_t n = 0; n < 60; ++n) {
        const Numbers numbers = next_of(near, {{1, n == 0 ? 20 : 1}});
        Ints positions(static_cast<std::size_t>(numbers.indptr.back()));
        std::iota(positions.begin(), positions.end(),
                  kFirst + static_cast<std::int32_t>(near.keeper.logical_length(1)));
        EXPECT_EQ(near.step(numbers).cuts.size(), far.step(numbers, positions).cuts.size());
      }
      EXPECT_EQ(far.keeper.totals().events, 6);
      ASSERT_NO_FATAL_FAILURE(expect_holds(near, 1));
      ASSERT_NO_FATAL_FAILURE(expect_holds(far, 1, kFirst));
      if (far.keeper.queries_read() > 0) continue;  // queries are rotated by their positions, keys came rotated
      for (std::int32_t r = 0; r < kRows; ++r) {
        Ints moved = kept(near, 1, r);
        for (std::int32_t& position : moved) position += kFirst;
        EXPECT_EQ(kept(far, 1, r), moved);
      }
    }
}

// Fault: an event fires inside a prompt that comes in chunks, because the step is one of decoding for others.
TEST(ServingFaults, ThePromptOfOneSequenceIsNotCutWhileAnotherDecodes) {
  constexpr std::int32_t kPrompt = 61, kChunk = 7;
  for (const char* const when : {",trigger=slack,prefill=keep", ",trigger=counter,prefill=keep",
                                 ",trigger=slack,prefill=cut", ",trigger=counter,prefill=only"}) {
    SCOPED_TRACE(when);
    const bool once = std::string(when).ends_with("only");
    PagedEngine engine(kRkv + when, false, Dtype::f32, 16, PageLayout::head_slot, Form::sides_first);
    engine.join(1);
    static_cast<void>(run(engine, {{1, 40}}));
    for (std::int32_t n = 0; n < 7; ++n) static_cast<void>(run(engine, {{1, 1}}));
    join(engine, 2, kPrompt);
    std::int64_t others = 0;
    for (std::int32_t done = 0; done < kPrompt; done += kChunk) {
      const std::int32_t tokens = std::min(kChunk, kPrompt - done);
      const Report report = run(engine, {{2, tokens}, {1, 1}});
      for (const Cut& cut : report.cuts) {
        if (cut.sequence == 1) ++others;
        if (cut.sequence == 2) ASSERT_EQ(cut.logical_length, kPrompt) << "in the middle of its prompt";
      }
      if (done + tokens < kPrompt) ASSERT_EQ(engine.lengths.at(2)[0], done + tokens);
    }
    if (!once) EXPECT_GE(others, 1) << "events came in these steps, but not for that prompt";
    for (std::int32_t n = 0; n < kInterval; ++n) static_cast<void>(run(engine, {{2, 1}, {1, 1}}));
    EXPECT_LT(engine.lengths.at(2)[0], kPrompt);
    expect_holds(engine, 1);
    expect_holds(engine, 2);
  }
}

// Fault: the trigger counts the absolute length; and a prompt that is no multiple of interval, chunk or page shifts it.
TEST(ServingFaults, EventsFollowTheDecodedTokensWhateverTheLengthOfThePrompt) {
  for (const std::int32_t prompt : {29, 31, 32, 33, 45})
    for (const std::string trigger : {"slack", "counter"}) {
      SCOPED_TRACE(text("prompt of ", prompt, ", ", trigger));
      PagedEngine engine(kRkv + ",trigger=" + trigger, false, Dtype::f32, 16, PageLayout::slot_head, Form::apart);
      join(engine, 1, prompt);
      for (std::int32_t done = 0; done < prompt; done += 7)
        EXPECT_TRUE(run(engine, {{1, std::min(7, prompt - done)}}).cuts.empty());
      Ints fired, due;
      for (std::int32_t d = trigger == "counter" ? kInterval : std::max(1, kBudget + kInterval - prompt); d <= 40;
           d += kInterval)
        due.push_back(d);
      for (std::int32_t d = 1; d <= 40; ++d)
        if (!run(engine, {{1, 1}}).cuts.empty()) fired.push_back(d);
      EXPECT_EQ(fired, due);
      expect_holds(engine, 1);
    }
}

// Fault: the first event comes with an empty window of queries.
TEST(ServingFaults, TheFirstEventReadsAWholeWindowOfQueries) {
  for (const std::string when : {"cut", "keep"})
    for (const std::int32_t chunk : {40, 7, 13, 1}) {  // the last chunk: all, 5 tokens, 1 token, 1 token
      SCOPED_TRACE(text("prefill=", when, ", chunks of ", chunk));
      int events = 0;
      DenseEngine engine(std::make_unique<Watched>(kRkv + ",prefill=" + when,
                                                   [&](const Evidence& evidence) {
                                                     ++events;
                                                     for (const RowGroup& group : evidence.table.groups)
                                                       expect_newest_queries(evidence, group, 1, kWindow);
                                                   }),
                         false, Dtype::f32);
      join(engine, 1, 40);
      for (std::int32_t done = 0; done < 40; done += chunk)
        static_cast<void>(run(engine, {{1, std::min(chunk, 40 - done)}}));
      static_cast<void>(run(engine, {{1, 1}}));
      EXPECT_EQ(events, 1);
    }
  // Behind a cached prefix the window has the queries that came, no others.
  Ints counts;
  DenseEngine engine(
      std::make_unique<Watched>(kRkv,
                                [&](const Evidence& evidence) {
                                  for (const RowGroup& group : evidence.table.groups) {
                                    ASSERT_NO_FATAL_FAILURE(expect_newest_queries(evidence, group, 2, 1));
                                    counts.push_back(group.queries.count);
                                  }
                                }),
      false, Dtype::f32);
  join(engine, 1, 60);
  static_cast<void>(run(engine, {{1, 40}}));
  engine.fork(2, 1, 40);
  EXPECT_EQ(run(engine, {{2, 1}}).cuts.size(), 1U);
  EXPECT_EQ(counts, Ints(kLayers, 1));
}

// Fault: in steps that mix prefill and decode the window of queries is empty, or holds those of a neighbour.
TEST(ServingFaults, StepsThatMixPrefillAndDecodeLeaveEachSequenceItsOwnWindow) {
  std::vector<SequenceId> ids;
  std::map<SequenceId, int> events;
  DenseEngine engine(std::make_unique<Watched>(kRkv,
                                               [&](const Evidence& evidence) {
                                                 for (const RowGroup& group : evidence.table.groups) {
                                                   const SequenceId id =
                                                       ids.at(static_cast<std::size_t>(group.sequence));
                                                   expect_newest_queries(evidence, group, id, kWindow);
                                                   events[id] += group.layer == 0 ? 1 : 0;
                                                 }
                                               }),
                     false, Dtype::f32);
  const auto step = [&](const Work& work) {
    ids.clear();
    for (const auto& [id, tokens] : work) ids.push_back(id);
    static_cast<void>(run(engine, work));
  };
  join(engine, 1, 30);
  step({{1, 30}});
  join(engine, 2, 61);
  for (std::int32_t done = 0; done < 56; done += 7) step({{2, 7}, {1, 1}});
  step({{1, 1}, {2, 5}});
  join(engine, 3, 33);
  step({{2, 1}, {3, 33}, {1, 1}});
  for (std::int32_t n = 0; n < 30; ++n)
    step(n % 4 == 3 ? Work{{1, 1}, {3, 2}} : n % 2 == 0 ? Work{{3, 1}, {2, 1}, {1, 1}} : Work{{1, 1}, {2, 0}, {3, 1}});
  for (const SequenceId id : {1, 2, 3}) {
    EXPECT_GE(events[id], 2) << "sequence " << id;
    expect_holds(engine, id);
  }
}

// ---- Which slots stay -----------------------------------------------------------------------------------------------

// Fault: scores are summed, and one set stays in all layers and heads where each should have its own.
TEST(ServingFaults, EachRowKeepsItsOwnSetUnlessOneForAllIsAskedFor) {
  const auto rows_under = [](const std::string& share) {
    DenseEngine engine(kRkv + share, false, Dtype::f32);
    join(engine, 1, 60);
    static_cast<void>(run(engine, {{1, 60}}));
    EXPECT_EQ(run(engine, {{1, 1}}).cuts.size(), 1U);
    expect_holds(engine, 1);
    std::vector<Ints> rows;
    for (std::int32_t r = 0; r < kRows; ++r) rows.push_back(kept(engine, 1, r));
    return rows;
  };
  const auto own = rows_under(""), all = rows_under(",share=union_mean");
  EXPECT_EQ(own, rows_under(",share=per_layer_per_head")) << "nothing is shared unless it is asked for";
  for (std::size_t r = 0; r < own.size(); ++r) {
    EXPECT_EQ(own[r].size(), kBudget);
    EXPECT_EQ(all[r], all[0]) << "row " << r;
    EXPECT_NE(all[r], own[r]) << "row " << r;
    for (std::size_t other = 0; other < r; ++other) EXPECT_NE(own[r], own[other]) << "rows " << r << " and " << other;
  }
}

// Fault: a default differs between the class and the reference run, and no file says which one was used.
TEST(ServingFaults, TheResolvedPolicyStatesWhatAClassDoesByDefault) {
  const std::string named = "rkv" + kRest;
  const nlohmann::json json = nlohmann::json::parse(make_policy(named)->to_json()), scorer = json["scorer"];
  const RkvOptions defaults;
  EXPECT_EQ(scorer["lambda"], defaults.lambda);
  EXPECT_EQ(scorer["lambda"], 0.07) << "as in the code of its authors";
  EXPECT_EQ(scorer["similarity"], defaults.similarity);
  EXPECT_EQ(scorer["window"], defaults.window);
  EXPECT_EQ(scorer["pool"], defaults.pool);
  EXPECT_EQ(scorer["group"], "max_logit");
  EXPECT_EQ(scorer["redundancy"], "all");
  EXPECT_EQ(scorer["no_similar"], "nothing");
  EXPECT_EQ(json["share"], "per_layer_per_head");

  const auto run_of = [](std::unique_ptr<KVPolicy> policy) {
    auto engine = std::make_unique<DenseEngine>(std::move(policy), false, Dtype::f32);
    engine->join(1);
    for (std::int32_t n = 0; n < 40; ++n) static_cast<void>(run(*engine, {{1, n == 0 ? 40 : 1}}));
    return engine;
  };
  const Retention retention{.trigger = {.budget = {.slots = kBudget}, .interval = kInterval}, .sink = 2, .recent = 4};
  const auto by_name = run_of(make_policy(named)), by_json = run_of(make_policy_from_json(json.dump())),
             by_class =
                 run_of(std::make_unique<Evict>("rkv", std::make_unique<Rkv>(), std::make_unique<Flat>(), retention)),
             other = run_of(make_policy(named + ",lambda=0.9"));
  expect_alike(*by_name, *by_json);
  expect_alike(*by_name, *by_class);
  EXPECT_NE(kept(*by_name, 1, 0), kept(*other, 1, 0)) << "else this would be no test";
}

// Fault: a budget that no request reaches changes the output all the same.
TEST(ServingFaults, ABudgetLargerThanTheRunIsTheRunWithoutAPolicy) {
  const auto attended = [](const Engine& engine,
                           SequenceId id) {  // of the newest token, over all slots, in every layer
    std::vector<Array> outputs;
    for (std::int32_t r = 0; r < kRows; ++r) {
      const Array& queries = text_of(id).queries[static_cast<std::size_t>(r / kHeads)];
      for (std::int32_t h = r % kHeads * 2; h < r % kHeads * 2 + 2; ++h) {
        const float* query = queries[engine.keeper.logical_length(id) - 1][h].data<float>();
        const Array out = Array::zeros({kValueDim});
        double all = 0;
        for (std::int32_t s = 0; s < engine.lengths.at(id)[static_cast<std::size_t>(r)]; ++s) {
          const Array key = engine.slot_of(id, r / kHeads, r % kHeads, s, false).to(Dtype::f32),
                      value = engine.slot_of(id, r / kHeads, r % kHeads, s, true).to(Dtype::f32);
          const double p = std::exp(std::inner_product(query, query + kKeyDim, key.data<float>(), 0.0));
          all += p;
          for (std::int64_t d = 0; d < kValueDim; ++d)
            out.data<float>()[d] += static_cast<float>(p * static_cast<double>(value.data<float>()[d]));
        }
        outputs.push_back(out.mul_(1 / all));
      }
    }
    return Array::cat(outputs);
  };
  // 130 tokens: the second form ends one token before its first event.
  for (const std::string method : {"rkv", "ams-tova", "snapkv", "h2o", "keydiff", "adakv-snapkv"})
    for (const char* const budget : {",budget=500,interval=8", ",budget=100,interval=31"}) {
      SCOPED_TRACE(method + budget);
      const bool ragged = method.starts_with("adakv");
      DenseEngine full("full", ragged, Dtype::bf16);
      PagedEngine large(method + budget, ragged, Dtype::bf16, 16, PageLayout::slot_head, Form::pages_first);
      for (Engine* const engine : std::initializer_list<Engine*>{&full, &large}) join(*engine, 1, 50);
      for (std::int32_t n = 0; n < 82; ++n) {
        const Work work{{1, n == 0 ? 33 : n == 1 ? 17 : 1}};
        EXPECT_TRUE(run(full, work).cuts.empty());
        EXPECT_TRUE(run(large, work).cuts.empty());
        if (n % 27 == 0) EXPECT_TRUE(same_bits(attended(full, 1), attended(large, 1))) << "step " << n;
      }
      ASSERT_NO_FATAL_FAILURE(expect_alike(full, large));
      EXPECT_EQ(large.keeper.totals().bytes_moved, 0);
      EXPECT_EQ(large.keeper.totals().pages_freed, 0);
      if (method != "keydiff") continue;
      const std::int64_t away = large.keeper.tokens_to_event(1);
      EXPECT_EQ(away, std::string(budget).starts_with(",budget=100") ? 1 : 378);
    }
}

// ---- Scheduling -----------------------------------------------------------------------------------------------------

/// A step up to its event.
void feed(Layered& engine, const std::vector<Layered::Work>& work) {
  engine.begin(work);
  for (std::int32_t l = 0; l < layer_by_layer::kLayers; ++l) engine.observe(l);
}

/// The event of a step that was planned before.
Report apply(Layered& engine, const Plan& plan) {
  const CacheView view = engine.view();
  Report report = engine.keeper.apply(plan, view);
  engine.pages.settle(view.sequences, report.pages);
  for (std::size_t i = 0; i < engine.ids.size(); ++i)
    std::copy_n(engine.flat.begin() + static_cast<std::ptrdiff_t>(i) * layer_by_layer::kRows, layer_by_layer::kRows,
                engine.lengths[engine.ids[i]].begin());
  return report;
}

// Fault: under asynchronous scheduling the next step was prepared with the lengths before an event.
TEST(ServingFaults, AStepPreparedWithTheLengthsBeforeAnEventIsRefused) {
  Layered engine(kRkv);
  engine.join(1);
  engine.step({{1, 31}});
  feed(engine, {{1, 1}});
  const Ints stale = engine.flat;
  Ints told = stale;
  CacheView view = engine.view();
  view.lengths.data = told;
  ASSERT_EQ(engine.keeper.step(view).wait().cuts.size(), 1U);
  engine.lengths[1] = stale;  // what the engine still believes
  feed(engine, {{1, 1}});
  const auto before = bytes_of(engine.layers);
  const auto kept_before = engine.kept(1);
  for (int again = 0; again < 2; ++again)
    EXPECT_NE(message_of<StateError>([&] {
                engine.keeper.step(engine.view());
              }).find("holds 33 slots in layer 0, head 0; kvkeep has seen 25"),
              std::string::npos);
  EXPECT_TRUE(same_bytes(before, engine.layers)) << "nothing is written";
  EXPECT_EQ(engine.flat, Ints(layer_by_layer::kRows, 33));
  EXPECT_EQ(engine.kept(1), kept_before);
  engine.lengths[1] = told;  // the engine learns of the event, and writes the token where it belongs
  for (std::int32_t l = 0; l < layer_by_layer::kLayers; ++l) static_cast<void>(engine.run(l));
  engine.flat = Ints(layer_by_layer::kRows, 25);
  engine.end();
  for (int n = 0; n < 10; ++n) engine.step({{1, 1}});
  engine.expect_holds(1);
  EXPECT_EQ(engine.keeper.totals().events, 2);
}

// Fault: a plan made in one step is applied after the tokens of the next were written behind it.
TEST(ServingFaults, APlanOfTheStepBeforeIsRefusedOnceNewTokensWereObserved) {
  Layered engine(kRkv, 16);
  engine.join(1);
  engine.step({{1, 31}});
  feed(engine, {{1, 1}});
  const Plan plan = engine.keeper.plan(engine.view());
  ASSERT_EQ(plan.cuts.size(), 1U);
  std::ranges::copy(engine.flat, engine.lengths[1].begin());
  feed(engine, {{1, 1}});
  const auto before = bytes_of(engine.layers);
  const Array table = engine.block_table.clone();
  const std::int32_t free = engine.pool.free_pages();
  EXPECT_NE(message_of<StateError>([&] { engine.keeper.apply(plan, engine.view()); }).find("the plan is out of date"),
            std::string::npos);
  EXPECT_TRUE(same_bytes(before, engine.layers)) << "nothing is written";
  EXPECT_TRUE(engine.block_table.equal(table));
  EXPECT_EQ(engine.flat, Ints(layer_by_layer::kRows, 33));
  EXPECT_EQ(engine.pool.free_pages(), free);
  EXPECT_EQ(engine.end().cuts.size(), 1U) << "a new plan cuts both steps' tokens";
  engine.expect_holds(1);
}

// Fault: an engine that applies events one step late keeps other tokens than one that applies them at once.
TEST(ServingFaults, APlanMayWaitUntilTheNextStepIsObserved) {
  for (const std::string& policy : {kRkv, kAms})
    for (const std::int32_t page_size : {0, 16}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      Layered prompt(policy, page_size), late(policy, page_size);
      for (Layered* const engine : {&prompt, &late}) {
        engine->join(1, 40);
        engine->join(2);
      }
      std::optional<Plan> plan;
      for (std::int32_t n = 0; n < 60; ++n) {
        const std::vector<Layered::Work> work =
            n < 4 ? std::vector<Layered::Work>{{1, 10}, {2, n == 0 ? 27 : 1}}
                  : (n % 3 == 0 ? std::vector<Layered::Work>{{2, 1}} : std::vector<Layered::Work>{{2, 1}, {1, 1}});
        prompt.step(work);
        if (plan) static_cast<void>(apply(late, *plan));
        feed(late, work);
        plan = late.keeper.plan(late.view());
      }
      static_cast<void>(apply(late, *plan));
      EXPECT_GE(late.keeper.totals().events, 8);
      EXPECT_EQ(late.keeper.totals().events, prompt.keeper.totals().events);
      EXPECT_EQ(late.keeper.totals().steps, 60);
      EXPECT_EQ(late.lengths, prompt.lengths);
      EXPECT_TRUE(same_bytes(bytes_of(prompt.layers), late.layers));
      for (const SequenceId id : {1, 2}) {
        EXPECT_EQ(late.kept(id), prompt.kept(id));
        late.expect_holds(id);
      }
    }
}

// Fault: preemption resets the count of computed tokens and leaves that of dropped ones; positions come out wrong.
TEST(ServingFaults, ARequestThatIsPreemptedAndRecomputedIsLikeAFreshOne) {
  for (const std::string& policy : {kRkv, kAms, "h2o" + kRest})
    for (const bool resets : {false, true}) {
      SCOPED_TRACE(policy + (resets ? ", reset()" : ", leave() and join()"));
      const auto made = [&] {
        return std::make_unique<PagedEngine>(policy, false, Dtype::f32, 16, PageLayout::slot_head, Form::apart);
      };
      const auto preempted = made(), fresh = made();
      for (PagedEngine* const engine : {preempted.get(), fresh.get()}) engine->join(2);
      preempted->join(1);
      static_cast<void>(run(*preempted, {{1, 30}, {2, 20}}));
      for (std::int32_t n = 0; n < 21; ++n) static_cast<void>(run(*preempted, {{2, 1}, {1, 1}}));
      static_cast<void>(run(*fresh, {{2, 20}}));
      for (std::int32_t n = 0; n < 21; ++n) static_cast<void>(run(*fresh, {{2, 1}}));
      EXPECT_LT(preempted->lengths.at(1)[0], 51);

      preempted->sequences.release(1);
      if (resets) {
        preempted->keeper.leave(1), preempted->keeper.join(1);
      } else {
        preempted->keeper.leave(1);
        preempted->keeper.join(1);
      }
      preempted->lengths[1] = Ints(kRows, 0);
      fresh->join(1);
      EXPECT_EQ(preempted->keeper.logical_length(1), 0);
      EXPECT_EQ(preempted->keeper.physical_length(1, 0, 0), 0);
      for (std::int32_t n = 0; n < 40; ++n) {  // its prompt is all that it had: 30 tokens and 21 decoded ones
        const Work work{{2, 1}, {1, n == 0 ? 51 : 1}};
        EXPECT_EQ(run(*preempted, work).slots_dropped, run(*fresh, work).slots_dropped);
        EXPECT_EQ(preempted->keeper.tokens_to_event(1), fresh->keeper.tokens_to_event(1));
        for (std::int32_t r = 0; r < kRows; ++r) {
          const Ints positions = kept(*preempted, 1, r);
          ASSERT_GE(positions.front(), 0);
          ASSERT_EQ(positions.back(), 50 + n) << "the newest token, and nothing beyond it";
          ASSERT_TRUE(std::ranges::is_sorted(positions, std::less_equal<>()));
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_alike(*fresh, *preempted));
      expect_holds(*preempted, 1);
    }
}

// Fault: evicted pages are marked and never freed.
TEST(ServingFaults, PagesOfAnEventAreForOthersInTheSameStep) {
  PagedEngine engine(kRkv + ",prefill=cut", false, Dtype::f32, 8, PageLayout::slot_head, Form::apart, 12 * 8);
  engine.join(1);
  engine.feed(next_of(engine, {{1, 80}}));
  EXPECT_EQ(engine.pool.free_pages(), 2);
  EXPECT_EQ(engine.sequences.admit(2, 40).missing, 3) << "there is no room for another request";
  const Report report = engine.cut({1});
  ASSERT_EQ(report.pages.size(), 1U);
  EXPECT_EQ(report.pages_freed, 7);
  EXPECT_EQ(engine.pool.free_pages(), 9);
  EXPECT_EQ(engine.keeper.totals().pages_freed, 7);
  for (const std::int32_t page : report.pages[0].freed) EXPECT_EQ(engine.pool.references(page), 0);
  for (std::int32_t p = 0; p < 10; ++p)
    EXPECT_EQ(engine.block_table.data<std::int32_t>()[p],
              p < 3 ? report.pages[0].after[static_cast<std::size_t>(p)] : -1);
  ASSERT_TRUE(engine.sequences.admit(2, 40).given()) << "in the same step";
  for (const std::int32_t page : engine.sequences.pages(2))
    EXPECT_EQ(std::ranges::count(engine.sequences.pages(1), page), 0) << "page " << page << " is held twice";
  engine.sequences.release(2);
  engine.join(2);
  for (std::int32_t n = 0; n < 60; ++n) {  // without the event, the pool would be full after two of these steps
    static_cast<void>(run(engine, {{2, n == 0 ? 40 : 1}, {1, 1}}));
    if (HasFatalFailure()) return;
    EXPECT_LE(12 - engine.pool.free_pages(), 2 * (kBudget + kInterval) / 8);
  }
  expect_holds(engine, 1);
  expect_holds(engine, 2);
  engine.sequences.release(1);
  engine.sequences.release(2);
  EXPECT_EQ(engine.pool.free_pages(), engine.pool.capacity()) << "no page is lost";
}

/// A dense cache whose sequences change their places.
class MovingEngine final : public Engine {
 public:
  explicit MovingEngine(const std::string& policy) : Engine(make_policy(policy), false, nullptr) {
    for (std::int32_t l = 0; l < kLayers; ++l)
      layers.emplace_back(engines::with_extra(
          DenseKv{Array::full({3, kHeads, 128, kKeyDim}, 9.0F), Array::full({3, kHeads, 128, kValueDim}, 9.0F)},
          Array::full({3, kHeads, 128, engines::kExtraDim}, 9, Dtype::i32)));
    keeper.bind(layers);
  }
  /// The rows of a sequence go to another place, whose rows are lost. What stays behind is no number.
  void move(SequenceId id, std::int32_t to) {
    const std::int32_t from = std::exchange(place[id], to);
    for (const LayerKv& layer : layers)
      for (const engines::Sided one : engines::kAllSides) {
        const Array side(engines::side_of(std::get<DenseKv>(layer), one));
        side[to].copy_(side[from]);
        if (one == engines::kExtraOf)
          side[from].fill_(-7);
        else
          side[from].fill_(std::numeric_limits<float>::quiet_NaN());
      }
  }
  [[nodiscard]] Array slot_of(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                              int side) const override {
    return Array(
        engines::side_of(std::get<DenseKv>(layers[static_cast<std::size_t>(layer)]), side))[place.at(id)][head][slot];
  }
  std::map<SequenceId, std::int32_t> place;

 private:
  void share(SequenceId, SequenceId, std::int32_t) override { FAIL() << "this engine shares nothing"; }
  void make_room(const Numbers&) override {}
  CacheView view_of(const std::vector<SequenceId>& ids) override {
    places_.clear();
    for (const SequenceId id : ids) places_.push_back(place.at(id));
    return {.sequences = ids, .lengths = {}, .places = places_};
  }
  void settle(const CacheView&, const Report&) override {}
  Ints places_;
};

// Fault: the batch is condensed between steps, and what is known of a sequence stays with its old index.
TEST(ServingFaults, ASequenceMayMoveToAnotherPlaceOfTheBatch) {
  for (const std::string& policy : {kRkv, kAms}) {
    SCOPED_TRACE(policy);
    MovingEngine moving(policy);
    DenseEngine resting(policy, false, Dtype::f32);
    PagedEngine paged(policy, false, Dtype::f32, 16, PageLayout::slot_head, Form::apart);
    const std::initializer_list<Engine*> all{&moving, &resting, &paged};
    const auto step = [&](const Work& work) {
      for (Engine* const engine : all) static_cast<void>(run(*engine, work));
      ASSERT_NO_FATAL_FAILURE(expect_alike(resting, moving));
      ASSERT_NO_FATAL_FAILURE(expect_alike(resting, paged));
    };
    for (Engine* const engine : all)
      for (const SequenceId id : {1, 2, 3}) engine->join(id);
    moving.place = {{1, 0}, {2, 1}, {3, 2}};
    step({{1, 20}, {2, 37}, {3, 25}});
    for (std::int32_t n = 0; n < 12; ++n) step({{1, 1}, {2, 1}, {3, 1}});
    for (Engine* const engine : all) {  // in the middle of everybody's interval
      engine->keeper.leave(1);
      engine->lengths.erase(1);
    }
    moving.move(3, 0);  // the last takes the place that became free
    for (std::int32_t n = 0; n < 12; ++n) step({{3, 1}, {2, 1}});
    for (Engine* const engine : all) engine->join(4);
    moving.place[4] = 2;
    step({{3, 1}, {2, 1}, {4, 29}});
    for (std::int32_t n = 0; n < 5; ++n) step({{4, 1}, {3, 1}, {2, 1}});
    for (Engine* const engine : all) {
      engine->keeper.leave(3);
      engine->lengths.erase(3);
    }
    moving.move(2, 0);
    moving.move(4, 1);
    for (std::int32_t n = 0; n < 20; ++n) step(n % 2 == 0 ? Work{{2, 1}, {4, 1}} : Work{{4, 1}, {2, 1}});
    EXPECT_GE(moving.keeper.totals().sequences_cut, 10);
    for (const SequenceId id : {2, 4}) expect_holds(moving, id);
  }
}

}  // namespace
}  // namespace kvkeep::serving_faults_test
