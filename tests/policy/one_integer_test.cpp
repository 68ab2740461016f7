// SPDX-License-Identifier: Apache-2.0
// What an engine asks of a sequence in one integer: how far it can go back, which prefix is whole, how many tokens are
// in no row any more. After any operations, against what the engine's own memory holds and what truncate() does.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/surprisal.h"
#include "layer_by_layer_engine.h"
#include "message_of.h"

namespace kvkeep::one_integer_test {
namespace {

using testing::Array;
using testing::message_of;
using testing::normals;
using Ints = std::vector<std::int32_t>;

constexpr std::int32_t kLayers = 2, kHeads = 2, kRows = kLayers * kHeads, kPlaces = 6, kCapacity = 400;

ModelSpec model() {
  return {.query_heads = 4,
          .kv_heads = kHeads,
          .key_dim = 8,
          .value_dim = 8,
          .softmax_scale = 0,
          .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
          .layers = std::vector<LayerSpec>(kLayers)};
}

/// Sequences in dense rows, each with a place of its own. The first number of every value is the token that it belongs
/// to, so that rows say themselves what they hold.
class Named {
 public:
  explicit Named(const std::string& policy)
      : keeper(model(), make_policy(policy), {.surprisal = true, .given_scores = true, .reads_folded = true}) {
    for (std::int32_t l = 0; l < kLayers; ++l)
      layers_.emplace_back(DenseKv{Array::full({kPlaces, kHeads, kCapacity, 8}, 9, Dtype::f32),
                                   Array::full({kPlaces, kHeads, kCapacity, 8}, 9, Dtype::f32)});
    keeper.bind(layers_);
  }

  void join(SequenceId id, std::optional<std::int32_t> prompt) {
    keeper.join(id, 0, prompt);
    lengths[id] = Ints(kRows, 0);
  }
  void leave(SequenceId id) {
    keeper.leave(id);
    lengths.erase(id);
  }

  /// New tokens of one sequence, without an event.
  void feed(SequenceId id, std::int32_t tokens, bool unread = false, const Ints& positions = {}) {
    const Ints indptr{0, tokens};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const Array keys = normals(random, {tokens, kHeads, 8}), values = normals(random, {tokens, kHeads, 8});
      for (std::int32_t t = 0; t < tokens; ++t)
        for (std::int32_t h = 0; h < kHeads; ++h) {
          const std::int32_t slot = at(id, l, h) + t;
          number(l, id, h, slot, true) = static_cast<float>(seen[id] + t);
          std::copy_n(&keys.data<float>()[(t * kHeads + h) * 8], 8, &number(l, id, h, slot, false));
          std::copy_n(&values.data<float>()[(t * kHeads + h) * 8 + 1], 7, &number(l, id, h, slot, true) + 1);
        }
      const Array queries = unread ? Array() : normals(random, {tokens, 4, 8});
      const Observation observation{.layer = l,
                                    .sequences = {&id, 1},
                                    .indptr = indptr,
                                    .queries = queries,
                                    .basis = QueryBasis::post_rope,
                                    .unread = unread,
                                    .positions = positions};
      keeper.observe(observation);
      if (auto* given = keeper.find<parts::Given>())
        given->give({.layer = l, .sequences = {&id, 1}, .indptr = indptr, .scores = normals(random, {tokens, kHeads})});
      if (auto* folds = keeper.find<parts::Folds>()) {
        const Array out = Array::zeros({tokens, 4, 8}), sums = Array::zeros({tokens, 4});
        folds->view(observation, {out, sums});
      }
    }
    if (auto* surprisal = keeper.find<parts::Surprisal>()) {
      std::vector<float> nats;
      for (std::int32_t t = 0; t < tokens; ++t) nats.push_back(static_cast<float>(6 * random.unit()));
      surprisal->supply(id, nats);
    }
    for (std::int32_t& length : lengths.at(id)) length += tokens;
    seen[id] += tokens;
  }

  /// True if an event cut it.
  bool step(SequenceId id) {
    const Ints places{place_of(id)};
    const Report report = keeper.step({.sequences = {&id, 1}, .lengths = {lengths.at(id), kRows}, .places = places});
    return !report.cuts.empty();
  }

  void truncate(SequenceId id, std::int64_t tokens) {
    keeper.truncate(id, seen.at(id) - tokens);
    for (std::int32_t& length : lengths.at(id)) length -= static_cast<std::int32_t>(tokens);
    seen[id] -= tokens;
  }

  void fork(SequenceId child, SequenceId parent) {
    keeper.fork(child, parent);
    lengths[child] = lengths.at(parent);
    seen[child] = seen.at(parent);
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (std::int32_t h = 0; h < kHeads; ++h)
        for (const bool value : {false, true})
          std::copy_n(&number(l, parent, h, 0, value), kCapacity * 8, &number(l, child, h, 0, value));
  }

  /// Tokens whose slot is at their own place in every row.
  [[nodiscard]] std::int64_t whole(SequenceId id) {
    for (std::int32_t token = 0; token < seen.at(id); ++token)
      for (std::int32_t l = 0; l < kLayers; ++l)
        for (std::int32_t h = 0; h < kHeads; ++h)
          if (token >= at(id, l, h) || number(l, id, h, token, true) != static_cast<float>(token)) return token;
    return seen.at(id);
  }

  [[nodiscard]] std::int32_t at(SequenceId id, std::int32_t l, std::int32_t h) const {
    return lengths.at(id)[static_cast<std::size_t>(l * kHeads + h)];
  }

  oracle::Random random{7};
  Keeper keeper;
  std::map<SequenceId, Ints> lengths;
  std::map<SequenceId, std::int64_t> seen;

 private:
  [[nodiscard]] static std::int32_t place_of(SequenceId id) { return static_cast<std::int32_t>(id) % kPlaces; }
  [[nodiscard]] float& number(std::int32_t l, SequenceId id, std::int32_t h, std::int32_t slot, bool value) {
    const auto& kv = std::get<DenseKv>(layers_[static_cast<std::size_t>(l)]);
    const Tensor& side = value ? kv.values : kv.keys;
    return side.data<float>()[((place_of(id) * kHeads + h) * kCapacity + slot) * 8];
  }

  std::vector<LayerKv> layers_;
};

struct Case {
  const char* name;
  const char* policy;
  bool unread = false;  ///< some queries are never read
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

const Case kCases[] = {
    {"full", "full"},
    {"union", "tova,budget=24,interval=8,recent=4,share=union"},
    {"union_cut", "snapkv,budget=20,interval=6,window=8,share=union_mean,prefill=cut"},
    {"per_head", "tova,budget=20,interval=4,share=per_head"},
    {"per_row", "ams-tova,budget=24,interval=8,recent=4,window=4,min_segment=2,credit=true"},
    {"adakv", "adakv-snapkv,budget=16,interval=4,window=6,sink=2"},
    {"pyramidkv", "pyramidkv-knorm,budget=16,interval=4,recent=4"},
    {"streaming", "streaming,budget=20,interval=1,sink=5"},
    {"given", "given,budget=16,interval=4,sink=3,recent=2"},
    {"threshold", "threshold-given,budget=24,interval=8,recent=4,threshold=-0.5"},
    {"folds", "tova,budget=24,interval=8,recent=4,rest=fold"},
    {"sekv", "sekv,budget=32,interval=8,recent=8"},
    {"unread", "tova,budget=24,interval=40,recent=4,share=union", true},
};

class OneInteger : public ::testing::TestWithParam<Case> {};

/// truncate() takes back any number up to the limit, and one more is refused.
void expect_limit(Named& engine, SequenceId id) {
  const std::int64_t limit = engine.keeper.rollback_limit(id), seen = engine.seen.at(id);
  ASSERT_LE(limit, seen);
  const SequenceId copy = 1000;
  for (const std::int64_t tokens : {limit, limit / 2, std::min<std::int64_t>(limit, 1)}) {
    engine.keeper.fork(copy, id);
    EXPECT_NO_THROW(engine.keeper.truncate(copy, seen - tokens)) << tokens << " of " << limit;
    EXPECT_EQ(engine.keeper.logical_length(copy), seen - tokens);
    EXPECT_EQ(engine.keeper.rollback_limit(copy), limit - tokens);
    engine.keeper.leave(copy);
  }
  if (limit == seen) return;
  engine.keeper.fork(copy, id);
  EXPECT_THROW(engine.keeper.truncate(copy, seen - limit - 1), StateError) << limit << " of " << seen;
  engine.keeper.leave(copy);
}

TEST_P(OneInteger, IsWhatTruncateTakesAndWhatTheRowsHold) {
  Named engine(GetParam().policy);
  std::map<SequenceId, std::int32_t> prompt;
  std::int64_t cuts = 0, ragged = 0, partly = 0, went_back = 0;
  const auto between = [&](std::int32_t least, std::int32_t most) { return engine.random.between(least, most); };
  for (int operation = 0; operation < 1500; ++operation) {
    const SequenceId id = between(0, kPlaces - 1);
    const std::int32_t what = between(0, 99);
    if (!engine.lengths.contains(id)) {
      prompt[id] = between(1, 50);
      engine.seen[id] = 0;
      engine.join(id, what < 50 ? std::optional(prompt[id]) : std::nullopt);
      if (what >= 50) prompt[id] = 0;
      continue;
    }
    const SequenceId other = (id + 1) % kPlaces;
    if (what < 4 || engine.seen.at(id) > 200) {
      engine.leave(id);
    } else if (what < 8 && engine.seen.at(id) > 0 && !engine.lengths.contains(other)) {
      engine.fork(other, id);
      prompt[other] = prompt[id];
    } else if (what < 12 && engine.seen.at(id) > 0) {
      const std::int64_t begin = between(0, static_cast<std::int32_t>(engine.seen.at(id)) - 1);
      try {
        engine.keeper.part<parts::Pins>().pin(id, begin, begin + 1);
      } catch (const Error&) {  // dropped, or too many
      }
    } else if (what < 30 && engine.seen.at(id) > 0) {
      const std::int64_t limit = engine.keeper.rollback_limit(id);
      const std::int64_t tokens =
          limit == 0 ? 0 : between(0, static_cast<std::int32_t>(std::min<std::int64_t>(limit, 9)));
      engine.truncate(id, tokens);
      went_back += tokens;
    } else {
      const std::int32_t tokens = what < 60 ? 1 : between(1, 14);
      engine.feed(id, tokens, GetParam().unread && engine.keeper.tokens_to_event(id) > tokens + 4 && what % 2 == 0);
      if (what < 90) {
        try {
          cuts += engine.step(id) ? 1 : 0;
        } catch (const StateError& e) {  // an event whose window holds unread tokens
          ASSERT_TRUE(GetParam().unread) << e.what();
        }
      }
    }
    if (!engine.lengths.contains(id)) continue;
    SCOPED_TRACE(operation);
    expect_limit(engine, id);
    EXPECT_EQ(engine.keeper.whole_prefix(id), engine.whole(id));
    partly += engine.whole(id) > 0 && engine.whole(id) < engine.seen.at(id) ? 1 : 0;
    const Ints& lengths = engine.lengths.at(id);
    if (std::ranges::count(lengths, lengths[0]) == kRows) {
      EXPECT_EQ(engine.keeper.evicted(id), engine.seen.at(id) - lengths[0]);
    } else {
      ++ragged;
      EXPECT_THROW(static_cast<void>(engine.keeper.evicted(id)), StateError);
    }
    if (HasFailure()) return;
  }
  const std::string name = GetParam().name;
  EXPECT_GT(went_back, 100);
  EXPECT_EQ(cuts > 20, name != "full") << cuts;
  EXPECT_EQ(partly > 20, name != "full") << partly;
  const bool unequal = name == "adakv" || name == "pyramidkv" || name == "threshold";
  EXPECT_EQ(ragged > 0, unequal) << ragged;
}

INSTANTIATE_TEST_SUITE_P(Policies, OneInteger, ::testing::ValuesIn(kCases),
                         [](const auto& p) { return std::string(p.param.name); });

TEST(OneIntegerByHand, FollowsASequenceFromItsPromptOverAnEvent) {
  Named engine("tova,budget=8,interval=4,sink=2,recent=2,share=union");
  engine.join(1, 10);
  const auto expect = [&](std::int64_t back, std::int64_t whole, std::int64_t evicted) {
    EXPECT_EQ(engine.keeper.rollback_limit(1), back);
    EXPECT_EQ(engine.keeper.evicted(1), evicted);
    if (whole >= 0) EXPECT_EQ(engine.keeper.whole_prefix(1), whole);
  };
  expect(0, 0, 0);
  engine.feed(1, 11);
  ASSERT_FALSE(engine.step(1));
  expect(11, 11, 0);
  engine.feed(1, 1);
  ASSERT_TRUE(engine.step(1));
  expect(0, -1, 4);
  EXPECT_GE(engine.keeper.whole_prefix(1), 2) << "the sinks";
  EXPECT_LT(engine.keeper.whole_prefix(1), 10);
  engine.feed(1, 3);
  expect(3, -1, 4);
  engine.truncate(1, 2);
  expect(1, -1, 4);
}

TEST(OneIntegerByHand, GoesBackAsFarAsTheWindowDoes) {
  Named engine("tova,budget=300,interval=8,recent=4");  // reads one query
  engine.join(1, 200);
  for (std::int32_t tokens = 1; tokens <= 60; ++tokens) {
    engine.feed(1, 1);
    EXPECT_EQ(engine.keeper.rollback_limit(1), tokens <= 33 ? tokens : 32);
  }
  Named prefix("streaming,budget=300");
  prefix.keeper.join(2, 40);
  EXPECT_EQ(prefix.keeper.rollback_limit(2), 0) << "what was cached before cannot be taken back";
  EXPECT_EQ(prefix.keeper.whole_prefix(2), 40);
  EXPECT_EQ(prefix.keeper.evicted(2), 0);
}

/// Tokens are whole, not positions. After an event nobody knows whether a gap is one of the engine's.
TEST(OneIntegerByHand, CountsTokensWherePositionsHaveGaps) {
  Named engine("streaming,budget=12,interval=4,sink=6,recent=2");
  engine.join(1, 8);
  engine.feed(1, 8, false, {0, 1, 2, 3, 10, 11, 12, 13});
  EXPECT_EQ(engine.keeper.whole_prefix(1), 8);
  engine.feed(1, 8);
  ASSERT_TRUE(engine.step(1));
  EXPECT_EQ(engine.whole(1), 6);
  EXPECT_EQ(engine.keeper.whole_prefix(1), 4) << "at most up to the first gap";
  EXPECT_EQ(engine.keeper.evicted(1), 4);
}

/// While a prompt runs through the layers nothing is known; then rows differ, and say so.
TEST(OneIntegerByHand, WaitsForAPromptThatNarrows) {
  layer_by_layer::Engine engine("fastkv,budget=24,window=6,layer=2,cache=16");
  engine.join(1);
  engine.begin({{.id = 1, .tokens = 60}});
  const Keeper& keeper = engine.keeper;
  for (std::int32_t l = 0; l < layer_by_layer::kLayers; ++l) {
    engine.observe(l);
    engine.narrow(l);
    if (l != 3) continue;
    for (const auto& ask : {&Keeper::rollback_limit, &Keeper::whole_prefix, &Keeper::evicted})
      EXPECT_NE(message_of<StateError>([&] { static_cast<void>((keeper.*ask)(1)); }).find("has only reached layer 4"),
                std::string::npos);
  }
  engine.end();
  EXPECT_EQ(keeper.rollback_limit(1), 0);
  std::int64_t whole = 60;
  for (const auto& row : engine.kept(1)) {
    std::int64_t slot = 0;
    while (slot < std::ssize(row) && row[static_cast<std::size_t>(slot)] == slot) ++slot;
    whole = std::min(whole, slot);
  }
  EXPECT_EQ(keeper.whole_prefix(1), whole);
  EXPECT_LT(whole, 60);
  engine.step({{.id = 1, .tokens = 2}});
  EXPECT_EQ(keeper.rollback_limit(1), 2);
}

TEST(OneIntegerByHand, IsRefusedByNameWhereItIsNotKnown) {
  Named engine("pyramidkv-knorm,budget=16,interval=4,recent=4");
  for (const auto& ask : {&Keeper::rollback_limit, &Keeper::whole_prefix, &Keeper::evicted})
    EXPECT_NE(
        message_of<StateError>([&] { static_cast<void>((engine.keeper.*ask)(5)); }).find("sequence 5 is not known"),
        std::string::npos);
  engine.join(1, 4);
  engine.feed(1, 40);
  ASSERT_TRUE(engine.step(1));
  const std::string message = message_of<StateError>([&] { static_cast<void>(engine.keeper.evicted(1)); });
  EXPECT_NE(message.find("rows of sequence 1 hold "), std::string::npos) << message;
  EXPECT_NE(message.find("share=union"), std::string::npos) << message;
}

}  // namespace
}  // namespace kvkeep::one_integer_test
