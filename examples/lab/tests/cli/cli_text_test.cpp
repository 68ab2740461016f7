// SPDX-License-Identifier: Apache-2.0
// The kvkeep command on text: prompts, tokens, the picture, and tasks whose answers are read.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command_text.h"

namespace kvkeep::cli_text_test {
namespace {

using nlohmann::json;

std::string joined(const json& tokens) {
  std::string all;
  for (const json& token : tokens) all += token["piece"].get<std::string>();
  return all;
}

TEST_F(CommandText, ShowsTheTokensOfAText) {
  EXPECT_EQ(joined(tokens({"--prompt", "the 17 cats\n sat"})), "the 17 cats\\n sat");
  const json again = tokens({"--ids", "1,2"});
  EXPECT_EQ(joined(again), "<|im_start|><|im_end|>");
  EXPECT_EQ(again[0]["special"], true);
  const Outcome table = run({"tokens", "--model", place("model"), "--prompt", "a\x80"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("| place |"), std::string::npos) << table.out;
  expect_refused({"tokens", "--model", place("model"), "--ids", "99999"}, "99999");
  expect_refused({"tokens", "--model", model(), "--prompt", "x"}, "tokenizer");
}

TEST_F(CommandText, ReadsMarkupOnlyWhereItIsAskedTo) {
  const std::string markup = "<|im_end|>";
  EXPECT_GT(tokens({"--prompt", markup}).size(), 1U) << "text of a user, for all that one knows";
  EXPECT_EQ(tokens({"--prompt", markup, "--raw"}).size(), 1U);
  EXPECT_EQ(joined(tokens({"--prompt", "Hi", "--chat", "--system", "Be brief"})),
            "<|im_start|>system\\nBe brief<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n");
  EXPECT_NE(joined(tokens({"--prompt", "Hi", "--chat"})).find("SmolLM"), std::string::npos)
      << "the template's own system message";
}

TEST_F(CommandText, WritesTheDateThatItIsGivenIntoATemplateThatHasOne) {
  write("model/chat_template.jinja", "{{ strftime_now('%d %m %Y') }} {{ messages[0].content }}");
  EXPECT_EQ(joined(tokens({"--prompt", "Hi", "--chat"})), "26 07 2024 Hi") << "not today's";
  EXPECT_EQ(joined(tokens({"--prompt", "Hi", "--chat", "--date", "2025-01-31"})), "31 01 2025 Hi");
  for (const char* date : {"2025-02-29", "2025-1-031", "2025/01/31", "today", "2025-01-3x", "-025-01-31"})
    expect_refused({"tokens", "--model", place("model"), "--prompt", "Hi", "--chat", "--date", date}, "--date");
  expect_refused({"tokens", "--model", place("model"), "--prompt", "Hi", "--date", "2025-01-31"}, "--chat");
}

TEST_F(CommandText, WritesTextAsItComesAndTheSameTokensAsFromIds) {
  const std::string said = "the cat and the hat";
  std::string ids;
  for (const json& token : tokens({"--prompt", said})) ids += (ids.empty() ? "" : ",") + token["id"].dump();
  const Words tail{"--max-new-tokens", "24", "--policy", "tova,budget=16,interval=4,sink=1,recent=4"};
  const auto generate = [&](const Words& prompt, const std::string& from) {
    Words words{"generate", "--model", from};
    words.insert(words.end(), prompt.begin(), prompt.end());
    words.insert(words.end(), tail.begin(), tail.end());
    return words;
  };
  const json from_text = answered(generate({"--prompt", said}, place("model"))),
             from_ids = answered(generate({"--ids", ids}, place("model")));
  EXPECT_EQ(from_text["tokens"], from_ids["tokens"]);
  EXPECT_FALSE(from_ids.contains("text"));
  const std::vector<std::int32_t> written = from_text["tokens"];
  const std::string text = from_text["text"];
  const Outcome shown = run(generate({"--prompt-file", write("said.txt", said)}, place("model")));
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_TRUE(shown.out.starts_with(escaped(text, "\n\t"))) << shown.out;
  EXPECT_EQ(shown.out.find("Tokens:"), std::string::npos);
  EXPECT_EQ(answered(generate({"--prompt", said}, gguf()))["tokens"], from_text["tokens"]) << "one file holds it all";
}

TEST_F(CommandText, RefusesPromptsThatAreNone) {
  const Words generate{"generate", "--model", place("model"), "--max-new-tokens", "2"};
  const auto with = [&](const Words& more) {
    Words words = generate;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(with({"--prompt-file", write("empty.txt", "")}), "empty");
  expect_refused(with({"--prompt-file", place("nowhere.txt")}), "nowhere.txt");
  expect_refused(with({"--ids", "1,2", "--chat"}), "--chat");
  expect_refused(with({"--prompt", "x", "--ids", "1"}), "prompt");
  expect_refused(with({"--prompt", "x", "--chat", "--raw"}), "--raw");
  expect_refused(with({"--prompt", "x", "--system", "y"}), "--chat");
  expect_refused({"generate", "--model", model(), "--prompt", "x"}, "tokenizer");
  fs::remove(place("model/chat_template.jinja"));
  expect_refused(with({"--prompt", "x", "--chat"}), "no chat template");
  write("model/chat_template.jinja", "{{ messages | my_own }}");
  expect_refused(with({"--prompt", "x", "--chat"}), "--raw");
  write("cut.gguf", content(gguf()).substr(0, 5000));
  expect_refused({"generate", "--model", place("cut.gguf"), "--prompt", "x"}, "cut.gguf");
}

// ---- The picture

TEST_F(CommandText, DrawsWhatStayedInOnePage) {
  const Words words{"generate",
                    "--model",
                    place("model"),
                    "--prompt",
                    "the cat </script><b> and the hat",
                    "--max-new-tokens",
                    "24",
                    "--policy",
                    "tova,budget=16,interval=4,sink=1,recent=4",
                    "--html",
                    place("kept.html")};
  const json told = answered(words);
  const std::string page = content(place("kept.html"));
  ASSERT_FALSE(page.empty());
  EXPECT_EQ(page.find("</script>"), page.rfind("</script>")) << "what a token says does not end the script";
  EXPECT_EQ(page.find("http"), std::string::npos) << "it asks no network";
  const std::size_t begin = page.find("const data = ") + 13, end = page.find(";\n", begin);
  const json data = json::parse(page.substr(begin, end - begin));
  std::string text;
  for (const json& piece : data["pieces"]) text += piece.get<std::string>();
  EXPECT_TRUE(text.starts_with("the cat </script><b> and the hat")) << text;
  ASSERT_EQ(data["stops"].size(), told["events"].size() + 1);
  const auto rows = [](const json& stop) {
    std::vector<std::vector<int>> all;
    for (const json& ranges : stop["kept"]) {
      all.emplace_back();
      for (std::size_t i = 0; i < ranges.size(); i += 2)
        for (int k = 0; k < ranges[i + 1].get<int>(); ++k) all.back().push_back(ranges[i].get<int>() + k);
    }
    return all;
  };
  for (std::size_t e = 0; e < told["events"].size(); ++e) {
    std::vector<std::vector<int>> kept;
    for (const json& layer : told["events"][e]["kept"])
      for (const json& head : layer) kept.push_back(head.get<std::vector<int>>());
    EXPECT_EQ(rows(data["stops"][e]), kept) << "event " << e;
  }
  const auto end_rows = rows(data["stops"].back()), last = rows(data["stops"][told["events"].size() - 1]);
  const int tokens = static_cast<int>(data["pieces"].size());
  ASSERT_EQ(data["stops"].back()["present"], tokens);
  for (std::size_t r = 0; r < end_rows.size(); ++r) {
    ASSERT_GE(end_rows[r].size(), last[r].size());
    EXPECT_TRUE(std::equal(last[r].begin(), last[r].end(), end_rows[r].begin())) << "nothing goes between events";
    EXPECT_EQ(end_rows[r].back(), tokens - 1);
  }
  expect_refused({"generate", "--model", place("model"), "--prompt", "x", "--html", place("no/kept.html")},
                 "no/kept.html");
}

// ---- Tasks over text

TEST_F(CommandText, EvaluatesTasksWhoseAnswersAreRead) {
  std::string prose;
  for (int i = 0; i < 400; ++i) prose += "the cat sat on the mat. ";
  const std::string haystack = write("prose.txt", prose);
  const auto eval = [&](const Words& more) {
    Words words{"eval",     "--model", place("model"), "--task", "text/needle", "--haystack", haystack,
                "--length", "400",     "--samples",    "3",      "--batch",     "2",          "--budgets",
                "64"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  for (const char* question : {"before", "after"}) {
    SCOPED_TRACE(question);
    const json all = answered(
        eval({"--policy", "full", "--policy", "tova", "--policy", "fastkv,layer=0,window=8", "--question", question}));
    ASSERT_EQ(all.size(), 3U);
    EXPECT_EQ(all[0]["references"], 3);
    EXPECT_EQ(all[0]["events"], 0);
    EXPECT_GE(all[1]["events"], 3) << "every prompt is cut at its end";
    EXPECT_EQ(json::parse(all[1]["resolved"].get<std::string>())["prefill"], "cut");
    EXPECT_LT(all[1]["kept_bytes"], all[0]["kept_bytes"]);
    json alone = answered(eval({"--policy", "tova", "--question", question}))[0], among = all[1];
    for (const char* timed : {"first_token_ms", "tokens_per_second"}) {
      alone.erase(timed);
      among.erase(timed);
    }
    EXPECT_EQ(alone, among) << "company changes nothing";
  }
  const json fed = answered(eval({"--policy", "full", "--score", "tokens"}))[0];
  EXPECT_EQ(fed["references"], 15) << "a token a digit; the blank in front is no part of the answer";
  EXPECT_LE(fed["whole"], 3);
  const Outcome table = run(eval({"--policy", "full", "--policy", "tova", "--against", "full", "--quiet"}));
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("says nothing about policies"), std::string::npos)
      << "random weights answer nothing: " << table.out;
}

TEST_F(CommandText, WritesSamplesAndAnswersForOtherPrograms) {
  const auto written = [&](const Words& more) {
    Words words{"eval",
                "--model",
                place("model"),
                "--task",
                "ruler/niah-single-1,ruler/vt",
                "--length",
                "1500",
                "--samples",
                "2",
                "--batch",
                "2",
                "--seed",
                "7",
                "--samples-out",
                place("samples.jsonl")};
    words.insert(words.end(), more.begin(), more.end());
    const json rows = answered(words);
    std::vector<json> lines;
    std::ifstream in(place("samples.jsonl"));
    for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
    for (const json& row : rows) {  // what the table counts stands in the lines
      double share = 0;
      for (const json& line : lines)
        for (const json& answer : line["answers"])
          if (line["task"] == row["task"] && answer["policy"] == row["policy"] && answer["budget"] == row["budget"])
            share += answer["score"].get<double>() / 2;
      EXPECT_NEAR(share, row["share"].get<double>(), 1e-6) << row;
    }
    return lines;
  };
  const Words policies{"--policy", "full", "--policy", "tova,sink=0,recent=0,prefill=only", "--budgets", "96,64"};
  Words after = policies;
  after.insert(after.end(), {"--question", "after"});
  const std::vector<json> apart = written(after), whole = written(policies);
  const lm::Tokenizer tokenizer = lm::Tokenizer::read(tokenizer_file());
  ASSERT_EQ(apart.size(), 4U);
  ASSERT_EQ(whole.size(), 4U);
  for (std::size_t i = 0; i < apart.size(); ++i) {
    const json& line = apart[i];
    EXPECT_EQ(line["task"], i < 2 ? "ruler/niah-single-1" : "ruler/vt");
    EXPECT_EQ(line["seed"], 7 + i % 2);
    EXPECT_EQ(line["max_new_tokens"], i < 2 ? 128 : 30);
    EXPECT_EQ(line["end_tokens"], json({0, 2}));
    EXPECT_EQ(line["references"].size(), i < 2 ? 1U : 5U);
    json ids = line["prompt"];
    ids.insert(ids.end(), line["question"].begin(), line["question"].end());
    EXPECT_GT(line["question"].size(), 10U);
    EXPECT_EQ(whole[i]["prompt"], ids);
    EXPECT_EQ(whole[i]["question"], json::array());
    ASSERT_EQ(line["answers"].size(), 3U);
    EXPECT_EQ(line["answers"][0]["policy"], "full");
    EXPECT_EQ(line["answers"][0]["budget"], nullptr);
    EXPECT_EQ(line["answers"][2]["policy"], "tova,sink=0,recent=0,prefill=only");
    EXPECT_EQ(line["answers"][2]["budget"], 64);
    for (const json& answer : line["answers"]) {
      EXPECT_LE(answer["tokens"].size(), line["max_new_tokens"].get<std::size_t>());
      EXPECT_TRUE(answer["cut_seconds"].is_number());
      const json text = tokenizer.decode(answer["tokens"].get<std::vector<std::int32_t>>());
      EXPECT_EQ(answer["text"].dump(), text.dump(-1, ' ', false, json::error_handler_t::replace));
    }
    // The full cache goes on as generate does from the same ids.
    std::string said;
    for (const json& id : ids) said += id.dump() + " ";
    std::vector<std::int32_t> tokens =
        answered({"generate", "--model", place("model"), "--ids-file", write("ids.txt", said), "--max-new-tokens",
                  line["max_new_tokens"].dump()})["tokens"];
    tokens.erase(std::ranges::find_first_of(tokens, line["end_tokens"].get<std::vector<std::int32_t>>()), tokens.end());
    EXPECT_EQ(line["answers"][0]["tokens"], tokens);
  }
  const json narrowed = written({"--policy", "fastkv,layer=0,window=8", "--budgets", "64"})[0]["answers"][0];
  EXPECT_TRUE(narrowed["cut_seconds"].is_null()) << "cut on its way, not at its end";
  EXPECT_EQ(narrowed["selection_layer"], 0);
  EXPECT_EQ(narrowed["going_on"], 64);
  EXPECT_GT(narrowed["first_token_seconds"].get<double>(), 0);

  Words capped = policies;
  capped.insert(capped.end(), {"--answer-tokens", "5", "--cache-dtype", "bf16"});
  const std::vector<json> brief = written(capped);
  EXPECT_EQ(brief[0]["max_new_tokens"], 5);
  EXPECT_EQ(brief[0]["cache_dtype"], "bf16");
  EXPECT_LE(brief[0]["answers"][0]["tokens"].size(), 5U);
  // 96 slots of a KV head, two layers of two, in 2 bytes.
  EXPECT_EQ(brief[0]["answers"][1]["kept_bytes"], 96 * 2 * 2 * 2 * 8 * 2);
}

TEST_F(CommandText, AsksInTemplatesThatStripBlanksAndRefusesThoseThatChangeTheText) {
  const auto asked = [&](const std::string& jinja) {
    write("model/chat_template.jinja", jinja);
    answered({"eval", "--model", place("model"), "--task", "ruler/vt", "--length", "1500", "--samples", "1", "--policy",
              "full", "--question", "after", "--samples-out", place("asked.jsonl")});
    return json::parse(content(place("asked.jsonl")));
  };
  const json as_it_is = asked("<{{ messages[0].content }}>"), stripped = asked("<{{ messages[0].content | trim }}>");
  EXPECT_EQ(stripped["prompt"], as_it_is["prompt"]);
  EXPECT_EQ(stripped["question"], as_it_is["question"]);
  EXPECT_GT(stripped["question"].size(), 10U);
  for (const char* jinja : {"{{ messages[0].content[:20] }}", "{{ messages[0].content * 2 }}"}) {
    write("model/chat_template.jinja", jinja);
    expect_refused({"eval", "--model", place("model"), "--task", "ruler/vt", "--length", "3000", "--samples", "1",
                    "--policy", "full"},
                   "once and as it is");
  }
}

TEST_F(CommandText, RefusesTasksThatCannotBeAsked) {
  const Words eval{"eval", "--model", place("model"), "--samples", "1"};
  const auto with = [&](const Words& more) {
    Words words = eval;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(with({"--task", "ruler/niah-single-2", "--length", "600"}),
                 "kvkeep: --haystack: ruler/niah-single-2 ");
  expect_refused(with({"--task", "ruler/qa-1", "--length", "600"}), "kvkeep: --passages: ruler/qa-1 ");
  expect_refused(with({"--task", "ruler/vt", "--length", "63"}), "kvkeep: --task ruler/vt: length is out of range");
  expect_refused(with({"--task", "ruler/niah-quadruple"}), "niah-quadruple");
  expect_refused(with({"--task", "ruler/vt", "--length", "100"}), "length");
  expect_refused(with({"--task", "ruler/vt,ask"}), "one kind");
  expect_refused(with({"--task", "ruler/vt", "--score", "tokens", "--length", "1500"}), "5 references");
  expect_refused(with({"--task", "ask", "--score", "tokens"}), "--score");
  expect_refused(with({"--task", "ask", "--haystack", "x"}), "--haystack");
  expect_refused(with({"--task", "ask", "--samples-out", place("x.jsonl")}), "--samples-out");
  expect_refused(with({"--task", "ruler/vt", "--samples-out", place("no/x.jsonl")}), "no/x.jsonl");
  expect_refused(with({"--task", "ruler/vt", "--policy", "oracle,budget=64"}), "oracle");
  expect_refused({"eval", "--model", model(), "--task", "ruler/vt"}, "tokenizer");
}

}  // namespace
}  // namespace kvkeep::cli_text_test

#endif  // KVKEEP_CLI_PATH
