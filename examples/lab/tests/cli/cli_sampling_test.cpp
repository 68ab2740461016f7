// SPDX-License-Identifier: Apache-2.0
// The kvkeep command where the model's tokens are drawn, and tasks whose needle is at a depth of choice.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command_text.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/fidelity.h"
#include "kvlab/generation.h"

namespace kvkeep::cli_sampling_test {
namespace {

using nlohmann::json;

class CommandSampling : public CommandText {
 protected:
  json generate(const Words& more) {
    Words words{"generate", "--model", place("model"), "--prompt", "the cat and the hat", "--max-new-tokens", "24"};
    words.insert(words.end(), more.begin(), more.end());
    return answered(words);
  }

  // Samples and answers of kvkeep eval.
  std::vector<json> lines(const Words& more, json* table = nullptr) {
    Words words{"eval", "--model",       place("model"),        "--length", "1500", "--batch",
                "2",    "--samples-out", place("samples.jsonl")};
    words.insert(words.end(), more.begin(), more.end());
    const json rows = answered(words);
    if (table != nullptr) *table = rows;
    std::vector<json> all;
    std::ifstream in(place("samples.jsonl"));
    for (std::string line; std::getline(in, line);) all.push_back(json::parse(line));
    return all;
  }
};

TEST_F(CommandSampling, DrawsTheSameTextFromTheSameSeed) {
  const Words drawn{"--temperature", "0.9", "--top-p", "0.95", "--sampling-seed"};
  const auto seeded = [&](const std::string& seed) {
    Words words = drawn;
    words.push_back(seed);
    return generate(words);
  };
  const json greedy = generate({}), one = seeded("7");
  EXPECT_EQ(one["tokens"], seeded("7")["tokens"]);
  EXPECT_NE(one["tokens"], seeded("8")["tokens"]);
  EXPECT_NE(one["tokens"], greedy["tokens"]);
  EXPECT_EQ(one["sampling"], json({{"temperature", 0.9}, {"top_p", 0.95}, {"seed", 7}}));
  EXPECT_FALSE(greedy.contains("sampling"));
  EXPECT_EQ(generate({"--temperature", "0", "--sampling-seed", "7"}), greedy) << "temperature 0 is greedy";
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  const lm::Request request{.prompt = lm::Tokenizer::read(tokenizer_file()).encode("the cat and the hat"),
                            .new_tokens = 24,
                            .sampling = {.temperature = 0.9, .top_p = 0.95, .seed = 7}};
  EXPECT_EQ(one["tokens"], lm::generate(decoder, make_policy("full"), {request}).completions.front().tokens);
}

TEST_F(CommandSampling, FollowsTextsThatWereDrawnWithASeedEach) {
  const json rows =
      answered({"fidelity", "--model", place("model"), "--prompt", "the cat", "--prompt", "a hat", "--new-tokens", "40",
                "--temperature", "1.1", "--sampling-seed", "3", "--policy", "full"});
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  const lm::Tokenizer tokenizer = lm::Tokenizer::read(tokenizer_file());
  report::Ratio nll;
  std::uint64_t seed = 3;
  for (const char* said : {"the cat", "a hat"}) {
    const lm::Completion done = std::move(lm::generate(decoder, make_policy("full"),
                                                       {{.prompt = tokenizer.encode(said),
                                                         .new_tokens = 40,
                                                         .keep_logits = true,
                                                         .sampling = {.temperature = 1.1, .seed = seed++}}})
                                              .completions.front());
    const auto width = static_cast<std::size_t>(done.logits.size(1));
    for (std::size_t i = 0; i < done.tokens.size(); ++i)
      nll.add(report::negative_log_likelihood({done.logits.const_data_ptr<float>() + i * width, width}, done.tokens[i]),
              1);
  }
  EXPECT_EQ(rows[0]["tokens"], 80);
  EXPECT_NEAR(rows[0]["nll"].get<double>(), nll.value(), 1e-5);
}

TEST_F(CommandSampling, AnswersEachSampleSeveralTimesAndShowsTheMean) {
  const Words asked{"--task",          "ruler/niah-single-1,ruler/vt",
                    "--samples",       "3",
                    "--policy",        "full",
                    "--policy",        "tova,budget=2000",
                    "--temperature",   "1.2",
                    "--sampling-seed", "50",
                    "--repeats",       "2"};
  json table;
  const std::vector<json> all = lines(asked, &table);
  ASSERT_EQ(all.size(), 6U);
  for (std::size_t s = 0; s < all.size(); ++s) {
    SCOPED_TRACE(s);
    const json& answers = all[s]["answers"];
    ASSERT_EQ(answers.size(), 4U) << "two policies, two repeats";
    for (std::size_t repeat = 0; repeat < 2; ++repeat) {
      EXPECT_EQ(answers[repeat]["sampling_seed"], 50 + repeat * 3 + s % 3);
      EXPECT_EQ(answers[repeat]["policy"], "full");
      EXPECT_EQ(answers[2 + repeat]["tokens"], answers[repeat]["tokens"]) << "the same logits, the same numbers";
    }
    EXPECT_NE(answers[0]["tokens"], answers[1]["tokens"]);
  }
  std::string said;
  for (const json& id : all[1]["prompt"]) said += id.dump() + " ";
  std::vector<std::int32_t> tokens =
      answered({"generate", "--model", place("model"), "--ids-file", write("ids.txt", said), "--max-new-tokens", "128",
                "--temperature", "1.2", "--sampling-seed", "54"})["tokens"];
  tokens.erase(std::ranges::find_first_of(tokens, all[1]["end_tokens"].get<std::vector<std::int32_t>>()), tokens.end());
  EXPECT_EQ(all[1]["answers"][1]["tokens"], tokens) << "sample 1, repeat 1";
  for (const json& row : table) {
    EXPECT_EQ(row["samples"], 3);
    EXPECT_EQ(row["references"], row["task"] == "ruler/vt" ? 30 : 6) << "those of every repeat";
    double share = 0;
    for (const json& line : all)
      for (const json& answer : line["answers"])
        if (line["task"] == row["task"] && answer["policy"] == row["policy"])
          share += answer["score"].get<double>() / 6;
    EXPECT_NEAR(share, row["share"].get<double>(), 1e-6);
  }
}

TEST_F(CommandSampling, RefusesDrawsThatMakeNoSense) {
  const Words generate{"generate", "--model", place("model"), "--prompt", "x"},
      text{"eval", "--model", place("model"), "--samples", "1", "--length", "1500", "--task", "ruler/vt"},
      small{"eval", "--model", model(), "--samples", "1", "--length", "64"};
  const auto with = [](Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(with(generate, {"--temperature", "-0.5"}), "temperature is -0.5");
  expect_refused(with(generate, {"--temperature", "nan"}), "temperature");
  expect_refused(with(generate, {"--temperature", "1", "--top-p", "0"}), "top_p is 0");
  expect_refused(with(generate, {"--temperature", "1", "--top-p", "1.5"}), "top_p is 1.5");
  expect_refused(with(generate, {"--top-p", "0.5"}), "--temperature");
  expect_refused(with(generate, {"--sampling-seed", "5"}), "--temperature");
  expect_refused(with(text, {"--repeats", "2"}), "--repeats 2");
  expect_refused(with(text, {"--temperature", "1", "--score", "tokens"}), "--score tokens");
  expect_refused(with(small, {"--temperature", "1"}), "the model writes nothing");
  expect_refused(with(small, {"--temperature", "1", "--repeats", "2"}), "--repeats 2");
  expect_refused({"record", "--model", model(), "--ids", "1,2", "--kind", "generate", "--temperature", "1", "--out",
                  place("x.safetensors")},
                 "--kind generate");
}

// ---- Depth

TEST_F(CommandSampling, AsksForNeedlesAtDepthsOfChoice) {
  json table;
  const std::vector<json> all =
      lines({"--task", "ruler/niah-single-1", "--samples", "2", "--policy", "full", "--depth", "0,50,100"}, &table);
  ASSERT_EQ(all.size(), 6U);
  for (std::size_t s = 0; s < all.size(); ++s) {
    ASSERT_EQ(all[s]["depth"].size(), 1U);
    EXPECT_NEAR(all[s]["depth"][0].get<double>(), 50.0 * static_cast<double>(s / 2), 3);
    EXPECT_EQ(all[s]["seed"], 1000000 + s % 2) << "each depth has the same samples";
    EXPECT_EQ(all[s]["references"], all[s % 2]["references"]);
    EXPECT_EQ(all[s]["length"], 1500);
  }
  EXPECT_NE(all[0]["prompt"], all[2]["prompt"]);
  EXPECT_EQ(table[0]["samples"], 6);
  const std::vector<json> drawn = lines({"--task", "ruler/vt,ruler/fwe", "--samples", "1", "--policy", "full"});
  EXPECT_EQ(drawn[0]["depth"].size(), 5U) << "a chain is asked for whole";
  EXPECT_EQ(drawn[1]["depth"], json::array());
  const Words eval{"eval", "--model", place("model"), "--samples", "1", "--length", "1500", "--task"};
  const auto with = [&](const Words& more) {
    Words words = eval;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(with({"ruler/vt", "--depth", "50"}), "depth");
  expect_refused(with({"ruler/niah-single-1", "--depth", "101"}), "--depth");
  expect_refused(with({"ruler/niah-single-1", "--depth", "50,50"}), "--depth");
  expect_refused({"eval", "--model", model(), "--task", "ask", "--depth", "50"}, "--depth");
}

}  // namespace
}  // namespace kvkeep::cli_sampling_test

#endif  // KVKEEP_CLI_PATH
