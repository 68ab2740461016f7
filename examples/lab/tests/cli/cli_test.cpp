// SPDX-License-Identifier: Apache-2.0
// The kvkeep command as people and scripts meet it: what it prints where, and how it ends.
// A build without the command (KVKEEP_BUILD_CLI=OFF) has none of these tests.

#ifdef KVKEEP_CLI_PATH

#include "command.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/version.h"

namespace kvkeep::cli_test {
namespace {

using nlohmann::json;

// ---- Help -----------------------------------------------------------------------------------------------------------

TEST_F(Command, TeachesByExampleInTheHelpOfEverySubcommand) {
  for (const Words& words : std::vector<Words>{{"--help"},
                                               {"generate", "--help"},
                                               {"chat", "--help"},
                                               {"eval", "--help"},
                                               {"replay", "--help"},
                                               {"record", "--help"},
                                               {"calibrate", "--help"},
                                               {"plan", "--help"},
                                               {"policies", "--help"},
                                               {"doctor", "--help"}}) {
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.err, "");
    const std::size_t examples = outcome.out.find("Examples:");
    ASSERT_NE(examples, std::string::npos) << words[0];
    const std::string shown = outcome.out.substr(examples);
    std::size_t count = 0;
    for (std::size_t at = shown.find("\n  kvkeep "); at != std::string::npos; at = shown.find("\n  kvkeep ", at + 1))
      ++count;
    EXPECT_GE(count, 2U) << words[0];
  }
}

TEST_F(Command, SaysWhereTheModelOfItsExamplesComesFrom) {
  const std::string script = content(fs::path(KVKEEP_TEST_MODEL_DIR) / "../../cmake/bootstrap.sh");
  for (const Words& words : std::vector<Words>{{"--help"}, {"generate", "--help"}, {"tokens", "--help"}}) {
    const std::string help = run(words).out;
    std::smatch file;
    ASSERT_TRUE(std::regex_search(help, file, std::regex(R"(bash examples/demo.sh loads:\s+(\.cache/[^ /]+)/(\S+))")))
        << help;
    EXPECT_NE(script.find(file[1].str() + '"'), std::string::npos) << file[1];
    EXPECT_NE(script.find("name=" + file[2].str() + '\n'), std::string::npos) << file[2];
  }
}

// An earlier version named the step behind it, where nothing is due.
TEST_F(Command, RecordsAnEventOfTheRunInItsExample) {
  std::smatch example;
  const std::string help = run({"record", "--help"}).out;
  ASSERT_TRUE(std::regex_search(help, example, std::regex("--task ask --forced --policy (\\S+) --event ([0-9]+)")))
      << help;
  const json run_of = json::parse(run({"generate", "--model", KVKEEP_TEST_MODEL_DIR, "--task", "ask", "--forced",
                                       "--policy", example[1], "-o", "json", "--quiet"})
                                      .out);
  EXPECT_TRUE(std::ranges::any_of(run_of["events"], [&](const json& e) { return e["step"] == std::stoi(example[2]); }))
      << example[2];
}

TEST_F(Command, OffersTheNamesOfTasksToShells) {
  EXPECT_EQ(run({"__complete", "eval", "--task", "ask,ch"}).out, "ask,chain\n");
  EXPECT_EQ(run({"__complete", "eval", "--task", "text/"}).out, "text/needle\n");
  EXPECT_EQ(run({"__complete", "generate", "--task", "ne"}).out, "needle\n");
  EXPECT_EQ(run({"__complete", "record", "--kind", "p"}).out, "prefill\n");
}

TEST_F(Command, LetsThreadsSpinBrieflyUnlessItIsToldHowTheyWait) {
  const auto waits = [&](const char* name, const char* value) {
    const char* before = std::getenv(name);
    const std::string was = before == nullptr ? "" : before;
    if (value == nullptr)
      ::unsetenv(name);
    else
      ::setenv(name, value, 1);
    const json findings = json::parse(run({"doctor", "--quick", "-o", "json"}).out);
    if (before == nullptr)
      ::unsetenv(name);
    else
      ::setenv(name, was.c_str(), 1);
    return std::ranges::find(findings, "threads", [](const json& one) { return one.at("what"); })
        ->at("value")
        .get<std::string>();
  };
  EXPECT_NE(waits("OMP_WAIT_POLICY", "PASSIVE").find("waiting: OMP_WAIT_POLICY=PASSIVE"), std::string::npos);
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) GTEST_SKIP() << "OMP_WAIT_POLICY is set for this run";
  EXPECT_NE(waits("GOMP_SPINCOUNT", nullptr).find("waiting: GOMP_SPINCOUNT=1000"), std::string::npos);
  EXPECT_NE(waits("GOMP_SPINCOUNT", "7").find("waiting: GOMP_SPINCOUNT=7"), std::string::npos);
}

// ---- Refusals -------------------------------------------------------------------------------------------------------

TEST_F(Command, RefusesWrongUsageWithTheHelpToRead) {
  expect_refused({"frobnicate"}, "frobnicate");
  expect_refused({"generate", "--ids", "1", "--max-new-tokens", "3"}, "--model");
  expect_refused({"generate", "--model", model(), "--max-new-tokens", "3"}, "ids");
  expect_refused({"generate", "--model", model(), "--ids", "1", "--task", "ask", "--max-new-tokens", "3"}, "task");
  expect_refused({"generate", "--model", model(), "--ids", "1", "--max-new-tokens", "-3"}, "max-new-tokens");
  expect_refused({"generate", "--model", model(), "--ids", "1", "--max-new-tokens", "3", "-o", "xml"}, "xml");
  expect_refused({"replay", "a", "--policy", "full", "--out", place("r"), "--wrong"}, "--wrong");
}

TEST_F(Command, RefusesIntegersThatAreNotDecimalDigits) {
  for (const char* wrong :
       {"-1", "010", "0x10", "+1", " 1", "99999999999999999999999", "18446744073709551616", "1e3", ""})
    expect_refused({"generate", "--model", model(), "--task", "ask", "--length", "96", "--seed", wrong}, "--seed");
  expect_refused({"generate", "--model", model(), "--ids", "1", "--max-new-tokens", "010"}, "--max-new-tokens");
  expect_refused({"eval", "--model", model(), "--samples", "0x10"}, "--samples");
  EXPECT_EQ(run({"generate", "--model", model(), "--task", "ask", "--length", "96", "--max-new-tokens", "2", "--seed",
                 "18446744073709551615"})
                .code,
            0);
}

TEST_F(Command, RefusesListsWithEmptyItemsAndATaskTwice) {
  for (const char* wrong : {"16,,8", "16,", ",16", ",", "16;8", "0", "-8", "1073741825"})
    expect_refused({"eval", "--model", model(), "--policy", "tova", "--budgets", wrong}, "--budgets");
  expect_refused({"eval", "--model", model(), "--policy", "full", "--task", "ask,ask"}, "'ask' is given twice");
  expect_refused({"eval", "--model", model(), "--policy", "full", "--task", "ask", "--task", "ask"},
                 "'ask' is given twice");
  expect_refused({"eval", "--model", model(), "--policy", "full", "--task", "ask,,chain"}, "--task");
}

TEST_F(Command, RefusesTheOracleWhereNobodyTellsItWhatIsNeeded) {
  const std::string trace = golden("scorers/expected_decode/trace.safetensors");
  expect_refused({"replay", trace, "--policy", "oracle,budget=8", "--out", place("r")}, "oracle");
  expect_refused({"record", "--model", model(), "--task", "ask", "--length", "96", "--policy", "oracle,budget=8",
                  "--out", place("r")},
                 "oracle");
}

TEST_F(Command, RefusesOneFileForTheResultAndTheRanks) {
  const std::string trace = place("prompt.safetensors");
  ASSERT_EQ(
      run({"record", "--model", model(), "--task", "ask", "--length", "96", "--kind", "prefill", "--out", trace}).code,
      0);
  fs::create_symlink("same", place("link"));
  for (const char* ranks : {"same", "./same", "../", "link"}) {
    const std::string other =
        std::string(ranks) == "../" ? (folder_ / ".." / folder_.filename() / "same").string() : place(ranks);
    expect_refused({"replay", trace, "--policy", "full", "--out", place("same"), "--ranks", other}, "two files");
  }
}

TEST_F(Command, RefusesMissingAndDamagedFiles) {
  const Words rest{"--ids", "1,2", "--max-new-tokens", "3"};
  const auto with_model = [&](const std::string& folder) {
    Words words{"generate", "--model", folder};
    words.insert(words.end(), rest.begin(), rest.end());
    return words;
  };
  expect_refused(with_model(place("nowhere")), "nowhere");
  expect_refused(with_model(golden("decoder/broken_truncated")), "model.safetensors");
  expect_refused(with_model(golden("decoder/broken_missing_tensor")), "model.layers.0.self_attn.k_proj.weight");
  expect_refused({"generate", "--model", model(), "--ids-file", place("none.txt"), "--max-new-tokens", "3"},
                 "none.txt");
  expect_refused({"replay", place("none.safetensors"), "--policy", "full", "--out", place("r")}, "none.safetensors");
  expect_refused({"replay", golden("decoder/llama_one_layer/trace.safetensors"), "--policy", place("none.json"),
                  "--out", place("r")},
                 "none.json");
  expect_refused({"replay", golden("decoder/llama_one_layer/trace.safetensors"), "--policy", "full", "--out",
                  place("no/such/folder/r")},
                 "no/such/folder");
  write("short.safetensors", "12345");
  expect_refused({"replay", place("short.safetensors"), "--policy", "full", "--out", place("r")}, "short.safetensors");
}

TEST_F(Command, RefusesEmptyPromptsAndIdsThatAreNoIds) {
  const auto generate = [&](const std::string& option, const std::string& value) {
    return Words{"generate", "--model", model(), option, value, "--max-new-tokens", "3"};
  };
  expect_refused(generate("--ids-file", write("empty.txt", " \n")), "no token ids");
  expect_refused(generate("--ids-file", write("words.txt", "1 2 three")), "three");
  expect_refused(generate("--ids", "1,2x"), "2x");
  expect_refused(generate("--ids", "99999999999"), "99999999999");
  expect_refused(generate("--ids", "1,256"), "256");
  expect_refused(generate("--task", "chess"), "chess");
  expect_refused(generate("--prompt", ""), "--prompt: the text is empty");
  expect_refused({"fidelity", "--model", model(), "--prompt", ""}, "--prompt: the text is empty");
}

TEST_F(Command, RefusesPoliciesThatDoNotExistOrDoNotAddUp) {
  const auto generate = [&](const std::string& policy) {
    return Words{"generate", "--model", model(), "--ids", "1,2", "--max-new-tokens", "3", "--policy", policy};
  };
  expect_refused(generate("lru"), "lru");
  expect_refused(generate("tova"), "budget");
  expect_refused(generate("tova,budget=64,windw=3"), "windw");
  expect_refused(generate("tova,budget=4,sink=4"), "sink + 1");
  expect_refused(generate(write("p.json", R"({"policy": "tova", "budget": 64, "colour": 1})")), "colour");
  expect_refused(generate(write("q.json", R"({"policy": )")), "q.json");
  expect_refused(generate("oracle,budget=64"), "oracle");
  expect_refused(generate("given,budget=128"), "given_scores: given reads a score of every token and KV head");
  expect_refused(generate("threshold-tova,budget=128"), "threshold is missing");
  expect_refused({"eval", "--model", model(), "--policy", "tova,budget=64,windw=3"}, "windw");
  expect_refused({"eval", "--model", model(), "--task", "ask,chess"}, "chess");
}

TEST_F(Command, RefusesTracesOfKindsItCannotReplayByName) {
  for (const std::string kind : {"span", "span_train", "dream"}) {
    const std::string file = place("t.safetensors");
    io::write_safetensors(file, {}, {{"kvkeep_trace", "1"}, {"kind", kind}});
    expect_refused({"replay", file, "--policy", "snapkv,budget=70", "--out", place("r")}, "\"" + kind + "\"");
  }
  const std::string file = place("t.safetensors");
  io::write_safetensors(file, {}, {{"kvkeep_trace", "2"}, {"kind", "event"}});
  expect_refused({"replay", file, "--policy", "full", "--out", place("r")}, "version");
  io::write_safetensors(file, {}, {});
  expect_refused({"replay", file, "--policy", "full", "--out", place("r")}, "kvkeep_trace");
  expect_refused({"replay", golden("decoder/llama_one_layer/trace.safetensors"), "--policy", "tova,budget=64", "--out",
                  place("r")},
                 "full");
}

TEST_F(Command, RefusesEveryGoldenCaseThatMustFail) {
  int refused = 0;
  for (const auto& entry : fs::recursive_directory_iterator(KVKEEP_TEST_GOLDEN_DIR)) {
    if (entry.path().filename() != "case.json") continue;
    const json about = json::parse(content(entry.path()));
    if (!about.value("must_fail", false)) continue;
    const fs::path at = entry.path().parent_path();
    expect_refused(
        {"replay", (at / "trace.safetensors").string(), "--policy", (at / "policy.json").string(), "--out", place("r")},
        about["message_should_name"][0]);
    ++refused;
  }
  EXPECT_GE(refused, 2);
}

// ---- Results --------------------------------------------------------------------------------------------------------

// Decodes 20 tokens of a sample under a policy that cuts it several times.
Words generate_asked(const std::string& model, const Words& more) {
  Words words{"generate",
              "--model",
              model,
              "--task",
              "ask",
              "--seed",
              "3",
              "--length",
              "96",
              "--policy",
              "tova,budget=24,interval=8",
              "--max-new-tokens",
              "20"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST_F(Command, GeneratesWithPinnedPositions) {
  const Words generate{"generate",
                       "--model",
                       model(),
                       "--task",
                       "ask",
                       "--seed",
                       "3",
                       "--length",
                       "96",
                       "--policy",
                       "tova,budget=32,interval=16,recent=8",
                       "--forced",
                       "-o",
                       "json",
                       "--pin"};
  const auto with = [&](const std::string& spans) {
    Words words = generate;
    words.push_back(spans);
    return words;
  };
  const json said = json::parse(run(with("20-24,31")).out);
  ASSERT_FALSE(said["events"].empty());
  for (const auto& event : said["events"])
    for (const auto& layer : event["kept"])
      for (const auto& head : layer)
        for (const int position : {20, 24, 31}) EXPECT_NE(std::find(head.begin(), head.end(), position), head.end());
  for (const char* wrong : {"20-", "5-3", "1,,2", "1,", "x", "3-4x"})
    expect_refused(with(wrong), "allowed positions such as 0-31,40");
  expect_refused(with("10-80"), "allowed up to 27");
  EXPECT_EQ(run(with("20-24,31")).err.find("--pin"), std::string::npos);
  const std::string beyond = run(with("20-24,31,900-901,950")).err;
  EXPECT_NE(beyond.find("note: --pin: positions 900-901,950 never came; the text ended at 94\n"), std::string::npos)
      << beyond;
}

TEST_F(Command, GeneratesTheSameInPagesAsInADenseCache) {
  const auto in_pages = [&](const std::string& size) {
    return run(generate_asked(model(), {"-o", "json", "--quiet", "--page-size", size}));
  };
  const Outcome dense = in_pages("0");
  ASSERT_EQ(dense.code, 0) << dense.err;
  EXPECT_GE(json::parse(dense.out)["events"].size(), 2U);
  for (const char* size : {"1", "12", "16"}) EXPECT_EQ(in_pages(size).out, dense.out) << size;
  expect_refused({"generate", "--model", model(), "--ids", "1", "--page-size", "1025"}, "1024");
}

TEST_F(Command, ShowsTheFirstOfSeveralCopies) {
  Words words = generate_asked(model(), {"-o", "json", "--quiet"});
  const std::string alone = run(words).out;
  words.insert(words.end(), {"--copies", "3"});
  EXPECT_EQ(run(words).out, alone);
  words.back() = "0";
  expect_refused(words, "--copies");
}

TEST_F(Command, GeneratesOnTheDeviceThatIsNamedAndSaysWhichItHasNot) {
  const auto words = [&](const char* device) {
    return Words{"generate", "--model", model(), "--ids",   "1,2,3",    "--max-new-tokens",
                 "4",        "-o",      "json",  "--quiet", "--device", device};
  };
  EXPECT_EQ(
      run(words("cpu")).out,
      run({"generate", "--model", model(), "--ids", "1,2,3", "--max-new-tokens", "4", "-o", "json", "--quiet"}).out);
  for (const char* device : {"tpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", ""})
    expect_refused(words(device),
                   text("--device: there is no such device; given '", device, "'; allowed cpu, cuda, cuda:INDEX"));
  for (const char* command : {"eval", "generate"})
    expect_refused({command, "--model", model(), "--task", "ask", "--device", "tpu"}, "there is no such device");
  expect_refused({"eval", "--model", model(), "--diagnostics", "--device", "cuda:0"}, "--diagnostics reads queries");
  const Outcome absent = run(words("cuda:99"));  // a machine without that GPU, or a build without CUDA
  EXPECT_NE(absent.code, 0);
  EXPECT_NE(absent.err.find("99"), std::string::npos) << absent.err;
  if (run({"doctor", "--quick"}).out.find("kernels are compiled in; there is no NVIDIA driver here") !=
      std::string::npos)
    EXPECT_NE(absent.err.find("--device: there is no NVIDIA driver here; given cuda:99"), std::string::npos);
  EXPECT_EQ(std::count(absent.err.begin(), absent.err.end(), '\n'), 1) << absent.err;
  EXPECT_EQ(absent.out, "");

  const json findings = json::parse(run({"doctor", "--quick", "-o", "json"}).out);
  const auto cuda = std::ranges::find(findings, "CUDA", [](const json& one) { return one.at("what"); });
  EXPECT_EQ(cuda->at("value").get<std::string>().starts_with("not compiled in"),
            absent.err.find("built without CUDA") != std::string::npos)
      << *cuda << absent.err;
}

TEST_F(Command, GeneratesTokensAndSaysWhatEveryLayerAndHeadKept) {
  const auto as = [&](const std::string& format) { return run(generate_asked(model(), {"-o", format, "--quiet"})); };
  const Outcome outcome = as("json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result["tokens"].size(), 20U);
  ASSERT_GE(result["events"].size(), 2U);
  for (const json& event : result["events"]) {
    EXPECT_GT(event["bytes_before"], event["bytes_after"]);
    ASSERT_EQ(event["kept"].size(), 3U);
    for (const json& layer : event["kept"]) {
      ASSERT_EQ(layer.size(), 2U);
      for (const json& head : layer) EXPECT_EQ(head.size(), 24U);
    }
  }
  const Outcome table = as("csv");
  EXPECT_TRUE(table.out.starts_with("kind,step,token,layer,head,"));
  EXPECT_TRUE(std::regex_search(table.out, std::regex("\"[0-9]+-[0-9]+,")))
      << "runs of positions, quoted: " << table.out;
  EXPECT_EQ(std::count(table.out.begin(), table.out.end(), '\n'),
            1 + 20 + static_cast<std::ptrdiff_t>(result["events"].size()) * 6);
  EXPECT_TRUE(as("md").out.starts_with("Tokens: "));
}

TEST_F(Command, EvaluatesPoliciesUnderBudgetsInOneTable) {
  const Outcome outcome = run({"eval",      "--model",  model(),     "--task",   "ask,chain",  "--length", "96",
                               "--samples", "2",        "--budgets", "24,40",    "--interval", "8",        "--policy",
                               "full",      "--policy", "tova",      "--policy", "oracle",     "-o",       "json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 2U * (1 + 2 + 2));
  EXPECT_EQ(rows[0]["policy"], "full");
  EXPECT_EQ(rows[0]["events"], 0);
  EXPECT_EQ(rows[2]["budget"], 40);
  EXPECT_EQ(rows[4]["budget"], 24);
  for (const json& row : rows) {
    EXPECT_GT(row["look_ups"], 0);
    EXPECT_LE(row["accuracy_low"], row["accuracy"]);
    EXPECT_GE(row["accuracy_high"], row["accuracy"]);
    if (row["budget"].is_number()) {
      EXPECT_GT(row["events"], 0);
      EXPECT_LT(row["kept_bytes"], row["peak_bytes"]);
    }
  }
}

// The words of an evaluation of two tasks on two samples.
Words short_eval(const std::string& model, const Words& more, const char* format = nullptr) {
  Words words{"eval", "--model",   model, "--task",     "ask,chain", "--length",
              "96",   "--samples", "2",   "--interval", "8",         "--quiet"};
  words.insert(words.end(), more.begin(), more.end());
  if (format != nullptr) words.insert(words.end(), {"-o", format});
  return words;
}

TEST_F(Command, EvaluatesPoliciesThatStateARatioOrBytes) {
  const Outcome outcome = run(short_eval(model(), {"--budgets", "24", "--policy", "tova,ratio=0.5", "--policy",
                                                   "tova,bytes=30000", "--policy", "tova", "-o", "json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 2U * 3);
  EXPECT_EQ(rows[0]["budget"], 24) << "rows of one name stand together";
  EXPECT_EQ(rows[2]["budget"], "ratio=0.5");
  EXPECT_EQ(rows[4]["budget"], "bytes=30000");
  for (const json& row : rows) {
    EXPECT_EQ(row["policy"], "tova");
    EXPECT_GT(row["events"], 0);
    EXPECT_LT(row["kept_bytes"], row["peak_bytes"]);
    if (row["budget"] == "bytes=30000") EXPECT_LE(row["kept_bytes"], 30000);
  }
}

TEST_F(Command, ComparesPoliciesOverTheSameSamples) {
  const Outcome outcome = run(short_eval(
      model(), {"--budgets", "40,24", "--policy", "streaming", "--policy", "tova", "--against", "tova", "-o", "json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 2U * 4) << "tova runs already";
  for (const json& row : rows) {
    EXPECT_EQ(row["against"], "tova");
    EXPECT_EQ(row["against_budget"], row["budget"]);
    const auto same = std::find_if(rows.begin(), rows.end(), [&](const json& r) {
      return r["policy"] == "tova" && r["budget"] == row["budget"] && r["task"] == row["task"];
    });
    EXPECT_NEAR(row["difference"].get<double>(), row["accuracy"].get<double>() - (*same)["accuracy"].get<double>(),
                2e-5);
    EXPECT_LE(row["difference_low"], row["difference"]);
    EXPECT_GE(row["difference_high"], row["difference"]);
    EXPECT_LE(row["sample_low"], row["accuracy"]);
    EXPECT_GE(row["sample_high"], row["accuracy"]);
    if (row["policy"] == "tova") EXPECT_EQ(row["difference_high"], 0) << "nothing differs from itself";
  }
  const Outcome added = run(short_eval(model(), {"--budgets", "24", "--policy", "tova", "--against", "full"}));
  ASSERT_EQ(added.code, 0) << added.err;
  const std::size_t differences = added.out.find("Percentage points above full");
  ASSERT_NE(differences, std::string::npos);
  EXPECT_NE(added.out.find("| full ", differences), std::string::npos) << "the only reference serves every budget";
  EXPECT_NE(added.out.find("bootstrap over whole samples (2 per task)"), std::string::npos);
  EXPECT_NE(run(short_eval(model(), {"--policy", "full", "--intervals", "wilson"})).out.find("Wilson's interval"),
            std::string::npos);
  expect_refused(short_eval(model(), {"--policy", "full", "--intervals", "normal"}), "normal");
  expect_refused(short_eval(model(), {"--policy", "full", "--against", "lru"}), "lru");
}

TEST_F(Command, DiagnosesWhatAnEvaluationKept) {
  const Words more{"--budgets",    "24",   "--policy", "full",
                   "--policy",     "tova", "--policy", "ams-tova,window=8,recent=4,min_segment=4,max_segment=16",
                   "--diagnostics"};
  const auto as = [&](const char* format) { return run(short_eval(model(), more, format)); };
  const Outcome outcome = as("json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 2U * 3);
  for (const json& row : rows) {
    SCOPED_TRACE(row["resolved"].get<std::string>() + ", " + row["task"].get<std::string>());
    const json& all = row["diagnostics"];
    int seen = 0;
    for (const json& other : rows)
      if (other["policy"] == row["policy"]) seen += other["diagnostics"]["events"].get<int>();
    EXPECT_EQ(seen, row["events"]) << "of both tasks";
    EXPECT_TRUE(row["repetition_4"].is_number()) << "a free run repeats itself or not, cut or uncut";
    if (row["policy"] == "full") {
      for (const char* key : {"iou", "survival", "wiped_32", "recall", "output_error", "segments"})
        EXPECT_TRUE(row[key].is_null()) << key;
      continue;
    }
    EXPECT_EQ(all["row_events"].get<int>(), 3 * 2 * all["events"].get<int>()) << "3 layers, 2 KV heads";
    // 24 slots, 8 new ones an event: where a share x of the old ones stays, IoU is x * 24 / (48 - x * 24); it is convex
    // in x, so its mean is not below.
    const double x = row["survival"];
    EXPECT_GE(x, 16.0 / 24 - 1e-9) << "at most the 8 new ones can push old ones out";
    EXPECT_GE(row["iou"].get<double>() + 1e-5, x * 24 / (48 - x * 24));
    EXPECT_GT(row["recall"], 0);
    EXPECT_LT(row["recall"], 1);
    EXPECT_LE(row["past_recall"], row["recall"]) << "what was written since is held whole";
    EXPECT_GT(row["output_error"], 0);
    EXPECT_EQ(all["attention_by_head"].size(), 3U * 4) << "3 layers, 4 query heads";
    EXPECT_EQ(row["segments"].is_null(), row["policy"] == "tova");
  }
  const Outcome table = as("csv");
  EXPECT_EQ(std::count(table.out.begin(), table.out.end(), '\n'), 1 + 6);
  EXPECT_NE(table.out.find(",iou,survival,wiped_32,"), std::string::npos);
  EXPECT_NE(as("md").out.find("Diagnostics, all tasks:"), std::string::npos);
  EXPECT_EQ(run(short_eval(model(), {"--policy", "full", "-o", "csv"})).out.find("iou"), std::string::npos);
}

TEST_F(Command, TellsWhatFoldingTakesAndWhatItLoses) {
  const std::string tova = "tova,budget=24,recent=4,interval=8", fold = tova + ",rest=fold,";
  const Words more{"--policy", "full",          "--policy",     tova, "--policy", fold + "mass=0,energy=0",
                   "--policy", fold + "mass=1", "--diagnostics"};
  const auto as = [&](const char* format) { return run(short_eval(model(), more, format)); };
  const Outcome outcome = as("json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 2U * 4);
  for (std::size_t task = 0; task < 2; ++task) {
    const json &full = rows[task], &dropped = rows[2 + task], &open = rows[4 + task], &shut = rows[6 + task];
    for (const json* row : {&full, &dropped})
      for (const char* key : {"far_bytes", "opened", "tokens_opened", "moved_bytes"})
        EXPECT_TRUE((*row)[key].is_null()) << key;
    EXPECT_EQ(open["right"], full["right"]) << "everything opens, and nothing is left out";
    EXPECT_EQ(open["output_error"], 0);
    EXPECT_TRUE(open["recall"].is_null()) << "slots are read that are not kept";
    EXPECT_GT(open["opened"], 0);
    EXPECT_GT(open["tokens_opened"], open["opened"]);
    EXPECT_GT(open["moved_bytes"], 0);
    EXPECT_EQ(shut["opened"], 0);
    EXPECT_EQ(shut["tokens_opened"], 0);
    EXPECT_EQ(shut["moved_bytes"], 0);
    EXPECT_GT(shut["output_error"], 0);
    for (const json* row : {&open, &shut}) {
      EXPECT_GT((*row)["far_bytes"], 0);
      EXPECT_GT((*row)["kept_bytes"], dropped["kept_bytes"]) << "coarse entries and sketches are near";
      EXPECT_LT((*row)["kept_bytes"], full["kept_bytes"]);
    }
  }
  const std::string table = as("md").out;
  for (const char* title : {" far |", " opened |", " tokens opened |", " moved |"})
    EXPECT_NE(table.find(title), std::string::npos) << title;
  EXPECT_EQ(run(short_eval(model(), {"--policy", "full"})).out.find("opened"), std::string::npos)
      << "columns of what nobody does";
  const json unlimited = json::parse(run(short_eval(model(), {"--policy", "sekv,recent=16", "--policy",
                                                              "sekv,recent=16,budget_share=0.5", "-o", "json"}))
                                         .out);
  EXPECT_TRUE(unlimited[0]["budget"].is_null()) << "no limit is not a limit of 0";
  EXPECT_EQ(unlimited[2]["budget"], "budget_share=0.5");
}

TEST_F(Command, SaysWhatADecodedSequenceFolded) {
  const auto generate = [&](const std::string& options, const std::string& format) {
    return run({"generate", "--model", model(), "--task", "ask", "--length", "96", "--forced", "--policy",
                "tova,budget=24,recent=4,interval=8,rest=fold" + options, "--quiet", "-o", format});
  };
  const Outcome outcome = generate("", "json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json folded = json::parse(outcome.out)["folded"];
  EXPECT_GT(folded["spans"], 0);
  EXPECT_GT(folded["tokens"], folded["spans"]);
  EXPECT_GT(folded["near_bytes"], 0);
  EXPECT_GT(folded["far_bytes"], 0);
  EXPECT_GT(folded["queries"], 0);
  EXPECT_NE(generate("", "md").out.find("\nFolded: "), std::string::npos);
  const Outcome full = generate(",host_bytes=1000", "json");
  EXPECT_EQ(full.code, 1);
  EXPECT_NE(full.err.find("no room for factors"), std::string::npos) << full.err;
  EXPECT_EQ(run({"generate", "--model", model(), "--task", "ask", "--length", "96", "--policy", "tova,budget=24",
                 "--quiet", "-o", "md"})
                .out.find("Folded"),
            std::string::npos);
}

// ---- Memory plans ---------------------------------------------------------------------------------------------------

TEST_F(Command, PlansWhatADecoderThenHolds) {
  const std::string policy = "tova,budget=24,interval=8";
  const Outcome planned = run({"plan", "--model", model(), "--policy", policy, "--prompt", "30", "--length", "79",
                               "--dtype", "f32", "--page-size", "1", "-o", "json"});
  ASSERT_EQ(planned.code, 0) << planned.err;
  std::string ids = "1";
  for (int i = 2; i <= 30; ++i) ids += "," + std::to_string(i);
  const Outcome decoded = run({"generate", "--model", model(), "--ids", ids, "--policy", policy, "--max-new-tokens",
                               "50", "-o", "json", "--quiet"});
  ASSERT_EQ(decoded.code, 0) << decoded.err;
  const json plan = json::parse(planned.out), real = json::parse(decoded.out);
  EXPECT_EQ(plan["sequence"]["peak_bytes"], real["peak_bytes"]);
  EXPECT_EQ(plan["sequence"]["kept_bytes"], real["kept_bytes"]);
  EXPECT_EQ(plan["events"], real["events"].size());
}

TEST_F(Command, RecordsAnEventThatItsOwnReplayCuts) {
  const std::string trace = place("event.safetensors"), result = place("kept.safetensors");
  const Outcome recorded = run({"record", "--model", model(), "--task", "chain", "--length", "96", "--policy",
                                "tova,budget=24,interval=8", "--out", trace});
  ASSERT_EQ(recorded.code, 0) << recorded.err;
  const Outcome replayed = run({"replay", trace, "--policy", "ams-tova,budget=16,window=8,min_segment=4,max_segment=16",
                                "--out", result, "-o", "json"});
  ASSERT_EQ(replayed.code, 0) << replayed.err;
  EXPECT_EQ(json::parse(replayed.out)["kind"], "event");
  EXPECT_EQ(io::SafetensorsFile::open(result).tensor("layer.0.slots").size(2), 16);
}

TEST_F(Command, RecordsRunsThatReplayRunsAgainFromAnotherFolder) {
  fs::create_directory(folder_ / "deep");
  const std::string trace = place("deep/run.safetensors"), result = place("tokens.safetensors");
  for (const std::string kind : {"decoder", "generate"}) {
    const Outcome recorded = run(
        {"record", "--kind", kind, "--model", model(), "--ids", "5,6,7,8", "--max-new-tokens", "6", "--out", trace});
    ASSERT_EQ(recorded.code, 0) << recorded.err;
    const Outcome replayed = run({"replay", trace, "--policy", "full", "--out", result});
    ASSERT_EQ(replayed.code, 0) << replayed.err;
    EXPECT_EQ(io::SafetensorsFile::open(result).tensor(kind == "decoder" ? "greedy" : "tokens").size(0), 6);
  }
}

TEST_F(Command, CalibratesAModelAndGeneratesWithItsStatisticsInEitherLayout) {
  std::vector<json> kept;
  for (const std::string layout : {"safetensors", "pt"}) {
    const std::string file = place("statistics." + layout);
    const Outcome made = run({"calibrate", "--model", model(), "--task", "ask", "--length", "96", "--tokens", "300",
                              "--out", file, "--layout", layout, "-o", "json"});
    ASSERT_EQ(made.code, 0) << made.err;
    EXPECT_EQ(made.err, "") << "progress is for terminals";
    const json layers = json::parse(made.out);
    ASSERT_EQ(layers.size(), 3U);
    for (const json& layer : layers) {
      EXPECT_EQ(layer["tokens"], 3 * (96 - 4)) << "whole samples that fit, less what is skipped";
      EXPECT_GT(layer["least"], 0);
      EXPECT_LE(layer["least"], layer["mean"]);
      EXPECT_LE(layer["mean"], layer["most"]);
      EXPECT_LE(layer["most"], 1);
    }
    const std::string policy = write("policy.json",
                                     R"({"policy": "triattention", "budget": 24, "interval": 8, "sink": 2, "recent": 4,
            "scorer": {"calibration": "statistics.)" +
                                         layout + "\"}}");
    for (const std::string& written :
         {policy, "ams-triattention,budget=24,interval=8,window=8,min_segment=4,max_segment=16,calibration=" + file}) {
      const Outcome outcome = run({"generate", "--model", model(), "--task", "ask", "--length", "96", "--policy",
                                   written, "--max-new-tokens", "20", "-o", "json", "--quiet"});
      ASSERT_EQ(outcome.code, 0) << outcome.err;
      kept.push_back(json::parse(outcome.out)["events"]);
      EXPECT_GE(kept.back().size(), 2U);
    }
  }
  EXPECT_EQ(kept[0], kept[2]);
  EXPECT_EQ(kept[1], kept[3]);
  EXPECT_NE(kept[0], kept[1]);
  const Outcome scored =
      run({"eval", "--model", model(), "--task", "ask", "--length", "96", "--samples", "2", "--budgets", "24",
           "--interval", "8", "--policy", "triattention,calibration=" + place("statistics.pt"), "-o", "json"});
  ASSERT_EQ(scored.code, 0) << scored.err;
  EXPECT_GT(json::parse(scored.out)[0]["events"], 0);
}

TEST_F(Command, RefusesCalibrationsThatCannotBeMadeOrDoNotFit) {
  const auto calibrate = [&](const Words& more) {
    Words words{"calibrate", "--model", model(), "--out", place("c")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(calibrate({"--ids", "1,2,3,4"}), "4 of each");
  expect_refused(calibrate({"--ids", "1,2,3,4,999"}), "999");
  expect_refused(calibrate({"--ids-file", place("none.txt")}), "none.txt");
  expect_refused(calibrate({"--task", "ask", "--length", "96", "--tokens", "50"}), "96 tokens");
  expect_refused(calibrate({"--ids", "1,2,3,4,5", "--layout", "gguf"}), "gguf");
  expect_refused({"calibrate", "--model", model(), "--ids", "1,2,3,4,5", "--out", place("no/c")}, "no/c");
  expect_refused({"calibrate", "--model", place("nowhere"), "--ids", "1,2,3,4,5", "--out", place("c")}, "nowhere");
  const auto generate = [&](const std::string& file) {
    return Words{"generate", "--model",  model(),
                 "--ids",    "1,2",      "--max-new-tokens",
                 "3",        "--policy", "triattention,budget=128" + file};
  };
  expect_refused(generate(""), "scorer.calibration");
  expect_refused(generate(",calibration=" + place("none.pt")), "none.pt");
  expect_refused(generate(",calibration=" + write("text.pt", "just a few words of text")), "text.pt");
  expect_refused(generate(",calibration=" + golden("triattention/bf16_batch2/calibration.pt")), "head_dim");
  ASSERT_EQ(
      run({"calibrate", "--model", golden("decoder/qwen2_bias"), "--ids", "1,2,3,4,5", "--out", place("qwen")}).code,
      0);
  expect_refused(generate(",calibration=" + place("qwen")), "inv_freq");
}

TEST_F(Command, WarnsOnStderrOnlyAndNotWhenQuiet) {
  const Words words{"generate", "--model",  model(),
                    "--ids",    "1,2,3",    "--max-new-tokens",
                    "4",        "--policy", "tova,budget=24,interval=8,sink=8,recent=8"};
  const Outcome loud = run(words);
  EXPECT_EQ(loud.code, 0);
  EXPECT_NE(loud.err.find("warning"), std::string::npos);
  EXPECT_EQ(loud.out.find("warning"), std::string::npos);
  Words quiet = words;
  quiet.emplace_back("--quiet");
  EXPECT_EQ(run(quiet).err, "");
}

}  // namespace
}  // namespace kvkeep::cli_test

#endif  // KVKEEP_CLI_PATH
