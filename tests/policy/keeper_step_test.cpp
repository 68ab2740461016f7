// SPDX-License-Identifier: Apache-2.0
// begin_step() and record() beside observe(): the same slots, whatever steps come; what they refuse.

#include "engines.h"
#include "message_of.h"

namespace kvkeep::keeper_step_test {
namespace {

using testing::Array;
using namespace engines;

using Work = std::vector<std::pair<SequenceId, std::int32_t>>;

const char* const kTova = "ams-tova,budget=24,interval=8,recent=4,window=6,min_segment=2,max_segment=8";

/// Files queries at once, with rows of padding behind them.
void record_padded(Engine& engine, std::int64_t padding) {
  engine.record = [&engine, padding](std::int32_t layer, const Array& queries, const Array&) {
    const Array rows = Array::full({padding, 4, kKeyDim}, 1e30, Dtype::f32);
    engine.keeper.record(layer, Array::cat({queries, rows}));
  };
}

TEST(KeeperStep, KeepsWhatObservationsKeep) {
  for (const char* const policy : {kTova, "rkv,budget=24,interval=8,recent=4,window=6", "knorm,budget=24,interval=8"})
    for (const std::int64_t padding : {0, 3}) {
      DenseEngine observed(policy, false, Dtype::f32), stepped(policy, false, Dtype::f32);
      record_padded(stepped, padding);
      oracle::Random random(5);
      const auto step = [&](const Work& work, const Ints& positions = {}) {
        const Numbers numbers = numbers_of(random, work);
        const Report a = observed.step(numbers, positions), b = stepped.step(numbers, positions);
        ASSERT_EQ(a.cuts.size(), b.cuts.size());
        expect_alike(observed, stepped);
        for (const auto& [id, tokens] : work)
          for (std::int32_t r = 0; r < kRows; ++r) {
            const auto x = observed.keeper.credit(id, r / kHeads, r % kHeads),
                       y = stepped.keeper.credit(id, r / kHeads, r % kHeads);
            ASSERT_TRUE(std::equal(x.begin(), x.end(), y.begin(), y.end())) << policy;
          }
      };
      const auto join = [&](SequenceId id, std::optional<std::int32_t> prompt) {
        for (Engine* const engine : std::initializer_list<Engine*>{&observed, &stepped}) {
          engine->keeper.join(id, 0, prompt);
          engine->lengths[id] = Ints(kRows, 0);
        }
      };
      join(1, {});
      join(2, 70);              // its prompt comes in chunks
      step({{1, 5}, {2, 40}});  // more than a ring holds
      step({{2, 30}, {1, 1}});
      for (int i = 0; i < 30; ++i) {
        step({{1, 1}, {2, i % 3 == 0 ? 2 : 1}});
        if (HasFatalFailure()) return;
      }
      join(3, {});
      step({{3, 12}, {1, 1}});
      step({{3, 2}}, {20, 25});  // positions with a gap
      for (Engine* const engine : std::initializer_list<Engine*>{&observed, &stepped}) {
        engine->keeper.truncate(3, 13);
        for (std::int32_t& length : engine->lengths.at(3)) --length;
        engine->keeper.leave(1);
        engine->lengths.erase(1);
      }
      for (int i = 0; i < 30; ++i) {
        step({{3, 1}, {2, 1}});
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(observed.keeper.totals().events, 6);
    }
}

TEST(KeeperStep, MayComeBetweenObservedSteps) {
  DenseEngine observed(kTova, false, Dtype::f32), mixed(kTova, false, Dtype::f32);
  oracle::Random random(6);
  observed.join(1);
  mixed.join(1);
  for (int i = 0; i < 60; ++i) {
    if (i % 3 == 0)
      mixed.record = nullptr;
    else
      record_padded(mixed, 1);
    const Numbers numbers = numbers_of(random, {{1, i == 0 ? 20 : 1}});
    observed.step(numbers);
    mixed.step(numbers);
    ASSERT_NO_FATAL_FAILURE(expect_alike(observed, mixed));
  }
}

TEST(KeeperStep, RefusesWhatItCannotFile) {
  const SequenceId id = 1;
  const Ints two{0, 2};
  const StepTokens tokens{.sequences = {&id, 1}, .indptr = two};
  const auto queries = [](std::int64_t rows, Dtype type = Dtype::f32) {
    return Tensor(Array::full({rows, 4, kKeyDim}, 1, type));
  };
  Keeper keeper(model(), make_policy(kTova));
  keeper.join(id);
  EXPECT_EQ(testing::message_of<StateError>([&] { keeper.record(0, queries(2)); }),
            "record: no step has begun; allowed after begin_step()");
  keeper.begin_step(tokens);
  EXPECT_EQ(keeper.logical_length(id), 2);
  EXPECT_NE(testing::message_of<StateError>([&] {
              keeper.record(0, queries(1));
            }).find("1 queries of layer 0; allowed 2 to 64"),
            std::string::npos);
  EXPECT_NE(testing::message_of<StateError>([&] { keeper.record(0, queries(65)); }).find("65 queries of layer 0"),
            std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] {
              keeper.record(1, queries(2, Dtype::f16));
            }).find("are f16, but the step began with f32"),
            std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] { keeper.record(2, queries(2)); }).find("layer 2 is out of range"),
            std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] { keeper.record(0, {}); }).find("layer 0 has no queries"),
            std::string::npos);
  EXPECT_NE(testing::message_of<StateError>([&] {
              keeper.begin_step(tokens);
            }).find("begin_step: layer 0 has shown 0 of the 2 tokens"),
            std::string::npos);
  keeper.record(0, queries(2));
  for (const char* operation : {"observe", "begin_step", "save"})
    EXPECT_NE(testing::message_of<StateError>([&] {
                if (operation[0] == 'o')
                  keeper.observe({.layer = 0, .sequences = tokens.sequences, .indptr = two, .queries = queries(2)});
                else if (operation[0] == 'b')
                  keeper.begin_step(tokens);
                else
                  keeper.save(id, "never written");
              }).find(std::string(operation) + ": layer 1 has shown 0 of the 2 tokens"),
              std::string::npos);
  keeper.record(1, queries(2));  // late is not too late
  StepTokens half = tokens;
  half.query_dtype = Dtype::f16;
  EXPECT_NE(testing::message_of<InvalidArgument>([&] { keeper.begin_step(half); }).find("earlier ones were f32"),
            std::string::npos);
  StepTokens turned = tokens;
  turned.basis = QueryBasis::post_rope;
  EXPECT_NE(
      testing::message_of<InvalidArgument>([&] { keeper.begin_step(turned); }).find("after RoPE, unlike earlier ones"),
      std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] {
              keeper.record(0, queries(2), Tensor(Array::full({2, 4}, 1.0F)));
            }).find("log-sum-exps of layer 0 are given, unlike what begin_step() was told"),
            std::string::npos);
  EXPECT_NE(testing::message_of<InvalidArgument>([&] {
              keeper.observe({.layer = 0,
                              .sequences = tokens.sequences,
                              .indptr = two,
                              .queries = queries(2),
                              .log_sum_exp = Tensor(Array::full({2, 3}, 1.0F))});
            }).find("log-sum-exps of layer 0 are f32 [2, 3] on cpu; allowed f32 [2, 4]"),
            std::string::npos);
  EXPECT_EQ(keeper.logical_length(id), 2) << "nothing was counted";

  keeper.observe({.layer = 0, .sequences = tokens.sequences, .indptr = two, .queries = queries(2)});
  EXPECT_NE(
      testing::message_of<StateError>([&] { keeper.begin_step(tokens); }).find("layer 1 has shown 2 of the 4 tokens"),
      std::string::npos);

  Keeper narrowing(model(), make_policy("fastkv,budget=8,scorer.window=4,layer=0"), {.layer_by_layer = true});
  narrowing.join(id);
  EXPECT_NE(
      testing::message_of<Unsupported>([&] { narrowing.begin_step(tokens); }).find("narrows prompts between layers"),
      std::string::npos);
}

/// Layer 0 has shown tokens that layer 1 has yet to show, whether they come by observe() or by record().
TEST(KeeperStep, TakesNoTokensBackInItsMiddle) {
  const SequenceId id = 1;
  const Ints two{0, 2};
  const StepTokens tokens{.sequences = {&id, 1}, .indptr = two};
  const Array numbers = Array::full({2, 4, kKeyDim}, 1, Dtype::f32);
  for (const bool records : {false, true}) {
    Keeper keeper(model(), make_policy(kTova));
    keeper.join(id);
    const auto show = [&](std::int32_t layer) {
      if (records && layer == 0) keeper.begin_step(tokens);
      if (records)
        keeper.record(layer, Tensor(numbers));
      else
        keeper.observe({.layer = layer, .sequences = tokens.sequences, .indptr = two, .queries = Tensor(numbers)});
    };
    for (const std::int32_t layer : {0, 1}) show(layer);
    show(0);
    for (const bool with_window : {false, true}) {
      const auto take = [&] { with_window ? keeper.truncate_with_window(id, 1) : keeper.truncate(id, 1); };
      EXPECT_NE(
          testing::message_of<StateError>(take).find(std::string(with_window ? "truncate_with_window" : "truncate") +
                                                     ": layer 1 has shown 2 of the 4 tokens"),
          std::string::npos)
          << records;
      EXPECT_EQ(keeper.logical_length(id), 4) << "nothing has changed";
    }
    show(1);
    keeper.truncate(id, 3);
    keeper.truncate_with_window(id, 1);
    EXPECT_EQ(keeper.logical_length(id), 1);
  }
}

}  // namespace
}  // namespace kvkeep::keeper_step_test
