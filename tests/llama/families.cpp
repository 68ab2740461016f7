// SPDX-License-Identifier: Apache-2.0
// Which of llama.cpp's architectures kvkeep::llama serves: a model of each, tried.
//   kvkeep_llama_families [--arch REGEX] [--verbose]
// Prints a table; exits 1 if anything is wrong, or fewer than 100 are served where none was chosen.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <regex>
#include <string_view>

#include "family_check.h"

namespace {

using kvkeep::llama::family::Outcome;

/// In a process of its own: llama.cpp ends the program at what it cannot do.
Outcome tried(const std::string& arch, bool verbose) {
  int ends[2];
  if (pipe(ends) != 0) return {"", "wrong", "no pipe"};
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    alarm(500);
    static bool loud = false;
    loud = verbose;
    llama_log_set(
        [](ggml_log_level, const char* text, void*) {
          if (loud) std::fputs(text, stderr);
        },
        nullptr);
    if (!verbose) setenv("GGML_NO_BACKTRACE", "1", 1);
    if (!verbose) static_cast<void>(freopen("/dev/null", "w", stderr));
    const Outcome outcome = kvkeep::llama::family::check(arch);
    const std::string said = outcome.kind + '\n' + outcome.result + '\n' + outcome.why;
    const bool sent = write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    _exit(sent ? 0 : 1);
  }
  close(ends[1]);
  std::string said;
  char piece[4096];
  for (ssize_t got = 0; (got = read(ends[0], piece, sizeof piece)) > 0;)
    said.append(piece, static_cast<std::size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const std::size_t first = said.find('\n'), second = said.find('\n', first + 1);
  if (status != 0 || second == std::string::npos)
    return {"", "wrong", "the process ended with status " + std::to_string(status)};
  return {said.substr(0, first), said.substr(first + 1, second - first - 1), said.substr(second + 1)};
}

}  // namespace

int main(int argc, char** argv) {
  std::string chosen = ".*";
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word(argv[i]);
    if (word == "--verbose") verbose = true;
    if (word == "--arch" && i + 1 < argc) chosen = argv[++i];
  }
  const std::regex wanted(chosen);
  int served = 0, wrong = 0;
  for (const std::string& arch : kvkeep::llama::family::architectures()) {
    if (!std::regex_search(arch, wanted)) continue;
    const Outcome outcome = tried(arch, verbose);
    served += outcome.result == "served" || outcome.result == "union" ? 1 : 0;
    wrong += outcome.result == "wrong" || outcome.result == "not built" ? 1 : 0;
    std::printf("| %s | %s | %s | %s |\n", arch.c_str(), outcome.kind.c_str(), outcome.result.c_str(),
                outcome.why.c_str());
  }
  std::printf("%d served, %d wrong\n", served, wrong);
  return wrong > 0 || (chosen == ".*" && served < 100) ? 1 : 0;
}
