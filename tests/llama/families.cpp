// SPDX-License-Identifier: Apache-2.0
// Which of llama.cpp's architectures kvkeep::llama serves: a model of each, tried.
//   kvkeep_llama_families [--arch REGEX] [--verbose]
//   kvkeep_llama_families --file-in VARIABLE     the same of the model file that an environment variable names
//   kvkeep_llama_families --write ARCH FILE
// Prints a table; exits 1 if anything is wrong, or fewer than 100 are served where none was chosen; 77 if the variable
// is not set. Or writes the model of an architecture, whose tokens are characters then, for tests/llama/server_test.py.

#include <sys/wait.h>
#include <unistd.h>

#include <gguf.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "family_check.h"

namespace {

using kvkeep::llama::family::Outcome;

/// In a process of its own: llama.cpp ends the program at what it cannot do.
Outcome tried(const std::function<Outcome()>& check, bool verbose, unsigned seconds = 500) {
  int ends[2];
  if (pipe(ends) != 0) return {"", "wrong", "no pipe"};
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    alarm(seconds);
    static bool loud = false;
    loud = verbose;
    llama_log_set(
        [](ggml_log_level, const char* text, void*) {
          if (loud) std::fputs(text, stderr);
        },
        nullptr);
    if (!verbose) setenv("GGML_NO_BACKTRACE", "1", 1);
    if (!verbose) static_cast<void>(freopen("/dev/null", "w", stderr));
    const Outcome outcome = check();
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

/// The model of an architecture as a file that servers read: its tokens are printable characters. False: there is none.
bool write_file(const std::string& arch, const std::string& path) {
  namespace family = kvkeep::llama::family;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  const family::Model model = family::make(arch);
  if (model == nullptr) return false;
  llama_model_save_to_file(model.get(), path.c_str());
  ggml_context* numbers = nullptr;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> saved(
      gguf_init_from_file(path.c_str(), {.no_alloc = false, .ctx = &numbers}), gguf_free),
      file(gguf_init_empty(), gguf_free);
  if (saved == nullptr) return false;
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors(numbers, ggml_free);
  gguf_set_kv(file.get(), saved.get());
  std::vector<std::string> tokens;
  for (char c = '!'; c <= '~'; ++c) tokens.emplace_back(1, c);
  for (const char* one : {"\u0120", "\u010a", "<|end|>"}) tokens.emplace_back(one);  // space, end of line, end
  const auto end = static_cast<std::uint32_t>(tokens.size() - 1);
  while (tokens.size() < static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model.get()))))
    tokens.push_back("<" + std::to_string(tokens.size()) + ">");
  std::vector<const char*> names;
  for (const std::string& token : tokens) names.push_back(token.c_str());
  std::vector<std::int32_t> types(tokens.size(), LLAMA_TOKEN_TYPE_NORMAL);
  types[end] = LLAMA_TOKEN_TYPE_CONTROL;
  const char* merge = "t h";
  gguf_set_val_str(file.get(), "tokenizer.ggml.model", "gpt2");
  gguf_set_val_str(file.get(), "tokenizer.ggml.pre", "gpt-2");
  gguf_set_arr_str(file.get(), "tokenizer.ggml.tokens", names.data(), names.size());
  gguf_set_arr_data(file.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_arr_str(file.get(), "tokenizer.ggml.merges", &merge, 1);
  for (const char* key : {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"})
    gguf_set_val_u32(file.get(), key, end);
  gguf_set_val_bool(file.get(), "tokenizer.ggml.add_bos_token", false);
  for (std::int64_t i = 0; i < gguf_get_n_tensors(saved.get()); ++i)
    gguf_add_tensor(file.get(), ggml_get_tensor(numbers, gguf_get_tensor_name(saved.get(), i)));
  return gguf_write_to_file(file.get(), path.c_str(), false);
}

}  // namespace

int main(int argc, char** argv) {
  std::string chosen = ".*", variable;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word(argv[i]);
    if (word == "--verbose") verbose = true;
    if (word == "--arch" && i + 1 < argc) chosen = argv[++i];
    if (word == "--file-in" && i + 1 < argc) variable = argv[++i];
    if (word == "--write" && i + 2 < argc) return write_file(argv[i + 1], argv[i + 2]) ? 0 : 1;
  }
  int served = 0, wrong = 0;
  const auto print = [&](const std::string& name, const Outcome& outcome) {
    served += outcome.result == "served" || outcome.result == "union" ? 1 : 0;
    wrong += outcome.result == "wrong" || outcome.result == "not built" ? 1 : 0;
    std::printf("| %s | %s | %s | %s |\n", name.c_str(), outcome.kind.c_str(), outcome.result.c_str(),
                outcome.why.c_str());
  };
  if (!variable.empty()) {
    const char* file = std::getenv(variable.c_str());
    if (file == nullptr) {
      std::printf("skipped: %s is not set; it names a model file\n", variable.c_str());
      return 77;
    }
    print(file, tried([file] { return kvkeep::llama::family::check_file(file); }, verbose, 1500));
    return served == 1 ? 0 : 1;
  }
  const std::regex wanted(chosen);
  for (const std::string& arch : kvkeep::llama::family::architectures())
    if (std::regex_search(arch, wanted))
      print(arch, tried([&arch] { return kvkeep::llama::family::check(arch); }, verbose));
  std::printf("%d served, %d wrong\n", served, wrong);
  return wrong > 0 || (chosen == ".*" && served < 100) ? 1 : 0;
}
