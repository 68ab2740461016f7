// SPDX-License-Identifier: Apache-2.0
// kvkeep chat: turns from a pipe, what the cache holds after each, and Ctrl-C.

#ifdef KVKEEP_CLI_PATH

#include <fcntl.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "command_text.h"

namespace kvkeep::cli_chat_test {
namespace {

class CommandChat : public CommandText {
 protected:
  Words chat(const Words& more) const {
    Words words{"chat", "--model", place("model")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  // Starts the command with a descriptor as its stdin.
  pid_t start_reading(int input, const Words& words) {
    const int before = ::dup(STDIN_FILENO);
    ::dup2(input, STDIN_FILENO);
    const pid_t child = start(words);
    ::dup2(before, STDIN_FILENO);
    ::close(before);
    return child;
  }

  Outcome told(const std::string& lines, const Words& words) {
    const int input = ::open(write("said.txt", lines).c_str(), O_RDONLY | O_CLOEXEC);
    const pid_t child = start_reading(input, words);
    ::close(input);
    return finish(child);
  }
};

std::size_t lines_of(const std::string& text) { return static_cast<std::size_t>(std::ranges::count(text, '\n')); }

TEST_F(CommandChat, AnswersEachLineAndSaysWhatTheCacheHolds) {
  const Outcome outcome =
      told("the cat\n\n  \nand the hat\n",
           chat({"--max-new-tokens", "12", "--policy", "tova,budget=16,interval=4,sink=1,recent=4", "--threads", "1"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(lines_of(outcome.err), 2U) << "empty lines are no turns: " << outcome.err;
  EXPECT_NE(outcome.err.find(" slots a row after "), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("cut off (--max-new-tokens)"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out.find("> "), std::string::npos) << "there is no terminal to prompt";
  EXPECT_EQ(outcome.err.find('\033'), std::string::npos);
  const std::string first =
      answered({"generate", "--model", place("model"), "--chat", "--prompt", "the cat", "--max-new-tokens", "12",
                "--stop", "--policy", "tova,budget=16,interval=4,sink=1,recent=4"})["text"];
  EXPECT_TRUE(outcome.out.starts_with(escaped(first, "\n\t") + "\n")) << outcome.out << "\nand not " << first;
  EXPECT_GT(outcome.out.size(), first.size() + 5) << "the second answer";
}

TEST_F(CommandChat, ColoursWhatItSaysUnlessItIsToldNotTo) {
  const std::string input = write("said.txt", "the cat\n");
  const Words words = chat({"--max-new-tokens", "4"});
  EXPECT_NE(shown(words, {.input = input}).find("\033[2mkvkeep: "), std::string::npos);
  for (const Terminal& plain : {Terminal{.no_color = "1", .input = input}, Terminal{.kind = "dumb", .input = input}}) {
    const std::string all = shown(words, plain);
    EXPECT_NE(all.find("kvkeep: "), std::string::npos) << all;
    EXPECT_EQ(all.find('\033'), std::string::npos) << all;
  }
}

TEST_F(CommandChat, DependsOnWhatWasSaidBefore) {
  const Words words = chat({"--max-new-tokens", "16", "--quiet"});
  const Outcome one = told("the cat\nand the hat\n", words), other = told("a rat sat\nand the hat\n", words),
                again = told("the cat\nand the hat\n", words);
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(one.err, "") << "it is quiet";
  EXPECT_EQ(one.out, again.out);
  EXPECT_NE(one.out, other.out);
}

TEST_F(CommandChat, RefusesWhatCannotBeTalkedTo) {
  expect_refused({"chat", "--model", model()}, "tokenizer");
  expect_refused(chat({"--policy", "lru"}), "lru");
  const Outcome narrow = told("the cat\n", chat({"--context", "8"}));
  EXPECT_EQ(narrow.code, 2);
  EXPECT_NE(narrow.err.find("and the cache has room for 8; allowed less, a larger --context"), std::string::npos)
      << narrow.err;
  const Outcome full = told("the cat\nand\n", chat({"--context", "110", "--max-new-tokens", "500"}));
  EXPECT_EQ(full.code, 2);
  EXPECT_NE(full.err.find("; the cache is full (--context)"), std::string::npos) << full.err;
  fs::remove(place("model/chat_template.jinja"));
  expect_refused(chat({}), "no chat template");
}

TEST_F(CommandChat, EndsTheAnswerAtCtrlCAndGoesOn) {
  int both[2];
  ASSERT_EQ(::pipe2(both, O_CLOEXEC), 0);
  const pid_t child =
      start_reading(both[0], chat({"--max-new-tokens", "100000", "--context", "100000", "--threads", "1"}));
  ::close(both[0]);
  const auto say = [&](const std::string& line) {
    ASSERT_EQ(::write(both[1], line.data(), line.size()), static_cast<ssize_t>(line.size()));
  };
  const auto wait_for_more_than = [&](std::size_t bytes) {
    const auto written = [&] { return content(folder_.string() + ".out").size(); };
    for (int i = 0; i < 6000 && written() <= bytes; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_GT(written(), bytes) << content(folder_.string() + ".err");
  };
  for (int turn = 0; turn < 2; ++turn) {
    const std::string before = content(folder_.string() + ".out");
    say("the cat\n");
    wait_for_more_than(before.size() + 20);
    ASSERT_EQ(::kill(child, SIGINT), 0);
    for (int i = 0; i < 6000 && lines_of(content(folder_.string() + ".err")) <= static_cast<std::size_t>(turn); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::close(both[1]);
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(lines_of(outcome.err), 2U) << outcome.err;
  std::size_t interrupted = 0;
  for (std::size_t at = 0; (at = outcome.err.find("; the answer was interrupted\n", at)) != std::string::npos; ++at)
    ++interrupted;
  EXPECT_EQ(interrupted, 2U) << outcome.err;
}

TEST_F(CommandChat, EndsAtCtrlCWhereNoAnswerIsWritten) {
  int both[2];
  ASSERT_EQ(::pipe2(both, O_CLOEXEC), 0);
  const pid_t child = start_reading(both[0], chat({"--max-new-tokens", "4", "--threads", "1"}));
  ::close(both[0]);
  ASSERT_EQ(::write(both[1], "the cat\n", 8), 8);
  for (int i = 0; i < 6000 && lines_of(content(folder_.string() + ".err")) == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_EQ(::kill(child, SIGINT), 0);
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_TRUE(outcome.err.ends_with("\nkvkeep: stopped\n")) << "it writes no files: " << outcome.err;
  ::close(both[1]);
}

}  // namespace
}  // namespace kvkeep::cli_chat_test

#endif  // KVKEEP_CLI_PATH
