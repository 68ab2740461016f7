// SPDX-License-Identifier: Apache-2.0
// What the kvkeep command refuses before it does harm: outputs over inputs, bytes that a terminal acts upon, names that
// are nearly right, inputs that are not there, and runs that the machine has no room for.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>
#include <thread>

#include "command_text.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep::cli_guard_test {
namespace {

class CommandGuard : public Command {
 protected:
  void SetUp() override {
    Command::SetUp();
    ::setenv("GOMP_SPINCOUNT", "1000", 1);  // else each run starts twice
    fs::copy(model(), place("model"), fs::copy_options::recursive);
    for (const char* name :
         {"m.gguf", "prompt.txt", "ids.txt", "cal.st", "router.st", "trace.st", "hay.txt", "text.txt"})
      write(name, std::string("1 2 3 ") + name);
    write("policy.json", R"({"policy": "tova", "budget": 64})");
    write("indirect.json", R"({"policy": "triattention", "budget": 64, "scorer": {"calibration": "cal.st"}})");
  }

  // Another name of a file.
  std::string alias(const std::string& file, int kind) {
    const std::string other = place(text("alias", count_++));
    if (kind == 1) fs::create_symlink(fs::absolute(file), other);
    if (kind == 2) fs::create_hard_link(file, other);
    if (kind == 3) return (folder_ / "." / ".." / folder_.filename() / fs::relative(file, folder_)).string();
    return kind == 0 ? file : other;
  }

  int count_ = 0;
};

// ---- Outputs over inputs

struct Io {
  std::string command;
  Words needed;                                       // besides the options under test
  std::vector<std::pair<std::string, Words>> inputs;  // the file that each reads
  Words outputs;
};

// Every output option of every sub-command, over the file of every input option, by one of its names.
TEST_F(CommandGuard, NeverWritesOverWhatItReads) {
  const auto policies = [&](const std::string& option) -> std::vector<std::pair<std::string, Words>> {
    return {{"policy.json", {option, place("policy.json")}},
            {"cal.st", {option, place("indirect.json")}},
            {"cal.st", {option, "triattention,budget=64,calibration=" + place("cal.st")}},
            {"router.st", {option, "asl,budget=64+tova,budget=64,rest=fold,router=" + place("router.st")}}};
  };
  const std::vector<std::pair<std::string, Words>> models{{"model/config.json", {"--model", place("model")}},
                                                          {"model/model.safetensors", {"--model", place("model")}},
                                                          {"m.gguf", {"--model", place("m.gguf")}}},
      prompts{{"prompt.txt", {"--prompt-file", place("prompt.txt")}}, {"ids.txt", {"--ids-file", place("ids.txt")}}};
  const auto joined = [](std::initializer_list<std::vector<std::pair<std::string, Words>>> parts) {
    std::vector<std::pair<std::string, Words>> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const std::vector<Io> all{
      {"generate", {"--ids", "1"}, joined({models, policies("--policy")}), {"--html", "--retention"}},
      {"generate", {}, prompts, {"--html", "--retention"}},
      {"record", {"--ids", "1"}, joined({models, policies("--policy")}), {"--out"}},
      {"record", {}, prompts, {"--out"}},
      {"calibrate", {"--ids", "1"}, models, {"--out"}},
      {"calibrate", {}, prompts, {"--out"}},
      {"eval",
       {},
       joined({models, policies("--policy"), policies("--against"), {{"hay.txt", {"--haystack", place("hay.txt")}}}}),
       {"--samples-out"}},
      {"replay", {place("trace.st")}, joined({{{"trace.st", {}}}, policies("--policy")}), {"--out", "--ranks"}}};
  int kind = 0, tried = 0;
  for (const Io& io : all)
    for (const auto& [file, input] : io.inputs)
      for (const std::string& output : io.outputs) {
        Words words{io.command};
        words.insert(words.end(), io.needed.begin(), io.needed.end());
        words.insert(words.end(), input.begin(), input.end());
        const auto given = [&](const char* option) { return std::ranges::find(words, option) != words.end(); };
        if (io.command != "replay" && !given("--model")) words.insert(words.end(), {"--model", place("model")});
        if (io.command == "replay" && !given("--policy")) words.insert(words.end(), {"--policy", "full"});
        if (io.command == "replay" && output != "--out") words.insert(words.end(), {"--out", place("result")});
        words.insert(words.end(), {output, alias(place(file), kind++ % 4)});
        const std::string before = content(place(file));
        expect_refused(words, output + " names '");
        EXPECT_EQ(content(place(file)), before) << io.command << ' ' << output << ' ' << file;
        ++tried;
      }
  EXPECT_GE(tried, 45);
}

TEST_F(CommandGuard, NeverWritesTwoResultsIntoOneFile) {
  fs::create_symlink("a", place("b"));
  const Words generate{"generate", "--model", place("model"), "--ids", "1"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), generate.begin(), generate.end());
    return more;
  };
  expect_refused(with({"--html", place("a"), "--retention", place("b")}), "two files");
  // stdout leads to a file, too
  EXPECT_EQ(WEXITSTATUS(std::system((std::string(KVKEEP_CLI_PATH) + " generate --model " + place("model") +
                                     " --ids 1 --html " + place("a") + " > " + place("a") + " 2> " + place("err"))
                                        .c_str())),
            2);
  EXPECT_EQ(content(place("err")), "kvkeep: --html and stdout both name '" + place("a") + "'; allowed two files\n");
}

// A trace of a run names its model: that is read as well.
TEST_F(CommandGuard, NeverWritesOverTheModelThatATraceNames) {
  const std::string trace = place("run.st");
  ASSERT_EQ(run({"record", "--model", place("model"), "--ids", "1,2", "--kind", "generate", "--out", trace}).code, 0);
  expect_refused({"replay", trace, "--policy", "full", "--out", place("model/config.json")}, "--out names '");
}

TEST_F(CommandGuard, WritesANewFileIntoTheModelsFolder) {
  const std::string out = place("model/new.safetensors");
  EXPECT_EQ(run({"calibrate", "--model", place("model"), "--ids", "1,2,3,4,5,6", "--out", out}).code, 0);
  EXPECT_TRUE(fs::exists(out));
}

// ---- What reaches a terminal

TEST_F(CommandGuard, ShowsNoControlCharacterOfACommandLine) {
  const auto clean = [](const std::string& shown) {
    for (const unsigned char c : shown) EXPECT_TRUE((c >= 0x20 && c != 0x7F) || c == '\n') << int{c} << " in " << shown;
    EXPECT_EQ(shown.find("\xC2\x9B"), std::string::npos) << shown;
    EXPECT_TRUE(
        nlohmann::json::accept(nlohmann::json(shown).dump(-1, ' ', false, nlohmann::json::error_handler_t::strict)));
  };
  for (const std::string evil : {"\x1b[2J", "\r\nkvkeep: all is fine",
                                 "\xC2\x9B"
                                 "31m",
                                 "\xFF\xFE", "\x7F"}) {
    const std::string name = place("x" + evil);
    for (const Words& words :
         std::vector<Words>{{"x" + evil},
                            {"plan", "--x" + evil},
                            {"plan", "--shape", "q" + evil, "--policy", "full"},
                            {"plan", "--shape", "qwen7b", "--policy", "t" + evil},
                            {"plan", "--shape", "qwen7b", "--policy", "tova,b" + evil + "=1"},
                            {"plan", "--shape", "qwen7b", "--policy", "tova,budget=" + evil},
                            {"plan", "--shape", "qwen7b", "--policy", name + ".json"},
                            {"plan", "--model", name, "--policy", "full"},
                            {"plan", "--shape", "qwen7b", "--policy", "full", "-o", evil},
                            {"policies", evil},
                            {"replay", name, "--policy", "full", "--out", place("r")},
                            {"eval", "--model", model(), "--task", "t" + evil},
                            {"generate", "--model", model(), "--ids", evil},
                            {"generate", "--model", model(), "--ids", "1", "--html", name + "/x"}}) {
      const Outcome outcome = run(words);
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
      clean(outcome.err);
      clean(outcome.out);
    }
    for (const char* format : {"md", "csv", "json"}) {
      const Outcome outcome =
          run({"record", "--model", model(), "--ids", "1,2", "--kind", "prefill", "--out", name, "-o", format});
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      clean(outcome.out);
    }
  }
}

TEST_F(CommandGuard, ShowsNoControlCharacterOfAFile) {
  const std::string evil("x\0\x1b[31m\r\nkvkeep: all is fine", 28);
  testing::GgufParts parts;
  const std::string gguf = write("evil.gguf", parts.text("general.architecture", evil).bytes());
  expect_refused({"generate", "--model", gguf, "--ids", "1"}, "'x\\x00\\x1b[31m\\r\\nkvkeep: all is fine'");
  testing::GgufParts twice;
  twice.text(evil, "a").text(evil, "b");
  expect_refused({"generate", "--model", write("twice.gguf", twice.bytes()), "--ids", "1"}, "x\\x00\\x1b[31m");
  const std::string trace = place("t.st");
  io::write_safetensors(trace, {}, {{"kvkeep_trace", "1"}, {"kind", "e\x1b[31m"}});
  expect_refused({"replay", trace, "--policy", "full", "--out", place("r")}, "e\\x1b[31m");
  write("model/config.json", R"({"model_type": "\u001b[31mllama\u009b"})");
  expect_refused({"generate", "--model", place("model"), "--ids", "1"}, "\\x1b[31mllama");
}

// ---- Names that are nearly right

TEST_F(CommandGuard, NamesWhatIsUnknownFirstAndOffersTheNearest) {
  const Words plan{"plan", "--shape", "qwen7b", "--policy"};
  const auto with = [&](const std::string& policy) {
    Words words = plan;
    words.push_back(policy);
    return words;
  };
  expect_refused(with("tova,budgt=64"), "no option \"budgt\" (did you mean \"budget\"?); allowed");
  const std::string rest = "\"?); kvkeep policies lists all\n";
  expect_refused(with("ams-tva,budget=64"), "no policy \"ams-tva\" (did you mean \"ams-tova" + rest);
  expect_refused(with("TOVA,budget=64"), "no policy \"TOVA\" (did you mean \"tova" + rest);
  expect_refused({"policies", "TOVA"}, "no policy \"TOVA\" (did you mean \"tova" + rest);
  expect_refused({"policies", "tova,budget=64"}, "no policy \"tova,budget=64\" (did you mean \"tova" + rest);
  expect_refused({"eval", "--model", model(), "--task", "chain", "--policy", "tova"},
                 "allowed exactly one of budget, ratio, bytes, or --budgets N,...");
  expect_refused(with("xyzzy,budget=64"), "no policy \"xyzzy\"; kvkeep policies lists all");
  expect_refused(with("tova,budget=64,share=none"), "per_layer_per_head, per_head, union, union_mean");
  expect_refused(with("tova,budget=64,trigger=counters"), "(did you mean \"counter\"?)");
  expect_refused(with("tova,budget=64,rst=fold"), "no option \"rst\" (did you mean \"rest\"?)");
  expect_refused(with(write("p.json", R"({"policy": "tova", "budgt": 64})")), "(did you mean \"budget\"?)");
  expect_refused(with("asl,budgt=64+tova,budget=64"), "(did you mean \"budget\"?)");
  expect_refused({"genrate"}, "no sub-command 'genrate' (did you mean \"generate\"?)");
  expect_refused({"generate", "--model", model(), "--promt", "hi"}, "no option '--promt' (did you mean \"--prompt\"?)");
  expect_refused({"generate", "--modle=x", "--prompt", "hi"}, "no option '--modle' (did you mean \"--model\"?)");
  expect_refused({"generate", "--model", model(), "--task", "nedle"}, "(did you mean \"needle\"?)");
  expect_refused({"eval", "--model", model(), "--task", "aks"}, "(did you mean \"ask\"?)");
  for (const char* part :
       {"--task: there is no task \"nope\"; allowed chain, ask, ", "; over text ruler/niah-single-1, "})
    expect_refused({"eval", "--model", model(), "--task", "nope"}, part);
  expect_refused({"eval", "--model", model(), "--policy", "oracle,budgt=9"}, "(did you mean \"budget\"?)");
  expect_refused({"plan", "--shape", "qwen7b", "--policy", "full", "-o", "jsn"},
                 "'jsn' is not known (did you mean \"json\"?)");
  expect_refused({"policies", "snapvk"}, "(did you mean \"snapkv\"?)");
  expect_refused({"record", "--model", model(), "--ids", "1", "--kind", "prefil", "--out", place("r")},
                 "'prefil' is not known (did you mean \"prefill\"?)");
}

TEST_F(CommandGuard, TakesBlanksBehindTheCommasOfAPolicy) {
  const auto plan = [&](const std::string& policy) {
    return run({"plan", "--shape", "qwen7b", "--batch", "2", "--length", "4096", "-o", "json", "--policy", policy});
  };
  const std::string tight = plan("ams-tova,budget=64,interval=8,recent=4").out;
  EXPECT_NE(tight, "");
  EXPECT_EQ(plan("ams-tova, budget=64,  interval=8, recent=4").out, tight);
  EXPECT_EQ(plan("asl, budget=512, window=16+tova, budget=64").out,
            plan("asl,budget=512,window=16+tova,budget=64").out);
}

TEST_F(CommandGuard, NamesTheOptionWhereATaskCannotBeMade) {
  for (const char* command : {"generate", "eval"})
    expect_refused({command, "--model", model(), "--task", "ask", "--length", "4", "--policy", "full"},
                   "kvkeep: --task ask: length is out of range; given 4; ");
}

TEST_F(CommandGuard, PrintsItsHelpWhenItIsAskedNothing) {
  const Outcome outcome = run({});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(outcome.err.find("generate") != std::string::npos && outcome.err.find("policies") != std::string::npos)
      << outcome.err;
}

// ---- Inputs that are not there

TEST_F(CommandGuard, SaysThatAnInputIsNotThereAFolderOrEmpty) {
  write("empty", "");
  fs::create_directory(place("folder"));
  const Words generate{"generate", "--model", model(), "--ids", "1"};
  const auto each = [&](Words words, const std::string& option, bool folder) {
    const auto with = [&](const std::string& value) {
      Words all = words;
      if (option != "trace") all.push_back(option);
      all.push_back(value);
      return all;
    };
    expect_refused(with(place("nope")), option + ": there is no file '" + place("nope") + "'");
    expect_refused(with(""), option == "trace" ? "is empty (behind '" : option + ": the path is empty");
    expect_refused(with(place("empty")), option + ": '" + place("empty") + "' is empty");
    if (!folder) expect_refused(with(place("folder")), option + ": '" + place("folder") + "' is a folder");
  };
  each({"generate", "--ids", "1"}, "--model", true);
  each({"plan", "--policy", "full"}, "--model", true);
  each({"generate", "--model", model()}, "--prompt-file", false);
  each({"generate", "--model", model()}, "--ids-file", false);
  each({"perplexity", "--model", model()}, "--text", false);
  each({"eval", "--model", model(), "--task", "text/needle"}, "--haystack", false);
  each({"replay", "--policy", "full", "--out", place("r")}, "trace", false);
}

TEST_F(CommandGuard, ReadsAPolicyFromAPipe) {
  const std::string words = " plan --shape qwen7b --policy /dev/stdin > " + place("out");
  EXPECT_EQ(
      std::system(("echo '{\"policy\": \"tova\", \"budget\": 64}' | " + std::string(KVKEEP_CLI_PATH) + words).c_str()),
      0);
  EXPECT_NE(content(place("out")).find("kept"), std::string::npos);
}

// ---- Memory and threads

TEST_F(CommandGuard, RefusesARunThatTheMachineHasNoRoomFor) {
  const Words generate{"generate", "--model", KVKEEP_TEST_MODEL_DIR, "--ids", "1,2,3"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), generate.begin(), generate.end());
    return more;
  };
  expect_refused(with({"--max-new-tokens", "16777216", "--copies", "4096"}),
                 "of memory is left on this machine; allowed fewer tokens");
  expect_refused(with({"--max-new-tokens", "16777216", "--copies", "4096", "--page-size", "16"}), "of memory is left");
  expect_refused({"eval", "--model", KVKEEP_TEST_MODEL_DIR, "--samples", "16777216", "--length", "65536"},
                 "a smaller --samples");
}

TEST_F(CommandGuard, MakesAsManyThreadsAsTheMachineCanUse) {
  const Outcome outcome =
      run({"generate", "--model", model(), "--ids", "1", "--max-new-tokens", "2", "--threads", "4096"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(std::thread::hardware_concurrency() >= 256 || outcome.err.find("given 4096, ") != std::string::npos)
      << outcome.err;
}

}  // namespace
}  // namespace kvkeep::cli_guard_test

#endif  // KVKEEP_CLI_PATH
