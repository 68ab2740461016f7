// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kvkeep command as people and scripts start it: a folder of its own for each test, and what it printed.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "temporary_folder.h"

namespace kvkeep {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

inline std::string content(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Outcome {
  int code = -1;
  std::string out, err;
};

class Command : public testing::TemporaryFolder {
 protected:
  [[nodiscard]] static std::string golden(const std::string& path) {
    return (fs::path(KVKEEP_TEST_GOLDEN_DIR) / path).string();
  }
  [[nodiscard]] static std::string model() { return golden("decoder/llama_gqa"); }
  [[nodiscard]] std::string place(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return place(name);
  }

  // Starts the command with stdout and stderr in files beside the folder under test. It ignores one signal or none,
  // whatever we inherited: under nohup a test would wait for an end that never comes.
  pid_t start(const Words& words, int ignored = 0) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    for (const int each : {SIGHUP, SIGINT, SIGTERM}) ::signal(each, each == ignored ? SIG_IGN : SIG_DFL);
    const auto into = [](const std::string& file, int descriptor) {
      ::dup2(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), descriptor);
    };
    into(folder_.string() + ".out", STDOUT_FILENO);
    into(folder_.string() + ".err", STDERR_FILENO);
    std::vector<char*> argv{const_cast<char*>(KVKEEP_CLI_PATH)};
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execv(KVKEEP_CLI_PATH, argv.data());
    ::_exit(99);
  }

  Outcome finish(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), content(folder_.string() + ".out"),
                    content(folder_.string() + ".err")};
    fs::remove(folder_.string() + ".out");
    fs::remove(folder_.string() + ".err");
    return outcome;
  }

  Outcome run(const Words& words) { return finish(start(words)); }

  // Refused: exit status 2, one sentence on stderr that holds `names`, nothing on stdout, nothing written.
  void expect_refused(const Words& words, const std::string& names) {
    std::size_t before = 0, after = 0;
    for ([[maybe_unused]] const auto& entry : fs::recursive_directory_iterator(folder_)) ++before;
    const Outcome outcome = run(words);
    for ([[maybe_unused]] const auto& entry : fs::recursive_directory_iterator(folder_)) ++after;
    SCOPED_TRACE(outcome.err);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_TRUE(outcome.err.starts_with("kvkeep: "));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << "one sentence, one line";
    EXPECT_GE(std::count(outcome.err.begin(), outcome.err.end(), ' '), 5);
    EXPECT_NE(outcome.err.find(names), std::string::npos) << "should name " << names;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(before, after) << "something was written";
  }
};

}  // namespace kvkeep
