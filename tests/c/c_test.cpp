// SPDX-License-Identifier: Apache-2.0
// The C interface beside the Keeper: the same slots, pages and errors.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <limits>

#include "c_engine.h"
#include "kvkeep/parts/prompts.h"

namespace kvkeep::c_test {
namespace {

using testing::Array;
using namespace engines;
using namespace c_engine;

// Structs of version 3: fields may be added at their ends, nothing else.
static_assert(sizeof(kvkeep_layer) == 12 && offsetof(kvkeep_model, layers) == 64 && sizeof(kvkeep_model) == 112 &&
              sizeof(kvkeep_layer_rope) == 32);
static_assert(offsetof(kvkeep_provided, accelerator) == 40 && sizeof(kvkeep_provided) == 64);
static_assert(offsetof(kvkeep_observation, unread) == 64 && sizeof(kvkeep_observation) == 72);
static_assert(offsetof(kvkeep_step_tokens, log_sum_exp) == 52 && sizeof(kvkeep_step_tokens) == 56);
static_assert(sizeof(kvkeep_layer_cache) == 40 && sizeof(kvkeep_page_allocator) == 32);
static_assert(offsetof(kvkeep_cache, named) == 80 && sizeof(kvkeep_cache) == 88);
static_assert(sizeof(kvkeep_cut) == 40 && sizeof(kvkeep_page_move) == 48 && sizeof(kvkeep_unscored) == 16);
static_assert(offsetof(kvkeep_report, pending) == 112 && offsetof(kvkeep_report, slots_chosen) == 128);
static_assert(sizeof(kvkeep_report) == 136 && offsetof(kvkeep_totals, event_seconds) == 88);
static_assert(sizeof(kvkeep_narrowing) == 32 && sizeof(kvkeep_layer_report) == 40 && sizeof(kvkeep_totals) == 216);

constexpr const char* kPolicy = "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16";

TEST(CInterface, KeepsWhatTheKeeperKeepsDenseAndInPages) {
  for (const std::int32_t page_size : {0, 16, 12})
    for (const char* policy : {kPolicy, R"({"policy": "keydiff", "budget": 48, "interval": 12})"}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      DenseEngine cpp(policy[0] == '{' ? make_policy_from_json(policy) : make_policy(policy), false, Dtype::f32);
      CEngine c(policy, page_size);
      std::int64_t cuts = 0, freed = 0;
      ASSERT_NO_FATAL_FAILURE(expect_same_steps(cpp, c, 30, [&](const Report& expected, const kvkeep_report& report) {
        ASSERT_EQ(report.num_cuts, std::ssize(expected.cuts));
        for (std::int64_t i = 0; i < report.num_cuts; ++i) {
          const Cut& cut = expected.cuts[static_cast<std::size_t>(i)];
          EXPECT_EQ(report.cuts[i].sequence, cut.sequence);
          EXPECT_EQ(report.cuts[i].logical_length, cut.logical_length);
          EXPECT_EQ(report.cuts[i].length_before, cut.length_before);
          EXPECT_EQ(report.cuts[i].length_after, cut.length_after);
          EXPECT_EQ(report.cuts[i].slots_after, cut.slots_after);
        }
        cuts += report.num_cuts;
        freed += report.pages_freed;
      }));
      EXPECT_GE(cuts, 4);
      if (page_size > 0) {
        EXPECT_GE(freed, 4);
        EXPECT_EQ(c.pool.capacity() - c.pool.free_pages(), std::ssize(c.pages[1]) + std::ssize(c.pages[2]));
      }
      kvkeep_totals totals{};
      totals.size = sizeof totals;
      ASSERT_EQ(kvkeep_read_totals(c.keeper.get(), &totals), KVKEEP_OK);
      EXPECT_EQ(totals.sequences_cut, cuts);
      EXPECT_EQ(totals.slots_kept, cpp.keeper.totals().slots_kept);
      EXPECT_EQ(totals.slots_chosen, cpp.keeper.totals().slots_chosen);
      EXPECT_GT(totals.slots_chosen, 0);
      EXPECT_EQ(totals.steps, 30);
      EXPECT_NE(std::string(kvkeep_policy_json(c.keeper.get())).find("\"budget\":48"), std::string::npos)
          << kvkeep_policy_json(c.keeper.get());
    }
}

TEST(CInterface, DoesWhatAPlanSaysOnce) {
  CEngine c(kPolicy);
  oracle::Random random(6);
  c.join(1);
  kvkeep_report report{};
  EXPECT_EQ(c.call(kvkeep_apply, {1}, report), KVKEEP_STATE_ERROR);
  EXPECT_STREQ(kvkeep_last_error(), "apply: there is no plan; allowed after plan(), once");
  c.feed(numbers_of(random, {{1, 70}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK);
  c.feed(numbers_of(random, {{1, 20}}));
  ASSERT_EQ(c.call(kvkeep_plan, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(report.num_cuts, 1);
  EXPECT_EQ(report.cuts[0].length_after, 48);
  EXPECT_EQ(report.slots_dropped, kRows * (report.cuts[0].length_before - 48));
  EXPECT_GT(c.lengths.at(1)[0], 48) << "a plan moves nothing";
  ASSERT_EQ(c.call(kvkeep_apply, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(c.lengths.at(1)[0], 48);
  EXPECT_EQ(c.call(kvkeep_apply, {1}, report), KVKEEP_STATE_ERROR);
  c.feed(numbers_of(random, {{1, 20}}));
  ASSERT_EQ(c.call(kvkeep_plan, {1}, report), KVKEEP_OK);
  c.feed(numbers_of(random, {{1, 1}}));
  EXPECT_EQ(c.call(kvkeep_apply, {1}, report), KVKEEP_STATE_ERROR);
  EXPECT_NE(std::string(kvkeep_last_error()).find("out of date"), std::string::npos);
}

TEST(CInterface, RecordsAStepThatBeganAndTakesTokensBack) {
  DenseEngine cpp(kPolicy, false, Dtype::f32);
  CEngine c(kPolicy);
  oracle::Random random(7);
  cpp.join(1);
  c.join(1);
  c.records = true;
  const auto feed = [&](std::int32_t tokens) {
    const Numbers numbers = numbers_of(random, {{1, tokens}});
    std::int64_t before = 0, after = 0;
    ASSERT_EQ(kvkeep_logical_length(c.keeper.get(), 1, &before), KVKEEP_OK);
    cpp.feed(numbers);
    c.feed(numbers);
    ASSERT_EQ(kvkeep_logical_length(c.keeper.get(), 1, &after), KVKEEP_OK);
    EXPECT_EQ(after, before + tokens);
  };
  const auto step = [&] {
    kvkeep_report report{};
    static_cast<void>(cpp.cut({1}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  };
  feed(40);
  step();
  for (int n = 0; n < 12; ++n) {
    feed(5);
    const std::int64_t back = cpp.keeper.logical_length(1) - 2;
    cpp.keeper.truncate(1, back);
    ASSERT_EQ(kvkeep_truncate(c.keeper.get(), 1, back), KVKEEP_OK) << kvkeep_last_error();
    for (std::int32_t& length : cpp.lengths.at(1)) length -= 2;
    for (std::int32_t& length : c.lengths.at(1)) length -= 2;
    step();
    std::int64_t tokens = 0;
    ASSERT_EQ(kvkeep_tokens_to_event(c.keeper.get(), 1, &tokens), KVKEEP_OK);
    EXPECT_EQ(tokens, cpp.keeper.tokens_to_event(1));
    ASSERT_EQ(kvkeep_rollback_limit(c.keeper.get(), 1, &tokens), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(tokens, cpp.keeper.rollback_limit(1));
    ASSERT_EQ(kvkeep_whole_prefix(c.keeper.get(), 1, &tokens), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(tokens, cpp.keeper.whole_prefix(1));
    ASSERT_EQ(kvkeep_evicted(c.keeper.get(), 1, &tokens), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(tokens, cpp.keeper.evicted(1));
    EXPECT_EQ(kvkeep_evicted(c.keeper.get(), 2, &tokens), KVKEEP_STATE_ERROR);
  }
  ASSERT_NO_FATAL_FAILURE(expect_same(cpp, c));
  std::int64_t queries = 0;
  ASSERT_EQ(kvkeep_queries_read(c.keeper.get(), &queries), KVKEEP_OK);
  EXPECT_EQ(queries, cpp.keeper.queries_read());
  EXPECT_GE(cpp.keeper.totals().events, 2);
}

TEST(CInterface, TakesTokensWhoseQueriesNobodyReads) {
  CEngine c(kPolicy);
  c.join(1);
  const std::int64_t id = 1;
  const std::int32_t indptr[] = {0, 5};
  for (std::int32_t l = 0; l < kLayers; ++l) {
    kvkeep_observation seen{};
    seen.size = sizeof seen;
    seen.layer = l;
    seen.num_sequences = 1;
    seen.sequences = &id;
    seen.indptr = indptr;
    EXPECT_EQ(kvkeep_observe(c.keeper.get(), &seen), KVKEEP_INVALID_ARGUMENT) << "it has no queries";
    seen.unread = 1;
    EXPECT_EQ(kvkeep_observe(c.keeper.get(), &seen), KVKEEP_OK) << kvkeep_last_error();
  }
  std::int64_t length = 0;
  ASSERT_EQ(kvkeep_logical_length(c.keeper.get(), 1, &length), KVKEEP_OK);
  EXPECT_EQ(length, 5);
}

TEST(CInterface, HasNothingPendingAndNoWorkspaceOnTheCpu) {
  CEngine c(kPolicy);
  oracle::Random random(10);
  c.join(1);
  c.feed(numbers_of(random, {{1, 70}}));
  kvkeep_report report{};
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK);
  c.feed(numbers_of(random, {{1, 20}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(report.num_cuts, 1);
  EXPECT_EQ(report.pending, 0);
  EXPECT_EQ(c.lengths.at(1)[0], 48);
  EXPECT_EQ(c.call(kvkeep_finish, {1}, report), KVKEEP_STATE_ERROR);
  EXPECT_NE(std::string(kvkeep_last_error()).find("finish: no event is pending"), std::string::npos);
  std::int64_t bytes = -1;
  const auto ask = [&](const kvkeep_cache& cache) { return kvkeep_workspace_bytes(c.keeper.get(), &cache, &bytes); };
  ASSERT_EQ(c.call(ask, {1}, report, false), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(bytes, 0);
  const auto older = [&](const kvkeep_cache& cache) {
    report.size = offsetof(kvkeep_report, slots_kept);
    report.slots_kept = -1;
    return kvkeep_step(c.keeper.get(), &cache, &report);
  };
  EXPECT_EQ(c.call(older, {1}, report, false), KVKEEP_OK) << "a program that was compiled before slots were counted";
  EXPECT_EQ(report.slots_kept, -1);
  kvkeep_accelerator_free(nullptr);
}

TEST(CInterface, CutsAPromptInPiecesAndWhatTheProgramNames) {
  CEngine c("tova,budget=48,interval=12,recent=4,prefill=pieces,trigger=named");
  oracle::Random random(8);
  ASSERT_EQ(kvkeep_join(c.keeper.get(), 1, 0, 100), KVKEEP_OK);
  c.lengths[1] = Ints(kRows, 0);
  kvkeep_report report{};
  for (int i = 0; i < 4; ++i) {
    c.feed(numbers_of(random, {{1, 25}}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(c.lengths.at(1)[0], i == 0 ? 25 : 48);
  }
  c.feed(numbers_of(random, {{1, 40}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(c.lengths.at(1)[0], 88);
  std::int64_t name = 2;
  const auto named = [&](kvkeep_cache cache) {
    cache.named = &name;
    cache.num_named = 1;
    return kvkeep_step(c.keeper.get(), &cache, &report);
  };
  EXPECT_EQ(c.call(named, {1}, report, true), KVKEEP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvkeep_last_error()).find("sequence 2 is named for an event"), std::string::npos);
  name = 1;
  ASSERT_EQ(c.call(named, {1}, report, true), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(c.lengths.at(1)[0], 48);
}

TEST(CInterface, SavesAndRestoresASequence) {
  CEngine c(kPolicy);
  oracle::Random random(8);
  c.join(1);
  c.feed(numbers_of(random, {{1, 70}}));
  kvkeep_report report{};
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK);
  const auto file = std::filesystem::temp_directory_path() / text("kvkeep_c_", ::getpid());
  ASSERT_EQ(kvkeep_save(c.keeper.get(), 1, file.c_str()), KVKEEP_OK) << kvkeep_last_error();
  const Kept other = make(kPolicy);
  ASSERT_EQ(kvkeep_restore(other.get(), 4, file.c_str()), KVKEEP_OK) << kvkeep_last_error();
  const std::int32_t* held = nullptr;
  std::int64_t count = 0;
  ASSERT_EQ(kvkeep_positions(other.get(), 4, 1, 0, &held, &count), KVKEEP_OK);
  EXPECT_EQ(Ints(held, held + count), c.positions(1, kHeads));
  std::filesystem::remove(file);
  EXPECT_EQ(kvkeep_restore(other.get(), 5, file.c_str()), KVKEEP_INVALID_ARGUMENT);
}

TEST(CInterface, NarrowsAPromptLayerByLayer) {
  const char* policy = "fastkv,layer=0,budget=24,window=8";
  kvkeep_provided provided{};
  provided.size = sizeof provided;
  provided.queries = 1;
  provided.layer_by_layer = 1;
  const Kept c = make(policy, &provided);
  Keeper cpp(engines::model(), make_policy(policy), {.layer_by_layer = true});
  oracle::Random random(9);
  const Numbers numbers = numbers_of(random, {{1, 60}});
  cpp.join(1);
  ASSERT_EQ(kvkeep_join(c.get(), 1, 0, -1), KVKEEP_OK);
  std::vector<LayerKv> layers;
  for (std::size_t l = 0; l < kLayers; ++l)
    layers.emplace_back(DenseKv{numbers.keys[l].permute({1, 0, 2}).unsqueeze(0).contiguous(),
                                numbers.values[l].permute({1, 0, 2}).unsqueeze(0).contiguous()});
  Ints lengths(kRows, 60), lengths_of_c = lengths;
  cpp.bind(layers);
  const CacheView view{numbers.ids, {lengths, kRows}};
  const Observation seen{.layer = 0, .sequences = numbers.ids, .indptr = numbers.indptr, .queries = numbers.queries[0]};
  cpp.observe(seen);
  const LayerReport expected = cpp.part<parts::Prompts>().narrow(seen, view);

  Arrays arrays;
  std::vector<kvkeep_layer_cache> layers_of_c;
  for (const LayerKv& layer : layers) {
    const auto& kv = std::get<DenseKv>(layer);
    layers_of_c.push_back({KVKEEP_DENSE, arrays.of(Array(kv.keys)), arrays.of(Array(kv.values)), nullptr, nullptr});
  }
  kvkeep_observation seen_by_c{};
  seen_by_c.size = sizeof seen_by_c;
  seen_by_c.num_sequences = 1;
  seen_by_c.sequences = numbers.ids.data();
  seen_by_c.indptr = numbers.indptr.data();
  seen_by_c.queries = arrays.of(numbers.queries[0]);
  kvkeep_cache cache{};
  cache.size = sizeof cache;
  cache.num_sequences = 1;
  cache.sequences = numbers.ids.data();
  cache.lengths = lengths_of_c.data();
  cache.rows_per_sequence = kRows;
  kvkeep_layer_report report{};
  report.size = sizeof report;
  ASSERT_EQ(kvkeep_bind(c.get(), layers_of_c.data()), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(kvkeep_observe(c.get(), &seen_by_c), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(kvkeep_narrow(c.get(), &seen_by_c, &cache, &report), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(report.num_prompts, std::ssize(expected.prompts));
  ASSERT_EQ(report.num_prompts, 1);
  EXPECT_EQ(report.prompts[0].all_continue, 0);
  EXPECT_EQ(Ints(report.prompts[0].tokens, report.prompts[0].tokens + report.prompts[0].num_tokens),
            expected.prompts.front().tokens);
  EXPECT_EQ(lengths_of_c, lengths);
}

/// Fails with this status and a sentence that has these words.
void expect_failed(kvkeep_status found, kvkeep_status status, const std::string& words) {
  EXPECT_EQ(found, status);
  EXPECT_NE(std::string(kvkeep_last_error()).find(words), std::string::npos) << kvkeep_last_error();
}

TEST(CInterface, SaysWhatIsWrong) {
  const CModel model;
  kvkeep_keeper* keeper = nullptr;
  expect_failed(kvkeep_keeper_make(nullptr, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "model is NULL");
  expect_failed(kvkeep_keeper_make(&model.of_c, nullptr, nullptr, &keeper), KVKEEP_INVALID_ARGUMENT, "policy is NULL");
  expect_failed(kvkeep_keeper_make(&model.of_c, "tova,budget=8", nullptr, nullptr), KVKEEP_INVALID_ARGUMENT,
                "keeper is NULL");
  expect_failed(kvkeep_keeper_make(&model.of_c, "nosuch", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT, "nosuch");
  expect_failed(kvkeep_keeper_make(&model.of_c, " {\"policy\": 3}", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "policy");
  kvkeep_model wrong = model.of_c;
  wrong.size = 0;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT, "size is 0");
  wrong.size = std::size_t{1} << 20;  // behind the struct lies memory that is nobody's
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "size is 1048576");
  wrong = model.of_c;
  wrong.num_layers = std::numeric_limits<std::int32_t>::max();
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "num_layers is 2147483647");
  wrong = model.of_c;
  wrong.rope_attention_scaling = std::numeric_limits<double>::quiet_NaN();
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "rope.attention_scaling is nan");
  wrong = model.of_c;
  wrong.logit_cap = -1;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "logit_cap must be finite and not negative (0 means none); given -1");
  wrong.logit_cap = 50;
  expect_failed(kvkeep_keeper_make(&wrong, "expected,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "expects attention of logits that are not capped; given 50");
  const float sinks[] = {1, 2, 3};
  kvkeep_layer_sinks few{.layer = 0, .heads = 3, .sinks = sinks};
  wrong = model.of_c;
  wrong.layer_sinks = &few;
  wrong.num_layer_sinks = 1;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "layer 0 has 3 sink logits; allowed none, or one for each of the 4 query heads");
  few.layer = 2;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "layer_sinks names layer 2; allowed 0 to 1");
  wrong = model.of_c;
  wrong.num_layers = 0;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "num_layers is 0");
  wrong = model.of_c;
  wrong.rope_style = 3;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "rope_style is 3");
  wrong = model.of_c;
  wrong.kv_heads = 3;
  expect_failed(kvkeep_keeper_make(&wrong, "tova,budget=8", nullptr, &keeper), KVKEEP_INVALID_ARGUMENT,
                "multiple of kv_heads");
  kvkeep_provided provided{};
  provided.size = sizeof provided;
  expect_failed(kvkeep_keeper_make(&model.of_c, "tova,budget=8", &provided, &keeper), KVKEEP_INVALID_ARGUMENT,
                "queries");
  EXPECT_EQ(keeper, nullptr);
  expect_failed(kvkeep_join(nullptr, 1, 0, -1), KVKEEP_INVALID_ARGUMENT, "keeper is NULL");
  kvkeep_keeper_free(nullptr);
  expect_failed(kvkeep_read_totals(nullptr, nullptr), KVKEEP_INVALID_ARGUMENT, "totals is NULL");
  kvkeep_totals totals{};
  expect_failed(kvkeep_read_totals(nullptr, &totals), KVKEEP_INVALID_ARGUMENT, "totals: size is 0");
  kvkeep_report sizeless{};
  for (const auto call : {kvkeep_step, kvkeep_plan, kvkeep_apply, kvkeep_finish})
    expect_failed(call(make(kPolicy).get(), nullptr, &sizeless), KVKEEP_INVALID_ARGUMENT, "report: size is 0");

  CEngine c(kPolicy);
  oracle::Random random(3);
  c.join(1);
  expect_failed(kvkeep_join(c.keeper.get(), 1, 0, -1), KVKEEP_STATE_ERROR, "sequence 1");
  expect_failed(kvkeep_pin(c.keeper.get(), 1, 5, 5), KVKEEP_INVALID_ARGUMENT, "pin");
  const Numbers numbers = numbers_of(random, {{1, 70}});
  Arrays arrays;
  kvkeep_tensor queries = *arrays.of(numbers.queries[0]);
  kvkeep_observation seen{};
  seen.size = sizeof seen;
  seen.num_sequences = 1;
  seen.sequences = numbers.ids.data();
  seen.indptr = numbers.indptr.data();
  seen.queries = &queries;
  const auto observed = [&](kvkeep_status status, const std::string& words) {
    expect_failed(kvkeep_observe(c.keeper.get(), &seen), status, words);
    queries = *arrays.of(numbers.queries[0]);
  };
  queries.ndim = 9;
  observed(KVKEEP_INVALID_ARGUMENT, "observation: queries: ndim is 9");
  queries.dtype.bits = 12;
  observed(KVKEEP_INVALID_ARGUMENT, "12 bits");
  queries.dtype.lanes = 4;
  observed(KVKEEP_INVALID_ARGUMENT, "4 lanes");
  queries.device.type = 10;
  observed(KVKEEP_INVALID_ARGUMENT, "device has type 10");
  queries.data = nullptr;
  observed(KVKEEP_INVALID_ARGUMENT, "data is NULL");
  queries.byte_offset = std::uint64_t{0} - 4;
  observed(KVKEEP_INVALID_ARGUMENT, "byte_offset is 18446744073709551612");
  queries.shape = nullptr;
  observed(KVKEEP_INVALID_ARGUMENT, "observation: queries: shape is NULL; allowed an address of 3 entries");
  seen.basis = 2;
  observed(KVKEEP_INVALID_ARGUMENT, "basis is 2");
  seen.basis = 0;
  seen.sequences = nullptr;
  observed(KVKEEP_INVALID_ARGUMENT, "sequences is NULL");
  seen.sequences = numbers.ids.data();
  seen.num_sequences = -1;
  observed(KVKEEP_INVALID_ARGUMENT, "has -1 entries");
  seen.num_sequences = std::numeric_limits<std::int64_t>::max();
  observed(KVKEEP_INVALID_ARGUMENT, "has 9223372036854775807 entries");
  seen.num_sequences = 1;
  seen.layer = 5;
  observed(KVKEEP_INVALID_ARGUMENT, "layer 5");
  std::int64_t length = -1;
  ASSERT_EQ(kvkeep_logical_length(c.keeper.get(), 1, &length), KVKEEP_OK);
  EXPECT_EQ(length, 0) << "what was refused was not recorded";
  kvkeep_report report{};
  c.keys[0] = Array();
  expect_failed(c.call(kvkeep_step, {1}, report), KVKEEP_INVALID_ARGUMENT, "cache: keys is NULL");
  expect_failed(kvkeep_step(c.keeper.get(), nullptr, nullptr), KVKEEP_INVALID_ARGUMENT, "cache is NULL");
  expect_failed(kvkeep_truncate(c.keeper.get(), 1, -1), KVKEEP_INVALID_ARGUMENT, "given -1; allowed 0 to that");
}

TEST(CInterface, RefusesWhatNoPolicyReadsAndChecksWhatItPassesBy) {
  CEngine c(kPolicy);
  kvkeep_keeper* const keeper = c.keeper.get();
  c.join(1);
  const std::int64_t id = 1, stranger = 2;
  const std::int32_t indptr[] = {0, 5};
  const float nats[] = {1, 1};
  Arrays arrays;
  expect_failed(kvkeep_give(keeper, 0, 1, &id, indptr, arrays.of(Array::full({5, kHeads}, 1, Dtype::f32))),
                KVKEEP_UNSUPPORTED, "give: policy ams-tova reads no scores of the engine's");
  expect_failed(kvkeep_surprise(keeper, 1, nats, 2), KVKEEP_UNSUPPORTED,
                "surprise: policy ams-tova reads no surprisal; allowed under a policy that does");

  const std::int32_t query_heads = engines::model().query_heads;
  const kvkeep_tensor* const out = arrays.of(Array::full({5, query_heads, kValueDim}, 1, Dtype::f32));
  const kvkeep_tensor* const log_sum_exp = arrays.of(Array::full({5, query_heads}, 1, Dtype::f32));
  kvkeep_observation seen{};
  seen.size = sizeof seen;
  seen.num_sequences = 1;
  seen.sequences = &id;
  seen.indptr = indptr;
  EXPECT_EQ(kvkeep_prefetch(keeper, &seen), KVKEEP_OK);
  EXPECT_EQ(kvkeep_view(keeper, &seen, out, log_sum_exp), KVKEEP_OK) << "in every layer, whatever the policy";
  expect_failed(kvkeep_view(keeper, &seen, log_sum_exp, out), KVKEEP_INVALID_ARGUMENT, "view: the output of attention");
  Ints lengths(kRows, 0);
  kvkeep_cache cache{};
  cache.size = sizeof cache;
  cache.num_sequences = 1;
  cache.sequences = &id;
  cache.lengths = lengths.data();
  cache.rows_per_sequence = kRows;
  EXPECT_EQ(kvkeep_narrow(keeper, &seen, &cache, nullptr), KVKEEP_OK) << kvkeep_last_error();
  const auto all_fail = [&](kvkeep_status status, const std::string& words) {
    expect_failed(kvkeep_prefetch(keeper, &seen), status, words);
    expect_failed(kvkeep_view(keeper, &seen, out, log_sum_exp), status, words);
    EXPECT_TRUE(words[0] != ':' || std::string(kvkeep_last_error()).starts_with("view:")) << kvkeep_last_error();
    expect_failed(kvkeep_narrow(keeper, &seen, &cache, nullptr), status, words);
  };
  seen.layer = 77;
  all_fail(KVKEEP_INVALID_ARGUMENT, "layer 77 is out of range");
  seen.layer = 0;
  seen.sequences = &stranger;
  all_fail(KVKEEP_STATE_ERROR, ": sequence 2 is not known; allowed after join(2)");
  seen.sequences = &id;
  const std::int32_t falling[] = {5, 0};
  seen.indptr = falling;
  all_fail(KVKEEP_INVALID_ARGUMENT, "indptr does not ascend from 0");
  seen.size = 0;
  all_fail(KVKEEP_INVALID_ARGUMENT, "observation: size is 0");
}

TEST(CInterface, MovesWhatElseASlotHas) {
  const CModel model;
  kvkeep_keeper* made = nullptr;
  ASSERT_EQ(kvkeep_keeper_make(&model.of_c, "streaming,budget=12,sink=2,interval=4,prefill=cut", nullptr, &made),
            KVKEEP_OK);
  const Kept keeper(made);
  Arrays arrays;
  const Array keys = Array::zeros({2, kLayers, kHeads, 20, kKeyDim}, Dtype::f32),
              values = Array::zeros({2, kLayers, kHeads, 20, kValueDim}, Dtype::f32);
  Array extra = Array::zeros({1, kHeads, 20, 1}, Dtype::u8);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (std::int64_t t = 0; t < 20; ++t) extra[0][h][t].fill_(static_cast<int>(100 * h + t));
  std::vector<kvkeep_layer_cache> layers;
  for (std::int64_t l = 0; l < kLayers; ++l)
    layers.push_back({KVKEEP_DENSE, arrays.of(keys.select(1, l).narrow(0, 0, 1)),
                      arrays.of(values.select(1, l).narrow(0, 0, 1)), nullptr, nullptr});
  const kvkeep_tensor* extras[] = {nullptr, arrays.of(keys.select(1, 1).narrow(0, 0, 1))};
  expect_failed(kvkeep_bind_extra(keeper.get(), layers.data(), extras), KVKEEP_INVALID_ARGUMENT,
                "keys of layer 1 and extras of layer 1 share memory");
  extras[1] = arrays.of(extra);
  ASSERT_EQ(kvkeep_bind_extra(keeper.get(), layers.data(), extras), KVKEEP_OK) << kvkeep_last_error();
  const std::int64_t id = 3;
  const std::int32_t indptr[] = {0, 16};
  ASSERT_EQ(kvkeep_join(keeper.get(), id, 0, -1), KVKEEP_OK);
  for (std::int32_t l = 0; l < kLayers; ++l) {
    kvkeep_observation seen{};
    seen.size = sizeof seen, seen.layer = l, seen.num_sequences = 1, seen.sequences = &id, seen.indptr = indptr;
    ASSERT_EQ(kvkeep_observe(keeper.get(), &seen), KVKEEP_OK) << kvkeep_last_error();
  }
  std::int32_t length = 16;
  kvkeep_cache cache{};
  cache.size = sizeof cache, cache.num_sequences = 1, cache.sequences = &id, cache.lengths = &length;
  cache.rows_per_sequence = 1;
  kvkeep_report report{};
  report.size = sizeof report;
  ASSERT_EQ(kvkeep_step(keeper.get(), &cache, &report), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(length, 12);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (std::int64_t t = 0; t < 12; ++t)
      EXPECT_EQ(extra[0][h][t].item<std::uint8_t>(), 100 * h + (t < 2 ? t : t + 4)) << h << " " << t;
}

TEST(CInterface, ReadsStructsOfOtherVersions) {
  const CModel model;
  // An older header, whose model ended before softmax_scale and layers.
  kvkeep_model older = model.of_c;
  older.size = offsetof(kvkeep_model, softmax_scale);
  older.softmax_scale = -7;
  older.layers = reinterpret_cast<const kvkeep_layer*>(std::uintptr_t{1});
  kvkeep_keeper* keeper = nullptr;
  ASSERT_EQ(kvkeep_keeper_make(&older, "tova,budget=8", nullptr, &keeper), KVKEEP_OK) << kvkeep_last_error();
  kvkeep_totals totals{};
  totals.size = offsetof(kvkeep_totals, events);
  totals.events = -5;
  ASSERT_EQ(kvkeep_read_totals(keeper, &totals), KVKEEP_OK);
  EXPECT_EQ(totals.events, -5) << "no room for it was stated";
  kvkeep_keeper_free(keeper);

  // A newer one, with a field at its end.
  struct {
    kvkeep_model known;
    std::int64_t more;
  } newer{model.of_c, 0};
  newer.known.size = sizeof newer;
  ASSERT_EQ(kvkeep_keeper_make(&newer.known, "tova,budget=8", nullptr, &keeper), KVKEEP_OK) << kvkeep_last_error();
  kvkeep_keeper_free(keeper);
  newer.more = 1;
  expect_failed(kvkeep_keeper_make(&newer.known, "tova,budget=8", nullptr, &keeper), KVKEEP_UNSUPPORTED,
                "does not know");
}

}  // namespace
}  // namespace kvkeep::c_test
