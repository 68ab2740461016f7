// SPDX-License-Identifier: Apache-2.0
// kvkeep eval on samples of files: what is read, counted, written again, and refused.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>
#include <sstream>

#include "command_text.h"

namespace kvkeep::cli_samples_test {
namespace {

using nlohmann::json;

class CommandSamples : public CommandText {
 protected:
  Words eval(const Words& more) const {
    Words words{"eval", "--model", place("model")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  static std::string repeated(const std::string& what, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += what;
    return all;
  }

  static std::string line(const std::string& prompt, const std::string& more = R"("references": "cat")") {
    return R"({"prompt": ")" + prompt + R"(", "scoring": "f1", "max_new_tokens": 6, )" + more + "}\n";
  }

  static std::vector<json> lines_of(const std::string& text) {
    std::vector<json> lines;
    std::istringstream in(text);
    for (std::string one; std::getline(in, one);) lines.push_back(json::parse(one));
    return lines;
  }
};

TEST_F(CommandSamples, AreAnsweredUnderEveryPolicyWhateverTheirLengths) {
  std::string all;
  for (const int length : {3, 90, 8, 40, 4}) all += line(repeated("the cat sat ", length));
  const std::string file = write("mine.jsonl", all);
  const Words policies{"--samples-in", file, "--policy", "full", "--policy", "tova", "--budgets", "24"};
  Words alone = policies;
  alone.insert(alone.end(), {"--batch", "1", "--samples-out", place("alone.jsonl")});
  Words together = policies;
  together.insert(together.end(), {"--samples-out", place("together.jsonl")});
  const json rows = answered(eval(together));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["task"], "mine") << "the file's name";
  EXPECT_EQ(rows[0]["samples"], 5);
  EXPECT_EQ(rows[0]["scoring"], "f1");
  EXPECT_EQ(rows[0]["truncated"], 0);
  static_cast<void>(answered(eval(alone)));
  const auto answers = [&](const char* name) {
    std::vector<json> lines = lines_of(content(place(name)));
    for (json& one : lines)
      for (json& answer : one["answers"]) answer.erase("cut_seconds");
    return lines;
  };
  EXPECT_EQ(answers("alone.jsonl"), answers("together.jsonl")) << "company changes no answer, and the order stays";
  double sum = 0;
  for (const json& one : answers("alone.jsonl")) sum += one["answers"][0]["score"].get<double>();
  EXPECT_NEAR(rows[0]["share"].get<double>(), sum / 5, 1e-6) << "the mean score";
  EXPECT_EQ(answered(eval({"--samples-in", file, "--samples", "2", "--policy", "full"}))[0]["samples"], 2);
}

TEST_F(CommandSamples, ShowTheMeanAndTheShareOfWholeAnswers) {
  // Three samples whose references are what the model writes: all, half, and none of it.
  const std::string asked = write("ask.jsonl", line(repeated("the cat sat ", 9)));
  static_cast<void>(
      answered(eval({"--samples-in", asked, "--policy", "full", "--raw", "--samples-out", place("a.jsonl")})));
  const std::string written = lines_of(content(place("a.jsonl")))[0]["answers"][0]["text"];
  const auto sample = [&](const json& references) {
    return json{{"prompt", repeated("the cat sat ", 9)},
                {"references", references},
                {"scoring", "contains"},
                {"max_new_tokens", 6}}
               .dump(-1, ' ', false, json::error_handler_t::replace) +
           "\n";
  };
  ASSERT_GT(written.size(), 1U);
  std::string known;  // a part of it in ASCII
  for (const char c : written)
    if (c >= ' ' && c < 0x7f && known.empty()) known = std::string(1, c);
  ASSERT_FALSE(known.empty()) << written;
  const std::string file =
      write("three.jsonl", sample({known}) + sample({known, "never this"}) + sample({"never this"}));
  const json row = answered(eval({"--samples-in", file, "--policy", "full", "--raw"}))[0];
  EXPECT_NEAR(row["share"].get<double>(), 0.5, 1e-6);
  EXPECT_EQ(row["whole"], 1);
  EXPECT_EQ(row["references"], 4);
  EXPECT_EQ(row["found"], 2);
  const Outcome table = run(eval({"--samples-in", file, "--policy", "full", "--raw", "--quiet"}));
  EXPECT_NE(table.out.find("whole %"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("| 50.0 (0.0-100.0) |"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("33.3"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("three: 3 samples of "), std::string::npos) << table.out;
}

TEST_F(CommandSamples, CutBeforeOrAfterTheLastTurn) {
  const std::string file = write(
      "turns.jsonl", R"({"turns": [")" + repeated("the cat sat ", 30) +
                         R"(", "Who sat?"], "references": "cat", )"
                         R"("scoring": "any", "max_new_tokens": 4, "task": "turns"})"
                         "\n"
                         R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ")" +
                         repeated("the hat ", 30) +
                         R"("}, {"role": "assistant", "content": "Yes."}, )"
                         R"({"role": "user", "content": "Who sat?"}], "references": "cat", "scoring": "any", )"
                         R"("max_new_tokens": 4, "task": "talk"})"
                         "\n");
  const auto written = [&](const char* question) {
    static_cast<void>(answered(eval({"--samples-in", file, "--policy", "tova", "--budgets", "32", "--question",
                                     question, "--samples-out", place("out.jsonl")})));
    return lines_of(content(place("out.jsonl")));
  };
  const auto text = [&](const json& ids) {
    std::string list, all;
    for (const json& id : ids) list += (list.empty() ? "" : ",") + id.dump();
    for (const json& token : tokens({"--ids", list})) all += token["piece"].get<std::string>();
    return all;
  };
  const std::vector<json> before = written("before"), after = written("after");
  ASSERT_EQ(before.size(), 2U);
  EXPECT_TRUE(text(after[0]["question"]).starts_with("Who sat?<|im_end|>")) << text(after[0]["question"]);
  EXPECT_TRUE(text(after[0]["prompt"]).ends_with("the cat sat ")) << text(after[0]["prompt"]);
  EXPECT_EQ(text(before[0]["prompt"]), text(after[0]["prompt"]) + text(after[0]["question"]));
  EXPECT_EQ(before[0]["question"], json::array());
  EXPECT_TRUE(
      text(after[1]["prompt"]).starts_with("<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nthe hat"))
      << text(after[1]["prompt"]);
  EXPECT_TRUE(text(after[1]["prompt"]).ends_with("<|im_start|>assistant\\nYes.<|im_end|>\\n<|im_start|>user\\n"))
      << text(after[1]["prompt"]);
  EXPECT_EQ(text(after[1]["question"]), "Who sat?<|im_end|>\\n<|im_start|>assistant\\n");
}

TEST_F(CommandSamples, ComeTokenByTokenInALongDecode) {
  const std::string file = write("log.jsonl", line(repeated("the cat sat ", 60)) + line(repeated("a hat ", 90)));
  const auto asked = [&](const Words& more) {
    Words words = eval({"--samples-in", file, "--raw", "--policy", "full", "--policy", "tova", "--budgets", "48",
                        "--interval", "16", "--samples-out", place("out.jsonl")});
    words.insert(words.end(), more.begin(), more.end());
    return answered(words);
  };
  const json at_once = asked({});
  const std::vector<json> whole = lines_of(content(place("out.jsonl")));
  const json streamed = asked({"--stream-after", "10"});
  const std::vector<json> parts = lines_of(content(place("out.jsonl")));
  ASSERT_EQ(parts.size(), 2U);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i]["prompt"].size(), 10U);
    json all = parts[i]["prompt"];
    for (const json& id : parts[i]["question"]) all.push_back(id);
    EXPECT_EQ(all, whole[i]["prompt"]) << "the same tokens";
    EXPECT_EQ(parts[i]["answers"][0]["tokens"], whole[i]["answers"][0]["tokens"]) << "nothing is lost under full";
  }
  EXPECT_EQ(at_once[1]["events"], 2) << "one a sample, at the prompt's end";
  EXPECT_GT(streamed[1]["events"].get<int>(), 8) << "and one every interval";
  EXPECT_EQ(streamed[0]["question"], "stream");
  const Outcome both = run(eval({"--samples-in", file, "--stream-after", "10", "--question", "after"}));
  EXPECT_EQ(both.code, 2);
  EXPECT_NE(both.err.find("--stream-after feeds the question behind the text"), std::string::npos) << both.err;
}

TEST_F(CommandSamples, SayWhichHeadsOpenWhatWasFolded) {
  const std::string file = write("log.jsonl", line(repeated("the cat sat ", 90)));
  const json rows = answered(eval({"--samples-in", file, "--raw", "--policy", "full", "--policy",
                                   "tova,rest=fold,memory.mass=0.0001", "--budgets", "48"}));
  EXPECT_TRUE(rows[0]["opened_by_head"].is_null()) << "nothing was folded";
  const json& layers = rows[1]["opened_by_head"];
  ASSERT_EQ(layers.size(), 2U) << layers;
  double sum = 0;
  std::size_t heads = 0;
  for (const json& layer : layers)
    for (const json& opened : layer) sum += opened.get<double>(), ++heads;
  EXPECT_GT(sum, 0);
  EXPECT_NEAR(sum / static_cast<double>(heads), rows[1]["opened"].get<double>(), 1e-3);
}

TEST_F(CommandSamples, AreReadAgainAsTheyWereWritten) {
  const Words first{"--task",        "ruler/niah-single-1",
                    "--length",      "900",
                    "--samples",     "2",
                    "--seed",        "7",
                    "--policy",      "full",
                    "--policy",      "tova",
                    "--budgets",     "96",
                    "--question",    "after",
                    "--samples-out", place("first.jsonl")};
  const json drawn = answered(eval(first));
  const json read = answered(eval({"--samples-in", place("first.jsonl"), "--policy", "full", "--policy", "tova",
                                   "--budgets", "96", "--question", "after", "--samples-out", place("second.jsonl")}));
  std::vector<json> one = lines_of(content(place("first.jsonl"))), two = lines_of(content(place("second.jsonl")));
  ASSERT_EQ(one.size(), 2U);
  for (auto* lines : {&one, &two})
    for (json& line : *lines) {
      for (const char* key : {"seed", "length", "depth"}) line.erase(key);  // of drawn samples alone
      for (json& answer : line["answers"]) answer.erase("cut_seconds");
    }
  EXPECT_EQ(one, two);
  for (const char* key : {"task", "samples", "references", "found", "share", "whole", "scoring"})
    EXPECT_EQ(drawn[1][key], read[1][key]) << key;
}

TEST_F(CommandSamples, ShareATableWithTasksThatAreDrawn) {
  const std::string file = write("mine.jsonl", line("the cat"));
  const json rows = answered(eval({"--samples-in", file, "--task", "ruler/niah-single-1", "--length", "900",
                                   "--samples", "1", "--policy", "full"}));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["task"], "ruler/niah-single-1");
  EXPECT_EQ(rows[1]["task"], "mine");
  const std::string same = write("same.jsonl", line("the cat", R"("references": "x", "task": "ruler/niah-single-1")"));
  expect_refused(eval({"--samples-in", same, "--task", "ruler/niah-single-1", "--length", "900", "--samples", "1"}),
                 "which --task names too");
}

TEST_F(CommandSamples, ShowWhatRandomGetsBesideFedTokens) {
  const std::string file =
      write("mine.jsonl", line(repeated("the cat sat ", 40), R"("references": "on the mat again")"));
  const Words fed{"--samples-in", file, "--score", "tokens", "--policy", "full", "--policy", "tova"};
  Words budgets = fed;
  budgets.insert(budgets.end(), {"--budgets", "48,24"});
  std::map<std::string, std::vector<json>> by_policy;
  for (const json& row : answered(eval(budgets))) {
    by_policy[row["policy"]].push_back(row["budget"]);
    EXPECT_EQ(row["scoring"], "tokens");
    EXPECT_GT(row["references"], 3);
  }
  EXPECT_EQ(by_policy["random"], (std::vector<json>{48, 24})) << "a row for every budget";
  EXPECT_EQ(by_policy["tova"], by_policy["random"]);
  Words own{"--samples-in", file, "--score", "tokens", "--policy", "tova,budget=40"};
  const json rows = answered(eval(own));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[1]["policy"], "random");
  EXPECT_EQ(rows[1]["budget"], 40);
  own.insert(own.end(), {"--policy", "random,budget=40"});
  EXPECT_EQ(answered(eval(own)).size(), 2U) << "not twice";
  budgets.push_back("--quiet");
  const Outcome table = run(eval(budgets));
  EXPECT_NE(table.out.find("The rows of `random` are the floor"), std::string::npos) << table.out;
}

TEST_F(CommandSamples, LoseTheirMiddleOnlyWhereThatIsAllowed) {
  const std::string file = write("long.jsonl", line("a cat") + line("START " + repeated("the cat sat ", 100) + " END"));
  expect_refused(eval({"--samples-in", file, "--length", "128", "--policy", "full"}), "line 2: the sample is too long");
  expect_refused(eval({"--samples-in", file, "--length", "128", "--policy", "full"}), "--truncate middle");
  const std::string longer = write("longer.jsonl", line(repeated("the cat sat ", 2000)));
  expect_refused(eval({"--samples-in", longer, "--policy", "full"}), "allowed 2048, the model's positions");
  const Words cut{"--samples-in", file,         "--length", "128",           "--policy",
                  "full",         "--truncate", "middle",   "--samples-out", place("out.jsonl")};
  const json row = answered(eval(cut))[0];
  EXPECT_EQ(row["truncated"], 1);
  EXPECT_EQ(row["length"], 128);
  const std::vector<json> lines = lines_of(content(place("out.jsonl")));
  EXPECT_EQ(lines[1]["prompt"].size(), 128U - 6U);
  std::string ids, text;
  for (const json& id : lines[1]["prompt"]) ids += (ids.empty() ? "" : ",") + id.dump();
  for (const json& token : tokens({"--ids", ids})) text += token["piece"].get<std::string>();
  EXPECT_NE(text.find("Hugging Face<|im_end|>\\n<|im_start|>user\\nSTART the"), std::string::npos)
      << "markup stays: " << text;
  EXPECT_NE(text.find(" END<|im_end|>"), std::string::npos) << text;
  EXPECT_NE(lines[1]["turns"][0].get<std::string>().size(), 0U);
  Words quiet = cut;
  quiet.push_back("--quiet");
  EXPECT_NE(run(eval(quiet)).out.find("the middle of 1 dropped"), std::string::npos);
  expect_refused(eval({"--samples-in", file, "--length", "20", "--policy", "full", "--truncate", "middle"}),
                 "too long");
}

TEST_F(CommandSamples, AskAboutPassages) {
  std::string squad = R"({"data": [{"paragraphs": [)";
  for (int i = 0; i < 30; ++i)
    squad += std::string(i == 0 ? "" : ", ") + R"({"context": "Town )" + std::to_string(i) +
             R"( lies on a hill.", "qas": [{"question": "Where is town )" + std::to_string(i) +
             R"(?", "answers": [{"text": "on a hill"}, {"text": "a hill"}], "is_impossible": false}]})";
  const std::string file = write("squad.json", squad + "]}]}");
  const json row = answered(eval({"--task", "ruler/qa-1", "--passages", file, "--length", "700", "--samples", "2",
                                  "--policy", "full", "--samples-out", place("out.jsonl")}))[0];
  EXPECT_EQ(row["scoring"], "any");
  EXPECT_EQ(row["references"], 2);
  const std::vector<json> lines = lines_of(content(place("out.jsonl")));
  EXPECT_EQ(lines[0]["references"], json({"on a hill", "a hill"}));
  EXPECT_NE(lines[0]["turns"][0].get<std::string>().find("Document 2:\nTown "), std::string::npos);
  expect_refused(eval({"--task", "ruler/qa-1", "--length", "700"}), "given none; allowed SQuAD's");
  expect_refused(eval({"--task", "ruler/qa-2", "--passages", file, "--length", "700"}), "allowed HotpotQA's");
  expect_refused(eval({"--task", "ruler/qa-1", "--passages", file, "--passages", file}), "second file of its form");
}

TEST_F(CommandSamples, ArePublishedOnesToo) {
  const std::string file =
      write("longbench.jsonl",
            R"({"input": "Who?", "context": "The cat sat.", "answers": ["the cat"], "length": 3, "dataset": )"
            R"("hotpotqa", "language": "en", "all_classes": null, "_id": "1"})"
            "\n");
  const std::string templates = write("dataset2prompt.json", R"({"hotpotqa": "Read: {context} Asked: {input}"})");
  const json row = answered(eval(
      {"--samples-in", file, "--templates", templates, "--policy", "full", "--samples-out", place("out.jsonl")}))[0];
  EXPECT_EQ(row["task"], "hotpotqa");
  EXPECT_EQ(row["scoring"], "f1");
  EXPECT_EQ(lines_of(content(place("out.jsonl")))[0]["turns"], json({"Read: The cat sat.", " Asked: Who?"}));
}

TEST_F(CommandSamples, AreRefusedBeforeTheModelRuns) {
  const std::string good = line("the cat");
  expect_refused(eval({"--samples-in", write("bad.jsonl", good + "{\"prompt\": 3\n")}), "bad.jsonl, line 2");
  expect_refused(eval({"--samples-in", write("key.jsonl", line("x", R"("references": "y", "refs": 1)"))}), "refs");
  expect_refused(eval({"--samples-in", write("form.jsonl", "{\"text\": \"x\"}\n")}), "LongBench");
  expect_refused(eval({"--samples-in", write("empty.jsonl", "\n")}), "has no samples");
  expect_refused(eval({"--samples-in", place("nowhere.jsonl")}), "nowhere.jsonl");
  const std::string file = write("good.jsonl", good);
  expect_refused(eval({"--samples-in", file, "--task", "ask"}), "one kind");
  expect_refused(eval({"--task", "ruler/vt", "--truncate", "middle"}), "--samples-in");
  expect_refused(eval({"--samples-in", file, "--truncate", "end"}), "middle");
  expect_refused(eval({"--samples-in", file, "--templates", write("t.json", "[]")}), "no object of strings");
  expect_refused(
      eval({"--samples-in", write("two.jsonl", line("x", R"("references": ["y", "z"])")), "--score", "tokens"}),
      "2 references");
  const std::string talk =
      write("talk.jsonl", R"({"messages": [{"role": "system", "content": "x"}, {"role": "user", )"
                          R"("content": "y"}], "references": "z", "scoring": "any", "max_new_tokens": 2})");
  expect_refused(eval({"--samples-in", talk, "--raw"}), "chat template");
  fs::remove(place("model/chat_template.jinja"));
  expect_refused(eval({"--samples-in", talk}), "a model without one");
}

}  // namespace
}  // namespace kvkeep::cli_samples_test

#endif  // KVKEEP_CLI_PATH
