// SPDX-License-Identifier: Apache-2.0
// Prompts that are narrowed while they run, in an engine's order of calls: layer by layer, beside other prompts and
// decoding sequences, in dense and paged caches.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>

#include "kvkeep/parts/prompts.h"
#include "kvkeep/policy/asl.h"
#include "layer_by_layer_engine.h"
#include "loop_threads.h"

namespace kvkeep::narrow_test {
namespace {

using testing::Array;
using testing::LoopThreads;
using namespace layer_by_layer;

/// What a policy's pass makes of one prompt by itself.
struct Alone {
  std::vector<Ints> rows;
  PromptReport report;
  bool restart = false;
};

Alone alone(const std::string& text, SequenceId id, std::int32_t tokens, QueryBasis basis) {
  testing::LayeredPrompt prompt(
      {.layers = kLayers, .group = kQueryHeads / kHeads, .kv_heads = kHeads, .dim = kKeyDim, .tokens = tokens}, 1);
  prompt.spec = model();
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (const Side side : {Side::key, Side::query}) {
      float* out = (side == Side::key ? prompt.keys : prompt.queries)[static_cast<std::size_t>(l)].data<float>();
      for (std::int32_t h = 0; h < heads_of(side); ++h)
        for (std::int32_t t = 0; t < tokens; ++t, out += kKeyDim) fill(out, kKeyDim, id, l, t, t, h, side);
    }
  Alone result;
  result.report = {.tokens = tokens,
                   .relative_variance = std::vector<double>(kLayers, std::nan("")),
                   .entered = Ints(kLayers),
                   .going_on = prompt.all()};
  const auto policy = make_policy(text);
  const auto pass = policy->begin_prompt(host(), prompt.spec, tokens);
  for (std::int32_t l = 0; l < kLayers && !result.restart; ++l) {
    const Ints here = result.report.going_on;
    const auto n = static_cast<std::int32_t>(here.size());
    result.report.entered[static_cast<std::size_t>(l)] = n;
    const std::int32_t wanted = pass->wants(l, n);
    Decision decision;
    if (wanted > 0) {
      const testing::PromptLayer layer(prompt, l, here, wanted);
      decision = policy->decide(
          *pass, {.spec = prompt.spec, .table = layer.table, .basis = basis, .moment = Moment::prefill_layer});
    }
    for (std::size_t h = 0; h < kHeads; ++h) {
      result.rows.push_back(here);
      if (decision.keep)
        result.rows.back() = Engine::at(here, {decision.keep->row(h).begin(), decision.keep->row(h).end()});
    }
    if (decision.relative_variance)
      result.report.relative_variance[static_cast<std::size_t>(l)] = *decision.relative_variance;
    if (decision.reason == Reason::select_layer) result.report.selection_layer = l;
    if (!decision.narrow) continue;
    const std::int32_t* places = decision.narrow->tokens.data<std::int32_t>();
    result.report.going_on = Engine::at(here, {places, places + decision.narrow->tokens.numel()});
    result.report.second_pass = result.restart = decision.narrow->restart;
  }
  if (result.restart) result.rows.assign(kRows, {});
  return result;
}

void expect_same(const PromptReport& a, const PromptReport& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.selection_layer, b.selection_layer);
  EXPECT_EQ(a.entered, b.entered);
  EXPECT_EQ(a.going_on, b.going_on);
  EXPECT_EQ(a.second_pass, b.second_pass);
  ASSERT_EQ(a.relative_variance.size(), b.relative_variance.size());
  for (std::size_t l = 0; l < a.relative_variance.size(); ++l)
    EXPECT_TRUE(a.relative_variance[l] == b.relative_variance[l] ||
                (std::isnan(a.relative_variance[l]) && std::isnan(b.relative_variance[l])))
        << "layer " << l;
}

const char* const kOnePass[] = {
    "asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6",
    "asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6,cache=16",
    "asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6,cache_mass=0.8",
    "asl,budget=24,window=6,pool=3,min_layer=2,missed_mass=0.5,select_mass=0.8,cache=30",
    "asl,budget=24,window=6,pool=3,threshold=0,cache=16",
    "fastkv,budget=24,window=6,layer=2,cache=24",
    "fastkv,budget=7,window=6,layer=0",
    "pyramidinfer,keep=0.5,min_context=8,sink=2",
    "pyramidinfer,keep=0.7,min_context=8,sink=2,schedule=constant"};

const std::int32_t kPageSizes[] = {0, 1, 12};

class Narrow : public ::testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(Caches, Narrow, ::testing::ValuesIn(kPageSizes),
                         [](const auto& p) { return p.param == 0 ? std::string("Dense") : text("PagesOf", p.param); });

TEST_P(Narrow, GivesEachPromptOfAStepWhatItWouldGetAlone) {
  for (const char* policy : kOnePass)
    for (const QueryBasis basis : {QueryBasis::pre_rope, QueryBasis::post_rope}) {
      SCOPED_TRACE(text(policy, basis == QueryBasis::pre_rope ? ", queries before RoPE" : ", queries after RoPE"));
      Engine engine(policy, GetParam());
      engine.basis = basis;
      for (const SequenceId id : {1, 2, 3, 4, 5}) engine.join(id);
      engine.step({{4, 10}});
      engine.step({{4, 1}});
      engine.step({{3, 55}, {4, 1}, {1, 70}, {2, 41}, {5, 24}});
      for (const auto& [id, tokens] : {std::pair{1, 70}, {2, 41}, {3, 55}, {5, 24}}) {
        const Alone want = alone(policy, id, tokens, basis);
        EXPECT_EQ(engine.kept(id), want.rows) << "sequence " << id;
        ASSERT_NE(engine.keeper.part<parts::Prompts>().report_of(id), nullptr);
        expect_same(*engine.keeper.part<parts::Prompts>().report_of(id), want.report);
        engine.expect_holds(id);
        EXPECT_EQ(engine.present[id], want.report.going_on);
        EXPECT_EQ(engine.keeper.logical_length(id), tokens) << "A-11";
        EXPECT_EQ(engine.keeper.prompt_length(id), tokens);
      }
      engine.expect_holds(4);
      EXPECT_EQ(engine.keeper.physical_length(4, 0, 1), 12);
      engine.step({{1, 1}, {2, 1}, {4, 1}, {5, 1}, {3, 2}});
      for (const auto& [id, tokens] : {std::pair{1, 70}, {2, 41}, {5, 24}}) {
        for (const Ints& row : engine.kept(id)) {
          EXPECT_EQ(row.back(), tokens) << "the next token stands behind the whole prompt (A-11)";
          EXPECT_LE(row[row.size() - 2], tokens - 1);
        }
        engine.expect_holds(id);
      }
      if (HasFatalFailure()) return;
    }
}

TEST(Narrow, SelectsForEachSequenceInALayerOfItsOwn) {
  Engine engine(kOnePass[0]);
  std::set<std::int32_t> layers;
  for (const SequenceId id : {1, 2, 3, 4, 5, 6}) engine.join(id);
  engine.step({{1, 70}, {2, 60}, {3, 65}, {4, 50}, {5, 44}, {6, 71}});
  for (const SequenceId id : {1, 2, 3, 4, 5, 6})
    layers.insert(engine.keeper.part<parts::Prompts>().report_of(id)->selection_layer);
  EXPECT_GE(layers.size(), 3U);
}

TEST_P(Narrow, GivesThePagesBehindTheLongestRowBackWhenThePromptHasEnded) {
  const std::int32_t page = GetParam();
  if (page == 0) GTEST_SKIP() << "no pages";
  for (const char* policy : kOnePass) {
    SCOPED_TRACE(policy);
    Engine engine(policy, page);
    std::int32_t held = 0;
    for (const SequenceId id : {1, 2, 3}) engine.join(id);
    engine.step({{1, 70}, {2, 100}, {3, 20}});
    for (const SequenceId id : {1, 2, 3}) {
      const std::int32_t longest = *std::max_element(engine.lengths[id].begin(), engine.lengths[id].end());
      EXPECT_EQ(engine.pages.length(id), longest);
      held += (longest + page - 1) / page;
    }
    EXPECT_EQ(engine.pool.free_pages(), engine.pool.capacity() - held);
    EXPECT_EQ(engine.keeper.totals().pages_freed,
              (70 + page - 1) / page + (100 + page - 1) / page + (20 + page - 1) / page - held);
    for (const SequenceId id : {1, 2, 3}) {
      const std::int32_t shortest = *std::min_element(engine.lengths[id].begin(), engine.lengths[id].end());
      EXPECT_THROW(engine.pages.fork(9, id, shortest + 1), InvalidArgument)
          << "every row of sequence " << id << " holds " << shortest << " slots, not more";
      engine.keeper.leave(id);
      engine.pages.release(id);
    }
    EXPECT_EQ(engine.pool.free_pages(), engine.pool.capacity());
  }
}

TEST(Narrow, ReportsWhichTokensOfThePromptWentOnHoweverOftenItNarrowed) {
  Engine engine("pyramidinfer,keep=0.5,min_context=8,sink=2");
  engine.join(1);
  engine.step({{1, 70}});
  const Ints last = engine.kept(1).back();
  EXPECT_TRUE(std::ranges::includes(last, engine.keeper.part<parts::Prompts>().report_of(1)->going_on));
}

TEST(Narrow, CountsWhatItDropsAndMoves) {
  Engine engine("fastkv,budget=24,window=6,layer=2,cache=16");
  engine.join(1);
  engine.step({{1, 50}});
  EXPECT_EQ(engine.keeper.totals().slots_dropped, 2 * (3 * (50 - 16) + 3 * (24 - 16)));
  std::int64_t dropped = 0, moved = 0;
  for (const auto& [layer, one] : engine.narrowed) {
    EXPECT_EQ(one.slots_dropped, 2 * ((layer <= 2 ? 50 : 24) - 16));
    EXPECT_EQ(one.tokens.has_value(), layer == 2);
    dropped += one.slots_dropped, moved += one.bytes_moved;
  }
  EXPECT_EQ(dropped, engine.keeper.totals().slots_dropped);
  EXPECT_GT(moved, 0);
  EXPECT_EQ(moved, engine.keeper.totals().bytes_moved);
}

TEST_P(Narrow, IsFollowedByAnyPolicyThatDecidesBehindThePrompt) {
  for (const char* prefill : {kOnePass[0], kOnePass[1], kOnePass[2], kOnePass[7]})
    for (const char* decode :
         {"ams-tova,budget=16,interval=4,sink=1,recent=2,window=8,min_segment=2,max_segment=8,min_quota=1",
          "tova,budget=16,interval=4,sink=1,recent=2", "h2o,budget=16,interval=4,sink=1,recent=2",
          "streaming,budget=16,interval=4,sink=1,recent=2", "snapkv,budget=16,interval=4,sink=1,window=8",
          "keydiff,budget=16,interval=4,sink=1,recent=2", "expected,budget=16,interval=4,sink=1",
          "rkv,budget=16,interval=4,sink=1", "adakv-tova,budget=16,interval=4,sink=1,recent=2",
          "tova,budget=16,interval=4,sink=1,recent=2,prefill=cut"}) {
      SCOPED_TRACE(text(prefill, "+", decode));
      Engine engine(text(prefill, "+", decode), GetParam());
      engine.join(1), engine.join(2);
      engine.step({{1, 70}, {2, 45}});
      std::int64_t events = 0;
      for (int n = 0; n < 40; ++n) {
        events += static_cast<std::int64_t>(engine.step({{1, 1}, {2, 1}}).cuts.size());
        for (const SequenceId id : {1, 2})
          for (const Ints& row : engine.kept(id)) ASSERT_EQ(row.back(), (id == 1 ? 70 : 45) + n);
      }
      EXPECT_GE(events, 10);
      for (const SequenceId id : {1, 2}) {
        engine.expect_holds(id);
        std::int64_t slots = 0;
        for (const std::int32_t length : engine.lengths[id]) slots += length;
        EXPECT_LT(slots, kRows * (16 + 4));
      }
      if (HasFatalFailure()) return;
    }
}

/// Decides nothing: looks at the queries that it is given.
class Probe final : public KVPolicy {
 public:
  Probe(std::int32_t wanted, SequenceId id, std::vector<Ints>& seen) : wanted_(wanted), id_(id), seen_(seen) {}
  [[nodiscard]] std::string_view name() const override { return "probe"; }
  [[nodiscard]] Needs needs() const override { return {.queries = wanted_}; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec&) const override { return {}; }
  [[nodiscard]] Trigger trigger() const override {
    Trigger trigger;
    trigger.budget.slots = 1;
    trigger.interval = 1;
    trigger.prefill = Trigger::Prefill::cut;
    return trigger;
  }
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override {
    seen_.clear();
    for (const RowGroup& group : evidence.table.groups) {
      seen_.emplace_back();
      for (std::int32_t i = 0; i < group.queries.count; ++i) {
        const std::int32_t position = group.queries.position(i);
        seen_.back().push_back(position);
        for (std::int32_t h = 0; h < kQueryHeads; ++h) {
          float want[kKeyDim];
          fill(want, kKeyDim, id_, group.layer, position, position, h, Side::query);
          EXPECT_TRUE(std::equal(want, want + kKeyDim, reinterpret_cast<const float*>(group.queries.at(i, h))))
              << "query " << i << " of layer " << group.layer << ", at position " << position;
        }
      }
    }
    return {};
  }
  [[nodiscard]] std::string to_json() const override { return "{}"; }

 private:
  std::int32_t wanted_;
  SequenceId id_;
  std::vector<Ints>& seen_;
};

Ints newest(std::int32_t tokens, std::int32_t count) {
  Ints all;
  for (std::int32_t t = tokens - count; t < tokens; ++t) all.push_back(t);
  return all;
}

TEST(Narrow, LeavesTheNewestQueriesWithoutAGapToThePolicyBehindIt) {
  for (const std::int32_t wanted :
       {4, 6, 12, 50}) {  // fewer than the window, as many, more, more than all that went on
    std::vector<Ints> seen;
    AslOptions options;
    options.selector.select = 24, options.selector.window = 6, options.selector.fixed_layer = 2;
    Engine engine(std::make_unique<Asl>("fastkv", options, std::make_unique<Probe>(wanted, 1, seen), "{}"));
    engine.join(1);
    engine.step({{1, 70}});
    const Ints& left = engine.keeper.part<parts::Prompts>().report_of(1)->going_on;
    std::int32_t tail = 0;
    while (left[left.size() - 1 - static_cast<std::size_t>(tail)] == 69 - tail) ++tail;
    ASSERT_GE(tail, 6);
    ASSERT_LT(tail, 24);
    for (std::int32_t n = 0; n <= 60; ++n) {
      if (n > 0) engine.step({{1, 1}});
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(kLayers));
      for (std::int32_t l = 0; l < kLayers; ++l)
        ASSERT_EQ(seen[static_cast<std::size_t>(l)], newest(70 + n, std::min(wanted, l <= 2 ? 70 + n : tail + n)))
            << "layer " << l << ", " << n << " decoded";
    }
  }
}

TEST_P(Narrow, BeginsAfreshWithTheChosenTokensInTheNextStep) {
  for (const char* policy : {"gemfilter,budget=20,layer=2", "gemfilter,budget=20,layer=5",
                             "gemfilter,budget=20,layer=0", "asl-2pass,budget=20,window=6,min_layer=1,threshold=0.6",
                             "asl-2pass,budget=20,window=6,min_layer=1,threshold=0",
                             "asl-2pass,budget=20,window=6,min_layer=1,threshold=2,indices=last_query"})
    for (const char* decode : {"", "+tova,budget=12,interval=4,sink=1,recent=2"}) {
      SCOPED_TRACE(text(policy, decode));
      Engine engine(text(policy, decode), GetParam());
      for (const SequenceId id : {1, 2, 3}) engine.join(id);
      engine.step({{3, 8}});
      engine.step({{1, 70}, {3, 1}, {2, 15}});
      const Alone want = alone(policy, 1, 70, QueryBasis::pre_rope);
      ASSERT_TRUE(want.restart);
      expect_same(*engine.keeper.part<parts::Prompts>().report_of(1), want.report);
      EXPECT_EQ(engine.tokens[1], want.report.going_on);
      EXPECT_EQ(engine.keeper.logical_length(1), 0);
      EXPECT_EQ(engine.keeper.prompt_length(1), 20);
      EXPECT_EQ(engine.kept(1), std::vector<Ints>(kRows));
      EXPECT_EQ(engine.lengths[1], Ints(kRows, 0));
      EXPECT_EQ(engine.keeper.part<parts::Prompts>().report_of(2)->going_on.size(), 15U)
          << "a prompt that fits runs once";
      EXPECT_EQ(engine.keeper.physical_length(2, 5, 0), 15);
      EXPECT_EQ(engine.keeper.physical_length(3, 5, 0), 9);
      if (GetParam() > 0) EXPECT_TRUE(engine.pages.pages(1).empty());

      engine.step({{2, 1}, {1, 13}});  // the second pass may come in chunks
      EXPECT_TRUE(engine.narrowed.empty());
      engine.step({{1, 7}, {3, 1}});
      EXPECT_TRUE(engine.narrowed.empty()) << "no second narrowing";
      expect_same(*engine.keeper.part<parts::Prompts>().report_of(1), want.report);
      EXPECT_EQ(engine.keeper.logical_length(1), 20);
      for (const Ints& row : engine.kept(1)) EXPECT_EQ(row, newest(20, 20));
      for (const SequenceId id : {1, 2, 3}) engine.expect_holds(id);
      for (int n = 0; n < 10; ++n) {
        engine.step({{1, 1}, {2, 1}, {3, 1}});
        for (const Ints& row : engine.kept(1)) EXPECT_EQ(row.back(), 20 + n);
      }
      for (const SequenceId id : {1, 2, 3}) engine.expect_holds(id);
      if (std::string(decode).empty())
        EXPECT_EQ(engine.keeper.physical_length(1, 3, 1), 30);
      else
        EXPECT_LT(engine.keeper.physical_length(1, 3, 1), 16);
      if (HasFatalFailure()) return;
    }
}

TEST_P(Narrow, TakesASecondPromptOfASequenceWhole) {  // 1.12
  Engine engine(kOnePass[1], GetParam());
  engine.join(1);
  engine.step({{1, 70}});
  const auto before = engine.kept(1);
  const PromptReport first = *engine.keeper.part<parts::Prompts>().report_of(1);
  engine.step({{1, 50}});
  EXPECT_TRUE(engine.narrowed.empty());
  const auto after = engine.kept(1);
  for (std::size_t r = 0; r < before.size(); ++r) {
    Ints want = before[r];
    for (std::int32_t t = 70; t < 120; ++t) want.push_back(t);
    EXPECT_EQ(after[r], want);
  }
  engine.expect_holds(1);
  expect_same(*engine.keeper.part<parts::Prompts>().report_of(1), first);
}

TEST(Narrow, LeavesAPromptBehindCachedTokensAlone) {
  Engine engine(kOnePass[1]);
  engine.join(1);
  engine.keeper.leave(1);
  engine.keeper.join(1, 30, 90);
  engine.lengths[1] = Ints(kRows, 30);
  engine.fed[1] = 30;
  engine.tokens[1] = newest(30, 30);
  engine.step({{1, 40}});  // in chunks too
  engine.step({{1, 20}});
  EXPECT_TRUE(engine.narrowed.empty());
  EXPECT_EQ(engine.keeper.part<parts::Prompts>().report_of(1), nullptr);
  for (const Ints& row : engine.kept(1)) EXPECT_EQ(row, newest(90, 90));
}

TEST(Narrow, HasNothingToReportUnderAPolicyThatDoesNotNarrow) {
  Engine engine("tova,budget=64");
  engine.join(1);
  engine.step({{1, 30}});
  EXPECT_TRUE(engine.narrowed.empty());
  EXPECT_EQ(engine.keeper.find<parts::Prompts>(), nullptr);
}

TEST(Narrow, LeavesAWindowOfQueriesThatTokensCanBeTakenBackFrom) {  // speculative decoding behind a narrowed prompt
  Engine engine("fastkv,budget=24,window=6,layer=2+ams-tova,budget=100,window=16");
  Engine other("fastkv,budget=24,window=6,layer=2+ams-tova,budget=100,window=16");
  for (Engine* e : {&engine, &other}) {
    e->join(1);
    e->step({{1, 70}});
  }
  EXPECT_THROW(engine.keeper.truncate(1, 69), StateError) << "tokens stayed behind in deeper layers";
  engine.step({{1, 5}});
  EXPECT_THROW(engine.keeper.truncate(1, 69), StateError);
  engine.keeper.truncate(1, 72);
  for (std::int32_t& length : engine.lengths[1]) length -= 3;
  engine.fed[1] -= 3;
  other.step({{1, 2}});
  EXPECT_EQ(engine.kept(1), other.kept(1));
  EXPECT_EQ(engine.keeper.logical_length(1), 72);
  engine.keeper.truncate(1, 70);
  EXPECT_EQ(engine.keeper.logical_length(1), 70);
}

TEST(Narrow, LetsAPromptThatFitsBeTakenBack) {
  Engine engine(kOnePass[0]);
  engine.join(1);
  engine.step({{1, 20}});
  engine.keeper.truncate(1, 15);
  EXPECT_EQ(engine.keeper.logical_length(1), 15);
}

TEST(Narrow, ASequenceMayLeaveInTheMiddleOfItsPrompt) {
  Engine engine(kOnePass[1]);
  engine.join(1), engine.join(2);
  engine.begin({{1, 70}, {2, 50}});
  for (std::int32_t l = 0; l < 3; ++l) {
    engine.observe(l);
    engine.narrow(l);
  }
  engine.keeper.leave(1);
  engine.ids = {2};
  engine.flat.erase(engine.flat.begin(), engine.flat.begin() + kRows);
  for (std::int32_t l = 3; l < kLayers; ++l) {
    engine.observe(l);
    engine.narrow(l);
  }
  engine.end();
  EXPECT_EQ(engine.kept(2), alone(kOnePass[1], 2, 50, QueryBasis::pre_rope).rows);
  engine.join(1);
  engine.step({{1, 60}, {2, 1}});
  EXPECT_EQ(engine.kept(1), alone(kOnePass[1], 1, 60, QueryBasis::pre_rope).rows);
  engine.expect_holds(1);
}

/// Everything that a refused call could have changed.
struct Sight {
  explicit Sight(Engine& engine)
      : flat(engine.flat),
        logical(engine.keeper.logical_length(1)),
        free(engine.pool.free_pages()),
        dropped(engine.keeper.totals().slots_dropped) {
    rows = engine.kept(1);
    for (const LayerKv& layer : engine.layers) {
      if (const auto* dense = std::get_if<DenseKv>(&layer))
        sides.insert(sides.end(), {Array(dense->keys).clone(), Array(dense->values).clone()});
      if (const auto* paged = std::get_if<PagedKv>(&layer))
        sides.insert(sides.end(), {Array(paged->keys).clone(), Array(paged->values).clone()});
    }
    if (engine.block_table.defined()) sides.push_back(engine.block_table.clone());
    const PromptReport* report = engine.keeper.part<parts::Prompts>().report_of(1);
    if (report != nullptr) entered = report->entered, going_on = report->going_on;
  }
  [[nodiscard]] bool same_as(const Sight& o) const {
    for (std::size_t i = 0; i < sides.size(); ++i)
      if (!sides[i].equal(o.sides[i])) return false;
    return flat == o.flat && logical == o.logical && free == o.free && dropped == o.dropped && rows == o.rows &&
           entered == o.entered && going_on == o.going_on;
  }
  Ints flat, entered, going_on;
  std::int64_t logical;
  std::int32_t free;
  std::int64_t dropped;
  std::vector<Ints> rows;
  std::vector<Array> sides;
};

template <class E>
void expect_refused(Engine& engine, const std::string& word, const std::function<void()>& call) {
  const Sight before(engine);
  try {
    call();
    ADD_FAILURE() << "was accepted; the message should have said: " << word;
  } catch (const E& e) {
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
  EXPECT_TRUE(before.same_as(Sight(engine))) << "something changed; the message should have said: " << word;
}

TEST_P(Narrow, RefusesWhatDoesNotFitBeforeAnythingChanges) {
  Engine engine(kOnePass[1], GetParam());
  engine.join(1), engine.join(2);
  engine.begin({{1, 70}, {2, 50}});
  const auto with = [&](const std::function<void(Observation&, CacheView&)>& change) {
    return [&engine, change] {
      Observation o{.layer = 2,
                    .sequences = engine.active,
                    .indptr = engine.indptr,
                    .queries = engine.queries,
                    .basis = engine.basis};
      CacheView view = engine.view();
      change(o, view);
      static_cast<void>(engine.keeper.part<parts::Prompts>().narrow(o, view));
    };
  };
  for (std::int32_t l = 0; l < 2; ++l) {
    engine.observe(l);
    engine.narrow(l);
  }
  engine.observe(2);
  expect_refused<StateError>(engine, "layer 1 of the prompt of sequence 1; layer 2 comes next",
                             with([](Observation& o, CacheView&) { o.layer = 1; }));
  expect_refused<StateError>(engine, "layer 3 of the prompt of sequence 1; layer 2 comes next",
                             with([](Observation& o, CacheView&) { o.layer = 3; }));
  expect_refused<InvalidArgument>(engine, "has no queries",
                                  with([](Observation& o, CacheView&) { o.queries = Array(); }));
  expect_refused<InvalidArgument>(engine, "allowed [", with([](Observation& o, CacheView&) {
                                    o.queries = Array::empty({5, kQueryHeads, kKeyDim});
                                  }));
  expect_refused<InvalidArgument>(engine, "allowed f32, f16, bf16", with([](Observation& o, CacheView&) {
                                    o.queries = Array(o.queries).to(Dtype::i32);
                                  }));
  expect_refused<InvalidArgument>(engine, "one length per sequence",
                                  with([](Observation&, CacheView& v) { v.lengths.rows_per_sequence = 1; }));
  static const SequenceId other[] = {1, 7}, twice[] = {1, 1};
  expect_refused<InvalidArgument>(engine, "sequence 1 is not in the view",
                                  with([](Observation&, CacheView& v) { v.sequences = std::span(other).subspan(1); }));
  expect_refused<StateError>(engine, "sequence 7 is not known",
                             with([](Observation& o, CacheView&) { o.sequences = other; }));
  expect_refused<InvalidArgument>(engine, "sequence 1 is named twice", with([](Observation& o, CacheView&) {
                                    static const Ints both{0, 70, 140};
                                    o.sequences = twice, o.indptr = both,
                                    o.queries = Array::full({140, kQueryHeads, kKeyDim}, 0.5F);
                                  }));
  const Ints fewer{0, engine.indptr[1] - 1, engine.indptr[2]};
  expect_refused<InvalidArgument>(engine, "tokens of sequence 1",
                                  with([&](Observation& o, CacheView&) { o.indptr = fewer; }));
  expect_refused<InvalidArgument>(engine, "indptr has 2 entries for 2 sequences",
                                  with([&](Observation& o, CacheView&) { o.indptr = std::span(fewer).first(2); }));
  const Ints falling{0, 70, 60};
  expect_refused<InvalidArgument>(engine, "indptr falls from 70 to 60", with([&](Observation& o, CacheView&) {
                                    o.indptr = falling, o.queries = o.queries.narrow(0, 0, 60);
                                  }));
  static Ints wrong;
  wrong = engine.flat;
  wrong[2 * kHeads] += 1;
  expect_refused<StateError>(engine, "in layer 2, head 0",
                             with([](Observation&, CacheView& v) { v.lengths.data = wrong; }));
  if (GetParam() > 0) {
    expect_refused<InvalidArgument>(engine, "block table",
                                    with([](Observation&, CacheView& v) { v.block_table = Array(); }));
    const std::int32_t page = engine.pages.pages(2).front();
    engine.pool.retain(page);
    expect_refused<InvalidArgument>(engine, "is held by 2 sequences", with([](Observation&, CacheView&) {}));
    engine.pool.give_back(page);
  }
  Array broken = engine.queries.clone();
  broken[engine.indptr[2] - 1][3][2].fill_(std::numeric_limits<float>::quiet_NaN());
  expect_refused<InvalidArgument>(engine, "query of head 3", with([&](Observation& o, CacheView&) {
                                    o.queries = broken;
                                  }));  // of the second: the first is not cut either
  expect_refused<StateError>(engine, "the prompt of sequence 1 has only reached layer 2",
                             [&] { engine.keeper.step(engine.view()); });
  expect_refused<StateError>(engine, "has only reached layer", [&] { engine.keeper.truncate(1, 69); });
  expect_refused<StateError>(engine, "sequence 1", [&] {
    engine.keeper.observe({.layer = 0, .sequences = engine.active, .indptr = engine.indptr, .queries = engine.queries});
  });
  engine.narrow(2);
  expect_refused<StateError>(engine, "layer 3 comes next", [&] { engine.narrow(2); });
  for (std::int32_t l = 3; l < kLayers; ++l) {
    engine.observe(l);
    if (l + 1 < kLayers) engine.narrow(l);
  }
  expect_refused<StateError>(engine, "has only reached layer 5", [&] { engine.keeper.step(engine.view()); });
  engine.narrow(kLayers - 1);
  engine.end();
  for (const auto& [id, tokens] : {std::pair{1, 70}, {2, 50}}) {
    EXPECT_EQ(engine.kept(id), alone(kOnePass[1], id, tokens, QueryBasis::pre_rope).rows)
        << "after all that the prompt has run as ever";
    engine.expect_holds(id);
  }
}

TEST_P(Narrow, ChecksTheViewInLayersThatNeedNothingOfIt) {
  if (GetParam() == 0) GTEST_SKIP() << "no pages";
  Engine engine("fastkv,budget=24,window=6,layer=1", GetParam());  // behind layer 1 nothing is decided any more
  engine.join(1);
  engine.begin({{1, 70}});
  for (std::int32_t l = 0; l < kLayers; ++l) {
    engine.observe(l);
    if (l + 1 < kLayers) engine.narrow(l);
  }
  expect_refused<InvalidArgument>(engine, "block table", [&] {
    CacheView view = engine.view();
    view.block_table = Array();
    static_cast<void>(engine.keeper.part<parts::Prompts>().narrow(
        {.layer = kLayers - 1, .sequences = engine.active, .indptr = engine.indptr, .queries = engine.queries}, view));
  });
  engine.narrow(kLayers - 1);
  engine.end();
  EXPECT_EQ(engine.kept(1), alone("fastkv,budget=24,window=6,layer=1", 1, 70, QueryBasis::pre_rope).rows);
}

TEST(Narrow, RefusesObservationsOfOtherTokensThanWentOn) {
  Engine engine("fastkv,budget=24,window=6,layer=1");
  engine.join(1);
  engine.begin({{1, 70}});
  for (std::int32_t l = 0; l < 2; ++l) {
    engine.observe(l);
    engine.narrow(l);
  }
  const Array all = Array::full({70, kQueryHeads, kKeyDim}, 0.5F);
  const SequenceId id = 1;
  const Ints indptr{0, 70}, right{0, 24};
  expect_refused<StateError>(engine, "layer 2 passes 70 tokens of sequence 1; 24 continued to it", [&] {
    engine.keeper.observe({.layer = 2, .sequences = {&id, 1}, .indptr = indptr, .queries = all});
  });
  Ints positions = engine.present[1];
  positions[0] += 1;
  expect_refused<InvalidArgument>(engine, "different positions", [&] {
    engine.keeper.observe(
        {.layer = 2, .sequences = {&id, 1}, .indptr = right, .queries = all.narrow(0, 0, 24), .positions = positions});
  });
  positions[0] -= 1;
  engine.keeper.observe(
      {.layer = 2, .sequences = {&id, 1}, .indptr = right, .queries = all.narrow(0, 0, 24), .positions = positions});
}

TEST(Narrow, RefusesAPromptInChunksAndEnginesThatDoNotRunLayerByLayer) {
  Engine engine(kOnePass[0]);
  engine.join(1, 70);
  engine.begin({{1, 40}});
  const Observation chunk = engine.run(0);
  expect_refused<InvalidArgument>(engine, "40 of the 70 tokens of its prompt", [&] { engine.keeper.observe(chunk); });
  engine.keeper.leave(1);
  engine.join(1);
  engine.step({{1, 40}});
  EXPECT_EQ(engine.kept(1), alone(kOnePass[0], 1, 40, QueryBasis::pre_rope).rows);

  for (const char* policy : {kOnePass[0], "gemfilter,budget=20,layer=2", "pyramidinfer"}) {
    EXPECT_EQ(problems(*make_policy(policy), model(), {.layer_by_layer = true}), std::vector<std::string>{});
    const auto two = problems(*make_policy(policy), model(), {.queries = false});
    ASSERT_EQ(two.size(), 2U);
    EXPECT_NE(two[0].find("layer_by_layer: "), std::string::npos) << two[0];
    EXPECT_NE(two[1].find("queries: "), std::string::npos) << two[1];
    EXPECT_THROW(Keeper(model(), make_policy(policy)), InvalidArgument);
  }
  EXPECT_THROW(Engine("fastkv,budget=24,window=6,layer=6"), InvalidArgument);
}

TEST(Narrow, ReadsPositionsThatTheEngineGives) {  // logical, with gaps
  ModelSpec spec = model();
  Keeper keeper(spec, make_policy("fastkv,budget=8,window=3,layer=0"), {.layer_by_layer = true});
  keeper.join(1);
  Ints positions, lengths(kRows, 20);
  for (std::int32_t t = 0; t < 20; ++t) positions.push_back(3 * t + 5);
  const SequenceId id = 1;
  Ints indptr{0, 20};
  std::vector<LayerKv> layers;
  for (std::int32_t l = 0; l < kLayers; ++l)
    layers.emplace_back(
        DenseKv{Array::full({1, kHeads, 20, kKeyDim}, 1.0F), Array::full({1, kHeads, 20, kValueDim}, 1.0F)});
  keeper.bind(layers);
  const CacheView view{{&id, 1}, {lengths, kRows}};
  const Array queries = Array::full({20, kQueryHeads, kKeyDim}, 0.5F);
  Ints left = positions;
  for (std::int32_t l = 0; l < kLayers; ++l) {
    indptr[1] = static_cast<std::int32_t>(left.size());
    const Observation o{.layer = l,
                        .sequences = {&id, 1},
                        .indptr = indptr,
                        .queries = queries.narrow(0, 0, indptr[1]),
                        .basis = QueryBasis::post_rope,
                        .positions = left};
    keeper.observe(o);
    const LayerReport report = keeper.part<parts::Prompts>().narrow(o, view);
    if (l == 0) left = Engine::at(left, *report.prompts.at(0).tokens);
  }
  keeper.step(view);
  EXPECT_EQ(left.size(), 8U);
  for (std::int32_t r = 0; r < kRows; ++r) {
    const auto row = keeper.positions(1, r / kHeads, r % kHeads);
    EXPECT_EQ(Ints(row.begin(), row.end()), r < kHeads ? positions : left);
  }
  EXPECT_EQ(left.back(), 62);
  EXPECT_EQ(keeper.logical_length(1), 20);
}

TEST(Narrow, RunsOverAModelOfOneRow) {
  ModelSpec spec = model();
  spec.layers.resize(1);
  spec.kv_heads = 1;
  Keeper keeper(spec, make_policy("fastkv,budget=8,window=3,layer=0,cache=6"), {.layer_by_layer = true});
  keeper.join(1);
  const SequenceId id = 1;
  const Ints indptr{0, 20};
  Ints lengths{20};
  keeper.bind({DenseKv{Array::full({1, 1, 20, kKeyDim}, 1.0F), Array::full({1, 1, 20, kValueDim}, 1.0F)}});
  const CacheView view{{&id, 1}, {lengths, 1}};
  const Observation o{.layer = 0,
                      .sequences = {&id, 1},
                      .indptr = indptr,
                      .queries = Array::full({20, kQueryHeads, kKeyDim}, 0.5F),
                      .basis = QueryBasis::post_rope};
  keeper.observe(o);
  static_cast<void>(keeper.part<parts::Prompts>().narrow(o, view));
  EXPECT_EQ(lengths[0], 6) << "one length a sequence is one length a row here";
  keeper.step(view);
}

TEST(Narrow, GivesTheSameBitsWithAnyNumberOfThreads) {
  for (const char* policy :
       {kOnePass[1], kOnePass[2], kOnePass[7], "asl-2pass,budget=20,window=6,min_layer=1,threshold=0.6"}) {
    std::vector<std::vector<Ints>> rows;
    std::vector<PromptReport> reports;
    std::vector<Array> sides;
    for (const int count : {1, 2, 2}) {
      const LoopThreads threads(count);
      Engine engine(text(
          policy, "+ams-tova,budget=16,interval=4,sink=1,recent=2,window=8,min_segment=2,max_segment=8,min_quota=1"));
      engine.join(1), engine.join(2);
      engine.step({{1, 70}, {2, 45}});
      if (engine.fed[1] == 0) engine.step({{1, 20}, {2, 20}});
      for (int n = 0; n < 9; ++n) engine.step({{1, 1}, {2, 1}});
      rows.push_back(engine.kept(1));
      reports.push_back(*engine.keeper.part<parts::Prompts>().report_of(1));
      sides.push_back(Array(std::get<DenseKv>(engine.layers[4]).keys).clone());
      EXPECT_EQ(rows.back(), rows.front());
      expect_same(reports.back(), reports.front());
      EXPECT_TRUE(sides.back().equal(sides.front()));
    }
  }
}

}  // namespace
}  // namespace kvkeep::narrow_test
