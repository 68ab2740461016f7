// SPDX-License-Identifier: Apache-2.0
// Policies that fold, behind a keeper: nothing is lost, nothing of another sequence is seen, and what cannot be done is
// refused before anything moves.

#include <gtest/gtest.h>

#include <fstream>
#include <numeric>

#include "folding_engine.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/surprisal.h"
#include "message_of.h"

namespace kvkeep::fold_test {
namespace {

using namespace testing;

/// A window of 12, 8 leave it together.
const std::string kSekv = FoldingEngine::kSekv;
const std::string kExact =
    ",memory.max_rank=64,memory.rank=max,memory.zoom=coverage,memory.coverage=1,memory.coverage_floor=0";
const std::string kAms =
    "ams-tova,budget=32,interval=8,recent=8,window=4,rest=fold,memory.max_span=16,memory.min_span=4";

void run(FoldingEngine& engine, SequenceId id, int prompt, int steps) {
  engine.join(id);
  engine.step({{id, prompt}});
  for (int i = 0; i < steps; ++i) engine.step({{id, 1}});
}

TEST(Fold, GivesExactAttentionAfterManyFoldsWhereEverySpanIsOpenedAtFullRank) {  // S-18
  for (const std::string& policy : {kSekv + kExact, kSekv + kExact + ",memory.centred=always", kAms + kExact})
    for (const int page_size : {0, 4}) {
      SCOPED_TRACE(policy + text(", page size ", page_size));
      FoldingEngine engine(policy, 1, page_size);
      engine.join(1);
      engine.step({{1, 90}});
      std::int64_t folds = 0;
      for (int i = 0; i < 70; ++i) {
        folds += engine.step({{1, 1}}).slots_folded > 0 ? 1 : 0;
        ASSERT_LT(engine.error(), 1e-4) << "step " << i;
      }
      EXPECT_GE(folds, 6);
      EXPECT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 30);
      engine.expect_nothing_lost(1);
      engine.step({{1, 5}});  // several tokens in one step: every one sees all spans, and those before it
      EXPECT_LT(engine.error(), 1e-4);
    }
}

TEST(Fold, ReadsNothingButCoarseEntriesWhereNothingIsOpened) {
  FoldingEngine engine(kSekv + ",memory.zoom=mass,memory.mass=1");
  run(engine, 1, 120, 0);
  engine.step({{1, 1}});
  EXPECT_EQ(engine.keeper.totals().reads.zooms, 0);
  EXPECT_EQ(engine.keeper.totals().reads.queries, FoldingEngine::kLayers * FoldingEngine::kHeads);
  EXPECT_EQ(engine.keeper.totals().reads.bytes, 0);
  // The coarse formula, as one softmax over rows and coarse entries in fp64.
  for (std::int32_t l = 0; l < FoldingEngine::kLayers; ++l)
    for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h) {
      const SpanRow& row = engine.keeper.part<parts::Folds>().spans(1, l, h);
      const auto& kv = std::get<DenseKv>(engine.cache[static_cast<std::size_t>(l)]);
      const auto& s = engine.living.at(1);
      const float* q = s.queries.data() +
                       (s.queries.size() - FoldingEngine::kLayers * FoldingEngine::kQueryHeads * FoldingEngine::kDim) +
                       (l * FoldingEngine::kQueryHeads + 2 * h) * FoldingEngine::kDim;
      std::vector<double> logits, out(FoldingEngine::kDim);
      std::vector<const float*> values;
      const auto add = [&](const float* key, const float* value, double bias) {
        logits.push_back(std::inner_product(q, q + FoldingEngine::kDim, key, 0.0) * engine.keeper.spec().scale() +
                         bias);
        values.push_back(value);
      };
      for (std::int64_t t = 0; t < engine.keeper.physical_length(1, l, h); ++t)
        add(Array(kv.keys)[0][h][t].data<float>(), Array(kv.values)[0][h][t].data<float>(), 0);
      for (std::int64_t i = 0; i < row.size(); ++i)
        add(reinterpret_cast<const float*>(row.coarse(KvSide::keys)) + i * FoldingEngine::kDim,
            reinterpret_cast<const float*>(row.coarse(KvSide::values)) + i * FoldingEngine::kDim,
            std::log(static_cast<double>(row.span(i).length)));
      const float* const sinks = engine.keeper.spec().sinks_of(l, h);
      double sum = sinks == nullptr ? 0.0 : std::exp(static_cast<double>(sinks[0]));
      for (std::size_t i = 0; i < logits.size(); ++i) {
        sum += std::exp(logits[i]);
        for (std::size_t d = 0; d < out.size(); ++d) out[d] += std::exp(logits[i]) * values[i][d];
      }
      for (std::size_t d = 0; d < out.size(); ++d)
        EXPECT_NEAR(engine.outputs[static_cast<std::size_t>(l)][0][2 * h].data<float>()[d], out[d] / sum, 2e-5);
    }
}

TEST(Fold, RefusesAModelThatCapsLogits) {
  ModelSpec spec = FoldingEngine::model();
  spec.logit_cap = 30;
  for (const std::string& policy : {kSekv, kAms}) {
    const std::string said = testing::message_of<InvalidArgument>(
        [&] { const Keeper keeper(spec, make_policy(policy), {.surprisal = true, .reads_folded = true}); });
    EXPECT_NE(said.find("logit_cap: the model caps logits at 30, which reads of folded spans do not"),
              std::string::npos)
        << said;
  }
}

TEST(Fold, CountsNearAndFarBytesExactly) {
  for (const auto& [sketch, store] :
       std::vector<std::pair<bool, const char*>>{{true, "f32"}, {true, "bf16"}, {false, "f32"}, {false, "bf16"}}) {
    FoldingEngine engine(kSekv + ",memory.store=" + store + (sketch ? "" : ",memory.sketch=false"));
    run(engine, 1, 150, 20);
    const FoldedState state = engine.keeper.part<parts::Folds>().of(1);
    const std::int64_t number = std::string_view(store) == "f32" ? 4 : 2;
    std::int64_t spans = 0, numbers = 0;
    for (std::int32_t l = 0; l < FoldingEngine::kLayers; ++l)
      for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h) {
        const SpanRow& row = engine.keeper.part<parts::Folds>().spans(1, l, h);
        spans += row.size();
        for (std::int64_t i = 0; i < row.size(); ++i)
          for (const SpanFactors& f : row.span(i).factors) {
            EXPECT_LE(f.numbers(row.span(i).length, FoldingEngine::kDim), row.span(i).length * FoldingEngine::kDim)
                << "never larger than the rows";
            numbers += f.numbers(row.span(i).length, FoldingEngine::kDim);
          }
      }
    EXPECT_GT(spans, 0);
    EXPECT_EQ(state.spans, spans);
    EXPECT_EQ(state.near_bytes, spans * (2 * FoldingEngine::kDim * number + 4) + (sketch ? state.tokens * (4 + 2) : 0))
        << "16 signs take a word";
    EXPECT_EQ(state.far_bytes, numbers * number);
    EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), state.far_bytes);
  }
}

TEST(Fold, GivesASequenceTheSameBitsWhateverElseIsInTheBatch) {
  for (const std::string& policy : {kSekv, kAms}) {
    FoldingEngine together(policy, 3), alone(policy), paged(policy, 3, 4);
    for (FoldingEngine* engine : {&together, &paged})
      for (const SequenceId id : {1, 2, 3}) engine->join(id);
    alone.join(2);
    for (FoldingEngine* engine : {&together, &paged}) engine->step({{1, 40}, {2, 80}, {3, 7}});
    alone.step({{2, 80}});
    for (int i = 0; i < 30; ++i) {
      together.step({{3, 1}, {2, 1}, {1, 2}});
      paged.step({{3, 1}, {2, 1}, {1, 2}});
      alone.step({{2, 1}});
      for (std::size_t l = 0; l < 2; ++l) {
        ASSERT_EQ(apart(together.outputs[l].narrow(0, 1, 1), alone.outputs[l]), 0) << policy << ", step " << i;
        ASSERT_EQ(apart(paged.outputs[l], together.outputs[l]), 0) << policy << ", step " << i;
      }
    }
    EXPECT_GT(together.keeper.part<parts::Folds>().of(2).spans, 0);
    together.expect_nothing_lost(1), together.expect_nothing_lost(2), together.expect_nothing_lost(3);
  }
}

/// A long prompt folds when it ends, a short one when 8 tokens have left the window: 20 tokens after its first.
class FirstFold : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Prompts, FirstFold, ::testing::Values(std::pair{100, 0}, std::pair{5, 15}));

TEST_P(FirstFold, LeavesOutOfTheSpansWhatSurprisesAndTheWindow) {
  FoldingEngine engine(kSekv);
  const auto [prompt, steps] = GetParam();
  run(engine, 1, prompt, steps);
  const std::vector<float> surprisal = engine.living.at(1).surprisal;
  const std::int32_t tokens = prompt + steps, window = tokens - 12;
  const Segments whole = segment(surprisal, {.alpha = 1.5, .sink = 2, .recent = 12, .min_span = 3, .max_span = 16});
  const auto kept = engine.keeper.positions(1, 1, 1);
  EXPECT_EQ((std::vector<std::int32_t>(kept.begin(), kept.end())), whole.dense());
  ASSERT_EQ(engine.keeper.part<parts::Folds>().spans(1, 0, 0).size(), static_cast<std::int64_t>(whole.spans.size()));
  for (std::size_t i = 0; i < whole.spans.size(); ++i) {
    EXPECT_EQ(engine.keeper.part<parts::Folds>().spans(1, 0, 1).span(static_cast<std::int64_t>(i)).first,
              whole.spans[i].begin);
    EXPECT_EQ(engine.keeper.part<parts::Folds>().spans(1, 0, 1).span(static_cast<std::int64_t>(i)).last,
              whole.spans[i].end - 1);
  }
  // After that: 8 tokens leave together, cut by the threshold of the first ones; no sinks begin there.
  std::vector<std::int32_t> expected;
  for (const std::int32_t slot : whole.dense())
    if (slot < window) expected.push_back(slot);
  for (std::int32_t begin = window; begin < window + 6 * 8; begin += 8) {
    for (int i = 0; i < 7; ++i) EXPECT_EQ(engine.step({{1, 1}}).slots_folded, 0);
    engine.step({{1, 1}});
    const std::vector<float>& all = engine.living.at(1).surprisal;
    const Segments behind = segment_above(std::span(all).subspan(static_cast<std::size_t>(begin), 8), whole.threshold,
                                          {.sink = 0, .recent = 0, .min_span = 3, .max_span = 16});
    for (const std::int32_t t : behind.dense()) expected.push_back(begin + t);
    std::vector<std::int32_t> held = expected;
    for (std::int32_t t = begin + 8; t < static_cast<std::int32_t>(all.size()); ++t) held.push_back(t);
    const auto now = engine.keeper.positions(1, 0, 0);
    EXPECT_EQ((std::vector<std::int32_t>(now.begin(), now.end())), held) << "8 tokens from " << begin;
  }
}

TEST(Fold, OfAPromptShorterThanTheWindowBeginsWhenEnoughHasLeftIt) {
  FoldingEngine engine(kSekv);
  run(engine, 1, 5, 14);
  EXPECT_EQ(engine.keeper.part<parts::Folds>().of(1).spans, 0);
  EXPECT_LT(engine.error(), 1e-5);
  engine.step({{1, 1}});  // 20 tokens: 8 before the window
  EXPECT_EQ(engine.keeper.positions(1, 0, 0)[0], 0);
  EXPECT_EQ(engine.keeper.positions(1, 0, 0)[1], 1) << "sinks stay";
  for (int i = 0; i < 60; ++i) engine.step({{1, 1}});
  EXPECT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 0);
  engine.expect_nothing_lost(1);
}

TEST(Fold, CutsWhatAnAllocatorDropsIntoSpansOfTheAskedLengths) {
  FoldingEngine engine(kAms + ",min_segment=2,max_segment=8");  // segments of which less than a span is dropped
  run(engine, 1, 90, 200);
  for (const int l : {0, 1})
    for (const int h : {0, 1}) {
      const SpanRow& row = engine.keeper.part<parts::Folds>().spans(1, l, h);
      ASSERT_GT(row.size(), 5);
      for (std::int64_t i = 0; i < row.size(); ++i) {
        EXPECT_GE(row.span(i).length, 4) << "span " << i << " of layer " << l << ", head " << h;
        EXPECT_LE(row.span(i).length, 16) << "span " << i << " of layer " << l << ", head " << h;
      }
    }
}

TEST(Fold, WeighsTokensByTheirMassWhereItIsAskedTo) {
  FoldingEngine equal(kAms), mass(kAms + ",memory.weights=mass");
  for (FoldingEngine* engine : {&equal, &mass}) run(*engine, 1, 90, 3);
  const SpanRow &a = equal.keeper.part<parts::Folds>().spans(1, 0, 0),
                &b = mass.keeper.part<parts::Folds>().spans(1, 0, 0);
  ASSERT_EQ(a.size(), b.size());
  const auto bytes = static_cast<std::size_t>(a.dim()) * static_cast<std::size_t>(element_size(a.dtype()));
  EXPECT_NE(std::memcmp(a.coarse(KvSide::keys), b.coarse(KvSide::keys), bytes), 0);
}

TEST(Fold, AsksForNoReadingOfSpansThatHaveJustFolded) {
  FoldingEngine engine(kSekv);
  engine.views = false;
  run(engine, 1, 100, 0);
  ASSERT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 0);
  EXPECT_NO_THROW(engine.step({{1, 0}}));
}

TEST(Fold, OpensNoMoreThanTheBudgetAllows) {
  FoldingEngine loose(kSekv + kExact), tight(kSekv + kExact + ",budget=60");
  run(loose, 1, 200, 3), run(tight, 1, 200, 3);
  EXPECT_GT(loose.keeper.totals().reads.zooms, 0);
  const std::span<const ReadCounts> by_head = loose.keeper.part<parts::Folds>().reads();
  ASSERT_EQ(by_head.size(), static_cast<std::size_t>(FoldingEngine::kLayers * FoldingEngine::kHeads));
  const ReadCounts all = std::accumulate(by_head.begin(), by_head.end(), ReadCounts{});
  EXPECT_EQ(all.zooms, loose.keeper.totals().reads.zooms);
  EXPECT_EQ(all.queries, loose.keeper.totals().reads.queries);
  for (const ReadCounts& one : by_head) EXPECT_EQ(one.queries, by_head.front().queries) << "every head is asked";
  EXPECT_LT(tight.keeper.totals().reads.zooms, loose.keeper.totals().reads.zooms);
  EXPECT_LT(tight.keeper.physical_length(1, 0, 0), loose.keeper.physical_length(1, 0, 0)) << "fewer anchors";
  const SpanRow& row = tight.keeper.part<parts::Folds>().spans(1, 0, 0);
  EXPECT_LE(static_cast<double>(tight.keeper.physical_length(1, 0, 0) + row.size()), 60.0);
}

TEST(Fold, TakesBackTokensThatCameAfterTheLastFold) {
  FoldingEngine engine(kSekv + kExact);
  run(engine, 1, 100, 3);
  EXPECT_THROW(engine.keeper.truncate(1, 99), StateError);
  engine.keeper.truncate(1, 101);
  EXPECT_EQ(engine.keeper.logical_length(1), 101);
  auto& s = engine.living.at(1);
  for (std::int32_t& length : s.lengths) length -= 2;
  s.surprisal.resize(101), s.keys.resize(101 * FoldingEngine::kLayers * FoldingEngine::kHeads * FoldingEngine::kDim),
      s.values.resize(s.keys.size());
  s.queries.resize(101 * FoldingEngine::kLayers * FoldingEngine::kQueryHeads * FoldingEngine::kDim);
  for (int i = 0; i < 20; ++i) engine.step({{1, 1}});
  EXPECT_LT(engine.error(), 1e-4);
  engine.expect_nothing_lost(1);
}

// ---- What an engine forgets

TEST(Fold, RefusesAnEngineThatDoesNotReadFoldedSpansOrGivesNoSurprisal) {
  EXPECT_NE(message_of([] {
              Keeper(FoldingEngine::model(), make_policy(kSekv), {.surprisal = true});
            }).find("reads_folded: sekv folds spans"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              Keeper(FoldingEngine::model(), make_policy(kSekv), {.reads_folded = true});
            }).find("surprisal: sekv reads that of every token"),
            std::string::npos);
  EXPECT_NO_THROW(Keeper(FoldingEngine::model(), make_policy(kAms), {.reads_folded = true})) << "masses take its place";
  ModelSpec uneven = FoldingEngine::model();
  uneven.value_dim = 8;
  EXPECT_NE(message_of([&] {
              Keeper(uneven, make_policy(kSekv), {.surprisal = true, .reads_folded = true});
            }).find("value_dim"),
            std::string::npos);
}

TEST(Fold, NoticesWhenSurprisalOrViewIsForgotten) {
  FoldingEngine engine(kSekv);
  engine.tells_surprisal = false;
  engine.join(1);
  EXPECT_NE(message_of([&] { engine.step({{1, 50}}); }).find("0 of the 50 tokens of sequence 1 have their surprisal"),
            std::string::npos);
  FoldingEngine blind(kSekv);
  run(blind, 1, 100, 1);
  blind.views = false;
  EXPECT_NE(message_of([&] { blind.step({{1, 1}}); }).find("call view() after each layer's attention"),
            std::string::npos);
}

TEST(Fold, TakesNoSurprisalForTokensThatDidNotComeAndNoQueriesBeforeRope) {
  FoldingEngine engine(kSekv);
  run(engine, 1, 30, 0);
  const std::vector<float> more(2, 1.0F);
  EXPECT_NE(message_of([&] {
              engine.keeper.part<parts::Surprisal>().supply(1, more);
            }).find("2 tokens of sequence 1; 0 of the 30 observed"),
            std::string::npos);
  const std::vector<SequenceId> ids{1};
  const std::vector<std::int32_t> indptr{0, 1};
  const Array q = Array::zeros({1, 4, 16}), out = Array::zeros({1, 4, 16}), lse = Array::zeros({1, 4});
  EXPECT_NE(message_of([&] {
              engine.keeper.part<parts::Folds>().view({.layer = 0, .sequences = ids, .indptr = indptr, .queries = q},
                                                      {out, lse});
            }).find("are taken before RoPE"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              engine.keeper.part<parts::Folds>().view(
                  {.layer = 0, .sequences = ids, .indptr = indptr, .queries = q, .basis = QueryBasis::post_rope},
                  {out, Array::zeros({1, 3})});
            }).find("has the wrong shape"),
            std::string::npos);
}

TEST(Fold, IsReadTheSameWithPrefetchAndWithout) {
  for (const std::string& policy : {kSekv, kAms}) {
    FoldingEngine plain(policy, 2), ahead(policy, 2);
    ahead.ahead = [&](const Observation& seen) { ahead.keeper.part<parts::Folds>().prefetch(seen); };
    for (FoldingEngine* const engine : {&plain, &ahead}) engine->join(1), engine->join(2);
    for (int i = 0; i < 30; ++i) {
      const std::vector<std::pair<SequenceId, std::int32_t>> work{{1, i == 0 ? 90 : 1}, {2, i == 0 ? 50 : 2}};
      plain.step(work), ahead.step(work);
      for (std::size_t l = 0; l < plain.outputs.size(); ++l) EXPECT_EQ(apart(plain.outputs[l], ahead.outputs[l]), 0);
    }
    EXPECT_GT(ahead.keeper.totals().reads.zooms, 0);
    EXPECT_EQ(ahead.keeper.totals().reads.zooms, plain.keeper.totals().reads.zooms);
  }
}

TEST(Fold, IsReadAsItWasPrefetchedOrRefused) {
  FoldingEngine engine(kSekv, 2);
  parts::Folds& folds = engine.keeper.part<parts::Folds>();
  engine.join(1), engine.join(2);
  engine.step({{1, 90}, {2, 90}});
  engine.step({{1, 1}, {2, 1}});
  const auto expect_said = [](const std::string& said, const std::string& words) {
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  const std::vector<SequenceId> both{1, 2}, turned{2, 1}, one{1};
  const std::vector<std::int32_t> indptr{0, 1, 2}, first{0, 1};
  const Array q = Array::zeros({2, 4, 16}), out = Array::zeros({2, 4, 16}), lse = Array::zeros({2, 4});
  const Observation early{
      .layer = 0, .sequences = both, .indptr = indptr, .queries = q, .basis = QueryBasis::post_rope};
  const auto prefetch_refuses = [&](const Observation& o) { return message_of([&] { folds.prefetch(o); }); };
  expect_said(prefetch_refuses(early), "prefetch: layer 0 of sequence 1 has read its folded spans for all 91 tokens");
  engine.ahead = [&](const Observation& seen) {
    const auto changed = [&](auto change) {
      Observation o = seen;
      change(o);
      return o;
    };
    const auto view_refuses = [&](const Observation& o, std::int64_t tokens = 2) {
      return message_of([&] { folds.view(o, {out.narrow(0, 0, tokens), lse.narrow(0, 0, tokens)}); });
    };
    expect_said(prefetch_refuses(changed([](auto& o) { o.basis = QueryBasis::pre_rope; })),
                text("prefetch: queries of layer ", seen.layer, " are taken before RoPE"));
    expect_said(prefetch_refuses(changed([](auto& o) { o.queries = {}; })), " has no queries");
    expect_said(prefetch_refuses(changed([](auto& o) { o.layer = 2; })), "layer 2");
    folds.prefetch(seen);
    const std::string layer = text("view: layer ", seen.layer);
    expect_said(view_refuses(changed([](auto& o) { o.layer = 1 - o.layer; })),
                text("view: layer ", 1 - seen.layer, ", but layer ", seen.layer, " was prefetched and not read"));
    expect_said(view_refuses(changed([&](auto& o) { o.sequences = turned; })),
                layer + " was prefetched for 2 sequences and 2 tokens; given 2 and 2, or in another order");
    expect_said(
        view_refuses(
            changed([&](auto& o) { o.sequences = one, o.indptr = first, o.queries = o.queries.narrow(0, 0, 1); }), 1),
        layer + " was prefetched for 2 sequences and 2 tokens; given 1 and 1");
    expect_said(view_refuses(changed([&](auto& o) { o.queries = q; })), "are not those that were prefetched");
    Array wide = Array::zeros({2, 8, 16});
    folds.prefetch(changed([&](auto& o) { o.queries = wide.narrow(1, 0, 4); }));  // instead of the first
    expect_said(view_refuses(changed([&](auto& o) { o.queries = wide.reshaped({4, 4, 16}).narrow(0, 0, 2); })),
                "at steps of 64 and 16; allowed the same memory, f32 at steps of 128 and 16");
    folds.prefetch(seen);
  };
  EXPECT_NO_THROW(engine.step({{1, 1}, {2, 1}}));
}

TEST(Fold, FoldsATextAlikeWhereverItsPositionsBegin) {
  for (const std::string& policy : {kSekv, kAms}) {
    FoldingEngine here(policy), behind(policy);
    behind.first_position = 5000;
    run(here, 1, 100, 60), run(behind, 1, 100, 60);
    for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h) {
      ASSERT_EQ(here.keeper.part<parts::Folds>().spans(1, 1, h).size(),
                behind.keeper.part<parts::Folds>().spans(1, 1, h).size())
          << policy;
      for (std::int64_t s = 0; s < here.keeper.part<parts::Folds>().spans(1, 1, h).size(); ++s)
        EXPECT_EQ(here.keeper.part<parts::Folds>().spans(1, 1, h).span(s).first + 5000,
                  behind.keeper.part<parts::Folds>().spans(1, 1, h).span(s).first);
    }
  }
}

TEST(Fold, KeepsSinksOfAPromptThatLeavesTheWindowByAndBy) {
  FoldingEngine engine("sekv,recent=12,interval=8,sink=4,memory.max_span=16,memory.min_span=3,memory.alpha=1e6");
  run(engine, 1, 13, 40);  // one token has left the window at the end of the prompt
  ASSERT_GT(engine.keeper.part<parts::Folds>().of(1).spans, 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(engine.keeper.positions(1, 0, 0)[static_cast<std::size_t>(i)], i);
}

TEST(Fold, RefusesIntervalsAndSpansOfWhichNothingWouldFold) {
  const auto said = [](const std::string& options) {
    return message_of<InvalidArgument>([&] {
      Keeper(FoldingEngine::model(), make_policy("sekv," + options), {.surprisal = true, .reads_folded = true});
    });
  };
  EXPECT_NE(said("interval=2,memory.min_span=3").find("interval: 2"), std::string::npos);
  EXPECT_NE(said("memory.min_span=8,memory.max_span=4").find("max_span: 4"), std::string::npos);
}

TEST(Fold, LeavesAttentionThatIsNotANumberAsItIs) {
  FoldingEngine engine(kSekv);
  run(engine, 1, 100, 1);
  const std::vector<SequenceId> ids{1};
  const std::vector<std::int32_t> indptr{0, 1};
  const Array q = Array::full({1, 4, 16}, 1), out = Array::full({1, 4, 16}, std::nanf("")),
              lse = Array::full({1, 4}, std::nanf(""));
  engine.keeper.part<parts::Folds>().view(
      {.layer = 0, .sequences = ids, .indptr = indptr, .queries = q, .basis = QueryBasis::post_rope}, {out, lse});
  for (std::int64_t i = 0; i < out.numel(); ++i) EXPECT_TRUE(std::isnan(out.data<float>()[i])) << i;
}

// ---- Faults

/// What must be as it was.
struct Snapshot {
  explicit Snapshot(const FoldingEngine& engine, SequenceId id) {
    for (std::int32_t l = 0; l < FoldingEngine::kLayers; ++l) {
      for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h) {
        const auto kept = engine.keeper.positions(id, l, h);
        positions.insert(positions.end(), kept.begin(), kept.end());
        spans.push_back(engine.keeper.part<parts::Folds>().spans(id, l, h).size());
      }
      if (const auto* dense = std::get_if<DenseKv>(&engine.cache[static_cast<std::size_t>(l)]))
        keys.push_back(Array(dense->keys).clone());
    }
  }
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> spans;
  std::vector<Array> keys;
};

TEST(Fold, RefusesKeysThatAreNotNumbersBeforeAnythingMoves) {
  FoldingEngine engine(kSekv);
  run(engine, 7, 60, 0);
  engine.poison = std::nanf("");
  for (int i = 0; i < 2; ++i) engine.step({{7, 1}});
  engine.poison = 0;
  for (int i = 0; i < 5; ++i) engine.step({{7, 1}});
  const Snapshot before(engine, 7);
  // The tokens that are not numbers stand in the window until 8 leave it.
  std::string message;
  for (int i = 0; i < 40 && message.empty(); ++i) try {
      engine.step({{7, 1}});
    } catch (const InvalidArgument& e) {
      message = e.what();
    }
  EXPECT_NE(message.find("keys of span"), std::string::npos) << message;
  EXPECT_NE(message.find("of sequence 7, layer 1, head 1 hold NaN or infinity"), std::string::npos) << message;
  const Snapshot after(engine, 7);
  for (const std::int64_t spans : after.spans) EXPECT_EQ(spans, after.spans.front()) << "no row folded";
}

TEST(SpanLabel, IsToldAsFarAsItIsKnown) {
  EXPECT_EQ(text(SpanLabel{.sequence = 3, .layer = 2, .head = 0, .span = 17, .begin = 210, .end = 274}),
            "span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0");
  EXPECT_EQ(text(SpanLabel{}), "spans");
  EXPECT_EQ(text(SpanLabel{.layer = 0, .span = 0}), "span 0 of layer 0");
}

TEST(Fold, RefusesFactorsAboveTheirCapAndIsAsItWas) {
  constexpr std::int64_t kCap = 16 << 10;
  FoldingEngine engine(kSekv + ",memory.rank=max,memory.host_bytes=" + std::to_string(kCap), 2);
  engine.join(1), engine.join(2);
  engine.step({{1, 30}, {2, 30}});
  std::string message;
  std::int64_t held = 0;
  for (int steps = 0; steps < 300 && message.empty(); ++steps) {
    const Snapshot before(engine, 1);
    held = engine.keeper.part<parts::Folds>().far_bytes();
    EXPECT_EQ(held,
              engine.keeper.part<parts::Folds>().of(1).far_bytes + engine.keeper.part<parts::Folds>().of(2).far_bytes);
    try {
      engine.step({{1, 1}, {2, 1}});
    } catch (const StateError& e) {
      message = e.what();
      EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), held) << "nothing of the event stays";
      EXPECT_EQ(Snapshot(engine, 1).spans, before.spans);
    }
  }
  EXPECT_NE(message.find("no room for factors of span"), std::string::npos) << message;
  EXPECT_NE(message.find("host_bytes"), std::string::npos) << message;
  EXPECT_GT(held, kCap / 2);
  EXPECT_LE(held, kCap);
  engine.leave(1);
  EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), engine.keeper.part<parts::Folds>().of(2).far_bytes)
      << "the cap is of all sequences";
  engine.leave(2);
  EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), 0);
}

TEST(Fold, ComesAndGoesThousandsOfTimesUnderTheSameCap) {
#ifdef KVKEEP_SANITIZED
  constexpr SequenceId kTimes = 1000;
#else
  constexpr SequenceId kTimes = 10000;
#endif
  FoldingEngine engine("sekv,recent=4,interval=4,sink=1,memory.max_span=8,memory.min_span=2,memory.host_bytes=65536",
                       2);
  std::int64_t spans = 0;
  for (SequenceId id = 0; id < kTimes; ++id) {
    engine.join(id);
    engine.step({{id, static_cast<std::int32_t>(6 + id % 5)}});
    spans += engine.keeper.part<parts::Folds>().of(id).spans;
    if (id > 0) engine.leave(id - 1);
  }
  engine.leave(kTimes - 1);
  EXPECT_GT(spans, std::int64_t{kTimes});
  EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), 0);
}

// ---- Decisions that do not fit

/// Folds what it is told.
struct Told final : KVPolicy {
  explicit Told(Fold f) : fold(std::move(f)) {}
  [[nodiscard]] std::string_view name() const override { return "told"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override {
    return {.budget = {}, .interval = 1, .kind = Trigger::Kind::window, .recent = 0};
  }
  [[nodiscard]] const MemoryOptions* memory() const override { return &options; }
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override {
    Decision d;
    d.keep.emplace();
    d.keep->indptr.push_back(0);
    std::vector<std::int32_t> slots;
    for (const Row& row : evidence.table.rows) {
      for (std::int32_t slot = 4; slot < row.length; ++slot) slots.push_back(slot);
      d.keep->indptr.push_back(static_cast<std::int64_t>(slots.size()));
    }
    d.keep->slots = Array::empty({static_cast<std::int64_t>(slots.size())}, Dtype::i32);
    std::ranges::copy(slots, d.keep->slots.data<std::int32_t>());
    d.fold = fold;
    return d;
  }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  Fold fold;
  MemoryOptions options;
};

TEST(Fold, NoticesThatViewIsForgottenWhereASingleHeadHasFolded) {
  FoldingEngine engine("full");
  Keeper keeper(FoldingEngine::model(),
                std::make_unique<Told>(Fold{.slots = {0, 1, 2, 3}, .spans = {0, 4}, .indptr = {0, 0, 1, 1, 1}}),
                {.reads_folded = true});
  std::swap(engine.keeper, keeper);
  engine.keeper.bind(engine.cache);
  engine.join(1);
  engine.step({{1, 9}});
  ASSERT_EQ(engine.keeper.part<parts::Folds>().spans(1, 0, 0).size(), 0);
  ASSERT_EQ(engine.keeper.part<parts::Folds>().spans(1, 0, 1).size(), 1);
  engine.views = false;
  EXPECT_NE(message_of([&] { engine.step({{1, 1}}); }).find("call view() after each layer's attention"),
            std::string::npos);
}

TEST(Fold, RefusesSpansThatOverlapOrStayOrLieOutside) {
  const auto told = [](std::vector<std::int32_t> slots, std::vector<std::int64_t> spans) {
    Fold fold{.slots = std::move(slots), .spans = std::move(spans), .indptr = {0}};
    for (int r = 0; r < 4; ++r)
      fold.indptr.push_back(static_cast<std::int64_t>(fold.spans.size()) - 1);  // all in the first row
    return message_of([&] {
      FoldingEngine engine("full");
      Keeper keeper(FoldingEngine::model(), std::make_unique<Told>(fold), {.reads_folded = true});
      std::swap(engine.keeper, keeper);
      engine.keeper.bind(engine.cache);
      engine.join(1);
      engine.step({{1, 9}});
    });
  };
  EXPECT_NE(told({0, 1, 1, 2}, {0, 2, 4}).find("slot 1 of layer 0, head 0, span 1 is in span 0 too"),
            std::string::npos);
  EXPECT_NE(told({3, 4}, {0, 2}).find("slot 4 of layer 0, head 0, span 0 stays"), std::string::npos);
  EXPECT_NE(told({2, 9}, {0, 2}).find("slot 9 of layer 0, head 0, span 0 is outside the row; allowed 0 to 8"),
            std::string::npos);
  EXPECT_NE(told({0, 1}, {0, 1}).find("its tables do not match"), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::fold_test
