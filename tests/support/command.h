// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kvkeep command as people and scripts start it: a folder of its own for each test, and what it printed.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
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

/// A terminal that is one of the command's streams. What else it writes goes nowhere.
struct Terminal {
  int stream = STDERR_FILENO;
  std::uint16_t columns = 0;
  const char* kind = "xterm";  ///< TERM
  const char* no_color = "";   ///< NO_COLOR
  std::string input = "/dev/null";
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

  // What a terminal shows of a run that is to succeed.
  std::string shown(const Words& words, const Terminal& on = {}) {
    const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_TRUE(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0);
    const int other_end = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
    EXPECT_GE(other_end, 0);
    const winsize size{.ws_row = 24, .ws_col = on.columns, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(::ioctl(other_end, TIOCSWINSZ, &size), 0);
    std::vector<char*> argv{const_cast<char*>(KVKEEP_CLI_PATH)};
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(::open(on.input.c_str(), O_RDONLY), STDIN_FILENO);
      for (const int stream : {STDOUT_FILENO, STDERR_FILENO})
        ::dup2(stream == on.stream ? other_end : ::open("/dev/null", O_WRONLY), stream);
      ::close(terminal);
      ::setenv("TERM", on.kind, 1);
      ::setenv("NO_COLOR", on.no_color, 1);
      ::execv(KVKEEP_CLI_PATH, argv.data());
      ::_exit(99);
    }
    ::close(other_end);
    std::string all;
    char some[4096];
    for (ssize_t n = 0; (n = ::read(terminal, some, sizeof some)) > 0;) all.append(some, static_cast<std::size_t>(n));
    ::close(terminal);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << all;
    return all;
  }

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
