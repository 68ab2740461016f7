// SPDX-License-Identifier: Apache-2.0
// The sub-commands that run no model: what they print where, and how they end.
// A build without the command (KVKEEP_BUILD_CLI=OFF) has none of these tests.

#ifdef KVKEEP_CLI_PATH

#include "command.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/version.h"

namespace kvkeep::cli_test {
namespace {

using nlohmann::json;

class CommandAlone : public Command {};

TEST_F(CommandAlone, ReplaysEventsOfAnEngineAndRefusesWhatCannotBeReplayed) {
  const std::string folder = golden("scorers/"), result = place("kept.safetensors");
  int replayed = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (replayed == 3) break;
    const json about = json::parse(content(entry.path() / "case.json"));
    if (about.value("must_fail", false)) continue;
    const Outcome outcome = run({"replay", (entry.path() / "trace.safetensors").string(), "--policy",
                                 (entry.path() / "policy.json").string(), "--out", result, "-o", "json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(json::parse(outcome.out)["kind"], "event");
    EXPECT_GT(io::SafetensorsFile::open(result).names().size(), 0U);
    ++replayed;
  }
  EXPECT_EQ(replayed, 3);
  fs::remove(result);
  const std::string file = place("t.safetensors");
  io::write_safetensors(file, {}, {{"kvkeep_trace", "1"}, {"kind", "dream"}});
  expect_refused({"replay", file, "--policy", "snapkv,budget=70", "--out", place("r")}, "\"dream\"");
  io::write_safetensors(file, {}, {{"kvkeep_trace", "2"}, {"kind", "event"}});
  expect_refused({"replay", file, "--policy", "full", "--out", place("r")}, "version");
  io::write_safetensors(file, {}, {});
  expect_refused({"replay", file, "--policy", "full", "--out", place("r")}, "kvkeep_trace");
}

TEST_F(CommandAlone, SaysItsVersion) { EXPECT_EQ(run({"--version"}).out, std::string("kvkeep ") + kVersion + "\n"); }

TEST_F(CommandAlone, ListsEveryPolicyWithDefaultsRangesAndSource) {
  const Outcome all = run({"policies"});
  EXPECT_EQ(all.code, 0);
  for (const char* name :
       {"full", "streaming", "tova", "ams-", "given", "threshold-", "Which one?", "expected,rest=fold"})
    EXPECT_NE(all.out.find(name), std::string::npos) << name;
  EXPECT_NE(
      run({"policies", "snapkv"}).out.find("Reads in pieces of a prompt (prefill=pieces): the newest 64 queries\n"),
      std::string::npos);
  EXPECT_NE(run({"policies", "random-attention"}).out.find("held; allowed with protect_prompt=false"),
            std::string::npos);
  const Outcome one = run({"policies", "ams-tova", "-o", "json"});
  const json options = json::parse(one.out);
  const auto budget =
      std::find_if(options.begin(), options.end(), [](const json& o) { return o["option"] == "budget"; });
  ASSERT_NE(budget, options.end());
  for (const char* key : {"default", "allowed", "what", "source"})
    EXPECT_FALSE((*budget)[key].get<std::string>().empty()) << key;
  expect_refused({"policies", "lru"}, "there is no policy \"lru\"; kvkeep policies lists all, and --plugin FILE adds");
  expect_refused({"policies", "tova:budget=96"},
                 "\"tova:budget=96\" (did you mean \"tova\"?); kvkeep policies lists all");
  expect_refused({"policies", "ams-tva,budget=9"}, "(did you mean \"ams-tova\"?); kvkeep policies lists all");
  expect_refused({"policies", "ams-streaming"}, "scorer streaming goes under no allocator");
}

std::size_t widest_row(const std::string& all) {
  std::istringstream lines(all);
  std::size_t widest = 0;
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("|")) widest = std::max(widest, line.size() - 1);  // a terminal ends lines with \r
  return widest;
}

TEST_F(CommandAlone, FitsItsTablesIntoTheTerminal) {
  for (const std::uint16_t columns : {80, 100, 120, 200}) {
    SCOPED_TRACE(columns);
    const std::string all = shown({"policies"}, {.stream = STDOUT_FILENO, .columns = columns});
    EXPECT_LE(widest_row(all), columns) << all;
    EXPECT_GT(widest_row(all), columns / 2) << all;
    EXPECT_NE(all.find("\n| tova "), std::string::npos) << all;
    EXPECT_NE(all.find("threshold-"), std::string::npos) << all;
    EXPECT_LE(widest_row(shown({"policies", "ams-tova"}, {.stream = STDOUT_FILENO, .columns = columns})), columns);
  }
  EXPECT_NE(run({"policies"}).out.find(" | source "), std::string::npos) << "a pipe gets all of it";
}

TEST_F(CommandAlone, WrapsCellsOfWordsOnly) {
  cli::Table table({{"name", "name", false}, {"count", "count"}, {"what", "what", false}});
  table.add({"a-name-that-is-one-word", 123456, "some words and some more"});
  table.add({"b", 7, "word-without-end"});
  EXPECT_EQ(table.markdown(0),
            "| name                    |  count | what                     |\n"
            "|-------------------------|-------:|--------------------------|\n"
            "| a-name-that-is-one-word | 123456 | some words and some more |\n"
            "| b                       |      7 | word-without-end         |\n");
  EXPECT_EQ(table.markdown(51),
            "| name                    |  count | what         |\n"
            "|-------------------------|-------:|--------------|\n"
            "| a-name-that-is-one-word | 123456 | some words   |\n"
            "|                         |        | and some     |\n"
            "|                         |        | more         |\n"
            "| b                       |      7 | word-without |\n"
            "|                         |        | -end         |\n");
  EXPECT_EQ(table.markdown(10), table.markdown(0)) << "it cannot be that narrow";
}

TEST_F(CommandAlone, TellsTheTimeLeftOnceItKnows) {
  for (const double share : {0.0, 1e-6, 0.019})
    EXPECT_EQ(cli::Progress::line(share, 60, "x").find("left"), std::string::npos) << share;
  EXPECT_EQ(cli::Progress::line(0.02, 60, "x"), "[" + std::string(30, '.') + "]   2 %  49:00 left  x");
  EXPECT_EQ(cli::Progress::line(1, 60, "x"), "[" + std::string(30, '#') + "] 100 %  0:00 left  x");
}

TEST_F(CommandAlone, HelpsByItsNameAsByItsOption) {
  EXPECT_EQ(run({"help"}).out, run({"--help"}).out);
  for (const char* command : {"plan", "policies", "replay", "help"})
    EXPECT_EQ(run({"help", command}).out, run({command, "--help"}).out) << command;
  expect_refused({"help", "pln"}, "there is no sub-command 'pln' (did you mean \"plan\"?); allowed ");
}

TEST_F(CommandAlone, FitsItsHelpIntoTheTerminal) {
  for (const std::uint16_t columns : {80, 100, 150})
    for (const Words& words : {Words{"--help"}, Words{"plan", "--help"}}) {
      std::istringstream lines(shown(words, {.stream = STDOUT_FILENO, .columns = columns}));
      std::size_t widest = 0;
      for (std::string line; std::getline(lines, line) && !line.starts_with("Examples:");)
        if (line.starts_with("  ")) widest = std::max(widest, line.size() - 1);  // a terminal ends lines with \r
      EXPECT_LE(widest, columns) << words.front();
      EXPECT_GT(widest, columns / 2) << words.front();
    }
  const std::string help = run({"plan", "--help"}).out;
  EXPECT_NE(help.find("\nModel, exactly one:\n  --model FILE|DIR "), std::string::npos) << help;
  EXPECT_EQ(help.find("[Option Group"), std::string::npos);
  const std::string all = run({"--help"}).out;
  EXPECT_LT(all.find("\n  policies "), all.find("\n  plan "));
  EXPECT_LT(all.find("\n  doctor "), all.find("\n  help "));
}

TEST_F(CommandAlone, WritesItsManual) {
  const std::string page = run({"help", "--man"}).out;
  EXPECT_TRUE(page.starts_with(".TH KVKEEP 1 ")) << page.substr(0, 80);
  for (const char* part :
       {"\n.SH kvkeep plan\n", "\n.SH kvkeep policies\n", "\\fB\\-o,\\-\\-output\\fR md|csv|json [md]",
        "\nExamples:\n  kvkeep plan \\-\\-shape", "\\-\\-model\\fR FILE|DIR"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  for (const char* section : {"\n.SH DESCRIPTION\n", "\n.SH EXIT STATUS\n0 done; 2 the input was refused;"})
    EXPECT_NE(page.find(section), std::string::npos) << section;
  const std::string example = "kvkeep plan \\-\\-shape qwen7b \\-\\-policy ams\\-tova,budget=1024 \\-\\-batch";
  EXPECT_EQ(page.find(example), page.rfind(example)) << "an example stands there twice";
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("."))
      EXPECT_TRUE(line.starts_with(".TH ") || line.starts_with(".SH ") || line == ".TP" || line == ".PP" ||
                  line == ".nf" || line == ".fi")
          << line;
}

TEST_F(CommandAlone, OffersShellsWhatMayStandForAWord) {
  const auto offered = [&](Words words) {
    words.insert(words.begin(), "__complete");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(offered({"pol"}), "policies\n");
  EXPECT_NE(offered({""}).find("plan\n"), std::string::npos);
  EXPECT_EQ(offered({"help", "pla"}), "plan\n");
  EXPECT_EQ(offered({"plan", "--sh"}), "--shape\n");
  EXPECT_EQ(offered({"plan", "-o", ""}), "md\ncsv\njson\n");
  EXPECT_EQ(offered({"plan", "--output", "c"}), "csv\n");
  EXPECT_EQ(offered({"plan", "--output=c"}), "--output=csv\n");
  EXPECT_EQ(offered({"plan", "--output", "=", "c"}), "csv\n") << "as bash takes it apart";
  EXPECT_EQ(offered({"plan", "--dtype", ""}), "f32\nf16\nbf16\n8bit\nq8_0\nq4_0\n");
  EXPECT_EQ(offered({"plan", "--shape", "qwen7"}), "qwen7b\nqwen72b\n");
  EXPECT_EQ(offered({"plan", "--policy", "ams-to"}), "ams-tova\n");
  EXPECT_EQ(offered({"policies", "ams-to"}), "ams-tova\n");
  EXPECT_EQ(offered({"plan", "--policy", "tova,budget=9,inter"}), "tova,budget=9,interval=\n");
  EXPECT_EQ(offered({"plan", "--policy", "asl,budget=9+ams-to"}), "asl,budget=9+ams-tova\n");
  EXPECT_EQ(offered({"plan", "--policy", "tova,share=u"}), "tova,share=union\ntova,share=union_mean\n");
  EXPECT_EQ(offered({"plan", "--policy=tova,share=union_"}), "--policy=tova,share=union_mean\n");
  EXPECT_EQ(offered({"plan", "--policy", "tova,protect_prompt="}),
            "tova,protect_prompt=true\ntova,protect_prompt=false\n");
  EXPECT_EQ(offered({"plan", "--policy", "tova,heads=g"}), "tova,heads=group\n") << "scorer.heads in short";
  EXPECT_EQ(offered({"plan", "--policy", "tova,budget="}), "") << "no words: a number";
  EXPECT_EQ(offered({"plan", "--policy", "tova,share", "=", "u"}), "union\nunion_mean\n") << "as bash takes it apart";
  EXPECT_EQ(offered({"plan", "--policy", "tova,rest", "="}), "drop\nfold\n");
  EXPECT_EQ(offered({"plan", "--policy", "=", "tova,rest", "=", "fold,prefill", "=", "c"}), "cut\n");
  EXPECT_EQ(offered({"plan", "--policy", "tova,budget", "=", "9,inter"}), "9,interval=\n");
  for (const Words& files : {Words{"replay", ""}, Words{"plan", "--model", ""}, Words{"plan", "--length", ""},
                             Words{"plan", "--shape", "qwen7b", ""}, Words{"plan", "--quiet", ""}})
    EXPECT_EQ(offered(files), "") << files.back();
}

#ifdef KVKEEP_TEST_SHARED

TEST_F(CommandAlone, KnowsThePoliciesOfAPluginInEverySubCommand) {
  const std::string plugin = std::string(KVKEEP_TEST_PLUGIN_DIR) + "/libvmax.so";
  const Outcome page = run({"policies", "ams-vmax", "--plugin", plugin});
  EXPECT_EQ(page.code, 0) << page.err;
  EXPECT_NE(page.out.find("| scorer.floor "), std::string::npos) << page.out;
  EXPECT_EQ(run({"--plugin", plugin, "policies", "ams-vmax"}).out, page.out);
  EXPECT_EQ(run({"plan", "--shape", "qwen7b", "--policy", "ams-vmax,budget=1024", "--plugin=" + plugin}).code, 0);
  const std::string event = golden("scorers/knorm_plain/trace.safetensors"), kept = place("kept.safetensors");
  const Outcome replayed = run({"replay", event, "--policy", "ams-vmax,budget=40,floor=0.5", "--out", kept, "--plugin",
                                plugin, "--plugin", plugin, "-o", "json"});
  EXPECT_EQ(replayed.code, 0) << replayed.err;
  EXPECT_EQ(json::parse(replayed.out)["policy"], "ams-vmax");
  EXPECT_NE(run({"doctor", "--quick", "--plugin", plugin}).out.find(plugin), std::string::npos);
  fs::remove(kept);

  expect_refused({"policies", "ams-vmax"}, "\"ams-vmax\"");
  expect_refused({"policies", "--plugin", place("none.so")}, "there is no file");
  expect_refused({"replay", event, "--policy", "vmax,budget=40", "--out", plugin, "--plugin", plugin}, "--plugin");

  ASSERT_EQ(::setenv("KVKEEP_PLUGINS", ("::" + plugin + ":").c_str(), 1), 0);
  const Outcome by_environment = run({"policies", "ams-vmax"});
  ::unsetenv("KVKEEP_PLUGINS");
  EXPECT_EQ(by_environment.out, page.out) << by_environment.err;
}

#endif

TEST_F(CommandAlone, DoctorGivesAVerdict) {
  const Outcome outcome = run({"doctor", "--quick", "-o", "json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const json findings = json::parse(outcome.out);
  EXPECT_EQ(findings.back()["what"], "verdict");
  EXPECT_EQ(findings.back()["fine"], true);
}

TEST_F(CommandAlone, FailsWhereItsHelpCannotBeWritten) {
  for (const char* asked : {"--help", "--version"})
    EXPECT_EQ(
        WEXITSTATUS(std::system((std::string(KVKEEP_CLI_PATH) + " " + asked + " > /dev/full 2> /dev/null").c_str())), 1)
        << asked;
}

TEST_F(CommandAlone, EndsQuietlyWhenNobodyReadsAnyMore) {
  const std::string err = place("err"), code = place("code");
  for (const char* words : {"policies", "--help"}) {
    ASSERT_EQ(std::system(text("{ sleep 0.2; ", KVKEEP_CLI_PATH, " ", words, " 2> ", err, "; echo $? > ", code,
                               "; } | true; while ! test -s ", code, "; do sleep 0.05; done")
                              .c_str()),
              0);
    EXPECT_EQ(content(code), "141\n") << words;
    EXPECT_EQ(content(err), "") << words;
    fs::remove(code);
  }
}

TEST_F(CommandAlone, SaysInPlainWordsThatAnOptionLacksItsValue) {
  expect_refused({"policies", "--plugin"}, "--plugin has no value; allowed one after it");
  expect_refused({"plan", "--shape"}, "--shape has no value; allowed one after it");
  expect_refused({"plan", "-o"}, "--output has no value; allowed one after it");
}

TEST_F(CommandAlone, RefusesEmptyWordsThatNoOptionTakes) {
  expect_refused({"plan", "", "--shape", "llama8b", "--policy", "tova,budget=64"},
                 "word 2 after kvkeep is empty (behind 'plan'); allowed an empty word as the value of an option only");
  expect_refused({"plan", "", "-o", "json"}, "word 2 after kvkeep is empty");
  expect_refused({"plan", "-o", "json", ""}, "word 4 after kvkeep is empty (behind 'json')");
  expect_refused({"plan", "--", ""}, "word 3 after kvkeep is empty (behind '--')");
  expect_refused({""}, "word 1 after kvkeep is empty;");
  expect_refused({"policies", ""}, "word 2 after kvkeep is empty");
  expect_refused({"plan", "--shpe", "", "--policy", "tova,budget=16"}, "there is no option '--shpe'");
  expect_refused({"plan", "--shape", "", "--policy", "tova,budget=16"}, "--shape: ");
  expect_refused({"plan", "--shape=", "--policy", "tova,budget=16"}, "--shape has no value behind its =; allowed one");
  expect_refused({"plan", "--shape", "llama8b", "--policy", ""}, "policy: the option is empty");
}

TEST_F(CommandAlone, NamesAllThatIsMissingAndTheOptionForTheVersion) {
  expect_refused({"plan"}, "--policy and one of --model, --shape are required; see kvkeep plan --help");
  expect_refused({"plan", "--policy", "full"}, "kvkeep: one of --model, --shape is required");
  expect_refused({"plan", "--shape", "llama8b"}, "kvkeep: --policy is required");
  expect_refused({"version"}, "(did you mean \"--version\"?); allowed ");
  for (const char* option : {"-v", "-V"}) expect_refused({option}, "(did you mean \"--version\"?); see kvkeep --help");
}

TEST_F(CommandAlone, PlansMemoryByArithmetic) {
  const auto plan = [&](Words more) {
    Words words{"plan", "--shape", "28:28:4:128", "-o", "json", "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return json::parse(outcome.out);
  };
  // docs/start/budget-and-trigger.md: 57,344 bytes a token; budget 1024 and interval 512 need 84 MiB at the peak and 56
  // MiB behind an event, a full cache of 32,768 tokens 1,792.
  constexpr std::int64_t kMiB = 1 << 20;
  const json ams = plan({"--policy", "ams-tova,budget=1024,interval=512", "--length", "32768", "--batch", "3"});
  EXPECT_EQ(ams["token_bytes"], 57344);
  EXPECT_EQ(ams["sequence"]["full_bytes"], 1792 * kMiB);
  EXPECT_EQ(ams["sequence"]["peak_bytes"], 84 * kMiB);
  EXPECT_EQ(ams["sequence"]["kept_bytes"], 56 * kMiB);
  EXPECT_EQ(ams["total"]["peak_bytes"], 3 * 84 * kMiB);
  EXPECT_EQ(ams["first_event"], 1536);
  EXPECT_EQ(ams["events"], (32768 - 1024) / 512);
  ASSERT_EQ(ams["layers"].size(), 28U);
  EXPECT_EQ(ams["layers"][27]["kept"]["slots_most"], 1024);
  EXPECT_EQ(ams["layers"][27]["peak"]["slots_most"], 1536);
  constexpr std::int64_t kRows = 28 * 4, kPeak = kRows * 1536;
  EXPECT_EQ(ams["own"]["positions"], 4 * kPeak);
  EXPECT_EQ(ams["own"]["credit"], 4 * kPeak);
  EXPECT_EQ(ams["own"]["event"], 12 * kPeak);
  EXPECT_EQ(ams["own"]["queries"], std::int64_t{28} * (32 + 32) * 28 * 128 * 2) << "window and what can be rolled back";
  EXPECT_EQ(ams["sequences_that_fit"], 3 * 1792 * kMiB / (84 * kMiB + ams["own"]["sum"].get<std::int64_t>()));

  const json ratio = plan({"--policy", "streaming,ratio=0.75,interval=100", "--length", "1000", "--prompt", "600",
                           "--dtype", "f32", "--page-size", "64"});
  // 600 tokens are above 150 + 100 at the first decoded one: 601 * 0.25 = 150 stay. Then 151 * ... grows by a quarter
  // slot a token: due at 0.25 s + 100.
  EXPECT_EQ(ratio["first_event"], 601);
  EXPECT_EQ(ratio["layers"][0]["peak"]["slots_most"], 601);
  EXPECT_EQ(ratio["layers"][0]["peak"]["bytes"], 640 * 4 * 256 * 4) << "ten pages of 64";
  EXPECT_EQ(ratio["layers"][0]["kept"]["slots_most"], ratio["last_event"].get<int>() / 4);
  EXPECT_EQ(ratio["own"]["credit"], 0);
  EXPECT_EQ(ratio["own"]["queries"], 0);

  const json bytes = plan({"--policy", "tova,bytes=5734399,interval=16", "--length", "500", "--page-size", "1"});
  EXPECT_EQ(bytes["layers"][0]["kept"]["slots_most"], 99) << "one byte short of 100 slots";
  const json cut = plan({"--policy", "tova,budget=64,prefill=only", "--length", "500", "--prompt", "200"});
  EXPECT_EQ(cut["events"], 1);
  EXPECT_EQ(cut["first_event"], 200);
  EXPECT_EQ(cut["layers"][0]["peak"]["slots_most"], 64 + 300);
  const json pieces = plan({"--policy", "tova,budget=64,interval=8,prefill=pieces", "--length", "1000", "--prompt",
                            "990", "--piece", "100"});
  EXPECT_EQ(pieces["events"], 10 + 1) << "nine pieces of 100, one of 90, and one of eight tokens";
  EXPECT_EQ(pieces["first_event"], 100);
  EXPECT_EQ(pieces["layers"][0]["peak"]["slots_most"], 64 + 100);
  const json at_once = plan({"--policy", "tova,budget=64,prefill=pieces", "--length", "1000", "--prompt", "990"});
  EXPECT_EQ(at_once["layers"][0]["peak"]["slots_most"], 990) << "one piece of 2048";
  expect_refused({"plan", "--shape", "qwen7b", "--policy", "tova,budget=64,prefill=cut", "--piece", "100"},
                 "--piece: 100 tokens, but tova cuts no prompt before it has ended; allowed with prefill=pieces");
  // Blocks of 32 numbers with an f16 scale: 34 and 18 bytes.
  for (const auto& [dtype, block] : {std::pair("q8_0", 34), {"q4_0", 18}}) {
    const json blocks = plan({"--policy", "ams-tova,budget=1024,interval=512", "--dtype", dtype});
    EXPECT_EQ(blocks["token_bytes"], 28 * 4 * 2 * (128 / 32) * block);
    EXPECT_EQ(blocks["sequence"]["kept_bytes"], 28 * 4 * 1024 * 2 * (128 / 32) * block);
    EXPECT_EQ(blocks["own"]["queries"], ams["own"]["queries"]) << "queries are not quantised";
    const json limited = plan({"--policy", text("tova,interval=16,bytes=", 28 * 4 * 2 * (128 / 32) * block * 100),
                               "--length", "500", "--page-size", "1", "--dtype", dtype});
    EXPECT_EQ(limited["layers"][0]["kept"]["slots_most"], 100);
    const json folded = plan({"--policy", "tova,budget=64,rest=fold", "--length", "500", "--dtype", dtype});
    EXPECT_EQ(folded["token_bytes"], 28 * 4 * 2 * (128 / 32) * block);
  }
  const json full = plan({"--policy", "full", "--batch", "7", "--length", "33"});
  EXPECT_EQ(full["sequence"]["peak_bytes"], 48 * 57344);
  EXPECT_EQ(full["sequences_that_fit"], 7);
  EXPECT_TRUE(full["first_event"].is_null());
}

TEST_F(CommandAlone, PlansNoMoreThanTheWindowOfASlidingLayer) {
  const std::filesystem::path folder = place("sliding");
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
             "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 1024, "use_sliding_window": true,
             "sliding_window": 64, "max_window_layers": 3})";
  const Outcome outcome =
      run({"plan", "--model", folder, "--policy", "full", "--length", "500", "-o", "json", "--quiet"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json plan = json::parse(outcome.out);
  EXPECT_EQ(plan["layers"][2]["full"]["slots_most"], 500);
  EXPECT_EQ(plan["layers"][3]["full"]["slots_most"], 64);
}

TEST_F(CommandAlone, PlansForAModelByItsNameAndFromTheConfigOfAnyDecoder) {
  // Bytes of a token in full layers (bf16), layers, full ones, slots of the first layer at 5000 tokens.
  struct Known {
    const char* name;
    std::int64_t token_bytes;
    std::size_t layers, full;
    int slots;
  };
  const auto plan = [&](const Words& model) {
    Words words{"plan", "--policy", "full", "--length", "5000", "-o", "json"};
    words.insert(words.end(), model.begin(), model.end());
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return json::parse(outcome.out);
  };
  const auto agrees = [&](const json& planned, const Known& known) {
    EXPECT_EQ(planned["token_bytes"], known.token_bytes) << known.name;
    EXPECT_EQ(planned["layers"].size(), known.layers) << known.name;
    EXPECT_EQ(std::ranges::count(planned["layers"], "full", [](const json& l) { return l["kind"]; }), known.full)
        << known.name;
    EXPECT_EQ(planned["layers"][0]["full"]["slots_most"], known.slots) << known.name;
  };
  for (const Known& known : std::vector<Known>{{"llama8b", 131072, 32, 32, 5000},
                                               {"llama70b", 327680, 80, 80, 5000},
                                               {"qwen3-32b", 262144, 64, 64, 5000},
                                               {"qwen3-30b-a3b", 98304, 48, 48, 5000},
                                               {"gemma3-27b", 81920, 62, 10, 1024},
                                               {"gemma2-9b", 172032, 42, 21, 4096}})
    agrees(plan({"--shape", known.name}), known);

  const std::vector<std::pair<Known, const char*>> configs{
      {{"a Mistral whose layers all slide", 0, 2, 0, 4096},
       R"({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
           "hidden_size": 512, "sliding_window": 4096})"},
      {{"GPT-2's names", 2 * 2 * 2 * 768, 2, 2, 5000},
       R"({"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 768})"},
      {{"a Gemma 3 that sees and says little", 2 * 4 * 256 * 2 * 2, 12, 2, 1024},
       R"({"model_type": "gemma3", "vision_config": {"num_hidden_layers": 27},
           "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 1024}})"},
      {{"layers with a state", 2 * 2 * 128 * 2, 3, 1, 0},
       R"({"model_type": "qwen3_next", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
           "layer_types": ["linear_attention", "full_attention", "linear_attention"]})"},
      {{"quantised weights, which no plan reads", 2 * 2 * 2 * 64 * 2, 2, 2, 5000},
       R"({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
           "hidden_size": 512, "quantization_config": {"bits": 4}, "sliding_window": null})"}};
  for (const auto& [known, config] : configs) {
    fs::create_directories(place("shape"));
    const std::string file = place("shape/config.json");
    std::ofstream(file, std::ios::trunc) << config;
    for (const Words& words : {Words{"--shape", file}, Words{"--shape", place("shape")}, Words{"--model", file}})
      agrees(plan(words), known);
  }
}

TEST_F(CommandAlone, RefusesByNameCachesThatAPlanCannotCount) {
  const std::string file = place("config.json");
  const auto refused = [&](const std::string& config, const std::string& why) {
    std::ofstream(file, std::ios::trunc) << config;
    expect_refused({"plan", "--policy", "full", "--shape", file}, why);
  };
  const std::string begin = R"({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, )";
  refused(begin + R"("kv_lora_rank": 512})", "kv_lora_rank says latent attention");
  refused(begin + R"("attn_layer_period": 8})", "attn_layer_period");
  refused(begin + R"("layer_types": ["full_attention", "dream"]})", "layer 1 is of type \"dream\"");
  refused(begin + R"("layer_types": ["full_attention"]})", "must list 2 layers");
  refused(begin + R"("layer_types": ["full_attention", "sliding_attention"]})",
          "sliding_attention with a sliding_window");
  refused(begin + R"("num_key_value_heads": [1, 2]})", "num_key_value_heads is [1,2]");
  refused(begin + R"("num_key_value_heads": 3})", "do not divide evenly");
  refused(R"({"num_attention_heads": 4, "hidden_size": 64})", "there is no num_hidden_layers");
  refused("[1]", "is not a JSON object");
  refused("GGUF and no more", "config.json");
  expect_refused({"plan", "--policy", "full", "--shape", "lama70b"}, "(did you mean \"llama70b\"?)");
}

TEST_F(CommandAlone, ShowsPlansAsTables) {
  const Words words{"plan", "--shape", "qwen7b", "--policy", "ams-tova,budget=1024", "--batch", "16"};
  const Outcome outcome = run(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("| 0-27 "), std::string::npos) << "layers that are alike take one row";
  EXPECT_NE(outcome.out.find("batch of 16"), std::string::npos);
  Words csv = words;
  csv.insert(csv.end(), {"-o", "csv"});
  const std::string table = run(csv).out;
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + 28 + 3);
  EXPECT_NE(table.find("\nfits,,,"), std::string::npos);
}

TEST_F(CommandAlone, RefusesPlansOfWhatIsNoShape) {
  const Words rest{"--policy", "tova,budget=64"};
  const auto with = [&](Words words) {
    words.insert(words.begin(), "plan");
    words.insert(words.end(), rest.begin(), rest.end());
    return words;
  };
  expect_refused(with({}), "--model");
  expect_refused(with({"--shape", "qwen7b", "--model", model()}), "--shape");
  for (const char* shape :
       {"gpt", "28:28:4", "28:28:4:128:128", "28:28:0:128", "28:28:-4:128", "28:28:4:128x", "28::4:128"})
    expect_refused(with({"--shape", shape}), shape);
  expect_refused(with({"--shape", "2:6:4:64"}), "query heads");
  expect_refused(with({"--shape", "2:8:4:63"}), "head size");
  expect_refused(with({"--shape", "qwen7b", "--length", "10", "--prompt", "11"}), "--prompt");
  expect_refused(with({"--shape", "qwen7b", "--dtype", "f64"}), "f64");
  expect_refused(
      with({"--shape", "2:8:4:80", "--dtype", "q4_0"}),
      "--dtype: q4_0 stores blocks of 32 numbers; the head size is 80; allowed a multiple of 32, or another");
  expect_refused(with({"--shape", "qwen7b", "--page-size", "0"}), "page-size");
  expect_refused(with({"--model", place("nowhere")}), "nowhere");
  expect_refused({"plan", "--shape", "qwen7b", "--policy", "lru"}, "lru");
  expect_refused({"plan", "--shape", "qwen7b"}, "--policy");
}

}  // namespace
}  // namespace kvkeep::cli_test

#endif  // KVKEEP_CLI_PATH
