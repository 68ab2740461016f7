// SPDX-License-Identifier: Apache-2.0
// Decoding under a policy: the golden runs, and that neither company nor the place in a cache changes what a sequence
// says.

#include "kvlab/generation.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/decoder_trace.h"
#include "kvlab/record.h"
#include "kvlab/weights.h"
#include "temporary_folder.h"

namespace kvkeep::lm::generation_test {
namespace {

namespace fs = std::filesystem;

fs::path golden() { return KVKEEP_TEST_GOLDEN_DIR; }
fs::path llama() { return golden() / "decoder" / "llama_gqa"; }

std::vector<std::int32_t> random_ids(std::int32_t n, std::uint32_t seed, std::int32_t vocab = 256) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(vocab));
  return ids;
}

Request request(std::int32_t prompt, std::int32_t new_tokens, std::uint32_t seed) {
  return {.prompt = random_ids(prompt, seed), .new_tokens = new_tokens, .keep_logits = true, .keep_positions = true};
}

Completion alone(Decoder& decoder, const std::string& policy, Request one) {
  return std::move(generate(decoder, make_policy(policy), {std::move(one)}).completions.front());
}

void expect_the_same(const Completion& a, const Completion& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_TRUE(at::equal(a.logits, b.logits)) << "logits differ";
  EXPECT_EQ(a.peak_bytes, b.peak_bytes);
  EXPECT_EQ(a.kept_bytes, b.kept_bytes);
  ASSERT_EQ(a.events.size(), b.events.size());
  for (std::size_t i = 0; i < a.events.size(); ++i) {
    EXPECT_EQ(a.events[i].step, b.events[i].step);
    EXPECT_EQ(a.events[i].length_before, b.events[i].length_before);
    EXPECT_EQ(a.events[i].positions, b.events[i].positions) << "event " << i;
  }
}

// ---- Golden runs ----------------------------------------------------------------------------------------------------

void compare(const std::string& name, const nlohmann::json& rule, const at::Tensor& got, const at::Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << name;
  if (rule == "exact") {
    EXPECT_TRUE(at::equal(got, expected)) << name;
    return;
  }
  const double atol = rule["atol"], rtol = rule["rtol"];
  const at::Tensor a = got.contiguous(), b = expected.contiguous();
  double worst = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = a.const_data_ptr<float>()[i], y = b.const_data_ptr<float>()[i];
    worst = std::max(worst, std::abs(x - y) - atol - rtol * std::abs(y));
  }
  EXPECT_LE(worst, 0) << name;
}

std::vector<std::string> generate_cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(golden() / "generate"))
    if (fs::exists(entry.path() / "case.json")) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenGenerate : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, GoldenGenerate, ::testing::ValuesIn(generate_cases()),
                         [](const auto& one) { return one.param; });

TEST_P(GoldenGenerate, SaysTheTokensAndKeepsThePositionsOfTheReference) {
  const fs::path folder = golden() / "generate" / GetParam();
  std::ifstream in(folder / "case.json");
  const nlohmann::json about = nlohmann::json::parse(in);
  std::ifstream policy_file(folder / "policy.json");
  const std::string policy = nlohmann::json::parse(policy_file)["policy"];
  const auto known = policies();
  if (std::none_of(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == policy; }))
    GTEST_SKIP() << "no policy " << policy << " in this build";
  const trace::Result result = replay_generate(io::SafetensorsFile::open(folder / "trace.safetensors"), folder,
                                               load_policy(folder / "policy.json"));
  const io::SafetensorsFile expected = io::SafetensorsFile::open(folder / "expected.safetensors");
  for (const auto& [name, rule] : about["compare"].items()) {
    const auto found = std::find_if(result.tensors.begin(), result.tensors.end(),
                                    [&, name = name](const auto& t) { return t.first == name; });
    ASSERT_NE(found, result.tensors.end()) << name;
    compare(name, rule, found->second, expected.tensor(name));
  }
}

// ---- What a hook sees -----------------------------------------------------------------------------------------------

TEST(Generation, ShowsAnEventWholeBeforeItHappens) {
  Decoder decoder = Decoder::open(llama());
  std::map<SequenceId, std::vector<std::vector<std::vector<std::int32_t>>>> shown;
  GeneratorOptions options{.places = 2};
  options.hooks.on_event = [&](const EventSight& sight) {
    ASSERT_TRUE(sight.plan.decision.keep);
    std::map<SequenceId, std::vector<std::vector<std::int32_t>>> rows;
    for (std::size_t r = 0; r < sight.plan.table.rows.size(); ++r) {
      const Row& row = sight.plan.table.rows[r];
      const SequenceId id = sight.view.sequences[static_cast<std::size_t>(row.sequence)];
      EXPECT_EQ(sight.keeper.physical_length(id, row.layer, row.head), row.length) << "nothing is cut yet";
      std::vector<std::int32_t>& kept = rows[id].emplace_back();
      for (const std::int32_t slot : sight.plan.decision.keep->row(r)) kept.push_back(row.positions[slot]);
    }
    for (auto& [id, kept] : rows) shown[id].push_back(std::move(kept));
  };
  std::vector<Request> requests{request(20, 40, 1), request(41, 30, 2), request(9, 25, 3)};
  const GenerationRun run =
      generate(decoder, make_policy("ams-tova,budget=24,interval=8,window=8,recent=4,min_segment=4,max_segment=16"),
               requests, std::move(options));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::vector<SequenceEvent>& events = run.completions[i].events;
    ASSERT_GE(events.size(), 1U) << i;
    ASSERT_EQ(shown[static_cast<SequenceId>(i)].size(), events.size()) << i;
    for (std::size_t e = 0; e < events.size(); ++e)
      EXPECT_EQ(shown[static_cast<SequenceId>(i)][e], events[e].positions) << i << ", event " << e;
  }
}

TEST(Generation, ShowsTheLogitsOfEveryTokenThatItPredicts) {
  Decoder decoder = Decoder::open(llama());
  std::map<SequenceId, std::vector<at::Tensor>> shown;
  std::map<SequenceId, std::size_t> told;
  GeneratorOptions options{.places = 2};
  options.hooks.on_logits = [&](SequenceId id, std::span<const float> logits) {
    at::Tensor row = at::empty({1, static_cast<std::int64_t>(logits.size())}, at::TensorOptions(at::kFloat));
    std::copy(logits.begin(), logits.end(), row.data_ptr<float>());
    shown[id].push_back(std::move(row));
    EXPECT_EQ(shown[id].size(), told[id] + 1) << "before the token";
  };
  options.hooks.on_token = [&](SequenceId id, std::int32_t) { ++told[id]; };
  const std::vector<Request> requests{request(20, 40, 1), request(41, 30, 2), request(9, 25, 3)};
  const GenerationRun run =
      generate(decoder, make_policy("tova,budget=24,interval=8,recent=4"), requests, std::move(options));
  for (std::size_t i = 0; i < requests.size(); ++i)
    EXPECT_TRUE(at::equal(at::cat(shown[static_cast<SequenceId>(i)]), run.completions[i].logits)) << i;
}

// ---- Full is no library ---------------------------------------------------------------------------------------------

TEST(Generation, UnderFullIsBitForBitTheDecoderWithoutKvkeepB36) {
  Decoder decoder = Decoder::open(llama());
  const Request one = request(37, 40, 1);
  const Completion done = alone(decoder, "full", one);

  std::vector<LayerCache> cache = decoder.make_cache(1, 80);
  std::vector<std::int32_t> positions(37), tokens;
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<std::int32_t> whole{0, 37}, row{0}, none{0}, single{0, 1};
  at::Tensor last = decoder.forward({one.prompt, whole, positions, row, none}, cache);
  std::vector<at::Tensor> logits{last};
  tokens = lm::argmax(last);
  while (tokens.size() < 40) {
    const std::vector<std::int32_t> id{tokens.back()}, at{37 + static_cast<std::int32_t>(tokens.size()) - 1};
    last = decoder.forward({id, single, at, row, at}, cache);
    logits.push_back(last);
    tokens.push_back(lm::argmax(last)[0]);
  }
  EXPECT_EQ(done.tokens, tokens);
  EXPECT_TRUE(at::equal(done.logits, at::cat(logits)));
  EXPECT_TRUE(done.events.empty());
}

// ---- Company does not matter ----------------------------------------------------------------------------------------

class InCompany : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Policies, InCompany,
    ::testing::Values(
        "streaming,budget=24,interval=8", "tova,budget=24,interval=8,sink=2,recent=4",
        "ams-tova,budget=32,interval=8,window=8,min_segment=4,max_segment=16,sink=2,recent=4",
        "ams-tova,variant=official,budget=32,interval=8,window=8,min_segment=4,max_segment=16",
        "ams-tova,budget=32,interval=8,window=8,min_segment=4,max_segment=16,coverage=auto,min_quota=2,sink=2,recent=4",
        "pyramidkv-tova,budget=24,interval=8,beta=3,sink=2,recent=4", "adakv-tova,budget=24,interval=8,sink=2,recent=4",
        "chunkkv-tova,budget=24,interval=8,chunk=5,sink=2,recent=4",
        "criticalkv-tova,budget=24,interval=8,sink=2,recent=4",
        "criticalkv-tova,budget=24,interval=8,sink=2,recent=4,allocator.heads=adaptive",
        "adakv,budget=24,interval=8,window=4,sink=2,recent=4",
        "pyramidkv,budget=24,interval=8,window=4,beta=3,sink=2,recent=4",
        "adakv-h2o,budget=24,interval=8,sink=2,recent=4"),
    [](const auto& one) { return "Case" + std::to_string(one.index); });

TEST_P(InCompany, RaggedSequencesThatJoinAndLeaveSayWhatEachSaysAloneB4B14) {
  Decoder decoder = Decoder::open(llama());
  const std::vector<Request> requests{request(50, 60, 2), request(3, 40, 3), request(33, 1, 4), request(20, 70, 5),
                                      request(64, 30, 6)};
  GeneratorOptions options;
  options.places = 3;
  const GenerationRun together = generate(decoder, make_policy(GetParam()), requests, std::move(options));
  std::int64_t events = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE("sequence " + std::to_string(i));
    expect_the_same(together.completions[i], alone(decoder, GetParam(), requests[i]));
    events += static_cast<std::int64_t>(together.completions[i].events.size());
  }
  EXPECT_EQ(together.totals.sequences_cut, events);
  EXPECT_GT(together.totals.slots_dropped, 0) << "nothing was ever cut, so nothing was tested (B35)";
}

TEST(Generation, ASequenceThatLeavesInMidIntervalLeavesNothingBehindB5) {
  Decoder decoder = Decoder::open(llama());
  const std::string policy = "tova,budget=24,interval=8";
  Generator generator(decoder, make_policy(policy), {.places = 1, .capacity = 100});
  const SequenceId first = generator.join(request(30, 60, 7));
  for (int i = 0; i < 13; ++i) generator.step();
  generator.leave(first);
  EXPECT_FALSE(generator.keeper().knows(first));
  const SequenceId second = generator.join(request(41, 30, 8));
  while (generator.step()) {
  }
  expect_the_same(generator.leave(second), alone(decoder, policy, request(41, 30, 8)));
}

// ---- The cut cache is the masked cache ------------------------------------------------------------------------------

// Runs `forced` over a full cache and hides from step to step what the events dropped.
std::vector<at::Tensor> masked_run(Decoder& decoder, const Request& one, const Completion& cut) {
  const auto n = static_cast<std::int32_t>(one.prompt.size());
  const std::int64_t capacity = n + one.new_tokens;
  const std::int32_t heads = decoder.spec().kv_heads;
  std::vector<LayerCache> cache = decoder.make_cache(1, capacity);
  std::vector<at::Tensor> visible;
  for (std::int32_t l = 0; l < decoder.spec().num_layers(); ++l)
    visible.push_back(at::ones({1, heads, capacity}, at::TensorOptions(c10::ScalarType::Byte)));
  std::vector<std::int32_t> positions(one.prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<std::int32_t> whole{0, n}, row{0}, none{0}, single{0, 1};
  std::vector<at::Tensor> logits{decoder.forward({one.prompt, whole, positions, row, none}, cache)};
  std::size_t next_event = 0;
  for (std::int32_t step = 1; step < one.new_tokens; ++step) {
    const std::vector<std::int32_t> id{cut.tokens[static_cast<std::size_t>(step) - 1]}, at{n + step - 1};
    logits.push_back(decoder.forward({id, single, at, row, at}, cache, {.visible = visible}));
    if (next_event == cut.events.size() || cut.events[next_event].step != step) continue;
    const auto& kept = cut.events[next_event++].positions;
    for (std::int32_t r = 0; r < decoder.spec().num_layers() * heads; ++r) {
      at::Tensor mask = visible[static_cast<std::size_t>(r / heads)][0][r % heads];
      mask.narrow(0, 0, at[0] + 1).zero_();
      for (const std::int32_t position : kept[static_cast<std::size_t>(r)])
        mask.mutable_data_ptr<std::uint8_t>()[position] = 1;
    }
  }
  return logits;
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  double most = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i)
    most = std::max(most, std::abs(double{a.const_data_ptr<float>()[i]} - double{b.const_data_ptr<float>()[i]}));
  return most;
}

TEST_P(InCompany, TheCompactedCacheSaysWhatTheMaskedFullCacheSaysTokenByToken) {
  Decoder decoder = Decoder::open(llama());
  const Request one = request(40, 80, 9);
  const Completion cut = alone(decoder, GetParam(), one);
  ASSERT_GE(cut.events.size(), 5U);
  const std::vector<at::Tensor> masked = masked_run(decoder, one, cut);
  for (std::size_t s = 0; s < masked.size(); ++s) {
    EXPECT_EQ(lm::argmax(masked[s])[0], cut.tokens[s]) << "step " << s;
    EXPECT_LE(largest_difference(masked[s], cut.logits.narrow(0, static_cast<std::int64_t>(s), 1)), 1e-4)
        << "step " << s;
  }
}

TEST(Generation, HeadsOfUnequalLengthTakeTheNextTokenRightBehindTheirOwnSlots) {
  Decoder decoder = Decoder::open(llama());
  const std::int32_t heads = decoder.spec().kv_heads, layers = decoder.spec().num_layers();
  constexpr std::int32_t kPrompt = 40, kNew = 80, kBudget = 24;
  for (const char* policy : {"adakv-tova,budget=24,interval=8,sink=2,recent=4",
                             "criticalkv-tova,budget=24,interval=8,sink=2,recent=4,allocator.heads=adaptive"}) {
    SCOPED_TRACE(policy);
    const Completion cut = alone(decoder, policy, request(kPrompt, kNew, 9));
    ASSERT_GE(cut.events.size(), 5U);
    int unequal = 0;
    for (std::size_t e = 0; e < cut.events.size(); ++e)
      for (std::int32_t l = 0; l < layers; ++l) {
        std::size_t total = 0, shortest = SIZE_MAX, longest = 0;
        for (std::int32_t h = 0; h < heads; ++h) {
          const std::vector<std::int32_t>& kept = cut.events[e].positions[static_cast<std::size_t>(l * heads + h)];
          total += kept.size();
          shortest = std::min(shortest, kept.size());
          longest = std::max(longest, kept.size());
          EXPECT_EQ(kept.back(), kPrompt + cut.events[e].step - 1) << "the newest token stays, at its own position";
          EXPECT_EQ(kept[0], 0);
          EXPECT_TRUE(std::adjacent_find(kept.begin(), kept.end(), std::greater_equal<>()) == kept.end());
        }
        EXPECT_EQ(total, static_cast<std::size_t>(heads * kBudget)) << "event " << e << ", layer " << l;
        unequal += shortest != longest;
      }
    EXPECT_GT(unequal, static_cast<int>(cut.events.size()))
        << "heads hardly ever differed, so nothing was tested (B35)";

    Generator generator(decoder, make_policy(policy), {.places = 1, .capacity = kPrompt + kNew});
    const SequenceId id = generator.join(request(kPrompt, kNew, 9));
    std::vector<std::vector<std::int32_t>> before(static_cast<std::size_t>(layers * heads));
    const Keeper& keeper = generator.keeper();
    for (std::int64_t events = 0; generator.step(); events = keeper.totals().events)
      for (std::int32_t r = 0; r < layers * heads; ++r) {
        const auto now = keeper.positions(id, r / heads, r % heads);
        std::vector<std::int32_t>& old = before[static_cast<std::size_t>(r)];
        if (keeper.totals().events == events && !old.empty()) {  // nothing was cut: one token more, in every row
          old.push_back(static_cast<std::int32_t>(keeper.logical_length(id)) - 1);
          ASSERT_EQ(std::vector(now.begin(), now.end()), old) << "row " << r;
        }
        old.assign(now.begin(), now.end());
      }
  }
}

TEST(Generation, AForcedQuestionRunsInOneStep) {
  Decoder decoder = Decoder::open(llama());
  Request slowly = request(20, 12, 11);
  slowly.forced = random_ids(7, 12);
  Request at_once = slowly;
  at_once.forced_at_once = true;
  expect_the_same(alone(decoder, "full", at_once), alone(decoder, "full", slowly));
  const char* patient = "tova,budget=12,interval=64,sink=1,recent=4,prefill=cut";
  expect_the_same(alone(decoder, patient, at_once), alone(decoder, patient, slowly));
  const Completion cut = alone(decoder, "tova,budget=12,interval=4,sink=1,recent=4,prefill=cut", at_once);
  ASSERT_GE(cut.events.size(), 2U);
  EXPECT_EQ(cut.events[1].step, 7) << "the policy is asked behind the question, not inside it";
  EXPECT_EQ(cut.events[1].length_before, 19);
  at_once.forced.resize(12);  // as long as the run: the last token is not fed
  EXPECT_EQ(alone(decoder, "full", at_once).tokens.size(), 12U);
  const char* folding = "sekv,interval=8,recent=8";
  EXPECT_EQ(alone(decoder, folding, at_once).tokens.size(), 12U) << "each of its tokens has a surprisal";
}

TEST(Generation, AConversationGoesOnAsIfItsTurnHadBeenForced) {
  Decoder decoder = Decoder::open(llama());
  // Half of the tokens are anchors: the surprisal of each of the turn's decides.
  const std::string folding = "sekv,interval=8,recent=8,memory.alpha=0,memory.min_span=1";
  for (const std::string& policy :
       {std::string("full"), std::string("tova,budget=12,interval=4,sink=1,recent=4,prefill=cut"), folding,
        std::string("adakv-snapkv,budget=16,interval=4,sink=1,recent=4,window=4,prefill=cut")})
    for (std::uint32_t seed = 0; seed < (policy == folding ? 8U : 1U); ++seed) {
      const std::vector<std::int32_t> turn = random_ids(7, 12 + seed);
      Request forced = request(20, 20, 11);
      forced.forced = turn;
      forced.forced_at_once = true;
      const Completion whole = alone(decoder, policy, forced);
      Generator generator(decoder, make_policy(policy), {.capacity = 40});
      const SequenceId id = generator.join(request(20, 1, 11));
      while (generator.step()) continue;
      const auto rest = static_cast<std::int32_t>(whole.tokens.size() - turn.size());
      generator.go_on(id, turn, rest);
      while (generator.step()) continue;
      const std::int64_t held = generator.bytes_held(id);
      const Completion turns = generator.leave(id);
      const auto after = whole.tokens.begin() + static_cast<std::ptrdiff_t>(turn.size());
      EXPECT_EQ(std::vector(turns.tokens.begin() + 1, turns.tokens.end()), std::vector(after, whole.tokens.end()))
          << policy;
      EXPECT_EQ(turns.positions, whole.positions) << policy << ", turn " << seed;
      EXPECT_EQ(turns.events.size(), whole.events.size()) << policy;
      EXPECT_EQ(held, whole.end_bytes) << policy;
    }
}

TEST(Generation, AConversationGoesOnWithWhatAnAnswerThatWasCutShortLeftUnfed) {
  Decoder decoder = Decoder::open(llama());
  const Completion whole = alone(decoder, "full", request(20, 12, 11));
  Generator generator(decoder, make_policy("full"), {.capacity = 40});
  const SequenceId id = generator.join(request(20, 12, 11));
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(generator.step());
  generator.go_on(id, {whole.tokens[4]}, 7);
  while (generator.step()) continue;
  EXPECT_EQ(generator.leave(id).tokens, whole.tokens);
}

TEST(Generation, AConversationEndsWhereItsPlaceIsFull) {
  Decoder decoder = Decoder::open(llama());
  Generator generator(decoder, make_policy("full"), {.capacity = 24});
  const SequenceId id = generator.join(request(20, 1, 11));
  EXPECT_THROW(generator.go_on(id, {1}, 1), StateError) << "its prompt has not run";
  while (generator.step()) continue;
  EXPECT_EQ(generator.slots_left(id), 4);
  EXPECT_THROW(generator.go_on(id, {}, 1), InvalidArgument);
  EXPECT_THROW(generator.go_on(id, {1}, 0), InvalidArgument);
  EXPECT_THROW(generator.go_on(id, {1, 1 << 20}, 1), InvalidArgument);
  EXPECT_THROW(generator.go_on(id, {1, 2, 3, 4, 5}, 1), StateError);
  EXPECT_TRUE(generator.done(id)) << "nothing has changed";
  generator.go_on(id, {1, 2}, 100);
  while (generator.step()) continue;
  EXPECT_EQ(generator.slots_left(id), 0);
  EXPECT_TRUE(generator.done(id));
  EXPECT_EQ(generator.leave(id).tokens.size(), 1U + 3U) << "two of the turn's, then one for each slot";
}

// ---- Bytes, events, edges -------------------------------------------------------------------------------------------

TEST(Generation, CountsBytesOfLiveSlotsAtThePeakAndBehindTheLastEvent) {
  Decoder decoder = Decoder::open(llama());
  const ModelSpec& spec = decoder.spec();
  const std::int64_t slot = 4 * (spec.key_dim + spec.value_dim) * spec.kv_heads * spec.num_layers();
  const Completion done = alone(decoder, "streaming,budget=24,interval=8", request(50, 30, 10));
  EXPECT_EQ(done.peak_bytes, 51 * slot);
  EXPECT_EQ(done.kept_bytes, 24 * slot);
  ASSERT_FALSE(done.events.empty());
  EXPECT_EQ(done.events[0].step, 1);  // the prefill never fires
  EXPECT_EQ(done.events[0].bytes_before, 51 * slot);
  EXPECT_EQ(done.events[0].bytes_after, 24 * slot);
  EXPECT_EQ(done.events[1].step, 9);
}

TEST(Generation, ForcedTokensAreFedAndPredictionsStayTheModels) {
  Decoder decoder = Decoder::open(llama());
  Request free = request(20, 12, 11);
  const Completion greedy = alone(decoder, "full", free);
  Request forced = free;
  forced.forced.assign(greedy.tokens.begin(), greedy.tokens.end());
  expect_the_same(alone(decoder, "full", forced), greedy);
  forced.forced = random_ids(12, 12);
  EXPECT_FALSE(at::equal(alone(decoder, "full", forced).logits, greedy.logits));
}

TEST(Generation, GoesOnGreedilyAfterTokensThatWereForced) {
  Decoder decoder = Decoder::open(llama());
  Request one = request(20, 12, 11);
  const Completion greedy = alone(decoder, "full", one);
  one.forced.assign(greedy.tokens.begin(), greedy.tokens.begin() + 4);
  expect_the_same(alone(decoder, "full", one), greedy);
  one.forced = random_ids(4, 12);
  const Completion led = alone(decoder, "full", one);
  Request longer{.prompt = one.prompt, .new_tokens = 8};
  longer.prompt.insert(longer.prompt.end(), one.forced.begin(), one.forced.end());
  const std::vector<std::int32_t> told = alone(decoder, "full", longer).tokens;
  EXPECT_EQ(std::vector<std::int32_t>(led.tokens.begin() + 4, led.tokens.end()), told);
}

// What a table of policies rests on: one prefill for all of them.
TEST(Generation, GoesOnFromAPromptThatWasRunForAllAsIfItHadRunIt) {
  Decoder decoder = Decoder::open(llama());
  const std::vector<std::string> policies{"full",
                                          "streaming,budget=24,interval=8",
                                          "tova,budget=24,interval=8,prefill=cut",
                                          "snapkv,budget=24,interval=8,scorer.window=4",
                                          "ams-tova,budget=24,interval=8,prefill=cut",
                                          "expected,budget=24,interval=8",
                                          "h2o,budget=24,interval=8",
                                          "tova,budget=16,interval=8,sink=2,recent=6,rest=fold",
                                          "sekv,recent=16,interval=8"};
  constexpr std::int64_t kCapacity = 96;
  const std::vector<LayerCache> dense = decoder.make_cache(2, kCapacity, Dtype::f32);
  const std::vector<LayerKv> cache(dense.begin(), dense.end());
  std::vector<std::unique_ptr<Generator>> generators;
  std::vector<Generator*> all;
  for (const std::string& policy : policies) {
    generators.push_back(std::make_unique<Generator>(
        decoder, make_policy(policy), GeneratorOptions{.places = 2, .capacity = kCapacity, .cache = cache}));
    all.push_back(generators.back().get());
  }
  const Request one = request(50, 30, 10), other = request(37, 20, 12);
  const PromptRun first = Generator::run_prompt(all, one), second = Generator::run_prompt(all, other);
  for (std::size_t g = 0; g < all.size(); ++g) {
    SCOPED_TRACE(policies[g]);
    all[g]->begin(first.sequences[g], first);
    all[g]->begin(second.sequences[g], second);
    EXPECT_THROW(all[g]->begin(first.sequences[g], first), StateError);
    while (all[g]->step()) {
    }
    expect_the_same(all[g]->leave(first.sequences[g]), alone(decoder, policies[g], one));
    expect_the_same(all[g]->leave(second.sequences[g]), alone(decoder, policies[g], other));
  }
}

TEST(Generation, RunsNoPromptForPoliciesThatNarrowIt) {
  Decoder decoder = Decoder::open(llama());
  Generator full(decoder, make_policy("full"), {.places = 1, .capacity = 64}),
      narrow(decoder, make_policy("fastkv,layer=1,budget=16,window=4"), {.places = 1, .capacity = 64});
  Generator* const both[] = {&full, &narrow};
  EXPECT_THROW(static_cast<void>(Generator::run_prompt(both, request(40, 4, 1))), Unsupported);
  EXPECT_TRUE(full.has_place()) << "nobody joined";
}

TEST(Generation, RefusesWhatCannotBeDecoded) {
  Decoder decoder = Decoder::open(llama());
  const auto refused = [&](Request one, const std::string& names) {
    try {
      static_cast<void>(alone(decoder, "tova,budget=24,interval=8", std::move(one)));
      ADD_FAILURE() << "accepted; should name " << names;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
    }
  };
  refused({.prompt = {}, .new_tokens = 3}, "empty");
  refused({.prompt = {1, 256}, .new_tokens = 3}, "256");
  refused({.prompt = {1, -1}, .new_tokens = 3}, "-1");
  refused({.prompt = {1, 2}, .new_tokens = 0}, "new_tokens");
  refused({.prompt = {1, 2}, .new_tokens = 5, .forced = {1, 256}}, "256");
  Generator full(decoder, make_policy("full"), {.places = 1, .capacity = 10});
  EXPECT_THROW(full.join(request(8, 4, 1)), InvalidArgument);
  full.join(request(8, 3, 1));
  EXPECT_THROW(full.join(request(2, 3, 1)), StateError);
}

// ---- Recording ------------------------------------------------------------------------------------------------------

class Recorded : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Policies, Recorded,
    ::testing::Values("tova,budget=24,interval=8", "chunkkv-tova,budget=24,interval=8,chunk=5,sink=2,recent=4",
                      "criticalkv-tova,budget=24,interval=8,sink=2,recent=4",
                      "ams-tova,budget=32,interval=8,window=8,min_segment=4,max_segment=16",
                      "ams-tova,variant=official,budget=32,interval=8,window=8,min_segment=4,max_segment=16"),
    [](const auto& one) { return "Case" + std::to_string(one.index); });

void expect_replays(Decoder& decoder, const char* policy) {
  const Request one = request(50, 40, 13);
  const Completion run = alone(decoder, policy, one);
  ASSERT_GE(run.events.size(), 3U);
  const fs::path file = fs::temp_directory_path() / ("kvkeep-record-" + std::to_string(::getpid()) + ".safetensors");
  for (std::size_t e = 0; e < run.events.size(); ++e) {
    const trace::Result recorded = record_event(decoder, make_policy(policy), one, {.step = run.events[e].step});
    io::write_safetensors(file, recorded.tensors, recorded.metadata);
    const trace::Result replayed = trace::replay_event(io::SafetensorsFile::open(file), *make_policy(policy));
    for (const auto& [name, tensor] : replayed.tensors) {
      if (!name.ends_with(".positions")) continue;
      const std::int32_t layer = std::stoi(name.substr(6));
      for (std::int32_t h = 0; h < decoder.spec().kv_heads; ++h) {
        const at::Tensor row = torch_tensor(tensor)[0][h].contiguous();
        const std::vector<std::int32_t> kept(row.const_data_ptr<std::int32_t>(),
                                             row.const_data_ptr<std::int32_t>() + row.numel());
        EXPECT_EQ(kept, run.events[e].positions[static_cast<std::size_t>(layer * decoder.spec().kv_heads + h)])
            << "event " << e << " " << name;
      }
    }
  }
  fs::remove(file);
}

TEST_P(Recorded, AReplayOfTheRecordedEventKeepsWhatTheRunKept) {
  Decoder decoder = Decoder::open(llama());
  expect_replays(decoder, GetParam());
}

using RecordingOf = testing::TemporaryFolder;

TEST_F(RecordingOf, SmolLM3SaysWhichLayersHaveNoRope) {
  io::ModelConfig smollm3 = io::ModelConfig::shape(io::Architecture::smollm3, 3, 32, 48, 4, 2, 8, 256);
  smollm3.spec.layers[1].rope = RopeSpec::absent();
  write_random_checkpoint(folder_, smollm3, 5);
  Decoder decoder = Decoder::open(folder_);
  for (const char* policy : {"tova,budget=24,interval=8", "expected,budget=24,interval=8"}) {
    SCOPED_TRACE(policy);
    expect_replays(decoder, policy);
  }
}

TEST(Recording, HoldsWhatIsPinned) {
  Decoder decoder = Decoder::open(llama());
  const char* policy = "tova,budget=24,interval=8,sink=2,recent=4";
  Request one = request(50, 40, 13);
  const Completion plain = alone(decoder, policy, one);
  one.pinned = {{7, 15}, {52, 54}};
  const Completion run = alone(decoder, policy, one);
  ASSERT_GE(run.events.size(), 3U);
  for (const SequenceEvent& event : run.events)
    for (const std::vector<std::int32_t>& row : event.positions)
      for (const std::int32_t p : {7, 10, 14}) EXPECT_TRUE(std::ranges::binary_search(row, p)) << p;
  EXPECT_NE(run.events.back().positions, plain.events.back().positions);
  const trace::Result recorded = record_event(decoder, make_policy(policy), one, {.step = run.events[1].step});
  const fs::path file = fs::temp_directory_path() / ("kvkeep-pinned-" + std::to_string(::getpid()) + ".safetensors");
  io::write_safetensors(file, recorded.tensors, recorded.metadata);
  const trace::Result replayed = trace::replay_event(io::SafetensorsFile::open(file), *make_policy(policy));
  fs::remove(file);
  for (const auto& [name, tensor] : replayed.tensors)
    if (name == "layer.0.positions")
      EXPECT_TRUE(std::ranges::equal(run.events[1].positions[0],
                                     std::span(tensor.data<std::int32_t>(), run.events[1].positions[0].size())));
  one.pinned = {{0, 40}};
  EXPECT_THROW(static_cast<void>(alone(decoder, policy, one)), InvalidArgument);
}

TEST(Recording, PrefillHoldsKeysAndQueriesAfterRoPE) {
  Decoder decoder = Decoder::open(llama());
  const std::vector<std::int32_t> prompt = random_ids(30, 14);
  const trace::Result all = record_prefill(decoder, prompt, 0), tail = record_prefill(decoder, prompt, 5);
  const ModelSpec& spec = decoder.spec();
  ASSERT_EQ(all.tensors.size(), 2U * static_cast<std::size_t>(spec.num_layers()));
  EXPECT_EQ(all.metadata.at("kind"), "prefill");
  EXPECT_EQ(all.tensors[0].first, "layer.0.queries");
  EXPECT_EQ(all.tensors[0].second.sizes(), Shape({spec.query_heads, 30, spec.key_dim}));
  EXPECT_EQ(all.tensors[1].second.sizes(), Shape({spec.kv_heads, 30, spec.key_dim}));
  EXPECT_TRUE(at::equal(all.tensors[0].second.narrow(1, 25, 5), tail.tensors[0].second));
  EXPECT_THROW(static_cast<void>(record_prefill(decoder, prompt, 31)), InvalidArgument);
}

TEST(Recording, RowsOfUnequalLengthAreRefusedAndTheirFirstEventIsNot) {
  Decoder decoder = Decoder::open(llama());
  for (const char* policy : {"adakv-tova,budget=24,interval=8,sink=2,recent=4",
                             "pyramidkv-tova,budget=24,interval=8,beta=3,sink=2,recent=4"}) {
    SCOPED_TRACE(policy);
    const Completion run = alone(decoder, policy, request(50, 40, 13));
    ASSERT_GE(run.events.size(), 2U);
    EXPECT_FALSE(
        record_event(decoder, make_policy(policy), request(50, 40, 13), {.step = run.events[0].step}).tensors.empty());
    EXPECT_THROW(static_cast<void>(
                     record_event(decoder, make_policy(policy), request(50, 40, 13), {.step = run.events[1].step})),
                 InvalidArgument);
  }
}

TEST(Recording, AStepOutsideTheRunIsRefusedWithItsNumber) {
  Decoder decoder = Decoder::open(llama());
  EXPECT_THROW(static_cast<void>(record_event(decoder, make_policy("full"), request(10, 5, 1), {.step = std::nullopt})),
               InvalidArgument);
  EXPECT_THROW(static_cast<void>(record_event(decoder, make_policy("full"), request(10, 5, 1), {.step = 0})),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::generation_test
