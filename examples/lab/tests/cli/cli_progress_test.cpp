// SPDX-License-Identifier: Apache-2.0
// The bar of the kvkeep command: on a terminal, and only there.

#ifdef KVKEEP_CLI_PATH

#include <stdlib.h>

#include "command_text.h"

namespace kvkeep::cli_progress_test {
namespace {

class CommandProgress : public CommandText {
 protected:
  void SetUp() override {
    CommandText::SetUp();
    std::string prose;
    for (int i = 0; i < 100; ++i) prose += text("the cat sat on the mat ", i, ". ");
    const std::string said = write("prose.txt", prose), from = place("model");
    commands_ = {
        {"full cache generates",
         {"fidelity", "--model", from, "--prompt", "the cat", "--new-tokens", "8", "--policy",
          "tova,budget=8,interval=2,recent=2"}},
        {"texts 1-1 of 1",
         {"perplexity", "--model", from, "--text", said, "--length", "40", "--texts", "1", "--policy", "full"}},
        {"tokens", {"calibrate", "--model", from, "--ids", "1,2,3,4,5,6,7,8", "--out", place("out.safetensors")}},
        {"tokens until the event",
         {"record", "--model", from, "--ids", "1,2,3", "--event", "4", "--out", place("event.safetensors")}},
        {"layers",
         {"record", "--model", from, "--ids", "1,2,3", "--kind", "prefill", "--out", place("prefill.safetensors")}},
        {"full runs to compare with",
         {"eval", "--model", model(), "--samples", "1", "--length", "80", "--policy", "full", "--diagnostics"}},
        {"prompts, ruler/niah-single-1",
         {"eval", "--model", from, "--samples", "1", "--length", "600", "--policy", "full", "--task",
          "ruler/niah-single-1"}}};
  }

  // What a terminal gets that is the command's stderr.
  std::string shown(const Words& words) {
    const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_TRUE(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0);
    const int other_end = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
    EXPECT_GE(other_end, 0);
    std::vector<char*> argv{const_cast<char*>(KVKEEP_CLI_PATH)};
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(::open("/dev/null", O_WRONLY), STDOUT_FILENO);
      ::dup2(other_end, STDERR_FILENO);
      ::close(terminal);
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

  std::vector<std::pair<std::string, Words>> commands_;  // the label of a bar, and who shows it
};

TEST_F(CommandProgress, ShowsABarOnATerminalAndTakesItAway) {
  const std::string clear = "\r\033[K";
  for (const auto& [label, words] : commands_) {
    SCOPED_TRACE(label);
    const std::string all = shown(words);
    EXPECT_NE(all.find(clear + "["), std::string::npos) << all;
    EXPECT_NE(all.find(label), std::string::npos) << all;
    const std::size_t bar = all.rfind(" %  ");
    ASSERT_NE(bar, std::string::npos);
    EXPECT_NE(all.find(clear, bar), std::string::npos) << "the bar stays: " << all;
  }
}

TEST_F(CommandProgress, IsSilentElsewhere) {
  for (auto& [label, words] : commands_) {
    SCOPED_TRACE(label);
    EXPECT_EQ(run(words).err.find('\r'), std::string::npos) << "a pipe";
    words.push_back("--quiet");
    EXPECT_EQ(shown(words), "");
  }
}

}  // namespace
}  // namespace kvkeep::cli_progress_test

#endif  // KVKEEP_CLI_PATH
