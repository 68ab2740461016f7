// SPDX-License-Identifier: Apache-2.0
// What the kvkeep command leaves behind: at Ctrl-C, on a full disk, and where a file is none.

#ifdef KVKEEP_CLI_PATH

#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "command.h"

namespace kvkeep::cli_files_test {
namespace {

using nlohmann::json;

// ---- Ctrl-C ---------------------------------------------------------------------------------------------------------

// Loading LibTorch takes a while on a busy machine: before it is done, the signal would find no handler.
void wait_until_it_catches(pid_t child, int signal) {
  for (int i = 0; i < 600; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
    const std::string status = content("/proc/" + std::to_string(child) + "/status");
    const std::size_t caught = status.find("SigCgt:");
    if (caught != std::string::npos && (std::stoull(status.substr(caught + 7), nullptr, 16) >> (signal - 1) & 1U) != 0)
      return;
  }
}

TEST_F(Command, EndsAtCtrlCWith130AndLeavesNoFile) {
  const pid_t child = start({"generate", "--model", model(), "--ids", "1,2,3", "--policy", "tova,budget=64,interval=32",
                             "--max-new-tokens", "10000000", "--retention", place("r.json")});
  wait_until_it_catches(child, SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ASSERT_EQ(::kill(child, SIGINT), 0);
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(outcome.err.ends_with("\nkvkeep: stopped; no half-written file is left\n")) << outcome.err;
  EXPECT_TRUE(fs::is_empty(folder_));
}

// A job in the background of a script: an earlier version ended at a Ctrl-C that was not meant for it.
TEST_F(Command, LeavesASignalIgnoredThatItsParentIgnores) {
  const pid_t child = start({"generate", "--model", model(), "--ids", "1,2,3", "--max-new-tokens", "10000000"}, SIGINT);
  wait_until_it_catches(child, SIGTERM);
  ASSERT_EQ(::kill(child, SIGINT), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(::waitpid(child, nullptr, WNOHANG), 0) << "it goes on";
  ASSERT_EQ(::kill(child, SIGTERM), 0);
  EXPECT_EQ(finish(child).code, 128 + SIGTERM);
}

// An earlier version was ended by the signal (SIGXFSZ) and left what it had written so far.
TEST_F(Command, SaysThatAFileMayNotGrowAndLeavesNothing) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const std::string out = place("p.safetensors");
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none{0, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &none);
    ::execl(KVKEEP_CLI_PATH, KVKEEP_CLI_PATH, "record", "--model", model().c_str(), "--ids", "1,2,3", "--kind",
            "prefill", "--out", out.c_str(), "--quiet", nullptr);
    ::_exit(99);
  }
  EXPECT_EQ(finish(child).code, 1);
  EXPECT_TRUE(fs::is_empty(folder_));
}

// ---- What is no file, or no name of one

// In an earlier version these ended with exit status 1 and an error of a library below.
TEST_F(Command, RefusesWhatCannotBeTheNameOfAFile) {
  const std::string longest(300, 'x');
  const Words generate{"generate", "--model", model(), "--ids", "1,2,3", "--max-new-tokens", "2"};
  const auto with = [&](const std::string& option, const std::string& value) {
    Words words = generate;
    words.insert(words.end(), {option, value});
    return words;
  };
  expect_refused(with("--policy", "{\"policy\":\"tova\"," + longest + "}"), "this is JSON");
  expect_refused(with("--retention", place(longest)), "too long");
  fs::create_symlink("loop", folder_ / "loop");
  expect_refused(with("--policy", place("loop")), "there is no policy");
  expect_refused(with("--retention", place("loop")), "loop");
  ASSERT_EQ(::mkfifo(place("pipe").c_str(), 0600), 0);
  expect_refused({"replay", place("pipe"), "--policy", "full", "--out", place("out")}, "regular file");
}

// The shell makes the file first; an earlier version took it for one of the model's.
TEST_F(Command, MayBeRedirectedToANewFileInTheModelsFolder) {
  fs::copy(model(), place("model"));
  const std::string tokens =
      KVKEEP_CLI_PATH + (" generate --ids 1,2,3 --max-new-tokens 2 --quiet --model " + place("model"));
  ASSERT_EQ(std::system((tokens + " > " + place("model/out.txt")).c_str()), 0);
  EXPECT_NE(content(place("model/out.txt")), "");
  const std::string config = content(place("model/config.json"));
  EXPECT_EQ(WEXITSTATUS(std::system((tokens + " >> " + place("model/config.json 2> /dev/null")).c_str())), 2);
  EXPECT_EQ(content(place("model/config.json")), config);
}

// An earlier version said so after the whole run.
TEST_F(Command, SaysBeforeTheRunThatTheResultCannotBeWritten) {
  fs::create_symlink("/proc/none", folder_ / "nowhere");
  for (const char* command : {"record", "calibrate"})
    expect_refused({command, "--model", place("no model"), "--ids", "1,2,3", "--out", place("nowhere")}, "nowhere");
}

TEST_F(Command, TakesFileNamesThatAreNotUtf8) {
  const std::string trace = place("bad\xff.safetensors");
  const Outcome made =
      run({"record", "--model", model(), "--ids", "1,2,3", "--kind", "prefill", "--out", trace, "-o", "json"});
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_TRUE(json::accept(made.out)) << made.out;
  const std::string copied = place("model\xff");
  fs::copy(model(), copied);
  expect_refused({"record", "--model", copied, "--ids", "1,2,3", "--kind", "generate", "--out", place("run")},
                 "not UTF-8");
}

}  // namespace
}  // namespace kvkeep::cli_files_test

#endif  // KVKEEP_CLI_PATH
