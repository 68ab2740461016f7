// SPDX-License-Identifier: Apache-2.0
// Scores that an engine gives to a keeper: they belong to their slots through chunks, events, rollback and files, and
// what does not fit is refused before anything is written.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>

#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/given.h"
#include "layer_by_layer_engine.h"
#include "message_of.h"
#include "oracle/allocators_oracle.h"
#include "oracle/random_case.h"

namespace kvkeep::give_test {
namespace {

using oracle::Random;
using testing::message_of;
using Ints = std::vector<std::int32_t>;
using Work = std::vector<std::pair<SequenceId, std::int32_t>>;

constexpr std::int32_t kLayers = 3, kHeads = 2, kRows = kLayers * kHeads, kCapacity = 256;
constexpr std::int32_t kFull[] = {0, 2};  // between them lies a layer that is not full

ModelSpec model() {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = kHeads;
  spec.key_dim = spec.value_dim = 1;
  spec.layers.resize(kLayers);
  spec.layers[1].kind = LayerKind::other;
  return spec;
}

/// What a plain program knows of one slot.
struct Slot {
  std::int32_t position = 0;
  float score = 0;
};

/// An engine whose keys are the positions of their slots, beside plain lists of what each row must hold.
class Engine {
 public:
  explicit Engine(const std::string& policy, std::uint64_t seed = 1)
      : keeper(model(), make_policy(policy), {.queries = false, .given_scores = true}), random(seed) {
    for (std::int32_t l = 0; l < kLayers; ++l)
      if (l == 1)
        layers.emplace_back();
      else
        layers.emplace_back(
            DenseKv{zeros({8, kHeads, kCapacity, 1}, Dtype::f32), zeros({8, kHeads, kCapacity, 1}, Dtype::f32)});
    keeper.bind(layers);
  }

  void join(SequenceId id, std::int32_t cached = 0, std::optional<std::int32_t> prompt = {}) {
    keeper.join(id, cached, prompt);
    rows[id].assign(kRows, {});
    lengths[id].assign(kRows, 0);
    append(id, cached);
    open[id] = cached;
  }

  /// New tokens without their scores.
  void observe(const Work& work) {
    name(work);
    for (const std::int32_t l : kFull) keeper.observe({.layer = l, .sequences = ids, .indptr = indptr});
    for (const auto& [id, tokens] : work) append(id, tokens), open[id] += tokens;
  }

  /// Scores of the oldest slots without, one call per layer. `known` of them: their true ones.
  void give(const Work& work, Dtype dtype = Dtype::f32, bool transposed = false) {
    name(work);
    for (const std::int32_t l : kFull) {
      const Tensor drawn = draw(l, dtype, transposed);
      keeper.part<parts::Given>().give({.layer = l, .sequences = ids, .indptr = indptr, .scores = drawn});
    }
    for (const auto& [id, tokens] : work) open[id] -= tokens;
  }

  void feed(const Work& work, Dtype dtype = Dtype::f32) {
    observe(work);
    Work missing;
    for (const auto& [id, tokens] : work) missing.emplace_back(id, open[id]);
    give(missing, dtype, random.chance(0.5));
  }

  Report step(const Work& work) {
    name(work);
    Ints flat, places;
    for (const SequenceId id : ids) {
      flat.insert(flat.end(), lengths[id].begin(), lengths[id].end());
      places.push_back(static_cast<std::int32_t>(id));
    }
    const Report report = keeper.step({ids, {flat, kRows}, places});
    for (std::size_t i = 0; i < ids.size(); ++i)
      std::copy_n(flat.begin() + static_cast<std::ptrdiff_t>(i) * kRows, kRows, lengths[ids[i]].begin());
    return report;
  }

  /// The plain program's turn at an event.
  void cut(SequenceId id, double threshold, std::int32_t budget, std::int32_t sink, std::int32_t recent) {
    for (std::vector<Slot>& row : rows[id]) {
      oracle::AllotHead head;
      head.T = static_cast<int>(row.size());
      head.sinks = std::min({sink, budget, head.T});
      head.recents = std::min(recent, std::min(budget, head.T) - head.sinks);
      for (const Slot& slot : row) head.scores.push_back(slot.score);
      std::vector<Slot> left;
      for (const int slot : oracle::threshold(head, std::min(budget, head.T), threshold))
        left.push_back(row[static_cast<std::size_t>(slot)]);
      row = left;
    }
  }

  void truncate(SequenceId id, std::int32_t tokens) {
    keeper.truncate(id, keeper.logical_length(id) - tokens);
    for (const std::int32_t l : kFull)
      for (std::int32_t h = 0; h < kHeads; ++h) {
        auto& row = rows[id][static_cast<std::size_t>(l * kHeads + h)];
        row.resize(row.size() - static_cast<std::size_t>(tokens));
        lengths[id][static_cast<std::size_t>(l * kHeads + h)] -= tokens;
      }
    open[id] = std::max(0, open[id] - tokens);
  }

  /// Keeper, cache and plain lists hold the same slots.
  void expect_as_plain(SequenceId id, const std::string& where) {
    for (const std::int32_t l : kFull)
      for (std::int32_t h = 0; h < kHeads; ++h) {
        const auto& want = rows[id][static_cast<std::size_t>(l * kHeads + h)];
        const auto got = keeper.positions(id, l, h);
        ASSERT_EQ(got.size(), want.size()) << where << ", layer " << l << ", head " << h;
        ASSERT_EQ(lengths[id][static_cast<std::size_t>(l * kHeads + h)], static_cast<std::int32_t>(want.size()));
        for (std::size_t t = 0; t < want.size(); ++t) {
          ASSERT_EQ(got[t], want[t].position) << where << ", layer " << l << ", head " << h << ", slot " << t;
          ASSERT_EQ(key(id, l, h, static_cast<std::int32_t>(t)), static_cast<float>(want[t].position)) << where;
        }
      }
  }

  float& key(SequenceId id, std::int32_t l, std::int32_t h, std::int32_t t) {
    return std::get<DenseKv>(layers[static_cast<std::size_t>(l)]).keys.data<float>()[(id * kHeads + h) * kCapacity + t];
  }

  Keeper keeper;
  Random random;
  std::vector<LayerKv> layers;
  std::map<SequenceId, std::vector<std::vector<Slot>>> rows;
  std::map<SequenceId, Ints> lengths;
  std::map<SequenceId, std::int32_t> open;  ///< newest slots without a score

 private:
  void name(const Work& work) {
    ids.clear(), indptr = {0};
    for (const auto& [id, tokens] : work) ids.push_back(id), indptr.push_back(indptr.back() + tokens);
  }
  void append(SequenceId id, std::int32_t tokens) {
    const auto first = static_cast<std::int32_t>(keeper.logical_length(id)) - tokens;
    for (const std::int32_t l : kFull)
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (std::int32_t t = 0; t < tokens; ++t) {
          auto& row = rows[id][static_cast<std::size_t>(l * kHeads + h)];
          key(id, l, h, static_cast<std::int32_t>(row.size())) = static_cast<float>(first + t);
          row.push_back({first + t, std::numeric_limits<float>::quiet_NaN()});
          ++lengths[id][static_cast<std::size_t>(l * kHeads + h)];
        }
  }
  /// Draws scores for the oldest open slots and writes them to the plain lists. Multiples of 1/8, exact in every dtype.
  Tensor draw(std::int32_t l, Dtype dtype, bool transposed) {
    const Tensor wide = empty({indptr.back(), kHeads}, Dtype::f32);
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::int32_t t = indptr[i]; t < indptr[i + 1]; ++t)
        for (std::int32_t h = 0; h < kHeads; ++h) {
          const float x =
              random.chance(0.05)
                  ? random.one_of({std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
                  : static_cast<float>(random.between(-60, 0)) / 8;
          wide.data<float>()[t * kHeads + h] = x;
          auto& row = rows[ids[i]][static_cast<std::size_t>(l * kHeads + h)];
          row[row.size() - static_cast<std::size_t>(open[ids[i]] - (t - indptr[i]))].score = x;
        }
    const Tensor narrow = dtype == Dtype::f16 ? as<Half>(wide) : dtype == Dtype::bf16 ? as<BFloat16>(wide) : wide;
    if (!transposed) return narrow;
    Tensor turned = empty({kHeads, indptr.back()}, dtype);
    const Tensor out(turned.bytes(), dtype, {indptr.back(), kHeads}, {1, indptr.back()}, {}, turned.owner());
    copy(narrow, out);
    return out;
  }

  std::vector<SequenceId> ids;
  Ints indptr;
};

struct Options {
  std::string policy;
  double threshold;
  std::int32_t budget, sink, recent;
};

const Options kBest{"given,budget=16,interval=5,sink=2,recent=3,prefill=cut", -std::numeric_limits<double>::infinity(),
                    16, 2, 3};
const Options kAbove{"threshold-given,threshold=-4,budget=24,interval=5,sink=2,recent=6,prefill=cut", -4, 24, 2, 6};

/// Steps of several sequences with prompts in chunks, drafts that are taken back, and scores that come in parts.
void run(const Options& o, std::uint64_t seed) {
  Engine engine(o.policy, seed);
  Random& random = engine.random;
  const std::string where = text("seed ", seed, ", ", o.policy);
  std::map<SequenceId, std::int32_t> prompt_left;
  for (const SequenceId id : {0, 1, 2}) {
    prompt_left[id] = random.between(1, 60);
    engine.join(id, 0, prompt_left[id]);
  }
  std::int64_t dropped = 0;
  for (int n = 0; n < 60; ++n) {
    Work work;
    for (auto& [id, left] : prompt_left) {
      if (random.chance(0.2)) continue;
      const std::int32_t tokens = left > 0 ? random.between(1, std::min(left, 25)) : random.one_of({1, 1, 1, 3});
      left = std::max(0, left - tokens);
      work.emplace_back(id, tokens);
    }
    const Dtype dtype = random.one_of({Dtype::f32, Dtype::f16, Dtype::bf16});
    if (random.chance(0.3)) {  // the scores come in two parts
      engine.observe(work);
      Work first = work, second = work;
      for (std::size_t i = 0; i < work.size(); ++i) {
        first[i].second = random.between(0, engine.open[work[i].first]);
        second[i].second = engine.open[work[i].first] - first[i].second;
      }
      engine.give(first, dtype);
      engine.give(second, dtype, true);
    } else {
      engine.feed(work, dtype);
    }
    for (const auto& [id, tokens] : work)
      if (prompt_left[id] == 0 && tokens == 3 && random.chance(0.6)) engine.truncate(id, random.between(1, 2));
    const Report report = engine.step(work);
    dropped += report.slots_dropped;
    for (const Cut& cut : report.cuts) engine.cut(cut.sequence, o.threshold, o.budget, o.sink, o.recent);
    for (const auto& [id, tokens] : work) ASSERT_NO_FATAL_FAILURE(engine.expect_as_plain(id, where));
  }
  EXPECT_GT(dropped, 0) << where;
}

TEST(Give, KeepsWhatAPlainProgramKeepsOverChunksRollbackAndRaggedSequences) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    run(kBest, seed);
    run(kAbove, seed);
    if (HasFatalFailure()) return;
  }
}

TEST(Give, EventsOfAThresholdComeEveryIntervalAndLeaveRowsUnequal) {
  Engine engine("threshold-given,threshold=-4,budget=200,interval=10,sink=1,recent=4,prefill=keep");
  engine.join(1);
  engine.feed({{1, 30}});
  EXPECT_TRUE(engine.step({{1, 30}}).cuts.empty()) << "prefill=keep";
  for (int n = 1; n <= 40; ++n) {
    engine.feed({{1, 1}});
    const Report report = engine.step({{1, 1}});
    ASSERT_EQ(report.cuts.size(), n % 10 == 0 ? 1U : 0U) << n;
    if (n % 10 == 0) engine.cut(1, -4, 200, 1, 4);
    ASSERT_NO_FATAL_FAILURE(engine.expect_as_plain(1, text("token ", n)));
  }
  std::map<std::int32_t, int> kinds;
  for (const std::int32_t l : kFull)
    for (std::int32_t h = 0; h < kHeads; ++h) ++kinds[engine.keeper.physical_length(1, l, h)];
  EXPECT_GT(kinds.size(), 1U) << "rows decide for themselves";
  EXPECT_LT(kinds.rbegin()->first, 70) << "far below the budget of 200";
}

TEST(Give, TakesScoresOfTokensThatWereCachedBefore) {
  Engine engine(kAbove.policy);
  engine.join(3, 40);
  engine.observe({{3, 1}});
  EXPECT_NE(message_of<StateError>([&] { engine.step({{3, 1}}); }).find("41 of the 41 slots of sequence 3"),
            std::string::npos);
  engine.give({{3, 41}});
  engine.step({{3, 1}});
}

TEST(Give, WorksBehindPromptsThatAreNarrowed) {
  using layer_by_layer::Side;
  layer_by_layer::Engine engine(
      "fastkv,budget=24,scorer.window=8,layers.layer=2+given,budget=16,interval=6,sink=1,recent=2");
  const SequenceId id = 1;
  engine.join(id);
  engine.step({{id, 60}});
  std::vector<Ints> before = engine.kept(id);
  EXPECT_EQ(before.front().size(), 60U);
  EXPECT_EQ(before.back().size(), 24U) << "the prompt was narrowed";
  std::int32_t next = 60;
  for (;; ++next) {
    for (Ints& row : before) row.push_back(next);
    if (!engine.step({{id, 1}}).cuts.empty()) break;
    ASSERT_EQ(engine.kept(id), before);
  }
  engine.expect_holds(id);
  for (std::int32_t r = 0; r < layer_by_layer::kRows; ++r) {
    const Ints& row = before[static_cast<std::size_t>(r)];
    oracle::AllotHead head{static_cast<int>(row.size()), 1, 2, {}, {}};
    for (const std::int32_t position : row) {
      float query[layer_by_layer::kKeyDim];
      layer_by_layer::fill(query, layer_by_layer::kKeyDim, id, r / layer_by_layer::kHeads, position, position,
                           r % layer_by_layer::kHeads, Side::query);
      head.scores.push_back(query[0]);
    }
    Ints want;
    for (const int slot : oracle::threshold(head, 16, -1e300)) want.push_back(row[static_cast<std::size_t>(slot)]);
    EXPECT_EQ(engine.kept(id)[static_cast<std::size_t>(r)], want) << "row " << r;
  }
}

TEST(Give, MustComeBeforeALayerOfAPromptIsNarrowed) {
  layer_by_layer::Engine engine("fastkv,budget=24,scorer.window=8,layers.layer=2+given,budget=16");
  engine.join(1);
  engine.begin({{1, 60}});
  engine.keeper.observe(engine.run(0));
  EXPECT_EQ(message_of<StateError>([&] { engine.narrow(0); }),
            "narrow: 60 of the 60 slots of sequence 1 have no given score in layer 0, but fastkv reads all; supply the "
            "rest with give()");
}

// ---- What does not fit ----------------------------------------------------------------------------------------------

TEST(Give, NamesWhatIsMissingAtTheStep) {
  Engine engine(kBest.policy);
  engine.join(1);
  engine.observe({{1, 9}});
  EXPECT_EQ(message_of<StateError>([&] { engine.step({{1, 9}}); }),
            "step: 9 of the 9 slots of sequence 1 have no given score in layer 0, but given reads all; supply the rest "
            "with give()");
  const SequenceId id = 1;
  const Ints indptr{0, 9}, two{0, 2};
  engine.keeper.part<parts::Given>().give(
      {.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .scores = zeros({9, 2}, Dtype::f32)});
  engine.keeper.part<parts::Given>().give(
      {.layer = 2, .sequences = {&id, 1}, .indptr = two, .scores = zeros({2, 2}, Dtype::f32)});
  EXPECT_NE(message_of<StateError>([&] { engine.step({{1, 9}}); })
                .find("7 of the 9 slots of sequence 1 have no given "
                      "score in layer 2"),
            std::string::npos);
}

TEST(Give, RefusesWithASentenceAndWritesNothing) {
  Engine engine(kBest.policy);
  engine.join(1);
  engine.join(2);
  engine.observe({{1, 3}, {2, 2}});
  const std::vector<SequenceId> both{1, 2};
  const Ints indptr{0, 3, 5};
  const auto refusal = [&](const GivenScores& scores) {
    return message_of<InvalidArgument>([&] { engine.keeper.part<parts::Given>().give(scores); });
  };
  const auto with = [&](Tensor scores) {
    return GivenScores{.layer = 0, .sequences = both, .indptr = indptr, .scores = std::move(scores)};
  };
  EXPECT_EQ(refusal(with({})), "give: layer 0 has no scores; policy given needs one for every token and KV head");
  EXPECT_EQ(refusal(with(zeros({5, 3}, Dtype::f32))), "give: scores of layer 0 have shape [5, 3]; allowed [5, 2]");
  EXPECT_EQ(refusal(with(zeros({10}, Dtype::f32))), "give: scores of layer 0 have shape [10]; allowed [5, 2]");
  EXPECT_EQ(refusal(with(zeros({5, 2}, Dtype::i32))), "give: scores of layer 0 are i32; allowed f32, f16, bf16");
  EXPECT_EQ(refusal({.layer = 3, .sequences = both, .indptr = indptr, .scores = zeros({5, 2}, Dtype::f32)}),
            "give: layer 3 is out of range; allowed 0 to 2");
  const Ints more{0, 4, 5}, falls{0, 3, 1};
  EXPECT_EQ(refusal({.layer = 0, .sequences = both, .indptr = more, .scores = zeros({5, 2}, Dtype::f32)}),
            "give: scores of 4 tokens of sequence 1 in layer 0; 3 of its slots there have none yet; allowed at most "
            "that many");
  EXPECT_NE(refusal({.layer = 0, .sequences = both, .indptr = falls, .scores = zeros({1, 2}, Dtype::f32)})
                .find("indptr falls"),
            std::string::npos);
  const std::vector<SequenceId> twice{1, 1}, unknown{1, 9};
  EXPECT_NE(refusal({.layer = 0, .sequences = twice, .indptr = indptr, .scores = zeros({5, 2}, Dtype::f32)})
                .find("named twice"),
            std::string::npos);
  EXPECT_THROW(engine.keeper.part<parts::Given>().give(
                   {.layer = 0, .sequences = unknown, .indptr = indptr, .scores = zeros({5, 2}, Dtype::f32)}),
               StateError);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const Tensor wide = zeros({5, 2}, Dtype::f32);
    wide.data<float>()[9] = std::numeric_limits<float>::quiet_NaN();
    const Tensor scores = dtype == Dtype::f16 ? as<Half>(wide) : dtype == Dtype::bf16 ? as<BFloat16>(wide) : wide;
    EXPECT_EQ(refusal(with(scores)),
              "give: the score of token 1 of sequence 2 in layer 0, KV head 1, is NaN; allowed "
              "numbers and infinities");
  }
  EXPECT_NO_THROW(engine.keeper.part<parts::Given>().give(with(zeros({5, 2}, Dtype::f32))))
      << "nothing of the above was written";
  EXPECT_NO_THROW(engine.keeper.part<parts::Given>().give({.layer = 1, .sequences = both, .indptr = indptr}))
      << "layer 1 is not full";
}

TEST(Give, IsNoPartOfAKeeperWhosePolicyReadsNoScores) {
  Keeper keeper(model(), make_policy("streaming,budget=9"));
  EXPECT_EQ(keeper.find<parts::Given>(), nullptr);
  EXPECT_NE(message_of<Unsupported>([&] {
              static_cast<void>(keeper.part<parts::Given>());
            }).find("part: streaming asks for no such part"),
            std::string::npos);
}

TEST(Give, AnEngineThatCannotIsToldBeforeAnythingRuns) {
  for (const char* policy : {"given,budget=9", "threshold-given,budget=9,threshold=-4"})
    EXPECT_NE(message_of<InvalidArgument>([&] { Keeper(model(), make_policy(policy)); })
                  .find("given_scores: " + std::string(make_policy(policy)->name()) +
                        " reads a score of every token and KV head, but the engine does not say that it supplies them "
                        "with give()"),
              std::string::npos);
}

// ---- Files ----------------------------------------------------------------------------------------------------------

struct File {
  std::filesystem::path path = std::filesystem::temp_directory_path() / text("kvkeep-give-", ::getpid());
  ~File() { std::filesystem::remove(path); }
};

TEST(Give, ASavedSequenceGoesOnWithItsScores) {
  for (const Options& o : {kBest, kAbove}) {
    const File file;
    Engine engine(o.policy, 5);
    engine.join(1, 0, 30);
    const auto go = [&](Engine& e, SequenceId id, std::int32_t tokens) {
      e.feed({{id, tokens}});
      for (const Cut& cut : e.step({{id, tokens}}).cuts) e.cut(cut.sequence, o.threshold, o.budget, o.sink, o.recent);
      e.expect_as_plain(id, o.policy);
    };
    go(engine, 1, 30);
    for (int n = 0; n < 3; ++n) go(engine, 1, 1);
    engine.observe({{1, 2}});  // their scores come after the file
    engine.keeper.save(1, file.path);

    Engine other(o.policy, 6);
    other.keeper.restore(7, file.path);
    other.rows[7] = engine.rows[1], other.lengths[7] = engine.lengths[1], other.open[7] = 2;
    for (const std::int32_t l : kFull)
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (std::int32_t t = 0; t < kCapacity; ++t) other.key(7, l, h, t) = engine.key(1, l, h, t);
    EXPECT_NE(message_of<StateError>([&] { other.step({{7, 2}}); }).find("2 of the "), std::string::npos);
    for (int n = 0; n < 20; ++n) ASSERT_NO_FATAL_FAILURE(go(other, 7, 1));
    EXPECT_THROW(Keeper(model(), make_policy("streaming,budget=9"), {.queries = false}).restore(1, file.path),
                 InvalidArgument);
  }
}

}  // namespace
}  // namespace kvkeep::give_test
