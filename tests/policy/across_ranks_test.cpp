// SPDX-License-Identifier: Apache-2.0
// Ranks that hold a part of the heads keep what one machine keeps that holds all of them, whatever the policy; and an
// error on one is an error on all, before anything moves.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "kvkeep/score/recency.h"
#include "message_of.h"
#include "rank_engine.h"
#include "threads_collective.h"

namespace kvkeep::across_ranks_test {
namespace {

using testing::message_of;
using testing::RankEngine;
using testing::ThreadRanks;

using Row = std::tuple<int, SequenceId, std::int32_t, std::int32_t>;  ///< step, sequence, layer, KV head of the model
using Kept = std::map<Row, std::vector<std::int32_t>>;

/// Budget and events of these runs, with few protected slots, so that scores decide.
constexpr const char* kSmall = "budget=24,interval=6,sink=2,recent=4";

/// What is kept after every step of the same run.
Kept run(RankEngine& engine, int steps) {
  Kept kept;
  engine.begin_run<Unsupported>();  // official forms pin nothing
  for (int n = 0; n < steps; ++n) {
    engine.step(RankEngine::work_of_step(n));
    engine.settle();
    if (n == 0) engine.run_second_pass();
    for (const SequenceId id : {1, 2})
      for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
        for (std::int32_t h = 0; h < RankEngine::kHeads; ++h) {
          if (!engine.has(h)) continue;
          kept[{n, id, l, h}] = engine.positions(id, l, h);
          EXPECT_TRUE(engine.holds(id, l, h)) << "sequence " << id << ", layer " << l << ", head " << h;
        }
  }
  EXPECT_GT(engine.keeper.totals().events, 0);
  return kept;
}

/// Gathers of a run on `size` ranks, all of which keep what one machine keeps.
int expect_alike(const std::string& policy, std::int32_t size, const Kept& alone) {
  SCOPED_TRACE(text(policy, " on ", size, " ranks"));
  ThreadRanks ranks(size);
  std::mutex mutex;
  Kept together;
  ranks.run([&](const std::shared_ptr<Collective>& own) {
    RankEngine engine(policy, own);
    Kept kept = run(engine, 30);
    const std::scoped_lock lock(mutex);
    together.merge(kept);
  });
  EXPECT_EQ(together.size(), alone.size());
  for (const auto& [row, positions] : alone) {
    if (together[row] == positions) continue;
    const auto [step, id, layer, head] = row;
    ADD_FAILURE() << "step " << step << ", sequence " << id << ", layer " << layer << ", head " << head;
    break;
  }
  return ranks.gathers();
}

TEST(AcrossRanks, KeepWhatOneMachineKeepsWithAsManyGathersOnAnyNumberOfRanks) {
  for (const std::string& policy :
       {text("tova,heads=group,", kSmall), text("tova,rest=fold,memory.max_span=8,memory.min_span=3,", kSmall),
        text("chunkkv-tova,allocator.heads=own,", kSmall),
        text("criticalkv-snapkv,scorer.window=6,allocator.heads=adaptive,", kSmall),
        text("adakv-given,protect_prompt=true,", kSmall), text("rpc,heads=all,window=6,", kSmall),
        text("ams-rpc,scorer.heads=all,scorer.window=6,allocator.window=6,min_segment=2,max_segment=12,", kSmall),
        text("ams-tova,variant=official,allocator.window=6,min_segment=2,max_segment=12,", kSmall),
        text("ams-keydiff,suffix_fill=max_global,allocator.window=6,min_segment=2,max_segment=12,", kSmall),
        std::string("knorm,bytes=20000,interval=6,sink=2,recent=4"),
        text("asl,budget=24,scorer.window=6,min_layer=0,select_mass=0.8+tova,", kSmall),
        text("asl,budget=24,scorer.window=6,cache_mass=0.7+knorm,", kSmall)}) {
    SCOPED_TRACE(policy);
    RankEngine engine(policy);
    const Kept alone = run(engine, 30);
    EXPECT_EQ(expect_alike(policy, 2, alone), expect_alike(policy, 4, alone));
  }
}

TEST(AcrossRanks, GatherOnceAnEventOrNotAtAll) {
  const std::string segments = "allocator.window=6,min_segment=2,max_segment=12,";
  for (const auto& [policy, gathers] :
       std::vector<std::pair<std::string, int>>{{"ams-keydiff," + segments, 0},
                                                {"pyramidkv-knorm,", 0},
                                                {"random,", 0},
                                                {"rkv,scorer.window=6,", 0},
                                                {"rpc,window=6,", 0},
                                                {"rpc,window=6,heads=all,", 1},
                                                {"tova,", 1},
                                                {"adakv-tova,", 1},
                                                {"threshold-knorm,threshold=-2,", 1},
                                                {"ams-keydiff,suffix_fill=max_global," + segments, 1},
                                                {"ams-tova,suffix_fill=max_global," + segments, 2}}) {
    RankEngine alone(policy + kSmall);
    const Kept kept = run(alone, 30);
    EXPECT_EQ(expect_alike(policy + kSmall, 2, kept), gathers * alone.keeper.totals().events) << policy;
  }
}

/// A prompt of 200 tokens in pieces of 20, then 30 tokens and an event that every rank names.
TEST(AcrossRanks, CutAPromptInPiecesAndWhatIsNamedAsOneMachineDoes) {
  const auto kept_by = [](RankEngine& engine) {
    engine.join(1, 200);
    Kept kept;
    for (int n = 0; n < 41; ++n) {
      engine.observe({{1, n < 10 ? 20 : n < 40 ? 1 : 0}});
      CacheView view = engine.view();
      if (n == 40) view.named = engine.ids;
      EXPECT_EQ(engine.keeper.step(view).wait().cuts.size(), (n > 0 && n < 10) || n == 40 ? 1U : 0U) << n;
      engine.settle();
      for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
        for (std::int32_t h = 0; h < RankEngine::kHeads; ++h)
          if (engine.has(h)) kept[{n, 1, l, h}] = engine.positions(1, l, h);
    }
    return kept;
  };
  for (const std::string policy : {"tova,", "adakv-snapkv,scorer.window=6,"}) {
    const std::string pieces = policy + kSmall + ",prefill=pieces,trigger=named";
    RankEngine one(pieces);
    const Kept alone = kept_by(one);
    ThreadRanks ranks(2);
    std::mutex mutex;
    Kept together;
    ranks.run([&](const std::shared_ptr<Collective>& own) {
      RankEngine engine(pieces, own);
      Kept kept = kept_by(engine);
      const std::scoped_lock lock(mutex);
      together.merge(kept);
    });
    EXPECT_EQ(together, alone) << policy;
  }
}

TEST(AcrossRanks, GoOnAfterTheyWereSavedAndRestored) {
  for (const char* policy : {"adakv-tova,budget=24,interval=6,sink=2,recent=4",
                             "threshold-knorm,budget=24,interval=6,sink=2,recent=4,threshold=-2"}) {
    RankEngine alone(policy);
    const Kept kept = run(alone, 30);
    ThreadRanks ranks(2);
    ranks.run([&](const std::shared_ptr<Collective>& own) {
      const std::filesystem::path file =
          std::filesystem::path(::testing::TempDir()) / text("rank-", ::getpid(), "-", own->rank(), ".safetensors");
      RankEngine before(policy, own);
      static_cast<void>(run(before, 16));
      before.keeper.save(1, file);
      RankEngine after(policy, own);
      after.keeper.restore(1, file);
      std::filesystem::remove(file);
      after.layers = before.layers, after.lengths = before.lengths, after.fed = before.fed;
      after.keeper.bind(after.layers);
      for (int n = 16; n < 30; ++n) {
        after.step({{1, n % 5 == 0 ? 3 : 1}});
        after.settle();
      }
      EXPECT_GT(after.keeper.totals().events, 0);
      for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
        for (std::int32_t h = 0; h < RankEngine::kHeads; ++h)
          EXPECT_TRUE(!after.has(h) || after.positions(1, l, h) == kept.at({29, 1, l, h})) << policy;
    });
  }
}

// ---- Errors

/// Everything that an event may write.
std::vector<float> bytes_of(const RankEngine& engine) {
  std::vector<float> all;
  for (const LayerKv& layer : engine.layers)
    for (const Tensor& side : {std::get<DenseKv>(layer).keys, std::get<DenseKv>(layer).values})
      all.insert(all.end(), side.data<float>(), side.data<float>() + side.numel());
  return all;
}

/// What each of two ranks says when rank 1 does as `wrong` says; nothing has moved on either.
std::vector<std::string> said(const std::string& policy, const std::function<void(RankEngine&, ThreadRanks&)>& wrong) {
  ThreadRanks ranks(2);
  std::vector<std::string> words(2);
  ranks.run([&](const std::shared_ptr<Collective>& own) {
    RankEngine engine(policy, own);
    engine.join(1);
    engine.observe({{1, 24}});
    static_cast<void>(engine.keeper.step(engine.view()));
    engine.settle();
    engine.observe({{1, 8}});
    const auto rank = static_cast<std::size_t>(own->rank());
    const std::vector<float> before = bytes_of(engine);
    const std::vector<std::int32_t> lengths = engine.flat;
    const auto step = [&] {
      if (rank == 1) wrong(engine, ranks);
      static_cast<void>(engine.keeper.step(engine.view()));
    };
    words[rank] = rank == 1 ? message_of(step) : message_of<RankError>(step);
    if (rank == 1) return;  // it changed its cache by itself
    EXPECT_EQ(bytes_of(engine), before);
    EXPECT_EQ(engine.flat, lengths);
  });
  return words;
}

TEST(AcrossRanks, ARankThatIsLostIsAnErrorOnTheOthersAndNothingMoved) {
  for (const char* policy :
       {"tova,budget=24,interval=6,sink=2,recent=4", "adakv-tova,budget=24,interval=6,sink=2,recent=4",
        "threshold-knorm,budget=24,interval=6,sink=2,recent=4,threshold=-2"}) {
    const auto words = said(policy, [](RankEngine&, ThreadRanks& ranks) {
      ranks.lose();
      refuse<RankError>("gone");
    });
    EXPECT_NE(words[0].find("a rank did not come"), std::string::npos) << policy << ": " << words[0];
  }
}

TEST(AcrossRanks, AnErrorOfOneRankIsSaidOnAllOfThem) {
  // Keys that cannot be read are an error of the scorer, before anything is sent.
  const char* const policy = "adakv-snapkv,budget=24,interval=6,sink=2,recent=4,scorer.window=6";
  const auto words = said(policy, [](RankEngine& engine, ThreadRanks&) {
    const std::vector<std::int64_t> sizes{4, 2, RankEngine::kCapacity, RankEngine::kDim};
    for (LayerKv& layer : engine.layers) layer = DenseKv{zeros(sizes, Dtype::u8), zeros(sizes, Dtype::u8)};
    engine.keeper.bind(engine.layers);
  });
  EXPECT_NE(words[0].find("rank 1 failed: "), std::string::npos) << words[0];
}

TEST(AcrossRanks, InDifferentEventsRefuseOnAllOfThem) {
  const auto words = said("tova,budget=24,interval=6,sink=2,recent=4", [](RankEngine& engine, ThreadRanks&) {
    engine.keeper.truncate(1, 31);
    for (std::int32_t& length : engine.flat) --length;
  });
  for (const std::string& one : words) EXPECT_FALSE(one.empty());
}

TEST(AcrossRanks, UnderDifferentPoliciesRefuseOnAllOfThem) {
  ThreadRanks ranks(2);
  ranks.run([&](const std::shared_ptr<Collective>& own) {
    const std::string scorer = own->rank() == 0 ? "tova" : "h2o";
    RankEngine engine("adakv-" + scorer + ",budget=24,interval=6,sink=2,recent=4,prefill=cut", own);
    engine.join(1);
    engine.observe({{1, 40}});
    const std::string said = message_of<RankError>([&] { static_cast<void>(engine.keeper.step(engine.view())); });
    EXPECT_NE(said.find("are in different events"), std::string::npos) << said;
  });
}

/// Says nothing of its heads.
class Silent final : public KVPolicy {
 public:
  [[nodiscard]] std::string_view name() const override { return "silent"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = 24}, .interval = 6}; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
};

TEST(AcrossRanks, APolicyThatDoesNotSayWhatItsHeadsMustKnowIsRefusedWhenTheKeeperIsMade) {
  const auto make = [](const std::shared_ptr<Collective>& own) {
    const Keeper keeper(RankEngine::model(RankEngine::kHeads / own->size()), std::make_unique<Silent>(),
                        {.accelerator = across_ranks(own)});
  };
  ThreadRanks(1).run(make);  // it holds all heads
  ThreadRanks(2).run([&](const std::shared_ptr<Collective>& own) {
    const std::string words = message_of<Error>([&] { make(own); });
    EXPECT_NE(words.find("silent does not say what heads must know of each other; given 2 of 4 KV heads"),
              std::string::npos)
        << words;
  });
}

/// Recency that says that it looks at other heads.
class Beside final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const override { return "beside"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::scores; }
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override {
    return Recency().score(evidence, limits, seen);
  }
};

TEST(AcrossRanks, AScorerThatReadsOtherHeadsIsRefusedWhereARankHoldsAPart) {
  const auto make = [](const std::shared_ptr<Collective>& own) {
    const Keeper keeper(RankEngine::model(RankEngine::kHeads / own->size()),
                        std::make_unique<Evict>("beside", std::make_unique<Beside>(), std::make_unique<Flat>(),
                                                Retention{.trigger = {.budget = {.slots = 24}, .interval = 6}}),
                        {.accelerator = across_ranks(own)});
  };
  ThreadRanks(1).run(make);  // it holds all heads
  ThreadRanks(2).run([&](const std::shared_ptr<Collective>& own) {
    const std::string words = message_of<Error>([&] { make(own); });
    EXPECT_NE(words.find("scorer beside reads the rows of other heads"), std::string::npos) << words;
  });
}

TEST(AcrossRanks, ARankOutsideTheCollectiveIsRefused) {
  EXPECT_NE(message_of<InvalidArgument>([] { static_cast<void>(across_ranks(nullptr)); }).find("no collective"),
            std::string::npos);
}

}  // namespace
}  // namespace kvkeep::across_ranks_test
