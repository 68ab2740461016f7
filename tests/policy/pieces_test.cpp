// SPDX-License-Identifier: Apache-2.0
// Prompts that are cut while they come in, and events that the program names: against a second implementation that
// replays the scorer piece by piece.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "engines.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/policy/registry.h"
#include "message_of.h"
#include "oracle/event_oracle.h"
#include "oracle/expected_oracle.h"
#include "oracle/key_oracle.h"
#include "oracle/rkv_oracle.h"
#include "oracle/window_oracle.h"

namespace kvkeep::pieces_test {
namespace {

using namespace engines;
using testing::message_of;

constexpr std::int32_t kBudget = 24, kInterval = 6, kSink = 2, kRecent = 4;

/// One sequence in plain numbers, cut by a second implementation of the scorer.
class Replay {
 public:
  using Score = std::function<oracle::ScorerOutput(const oracle::ScorerInput&)>;
  explicit Replay(Score score) : score_(std::move(score)) {}
  explicit Replay(oracle::Options options) : options_(std::move(options)) {}

  void grow(const Numbers& step) {
    const std::int32_t tokens = step.indptr.back();
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Layer& layer = layers_[static_cast<std::size_t>(l)];
      const auto i = static_cast<std::size_t>(l);
      for (std::int32_t t = 0; t < tokens; ++t) {
        for (std::int32_t h = 0; h < kHeads; ++h) {
          Head& head = layer.heads[static_cast<std::size_t>(h)];
          head.positions.push_back(seen_ + t);
          const float *key = step.keys[i][t][h].data<float>(), *value = step.values[i][t][h].data<float>();
          head.keys.insert(head.keys.end(), key, key + kKeyDim);
          head.values.insert(head.values.end(), value, value + kValueDim);
        }
        for (std::int32_t q = 0; q < 4; ++q) {
          const float* query = step.queries[i][t][q].data<float>();
          layer.queries[static_cast<std::size_t>(q)].emplace_back(query, query + kKeyDim);
        }
      }
    }
    seen_ += tokens;
  }

  [[nodiscard]] std::int32_t slots() const { return static_cast<std::int32_t>(layers_[0].heads[0].positions.size()); }
  [[nodiscard]] const std::vector<int>& kept(std::int32_t layer, std::int32_t head) const {
    return layers_[static_cast<std::size_t>(layer)].heads[static_cast<std::size_t>(head)].positions;
  }

  void cut() {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      std::vector<std::vector<int>> kept = score_ ? by_score(l) : by_event(l);
      for (std::size_t h = 0; h < kHeads; ++h) {
        Head& head = layers_[static_cast<std::size_t>(l)].heads[h];
        Head left{.tally = {}, .credit = head.credit};
        for (const int t : kept[h]) {
          left.positions.push_back(head.positions[static_cast<std::size_t>(t)]);
          left.keys.insert(left.keys.end(), head.keys.begin() + t * kKeyDim, head.keys.begin() + (t + 1) * kKeyDim);
          left.values.insert(left.values.end(), head.values.begin() + t * kValueDim,
                             head.values.begin() + (t + 1) * kValueDim);
          if (!head.tally.empty()) left.tally.push_back(head.tally[static_cast<std::size_t>(t)]);
        }
        head = std::move(left);
      }
    }
  }

 private:
  struct Head {
    std::vector<float> keys = {}, values = {}, tally = {};
    std::vector<int> positions = {};
    std::vector<double> credit = {};
  };
  struct Layer {
    std::vector<Head> heads = std::vector<Head>(kHeads);
    std::vector<std::vector<std::vector<float>>> queries = std::vector<std::vector<std::vector<float>>>(4);
  };

  /// A query at its own position, by the two halves of the vector.
  static std::vector<double> turned(const std::vector<float>& x, const RopeSpec& rope, int position) {
    std::vector<double> y(kKeyDim);
    for (std::size_t f = 0; f < 4; ++f) {
      const double angle = rope.inv_freq[f] * position, a = static_cast<double>(x[f]),
                   b = static_cast<double>(x[f + 4]);
      y[f] = rope.attention_scaling * (a * std::cos(angle) - b * std::sin(angle));
      y[f + 4] = rope.attention_scaling * (b * std::cos(angle) + a * std::sin(angle));
    }
    return y;
  }

  [[nodiscard]] oracle::ScorerInput input(std::int32_t l) const {
    const ModelSpec spec = model();
    const RopeSpec& rope = spec.rope_of(l);
    const Layer& layer = layers_[static_cast<std::size_t>(l)];
    oracle::ScorerInput in{.layer = l,
                           .Hq = 4,
                           .Hkv = kHeads,
                           .D = kKeyDim,
                           .Dv = kValueDim,
                           .scale = spec.scale(),
                           .sinks = {spec.layers[static_cast<std::size_t>(l)].sinks.begin(),
                                     spec.layers[static_cast<std::size_t>(l)].sinks.end()},
                           .heads = {},
                           .query_positions = {},
                           .queries = {},
                           .queries_pre = {},
                           .P = seen_,
                           .prompt = 0,
                           .inv_freq = rope.inv_freq,
                           .attention_scaling = rope.attention_scaling,
                           .output_projection = {}};
    const std::int32_t n = static_cast<std::int32_t>(layer.queries[0].size());
    for (std::int32_t i = 0; i < n; ++i) in.query_positions.push_back(seen_ - n + i);
    for (const auto& of_head : layer.queries)
      for (std::int32_t i = 0; i < n; ++i) {
        const std::vector<float>& x = of_head[static_cast<std::size_t>(i)];
        const std::vector<double> y = turned(x, rope, seen_ - n + i);
        in.queries.insert(in.queries.end(), y.begin(), y.end());
        in.queries_pre.insert(in.queries_pre.end(), x.begin(), x.end());
      }
    for (const Head& head : layer.heads) {
      const auto T = static_cast<int>(head.positions.size());
      in.heads.push_back({.T = T,
                          .keys = head.keys,
                          .values = head.values,
                          .positions = head.positions,
                          .tally = head.tally,
                          .given = {},
                          .budget = kBudget,
                          .due = T > kBudget,
                          .sinks = kSink,
                          .recents = kRecent});
    }
    return in;
  }

  /// Sinks, the newest, then by score, the newer of two that are equal.
  std::vector<std::vector<int>> by_score(std::int32_t l) {
    const oracle::ScorerOutput scores = score_(input(l));
    std::vector<std::vector<int>> kept;
    for (std::size_t h = 0; h < kHeads; ++h) {
      Head& head = layers_[static_cast<std::size_t>(l)].heads[h];
      const auto T = static_cast<int>(head.positions.size());
      std::vector<int> order(static_cast<std::size_t>(T));
      std::iota(order.begin(), order.end(), 0);
      const auto guarded = [&](int t) { return t < kSink || t >= T - kRecent; };
      std::ranges::sort(order, [&](int a, int b) {
        if (guarded(a) != guarded(b)) return guarded(a);
        const double x = scores[h][static_cast<std::size_t>(a)], y = scores[h][static_cast<std::size_t>(b)];
        return x != y ? x > y : a > b;
      });
      order.resize(std::min<std::size_t>(order.size(), kBudget));
      std::ranges::sort(order);
      kept.push_back(order);
      if (tallies) head.tally.assign(scores[h].begin(), scores[h].end());
    }
    return kept;
  }

  /// The whole event of AMS, whose credit travels with the slots.
  std::vector<std::vector<int>> by_event(std::int32_t l) {
    const oracle::ScorerInput in = input(l);
    oracle::Sequence s{.T = in.heads[0].T,
                       .Hq = 4,
                       .Hkv = kHeads,
                       .D = kKeyDim,
                       .scale = in.scale,
                       .keys = {},
                       .queries = {in.queries.begin(), in.queries.end()},
                       .positions = {},
                       .query_positions = in.query_positions,
                       .credit = {},
                       .cap = in.cap,
                       .sinks = in.sinks};
    for (std::size_t h = 0; h < kHeads; ++h) {
      s.keys.insert(s.keys.end(), in.heads[h].keys.begin(), in.heads[h].keys.end());
      s.positions.insert(s.positions.end(), in.heads[h].positions.begin(), in.heads[h].positions.end());
      s.credit.push_back(layers_[static_cast<std::size_t>(l)].heads[h].credit);
    }
    std::vector<std::vector<int>> kept;
    const std::vector<oracle::Row> rows = oracle::event(options_, s);
    for (std::size_t h = 0; h < kHeads; ++h) {
      kept.push_back(rows[h].slots);
      layers_[static_cast<std::size_t>(l)].heads[h].credit = rows[h].credit_kept;
    }
    return kept;
  }

 public:
  bool tallies = false;

 private:
  Score score_;
  oracle::Options options_;
  std::vector<Layer> layers_ = std::vector<Layer>(kLayers);
  std::int32_t seen_ = 0;
};

/// Sequence 1 begins, with a prompt of so many tokens.
void join(Engine& engine, std::optional<std::int32_t> prompt) {
  engine.keeper.join(1, 0, prompt);
  engine.lengths[1] = Ints(kRows, 0);
}

void expect_rows(const Engine& engine, const Replay& replay) {
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kHeads; ++h) {
      const auto held = engine.keeper.positions(1, l, h);
      ASSERT_EQ(std::vector<int>(held.begin(), held.end()), replay.kept(l, h)) << "layer " << l << ", head " << h;
    }
}

/// A prompt in random pieces, then tokens one by one: the schedule is that of the docs, the rows are the replay's.
void expect_replayed(const std::string& policy, Replay replay, std::uint64_t seed) {
  SCOPED_TRACE(policy);
  DenseEngine engine(policy + ",budget=24,interval=6,sink=2,recent=4,prefill=pieces", false, Dtype::f32);
  engine.no_say = true;
  oracle::Random random(seed);
  const std::int32_t prompt = random.between(50, 140);
  const bool open = random.chance(0.5);
  join(engine, open ? kOpenPrompt : prompt);
  int in_prompt = 0;
  for (std::int32_t seen = 0; seen < prompt + 30;) {
    const std::int32_t left = prompt - seen, piece = left > 0 ? std::min(left, random.between(1, 30)) : 1;
    const Numbers numbers = numbers_of(random, {{1, piece}});
    const std::int32_t before = replay.slots();
    engine.feed(numbers);
    replay.grow(numbers);
    seen += piece;
    if (open && seen == prompt) engine.keeper.end_prompt(1);
    ASSERT_LE(replay.slots(), seen <= prompt ? kBudget + piece : kBudget + kInterval) << "peak, from " << before;
    const bool due = seen <= prompt ? replay.slots() > kBudget : replay.slots() >= kBudget + kInterval;
    if (due) replay.cut();
    ASSERT_EQ(engine.cut({1}).cuts.size(), due ? 1U : 0U) << "at token " << seen << " of a prompt of " << prompt;
    expect_rows(engine, replay);
    if (::testing::Test::HasFatalFailure()) return;
    in_prompt += static_cast<int>(due && seen < prompt);
  }
  EXPECT_GT(in_prompt, 0);
}

TEST(Pieces, OfAPromptAreCutAsAReplayOfTheScorerCutsThem) {
  const auto age = [](const oracle::ScorerInput& in) {
    oracle::ScorerOutput scores;
    for (const oracle::ScorerHead& head : in.heads) {
      scores.emplace_back(static_cast<std::size_t>(head.T));
      std::iota(scores.back().begin(), scores.back().end(), 0);
    }
    return scores;
  };
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    expect_replayed("streaming", Replay(age), seed);
    expect_replayed("knorm", Replay(oracle::knorm), seed);
    expect_replayed("keydiff", Replay(oracle::keydiff), seed);
    expect_replayed("cur", Replay([](const auto& in) { return oracle::cur(in, 16); }), seed);
    expect_replayed("snapkv,window=4,pool=5",
                    Replay([](const auto& in) { return oracle::snapkv(in, {.window = 4, .pool = 5}); }), seed);
    expect_replayed("rpc,window=4,pool=3",
                    Replay([](const auto& in) { return oracle::rpc(in, {.window = 4, .pool = 3}); }), seed);
    expect_replayed("defensive,window=4,pool=3", Replay([](const auto& in) { return oracle::defensive(in, 4, 3); }),
                    seed);
    expect_replayed("rkv,window=4,pool=3",
                    Replay([](const auto& in) { return oracle::rkv(in, {.window = 4, .pool = 3}); }), seed);
    expect_replayed("expected,queries=20,n_future=8",
                    Replay([](const auto& in) { return oracle::expected(in, {.future = 8, .queries = 20}); }), seed);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Pieces, AddUpTheAttentionOfEveryQueryOfAPromptUnderH2O) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Replay replay([](const oracle::ScorerInput& in) { return oracle::h2o(in, 64); });
    replay.tallies = true;
    expect_replayed("h2o,window=64", std::move(replay), seed);
  }
}

TEST(Pieces, AreEventsLikeOthersForTheCreditOfAMS) {
  oracle::Options options{.budget = kBudget,
                          .sink = kSink,
                          .recent = kRecent,
                          .window = 4,
                          .min_segment = 4,
                          .max_segment = 16,
                          .min_quota = 1};
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    options.policy = "ams-tova";
    expect_replayed(
        "ams-tova,window=4,min_segment=4,max_segment=16,min_quota=1,coverage=1,segment_mass=0.02,credit_decay=0.8,"
        "credit_mix=0.7,credit=true,pool=5,suffix_fill=max_head,segments=mass,quotas=mass,protected_mass=true,heads="
        "all",
        Replay(options), seed);
    options.policy = "tova";
    expect_replayed("tova,heads=all", Replay(options), seed);
  }
}

TEST(Pieces, OfABudgetByShareCountTheTokensSoFar) {
  DenseEngine engine("knorm,ratio=0.5,interval=6,sink=1,recent=1,prefill=pieces", false, Dtype::f32);
  oracle::Random random(3);
  join(engine, 100);
  for (std::int32_t seen = 10; seen <= 100; seen += 10) {
    engine.step(numbers_of(random, {{1, 10}}));
    EXPECT_EQ(engine.lengths.at(1)[0], seen / 2);
  }
}

TEST(Pieces, LeaveAPromptWholeThatTheBudgetHolds) {
  DenseEngine pieces("tova,budget=40,interval=6,prefill=pieces", false, Dtype::f32),
      cut("tova,budget=40,interval=6,prefill=cut", false, Dtype::f32);
  for (DenseEngine* engine : {&pieces, &cut}) {
    oracle::Random random(8);
    join(*engine, 40);
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(engine->step(numbers_of(random, {{1, 5}})).cuts.empty());
    for (int i = 0; i < 20; ++i) engine->step(numbers_of(random, {{1, 1}}));
    EXPECT_EQ(engine->keeper.totals().events, 3);
  }
  for (std::int32_t r = 0; r < kRows; ++r) {
    const auto a = pieces.keeper.positions(1, r / kHeads, r % kHeads),
               b = cut.keeper.positions(1, r / kHeads, r % kHeads);
    EXPECT_TRUE(std::ranges::equal(a, b)) << r;
  }
}

TEST(Pieces, KeepEveryRowWithinBudgetAndOnePieceUnderEveryAllocator) {
  for (const char* policy :
       {"ams-snapkv,scorer.window=4,allocator.window=4", "chunkkv-snapkv,window=4", "criticalkv-snapkv,window=4",
        "pyramidkv-knorm", "adakv-snapkv,window=4", "threshold-given,threshold=0.3", "random", "vase,window=4",
        "random-attention,protect_prompt=false", "given", "ams-given"}) {
    SCOPED_TRACE(policy);
    DenseEngine engine(std::string(policy) + ",budget=24,interval=6,sink=2,recent=4,prefill=pieces", true, Dtype::f32);
    engine.no_say = true;
    oracle::Random random(5);
    join(engine, 150);
    int events = 0;
    for (std::int32_t seen = 0; seen < 150;) {
      const std::int32_t piece = std::min(150 - seen, random.between(5, 30));
      engine.feed(numbers_of(random, {{1, piece}}));
      std::int64_t slots = 0;
      for (const std::int32_t length : engine.lengths.at(1)) slots += length;
      EXPECT_LE(slots, (kBudget + piece) * kRows);
      events += static_cast<int>(!engine.cut({1}).cuts.empty());
      seen += piece;
    }
    EXPECT_GT(events, 3);
  }
}

TEST(Pieces, TellAnEngineWhichQueriesToGive) {
  DenseEngine engine("tova,budget=24,interval=6,prefill=pieces", false, Dtype::f32);
  oracle::Random random(2);
  join(engine, 100);
  EXPECT_EQ(engine.keeper.tokens_to_event(1), 25) << "one more than the budget";
  engine.step(numbers_of(random, {{1, 20}}));
  EXPECT_EQ(engine.keeper.tokens_to_event(1), 5);
  engine.step(numbers_of(random, {{1, 10}}));
  EXPECT_EQ(engine.keeper.tokens_to_event(1), 1);
  engine.step(numbers_of(random, {{1, 70}}));
  EXPECT_EQ(engine.keeper.tokens_to_event(1), 6) << "the prompt has ended: budget + interval";
}

TEST(Pieces, CannotBeTakenBackPastTheLastAndAreNoPrefixOfAnotherPrompt) {
  DenseEngine engine("tova,budget=24,interval=6,prefill=pieces", false, Dtype::f32);
  oracle::Random random(2);
  join(engine, 100);
  engine.step(numbers_of(random, {{1, 30}}));
  engine.feed(numbers_of(random, {{1, 10}}));
  EXPECT_THROW(engine.keeper.truncate(1, 29), StateError);
  engine.keeper.truncate(1, 35);
  EXPECT_EQ(engine.keeper.prompt_length(1), 100) << "it has not ended";
  EXPECT_EQ(message_of<StateError>([&] { engine.keeper.fork(2, 1, {}, 80); }),
            "fork: sequence 2 was cut at length 30, so no prompt of 80 tokens can begin with it; allowed the prompt "
            "that it had, 100, or a sequence that no event has cut");
  engine.keeper.fork(2, 1);
  EXPECT_EQ(engine.keeper.prompt_length(2), 100);
  const std::vector<std::byte> state = engine.keeper.save(1);
  EXPECT_THROW(engine.keeper.restore(3, state, 80), StateError);
  engine.keeper.restore(3, state);
  EXPECT_EQ(engine.keeper.logical_length(3), 35);
  EXPECT_EQ(engine.keeper.tokens_to_event(3), 0) << "29 slots, and the budget is 24";
}

TEST(Pieces, GoOnToTheSameBitsAfterTheyWereSaved) {
  const std::string policy = "ams-tova,window=4,budget=24,interval=6,recent=4,prefill=pieces";
  DenseEngine whole(policy, false, Dtype::f32), saved(policy, false, Dtype::f32);
  for (DenseEngine* engine : {&whole, &saved}) {
    oracle::Random random(4);
    join(*engine, 120);
    for (int i = 0; i < 8; ++i) {
      engine->step(numbers_of(random, {{1, 15}}));
      if (engine != &saved) continue;
      const std::vector<std::byte> state = engine->keeper.save(1);
      engine->keeper.leave(1);
      engine->keeper.restore(1, state);
    }
  }
  EXPECT_EQ(whole.keeper.totals().events, 7);
  for (std::int32_t r = 0; r < kRows; ++r)
    EXPECT_TRUE(std::ranges::equal(whole.keeper.positions(1, r / kHeads, r % kHeads),
                                   saved.keeper.positions(1, r / kHeads, r % kHeads)))
        << r;
}

TEST(Pieces, KeepPinnedSpansOfAPromptThatIsStillComingIn) {
  DenseEngine engine("knorm,budget=24,interval=6,sink=2,recent=4,prefill=pieces", false, Dtype::f32);
  oracle::Random random(6);
  join(engine, 120);
  engine.keeper.part<parts::Pins>().pin(1, 40, 46);  // still to come
  for (int i = 0; i < 8; ++i) engine.step(numbers_of(random, {{1, 15}}));
  for (std::int32_t p = 40; p < 46; ++p)
    EXPECT_TRUE(std::ranges::binary_search(engine.keeper.positions(1, 0, 0), p)) << p;
}

TEST(Pieces, AreRefusedByNameWhereAPromptMustBeWhole) {
  const auto refused = [](const std::string& policy) {
    return message_of<InvalidArgument>([&] { static_cast<void>(make_policy(policy)); });
  };
  const std::string pieces = ",budget=24,prefill=pieces";
  EXPECT_EQ(refused("tova,protect_prompt=true" + pieces),
            "policy: prefill of tova is \"pieces\" with protect_prompt, which keeps all of a prompt; allowed "
            "protect_prompt=false, or prefill=cut");
  EXPECT_NE(refused("random-attention" + pieces).find("protect_prompt=false"), std::string::npos);
  EXPECT_NE(refused("rpc,style=official" + pieces).find("protect_prompt"), std::string::npos);
#if KVKEEP_FOLDING
  EXPECT_EQ(refused("tova,rest=fold" + pieces),
            "policy: prefill of tova is \"pieces\" with rest=fold, which folds a prompt that is whole; allowed "
            "rest=drop, or prefill=cut");
  EXPECT_NE(refused("sekv" + pieces).find("prefill"), std::string::npos);
#endif
  for (const std::string narrowing : {"asl,budget=64", "asl-2pass,budget=64", "fastkv,budget=64,layer=1",
                                      "gemfilter,budget=64,layer=1", "pyramidinfer"}) {
    const std::string name = narrowing.substr(0, narrowing.find(',')), said = refused(narrowing + "+tova" + pieces);
    EXPECT_NE(said.find("tova has prefill=pieces, and " + name + " reads a prompt whole"), std::string::npos) << said;
  }
}

/// The next step of an engine's sequence 1, named or not.
Report step(Engine& engine, oracle::Random& random, std::int32_t tokens, bool named) {
  engine.feed(numbers_of(random, {{1, tokens}}));
  const SequenceId id = 1;
  Ints length{engine.lengths.at(1)[0]};
  const Ints place{1};
  const std::vector<SequenceId> ids{id};
  CacheView view{.sequences = ids, .lengths = {length}, .places = place};
  if (named) view.named = ids;
  Report report = engine.keeper.step(view).wait();
  engine.lengths[1] = Ints(kRows, length[0]);
  return report;
}

TEST(NamedEvents, ComeWhenTheProgramSaysSoAndNeverByThemselves) {
  DenseEngine engine("snapkv,window=4,budget=24,interval=6,sink=2,recent=4,prefill=cut,trigger=named", false,
                     Dtype::f32);
  Replay replay([](const auto& in) { return oracle::snapkv(in, {.window = 4, .pool = 5}); });
  oracle::Random random(3);
  join(engine, 40);
  Numbers prompt = numbers_of(random, {{1, 40}});
  replay.grow(prompt);
  replay.cut();
  EXPECT_EQ(engine.step(prompt).cuts.size(), 1U) << "the end of the prompt is an event of its own";
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < 50; ++i) {
      const Numbers one = numbers_of(random, {{1, 1}});
      replay.grow(one);
      EXPECT_TRUE(engine.step(one).cuts.empty());
    }
    EXPECT_EQ(engine.keeper.tokens_to_event(1), 0) << "the program may name it at once";
    EXPECT_EQ(step(engine, random, 0, true).cuts.size(), 1U) << "between two turns, without a new token";
    replay.cut();
    expect_rows(engine, replay);
    EXPECT_TRUE(step(engine, random, 0, true).cuts.empty()) << "nothing is over the budget";
    EXPECT_EQ(engine.keeper.tokens_to_event(1), 1);
  }
}

TEST(NamedEvents, ComeUnderEveryTriggerAndBesideItsOwn) {
  for (const char* policy : {"tova,budget=24,interval=6", "tova,budget=24,interval=6,trigger=counter",
                             "tova,budget=24,interval=6,prefill=only"}) {
    SCOPED_TRACE(policy);
    DenseEngine engine(policy, false, Dtype::f32);
    oracle::Random random(3);
    join(engine, 20);
    step(engine, random, 20, false);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(step(engine, random, 1, false).cuts.empty());
    EXPECT_EQ(step(engine, random, 0, true).cuts.size(), 1U);
    EXPECT_EQ(engine.lengths.at(1)[0], 24);
    const bool only = engine.keeper.policy().trigger().prefill == Trigger::Prefill::only;
    std::int64_t own = 0;
    for (int i = 0; i < 12; ++i) own += std::ssize(step(engine, random, 1, false).cuts);
    EXPECT_EQ(own, only ? 0 : 2);
  }
}

TEST(NamedEvents, AreOfSequencesOfTheViewWhosePromptsHaveEnded) {
  DenseEngine engine("tova,budget=24,interval=6", false, Dtype::f32);
  oracle::Random random(3);
  join(engine, 60);
  engine.feed(numbers_of(random, {{1, 30}}));
  const std::vector<SequenceId> ids{1}, other{7};
  Ints length{30};
  const Ints place{1};
  EXPECT_EQ(message_of<StateError>(
                [&] { engine.keeper.step({.sequences = ids, .lengths = {length}, .places = place, .named = ids}); }),
            "step: sequence 1 is named for an event with 30 of the 60 tokens of its prompt; allowed when the prompt "
            "has ended, or with prefill=pieces");
  EXPECT_EQ(message_of<InvalidArgument>(
                [&] { engine.keeper.step({.sequences = ids, .lengths = {length}, .places = place, .named = other}); }),
            "step: sequence 7 is named for an event and is not in the view; allowed sequences of the view");
  DenseEngine full("full", false, Dtype::f32);
  join(full, 60);
  EXPECT_TRUE(step(full, random, 60, true).cuts.empty()) << "it has no budget";
}

}  // namespace
}  // namespace kvkeep::pieces_test
