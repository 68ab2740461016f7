// SPDX-License-Identifier: Apache-2.0
// Forks, and state in memory: a copy goes on as what it was copied from, whatever its policy keeps of it.

#include "forked.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "folding_engine.h"
#include "kvkeep/keeper/copy_rows.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/pins.h"
#include "message_of.h"

namespace kvkeep::fork_test {
namespace {

using namespace engines;
using testing::FoldingEngine;
using testing::message_of;

class Fork : public ::testing::TestWithParam<EngineCase> {};

TEST_P(Fork, GoesOnAsItsParent) {
  for (const bool paged : {false, true}) {
    SCOPED_TRACE(paged ? "pages" : "dense");
    const auto engine = engine_of(GetParam(), paged, PageLayout::head_slot);
    ASSERT_NO_FATAL_FAILURE(expect_forks_go_on(*engine));
  }
}

TEST_P(Fork, OfAPrefixScoresAsIfItHadRunIt) {
  for (const bool paged : {false, true}) {
    SCOPED_TRACE(paged ? "pages" : "dense");
    const auto engine = engine_of(GetParam(), paged, PageLayout::head_slot);
    ASSERT_NO_FATAL_FAILURE(expect_prefix_hits_score_as_if_run(*engine));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, Fork,
    ::testing::Values(EngineCase{"amstova",
                                 "ams-tova,credit=true,budget=32,interval=8,sink=2,recent=8,window=4,min_segment=2"},
                      EngineCase{"h2o", "h2o,budget=32,interval=8,sink=2,recent=8"},
                      EngineCase{"rkv", "rkv,budget=32,interval=8,recent=8"},
                      EngineCase{"snapkv", "snapkv,budget=32,interval=8,sink=2,window=6,prefill=cut"},
                      EngineCase{"expected", "expected,budget=32,interval=8,sink=2,recent=8"},
                      EngineCase{"given", "given,budget=32,interval=8,sink=2"},
                      EngineCase{"prompt", "tova,budget=80,interval=8,recent=2,protect_prompt=true"},
                      EngineCase{"union", "tova,budget=32,interval=8,recent=8,share=union"},
                      EngineCase{"adakv", "adakv-snapkv,budget=32,interval=8,window=6", true},
                      EngineCase{"pyramidkv", "pyramidkv-knorm,budget=32,interval=8,recent=4", true}),
    [](const auto& p) { return std::string(p.param.name); });

TEST(ForkOfASequence, TakesPinsAndFoldedSpansAlong) {
  FoldingEngine engine("ams-tova,budget=32,interval=8,recent=8,window=4,rest=fold,memory.max_span=16,memory.min_span=4",
                       3);
  engine.join(1);
  engine.step({{1, 90}});
  for (int i = 0; i < 20; ++i) engine.step({{1, 1}});
  auto& folds = engine.keeper.part<parts::Folds>();
  ASSERT_GT(folds.of(1).spans, 0);
  const std::int64_t far = folds.far_bytes();
  engine.keeper.part<parts::Pins>().pin(1, 0, 2);
  engine.keeper.fork(9, 1);
  EXPECT_EQ(folds.of(9).spans, folds.of(1).spans);
  EXPECT_EQ(folds.of(9).tokens, folds.of(1).tokens);
  EXPECT_EQ(folds.far_bytes(), 2 * far) << "the cap counts both";
  EXPECT_EQ(engine.keeper.part<parts::Pins>().pinned(9).size(), 1U);
  engine.keeper.leave(9);
  EXPECT_EQ(folds.far_bytes(), far);
}

TEST(ForkOfASequence, RefusesWhatItCannotCopyAndChangesNothing) {
  DenseEngine engine("tova,budget=32,interval=8,recent=8", false, Dtype::f32);
  oracle::Random random(3);
  engine.join(1);
  engine.step(numbers_of(random, {{1, 40}}));
  engine.step(numbers_of(random, {{1, 1}}));
  Keeper& keeper = engine.keeper;
  ASSERT_EQ(keeper.totals().events, 1);
  for (int i = 0; i < 3; ++i) engine.step(numbers_of(random, {{1, 1}}));
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(1, 1); }), "fork: sequence 1 is already here; allowed a free id");
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(2, 7); }),
            "fork: sequence 7 is not known; allowed after join(7), and before leave(7)");
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(2, 1, 30); }),
            "fork: sequence 1 was cut at length 41 and what was dropped then is gone; given 30; allowed 41 or more");
  EXPECT_EQ(message_of<InvalidArgument>([&] { keeper.fork(2, 1, 45); }),
            "fork: sequence 1 is 44 tokens long; given 45; allowed 0 to that");
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(2, 1, 44, 60); }),
            "fork: sequence 2 was cut at length 41, so no prompt of 60 tokens can begin with it; allowed the prompt "
            "that it had, 40, or a sequence that no event has cut");
  EXPECT_EQ(message_of<StateError>([&] { keeper.restore(2, keeper.save(1), 60); }),
            "restore: sequence 2 was cut at length 41, so no prompt of 60 tokens can begin with it; allowed the prompt "
            "that it had, 40, or a sequence that no event has cut");
  EXPECT_FALSE(keeper.knows(2));
  keeper.fork(2, 1, 42);
  EXPECT_EQ(keeper.logical_length(2), 42);
  EXPECT_EQ(keeper.physical_length(2, 0, 0), 33);

  engine.join(3);
  engine.step(numbers_of(random, {{3, 50}}));
  for (int i = 0; i < 3; ++i) keeper.fork(10 + i, 3, 50 - 10 * i, 60);
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(20, 3, 10); }),
            "fork: 40 tokens of sequence 3 are more than the query ring can take back; allowed at most 32");
  EXPECT_EQ(message_of<InvalidArgument>([&] { keeper.fork(20, 3, 50, 40); }),
            "fork: sequence 20 has a prompt of 40 tokens and 50 of them cached; allowed at least the number cached");

  // A plan does not know that pages have one holder more since.
  const Plan before = engine.plan({1});
  keeper.fork(21, 1);
  std::vector<std::int32_t> lengths{36};
  const std::vector<SequenceId> ids{1};
  const std::vector<std::int32_t> places{1};
  EXPECT_THROW(static_cast<void>(keeper.apply(before, {.sequences = ids, .lengths = {lengths}, .places = places})),
               StateError);

  // In the middle of a step.
  const std::int32_t indptr[] = {0, 1};
  keeper.observe(
      {.layer = 0, .sequences = ids, .indptr = indptr, .queries = testing::normals(random, {1, 4, kKeyDim})});
  EXPECT_EQ(message_of<StateError>([&] { keeper.fork(22, 1); }).substr(0, 30), "fork: layer 1 has shown 44 of ");
  EXPECT_FALSE(keeper.knows(22));
}

TEST(StateInMemory, OfAWholePromptGoesOnAsIfItHadBeenRun) {
  for (const char* policy :
       {"tova,budget=40,interval=8,recent=4", "tova,budget=40,interval=8,recent=4,trigger=counter"}) {
    SCOPED_TRACE(policy);
    DenseEngine engine(policy, false, Dtype::f32);
    oracle::Random random(8);
    engine.keeper.join(1, 0, 48), engine.lengths[1] = Ints(kRows, 0);
    engine.feed(numbers_of(random, {{1, 48}}));
    engine.keeper.restore(2, engine.keeper.save(1), 48);  // saved before the step, as a prefix cache does
    share_rows(engine, 2, 1);
    static_cast<void>(engine.cut({1}));
    ASSERT_NO_FATAL_FAILURE(expect_go_on_alike(engine, random, {1, 2}, 30));
  }
}

TEST(StateInMemory, OfWhichAPrefixIsTakenIsAsItWasThereOrRefused) {
  DenseEngine engine("tova,budget=32,interval=8,recent=8", false, Dtype::f32);
  oracle::Random random(3);
  engine.keeper.join(1, 0, kOpenPrompt), engine.lengths[1] = Ints(kRows, 0);
  engine.step(numbers_of(random, {{1, 50}}));
  Keeper& keeper = engine.keeper;
  const std::vector<std::byte> state = keeper.save(1);
  EXPECT_EQ(message_of<InvalidArgument>([&] { keeper.restore(2, state, {}, 51); }),
            "restore: sequence 2 is 50 tokens long; given 51; allowed 0 to that");
  EXPECT_EQ(message_of<StateError>([&] { keeper.restore(2, state, {}, 17); }),
            "restore: 33 tokens of sequence 2 are more than the query ring can take back; allowed at most 32");
  EXPECT_EQ(message_of<InvalidArgument>([&] { keeper.restore(2, state, 40, 41); }),
            "restore: sequence 2 has a prompt of 40 tokens and 41 of them cached; allowed at least the number cached");
  EXPECT_FALSE(keeper.knows(2));
  keeper.restore(2, state, 60, 18);
  EXPECT_EQ(keeper.logical_length(2), 18);
  EXPECT_EQ(keeper.physical_length(2, 1, 1), 18);
  EXPECT_EQ(keeper.prompt_length(2), 60);

  engine.join(3);
  engine.step(numbers_of(random, {{3, 40}}));
  for (int i = 0; i < 4; ++i) engine.step(numbers_of(random, {{3, 1}}));
  EXPECT_EQ(message_of<StateError>([&] { keeper.restore(4, keeper.save(3), {}, 40); }),
            "restore: sequence 4 was cut at length 41 and what was dropped then is gone; given 40; allowed 41 or more");
  keeper.restore(4, keeper.save(3), {}, 42);
  EXPECT_EQ(keeper.physical_length(4, 0, 0), 33);
}

TEST(StateInMemory, OfAPrefixHitBeginsWithoutThePinsOfTheRequestThatWasSaved) {
  DenseEngine engine("tova,budget=64,interval=8,recent=8", false, Dtype::f32);
  oracle::Random random(3);
  engine.keeper.join(1, 0, kOpenPrompt), engine.lengths[1] = Ints(kRows, 0);
  engine.step(numbers_of(random, {{1, 50}}));
  Keeper& keeper = engine.keeper;
  auto& pins = keeper.part<parts::Pins>();
  pins.pin(1, 10, 20), pins.pin(1, 70, 95);  // the latter are tokens to come, which are another request's own
  keeper.restore(2, keeper.save(1), 104);
  keeper.fork(3, 1, {}, 104);
  keeper.restore(4, keeper.save(1));
  keeper.fork(5, 1);
  for (const SequenceId hit : {2, 3}) EXPECT_EQ(pins.pinned(hit).size(), 0U) << hit;
  for (const SequenceId same : {4, 5}) EXPECT_EQ(pins.pinned(same).size(), 2U) << same;
}

TEST(StateInMemory, HoldsTheBytesOfTheFile) {
  DenseEngine engine("tova,budget=32,interval=8,recent=8", false, Dtype::f32);
  oracle::Random random(4);
  engine.join(1);
  engine.step(numbers_of(random, {{1, 50}}));
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / text("kvkeep-state-", ::getpid(), ".safetensors");
  engine.keeper.save(1, file);
  std::ifstream in(file, std::ios::binary);
  const std::string there{std::istreambuf_iterator<char>(in), {}};
  std::filesystem::remove(file);
  std::vector<std::byte> here = engine.keeper.save(1);
  ASSERT_EQ(here.size(), there.size());
  EXPECT_EQ(std::memcmp(here.data(), there.data(), here.size()), 0);
  for (const std::size_t at : {here.size() / 2, here.size() - 1}) {
    std::vector<std::byte> damaged = here;
    damaged[at] ^= std::byte{1};
    EXPECT_THROW(engine.keeper.restore(2, damaged), InvalidArgument) << at;
  }
  EXPECT_EQ(message_of<InvalidArgument>([&] { engine.keeper.restore(2, std::span(here).first(4)); }),
            "read safetensors: the saved state has 4 bytes; allowed 8 or more (the header's length comes first)");
  EXPECT_FALSE(engine.keeper.knows(2));
}

TEST(CopyRows, BringsThemBackInOtherPlacesAndPages) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16})
    for (const bool ragged : {false, true}) {
      SCOPED_TRACE(text(ragged ? "ragged" : "even", dtype));
      const std::string policy = ragged ? "adakv-snapkv,budget=20,interval=4,window=6" : "tova,budget=20,interval=4";
      PagedEngine here(policy, ragged, dtype, 4, PageLayout::slot_head, Form::pages_first);
      DenseEngine there(policy, ragged, dtype);
      oracle::Random random(6);
      here.join(3), here.join(5);
      for (int i = 0; i < 30; ++i) here.step(numbers_of(random, {{3, 1 + i % 3}, {5, 2}}));
      ASSERT_GT(here.keeper.totals().events, 0);
      const auto view_of = [&](Engine& engine, std::vector<SequenceId>& ids, Ints& lengths) {
        lengths.clear();
        for (const SequenceId id : ids)
          lengths.insert(lengths.end(), here.lengths.at(id).begin(),
                         here.lengths.at(id).begin() + (ragged ? kRows : 1));
        CacheView view{.sequences = ids, .lengths = {lengths, ragged ? kRows : 1}};
        if (auto* const paged = dynamic_cast<PagedEngine*>(&engine)) view.block_table = paged->sequences.table(ids);
        return view;
      };
      std::vector<SequenceId> both{3, 5}, one{5};
      Ints lengths, lengths_there;
      const Ints places{7};
      const std::vector<std::byte> rows =
          copy_rows(here.keeper.spec(), here.keeper.layers(), view_of(here, both, lengths), 1);
      CacheView to = view_of(there, one, lengths_there);
      to.places = places;
      restore_rows(there.keeper.spec(), there.keeper.layers(), to, 0, rows);
      for (std::int32_t r = 0; r < kRows; ++r)
        for (std::int32_t t = 0; t < here.lengths.at(5)[static_cast<std::size_t>(r)]; ++t)
          for (const Sided side : kAllSides)
            ASSERT_TRUE(same_bits(here.slot_of(5, r / kHeads, r % kHeads, t, side),
                                  there.slot_of(7, r / kHeads, r % kHeads, t, side)));
      EXPECT_THROW(restore_rows(there.keeper.spec(), there.keeper.layers(), to, 0, std::span(rows).first(8)),
                   InvalidArgument);
      EXPECT_EQ(message_of<InvalidArgument>(
                    [&] { static_cast<void>(copy_rows(there.keeper.spec(), there.keeper.layers(), to, 1)); }),
                "rows: sequence at index 1 of a view of 1; allowed one of them");
    }
}

}  // namespace
}  // namespace kvkeep::fork_test
