// SPDX-License-Identifier: Apache-2.0
// Decoding under policies that narrow prompts: the whole line, from ids to tokens, on the shipped model and on random
// models of 24 layers.

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>

#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"

namespace kvkeep::lm::narrowed_generation_test {
namespace {

namespace fs = std::filesystem;

std::vector<std::int32_t> random_ids(std::int32_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 250);
  return ids;
}

Request request(std::int32_t prompt, std::int32_t new_tokens, std::uint32_t seed) {
  return {.prompt = random_ids(prompt, seed), .new_tokens = new_tokens, .keep_logits = true, .keep_positions = true};
}

Completion alone(Decoder& decoder, const std::string& policy, Request one, std::int32_t page_size = 0) {
  return std::move(
      generate(decoder, make_policy(policy), {std::move(one)}, {.page_size = page_size}).completions.front());
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes() && at::equal(a, b); }

void expect_the_same(const Completion& a, const Completion& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  EXPECT_TRUE(same_bits(a.logits, b.logits)) << what << ": logits differ";
  EXPECT_EQ(a.kept_bytes, b.kept_bytes) << what;
  ASSERT_EQ(a.prompt.has_value(), b.prompt.has_value()) << what;
  if (a.prompt) {
    EXPECT_EQ(a.prompt->going_on, b.prompt->going_on) << what;
    EXPECT_EQ(a.prompt->entered, b.prompt->entered) << what;
    EXPECT_EQ(a.prompt->selection_layer, b.prompt->selection_layer) << what;
  }
  ASSERT_EQ(a.events.size(), b.events.size()) << what;
  for (std::size_t i = 0; i < a.events.size(); ++i)
    EXPECT_EQ(a.events[i].positions, b.events[i].positions) << what << ", event " << i;
}

/// The shipped model, and a random one of 24 layers.
class NarrowedGeneration : public ::testing::TestWithParam<const char*> {
 protected:
  NarrowedGeneration() : shipped_(std::string_view(GetParam()) == "shipped") {
    if (shipped_) {
      decoder_ = std::make_unique<Decoder>(Decoder::open(KVKEEP_TEST_MODEL_DIR));
      return;
    }
    folder_ =
        fs::temp_directory_path() / ("kvkeep_narrowed_" + std::to_string(::getpid()) + "_" +
                                     ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name()[0]);
    write_random_checkpoint(folder_, io::ModelConfig::shape(io::Architecture::llama, 24, 64, 96, 4, 2, 16, 256), 11);
    decoder_ = std::make_unique<Decoder>(Decoder::open(folder_));
  }
  ~NarrowedGeneration() override {
    decoder_.reset();
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
  }
  [[nodiscard]] std::int32_t layers() const { return decoder_->spec().num_layers(); }
  [[nodiscard]] std::string middle() const { return std::to_string(layers() / 2); }

  bool shipped_;
  fs::path folder_;
  std::unique_ptr<Decoder> decoder_;
};
INSTANTIATE_TEST_SUITE_P(Models, NarrowedGeneration, ::testing::Values("shipped", "deep"),
                         [](const auto& one) { return one.param; });

TEST_P(NarrowedGeneration, ThatNeverSelectsGivesThePlainModelsBits) {
  const Request one = request(150, 6, 3);
  const Completion plain = alone(*decoder_, "full", one);
  const Completion never = alone(*decoder_, "asl,budget=40,window=8,threshold=0", one);
  EXPECT_TRUE(same_bits(plain.logits, never.logits));
  EXPECT_EQ(plain.kept_bytes, never.kept_bytes);
  EXPECT_EQ(plain.peak_bytes, never.peak_bytes);
  ASSERT_TRUE(never.prompt);
  EXPECT_EQ(never.prompt->selection_layer, -1);
  EXPECT_EQ(never.prompt->going_on.size(), 150U);
  // With a cache budget what is stored shrinks, not what the prompt itself computes.
  const Completion cut = alone(*decoder_, "asl,budget=40,window=8,threshold=0,cache=40", one);
  EXPECT_TRUE(same_bits(plain.logits.narrow(0, 0, 1), cut.logits.narrow(0, 0, 1)));
  EXPECT_FALSE(same_bits(plain.logits, cut.logits)) << "what was dropped changes what is decoded";
  EXPECT_EQ(cut.kept_bytes, plain.kept_bytes * (40 + 5) / (150 + 5));
}

TEST_P(NarrowedGeneration, OfAShortPromptGivesThePlainModelsBits) {
  for (const std::int32_t tokens : {1, 7, 8, 9, 40}) {
    const Request one = request(tokens, 4, static_cast<std::uint32_t>(tokens));
    const Completion plain = alone(*decoder_, "full", one);
    for (const char* policy : {"asl,budget=40,window=8,threshold=2", "asl-2pass,budget=40,window=8,threshold=2",
                               "fastkv,budget=40,window=8,layer=0,cache=40", "gemfilter,budget=40,layer=0"})
      EXPECT_TRUE(same_bits(plain.logits, alone(*decoder_, policy, one).logits)) << policy << " of " << tokens;
  }
}

TEST_P(NarrowedGeneration,
       EqualsADecoderThatIsToldTheSameTokens) {  // A-10, with the reference of the decoder's own tests behind it
  const Request one = request(130, 1, 5);
  const std::int32_t layer = layers() / 2;
  const Completion done = alone(*decoder_, "fastkv,budget=32,window=8,layer=" + middle(), one);
  ASSERT_TRUE(done.prompt);
  EXPECT_EQ(done.prompt->selection_layer, layer);
  ASSERT_EQ(done.prompt->going_on.size(), 32U);
  const std::vector<LayerCache> cache = decoder_->make_cache(1, 130);
  std::vector<std::int32_t> positions(130), indptr{0, 130}, row{0}, none{0};
  std::iota(positions.begin(), positions.end(), 0);
  StepOptions options;
  options.on_attended = [&](const LayerSight& sight) -> std::optional<Onward> {
    if (sight.layer != layer) return std::nullopt;
    return Onward{done.prompt->going_on, {0, 32}};
  };
  EXPECT_TRUE(same_bits(decoder_->forward({one.prompt, indptr, positions, row, none}, cache, options), done.logits));
  for (std::int32_t l = 0; l < layers(); ++l)
    EXPECT_EQ(done.prompt->entered[static_cast<std::size_t>(l)], l <= layer ? 130 : 32);
}

TEST_P(NarrowedGeneration, OfTwoPassesEqualsThePlainModelOnTheChosenIds) {
  for (const std::string& policy :
       {"gemfilter,budget=48,layer=" + middle(), std::string("asl-2pass,budget=48,window=8,threshold=2"),
        std::string("asl-2pass,budget=48,window=8,threshold=0"),
        std::string("asl-2pass,budget=48,window=8,threshold=2,indices=last_query")}) {
    const Request one = request(140, 5, 9);
    const Completion done = alone(*decoder_, policy, one);
    ASSERT_TRUE(done.prompt);
    EXPECT_TRUE(done.prompt->second_pass) << policy;
    ASSERT_EQ(done.prompt->going_on.size(), 48U) << policy;
    Request chosen = one;
    chosen.prompt.clear();
    for (const std::int32_t place : done.prompt->going_on)
      chosen.prompt.push_back(one.prompt[static_cast<std::size_t>(place)]);
    const Completion plain = alone(*decoder_, "full", chosen);
    EXPECT_TRUE(same_bits(plain.logits, done.logits)) << policy;
    EXPECT_EQ(plain.kept_bytes, done.kept_bytes) << policy;
    EXPECT_EQ(alone(*decoder_, policy, one, 16).tokens, done.tokens) << policy << " in pages";
  }
}

TEST_P(NarrowedGeneration, InABatchEqualsOneByOne) {
  for (const std::string& policy :
       {std::string("asl,budget=40,window=8,threshold=2,cache=40"),
        "fastkv,budget=40,window=8,layer=" + middle() + ",cache_mass=0.8", std::string("pyramidinfer"),
        "gemfilter,budget=40,layer=" + middle(), std::string("asl-2pass,budget=40,window=8,threshold=2"),
        "fastkv,budget=60,window=8,layer=" + middle() + "+ams-tova,budget=32,interval=4,recent=4,window=8"}) {
    std::vector<Request> all;
    for (const std::int32_t prompt : {90, 1, 130, 33, 71})
      all.push_back(request(prompt, 12, static_cast<std::uint32_t>(prompt)));
    for (const std::int32_t page_size : {0, 16}) {
      const GenerationRun run = generate(*decoder_, make_policy(policy), all,
                                         {.places = 3, .page_size = page_size});  // later ones join while others decode
      for (std::size_t i = 0; i < all.size(); ++i)
        expect_the_same(run.completions[i], alone(*decoder_, policy, all[i]),
                        policy + ", prompt " + std::to_string(i) + ", pages of " + std::to_string(page_size));
    }
  }
}

TEST_P(NarrowedGeneration, DoesNotDependOnTheThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Completion one = alone(
      *decoder_, "asl,budget=40,window=8,threshold=2,cache=24+tova,budget=24,interval=4,recent=4", request(120, 12, 2));
  at::set_num_threads(2);
  const Completion two = alone(
      *decoder_, "asl,budget=40,window=8,threshold=2,cache=24+tova,budget=24,interval=4,recent=4", request(120, 12, 2));
  at::set_num_threads(before);
  expect_the_same(one, two, "threads");
}

TEST_P(NarrowedGeneration, LetsAnyPolicyDecideBehindThePrompt) {
  const std::int32_t layer = layers() / 2;
  for (const char* decode : {"ams-tova,budget=24,interval=8,recent=4,window=8", "h2o,budget=24,interval=8,recent=4",
                             "streaming,budget=24,interval=8", "keydiff,budget=24,interval=8,prefill=cut",
                             "snapkv,budget=24,window=8,interval=8"}) {
    const Completion done =
        alone(*decoder_, "fastkv,budget=30,window=8,layer=" + middle() + "+" + decode, request(100, 20, 4));
    ASSERT_FALSE(done.events.empty()) << decode;
    const std::vector<std::int32_t>& going_on = done.prompt->going_on;
    const auto heads = static_cast<std::size_t>(decoder_->spec().kv_heads);
    for (const SequenceEvent& event : done.events)
      for (std::size_t r = 0; r < event.positions.size(); ++r) {
        EXPECT_LE(event.positions[r].size(), 24U + 8U) << decode;
        for (const std::int32_t position : event.positions[r])
          if (position < 100 && static_cast<std::int32_t>(r / heads) > layer)
            EXPECT_TRUE(std::ranges::binary_search(going_on, position))
                << decode << ": layer " << r / heads << " holds a token that never reached it";
      }
  }
}

TEST_P(NarrowedGeneration, CountsTheBytesOfEveryLayer) {
  const std::int32_t layer = layers() / 2;
  const Completion done = alone(*decoder_, "fastkv,budget=32,window=8,cache=24,layer=" + middle(), request(100, 1, 8));
  const std::int64_t slot = static_cast<std::int64_t>(decoder_->spec().kv_heads) *
                            (decoder_->spec().key_dim + decoder_->spec().value_dim) * 4;
  EXPECT_EQ(done.kept_bytes, slot * 24 * layers());
  EXPECT_EQ(done.peak_bytes, slot * std::max(100 + 24 * layer, 32 + 24 * (layers() - 1)))
      << "one layer is whole at a time";
}

TEST(NarrowedDeepGeneration, SelectsWhereTheVarianceFallsBelowTheThreshold) {
  const fs::path folder = fs::temp_directory_path() / ("kvkeep_narrowed_deep_" + std::to_string(::getpid()));
  write_random_checkpoint(folder, io::ModelConfig::shape(io::Architecture::qwen2, 24, 64, 96, 4, 2, 16, 256), 5);
  Decoder decoder = Decoder::open(folder);
  const Request one = request(160, 1, 6);
  const Completion never = alone(decoder, "asl,budget=48,window=8,threshold=0", one);
  const std::vector<double>& ratios = never.prompt->relative_variance;
  for (std::size_t l = 0; l < 24; ++l)
    EXPECT_EQ(std::isnan(ratios[l]), l < 8) << "layer " << l;  // a third of 24 layers
  EXPECT_EQ(ratios[8], 1.0);
  int earliest = 24;
  for (const double threshold : {0.05, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 1.01, 2.0}) {
    const auto first = std::ranges::find_if(ratios, [&](double ratio) { return ratio < threshold; });
    const int expected = first == ratios.end() ? -1 : static_cast<int>(first - ratios.begin());
    const Completion done = alone(decoder, "asl,budget=48,window=8,threshold=" + std::to_string(threshold), one);
    EXPECT_EQ(done.prompt->selection_layer, expected) << threshold;
    EXPECT_LE(expected < 0 ? 24 : expected, earliest) << threshold;
    earliest = expected < 0 ? 24 : expected;
    if (expected < 0) continue;
    const Completion fixed = alone(decoder, "fastkv,budget=48,window=8,layer=" + std::to_string(expected), one);
    EXPECT_TRUE(same_bits(done.logits, fixed.logits)) << threshold;
    EXPECT_EQ(done.prompt->going_on, fixed.prompt->going_on) << threshold;
  }
  EXPECT_EQ(earliest, 8) << "a threshold above 1 selects at min_layer";
  decoder = Decoder::open(KVKEEP_TEST_MODEL_DIR);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace kvkeep::lm::narrowed_generation_test
