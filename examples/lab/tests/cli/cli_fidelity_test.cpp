// SPDX-License-Identifier: Apache-2.0
// kvkeep perplexity and kvkeep fidelity, held against the rows of logits that each policy gives by itself; prompts that
// are protected.

#ifdef KVKEEP_CLI_PATH

#include <cmath>
#include <map>
#include <span>

#include "command_text.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/fidelity.h"
#include "kvlab/generation.h"

namespace kvkeep::cli_fidelity_test {
namespace {

using nlohmann::json;

constexpr const char* kTova = "tova,budget=24,interval=8,sink=1,recent=4";

/// One text under the full cache and under a policy, each run by itself with all logits kept.
struct SlowText {
  std::vector<double> likelihoods;  ///< [tokens] under the policy
  std::vector<report::Departure> departures;
  std::int64_t before_events = 0;
};

SlowText slowly(lm::Decoder& decoder, const std::string& policy, const std::vector<std::int32_t>& prompt,
                const std::vector<std::int32_t>& tokens) {
  const lm::Request request{
      .prompt = prompt, .new_tokens = static_cast<std::int32_t>(tokens.size()), .forced = tokens, .keep_logits = true};
  const auto run = [&](const std::string& name) {
    return std::move(lm::generate(decoder, make_policy(name), {request}).completions.front());
  };
  const lm::Completion full = run("full"), cut = run(policy);
  SlowText text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto row = [&](const lm::Completion& done) {
      const auto width = static_cast<std::size_t>(done.logits.size(1));
      return std::span(done.logits.const_data_ptr<float>() + i * width, width);
    };
    text.likelihoods.push_back(report::negative_log_likelihood(row(cut), tokens[i]));
    text.departures.push_back(report::departure(row(full), row(cut)));
  }
  if (!cut.events.empty()) text.before_events = cut.events.front().step + 1;
  return text;
}

/// What a row of the command should say of tokens [first, last] of all texts.
void expect_row(const json& row, const std::vector<SlowText>& texts, std::size_t first, std::size_t last) {
  SCOPED_TRACE(row.dump());
  report::Ratio nll, kl, same;
  for (const SlowText& text : texts)
    for (std::size_t i = first; i <= last; ++i) {
      nll.add(text.likelihoods.at(i), 1);
      kl.add(text.departures.at(i).divergence, 1);
      same.add(text.departures.at(i).same_token, 1);
    }
  EXPECT_EQ(row["first_token"], first);
  EXPECT_EQ(row["last_token"], last);
  EXPECT_EQ(row["tokens"], nll.whole);
  EXPECT_NEAR(row["nll"].get<double>(), nll.value(), 1e-6);
  EXPECT_NEAR(row["perplexity"].get<double>(), std::exp(nll.value()), 1e-5 * std::exp(nll.value()));
  EXPECT_NEAR(row["kl"].get<double>(), kl.value(), 1e-6);
  EXPECT_NEAR(row["same_token"].get<double>(), same.value(), 1e-6);
}

class CommandFidelity : public CommandProse {
 protected:
  json perplexity(const Words& more) {
    return measured({"perplexity", "--model", place("model"), "--text", prose_, "--length", "380", "--prompt", "60",
                     "--texts", "3"},
                    more);
  }
  json fidelity(const Words& more) {
    return measured({"fidelity", "--model", place("model"), "--prompt", "the cat and the hat", "--prompt-file",
                     write("said.txt", "a rat sat on the mat and the mat was a hat"), "--new-tokens", "90"},
                    more);
  }
  json measured(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return answered(std::move(words));
  }
};

/// The rows of one policy.
json of(const json& table, const std::string& policy, const std::string& part = "counted",
        const std::string& prompt = "") {
  json rows = json::array();
  for (const json& row : table)
    if (row["policy"] == policy && row["part"] == part && (prompt.empty() || row["prompt"] == prompt))
      rows.push_back(row);
  return rows;
}

TEST_F(CommandFidelity, MeasuresATextAsEachPolicyByItselfForetellsIt) {
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  std::vector<SlowText> slow;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto at = ids_.begin() + static_cast<std::ptrdiff_t>(i * (ids_.size() / 3));
    slow.push_back(slowly(decoder, text(kTova, ",prefill=cut"), {at, at + 60}, {at + 60, at + 380}));
  }
  const json table = perplexity({"--policy", kTova, "--batch", "2"});
  const json counted = of(table, "tova,sink=1,recent=4"), bins = of(table, "tova,sink=1,recent=4", "bin");
  ASSERT_EQ(counted.size(), 1U) << table.dump();
  ASSERT_EQ(bins.size(), 2U);
  EXPECT_EQ(slow[0].before_events, 1) << "the prompt is cut at its end; the first token is foretold before";
  expect_row(counted[0], slow, 1, 319);
  expect_row(bins[0], slow, 0, 255);
  expect_row(bins[1], slow, 256, 319);
  EXPECT_GT(counted[0]["kl"], 0.0);
  EXPECT_LE(counted[0]["nll_low"], counted[0]["nll"]);
  EXPECT_GE(counted[0]["nll_high"], counted[0]["nll"]);
  const json full = of(table, "full");
  ASSERT_EQ(full.size(), 1U) << "it is always there";
  EXPECT_EQ(full[0]["kl"], 0.0);
  EXPECT_EQ(full[0]["same_token"], 1.0);
  EXPECT_EQ(full[0]["tokens"], counted[0]["tokens"]);
  EXPECT_EQ(full[0]["events"], 0);
}

TEST_F(CommandFidelity, CountsTheSameTokensForEveryPolicyAndCompanyChangesNothingElse) {
  const Words late{"--policy", "streaming,budget=100,interval=40", "--against", kTova};
  const Words others{"--policy", "gemfilter,layer=0,budget=40",
                     "--policy", "fastkv,layer=0,window=8,budget=40",
                     "--policy", "sekv,recent=32"};
  Words company{"--policy", kTova, "--batch", "1"};
  company.insert(company.end(), others.begin(), others.end());
  company.insert(company.end(), late.begin(), late.end());
  const json among = perplexity(company), alone = perplexity({"--policy", kTova, "--batch", "3"});
  EXPECT_EQ(of(among, "tova,sink=1,recent=4", "bin"), of(alone, "tova,sink=1,recent=4", "bin"));
  for (const json& row : among) {
    if (row["part"] != "counted") continue;
    EXPECT_EQ(row["first_token"], 81) << "140 slots are there once 80 tokens stand behind the prompt of 60: "
                                      << row.dump();
    EXPECT_EQ(row["tokens"], 3 * (320 - 81));
    EXPECT_NEAR(row["nll_difference"].get<double>(),
                row["nll"].get<double>() - of(among, "tova,sink=1,recent=4")[0]["nll"].get<double>(), 2e-6);
  }
  const json narrowed = of(among, "gemfilter,layer=0", "bin");
  ASSERT_EQ(narrowed.size(), 2U);
  EXPECT_EQ(narrowed[0]["tokens"], 3 * 256) << "a prompt that runs twice is a step behind, no token is lost";
  EXPECT_GT(narrowed[0]["kl"], 0.0);
}

TEST_F(CommandFidelity, FeedsWhatTheFullCacheGenerated) {
  lm::Decoder decoder = lm::Decoder::open(place("model"));
  const lm::Tokenizer tokenizer = lm::Tokenizer::read(tokenizer_file());
  std::vector<SlowText> slow;
  std::vector<std::int32_t> first_text;
  for (const char* said : {"the cat and the hat", "a rat sat on the mat and the mat was a hat"}) {
    const std::vector<std::int32_t> prompt = tokenizer.encode(said, lm::SpecialTokens::plain);
    const auto written =
        lm::generate(decoder, make_policy("full"), {{.prompt = prompt, .new_tokens = 90}}).completions.front().tokens;
    if (first_text.empty()) first_text = written;
    slow.push_back(slowly(decoder, text(kTova, ",prefill=cut"), prompt, written));
  }
  const json table = fidelity({"--policy", kTova});
  const json counted = of(table, "tova,sink=1,recent=4");
  ASSERT_EQ(counted.size(), 1U) << table.dump();
  const auto first = static_cast<std::size_t>(std::max(slow[0].before_events, slow[1].before_events));
  EXPECT_GT(first, 1U);
  expect_row(counted[0], slow, first, 89);
  const json bins = of(table, "tova,sink=1,recent=4", "bin");
  ASSERT_EQ(bins.size(), 1U);
  expect_row(bins[0], slow, 0, 89);
  EXPECT_EQ(of(table, "full")[0]["kl"], 0.0);

  const Outcome shown = run({"fidelity", "--model", place("model"), "--prompt", "the cat and the hat", "--new-tokens",
                             "90", "--policy", kTova, "--against", "full"});
  EXPECT_EQ(shown.code, 0) << shown.err;
  for (const char* part : {"KL from full", "0-89", "Above full", "no interval", "count for no policy"})
    EXPECT_NE(shown.out.find(part), std::string::npos) << part << " should stand in:\n" << shown.out;

  // With --stop a text ends with the model's end token: here the tenth token that it writes, wherever that comes first.
  write("model/generation_config.json", text(R"({"eos_token_id": )", first_text[9], "}"));
  const auto end = std::find(first_text.begin(), first_text.end(), first_text[9]) - first_text.begin();
  const Words one{"fidelity",     "--model", place("model"), "--prompt", "the cat and the hat",
                  "--new-tokens", "90",      "--policy",     "full"};
  EXPECT_EQ(of(measured(one, {}), "full")[0]["tokens"], 90) << "goes on behind it";
  EXPECT_EQ(of(measured(one, {"--stop"}), "full")[0]["tokens"], end + 1);
}

TEST_F(CommandFidelity, RunsEveryPolicyWithItsPromptProtectedToo) {
  const Words words{"perplexity",
                    "--model",
                    place("model"),
                    "--text",
                    prose_,
                    "--length",
                    "200",
                    "--prompt",
                    "60",
                    "--texts",
                    "2",
                    "--budgets",
                    "80,40",
                    "--interval",
                    "8",
                    "--policy",
                    "full",
                    "--policy",
                    "tova,recent=4",
                    "--policy",
                    "fastkv,layer=0,window=8,budget=40",
                    "--policy",
                    "rpc,style=official,interval=16",
                    "--protect-prompt"};
  const auto with = [&](const Words& more) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const json table = json::parse(run(with({"-o", "json", "--against", "tova,recent=4"})).out);
  const json cut = of(table, "tova,recent=4", "counted", "cut"), kept = of(table, "tova,recent=4", "counted", "kept");
  ASSERT_EQ(cut.size(), 2U);
  ASSERT_EQ(kept.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(cut[i]["budget"], kept[i]["budget"]);
    EXPECT_EQ(json::parse(cut[i]["resolved"].get<std::string>())["protect_prompt"], false);
    EXPECT_EQ(json::parse(kept[i]["resolved"].get<std::string>())["protect_prompt"], true);
    EXPECT_EQ(kept[i]["nll_difference"], 0.0) << "each against its own kind";
    EXPECT_EQ(cut[i]["nll_difference"], 0.0);
  }
  EXPECT_EQ(kept[0]["kept_bytes"], cut[0]["kept_bytes"]) << "the prompt counts inside the budget";
  EXPECT_GT(kept[1]["kept_bytes"], cut[1]["kept_bytes"]) << "and raises it where it does not fit";
  EXPECT_EQ(of(table, "fastkv,layer=0,window=8").size(), 2U) << "one for each budget, none protected";
  EXPECT_EQ(of(table, "rpc,style=official", "counted", "kept").size(), 2U);
  EXPECT_EQ(of(table, "rpc,style=official").size(), 2U) << "its prompt always stays";
  const Outcome shown = run(words);
  EXPECT_NE(shown.err.find("fastkv,layer=0,window=8 has no protect_prompt"), std::string::npos) << shown.err;
  EXPECT_EQ(shown.err.find("tova,recent=4 has no"), std::string::npos) << shown.err;
  EXPECT_NE(shown.out.find("| prompt |"), std::string::npos) << shown.out;

  const json text_task =
      answered({"eval",       "--model",  place("model"), "--task",    "text/needle", "--haystack",
                prose_,       "--length", "400",          "--samples", "1",           "--budgets",
                "64",         "--policy", "full",         "--policy",  "tova",        "--protect-prompt",
                "--question", "after"});
  ASSERT_EQ(text_task.size(), 3U);
  EXPECT_EQ(text_task[0]["prompt"], "kept");
  EXPECT_EQ(text_task[1]["prompt"], "cut");
  EXPECT_EQ(text_task[2]["prompt"], "kept");
  EXPECT_GT(text_task[2]["kept_bytes"], text_task[1]["kept_bytes"]);
  const json trace_task = answered({"eval", "--model", model(), "--task", "ask", "--length", "128", "--samples", "1",
                                    "--budgets", "24", "--policy", "tova,recent=4,sink=1", "--protect-prompt"});
  ASSERT_EQ(trace_task.size(), 2U);
  EXPECT_EQ(trace_task[1]["prompt"], "kept");
  EXPECT_GT(trace_task[1]["kept_bytes"], trace_task[0]["kept_bytes"]);
}

TEST_F(CommandFidelity, RefusesTextsAndPromptsThatAreNone) {
  const Words perplexity{"perplexity", "--model", place("model")},
      fidelity{"fidelity", "--model", place("model"), "--new-tokens", "8"};
  const auto with = [](Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(perplexity, "--text");
  expect_refused(with(perplexity, {"--text", place("nowhere.txt")}), "nowhere.txt");
  expect_refused(with(perplexity, {"--text", prose_, "--length", "4000", "--texts", "4"}), "overlap");
  expect_refused(with(perplexity, {"--text", prose_, "--length", "100", "--prompt", "100"}), "--prompt");
  expect_refused(with(perplexity, {"--text", prose_, "--prompt", "0"}), "--prompt");
  expect_refused(with(perplexity, {"--text", prose_, "--policy", "oracle,budget=64"}), "oracle");
  expect_refused(with(perplexity, {"--text", prose_, "--policy", "lru"}), "lru");
  expect_refused({"perplexity", "--model", model(), "--text", prose_}, "tokenizer");
  expect_refused(fidelity, "--prompt");
  expect_refused(with(fidelity, {"--prompt", "", "--policy", "full"}), "empty");
  expect_refused(with(fidelity, {"--prompt-file", place("nowhere.txt")}), "nowhere.txt");
  expect_refused(with(fidelity, {"--prompt", "x", "--system", "y"}), "--chat");
  expect_refused(with(fidelity, {"--prompt", "x", "--policy", "oracle,budget=64"}), "oracle");
  expect_refused({"fidelity", "--model", model(), "--prompt", "x"}, "tokenizer");
}

}  // namespace
}  // namespace kvkeep::cli_fidelity_test

#endif  // KVKEEP_CLI_PATH
